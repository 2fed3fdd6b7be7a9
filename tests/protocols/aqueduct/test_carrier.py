"""Aqueduct over one byte stream: the framing, its credit, its violations, and the contract of a stream engine."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from muxkit._limits import Limits
from muxkit.core import Reason, encode_varint
from muxkit.core.events import Failed, HungUp
from muxkit.protocols.aqueduct import Carrier, Config, Engine, Mode, Role
from muxkit.protocols.aqueduct.events import Arrived, Event, Parted
from muxkit.protocols.aqueduct.send import EngineSender
from muxkit.testing._pair import EngineCase, EnginePair, check_every_split, check_stream_engine, feed
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    V,
    budget_of,
    flat,
    incoming_of,
    senders_of,
    statistics_of,
    summary_of,
    taken,
    unlent_early_bytes_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

HELLO = b"AQUEDUX1".hex()
# What a client writes first: hello, more streams, and a whole stream with VERSION, ACK_VERSION and CONNECTION_HEADERS.
GREETING = HELLO + "01 00 1f" + V + "01 02 00"


def carrier(role: Role = Role.SERVER, *, limits: Limits | None = None, config: Config | None = None) -> Carrier:
    return Carrier(Engine(role, config, limits=limits))


def pair(
    *, limits: Limits | None = None, config: Config | None = None, weather: random.Random | None = None
) -> EnginePair[Carrier, Event]:
    made: EnginePair[Carrier, Event] = EnginePair(
        carrier(Role.CLIENT, limits=limits, config=config), carrier(limits=limits, config=config), weather=weather
    )
    made.run_until_quiet()
    made.take_events(0)
    made.take_events(1)
    return made


def opened(*, limits: Limits | None = None) -> Carrier:
    made = carrier(limits=limits)
    told_ = feed(made, [bytes.fromhex(GREETING)])
    assert [type(event).__name__ for event in told_] == ["Connected"]
    made.buffers_to_send(2**20)
    return made


def written(made: Carrier) -> str:
    text = b""
    while made.has_output():
        text += b"".join(made.buffers_to_send(2**20))
    return text.hex()


def sender_of(link: EnginePair[Carrier, Event]) -> EngineSender:
    return senders_of(link.engines[0].engine)[0]


# ---------------------------------------------------------------------------- framing


def test_what_each_frame_looks_like() -> None:
    made = opened(limits=Limits(channels=4))
    events = messages(
        feed(made, [bytes.fromhex("00 01 07 03 00" + EMPTY + "06 07 03 00 04 00 00 00 00 02 01 05 10 04 00 05 03 00")])
    )
    assert [summary_of(event) for event in events] == [("Arrived", 0, 0, b""), ("Arrived", 0, 0, b"")]
    engine = made.engine
    for event in events:
        taken(event)
    assert made._may_open == 32
    engine.handle_deadline(1.0)
    assert written(made) == bytes.fromhex("00 01 06 03 00 08 02 00 01").hex()


def test_short_messages_that_were_consumed_cause_no_credit_frame_of_their_own() -> None:
    made = opened()
    long = "04 01 00 00 80 08" + "61" * 1024
    short, long_one = messages(
        feed(made, [bytes.fromhex("00 01 07 03 00" + EMPTY), bytes.fromhex("00 01 86 08" + long)])
    )
    made.engine.handle_deadline(1.0)
    assert written(made).startswith("0401")  # the rest of the window goes with the acks
    assert short.receiver.consumed((short,), 0) is False
    assert not made.has_output()
    assert long_one.receiver.consumed((long_one,), 1024) is True


def test_the_first_bytes_are_the_hello_and_the_greeting() -> None:
    made = carrier(Role.CLIENT, limits=Limits(channels=4))
    most = 2 * 4 + Config().streams
    assert written(made) == HELLO + "05f807" + "08808008" + bytes.fromhex("01 00 1e" + V + "02 00").hex()
    assert most - 16 == 0x78 | 7 << 7


def test_any_split_gives_the_same_events_and_the_same_answer() -> None:
    text = (
        GREETING + "01 01 0c 03 00 04 00 00 02 02 00 01 61 06 01 06 07 03 00 04 00 00 00 00 00 02 04 03 10 04 00 02 02"
    )
    events = check_every_split(lambda: carrier(limits=Limits(channels=4)), bytes.fromhex(text), normalise=normal)
    assert [event[0] for event in events] == ["Connected", "Arrived", "Finished"]  # type: ignore[index]  # tuples


def normal(event: Event) -> tuple[object, ...]:
    (one,) = flat([event])  # the checks separate messages that came together
    return summary_of(one)


def messages(events: Iterable[Event]) -> list[Arrived]:
    """Give the messages among events."""
    return [event for event in flat(events) if isinstance(event, Arrived)]


@pytest.mark.requirement("R-21", "R-23")
def test_it_keeps_the_promises_of_every_stream_engine() -> None:
    chat = GREETING + "00 01 0b 03 08 04 00 00 00 01 61 05 02 06 01 06 07 03 00 04 00 00 00 00"
    check_stream_engine(
        EngineCase(
            make=carrier,
            is_failure=lambda event: isinstance(event, Failed),
            normalise=normal,
            transcripts=[bytes.fromhex(GREETING), bytes.fromhex(chat)],
            preface=bytes.fromhex(GREETING + "00 01 02 03 08"),
            question=bytes.fromhex("00 01 02 05 01"),
        )
    )


VIOLATIONS = [
    ("another hello", "", "AA" * 8, "begins with"),
    ("an unknown frame", GREETING, "0b", "0x0b"),
    ("a goodbye that is too long", GREETING, "07 81 20", "4097 bytes against 4096"),
    ("an empty chunk", GREETING, "00 01 00", "an empty chunk on stream 1"),
    ("a stream that was skipped", GREETING, "00 02 01 03", "stream 2 of the peer, 1 were opened"),
    ("a chunk after the last", GREETING, "00 00 01 03", "stream 0 has ended"),
    ("a chunk after a reset", GREETING + "00 01 01 03 02 01", "00 01 01 00", "stream 1 has ended"),
    ("a reset of what never was", GREETING, "02 05", "stream 5 of the peer, 1 were opened"),
    ("a reset after the last", GREETING, "02 00", "stream 0 has ended"),
    ("a stop of what never was", GREETING, "03 05", "stream 5 of ours, 0 were opened"),
    ("credit for what never was", GREETING, "04 05 01", "stream 5 of ours"),
    ("more than the credit", GREETING, "00 01 81 20", "sent 4097 bytes: expected at most 4096"),
    ("more than may be sent early", GREETING, "09 01 81 80 08", "131073 bytes sent early against 0"),
    ("early bytes beyond 64 bits", GREETING + "08 01", "08" + "ff" * 9 + "01", "more than"),
    ("too many streams allowed", GREETING, "05" + "ff" * 9 + "01", "more than"),
    ("a datagram too large", GREETING, "06 81 80 04", "65537 bytes against 65536"),
    ("a number too long", GREETING, "06" + "ff" * 10, "10 bytes"),
]  # fmt: skip


@pytest.mark.requirement("R-16", "R-19", "R-23")
@pytest.mark.parametrize(
    ("before", "frame", "says"), [row[1:] for row in VIOLATIONS], ids=[row[0] for row in VIOLATIONS]
)
def test_a_violation_of_the_framing_ends_the_connection(before: str, frame: str, says: str) -> None:
    made = carrier()
    feed(made, [bytes.fromhex(before)])
    assert not made.engine.over
    (failed,) = made.receive_bytes(bytes.fromhex(frame), 0.0)
    assert isinstance(failed, Failed)
    assert says in str(failed.error)
    assert failed.error.offset == len(bytes.fromhex(before))
    assert not made.has_output()
    assert made.buffers_to_send(100) == []


@pytest.mark.requirement("R-16")
def test_credit_beyond_64_bits_is_a_violation() -> None:
    made = opened()
    message = feed(made, [bytes.fromhex("00 01 07 03 00" + EMPTY)])
    assert len(message) == 1
    made.handle_deadline(1.0)
    assert written(made)  # stream 1 of ours with an ack
    made.receive_bytes(bytes.fromhex("04 01" + "ff" * 9 + "01"), 0.0)
    assert made.engine.over


@pytest.mark.requirement("R-02")
def test_the_peer_opens_no_more_streams_than_it_was_allowed() -> None:
    made = opened(limits=Limits(channels=4))
    told_ = 8 + 1024 + 1  # one has ended
    for index in range(1, told_):
        made.receive_bytes(b"\x00" + _varint(index) + b"\x01\x03", 0.0)
    assert not made.engine.over
    (failed,) = made.receive_bytes(b"\x00" + _varint(told_) + b"\x01\x03", 0.0)
    assert isinstance(failed, Failed)
    assert "1033 are allowed" in str(failed.error)


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7])


# ---------------------------------------------------------------------------- credit


@pytest.mark.requirement("R-09", "R-22", "R-08")
def test_an_unread_peer_sends_no_more_than_was_granted() -> None:
    link = pair()
    sender = sender_of(link)
    sent = 0
    for _ in range(2000):
        while sender.admits(1000):
            sender.transmit(b"x" * 1000)
            sent += 1000
        link.run_until_quiet()
    came = sum(len(event.payload) + 5 for event in messages(link.events[1]))
    (outgoing,) = link.engines[0]._outgoing.values()
    (arriving,) = (one for one in incoming_of(link.engines[1]).values() if not one.over)
    assert (outgoing.credit.available, arriving.window.credit) == (0, 0)
    assert came <= arriving.window.held <= link.engines[1].engine.limits.channel_bytes
    assert sent <= came + link.engines[0].engine.limits.channel_bytes + 2000
    for event in messages(link.take_events(1)):
        taken(event)
    link.run_until_quiet()
    assert messages(link.events[1])  # and it goes on when one is read


@pytest.mark.requirement("R-07", "R-09")
def test_an_unread_channel_blocks_no_other() -> None:
    link = pair()
    engine = link.engines[0].engine
    halves = []
    for _ in range(20):
        half, ticket = engine.channel(sends=True)
        sender_of(link).transmit(b"", attachments=[ticket])
        halves.append(half)
    for half in halves[:-1]:
        half.transmit(b"y" * 100_000)
    for number in range(100):
        halves[-1].transmit(number.to_bytes(4) + b"z" * 1000)
        link.run_until_quiet()
        for event in messages(link.take_events(1)):
            if event.receiver.id == halves[-1].id:
                taken(event)
                assert int.from_bytes(event.payload[:4]) == number
                break
        else:
            raise AssertionError("it was held up")


EARLY = Limits().channel_first


@pytest.mark.requirement("R-22")
def test_a_large_message_on_a_new_stream_waits_for_no_credit() -> None:
    link = pair()
    one, other = link.engines
    for _ in range(20):  # more than may be sent early at once
        sender_of(link).transmit(b"x" * 100_000, mode=Mode.UNORDERED)
        flight = b"".join(one.buffers_to_send(2**20))
        (event,) = messages(other.receive_bytes(flight, 0.0))
        assert one._early == other._early_granted < EARLY
        taken(event)
        link.run_until_quiet()
        assert one._early == other._early_granted == EARLY


@pytest.mark.requirement("R-22", "R-03")
def test_what_is_sent_early_is_bounded_for_all_streams_together() -> None:
    link = pair()
    one, other = link.engines
    for _ in range(5):
        sender_of(link).transmit(b"x" * 100_000, mode=Mode.UNORDERED)
    flight = b"".join(one.buffers_to_send(2**20))
    assert EARLY + 5 * 4096 <= len(flight) < EARLY + 5 * 4096 + 100
    assert one._early == 0
    assert len(messages(other.receive_bytes(flight, 0.0))) == 1
    assert other._early_granted == 0
    link.run_until_quiet()
    for event in messages(link.take_events(1)):
        taken(event)
    link.run_until_quiet()
    assert one._early == other._early_granted


@pytest.mark.requirement("R-22")
@pytest.mark.seeds(5, soak=500)
def test_what_may_be_sent_early_is_conserved_however_grants_and_bytes_cross(seed: int) -> None:
    dice = random.Random(seed)
    link = pair(weather=dice)
    one, other = link.engines
    for _ in range(30):
        if sender_of(link).admits(100_000):
            sender_of(link).transmit(bytes(dice.choice([10, 5000, 100_000])), mode=Mode.UNORDERED)
        for _ in range(dice.randrange(20)):
            link.step()
        for event in messages(link.take_events(1)):
            taken(event)
    link.run_until_quiet()
    for event in messages(link.take_events(1)):
        taken(event)
    link.run_until_quiet()
    assert one._early == other._early_granted
    assert other._early_granted + other._early_due == EARLY


@pytest.mark.requirement("R-22")
def test_a_stream_that_was_granted_credit_uses_nothing_of_what_may_be_sent_early() -> None:
    link = pair()
    one = link.engines[0]
    half, ticket = one.engine.channel(sends=True)
    sender_of(link).transmit(b"", attachments=[ticket])
    half.transmit(b"x" * 5000)
    for _ in range(3):
        link.run_until_quiet()
        for event in messages(link.take_events(1)):
            taken(event)
    left = one._early
    assert EARLY - 2000 < left < EARLY
    half.transmit(b"x" * 1_000_000)
    one.buffers_to_send(2**21)
    assert one._early == left


def test_small_limits_let_nothing_be_sent_early() -> None:
    assert carrier(limits=Limits(connection_bytes=64 * 4096))._early_most == 0
    assert "0880" not in written(carrier(limits=Limits(connection_bytes=64 * 4096)))


@pytest.mark.requirement("R-03", "R-22")
def test_large_messages_borrow_pass_and_repay() -> None:
    link = pair(limits=Limits(message=500_000, reassembly=600_000, channel_bytes=20_000, outbox=10**8))
    peer = link.engines[1].engine
    for number in range(6):
        sender_of(link).transmit(bytes([number]) * 300_000, mode=Mode.UNORDERED) if number == 0 else None
    for number in range(1, 6):
        while not sender_of(link).admits(300_000):
            link.run_until_quiet()
            for event in messages(link.take_events(1)):
                taken(event)
        sender_of(link).transmit(bytes([number]) * 300_000, mode=Mode.UNORDERED)
    link.run_until_quiet()
    for event in messages(link.take_events(1)):
        assert event.payload == event.payload[:1] * 300_000
        taken(event)
    sender_of(link).finish()
    link.run_for(1)
    assert peer.reader.reassembly.left == 600_000
    assert incoming_of(link.engines[1]) == {}
    assert budget_of(link.engines[1]).used == 0
    assert budget_of(link.engines[1]).windows == 0
    assert unlent_early_bytes_of(link.engines[1]) == 0


def test_bytes_of_a_chunk_that_has_begun_are_not_lent() -> None:
    made = opened(limits=Limits(channel_first=4096))
    message = bytes.fromhex("03 00 04 00 00 00") + encode_varint(4088) + bytes(4088)
    chunk = bytes.fromhex("00 01") + encode_varint(4096) + message
    feed(made, [chunk[:3000]])
    made._run_control()
    assert incoming_of(made)[6].window.lent == 0
    (event,) = messages(feed(made, [chunk[3000:]]))
    assert len(event.payload) == 4088


@pytest.mark.requirement("R-08")
def test_64_mib_into_a_stalled_peer_cost_little_more_than_what_the_caller_holds() -> None:
    link = pair(limits=Limits(message=64 * 1024 * 1024, reassembly=64 * 1024 * 1024))
    payload = b"x" * (64 * 1024 * 1024 - 100)
    stalled = link.engines[0]
    tracemalloc.start()
    sender_of(link).transmit(payload)
    while stalled.has_output():
        stalled.buffers_to_send(65_536)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


@pytest.mark.requirement("R-10")
def test_a_reset_in_the_midst_gives_the_credit_of_its_stream_back() -> None:
    link = pair()
    engine = link.engines[0].engine
    sender, ticket = engine.channel(sends=True)
    sender_of(link).transmit(b"", attachments=[ticket])
    sender.transmit(b"x" * 100_000)
    link.step()
    sender.cancel(Reason())
    link.run_for(2)
    for event in messages(link.take_events(1)):
        taken(event)
    sender_of(link).finish()
    link.run_for(2)
    for side in (0, 1):
        assert incoming_of(link.engines[side]) == {}
        assert budget_of(link.engines[side]).used == 0
        assert statistics_of(link.engines[side].engine).channels == 0


def test_more_streams_are_allowed_as_old_ones_are_consumed() -> None:
    link = pair(limits=Limits(channels=4), config=Config(streams=20))
    arrived = 0
    for number in range(300):
        sender_of(link).transmit(bytes([number % 256]), mode=Mode.UNORDERED)  # on a stream of its own
        link.run_until_quiet()
        for event in messages(link.take_events(1)):
            taken(event)
            arrived += 1
        link.run_for(0.03)
    assert arrived == 300
    assert not link.engines[1].engine.over


def test_unordered_messages_wait_for_streams_and_not_for_ever() -> None:
    link = pair(limits=Limits(channels=4), config=Config(streams=20))
    engine = link.engines[0].engine
    for number in range(50):
        sender_of(link).transmit(bytes([number]), mode=Mode.UNORDERED)
    link.run_until_quiet()
    came = messages(link.take_events(1))
    assert 20 < len(came) <= 28
    while came:
        taken(came.pop(0))
        link.run_until_quiet()
        came += messages(link.take_events(1))
    sender_of(link).finish()
    link.run_for(1)
    assert senders_of(engine) == {}


def test_datagrams_overtake_streams_and_give_way_when_the_link_is_slow() -> None:
    link = pair(config=Config(unreliable_queue=5))
    for _ in range(3):
        sender_of(link).transmit(b"x" * 1000)
    for number in range(10):
        sender_of(link).transmit(bytes([number]), mode=Mode.UNRELIABLE)
    link.run_until_quiet()
    came = [event.payload for event in messages(link.take_events(1))]
    assert came == [*(bytes([number]) for number in range(5, 10)), *[b"x" * 1000] * 3]


# ---------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(("tail", "clean"), [("", True), ("00 01 09 03", False), ("00", False)])
def test_the_end_of_the_stream_is_clean_between_frames(tail: str, clean: bool) -> None:
    made = opened()
    made.receive_bytes(bytes.fromhex(tail), 0.0)
    (event,) = made.receive_eof(0.0)
    assert isinstance(event, HungUp)
    assert event.is_clean is clean
    assert made.receive_bytes(b"\xff", 0.0) == ()


def test_a_pump_may_bound_the_frames_of_one_turn() -> None:
    made = opened()
    made.frames_at_once = 100
    text = bytes.fromhex("00 01 88 0f 03 08") + bytes.fromhex("05 00") * 963
    frames = made.engine.frames
    made.receive_bytes(bytes.fromhex("00 01 02 03 08") + bytes.fromhex("00 01 02 05 00") * 963, 0.0)
    assert made.engine.frames - frames == 100
    turns = 1
    while made.unparsed:
        made.receive_bytes(b"", 0.0)
        turns += 1
    assert made.engine.frames - frames == 964
    assert turns == 10
    assert len(text) > 0


@pytest.mark.requirement("R-18")
def test_a_turn_inside_one_large_chunk_is_bounded_too() -> None:
    made = opened()
    made.frames_at_once = 100
    frames = made.engine.frames
    made.receive_bytes(bytes.fromhex("00 01 82 18 03 08") + bytes.fromhex("05 00") * 1536, 0.0)
    assert made.engine.frames - frames <= 100 + 4096 // 2
    while made.unparsed:
        made.receive_bytes(b"", 0.0)
    assert made.engine.frames - frames == 1537


@pytest.mark.requirement("R-21")
@pytest.mark.seeds(100, soak=20_000)
def test_a_conversation_that_was_damaged_raises_nothing(seed: int) -> None:
    dice = random.Random(seed)
    link = pair(weather=dice)
    engine = link.engines[0].engine
    half, ticket = engine.channel(sends=True)
    sender_of(link).transmit(b"x", attachments=[ticket])
    for mode in Mode:
        half.transmit(b"y" * 200, mode=mode)
    half.cancel(Reason()) if seed % 2 else half.finish()
    data = bytearray(written(link.engines[0]).encode())
    raw = bytearray(bytes.fromhex(data.decode()))
    for _ in range(dice.randrange(1, 4)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    events = [*link.engines[1].receive_bytes(bytes(raw), 1.0)]
    written(link.engines[1])
    events += link.engines[1].events()
    failures = [event for event in events if isinstance(event, Failed)]
    assert len(failures) <= 1
    link.engines[1].handle_deadline(5.0)
    written(link.engines[1])


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize(
    "frame",
    ["04 00 00", "04 00 01", "03 00", "05 00", "06 00"],
    ids=["credit 0", "credit 1", "stop", "streams", "datagram"],
)
def test_frames_that_cost_the_peer_no_credit_count_for_a_turn(frame: str) -> None:
    made = opened()
    made.frames_at_once = 100
    made.receive_bytes(bytes.fromhex(frame) * 5000, 0.0)
    size = len(bytes.fromhex(frame))
    assert 5000 * size - made.unparsed <= 4 * 100 * size
    while made.unparsed:
        made.receive_bytes(b"", 0.0)
    assert not made.engine.over


def test_a_goodbye_says_why_the_connection_ends() -> None:
    leaving, staying = carrier(), carrier()
    goodbye = leaving.farewell(Reason("disk full", 7))  # before anything else was written
    assert goodbye == bytes.fromhex(HELLO) + b"\x07\x0b7 disk full"
    (parted,) = staying.receive_bytes(goodbye, 0.0)
    assert isinstance(parted, Parted)
    assert parted.reason == Reason("disk full", 7)
