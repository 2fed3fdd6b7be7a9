"""Every row of the collected vectors, as its `expect` says."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from muxkit.protocols.restream import (
    Doubling,
    Failed,
    Numbers,
    Registered,
    Resumed,
    ServerEngine,
    StatelessRequested,
    parse_integer,
)
from muxkit.protocols.restream._crc import roll
from muxkit.protocols.restream._twister import next_value
from tests.protocols.restream._helpers import said, violation

if TYPE_CHECKING:
    from collections.abc import Mapping

ROWS = json.loads((Path(__file__).parents[2] / "data/vectors/restream.json").read_text(encoding="utf-8"))

Row = dict[str, Any]  # what a row holds depends on its kind


def rows(expect: str, name: str = "") -> list[object]:
    chosen = [row for row in ROWS if row["expect"].startswith(expect) and row["name"].startswith(name)]
    return [pytest.param(row, id=row["name"]) for row in chosen]


def test_every_row_is_of_a_kind_that_is_tested_here() -> None:
    kinds = (("wire", "PRNG"), ("wire", "crc"), ("wire: with a doubling", ""), ("transcript", ""), ("overruled", ""))
    assert len(ROWS) == sum(len(rows(*kind)) for kind in kinds)


@pytest.mark.clause("restream-N06", "restream-N08", "restream-A02", "restream-A03")
@pytest.mark.parametrize("row", rows("wire", "PRNG"))
def test_a_chain_of_numbers_and_its_checksums_are_those_of_the_vector(row: Row) -> None:
    value, crc, numbers = row["seed"], 0, Numbers()
    data: Mapping[str, int] = {}
    state = numbers.initial({"count": len(row["values"])}, row["seed"])
    for expected, rolled in zip(row["values"], row["rolling_crc"], strict=True):
        value = next_value(value)
        crc = roll(crc, value)
        data, state = numbers.step(state)
        assert (value, crc) == (expected, rolled)
        assert (data["value"], state["crc"]) == (expected, rolled)
    assert data["crc"] == row["rolling_crc"][-1]


@pytest.mark.clause("restream-S12", "restream-S13")
@pytest.mark.parametrize("row", rows("wire", "crc"))
def test_a_checksum_is_that_of_the_vector(row: Row) -> None:
    crc = 0
    for value in row["values"]:
        crc = roll(crc, value)
    assert crc == row["crc"] == zlib.crc32(bytes.fromhex(row["hex"]))


@pytest.mark.clause("restream-L12", "restream-L13")
@pytest.mark.parametrize("row", rows("wire: with a doubling"))
def test_a_doubling_stream_is_that_of_the_vector(row: Row) -> None:
    request = b"{}\n" if row["state"] is None else b'{"state":"%b"}\n' % row["state"].encode()
    assert doubled(request, seed=0x9A, count=len(row["data"])) == row["data"]


@pytest.mark.clause("restream-L01", "restream-L11", "restream-M02")
@pytest.mark.parametrize("row", rows("transcript", "live: stateless") + rows("transcript", "live: unknown"))
def test_a_stateless_transcript_has_the_same_shape(row: Row) -> None:
    """The reference doubles, so its first number is enough to know what has to follow."""
    replies = [json.loads(text)["data"] for text in "".join(row["received"]).splitlines()]
    request = bytes.fromhex(row["hex"][0])
    assert doubled(request, seed=int(replies[0]), count=len(replies)) == replies


@pytest.mark.clause("restream-S06", "restream-S10", "restream-S21", "restream-S22")
@pytest.mark.parametrize("row", rows("transcript", "live: stateful") + rows("transcript", "live: resume after"))
def test_a_stateful_transcript_has_the_same_lines_and_the_same_end(row: Row) -> None:
    *texts, end = "".join(row["received"]).splitlines()
    assert end == "<EOF>"
    server = ServerEngine()
    server.receive_bytes(bytes.fromhex(row["hex"][0]), 0.0)
    (event,) = server.events()
    assert isinstance(event, (Registered, Resumed))
    assert server.accept(head=event.state if isinstance(event, Resumed) else 0)
    for text in texts:
        message = json.loads(text)
        server.send_message(message["id"], message["data"], final=Numbers().is_final(message["data"]))
    assert server.closing
    assert (
        b"".join(bytes(buffer) for buffer in server.buffers_to_send(9999))
        == "".join(text + "\n" for text in texts).encode()
    )


@pytest.mark.clause("restream-F05", "restream-M03", "restream-S03", "restream-S04")
@pytest.mark.parametrize("row", rows("overruled"))
def test_where_the_decisions_overrule_the_reference_they_are_kept(row: Row) -> None:
    request = bytes.fromhex(row["hex"][0])
    name = row["name"].removeprefix("live: ")
    if name in ("bad json", "json array", "json number", "uuid only"):
        violation(ServerEngine(), request)
        return
    server = ServerEngine()
    server.receive_bytes(request, 0.0)
    (event,) = server.events()
    if name in ("count 0", "count missing"):
        assert isinstance(event, Registered)
        with pytest.raises(Exception, match=r"params\.count"):
            Numbers().initial(event.params, 0)
    elif name == "resume state 0":
        assert event == Resumed("bf575c35-c25b-4386-8430-d5e2a93f3b11", 0)
        assert server.accept(head=5)
        server.send_message(1, {"value": 3})
        assert said(server) == [{"id": 1, "data": {"value": 3}}]
    elif name == "unknown uuid resume":
        server.fail("this session is not known here")
        assert said(server) == [{"error": "this session is not known here"}]
        assert server.closing
    elif name == "re-register same uuid":
        assert isinstance(event, Registered)  # nothing was acknowledged: the same message again, no new session
        assert server.accept(head=1)
        server.send_message(1, {"value": 3, "crc": 4}, final=True)
        assert said(server) == [{"id": 1, "data": {"value": 3, "crc": 4}}]
    else:
        raise AssertionError(name)


def doubled(request: bytes, *, seed: int, count: int) -> list[str]:
    server = ServerEngine()
    server.receive_bytes(request, 0.0)
    (event,) = server.events()
    assert isinstance(event, StatelessRequested)
    assert not isinstance(event, Failed)
    value = seed if event.state is None else Doubling().next(parse_integer(event.state))
    for _ in range(count):
        server.send_value(value)
        value = Doubling().next(value)
    values = []
    for message in said(server):
        assert isinstance(message, dict)
        assert list(message) == ["data"]
        values.append(str(message["data"]))
    return values
