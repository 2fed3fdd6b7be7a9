"""Random commands on both sides of a connection, a model of what was sent, and the invariants at the end."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import Sending
from muxkit.protocols.aqueduct import (
    Arrived,
    Config,
    Ended,
    Engine,
    Event,
    Mode,
    Outcome,
    Promise,
    ReceiverMachine,
    Role,
    SenderMachine,
    Ticket,
)
from tests.protocols.aqueduct._helpers import summary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.protocols.aqueduct._link import CarrierLink, SimLink

Half = SenderMachine | ReceiverMachine
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
        make_link: Callable[[Engine, Engine, Callable[[int, Event], None], random.Random], SimLink | CarrierLink],
    ) -> None:
        self.dice = random.Random(seed)
        self.engines = Engine(Role.CLIENT, CONFIG, limits=LIMITS), Engine(Role.SERVER, CONFIG, limits=LIMITS)
        self.link = make_link(self.engines[0], self.engines[1], self._hear, self.dice)
        self.halves: tuple[list[Half], ...] = tuple([engine.entrypoint] for engine in self.engines)
        self.made: list[Half] = [engine.entrypoint for engine in self.engines]
        self.sent: dict[int, Sent] = {}
        self.inboxes: tuple[dict[ReceiverMachine, Inbox], ...] = (defaultdict(Inbox), defaultdict(Inbox))
        self.outcomes: dict[Half, str] = {}
        self.serial = 0
        self.calm = False
        self.done: defaultdict[str, int] = defaultdict(int)

    # --- events

    def _hear(self, side: int, event: Event) -> None:
        self.done[str(summary_of(event)[0])] += 1
        if isinstance(event, Arrived):
            self._hear_message(side, event)
        elif isinstance(event, Ended):
            assert event.half not in self.outcomes, f"{event.half.id} ended twice"
            self.outcomes[event.half] = str(summary_of(event)[0])

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
        sender = self._pick(side, SenderMachine)
        assert isinstance(sender, SenderMachine)
        self.send(side, sender, self.dice.choice(list(Mode)), self.dice.choice((0, 0, 1, 2)), self.dice.choice(SIZES))

    def send(self, side: int, sender: SenderMachine, mode: Mode, attached: int, size: int) -> None:
        engine, tickets, kept = self.engines[side], [], []
        for _ in range(attached):
            half, ticket = self._channel(side)
            tickets.append(ticket)
            kept.append(half)
        wants = self.dice.random() < 0.5
        serial = self.serial + 1
        # The events about a call come with the next poll, so the model may be updated after the call.
        receipt = engine.send(
            sender, payload_of(serial, size), attachments=tickets, mode=mode, receipt=wants, headers=[(b"k", b"v")]
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
        sender = self._pick(side, SenderMachine)
        assert isinstance(sender, SenderMachine)
        if sender.id != 0 or self.dice.random() < 0.05:
            self.engines[side].finish(sender)

    def _cancel(self, side: int) -> None:
        sender = self._pick(side, SenderMachine)
        assert isinstance(sender, SenderMachine)
        if sender.id != 0 or self.dice.random() < 0.05:
            self.engines[side].cancel(sender, self.link.now)

    def _close(self, side: int) -> None:
        receiver = self._pick(side, ReceiverMachine)
        if receiver.id != 0 or self.dice.random() < 0.05:
            self._drop(side, receiver)

    def _forget(self, side: int) -> None:
        if self.dice.random() < 0.2:
            half = self._pick(side, self.dice.choice((SenderMachine, ReceiverMachine)))
            if half.id != 0:
                self.engines[side].forget(half, self.link.now)

    def _drop(self, side: int, half: Half) -> None:
        if isinstance(half, ReceiverMachine):
            self.engines[side].close(half, self.link.now)
            self.outcomes[half] = "closed"
        elif half.state is Sending.OPEN:
            self.engines[side].cancel(half, self.link.now)

    def _consume(self, side: int) -> None:
        boxes = [inbox for inbox in self.inboxes[side].values() if inbox.unread]
        if boxes:
            inbox = self.dice.choice(boxes)
            self.engines[side].consumed(inbox.unread.pop(0))

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
                        self.engines[side].consumed(inbox.unread.pop(0))
        self.link.run_for(1.0)

    def check_agreement(self) -> None:
        """Check on an idle link that each sender has its receiver on the other side."""
        one, other = self.engines
        assert set(one.senders) == set(other.receivers), (set(one.senders), set(other.receivers))
        assert set(other.senders) == set(one.receivers), (set(other.senders), set(one.receivers))
        for engine, peer in ((one, other), (other, one)):
            for id, sender in engine.senders.items():
                receiver = peer.receivers[id]
                assert receiver.attached, f"{id} is open, and its receiver was not taken"
                assert sender.state is Sending.OPEN, f"{id} has ended, and the receiver does not know"
                assert sender.sent_unreliable == sender.counted == sender.reported == receiver.unreliable.reported
                assert len(sender.reliable) == 0

    def end(self) -> None:
        """Finish all senders and check that nothing is left."""
        self.calm = True
        for side, engine in enumerate(self.engines):
            for half in self.halves[side]:
                if (
                    isinstance(half, SenderMachine)
                    and not half.gone
                    and half.state is Sending.OPEN
                    and half.id is not None
                ):
                    engine.finish(half)
        self.run_until_idle()
        for engine in self.engines:
            statistics = engine.statistics()
            assert statistics.channels == 0, [*engine.senders, *engine.receivers]
            assert (statistics.streams_in, statistics.streams_out, statistics.outbox) == (0, 0, 0), statistics
            registry = engine._registry
            assert (registry.closing, registry._forgets, registry.connection.unread_datagrams) == ({}, {}, 0)
            assert engine._incoming.reassembly.left == engine._incoming.reassembly.total
            assert registry.table.census.waiting == 0
            assert not registry._flushing
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
            if outcome == "Finished" and half in self.halves[side] and isinstance(half, SenderMachine)
        }
        for sent in self.sent.values():
            if (sent.side, sent.channel) in finished and sent.mode is not Mode.UNRELIABLE:
                assert sent.arrived, "a channel finished, and a message of it never came"
            if sent.receipt is not None:
                assert sent.receipt.arrived is not None, "it is not known what became of a message"
                assert sent.arrived or not sent.receipt.arrived, "a message was acked that never came"


def payload_of(serial: int, size: int) -> bytes:
    return serial.to_bytes(4).ljust(size, b"%d" % (serial % 10))
