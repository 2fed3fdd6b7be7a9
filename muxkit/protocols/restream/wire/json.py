"""Strict JSON: a line becomes one value, or one error that says what is wrong with it."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, Union

import msgspec

from muxkit._errors import LocalProtocolError, RemoteProtocolError

Json: TypeAlias = Union[bool, int, float, str, Sequence["Json"], Mapping[str, "Json"], None]  # noqa: UP007
JsonObject: TypeAlias = Mapping[str, Json]

MAX_DEPTH: Final = 32  # nested objects and arrays

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
# An unterminated string matches to the end, so that the time is linear in every text.
_STRINGS: Final = re.compile(rb'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
_DEPTH_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1 and -1
_NO_BRACKETS: Final = bytes(code for code in range(256) if code not in b"[]{}")


def parse_object(line: bytes) -> dict[str, Json]:
    """Return the object of a line, after checks of UTF-8, depth, duplicate keys, numbers and surrogates."""
    value = parse_json(line)
    if type(value) is not dict:
        raise _violation(f"a message has to be a JSON object, this is {_kind(value)}")
    return value


def parse_json(line: bytes) -> Json:
    """Return the value of a line; raises `RemoteProtocolError` and nothing else.

    The decoder itself ignores bad UTF-8 in what it skips, exhausts the stack on deep nesting and keeps the last of two
    equal keys, so these three are checked here.
    """
    if not line.isascii():
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _violation(f"byte {error.start} of the line is not UTF-8", rule="restream-F04") from None
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_too_deep(line):
        raise _violation(f"more than {MAX_DEPTH} objects and arrays inside one another")
    try:
        value: Json = _decode(line)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _violation(f"not JSON: {error}") from None
    colons = line.count(b":")
    # More colons than keys: some are in strings, or two keys of one object are equal.
    if colons and colons != (keys := _keys(value)) and _STRINGS.sub(b"", line).count(b":") != keys:
        raise _violation("an object has the same key twice")
    return value


def encode_line(value: Json) -> bytes:
    """Return a value as a line of compact JSON; raises `LocalProtocolError` if it has no form in JSON."""
    try:
        line = _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"this has no form in JSON: {error}") from None
    check_depth(line)
    if b"null" in line:
        _refuse_not_finite(value)  # NaN and infinities, which the encoder writes as null
    return line + b"\n"


def encode_number(number: float) -> bytes:
    """Return a finite number as JSON."""
    return _encode(number)


def check_depth(text: bytes, *, around: int = 0) -> None:
    """Raise `LocalProtocolError` if valid JSON is nested more deeply than a peer would accept.

    Args:
        text: The JSON.
        around: The number of objects and arrays that will be around it in its line.
    """
    most = MAX_DEPTH - around
    if text.count(b"[") + text.count(b"{") > most and _is_too_deep(text, most):
        raise LocalProtocolError(f"more than {MAX_DEPTH} objects and arrays inside one another")


def _is_too_deep(text: bytes, most: int = MAX_DEPTH) -> bool:
    """Return True if the nesting is too deep, also for some invalid JSON; the decoder never exceeds this count."""
    brackets = _STRINGS.sub(b"", text).translate(_DEPTH_STEPS, _NO_BRACKETS)
    return max(accumulate(array("b", brackets)), default=0) > most


def _keys(value: Json) -> int:
    """Return the number of keys of all objects in a value."""
    if type(value) is dict:
        count = len(value)
        for member in value.values():
            if type(member) is dict or type(member) is list:
                count += _keys(member)
        return count
    if type(value) is list:
        return sum(_keys(member) for member in value if type(member) is dict or type(member) is list)
    return 0


def _refuse_not_finite(value: Json) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise LocalProtocolError(f"this has no form in JSON: the number {value}")
    elif isinstance(value, Mapping):
        for member in value.values():
            _refuse_not_finite(member)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for member in value:
            _refuse_not_finite(member)


def _kind(value: Json) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _violation(what: str, rule: str = "restream-F05") -> RemoteProtocolError:
    return RemoteProtocolError(what, rule=rule)
