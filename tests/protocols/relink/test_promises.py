"""The promises of every engine, for any input in any split; and what an observer is told."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, cast

import pytest

from muxkit.core.events import Failed
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import Arrived, Event
from muxkit.testing._pair import EngineCase, check_stream_engine, drain
from tests.protocols.relink._helpers import EPOCH, LINK, deliver, fed, listener, quiet, reconnect, taken, transactional
from tests.protocols.relink._numbered import NumberedEngine, told

if TYPE_CHECKING:
    from muxkit.core import StreamEngine

MESSAGE = "11 01 01 00 00 00 00 00"
NOP, PING, PONG, RESUME, SHUTDOWN = (f"{kind:02x}" + "00" * 7 for kind in (0x00, 0x20, 0x40, 0x60, 0x80))


class Notes:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.bytes = {"in": 0, "out": 0}

    def frame(self, direction: str, channel: str, name: str, size: int) -> None:
        self.seen.append((direction, channel, name, size))

    def credit(self, direction: str, channel: str, amount: int) -> None:
        raise AssertionError("Relink grants no credit")

    def state(self, channel: str, state: str) -> None:
        self.seen.append((channel, state))

    def timer(self, name: str) -> None:
        self.seen.append(("timer", name))

    def error(self, error: BaseException) -> None:
        self.seen.append((type(error).__name__,))

    def transport(self, direction: str, data: bytes | memoryview) -> None:
        self.bytes[direction] += len(data)


def test_an_observer_sees_each_packet_in_both_directions() -> None:
    notes = (Notes(), Notes())
    one = NumberedEngine(transactional(), is_connector=True, observer=notes[0])
    other = NumberedEngine(transactional(), is_connector=False, observer=notes[1])
    for engine in (one, other):
        engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    one.multicast([1, 2], (b"abc", b"de"))
    one.commit(1)
    one.ping()
    deliver(one, other)
    taken(other, 1)
    other.committed(1, through=0, now=0.0)
    deliver(other, one)
    one.close(1)
    deliver(one, other)
    deliver(other, one)
    deliver(one, other)
    deliver(other, one)
    assert notes[0].seen == [
        ("link", "connected"),
        ("out 1", "open"),
        ("out 2", "open"),
        ("out", "link", "ping", 0),
        ("out", "out 1", "message", 5),
        ("out", "out 2", "message", 5),
        ("out", "out 1", "commit", 0),
        ("in", "link", "pong", 0),
        ("in", "out 1", "committed", 0),
        ("out", "out 1", "close", 0),
        ("in", "link", "ping", 0),
        ("out", "link", "pong", 0),
        ("in", "out 1", "consumed", 0),
        ("out 1", "closed"),
        ("in", "out 1", "closed", 0),
    ]
    assert notes[1].seen == [
        ("link", "connected"),
        ("in", "link", "ping", 0),
        ("in 1", "open"),
        ("in 2", "open"),
        ("in", "in 1", "message", 5),
        ("in", "in 2", "message", 5),
        ("in", "in 1", "commit", 0),
        ("out", "link", "pong", 0),
        ("out", "in 1", "committed", 0),
        ("in", "in 1", "close", 0),
        ("out", "link", "ping", 0),
        ("in", "link", "pong", 0),
        ("in 1", "closed"),
        ("out", "in 1", "consumed", 0),
        ("out", "in 1", "closed", 0),
    ]
    other.handle_deadline(1.0)
    fed(other, "a0" + "00" * 7)
    assert notes[1].seen[-2:] == [("timer", "acks"), ("RemoteProtocolError",)]
    assert notes[1].bytes["in"] == 72


def test_an_observer_changes_nothing() -> None:
    with_notes = NumberedEngine(quiet(), is_connector=False, observer=Notes())
    without = NumberedEngine(quiet(), is_connector=False)
    data = MESSAGE * 3 + "11 01 02 00 03 00 00 00 61 62 63 00 00 00 00 00" + MESSAGE
    results = []
    for engine in (with_notes, without):
        engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
        results.append((fed(engine, data), engine.bytes_received))
    assert results[0] == results[1]
    assert results[0][1] == 48


# --- a flood


@pytest.mark.requirement("R-27")
def test_a_flood_of_the_smallest_packets_is_taken_in_turns() -> None:
    engine = NumberedEngine(quiet(), is_connector=False)
    engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    drain(engine)
    engine.frames_at_once = 100
    ping = bytes.fromhex("20" + "00" * 7)
    engine.receive_bytes(ping * 950, 0.0)
    left = []
    while engine.unparsed:
        left.append(engine.unparsed)
        engine.receive_bytes(b"", 0.0)
    assert left == [len(ping) * count for count in range(850, 0, -100)]
    assert drain(engine) == bytes.fromhex("40" + "00" * 7) * 950


# --- the promises of every engine


def made(config: Config, *, resumed: bool = False) -> NumberedEngine:
    """Return a listener's engine with two messages written and one queued."""
    engine = listener(config)
    for _ in range(2):
        engine.send(1, (b"x",))
    if config.listener_transactions:
        engine.commit(1, through=0)
    drain(engine)
    engine.send(2, (b"y",))
    if resumed:
        reconnect(engine)
        drain(engine)
    return engine


class OneByOne:
    """An engine that reports each message in an event of its own, however many came in one read."""

    def __init__(self, engine: NumberedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def events(self) -> list[Event]:
        events: list[Event] = []
        for event in self._engine.events():
            if isinstance(event, Arrived):
                events += [Arrived(event.receiver, n, [parts]) for n, parts in enumerate(event.messages, event.first)]
            else:
                events.append(event)
        return events


@pytest.mark.clause("relink-A02", "relink-H36")
@pytest.mark.requirement("R-21", "R-05")
@pytest.mark.parametrize("transactions", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_engine_keeps_the_promises_of_every_engine(transactions: bool, resumed: bool) -> None:
    config = transactional() if transactions else quiet()
    acks = ["0d 00 01 00 01 00 00 00", "2d 00 01 00 00 00 00 00"] + ["45 00 01 00 00 00 00 00"] * transactions
    resume = [RESUME] if resumed else []
    commits = ["01 00 03 00 00 00 00 00", "29 00 03 00 02 00 00 00"] if transactions else []
    transcript = [*acks, *resume, PING, "11 01 03 00 01 00 00 00 61 00 00 00 00 00 00 00"]
    transcript += ["31 00 03 00 02 00 00 00 03 00 00 00 00 00 00 00 61 62 63 00 00 00 00 00"]
    transcript += ["13 01 00 00 02 00 00 00 03 00 04 00 02 00 00 00 68 69 00 00 00 00 00 00"]
    transcript += [*commits, SHUTDOWN, NOP]
    data = b"".join(map(bytes.fromhex, transcript))
    case: EngineCase[Event] = EngineCase(
        make=lambda: cast("StreamEngine[Event]", OneByOne(made(config, resumed=resumed))),  # it passes on the rest
        is_failure=lambda event: isinstance(event, Failed),
        normalise=lambda event: told(event),
        transcripts=[data, data + bytes.fromhex("a0" + "00" * 7)],
        question=bytes.fromhex(PING),
    )
    check_stream_engine(case)


@pytest.mark.requirement("R-21", "R-17", "R-48")
@pytest.mark.seeds(200, soak=5000)
def test_packets_of_all_kinds_in_any_order_end_in_silence_or_not_at_all(seed: int) -> None:
    dice = random.Random(seed)
    config = transactional(window=4) if seed % 2 else quiet(window=4)
    engine = made(config, resumed=dice.random() < 0.5)
    kinds = [MESSAGE, PING, PONG, RESUME, SHUTDOWN, "13 01 00 00 02 00 00 00 01 00 02 00 00 00 00 00"]
    failed = False
    for _ in range(40):
        packet = bytearray.fromhex(dice.choice(kinds))
        if dice.random() < 0.7:
            first = dice.choice((0x01, 0x21, 0x41, 0x05, 0x25, 0x45, 0x65, 0x85, 0x09, 0x29, 0x0D, 0x2D, 0x4D, 0x6D))
            packet = bytearray((first, 0, dice.randrange(4), 0, dice.choice((0, 1, 2, 255)), 0, 0, 0))
            if packet[4] == 255:
                packet[4:] = b"\xff" * 4
        engine.receive_bytes(bytes(packet), 0.0)
        for event in engine.events():
            assert not failed
            failed = isinstance(event, Failed)
        for channel in engine.peer_channels:
            incoming = engine.state.theirs.live[channel]
            if incoming.kept and dice.random() < 0.5:
                engine.consume(channel, through=incoming.consumed_through + 1, now=0.0)
        if dice.random() < 0.3:
            drain(engine)
        assert failed == engine.over
