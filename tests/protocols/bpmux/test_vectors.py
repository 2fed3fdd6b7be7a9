"""Every row of the collected vectors, as its `expect` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varu64
from muxkit.protocols.bpmux import Engine, Failed, Kind, Partial, encode_chunk, encode_partial
from tests.protocols.bpmux._helpers import by_hand, fed, grant, parsed, violation, with_top_credit, written

ROWS = json.loads((Path(__file__).parents[2] / "data/vectors/bpmux.json").read_text(encoding="utf-8"))


def rows(expect: str, *, numbers: bool) -> list[object]:
    chosen = [row for row in ROWS if row["expect"].startswith(expect) and row["name"].startswith("varu64") == numbers]
    return [pytest.param(row, id=row["name"]) for row in chosen]


def test_every_row_is_of_a_kind_that_is_tested_here() -> None:
    assert len(ROWS) == sum(
        len(rows(kind, numbers=it)) for kind in ("wire", "reject", "overruled") for it in (True, False)
    )


@pytest.mark.clause("bpmux-G11")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("row", rows("wire", numbers=True))
def test_a_number_is_written_and_read_as_the_vector_says(row: dict[str, object]) -> None:
    data = bytes.fromhex(str(row["hex"]))
    assert encode_varu64(int(str(row["value"]))) == data
    assert Cursor(data).varu64() == row["value"]


@pytest.mark.clause("bpmux-G12")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("row", rows("reject", numbers=True))
def test_a_number_that_is_cut_short_waits_and_a_longer_form_is_refused(row: dict[str, object]) -> None:
    expected = NeedMore if row["meaning"] == "eof" else RemoteProtocolError
    with pytest.raises(expected):
        Cursor(bytes.fromhex(str(row["hex"]))).varu64()


@pytest.mark.clause("bpmux-G03", "bpmux-G04", "bpmux-G05", "bpmux-P02", "bpmux-P03")
@pytest.mark.parametrize("row", rows("wire", numbers=False))
def test_chunks_are_written_and_read_as_the_vector_says(row: dict[str, object]) -> None:
    data = bytes.fromhex(str(row["hex"]))
    encoded = [
        encode_partial(chunk.total_size) if isinstance(chunk, Partial) else encode_chunk(chunk)
        for chunk in parsed(data)
    ]
    # The two ignored bits of a Partial are always sent as zeros.
    sent = b"\xe0" + data[1:] if "ignored middle bits" in str(row["name"]) else data
    assert b"".join(encoded) == sent


def test_the_vector_of_a_message_in_parts_is_one_message() -> None:
    data = next(str(row["hex"]) for row in ROWS if row["name"].startswith("partial message"))
    engine = with_top_credit()
    fed(engine, "50 01 00")
    engine.give_credit(engine.entities(Kind.STREAM_IN)[1], 5)
    assert fed(engine, data) == [("Message", "in-stream 1", b"hello")]


@pytest.mark.clause("bpmux-G20")
@pytest.mark.parametrize("row", rows("reject", numbers=False))
def test_a_violation_of_the_vectors_ends_the_connection(row: dict[str, object]) -> None:
    violation(by_hand(), str(row["hex"]))


@pytest.mark.clause("bpmux-S03", "bpmux-S05")
@pytest.mark.parametrize("row", rows("overruled", numbers=False))
def test_the_top_level_is_not_addressed_as_our_own(row: dict[str, object]) -> None:
    """Overruled: what these rows call the top level is an entity that may not exist."""
    violation(with_top_credit(), str(row["hex"]))


@pytest.mark.clause("bpmux-S03", "bpmux-T03")
def test_the_top_level_is_addressed_as_the_peers_instead() -> None:
    twins = {str(row["name"]): str(row["hex"]) for row in ROWS if "(In-form)" in row["name"]}
    engine = by_hand()
    grant(engine, "in-stream 0", 2)
    engine.send(engine.top_sink, b"yo")
    assert written(engine) == twins['top-level (In-form) message "yo"']
    engine.give_credit(engine.top_stream, 100)
    assert written(engine) == twins["top-level (In-form) credit 100"]
    engine.pong(engine.top_sink)
    assert written(engine) == twins["top-level (In-form) pong"]
    engine.end(engine.top_sink)
    assert written(engine) == twins["top-level (In-form) close sink"]
    engine.end(engine.top_stream)
    assert written(engine) == twins["top-level (In-form) cancel stream"]
    other: Engine = by_hand()
    assert not any(isinstance(event, Failed) for event in fed(other, twins["top-level (In-form) cancel stream"]))
    assert written(other) == twins["top-level (In-form) ack of cancel"]
