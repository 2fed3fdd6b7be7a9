"""A line of JSON: what is accepted, what is refused, and that no other error is raised."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.wire.json import MAX_DEPTH, encode_line, parse_json, parse_object

if TYPE_CHECKING:
    from muxkit.protocols.restream import Json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)  # fmt: skip
TEXT = "".join(chr(code) for code in [*range(0x20), 0x22, 0x5C, 0x7F, 0xE9, 0x2028, 0xFEFF, 0x1F600])

REFUSED = {
    "nothing": b"",
    "only a space": b" ",
    "a carriage return": b"\r",
    "no JSON": b"nope",
    "two values": b"{} {}",
    "a comma too many": b'{"a":1,}',
    "a comma too many in an array": b"[1,]",
    "an object that does not end": b'{"a":1',
    "a string that does not end": b'{"a":"b',
    "a key that is no string": b"{1:2}",
    "single quotes": b"{'a':1}",
    "a comment": b"{}//x",
    "NaN": b'{"a":NaN}',
    "infinity": b'{"a":Infinity}',
    "minus infinity": b'{"a":-Infinity}',
    "a number beyond a float": b'{"a":1e999}',
    "a plus sign": b'{"a":+1}',
    "a leading zero": b'{"a":01}',
    "a point without digits": b'{"a":1.}',
    "digits after nothing": b'{"a":.5}',
    "hexadecimal": b'{"a":0x10}',
    "an integer of 5,000 digits": b'{"a":' + b"1" * 5000 + b"}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a wrong byte in a string": b'{"a":"\xff"}',
    "a wrong byte in a key": b'{"\xff":1}',
    "a wrong byte outside": b'{"a":1}\xff',
    "a wrong byte deep in an unknown field": b'{"zzz":[{"y":["\xc3\x28"]}]}',
    "an overlong form": b'{"a":"\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"a":"\xed\xa0\x80"}',
    "a lone high surrogate": b'{"a":"\\ud800"}',
    "a lone high surrogate before a letter": b'{"a":"\\ud800x"}',
    "a lone low surrogate": b'{"a":"\\udc00"}',
    "a surrogate in a key": b'{"\\ud800":1}',
    "a control character": b'{"a":"\x01"}',
    "a tab in a string": b'{"a":"\t"}',
    "an unknown escape": b'{"a":"\\x41"}',
    "a no-break space outside": b"{}\xc2\xa0",
    "a zero byte": b"{}\x00",
    "a key twice": b'{"a":1,"a":1}',
    "a key twice, once escaped": b'{"a":1,"\\u0061":2}',
    "a key twice in an unknown field": b'{"zzz":{"b":1,"b":2}}',
    "a key twice in an array": b'{"zzz":[1,[{"b":1,"c":2,"b":3}]]}',
    "a key twice beside colons in strings": b'{"a:":":","b":":::","a:":1}',
    "a key twice whose first value was an object": b'{"a":{"b":1,"c":2},"a":{}}',
    "nesting that is too deep": b"[" * 33 + b"]" * 33,
    "objects that are too deep": b'{"a":' * 33 + b"1" + b"}" * 33,
    "nesting far too deep": b"[" * 30_000 + b"]" * 30_000,
    "nesting without an end": b"[" * 60_000,
    "nesting behind a broken string": b'"\\"' + b"[" * 60_000,
    "nesting of an unknown field": b'{"zzz":' + b'[{"a":' * 20 + b"1" + b"}]" * 20 + b"}",
}

TAKEN: dict[str, tuple[bytes, Json]] = {
    "nothing in it": (b"{}", {}),
    "space around": (b' \t{ "a" : 1 }\r', {"a": 1}),
    "colons in strings": (b'{"a:":"::","b":{"c":":"}}', {"a:": "::", "b": {"c": ":"}}),
    "brackets in strings": (b'{"a":"' + b"[" * 100 + b'"}', {"a": "[" * 100}),
    "quotes and brackets in strings": (b'{"a":"\\"[[[\\\\","b":"' + b"{" * 40 + b'"}', {"a": '"[[[\\', "b": "{" * 40}),
    "the same key in two objects": (b'{"a":{"k":1},"b":{"k":1}}', {"a": {"k": 1}, "b": {"k": 1}}),
    "a pair of surrogates": (b'{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}),
    "a byte order mark in a string": (b'{"a":"\xef\xbb\xbf"}', {"a": "\ufeff"}),
    "an integer of 70 bits": (b'{"a":1180591620717411303424}', {"a": 2**70}),
    "an integer of 4,000 digits": (b'{"a":' + b"1" * 4000 + b"}", {"a": int("1" * 4000)}),
    "as deep as can be": (b"[" * 32 + b"]" * 32, json.loads("[" * 32 + "]" * 32)),
    "many brackets that are not deep": (b"[" + b"[{}]," * 1000 + b"1]", [*([{}],) * 1000, 1]),
    "text in UTF-8": ('{"é":"漢字"}'.encode(), {"é": "漢字"}),
}


@pytest.mark.clause("restream-F04", "restream-F05")
@pytest.mark.requirement("R-21", "R-24")
@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_a_line_that_is_not_strictly_json_is_refused(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_json(line)


@pytest.mark.clause("restream-F03")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(("line", "value"), TAKEN.values(), ids=TAKEN)
def test_a_line_that_is_strictly_json_is_taken(line: bytes, value: Json) -> None:
    assert parse_json(line) == value


@pytest.mark.clause("restream-F05")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("line", [b"[]", b"5", b"1.5", b"null", b"true", b'"{}"'])
def test_json_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="object"):
        parse_object(line)


@pytest.mark.requirement("R-24")
def test_types_are_exact() -> None:
    value = parse_object(b'{"a":1,"b":1.0,"c":1e0,"d":true,"e":"1"}')
    assert [type(member) for member in value.values()] == [int, float, float, bool, str]


@pytest.mark.clause("restream-F01", "restream-F02", "restream-F03", "restream-I02", "restream-I03")
@given(VALUES)
def test_what_is_written_is_one_line_and_is_read_as_it_was(value: Json) -> None:
    line = encode_line(value)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert parse_json(line[:-1]) == value
    assert json.loads(line) == value


@given(VALUES)
def test_what_another_implementation_writes_is_read_as_it_was(value: Json) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()) == value


@pytest.mark.requirement("R-21", "R-24")
@given(st.binary(max_size=60) | st.text('{}[]":,\\u0d8ae1-. \n\x00é', max_size=60).map(str.encode))
def test_no_line_brings_any_other_error(line: bytes) -> None:
    """The standard library, made strict, accepts the same lines."""
    try:
        value = parse_json(line)
    except RemoteProtocolError:
        assert not _is_strictly_json(line)
    else:
        assert json.loads(line) == value
        assert _is_strictly_json(line)


def _is_strictly_json(line: bytes) -> bool:
    def no_constant(name: str) -> None:
        raise ValueError(name)

    def no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("twins")
        return dict(pairs)

    try:
        value = json.loads(line.decode(), parse_constant=no_constant, object_pairs_hook=no_twins)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


@pytest.mark.clause("restream-F02", "restream-F03")
def test_text_is_escaped_where_it_has_to_be() -> None:
    assert encode_line({"error": "a\nb"}) == b'{"error":"a\\nb"}\n'
    assert encode_line("é") == b'"\xc3\xa9"\n'
    assert parse_json(encode_line(TEXT)[:-1]) == TEXT


@pytest.mark.parametrize(
    "value",
    [float("nan"), {"a": [float("inf")]}, {"a": {"b": -float("inf")}, "c": None}, "\ud800", {"\udc00": 1}, object()],
    ids=["nan", "infinity", "minus infinity", "surrogate", "surrogate key", "object"],
)
def test_what_json_cannot_say_is_not_written(value: Json) -> None:
    with pytest.raises(LocalProtocolError):
        encode_line(value)


def test_a_null_is_written_and_is_no_lost_number() -> None:
    assert encode_line({"a": [None, 1.5, "null"]}) == b'{"a":[null,1.5,"null"]}\n'


def test_nothing_is_written_that_would_be_too_deep_to_read() -> None:
    value: Json = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert parse_json(encode_line(value)[:-1]) == value
    with pytest.raises(LocalProtocolError, match="32"):
        encode_line([value])
    for _ in range(10_000):
        value = [value]
    with pytest.raises(LocalProtocolError):
        encode_line(value)


HARD = {
    "quotes": b'"' * 65_000,
    "escaped quotes": b'"' + b'\\"' * 32_000,
    "escaped quotes and an escape": b'"' + b'\\"' * 32_000 + b"\\",
    "escaped quotes and nesting": b'"' + b'\\"' * 16_000 + b"\\" + b"[" * 32_000,
    "open brackets": b"[" * 65_000,
    "open objects": b'{"a":' * 13_000,
    "flat brackets": b"[" + b"[]," * 21_000 + b"0]",
    "deep and wide": b"[" + (b"[" * 30 + b"]" * 30 + b",") * 1000 + b"0]",
    "colons": b'{"a":"' + b":" * 65_000 + b'"}',
    "keys": b"{" + b",".join(b'"%d":0' % number for number in range(7000)) + b"}",
    "keys with colons": b"{" + b",".join(b'"%d:":0' % number for number in range(6000)) + b"}",
    "escapes": b'{"a":"' + b"\\u00e9" * 10_800 + b'"}',
    "digits": b'{"a":' + b"9" * 65_000 + b"}",
    "a long fraction": b'{"a":0.' + b"9" * 65_000 + b"}",
}


@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("line", HARD.values(), ids=HARD)
def test_the_time_for_a_line_grows_with_its_length_only(line: bytes) -> None:
    """The worst 64 KiB take a fraction of a second; in quadratic time they would take seconds."""
    best = 9.0
    for _ in range(3):
        begun = time.perf_counter()
        with contextlib.suppress(RemoteProtocolError):
            parse_json(line)
        best = min(best, time.perf_counter() - begun)
    assert best < 0.1
