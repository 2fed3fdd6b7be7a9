"""Two engines, random commands on both, a model of what each sent, and the invariants of every moment."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core.events import Cancelled, Confirmed, Failed, Finished, Opened, Received, Refused, Silent, Stopped
from muxkit.protocols.bpmux import Config, Engine, Entity, Event, Kind, Life, Receiver, Requested, Responded, Sender
from muxkit.testing._pair import EnginePair
from tests.protocols.bpmux._books import Wire, check_books
from tests.protocols.bpmux._helpers import channel_of, entity_of, sums_of, unread_by

if TYPE_CHECKING:
    from collections.abc import Callable

MIRROR = {
    Kind.REQUEST_OUT: Kind.REQUEST_IN,
    Kind.REQUEST_IN: Kind.REQUEST_OUT,
    Kind.SINK_OUT: Kind.STREAM_IN,
    Kind.STREAM_IN: Kind.SINK_OUT,
    Kind.STREAM_OUT: Kind.SINK_IN,
    Kind.SINK_IN: Kind.STREAM_OUT,
}

TIGHT = Limits(
    channel_bytes=500, channel_floor=50, connection_bytes=3000, message=2000, reassembly=2500, resets_burst=100_000
)


@attrs.define(eq=False)
class Line:
    """The messages of one entity in one direction, as the sender knows them."""

    sent: list[bytes] = attrs.Factory(list)
    came: int = 0
    torn: bool = False  # aborted, or stopped by the other side


class World:
    """A connection with random commands on both ends."""

    def __init__(
        self, seed: int, limits: Limits = TIGHT, *, config: Config | None = None, other: Config | None = None
    ) -> None:
        self.dice = random.Random(seed)
        config = config or Config(keepalive=None)
        self.pair: EnginePair[Engine, Event] = EnginePair(
            Engine(config, limits=limits),
            Engine(other or config, limits=limits),
            weather=self.dice,
            listener=self._hear,
        )
        self.engines = self.pair.engines
        self.wires = (Wire(), Wire())
        self.lines: dict[Entity, Line] = {}  # by the entity to send on
        self.first: dict[Entity, bytes] = {}  # opening payloads, by each half of the opener
        self.known: tuple[list[Entity], list[Entity]] = ([], [])  # to the application of each side
        self.inbox: tuple[dict[Receiver, list[int]], ...] = (defaultdict(list), defaultdict(list))
        self.openings: tuple[list[int], list[int]] = ([], [])
        self.announced: dict[tuple[int, Kind, int], Entity] = {}  # the sender's entity of each receiving one
        self.stops: set[Entity] = set()
        self.serial = 0
        self.refused = 0
        self.done = 0
        self.largest = limits.message
        for side in (0, 1):
            engine = self.engines[side]
            self.known[side].extend([engine.top_sink, engine.top_stream])
            self.announced[side, Kind.SINK_OUT, 0] = engine.top_sink
            self.lines[engine.top_sink] = Line()

    # --- events

    def _partner(self, side: int, entity: Entity) -> Entity:
        """Return the sender's entity of a receiving one."""
        if entity.is_top:
            return self.engines[1 - side].top_sink
        return self.announced[1 - side, MIRROR[entity.kind], entity.id]

    def _hear(self, side: int, event: Event) -> None:
        match event:
            case Failed() | Silent():
                raise AssertionError(f"a legal peer was reported: {event}")
            case Opened(channel, payload):
                self._hear_opening(side, payload, channel.sender, channel.receiver)
            case Requested(request, payload):
                self._hear_opening(side, payload, request)
            case Received(receiver, payloads):
                for payload in payloads:
                    self._hear_message(side, receiver, payload)
            case Responded(receiver, payload):
                self._hear_message(side, receiver, payload)
                self._gone(side, receiver)
            case Finished(half):
                entity = entity_of(half)
                if entity not in self.stops:
                    line = self.lines[self._partner(side, entity)]
                    assert line.torn or line.came == len(line.sent), "an end overtook a message"
                self._gone(side, entity)
            case Confirmed(half):
                entity = entity_of(half)
                if entity in self.lines and not self.lines[entity].torn:
                    line = self.lines[entity]
                    assert line.came == len(line.sent), "confirmed, and not everything had come"
                self._gone(side, entity)
            case Cancelled(half) | Stopped(half) | Refused(half):
                self._gone(side, entity_of(half))
            case _:
                pass

    def _hear_opening(self, side: int, payload: bytes, *halves: object) -> None:
        for half in halves:
            if isinstance(half, Entity):
                opener = self.announced[1 - side, MIRROR[half.kind], half.id]
                assert payload == self.first[opener], "an opening payload was changed"
                self.known[side].append(half)
                self.announced[side, half.kind, half.id] = half
                if not half.receives:
                    self.lines[half] = Line(torn=opener in self.stops)
        self.openings[side].append(len(payload))

    def _hear_message(self, side: int, receiver: object, payload: bytes) -> None:
        assert isinstance(receiver, Receiver)  # as all of this engine are
        line = self.lines[self._partner(side, receiver)]
        assert payload == line.sent[line.came], "a message was lost, changed or overtaken"
        line.came += 1
        self.inbox[side][receiver].append(len(payload))

    def _gone(self, side: int, entity: Entity) -> None:
        self.known[side].remove(entity)

    # --- commands

    def act(self) -> None:
        """Run one random command on one side; it succeeds or is refused as a whole."""
        side = self.dice.randrange(2)
        command = self.dice.choice(self._commands)
        before = _numbers(self.engines[side])
        try:
            command(self, side)
            self.done += 1
        except LocalProtocolError:
            self.refused += 1
            assert _numbers(self.engines[side]) == before, f"{command.__name__} was refused and changed something"

    def _size(self) -> int:
        return self.dice.choice((0, 0, 1, 2, 10, 100, 400, 501, self.largest))

    def _payload(self) -> bytes:
        self.serial += 1
        size = self._size()
        return self.serial.to_bytes(4).rjust(size, b"x")[:size] if size >= 4 else b"abc"[:size]

    def _pick(self, side: int, test: Callable[[Entity], bool] = lambda entity: True) -> Entity:
        choices = [
            entity for entity in self.known[side] if test(entity) and (not entity.is_top or self.dice.random() < 0.3)
        ]
        if not choices:
            raise LocalProtocolError("nothing to choose from")
        return self.dice.choice(choices)

    def _pick_sender(self, side: int) -> Sender:
        sender = self._pick(side, lambda entity: not entity.receives)
        assert isinstance(sender, Sender)
        return sender

    def _open(self, side: int) -> None:
        engine, payload = self.engines[side], self._payload()
        credit = self.dice.choice((None, None, 0, 7, 3000))
        kind = self.dice.randrange(4)
        halves: tuple[Sender | Receiver, ...]
        if kind == 0:
            halves = (engine.open_sink(payload),)
        elif kind == 1:
            halves = (engine.open_stream(payload, credit=credit),)
        elif kind == 2:
            halves = engine.open_duplex(payload, credit=credit)
        else:
            halves = (engine.open_request(payload, credit=credit),)
        for half in halves:
            self.known[side].append(half)
            self.announced[side, half.kind, half.id] = half
            self.first[half] = payload
        if not halves[0].receives:
            self.lines[halves[0]] = Line()

    def _send(self, side: int) -> None:
        entity = self._pick_sender(side)
        payload = self._payload()
        end = self.dice.choice((None, None, None, b"", b"bye")) if entity.kind is not Kind.REQUEST_IN else None
        if entity.is_top:
            end = None
        entity.send(payload, end=end)
        self.lines[entity].sent.append(payload)

    def _send_many(self, side: int) -> None:
        entity = self._pick_sender(side)
        payloads = [self._payload() for _ in range(5)]
        if entity.try_send_all(payloads):
            self.lines[entity].sent.extend(payloads)

    def _try_send(self, side: int) -> None:
        entity = self._pick_sender(side)
        payload = self._payload()
        if entity.try_send(payload) is not None:
            self.lines[entity].sent.append(payload)

    def _end(self, side: int) -> None:
        entity = self._pick(side)
        if entity.is_top and self.dice.random() < 0.9:
            return
        entity.end(self.dice.choice((b"", b"", b"over", self._payload())))
        if entity.receives:
            self.stops.add(entity)
            self._tear_other(side, entity)

    def _abort(self, side: int) -> None:
        entity = self._pick(side)
        if entity.is_top and self.dice.random() < 0.9:
            return
        entity.abort()
        if entity.receives:
            self.stops.add(entity)
            self._tear_other(side, entity)
        elif entity in self.lines:
            self.lines[entity].torn = True

    def _tear_other(self, side: int, entity: Entity) -> None:
        if entity.is_top:
            # Openings of the other side may be declined.
            self.lines[self.engines[1 - side].top_sink].torn = True
        else:
            for line_of in (self.announced.get((1 - side, MIRROR[entity.kind], entity.id)),):
                if line_of is not None and line_of in self.lines:
                    self.lines[line_of].torn = True

    def _credit(self, side: int) -> None:
        self._pick(side).give_credit(self.dice.choice((0, 1, 3, 600)))

    def _ping(self, side: int) -> None:
        self._pick(side).ping()

    def _watch(self, side: int) -> None:
        self._pick_sender(side).notify_when_room(1)

    def _refuse(self, side: int) -> None:
        entity = self._pick(side, lambda entity: entity.kind in (Kind.STREAM_IN, Kind.SINK_IN, Kind.REQUEST_IN))
        for half in (entity, entity.twin):
            if half is not None and half.receives:
                self.stops.add(half)
                self._tear_other(side, half)
        self.engines[side].refuse(channel_of(entity))

    def _consume(self, side: int) -> None:
        boxes = [entity for entity, sizes in self.inbox[side].items() if sizes]
        if boxes:
            entity = self.dice.choice(boxes)
            entity.consumed((), self.inbox[side][entity].pop(0))
        if self.openings[side]:
            self.engines[side].consumed_opening(self.openings[side].pop(0))

    def _move(self, side: int) -> None:
        for _ in range(self.dice.randrange(1, 4)):
            self.pair.step()

    _commands = (
        _open, _open, _send, _send, _send, _try_send, _send_many, _end, _abort, _credit, _ping, _watch,
        _refuse, _consume, _consume, _consume, _move, _move, _move, _move,
    )  # fmt: skip

    # --- invariants

    def check(self) -> None:
        for side in (0, 1):
            self.wires[side].look(self.pair.sent[side])
            engine = self.engines[1 - side]
            self.wires[side].forget(engine.bytes_received - unread_by(engine))
            check_books(self.engines[side], self.inbox[side])
        for side in (0, 1):
            self._check_credit(side)

    def _check_credit(self, side: int) -> None:
        """Check: receiver's credit = sender's credit + payload and grants in transit + grants not written."""
        here, there = self.engines[side], self.engines[1 - side]
        paid: dict[tuple[Kind, int], int] = defaultdict(int)
        granted: dict[tuple[Kind, int], int] = defaultdict(int)
        for _, key, size, top, credit in self.wires[side].chunks:
            paid[key] += size
            paid[Kind.SINK_OUT, 0] += top
            granted[key] += credit
        back: dict[tuple[Kind, int], int] = defaultdict(int)
        for _, key, _, _, credit in self.wires[1 - side].chunks:
            back[key] += credit
        for kind in Kind:
            for id, entity in here.entities(kind).items():
                mirror = kind if entity.is_top else MIRROR[kind]
                if entity.is_top:
                    mirror = Kind.STREAM_OUT if kind is Kind.SINK_OUT else Kind.SINK_OUT
                other = there.entities(mirror).get(id)
                if other is None or entity.ending or other.ending or Life.UNANNOUNCED in (entity.life, other.life):
                    continue
                due = entity.credit.available + paid[kind, id] + back[mirror, id] + other.grant
                if entity is here.top_sink:
                    due -= here._state.advance
                if kind is Kind.SINK_OUT and not entity.is_top:
                    # What was announced and not read yet, and the window begins when the opening is complete.
                    is_opening = Life.HALF_OPENED in (other.life, other.twin and other.twin.life)
                    due += (0 if is_opening else sums_of(there).first_credit_in) - sums_of(here).first_credit_out
                assert other.window.credit == due, (
                    f"{other.label}: {other.window.credit} allowed, but {entity.credit.available} free, "
                    f"{paid[kind, id]} under way, {back[mirror, id]} granted and under way, {other.grant} owed"
                )

    def _consume_everything(self) -> None:
        for _ in range(1000):
            self.pair.run_until_quiet()
            for side in (0, 1):
                while self.openings[side] or any(self.inbox[side].values()):
                    self._consume(side)
            if not any(engine.has_output() for engine in self.engines):
                break
        self.check()

    def close(self) -> None:
        """Consume everything, end everything, and check that nothing is left."""
        self._consume_everything()
        for side in (0, 1):
            engine = self.engines[side]
            for entity in [*self.known[side]]:
                if not entity.gone and not entity.ending:
                    if entity.receives:
                        self.stops.add(entity)
                        self._tear_other(side, entity)
                    entity.end()
                elif not entity.gone and not entity.credit_out:
                    # An end with a payload may wait for credit that is never granted.
                    other = self._other(side, entity)
                    if other is not None and not other.ending:
                        other.give_credit(3000)
        self._consume_everything()
        for engine in self.engines:
            assert engine.live == 0, [entity for kind in Kind for entity in engine.entities(kind).values()]
            assert engine.channels == 0
            assert engine.outbox == 0
            state = sums_of(engine)
            assert state.reassembly.left == state.reassembly.total
            assert state.reassembly.waiting == 0
            assert (state.budget.used, state.budget.windows) == (0, 0)
            assert state.unfinished == 0
            assert state.control.pongs_queued == 0

    def _other(self, side: int, entity: Entity) -> Entity | None:
        if entity.is_top:
            mirror = Kind.STREAM_OUT if entity.kind is Kind.SINK_OUT else Kind.SINK_OUT
            return self.engines[1 - side].entities(mirror).get(0)
        return self.engines[1 - side].entities(MIRROR[entity.kind]).get(entity.id)


def _numbers(engine: Engine) -> tuple[object, ...]:
    """Return the values that a refused command must not change, cheaply."""
    state = sums_of(engine)
    return (
        state.outbox.used, state.ours, state.theirs, state.budget.used, state.budget.windows, state.reassembly.left,
        len(engine.entities(Kind.SINK_OUT)), len(engine.entities(Kind.STREAM_OUT)), engine.top_sink.credit_out,
        sum(one.credit_out + one.credit_in + one.grant for kind in Kind for one in engine.entities(kind).values()),
    )  # fmt: skip
