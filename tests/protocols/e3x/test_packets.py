"""Packets are encoded and parsed, and illegal ones are refused."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.e3x import Packet, encode_head, encode_packet, join_packet, parse_head, parse_packet, split_packet
from tests.protocols.e3x._helpers import raw

U32 = st.integers(1, 2**32 - 1)
TEXTS = st.text(max_size=40)  # no lone surrogates: they are not text

PACKETS = st.builds(
    Packet,
    U32,
    type=st.none() | TEXTS.filter(bool),
    seq=st.none() | U32,
    end=st.booleans(),
    err=st.none() | TEXTS,
    frag=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=100),
) | st.builds(Packet, U32, ack=st.integers(0, 2**32 - 1), miss=st.lists(U32, min_size=1, max_size=40))


@given(packet=PACKETS)
def test_a_packet_is_read_as_it_was_written(packet: Packet) -> None:
    assert parse_packet(encode_packet(packet)) == packet


@given(data=st.binary(max_size=64), cut=st.integers(0, 64))
@pytest.mark.requirement("R-21")
def test_any_bytes_are_a_packet_or_a_protocol_error(data: bytes, cut: int) -> None:
    good = raw(b"body", c=1, seq=5, ack=3, miss=[1, 20])
    for candidate in (data, join_packet(data), good[:cut], good[:cut] + data):
        with contextlib.suppress(RemoteProtocolError):
            parse_packet(candidate)


@given(text=st.text(max_size=60))
@pytest.mark.requirement("R-21", "R-24")
def test_any_text_is_a_head_or_a_protocol_error(text: str) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_head(text.encode(errors="surrogatepass"))


@pytest.mark.parametrize("data", ["", "00", "0001", "000a7b226122", "ffff7b7d"])
def test_a_length_that_goes_beyond_the_packet_is_refused(data: str) -> None:
    with pytest.raises(RemoteProtocolError):
        split_packet(bytes.fromhex(data))


HEADS = {
    "not JSON": b'{"c":1,}',
    "an array": b'["c",1,2]',
    "a number": b"1234567",
    "two objects": b'{"c":1}{"c":2}',
    "a repeated key": b'{"c":1,"c":3}',
    "a repeated key deep inside": b'{"c":1,"x":[{"a":1,"a":1}]}',
    "NaN": b'{"c":1,"x":NaN}',
    "Infinity": b'{"c":1,"x":-Infinity}',
    "a BOM": b'\xef\xbb\xbf{"c":1}',
    "no UTF-8": b'{"c":1,"x":"\xff"}',
    "a lone surrogate": b'{"c":1,"x":"\\ud800"}',
    "a lone surrogate as a key": b'{"c":1,"\\udfff":1}',
    "a surrogate in UTF-8": b'{"c":1,"x":"\xed\xa0\x80"}',
    "a control character": b'{"c":1,"x":"\x01"}',
    "a number of 5,000 digits": b'{"c":1,"x":' + b"9" * 5000 + b"}",
    "a leading zero": b'{"c":01}',
    "33 arrays": b'{"c":1,"x":' + b"[" * 32 + b"]" * 32 + b"}",
    "60,000 arrays": b'{"c":1,"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "60,000 arrays that never end": b'{"c":1,"x":' + b"[" * 60_000,
    "10,000 objects": b'{"c":1,"x":' + b'{"x":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
}


@pytest.mark.requirement("R-21", "R-24")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_json_is_taken_strictly(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_head(head)


@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(
    "head",
    [
        b'{"c":1,"x":' + b"[" * 31 + b"]" * 31 + b"}",
        b'{"c":1,"x":"' + b"[{" * 1000 + b'"}',
        b'{"c":1,"x":"\\"' + b"[{" * 1000 + b'"}',
        b'{"c":1,"x":"\\ud83d\\ude00"}',
        b' {"c" : 1 , "x" : 1e999 }\n',
    ],
)
def test_what_only_looks_dangerous_is_taken(head: bytes) -> None:
    assert parse_head(head)["c"] == 1


FIELDS: list[dict[str, object]] = [
    {},
    {"c": 0},
    {"c": -1},
    {"c": 2**32},
    {"c": 1.0},
    {"c": "1"},
    {"c": True},
    {"c": None},
    {"c": [1]},
    {"c": 1, "type": 1},
    {"c": 1, "type": ""},
    {"c": 1, "type": None},
    {"c": 1, "seq": 2**32},
    {"c": 1, "seq": None},
    {"c": 1, "ack": -1},
    {"c": 1, "ack": 2**32},
    {"c": 1, "ack": 1.5},
    {"c": 1, "ack": "1"},
    {"c": 1, "ack": True},
    {"c": 1, "ack": 10**4000},
    {"c": 1, "end": 1},
    {"c": 1, "end": "true"},
    {"c": 1, "end": None},
    {"c": 1, "err": True},
    {"c": 1, "err": {"text": "x"}},
    {"c": 1, "frag": -1},
    {"c": 1, "frag": 2**32},
    {"c": 1, "frag": True},
    {"c": 1, "frag": 0.5},
]


@pytest.mark.requirement("R-21", "R-24")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_field_of_the_wrong_type_or_size_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_packet(raw(**fields))


@pytest.mark.clause("e3x-S02", "e3x-S05")
@pytest.mark.parametrize("seq", [0, -1, 1.5, 1.0, "1", True, [1], {}, 2**32, 10**30])
def test_a_seq_that_is_no_positive_integer_is_refused(seq: object) -> None:
    with pytest.raises(RemoteProtocolError) as info:
        parse_packet(raw(c=1, seq=seq))
    assert info.value.rule == "e3x-S02"


@pytest.mark.requirement("R-23")
def test_unknown_keys_are_ignored() -> None:
    assert parse_packet(raw(b"x", c=1, seq=2, colour="red", deep={"a": [1]})) == Packet(1, seq=2, body=b"x")


@pytest.mark.clause("e3x-A04")
def test_an_ack_of_0_is_only_the_base_of_a_miss() -> None:
    assert parse_packet(raw(c=1, ack=0)).ack is None
    assert parse_packet(raw(c=1, ack=0, miss=[5])).ack == 0


@pytest.mark.clause("e3x-M03")
@pytest.mark.parametrize("miss", [[], [0, 3], [-1], ["a"], [True], [1.0], [2**32], {}, None, 5, "12"])
def test_a_miss_without_a_meaning_is_left_out_and_the_ack_beside_it_kept(miss: object) -> None:
    packet = parse_packet(raw(c=1, ack=7, miss=miss))
    assert packet.ack == 7
    assert packet.miss is None
    assert packet.miss_fault


@pytest.mark.requirement("R-18")
def test_the_largest_heads_cost_no_more_than_their_bytes() -> None:
    """Parse 64 KiB of the worst kinds, each in a short time."""
    worst = [
        b'{"c":1,"x":' + b"[" * 60_000,
        b'{"c":1,"ack":5,"miss":[' + b"1," * 30_000 + b"1]}",
        b'{"c":1,"x":"' + b"\\u0041" * 10_000 + b'"}',
        b'{"c":1,"x":' + b"9" * 4300 + b"}",
        b'{"c":1,' + b",".join(b'"%d":1' % number for number in range(7000)) + b"}",
    ]
    began = time.process_time()
    for head in worst:
        with contextlib.suppress(RemoteProtocolError):
            parse_packet(join_packet(head))
    assert time.process_time() - began < 0.5


@pytest.mark.requirement("R-71")
def test_a_head_without_keys_is_written_as_no_byte_and_read_as_no_keys() -> None:
    """Was: e3x: a head without keys was written as two brackets, which its reader takes for a binary head, and not as
    no byte.
    """
    assert join_packet(encode_head({})) == b"\x00\x00"
    assert parse_head(split_packet(b"\x00\x00")[0]) == {}


@pytest.mark.parametrize("head", [b"1", b"{}", b"[]", b"null", b'{"":1}', b"\x1a"], ids=repr)
def test_a_head_that_is_too_short_for_a_key_and_a_value_is_binary_even_if_it_is_json(head: bytes) -> None:
    assert parse_head(head) == {}
    with pytest.raises(RemoteProtocolError, match="without c"):
        parse_packet(join_packet(head, b"body"))


def test_a_head_that_would_be_read_as_binary_is_not_written() -> None:
    with pytest.raises(ValueError, match="6 bytes would be read as binary"):
        encode_head({"": 1})


@given(
    channel=U32,
    seq=st.none() | U32,
    end=st.booleans(),
    frag=st.integers(0, 2**32 - 1),
    ack=st.none() | U32,
    window=st.none() | U32,
)
def test_a_head_that_muxkit_writes_is_read_like_the_same_head_of_another_json_encoder(
    channel: int, seq: int | None, end: bool, frag: int, ack: int | None, window: int | None
) -> None:
    miss = None if window is None or ack is None else [window]
    written = encode_packet(Packet(channel, seq=seq, end=end, frag=frag, ack=ack, miss=miss, body=b"body"))
    head, body = split_packet(written)
    respelled = json.dumps(json.loads(head)).encode()  # with spaces, so that the JSON parser reads it
    assert parse_packet(join_packet(respelled, body)) == parse_packet(written)
