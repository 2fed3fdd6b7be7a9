"""Simulated links between two engines, and random commands on both sides with a model of what was sent."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import Consumed, Lent, Reason, Reset, Sending, Stop
from muxkit.core.events import Failed
from muxkit.protocols.aqueduct import Carrier, Config, Engine, Mode, Role, Ticket
from muxkit.protocols.aqueduct.events import Arrived, Event
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender, Promise
from tests.protocols.aqueduct._helpers import (
    ended_half,
    flat,
    receivers_of,
    senders_of,
    statistics_of,
    summary_of,
    taken,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# --- links

WINDOW = 4096  # bytes of a stream, beside what is lent
STREAMS = 64  # of one side at once


@attrs.define
class Pipe:
    """One direction of one stream."""

    waiting: bytearray = attrs.Factory(bytearray)
    fin: bool = False
    reset: bool = False
    room: int = WINDOW
    parked: bool = False
    lent: int = 0


class SimLink:
    """A link as QUIC: streams that overtake each other, credit, resets, datagrams. The sides are 0 and 1.

    Without weather nothing is lost, and everything arrives in the order in which it was written.
    """

    def __init__(
        self,
        one: Engine,
        other: Engine,
        listener: Callable[[int, Event | Arrived], None],
        *,
        weather: random.Random | None = None,
        loss: float = 0.2,
        late: float = 0.02,
    ) -> None:
        self.engines = (one, other)
        self.now = 0.0
        one.state.clock = other.state.clock = self
        self._listener = listener
        self._dice = weather
        self._loss, self._late = loss, late
        self._pipes: tuple[dict[int, Pipe], ...] = ({}, {})  # by the side that writes
        self._flying: tuple[list[tuple[float, bytes]], ...] = ([], [])  # datagrams, by the side that they go to
        self._collected: tuple[defaultdict[int, int], ...] = (defaultdict(int), defaultdict(int))
        self.bytes = 0

    # --- moving on

    def step(self) -> bool:
        """Move one batch in each direction; True if anything moved."""
        moved = False
        for side in (0, 1):
            moved |= self._pull(side)
        for side in (0, 1):
            moved |= self._deliver(side)
        return moved

    def current_time(self) -> float:
        """The clock of both engines."""
        return self.now

    def run_until_quiet(self) -> None:
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("the engines are not quiet")

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(100_000):
            if self.step():
                continue
            due = [deadline for engine in self.engines if (deadline := engine.next_deadline()) is not None]
            due += [when for flying in self._flying for when, _ in flying]
            moment = min([end, *due])
            self.now = max(self.now, moment)
            for side, engine in enumerate(self.engines):
                deadline = engine.next_deadline()
                if deadline is not None and deadline <= self.now:
                    self._report(side, engine.handle_deadline(self.now))
            if self.now >= end and not self.step():
                return
        raise AssertionError("the engines are busy for ever")

    def _pull(self, side: int) -> bool:
        engine, pipes, moved = self.engines[side], self._pipes[side], False
        for control in engine.control_to_run():
            moved = True
            self._run(side, control)
        while (data := engine.datagram_to_send(1200)) is not None:
            moved = True
            self._throw(1 - side, data)
        for _ in range(100):
            stream = engine.next_stream(len(pipes) < STREAMS)
            if stream is None:
                break
            pipe = pipes.setdefault(stream, Pipe())
            limit = pipe.room if self._dice is None else min(pipe.room, self._dice.choice((1, 7, 100, 5000)))
            data, fin = engine.stream_to_send(stream, limit)
            moved = moved or bool(data) or fin
            pipe.waiting += data
            pipe.room -= len(data)
            pipe.fin = fin
            self.bytes += len(data)
        self._collect(side)
        return moved

    def _run(self, side: int, control: object) -> None:
        match control:
            case Reset(stream):
                pipe = self._pipes[side].get(stream)
                if pipe is not None:
                    pipe.reset = True
            case Consumed(stream, amount):
                pipe = self._pipes[1 - side].get(stream)
                if pipe is not None:
                    repaid = min(pipe.lent, amount)
                    pipe.lent -= repaid
                    self._give(1 - side, stream, pipe, amount - repaid)
            case Lent(stream, amount):
                pipe = self._pipes[1 - side].get(stream)
                if pipe is not None:
                    pipe.lent += amount
                    self._give(1 - side, stream, pipe, amount)
            case Stop(stream):
                if stream in self._pipes[1 - side]:
                    self.engines[1 - side].receive_stopped(stream, self.now)
                    self._collect(1 - side)

    def _give(self, side: int, stream: int, pipe: Pipe, amount: int) -> None:
        pipe.room += amount
        if amount:
            self.engines[side].stream_writable(stream)

    def _throw(self, side: int, data: bytes) -> None:
        if self._dice is None:
            self._flying[side].append((self.now, data))
            return
        for _ in range(2 if self._dice.random() < 0.1 else 1):
            if self._dice.random() >= self._loss:
                delay = self._dice.random() * (3 if self._dice.random() < self._late else 0.05)
                self._flying[side].append((self.now + delay, data))

    def _deliver(self, side: int) -> bool:
        """Deliver part of some streams, and the datagrams that are due, to this side."""
        engine, pipes, moved = self.engines[side], self._pipes[1 - side], False
        flying = self._flying[side]
        for thrown in [thrown for thrown in flying if thrown[0] <= self.now]:
            flying.remove(thrown)
            self._report(side, engine.receive_datagram(thrown[1], self.now))
            moved = True
        ready = [stream for stream, pipe in pipes.items() if pipe.waiting or pipe.fin or pipe.reset]
        if self._dice is not None:
            self._dice.shuffle(ready)
            ready = ready[: self._dice.randrange(1, 4)]
        for stream in ready:
            moved = True
            self._advance(side, stream, pipes)
        self._collect(side)
        return moved

    def _advance(self, side: int, stream: int, pipes: dict[int, Pipe]) -> None:
        engine, pipe = self.engines[side], pipes[stream]
        if pipe.reset and (self._dice is None or self._dice.random() < 0.7):
            del pipes[stream]
            self._report(side, engine.receive_reset(stream, self.now))
            return
        size = len(pipe.waiting)
        if self._dice is not None and size:
            size = self._dice.randrange(1, size + 1)
        data = bytes(pipe.waiting[:size])
        del pipe.waiting[:size]
        fin = pipe.fin and not pipe.waiting
        if fin:
            del pipes[stream]
        self._report(side, engine.receive_stream(stream, data, fin, self.now))

    def _collect(self, side: int) -> None:
        self._report(side, self.engines[side].events())

    def _report(self, side: int, events: Iterable[Event]) -> None:
        for event in flat(events):
            assert not isinstance(event, Failed), f"a correct peer was blamed: {event.error}"
            self._listener(side, event)


class CarrierLink:
    """A link that is one byte stream."""

    def __init__(
        self,
        one: Engine,
        other: Engine,
        listener: Callable[[int, Event | Arrived], None],
        *,
        weather: random.Random | None = None,
    ) -> None:
        self.engines = (one, other)
        self.carriers = (Carrier(one), Carrier(other))
        self.now = 0.0
        one.state.clock = other.state.clock = self
        self._listener = listener
        self._dice = weather
        self._pipes = (bytearray(), bytearray())  # by the side that they go to

    def step(self) -> bool:
        moved = False
        for side, carrier in enumerate(self.carriers):
            if carrier.has_output():
                limit = 65_536 if self._dice is None else self._dice.choice((1, 50, 1000, 65_536))
                data = b"".join(carrier.buffers_to_send(limit))
                assert data, "there is output, and nothing came"
                self._pipes[1 - side].extend(data)
                moved = True
            self._collect(side)
        for side, carrier in enumerate(self.carriers):
            pipe = self._pipes[side]
            if pipe:
                size = len(pipe) if self._dice is None else self._dice.randrange(1, len(pipe) + 1)
                data = bytes(pipe[:size])
                del pipe[:size]
                self._report(side, carrier.receive_bytes(data, self.now))
                moved = True
            self._collect(side)
        return moved

    def current_time(self) -> float:
        """The clock of both engines."""
        return self.now

    def run_until_quiet(self) -> None:
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("the engines are not quiet")

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.run_until_quiet()
            due = [deadline for engine in self.engines if (deadline := engine.next_deadline()) is not None]
            self.now = max(self.now, min([end, *due]))
            for side, carrier in enumerate(self.carriers):
                deadline = carrier.next_deadline()
                if deadline is not None and deadline <= self.now:
                    self._report(side, carrier.handle_deadline(self.now))
            if self.now >= end:
                self.run_until_quiet()
                return

    def _collect(self, side: int) -> None:
        self._report(side, self.engines[side].events())

    def _report(self, side: int, events: Iterable[Event]) -> None:
        for event in flat(events):
            assert not isinstance(event, Failed), f"a correct peer was blamed: {event.error}"
            self._listener(side, event)


# --- applications

Half = EngineHalf
LIMITS = Limits(resets_per_second=100_000, resets_burst=100_000, message=20_000, reassembly=30_000, channels=400)
CONFIG = Config(in_flight=20, unreliable_queue=5)
SIZES = (4, 4, 5, 20, 300, 3000, 9000)


@attrs.define(eq=False)
class Sent:
    """A message as its sender knows it."""

    channel: int
    serial: int
    mode: Mode
    receipt: Promise | None
    side: int
    arrived: bool = False


@attrs.define(eq=False)
class Inbox:
    """The messages that came for one receiver."""

    serials: list[int] = attrs.Factory(list)
    unread: list[Arrived] = attrs.Factory(list)


class World:
    """Two engines, two applications and a link. Applications drop some of the halves that they are sent."""

    def __init__(
        self,
        seed: int,
        make_link: Callable[
            [Engine, Engine, Callable[[int, Event | Arrived], None], random.Random], SimLink | CarrierLink
        ],
    ) -> None:
        self.dice = random.Random(seed)
        self.engines = Engine(Role.CLIENT, CONFIG, limits=LIMITS), Engine(Role.SERVER, CONFIG, limits=LIMITS)
        self.link = make_link(self.engines[0], self.engines[1], self._hear, self.dice)
        self.halves: tuple[list[Half], ...] = tuple([engine.entrypoint] for engine in self.engines)
        self.made: list[Half] = [engine.entrypoint for engine in self.engines]
        self.sent: dict[int, Sent] = {}
        self.inboxes: tuple[dict[EngineReceiver, Inbox], ...] = (defaultdict(Inbox), defaultdict(Inbox))
        self.outcomes: dict[Half, str] = {}
        self.serial = 0
        self.calm = False
        self.done: defaultdict[str, int] = defaultdict(int)

    # --- events

    def _hear(self, side: int, event: Event | Arrived) -> None:
        self.done[str(summary_of(event)[0])] += 1
        if isinstance(event, Arrived):
            self._hear_message(side, event)
        elif (half := ended_half(event)) is not None:
            assert isinstance(half, Half)
            assert half not in self.outcomes, f"{half.id} ended twice"
            self.outcomes[half] = str(summary_of(event)[0])

    def _hear_message(self, side: int, message: Arrived) -> None:
        serial = int.from_bytes(message.payload[:4])
        sent = self.sent[serial]
        inbox = self.inboxes[side][message.receiver]
        assert (sent.channel, sent.side) == (message.receiver.id, 1 - side), "a message for another channel"
        assert serial not in inbox.serials, "a message came twice"
        assert message.payload == payload_of(serial, len(message.payload)), "a message was changed"
        if sent.mode is Mode.ORDERED:
            ordered = [it for it in inbox.serials if self.sent[it].mode is Mode.ORDERED]
            assert not ordered or ordered[-1] < serial, "a message was overtaken"
        sent.arrived = True
        inbox.serials.append(serial)
        inbox.unread.append(message)
        for attachment in message.attachments:
            half = attachment.half
            self.engines[side].accept(half)
            self.made.append(half)
            if half.outcome is not None:
                continue
            self.halves[side].append(half)
            if not self.calm and self.dice.random() < 0.2:
                self._drop(side, half)

    # --- commands

    def act(self) -> None:
        side = self.dice.randrange(2)
        command = self.dice.choice(self._commands)
        try:
            command(self, side)
            self.done[command.__name__] += 1
        except LocalProtocolError:
            self.done["refused"] += 1

    def _pick(self, side: int, kind: type[Half]) -> Half:
        alive = [half for half in self.halves[side] if isinstance(half, kind) and not half.gone and half.id is not None]
        if not alive:
            raise LocalProtocolError("nothing to choose from")
        return self.dice.choice(alive)

    def _send(self, side: int) -> None:
        sender = self._pick(side, EngineSender)
        assert isinstance(sender, EngineSender)
        self.send(side, sender, self.dice.choice(list(Mode)), self.dice.choice((0, 0, 1, 2)), self.dice.choice(SIZES))

    def send(self, side: int, sender: EngineSender, mode: Mode, attached: int, size: int) -> None:
        tickets, kept = [], []
        for _ in range(attached):
            half, ticket = self._channel(side)
            tickets.append(ticket)
            kept.append(half)
        wants = self.dice.random() < 0.5
        serial = self.serial + 1
        # The events about a call come with the next poll, so the model may be updated after the call.
        receipt = sender.transmit(
            payload_of(serial, size), attachments=tickets, mode=mode, receipt=wants, headers=[(b"k", b"v")]
        )
        self.serial = serial
        assert sender.id is not None
        self.sent[serial] = Sent(sender.id, serial, mode, receipt, side)
        self.halves[side].extend(kept)
        self.made.extend(kept)

    def _channel(self, side: int) -> tuple[Half, Ticket]:
        oneshot = self.dice.random() < 0.2
        if self.dice.random() < 0.5:
            return self.engines[side].channel(sends=True, oneshot=oneshot)
        return self.engines[side].channel(sends=False, oneshot=oneshot)

    def _finish(self, side: int) -> None:
        sender = self._pick(side, EngineSender)
        assert isinstance(sender, EngineSender)
        if sender.id != 0 or self.dice.random() < 0.05:
            sender.finish()

    def _cancel(self, side: int) -> None:
        sender = self._pick(side, EngineSender)
        assert isinstance(sender, EngineSender)
        if sender.id != 0 or self.dice.random() < 0.05:
            sender.cancel(Reason())

    def _close(self, side: int) -> None:
        receiver = self._pick(side, EngineReceiver)
        if receiver.id != 0 or self.dice.random() < 0.05:
            self._drop(side, receiver)

    def _forget(self, side: int) -> None:
        if self.dice.random() < 0.2:
            half = self._pick(side, self.dice.choice((EngineSender, EngineReceiver)))
            if half.id != 0:
                self.engines[side].forget(half)

    def _drop(self, side: int, half: Half) -> None:
        if isinstance(half, EngineReceiver):
            half.stop(Reason())
            self.outcomes[half] = "closed"
        elif isinstance(half, EngineSender) and half.phase is Sending.OPEN:
            half.cancel(Reason())

    def _consume(self, side: int) -> None:
        boxes = [inbox for inbox in self.inboxes[side].values() if inbox.unread]
        if boxes:
            inbox = self.dice.choice(boxes)
            taken(inbox.unread.pop(0))

    def _move(self, side: int) -> None:
        for _ in range(self.dice.randrange(1, 6)):
            self.link.step()

    def _wait(self, side: int) -> None:
        self.link.run_for(self.dice.choice((0.01, 0.03, 0.3, 1.5)))

    _commands = (
        _send, _send, _send, _send, _send, _send, _finish, _cancel, _close, _forget,
        _consume, _consume, _consume, _consume, _move, _move, _move, _move, _wait,
    )  # fmt: skip

    # --- invariants

    def run_until_idle(self) -> None:
        """Consume everything that came, and let time pass until nothing moves."""
        for _ in range(30):
            self.link.run_for(1.0)
            for side in (0, 1):
                for inbox in self.inboxes[side].values():
                    while inbox.unread:
                        taken(inbox.unread.pop(0))
        self.link.run_for(1.0)

    def check_agreement(self) -> None:
        """Check on an idle link that each sender has its receiver on the other side."""
        one, other = self.engines
        assert set(senders_of(one)) == set(receivers_of(other)), (set(senders_of(one)), set(receivers_of(other)))
        assert set(senders_of(other)) == set(receivers_of(one)), (set(senders_of(other)), set(receivers_of(one)))
        for engine, peer in ((one, other), (other, one)):
            for id, sender in senders_of(engine).items():
                receiver = receivers_of(peer)[id]
                assert receiver.attached, f"{id} is open, and its receiver was not taken"
                assert sender.phase is Sending.OPEN, f"{id} has ended, and the receiver does not know"
                assert sender.sent_unreliable == sender.counted == sender.reported == receiver.unreliable.reported
                assert len(sender.reliable) == 0

    def end(self) -> None:
        """Finish all senders and check that nothing is left."""
        self.calm = True
        for side in (0, 1):
            for half in self.halves[side]:
                if (
                    isinstance(half, EngineSender)
                    and not half.gone
                    and half.phase is Sending.OPEN
                    and half.id is not None
                ):
                    half.finish()
        self.run_until_idle()
        for engine in self.engines:
            statistics = statistics_of(engine)
            assert statistics.channels == 0, [*senders_of(engine), *receivers_of(engine)]
            assert (statistics.streams_in, statistics.streams_out, statistics.outbox) == (0, 0, 0), statistics
            state = engine.state
            assert (state.closing, state.forgets, state.unread_datagrams) == ({}, {}, 0)
            assert engine.reader.reassembly.left == engine.reader.reassembly.total
            assert state.table.census.waiting == 0
            assert not state.flushing
            assert engine.next_deadline() is None
        for half in self.made:
            assert half.outcome is not None, f"{half.id} never ended"
            assert half.outcome is not Outcome.FINISHED or self.outcomes[half] == "Finished"
        self._check_messages()

    def _check_messages(self) -> None:
        finished = {
            (side, half.id)
            for half, outcome in self.outcomes.items()
            for side in (0, 1)
            if outcome == "Finished" and half in self.halves[side] and isinstance(half, EngineSender)
        }
        for sent in self.sent.values():
            if (sent.side, sent.channel) in finished and sent.mode is not Mode.UNRELIABLE:
                assert sent.arrived, "a channel finished, and a message of it never came"
            if sent.receipt is not None:
                assert sent.receipt.arrived is not None, "it is not known what became of a message"
                assert sent.arrived or not sent.receipt.arrived, "a message was acked that never came"


def payload_of(serial: int, size: int) -> bytes:
    return serial.to_bytes(4).ljust(size, b"%d" % (serial % 10))
