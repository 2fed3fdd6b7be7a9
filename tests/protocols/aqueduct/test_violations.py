"""Every violation: one `Failed` with the rule, the place and the numbers; nothing is written or changed."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._limits import Limits
from muxkit.core import Cursor
from muxkit.core.events import Failed
from muxkit.protocols.aqueduct import Config, Engine, Mode, Role
from muxkit.protocols.aqueduct.events import Arrived
from muxkit.protocols.aqueduct.frames import encode_frame, parse_frame
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    V,
    client,
    entry,
    fresh,
    hexed,
    receivers_of,
    senders_of,
    server,
    taken,
)

clause = pytest.mark.clause
ENTRY = "03 00"


@attrs.frozen
class Case:
    """Correct bytes, and after them in the same stream one frame that breaks a rule."""

    name: str
    before: str
    frame: str
    rule: str
    says: str
    role: Role = Role.SERVER
    fin: bool = False


def case(name: str, before: str, frame: str, rule: str, says: str, **options: object) -> object:
    made = Case(name, before, frame, rule, says, **options)  # type: ignore[arg-type]  # role and fin
    return pytest.param(made, id=name)


C = Role.CLIENT
CASES = [
    case("a varint of 70 bits", ENTRY, "05" + "ff" * 10, "aqueduct-E03", "expected at most 10 bytes"),
    case("a varint cut off in ranges", "03 02", "08 02 00 80", "aqueduct-E05", "container of 2 bytes"),
    case("varbytes beyond their end", ENTRY, "04 00 02 05 61 00 00", "aqueduct-E07", "5 bytes in a container with 1"),
    case("one header item", "", "02 02 01 6b", "aqueduct-E15", "1 varbytes"),
    case("a second oneshot message", "03 04" + EMPTY, "04 01 00 00 00", "aqueduct-E26", "message 1 on a oneshot"),
    case("two oneshot datagrams", "03 04", "05 02", "aqueduct-E26", "2 datagrams sent"),
    case("a oneshot that ends with two", "03 04", "06 02", "aqueduct-E26", "finished with 2 messages"),
    case("a route after a route", ENTRY, "03 08", "aqueduct-F03", "ROUTE_TO after ROUTE_TO 0"),
    case("ACK_VERSION after a route", ENTRY, "01", "aqueduct-F04", "AckVersion after ROUTE_TO"),
    case("VERSION after a route", ENTRY, V, "aqueduct-F04", "Version after ROUTE_TO"),
    case("headers after a route", ENTRY, "02 00", "aqueduct-F04", "ConnectionHeaders after ROUTE_TO"),
    case("a message without a route", "01", EMPTY, "aqueduct-F05", "MessageFrame without a ROUTE_TO"),
    case("a close without a route", "", "0a", "aqueduct-F05", "CloseReceiver without a ROUTE_TO"),
    case("a forget without a route", "", "0b", "aqueduct-F05", "ForgetChannel without a ROUTE_TO"),
    case("an end inside a frame", ENTRY, "04 00", "aqueduct-F09", "2 bytes into a frame", fin=True),
    case("the tag 0", "", "00", "aqueduct-F10", "0x00"),
    case("the tag 12", ENTRY, "0c", "aqueduct-F10", "0x0c"),
    case("the tag 240", ENTRY, "f0", "aqueduct-F10", "0xf0"),
    case("other magic bytes", "", V[:14] + "8f", "aqueduct-T02", "ef505fa6600f408f"),
    case("other text", "", V[:30] + "4b", "aqueduct-T03", "AQUEDUCK"),
    case("a shorter version", "", V[:32] + "05 30 2e 30 2e 31", "aqueduct-T04", "a version of 5 bytes"),
    case("another version", "", V[:-2] + "53", "aqueduct-T04", "0.0.0-AFTES"),
    case("a message from the receiver", ENTRY, EMPTY, "aqueduct-T09", "MessageFrame from the receiver", role=C),
    case("a foreign attachment", ENTRY, "04 00 00 02 01 00 00", "aqueduct-T13", "by the other side"),
    case("an attachment without headers", ENTRY, "04 00 00 01 08 00", "aqueduct-T14", "channel 8 has no headers"),
    case("the entrypoint attached", ENTRY, "04 00 00 02 00 00 00", "aqueduct-T15", "the entrypoint is attached"),
    case("a channel attached twice", ENTRY, "04 00 00 04 08 00 08 00 00", "aqueduct-T15", "twice among 2"),
    case("a count from the receiver", ENTRY, "05 01", "aqueduct-T18", "SentUnreliable from the receiver", role=C),
    case("an end from the receiver", ENTRY, "06 00", "aqueduct-T21", "FinishSender from the receiver", role=C),
    case("a cancel from the receiver", ENTRY, "07", "aqueduct-T23", "CancelSender from the receiver", role=C),
    case("an ack from the sender", ENTRY, "08 02 00 01", "aqueduct-T25", "AckReliable from the sender"),
    case("no ranges", "03 02", "08 00", "aqueduct-T26", "0 varints"),
    case("one varint of ranges", "03 02", "08 01 00", "aqueduct-T26", "1 varints"),
    case("three varints of ranges", "03 02", "08 03 00 01 01", "aqueduct-T26", "3 varints"),
    case("an empty range", "03 02", "08 02 00 00", "aqueduct-T27", "zero"),
    case("an empty gap", "03 02", "08 04 00 01 00 01", "aqueduct-T27", "zero"),
    case("another channel's report", "03 02", "09 0a 01 01", "aqueduct-T28", "CHANNEL 10 after ROUTE_TO 2"),
    case("a report from the sender", ENTRY, "09 00 01 01", "aqueduct-T29", "AckNackUnreliable from the sender"),
    case("a report on the peer's channel", ENTRY, "09 02 01 01", "aqueduct-T30", "CHANNEL 2", role=C),
    case("an empty report", "03 02", "09 02 00", "aqueduct-T31", "0 varints"),
    case("a report of zero", "03 02", "09 02 01 00", "aqueduct-T32", "zero"),
    case("a report that ends with zero", "03 02", "09 02 02 02 00", "aqueduct-T32", "zero"),
    case("a report with a zero inside", "03 02", "09 02 03 01 00 01", "aqueduct-T32", "zero"),
    case("a close from the sender", ENTRY, "0a", "aqueduct-T35", "CloseReceiver from the sender"),
    case("our channel forgotten", "03 00", "0b", "aqueduct-T37", "channel of ours", role=C),
    case("headers twice", "", "02 00", "aqueduct-H06", "a second time"),
    case("a message twice", ENTRY + EMPTY, EMPTY, "aqueduct-S08", "message 0 came a second time"),
    case("a total below what came", ENTRY + EMPTY, "06 00", "aqueduct-S08", "finished with 0 messages"),
    case("a message after the end", "03 08 06 01", EMPTY, "aqueduct-S12", "MessageFrame after FinishSender"),
    case("two ends", "03 08 06 01", "06 01", "aqueduct-S12", "FinishSender after FinishSender"),
    case("a cancel after the end", "03 08 06 00", "07", "aqueduct-S12", "CancelSender after FinishSender"),
    case("an end after a cancel", "03 08 07", "06 00", "aqueduct-S14", "FinishSender after CancelSender"),
    case("two cancels", "03 08 07", "07", "aqueduct-S14", "CancelSender after CancelSender"),
    case("a message after a cancel", "03 08 07", EMPTY, "aqueduct-S14", "MessageFrame after CancelSender"),
    case("an ack of the unsent", "03 02", "08 02 00 01", "aqueduct-A04", "message 0 acked, 0 were sent"),
    case("a report on the unsent", "03 02", "09 02 01 01", "aqueduct-A11", "0 were sent"),
]  # fmt: skip


def state_of(engine: Engine) -> tuple[object, ...]:
    """Give what a refused frame must not change."""
    state = engine.state
    return (
        sorted(senders_of(engine)), sorted(receivers_of(engine)), state.outbox, state.unread_datagrams,
        state.table.census.theirs, state.table.census.waiting, engine.reader.reassembly.left,
        [(list(one.reliable.got), one.reliable.total, one.unreliable.known) for one in receivers_of(engine).values()],
        [(len(one.reliable), one.sent_reliable, one.reported) for one in senders_of(engine).values()],
    )  # fmt: skip


@clause(
    "aqueduct-E03", "aqueduct-E05", "aqueduct-E07", "aqueduct-E15", "aqueduct-E26",
    "aqueduct-F03", "aqueduct-F04", "aqueduct-F05", "aqueduct-F09", "aqueduct-F10",
    "aqueduct-T02", "aqueduct-T03", "aqueduct-T04", "aqueduct-T09", "aqueduct-T13", "aqueduct-T14", "aqueduct-T15",
    "aqueduct-T18", "aqueduct-T21", "aqueduct-T23", "aqueduct-T25", "aqueduct-T26", "aqueduct-T27", "aqueduct-T28",
    "aqueduct-T29", "aqueduct-T30", "aqueduct-T31", "aqueduct-T32", "aqueduct-T35", "aqueduct-T37",
    "aqueduct-H06", "aqueduct-S08", "aqueduct-S12", "aqueduct-S14", "aqueduct-A04", "aqueduct-A11",
)  # fmt: skip
@pytest.mark.requirement("R-17", "R-19", "R-21", "R-23")
@pytest.mark.parametrize("row", CASES)
def test_a_violation_is_told_exactly_and_changes_nothing(row: Case) -> None:
    peer = server() if row.role is Role.SERVER else client()
    peer.send(row.before, stream=50)
    assert not peer.engine.over
    before = state_of(peer.engine)
    error = peer.violation(row.frame, stream=50, fin=row.fin)
    assert error.rule == row.rule
    assert row.says in str(error)
    assert error.offset == len(bytes.fromhex(row.before))
    assert "stream 50" in str(error)
    assert state_of(peer.engine) == before


@clause("aqueduct-S08")
def test_a_number_above_the_declared_total_is_a_violation() -> None:
    peer = server()
    peer.send("03 08 06 02")
    error = peer.violation("03 08 04 02 00 00 00")
    assert error.rule == "aqueduct-S08"
    assert "message 2 on a channel that finished with 2" in str(error)


@clause("aqueduct-S11", "aqueduct-S12")
@pytest.mark.parametrize(
    ("first", "then", "rule"),
    [
        ("03 08 05 01", "03 08 06 00", "aqueduct-S11"),
        ("03 08 06 01", "03 08 06 01", "aqueduct-S12"),
        ("03 08 06 01", "03 08 07", "aqueduct-S12"),
        ("03 08 06 01", "03 08 05 01", "aqueduct-S12"),
    ],
)
def test_the_end_stands_alone_across_streams_too(first: str, then: str, rule: str) -> None:
    peer = server()
    peer.send(first)
    assert peer.violation(then).rule == rule


@clause("aqueduct-F09", "aqueduct-S09", "aqueduct-S10", "aqueduct-S13", "aqueduct-A08", "aqueduct-L11")
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("03 00 04 00", "aqueduct-F09"),
        ("03 00 05 01", "aqueduct-S09"),
        ("03 00 06 01", "aqueduct-S10"),
        ("03 00 07", "aqueduct-S13"),
        ("03 02 08 02 00 01", "aqueduct-A01"),
        ("03 02 09 02 01 01", "aqueduct-A08"),
        ("03 02 0a", "aqueduct-L11"),
        ("03 08 0b", "aqueduct-L02"),
        (EMPTY, "aqueduct-F05"),
        ("03 00 01", "aqueduct-F04"),
        ("03 02" + EMPTY, "aqueduct-T09"),
        ("0c", "aqueduct-F10"),
    ],
)
def test_a_datagram_brings_messages_and_nothing_else(text: str, rule: str) -> None:
    error = server().datagram_violation(text)
    assert error.rule == rule
    assert error.offset is not None


@clause("aqueduct-T04")
def test_another_version_is_not_acked() -> None:
    peer = fresh(Role.SERVER)
    assert peer.violation(V[:-2] + "53").rule == "aqueduct-T04"
    assert peer.written() == []


@clause("aqueduct-L24")
def test_what_is_said_of_a_channel_that_just_ended_is_not_judged() -> None:
    peer = server()
    peer.send("03 08 07")
    peer.written()
    assert peer.send("03 08 07 ff ff", fin=True) == []
    assert peer.send("03 08 06 00") == []
    assert not peer.engine.over


# ---------------------------------------------------------------------------- garbage


def rich() -> ScriptedPeer:
    peer = server()
    peer.send("03 00 04 00 00 04 08 00 02 00 00", stream=6)
    peer.send("03 08" + EMPTY + "05 02", stream=10)
    senders_of(peer.engine)[2].transmit(b"x" * 20, mode=Mode.UNORDERED)
    senders_of(peer.engine)[2].transmit(b"y", mode=Mode.UNRELIABLE)
    peer.written()
    peer.datagrams()
    return peer


@pytest.mark.requirement("R-21", "R-23")
@given(st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=40), st.booleans()), max_size=8))
def test_any_bytes_give_events_and_at_most_one_failure_and_then_silence(pieces: list[tuple[int, bytes, bool]]) -> None:
    peer = rich()
    failures = 0
    for kind, data, fin in pieces:
        if kind == 5:
            peer.receive_datagram(data, peer.now)
        elif kind == 4:
            peer.receive_reset(6, peer.now)
        else:
            peer.receive_stream(14 + 4 * kind, b"\x03\x08" * (kind == 1) + data, fin, peer.now)
        peer.later(0.1)
        events = peer.full_events()
        failures += sum(isinstance(event, Failed) for event in events)
    assert failures <= 1
    if peer.engine.over:
        assert not peer.engine.has_output(True)


@pytest.mark.requirement("R-21")
@pytest.mark.seeds(150, soak=20_000)
def test_a_good_conversation_that_was_damaged_raises_nothing(seed: int) -> None:
    dice = random.Random(seed)
    frames = [ENTRY + EMPTY, "03 08 04 00 00 04 10 00 0a 00 01 61 05 01 06 01", "03 02 0a", "03 18 07", "03 20 06 00"]
    peer = rich()
    for number, text in enumerate(dice.choices(frames, k=4)):
        data = bytearray(bytes.fromhex(text))
        for _ in range(dice.randrange(3)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        peer.receive_stream(100 + 4 * number, bytes(data), dice.random() < 0.5, peer.now)
        peer.receive_datagram(bytes(data), peer.now)
        peer.later(dice.choice((0.0, 0.03, 1.2)))
        peer.written()
    peer.handle_deadline(peer.now + 100)


def test_after_the_end_commands_are_refused_and_consuming_is_harmless() -> None:
    peer = server()
    (message,) = peer.messages(ENTRY + EMPTY, stream=2)
    peer.receive_closed(0.0)
    assert peer.events() == [("HungUp", True)]
    taken(message)
    taken(message)
    assert (peer.engine.control_to_run(), peer.written(), peer.datagrams()) == ((), [], [])
    for command in (lambda: peer.engine.channel(sends=True), lambda: peer.engine.forget(peer.engine.entrypoint)):
        with pytest.raises(Exception, match="the connection is over"):
            command()


def test_a_link_that_goes_with_channels_alive_is_not_a_clean_end() -> None:
    peer = server()
    peer.send("03 08" + EMPTY)
    peer.receive_closed(0.0)
    assert peer.events() == [("HungUp", False)]


def test_a_client_and_a_server_may_say_all_of_this_at_once() -> None:
    peer = client(config=Config(), limits=Limits())
    entry(peer).transmit(b"", attachments=[peer.engine.channel(sends=False)[1]])
    ((_, data, _),) = peer.written()
    frame = encode_frame(parse_frame(_cursor(data[4:])))
    assert frame.hex() == hexed("04 00 00 02 02 00 00")
    assert isinstance(server().messages(data)[0], Arrived)


def _cursor(text: str) -> Cursor:
    return Cursor(bytes.fromhex(text))
