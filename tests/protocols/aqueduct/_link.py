"""Simulated links between two engines: one behaves as QUIC does, one is a byte stream with the carrier."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from muxkit.core import Consumed, Lent, Reset, Stop
from muxkit.protocols.aqueduct import Engine, Failed
from muxkit.protocols.aqueduct.carrier import Carrier

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from muxkit.protocols.aqueduct import Event

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
        listener: Callable[[int, Event], None],
        *,
        weather: random.Random | None = None,
        loss: float = 0.2,
        late: float = 0.02,
    ) -> None:
        self.engines = (one, other)
        self.now = 0.0
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
                    engine.handle_deadline(self.now)
                    self._collect(side)
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
            engine.receive_datagram(thrown[1], self.now)
            moved = True
        ready = [stream for stream, pipe in pipes.items() if pipe.waiting or pipe.fin or pipe.reset]
        if self._dice is not None:
            self._dice.shuffle(ready)
            ready = ready[: self._dice.randrange(1, 4)]
        for stream in ready:
            moved = True
            self._advance(engine, stream, pipes)
        self._collect(side)
        return moved

    def _advance(self, engine: Engine, stream: int, pipes: dict[int, Pipe]) -> None:
        pipe = pipes[stream]
        if pipe.reset and (self._dice is None or self._dice.random() < 0.7):
            del pipes[stream]
            engine.receive_reset(stream, self.now)
            return
        size = len(pipe.waiting)
        if self._dice is not None and size:
            size = self._dice.randrange(1, size + 1)
        data = bytes(pipe.waiting[:size])
        del pipe.waiting[:size]
        fin = pipe.fin and not pipe.waiting
        if fin:
            del pipes[stream]
        engine.receive_stream(stream, data, fin, self.now)

    def _collect(self, side: int) -> None:
        for event in self.engines[side].events():
            assert not isinstance(event, Failed), f"a correct peer was blamed: {event.error}"
            self._listener(side, event)


class CarrierLink:
    """A link that is one byte stream."""

    def __init__(
        self,
        one: Engine,
        other: Engine,
        listener: Callable[[int, Event], None],
        *,
        weather: random.Random | None = None,
    ) -> None:
        self.engines = (one, other)
        self.carriers = (Carrier(one), Carrier(other))
        self.now = 0.0
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
                carrier.receive_bytes(data, self.now)
                moved = True
            self._collect(side)
        return moved

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
                    carrier.handle_deadline(self.now)
                    self._collect(side)
            if self.now >= end:
                self.run_until_quiet()
                return

    def _collect(self, side: int) -> None:
        for event in self.engines[side].events():
            assert not isinstance(event, Failed), f"a correct peer was blamed: {event.error}"
            self._listener(side, event)
