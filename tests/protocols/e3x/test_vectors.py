"""Every row of the collected vectors, as its `expect` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

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
from tests.protocols.e3x._helpers import acks, fed, listener, opened, sent

ROWS: list[dict[str, object]] = json.loads(
    (Path(__file__).parents[2] / "data/vectors/e3x.json").read_text(encoding="utf-8")
)
KINDS = ("lob encode", "lob decode", "miss spec form", "chunking", "dechunk")


def rows(kind: str) -> list[object]:
    return [pytest.param(row, id=str(row["name"])) for row in ROWS if str(row["name"]).startswith(kind)]


def test_every_row_is_of_a_kind_that_is_tested_here() -> None:
    evidence = [row for row in ROWS if str(row["expect"]).startswith("reference-only")]
    assert len(evidence) + sum(len(rows(kind)) for kind in KINDS) == len(ROWS)
    assert all(row["expect"] == "wire" for row in ROWS if row not in evidence)


@pytest.mark.parametrize("row", rows("lob encode"))
def test_a_packet_is_written_as_the_vector_says(row: dict[str, object]) -> None:
    head, body = row["head"], str(row["body"] or "").encode()
    if isinstance(head, dict):
        encoded = encode_head(cast("dict[str, object]", head))
    else:
        encoded = b"" if head is None else bytes.fromhex(str(head).removeprefix("hex:"))
    packet = join_packet(encoded, body)
    assert packet.hex() == row["hex"]
    assert split_packet(packet) == (encoded, body)
    if isinstance(head, dict):
        assert parse_head(encoded) == head


@pytest.mark.parametrize("row", rows("lob decode"))
def test_a_packet_is_read_as_the_vector_says(row: dict[str, object]) -> None:
    data, result = bytes.fromhex(str(row["hex"])), row["result"]
    if result == "undefined":
        with pytest.raises(RemoteProtocolError):
            parse_head(split_packet(data)[0])
    else:
        assert isinstance(result, dict)
        head, body = split_packet(data)
        assert parse_head(head) == result["json"]
        assert head.hex() == result["head"]
        assert body == str(result["body"]).encode()


@pytest.mark.clause("e3x-M02", "e3x-X03")
@pytest.mark.parametrize("row", rows("miss spec form"))
def test_what_is_missing_is_written_as_the_vector_says(row: dict[str, object]) -> None:
    expected = cast("dict[str, object]", row["json"])
    values = dict(
        part.split("=") for part in str(row["name"]).removeprefix("miss spec form ").replace(", ", ",").split()
    )
    ack, capacity = int(values["ack"]), int(values["capacity"])
    buffered = json.loads(values["buffered"])
    missing = [seq for seq in range(ack + 1, max(buffered, default=ack)) if seq not in buffered]
    assert encode_miss(ack, missing, capacity) == expected["miss"]
    packet = Packet(2, ack=ack, miss=encode_miss(ack, missing, capacity))
    assert parse_packet(encode_packet(packet)) == packet


def test_an_engine_says_what_is_missing_as_the_vector_says() -> None:
    """The row `ack=1 buffered=[3, 6] capacity=50`, out of an engine."""
    engine = listener(window=50)
    opened(engine)
    for seq in (3, 6):
        fed(engine, c=1, seq=seq)
    assert acks(sent(engine)) == [(1, [1, 2, 1, 46])]


@pytest.mark.parametrize("row", rows("chunking"))
def test_chunks_are_written_as_the_vector_says(row: dict[str, object]) -> None:
    packet, size = bytes.fromhex(str(row["packet"])), int(str(row["size"]))
    assert encode_chunks(packet, size).hex() == row["hex"]
    assert encode_chunks(packet, size).hex() == "".join(cast("list[str]", row["chunks"]))
    assert Dechunker().feed(bytes.fromhex(str(row["hex"]))) == [packet]


@pytest.mark.parametrize("row", rows("dechunk"))
def test_chunks_are_read_as_the_vector_says(row: dict[str, object]) -> None:
    data = bytes.fromhex(str(row["hex"]))
    expected = [bytes.fromhex(packet) for packet in cast("list[str]", row["packets"])]
    assert Dechunker().feed(data) == expected
    dechunker = Dechunker()
    assert [packet for byte in data for packet in dechunker.feed(bytes([byte]))] == expected
