"""Every violation: one Failed with the rule, the offset and the numbers; nothing is written, nothing has changed."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._limits import Limits
from muxkit.core import encode_varu64
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Chunk, Engine, Type, encode_chunk, encode_partial
from muxkit.protocols.bpmux.entities import Kind
from muxkit.testing._pair import check_every_split, feed
from tests.protocols.bpmux._helpers import by_hand, fed, state_of, told, violation, written

LIMITS = Limits(
    message=300,
    reassembly=400,
    channels=6,
    pongs=3,
    resets_burst=2,
    channel_bytes=50,
    channel_floor=1,
    connection_bytes=100,
)


def rich(*, letter: bool = False) -> Engine:
    """Make an engine with entities of every kind: local ones with even ids, the peer's with odd ones, some in parts."""
    engine = by_hand(limits=LIMITS, letter=letter)
    engine.top_stream.give_credit(20)
    feed(engine, [bytes.fromhex("a8 00 10")])
    engine.open_sink(id=2)
    engine.open_stream(id=4, credit=10)
    engine.open_request(id=6, credit=500)
    engine.open_sink(id=8).end()
    written(engine)
    for opening in ("50 01 00", "90 03 00", "10 05 00", "d0 07 00"):
        fed(engine, opening)
    engine.entities(Kind.STREAM_IN)[1].give_credit(10)
    written(engine)
    return engine


@attrs.frozen
class Case:
    """Legal chunks, an illegal one, and its error."""

    name: str
    before: str
    chunk: str
    rule: str | None
    says: str
    limit: str | None = None
    letter: bool = False


CASES = [
    Case("a longer number", "", "44 f8 07", "bpmux-G12", "VarU64 7 is too long"),
    Case("the top level's sink again", "62 00 00", "60 00", "bpmux-R09", "in-sink 0: the top level"),
    Case("the top level's stream again", "a2 00 00", "a4 00", "bpmux-R09", "in-stream 0: the top level"),
    Case("duplex 0", "", "d0 00 00", "bpmux-R09", "duplex 0"),
    Case("sink 0", "", "50 00 00", "bpmux-S05", "out-sink 0"),
    Case("an answer to nothing", "", "30 09 00", "bpmux-R10", "in-request 9: a response without a request"),
    Case("one of ours, made by the peer", "", "70 09 00", "bpmux-R11", "in-sink 9: no entity has this id"),
    Case("a duplex over a stream", "", "d0 01 00", "bpmux-R12", "stream-in"),
    Case("a duplex over a sink", "", "d0 03 00", "bpmux-R12", "this id is in use"),
    Case("a duplex twice", "", "d0 07 00", "bpmux-R21", "this id is in use"),
    Case("an opening without payload", "", "48 09 05", "bpmux-R14", "out-sink 9: an opening without a payload"),
    Case("an opening without credit", "", "50 09 15", "bpmux-R15", "sent 21 bytes with 20 bytes of credit"),
    Case("an opening by the letter", "", "50 09 01", "bpmux-R15", "expected 0 bytes, got 1", letter=True),
    Case("an opening in parts by the letter", "e0 05", "50 09 00", "bpmux-P18", "got 5 in parts", letter=True),
    Case("an end payload in an opening", "", "52 09 00 01", "bpmux-R18", "1 bytes with 0 bytes of credit"),
    Case("an acknowledgement that opens", "", "51 09 00", "bpmux-R20", "0x11"),
    Case("an acknowledgement of nothing known", "", "41 09", "bpmux-R20", "doesn't exist"),
    Case("a second payload of a request", "", "10 05 00", "bpmux-R22", "of a type that has none"),
    Case("a payload above the credit", "", "50 01 0b", "bpmux-R23", "in-stream 1: the peer sent 11 bytes with 10"),
    Case("credit above 64 bits", "88 03 05", "88 03 " + "ff" * 9, "bpmux-R25", "on top of 5"),
    Case("an answer with an end", "", "32 06 00 00", "bpmux-R27", "a response with an end payload"),
    Case("an end payload above the credit", "", "42 01 0b", "bpmux-R29", "11 bytes with 10 bytes of credit"),
    Case("an acknowledgement with more", "", "a5 08", "bpmux-R32", "0x05"),
    Case("an acknowledgement too early", "", "a1 02", "bpmux-R33", "ack-end for an end that wasn't sent"),
    Case("a total of 0", "", "e0 00", "bpmux-P04", "total size 0"),
    Case("a total in a longer form", "", "e1 00 2a", "bpmux-P05", "total size 42 has leading zeros"),
    Case("two partials", "e0 05", "e0 06", "bpmux-P07", "Partial chunk after a Partial"),
    Case("a partial inside a message", "e0 05 50 01 01 61 e0 03", "50 01 01", "bpmux-P08", "expected 4 more bytes"),
    Case("more than announced", "e0 02", "50 01 03", "bpmux-P11", "at most 2 bytes, the rest of the message, got 3"),
    Case(
        "more end than announced", "e0 02", "42 01 03", "bpmux-P11", "at most 2 bytes, the rest of the message, got 3"
    ),
    Case("both payloads in parts", "e0 05", "52 01 01", "bpmux-P14", "in one chunk"),
    Case("mixed parts", "e0 05 50 01 01 61", "42 01 01", "bpmux-P14", "mixed"),
    Case("a duplex's parts by another name", "e0 05 d0 09 01 61", "90 09 01", "bpmux-P06", "expected a duplex chunk"),
    Case("a half of a duplex that is not open", "e0 05 d0 09 01 61", "50 09 00", "bpmux-P06", "is incomplete"),
    Case("an announced message too large", "", "e1 01 2d", "bpmux-P17", "at most 300 bytes, got 301", "message"),
    Case("a message too large", "", "30 06 f9 01 2d", None, "at most 300 bytes, got 301", "message"),
    Case("an end too large", "", "22 06 f9 01 2d", None, "at most 300 bytes, got 301", "message"),
    Case("too many channels", "50 09 00 50 0d 00", "50 0b 00", None, "6 are open", "channels"),
    Case("too many pings", "44 01 44 01 44 01", "44 01", None, "too many pings: 3", "pongs"),
]


@pytest.mark.clause("bpmux-G20")
@pytest.mark.requirement("R-17", "R-21", "R-23")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_violation_is_told_exactly_and_changes_nothing(case: Case) -> None:
    engine = rich(letter=case.letter)
    start = engine.bytes_received
    fed(engine, case.before)
    assert not engine.over
    before = state_of(engine)
    error = violation(engine, case.chunk)
    assert state_of(engine) == before
    assert (error.rule, error.limit) == (case.rule, case.limit)
    assert case.says in str(error)
    assert error.offset == start + len(bytes.fromhex(case.before))


@pytest.mark.requirement("R-01", "R-17", "R-26")
def test_what_could_never_be_lent_is_refused_before_anything_is_granted() -> None:
    engine = by_hand(limits=Limits(message=300, reassembly=300))
    engine.top_stream.give_credit(2)
    fed(engine, "e1 01 2c 50 09 01 61")
    assert written(engine) == "a800f9012c"
    # A message of the top level uses up the loan, then another opening in parts wants as much again.
    fed(engine, "70 00 f9 01 2b" + "00" * 299, "e1 01 2c")
    before = state_of(engine)
    error = violation(engine, "50 0b 00")
    assert error.limit == "reassembly"
    assert "599 bytes to lend, at most 300 allowed" in str(error)
    assert state_of(engine) == before


IDS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 300])
SIZES = st.sampled_from([0, 0, 1, 2, 10, 11, 20, 21, 60])
CHUNKS = st.builds(
    Chunk,
    type=st.sampled_from(list(Type)[:7]),
    id=IDS,
    payload=st.none() | SIZES.map(bytes),
    credit=st.none() | st.sampled_from([0, 1, 2**64 - 1]),
    ping=st.booleans(),
    end=st.none() | SIZES.map(bytes),
    ack_end=st.sampled_from([False, False, True]),
).map(encode_chunk)
PARTIALS = st.sampled_from([1, 2, 10, 60, 300, 301]).map(encode_partial)


@pytest.mark.requirement("R-17")
@given(st.lists(CHUNKS | PARTIALS, max_size=12))
def test_a_chunk_that_is_refused_has_changed_nothing(chunks: list[bytes]) -> None:
    _refused_or_applied(chunks)


@pytest.mark.soak
@pytest.mark.requirement("R-17")
@pytest.mark.seeds(1, soak=1000)
def test_a_million_chunks_are_applied_or_change_nothing(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        _refused_or_applied([_any_chunk(dice) for _ in range(10)])


def _refused_or_applied(chunks: list[bytes]) -> None:
    engine = rich()
    for chunk in chunks:
        before = state_of(engine)
        events = feed(engine, [chunk])
        if engine.over:
            assert [type(event) for event in events] == [Failed]
            assert state_of(engine) == before
            assert not engine.has_output()
            return


def _any_chunk(dice: random.Random) -> bytes:
    if dice.random() < 0.15:
        return encode_partial(dice.choice([1, 2, 10, 60, 300, 301]))
    tag = dice.randrange(0xE0)
    out = bytes([tag]) + encode_varu64(dice.randrange(10))
    size = dice.choice([0, 0, 1, 2, 10, 11])
    if tag & 0x10:
        out += bytes([size]) + bytes(size)
    if tag & 0x08:
        out += encode_varu64(dice.choice([0, 1, 5, 2**64 - 1]))
    if tag & 0x02:
        out += bytes([size]) + bytes(size)
    return out


@pytest.mark.clause("bpmux-G13")
@pytest.mark.requirement("R-21")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_violation_is_the_same_however_it_is_cut(case: Case) -> None:
    check_every_split(lambda: rich(letter=case.letter), bytes.fromhex(case.before + case.chunk), normalise=told)


def test_an_error_names_the_knob_that_would_allow_it() -> None:
    engine = rich()
    error = violation(engine, "e1 01 2d")
    offset = engine.bytes_received
    assert str(error) == (
        f"message in parts too large: expected at most 300 bytes, got 301 (bpmux-P17, byte {offset}); "
        "raise Limits(message=…) if this peer is right"
    )
