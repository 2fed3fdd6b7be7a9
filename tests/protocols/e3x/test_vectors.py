"""Every row of the collected vectors gives what its `expect` says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.e3x import (
    Dechunker,
    Packet,
    encode_chunks,
    encode_head,
    encode_miss,
    encode_packet,
    join_packet,
    parse_head,
    parse_packet,
    split_packet,
)
from tests.protocols import _vectors as vectors
from tests.protocols.e3x._helpers import acks, fed, listener, opened, sent

if TYPE_CHECKING:
    from tests.protocols._vectors import Row


def check_written(row: Row) -> None:
    head, body = row["head"], str(row["body"] or "").encode()
    if isinstance(head, dict):
        encoded = encode_head(head)
    else:
        encoded = b"" if head is None else bytes.fromhex(str(head).removeprefix("hex:"))
    packet = join_packet(encoded, body)
    assert packet == vectors.data_of(row)
    assert split_packet(packet) == (encoded, body)
    if isinstance(head, dict):
        assert parse_head(encoded) == head


def check_read(row: Row) -> None:
    data, result = vectors.data_of(row), row["result"]
    if result == "undefined":
        with pytest.raises(RemoteProtocolError):
            parse_head(split_packet(data)[0])
        return
    assert result.keys() == {"json", "head", "body"}
    head, body = split_packet(data)
    assert parse_head(head) == result["json"]
    assert head.hex() == result["head"]
    assert body == str(result["body"]).encode()


def check_miss(row: Row) -> None:
    """Set up what the settings `ack`, `buffered` and `capacity` tell: received packets, and how many more fit."""
    settings = vectors.settings_of(row)
    ack, buffered, capacity = (json.loads(settings[key]) for key in ("ack", "buffered", "capacity"))
    missing = [seq for seq in range(ack + 1, max(buffered, default=ack)) if seq not in buffered]
    miss = encode_miss(ack, missing, capacity)
    assert {"ack": ack, "miss": miss} == row["json"]
    packet = Packet(2, ack=ack, miss=miss)
    assert parse_packet(encode_packet(packet)) == packet
    assert row["hex"] in ("", encode_packet(packet).hex())


def check_chunks_written(row: Row) -> None:
    packet, size, data = bytes.fromhex(row["packet"]), int(row["size"]), vectors.data_of(row)
    assert encode_chunks(packet, size) == data
    assert "".join(row.get("chunks", [data.hex()])) == data.hex()
    assert Dechunker().feed(data) == [packet]


def check_chunks_read(row: Row) -> None:
    data = vectors.data_of(row)
    expected = [bytes.fromhex(packet) for packet in row["packets"]]
    assert Dechunker().feed(data) == expected
    at, is_whole = 0, True
    while at < len(data):  # the lengths of the chunks, one after the other: nothing is left over
        is_whole = not data[at]
        at += 1 + data[at]
    assert at == len(data)
    assert is_whole
    dechunker = Dechunker()
    assert [packet for byte in data for packet in dechunker.feed(bytes([byte]))] == expected


def wire(row: Row, *fields: str) -> bool:
    return vectors.expects(row, "wire") and row.keys() >= set(fields)


KINDS = (
    vectors.Kind("evidence", vectors.evidence, vectors.nothing_owed),
    vectors.Kind("packet written", lambda row: wire(row, "head", "body"), check_written, frozenset({"head", "body"})),
    vectors.Kind("packet read", lambda row: wire(row, "result"), check_read, frozenset({"result"})),
    vectors.Kind("miss", lambda row: wire(row, "json"), check_miss, frozenset({"json", "ack", "buffered", "capacity"})),
    vectors.Kind(
        "chunks written",
        lambda row: wire(row, "packet", "size"),
        check_chunks_written,
        frozenset({"packet", "size", "chunks"}),
    ),
    vectors.Kind("chunks read", lambda row: wire(row, "packets"), check_chunks_read, frozenset({"packets"})),
)
ROWS = vectors.rows_of("e3x")


@pytest.mark.clause("e3x-M02", "e3x-X03")
@pytest.mark.parametrize("row", vectors.params(ROWS))
def test_a_row_holds(row: Row) -> None:
    vectors.check(row, KINDS)


NEW_ROWS: list[Row] = [
    {"name": "an empty head", "hex": "0000", "head": {}, "body": None, "expect": "wire"},
    {"name": "a head of one byte", "hex": "000131", "result": {"json": {}, "head": "31", "body": ""}, "expect": "wire"},
    {"name": "a cut head", "hex": "000331", "result": "undefined", "expect": "wire"},
    {
        "name": "of any wording: ack=7 buffered=[9] capacity=50",
        "hex": "",
        "json": {"ack": 7, "miss": [1, 49]},
        "expect": "wire",
    },
    {
        "name": "one chunk",
        "hex": "03000041" + "00",
        "chunks": ["0300004100"],
        "packet": "000041",
        "size": 9,
        "expect": "wire",
    },
    {"name": "two packets", "hex": "0200000002000000", "packets": ["0000", "0000"], "expect": "wire"},
]
WRONG = {
    "head": {"a": 2},
    "result": {"json": {"a": 1}, "head": "", "body": ""},
    "json": {"ack": 7, "miss": [49]},
    "packet": "000042",
    "packets": ["0000"],
}


@pytest.mark.parametrize("row", vectors.params(NEW_ROWS))
def test_a_new_row_of_a_known_kind_is_tested(row: Row) -> None:
    vectors.check(row, KINDS)
    with pytest.raises((AssertionError, RemoteProtocolError)):
        vectors.check(row | {key: wrong for key, wrong in WRONG.items() if key in row}, KINDS)


@pytest.mark.parametrize("row", [{"expect": "wire"}, {"expect": "reject", "result": "undefined"}, {"expect": ""}])
def test_a_row_of_an_unknown_kind_fails(row: Row) -> None:
    with pytest.raises(AssertionError, match="has to be of one kind"):
        vectors.check({"name": "new", "hex": ""} | row, KINDS)


def test_an_engine_says_what_is_missing() -> None:
    engine = listener(window=50)
    opened(engine)
    for seq in (3, 6):
        fed(engine, c=1, seq=seq)
    assert acks(sent(engine)) == [(1, [1, 2, 1, 46])]
