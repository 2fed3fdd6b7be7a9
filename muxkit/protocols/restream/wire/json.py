"""What does a line of JSON say, taken strictly? One value, or one error that says what is wrong with it."""

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

MOST_DEPTH: Final = 32  # objects and arrays inside one another

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
# It matches to the end where a string has none, so that no text makes it start over and over.
_STRINGS: Final = re.compile(rb'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
_UP_AND_DOWN: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one deeper, one less deep
_NO_BRACKETS: Final = bytes(code for code in range(256) if code not in b"[]{}")


def parse_object(line: bytes) -> dict[str, Json]:
    """The object that a line holds. UTF-8, depth, duplicate keys, numbers and surrogates are all judged."""
    value = parse_json(line)
    if type(value) is not dict:
        raise _violation(f"a message has to be a JSON object, this is {_kind(value)}")
    return value


def parse_json(line: bytes) -> Json:
    """The value that a line holds; raises `RemoteProtocolError` and nothing else.

    The decoder by itself passes over bad UTF-8 in what it skips, runs out of stack on deep nesting and keeps the
    last of two equal keys, so these three are looked at here.
    """
    if not line.isascii():
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _violation(f"byte {error.start} of the line is not UTF-8", rule="restream-F04") from None
    if _is_too_deep(line):
        raise _violation(f"more than {MOST_DEPTH} objects and arrays inside one another")
    try:
        value: Json = _decode(line)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _violation(f"not JSON: {error}") from None
    colons = line.count(b":")
    # More colons than keys: they stand in strings, or two keys of one object are the same.
    if colons and colons != (keys := _keys(value)) and _STRINGS.sub(b"", line).count(b":") != keys:
        raise _violation("an object has the same key twice")
    return value


def encode_line(value: Json) -> bytes:
    """Compact JSON in UTF-8 with one line feed, at the end; raises `LocalProtocolError` for what JSON cannot say."""
    try:
        line = _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"this has no form in JSON: {error}") from None
    if _is_too_deep(line):
        raise LocalProtocolError(f"more than {MOST_DEPTH} objects and arrays inside one another")
    if b"null" in line:
        _refuse_not_finite(value)  # which the encoder writes as null
    return line + b"\n"


def _is_too_deep(line: bytes) -> bool:
    """True also for some lines that are no JSON at all; the decoder never gets deeper than what is counted here."""
    if line.count(b"[") + line.count(b"{") <= MOST_DEPTH:
        return False
    brackets = _STRINGS.sub(b"", line).translate(_UP_AND_DOWN, _NO_BRACKETS)
    return max(accumulate(array("b", brackets)), default=0) > MOST_DEPTH


def _keys(value: Json) -> int:
    """How many keys all objects in there have."""
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
