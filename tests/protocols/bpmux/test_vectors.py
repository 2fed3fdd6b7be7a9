"""Every row of the collected vectors gives what its `expect` says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varu64
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Chunk, Engine, Kind, Partial, encode_chunk, encode_partial, parse_chunk
from tests.protocols import _vectors as vectors
from tests.protocols.bpmux._helpers import by_hand, fed, grant, violation, with_top_credit, written

if TYPE_CHECKING:
    from tests.protocols._vectors import Row

PARTIAL = 0b1110_0000
IGNORED_BITS = 0b0001_1000  # of a Partial's first byte; always sent as zeros


def is_number(row: Row) -> bool:
    return vectors.first_word(row) == "varu64"


def check_number(row: Row) -> None:
    """Check a number that stands in a field `value`, or at the end of the name."""
    data = vectors.data_of(row)
    named = re.fullmatch(r"varu64 (\d+)", row["name"])
    values = {int(row["value"])} if "value" in row else set()
    values |= {int(named[1])} if named else set()
    (value,) = values  # if both are there they agree
    assert encode_varu64(value) == data
    cursor = Cursor(data)
    assert cursor.varu64() == value
    assert not cursor.remaining


def check_bad_number(row: Row) -> None:
    """A number that is cut short needs more bytes, a longer form than needed is refused."""
    data = vectors.data_of(row)
    is_cut = not data or len(data) < 2 + max(data[0] - 0xF8, -1)  # by the document: 247 and below are whole
    with pytest.raises(NeedMore if is_cut else RemoteProtocolError):
        Cursor(data).varu64()
    if row.get("meaning"):
        assert str(row["meaning"]).startswith("eof") is is_cut


def check_chunks(row: Row) -> None:
    data = vectors.data_of(row)
    assert data
    cursor = Cursor(data)
    chunks: list[Chunk | Partial] = []
    while cursor.remaining:
        start = cursor.position
        chunk = parse_chunk(cursor)
        chunks.append(chunk)
        sent = bytearray(data[start : cursor.position])
        if sent[0] & PARTIAL == PARTIAL:
            sent[0] &= ~IGNORED_BITS
        encoded = encode_partial(chunk.total_size) if isinstance(chunk, Partial) else encode_chunk(chunk)
        assert encoded == bytes(sent)
    facts = facts_of(chunks[0]) if len(chunks) == 1 else {}
    if "chunks" in row:
        assert [facts_of(chunk) for chunk in chunks] == row["chunks"]
        row = {field: value for field, value in row.items() if field != "chunks"}
    vectors.agree(row, facts)


def facts_of(chunk: Chunk | Partial) -> dict[str, object]:
    """Return what a chunk says, with payloads in hexadecimal, and only the flags that are set."""
    if isinstance(chunk, Partial):
        return {"type": "partial", "total": chunk.total_size}
    facts: dict[str, object] = {"type": chunk.type.label, "id": chunk.id}
    if chunk.payload is not None:
        facts["payload"] = chunk.payload.hex()
    if chunk.credit is not None:
        facts["credit"] = chunk.credit
    if chunk.end is not None:
        facts["end"] = chunk.end.hex()
    return facts | {flag: True for flag in ("ping", "ack_end") if getattr(chunk, flag)}


def check_violation(row: Row) -> None:
    """Check that the last bytes break a rule, and those before them (`before`) none."""
    engine = by_hand()
    if "before" in row:
        assert not any(isinstance(event, Failed) for event in fed(engine, row["before"]))
    error = violation(engine, vectors.data_of(row).hex())
    assert row.get("rule") in (None, error.rule)


def check_overruled(row: Row) -> None:
    """These rows address the top level, which may not exist."""
    violation(with_top_credit(), vectors.data_of(row).hex())


KINDS = (
    vectors.Kind("evidence", vectors.evidence, vectors.nothing_owed),
    vectors.Kind(
        "number",
        lambda row: vectors.expects(row, "wire") and ("value" in row or is_number(row)),
        check_number,
        frozenset({"value"}),
    ),
    vectors.Kind("bad number", lambda row: vectors.expects(row, "reject") and is_number(row), check_bad_number),
    vectors.Kind(
        "chunks",
        lambda row: vectors.expects(row, "wire") and "value" not in row and not is_number(row),
        check_chunks,
        frozenset({"chunks", "type", "id", "payload", "credit", "ping", "end", "ack_end", "total"}),
    ),
    vectors.Kind(
        "violation",
        lambda row: vectors.expects(row, "reject") and not is_number(row),
        check_violation,
        frozenset({"before", "rule"}),
    ),
    vectors.Kind("overruled", lambda row: vectors.expects(row, "overruled"), check_overruled),
)
ROWS = vectors.rows_of("bpmux")


@pytest.mark.clause("bpmux-G03", "bpmux-G04", "bpmux-G05", "bpmux-G11", "bpmux-G12", "bpmux-G20", "bpmux-P02")
@pytest.mark.clause("bpmux-P03", "bpmux-S03", "bpmux-S05")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("row", vectors.params(ROWS))
def test_a_row_holds(row: Row) -> None:
    vectors.check(row, KINDS)


NEW_ROWS: list[Row] = [
    {"name": "varu64 249", "hex": "f8f9", "value": 249, "meaning": "", "expect": "wire"},
    {"name": "varu64 invalid f8f7", "hex": "f8f7", "meaning": "non-canonical 247", "expect": "reject"},
    {"name": "a new chunk", "hex": "5007026869", "meaning": "", "expect": "wire"},
    {"name": "a new partial header", "hex": "f12a2a", "meaning": "", "expect": "wire"},
    {"name": "a new violation", "hex": "e005e005", "meaning": "", "expect": "reject"},
]


@pytest.mark.parametrize("row", vectors.params(NEW_ROWS))
def test_a_new_row_of_a_known_kind_is_tested(row: Row) -> None:
    vectors.check(row, KINDS)
    wrong = row | ({"value": 1} if "value" in row else {"hex": "5000" if row["expect"] == "wire" else "100000"})
    with pytest.raises((AssertionError, NeedMore, ValueError, pytest.fail.Exception)):
        vectors.check(wrong, KINDS)


@pytest.mark.parametrize("expect", ["option: unheard of", "", "wired"])
def test_a_row_of_an_unknown_kind_fails(expect: str) -> None:
    with pytest.raises(AssertionError, match="has to be of one kind"):
        vectors.check({"name": "new", "hex": "00", "meaning": "", "expect": expect}, KINDS)


def test_a_message_in_parts_is_one_message() -> None:
    engine = with_top_credit()
    fed(engine, "50 01 00")
    engine.entities(Kind.STREAM_IN)[1].give_credit(5)
    assert fed(engine, "e005 5001026865 5001036c6c6f") == [("Received", "in-stream 1", b"hello")]


@pytest.mark.clause("bpmux-S03", "bpmux-T03")
def test_the_top_level_is_addressed_as_the_peers_instead() -> None:
    engine = by_hand()
    grant(engine, "in-stream 0", 2)
    engine.top_sink.send(b"yo")
    assert written(engine) == "700002796f"
    engine.top_stream.give_credit(100)
    assert written(engine) == "a80064"
    engine.top_sink.pong()
    assert written(engine) == "6000"
    engine.top_sink.end()
    assert written(engine) == "620000"
    engine.top_stream.end()
    assert written(engine) == "a20000"
    other: Engine = by_hand()
    assert not any(isinstance(event, Failed) for event in fed(other, "a20000"))
    assert written(other) == "6100"
