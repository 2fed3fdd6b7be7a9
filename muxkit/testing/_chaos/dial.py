"""Connections that fail by plan: what joins two streams until their fate ends the connection, and a dial of such.

    async with chaos_dial(dial, ChaosPlan(cut_after=(0, 10_000), reset=0.5), seed=17) as chaos:
        await redial(chaos.dial, run)

`muxkit.testing.chaos_relay` is the same between real sockets.
"""

from __future__ import annotations

import errno
import math
import random
import socket
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import attrs
import trio

from muxkit.runtime import Dial, background, peer_of
from muxkit.testing._chaos.plan import BOTH_WAYS, ChaosPlan, ChaosStats, Cut, CutReport, Fate, OnCut, Way
from muxkit.testing._weather import Line, WeatherStream, weather_pair

READ = 16 * 1024  # bytes to ask for at once
TICK = 0.02  # s; with a rate, no piece takes longer on the wire
GOODBYE = 1.0  # s, to read on after an orderly end: to close with bytes unread would be a reset
LINGER_ZERO = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


@attrs.define(eq=False, kw_only=True)
class _Direction(Line):
    """From one stream to the other."""

    way: Way
    source: trio.abc.Stream
    target: trio.abc.Stream
    read: int = 0  # bytes that came from the source
    delivered: int = 0  # bytes that the target has got
    has_ended: bool = False  # the source will send no more
    is_broken: bool = False  # nor receive any more
    is_over: bool = False  # and the target was told
    is_stalled: bool = False


class Passage:
    """One connection through the weather; `run` ends with it, and closes both streams."""

    def __init__(
        self,
        client: trio.abc.Stream,
        target: trio.abc.Stream,
        *,
        plan: ChaosPlan,
        fate: Fate,
        on_cut: Callable[[CutReport, bool], None],
    ) -> None:
        self._plan = plan
        self._fate = fate
        self._on_cut = on_cut
        make = partial(_Direction, delay=plan.delay, rate=plan.rate)
        self._there = make(way=Way.THERE, source=client, target=target)
        self._back = make(way=Way.BACK, source=target, target=client)
        self._directions = {Way.THERE: self._there, Way.BACK: self._back}
        self._read_most = READ if plan.rate is None else max(1, min(READ, int(plan.rate * TICK)))
        self._began = trio.current_time()
        self._life = trio.CancelScope()
        self._was_cut = False
        self._is_orderly = False

    @property
    def bytes_there(self) -> int:
        return self._there.delivered

    @property
    def bytes_back(self) -> int:
        return self._back.delivered

    async def run(self) -> None:
        client, target = self._there.source, self._there.target
        try:
            with self._life:
                async with background() as nursery:
                    if self._fate.cut_at == 0:
                        self.cut(self._fate.how, self._fate.way)
                    for direction in self._directions.values():
                        nursery.start_soon(self._read, direction)
                        nursery.start_soon(self._write, direction)
                    await trio.sleep_forever()
            if self._is_orderly:
                await _take_leave(client, target)
        finally:
            for stream in (client, target):
                if not self._is_orderly:
                    make_abrupt(stream)
                # Shielded, though it does not wait: a cancellation from outside would leave the second one open.
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    # --- its end

    def cut(self, how: Cut, way: Way | None = None) -> None:
        """Lose the connection now; only the first cut counts. A cut by plan names the way that its bytes went."""
        if self._was_cut or self._life.cancel_called:
            return
        self._was_cut = True
        if how is Cut.STALL:
            for each in BOTH_WAYS if way is None else self._fate.stalled:
                self._directions[each].is_stalled = True
            self._life.deadline = trio.current_time() + self._plan.stall_for
        else:
            self._finish(orderly=how is Cut.END)
        report = CutReport(
            number=self._fate.number,
            how=how,
            way=way,
            bytes_there=self.bytes_there,
            bytes_back=self.bytes_back,
            after=trio.current_time() - self._began,
        )
        self._on_cut(report, way is not None)

    def _finish(self, *, orderly: bool) -> None:
        if not self._life.cancel_called:
            self._is_orderly = orderly
            self._life.cancel()

    # --- reading

    async def _read(self, direction: _Direction) -> None:
        try:
            while data := await direction.source.receive_some(self._read_most):
                late = self._fate.lateness(direction.way, direction.read) if self._plan.jitter else 0.0
                direction.add(bytes(data), self._plan.jitter * late)
                direction.read += len(data)
                direction.changed.unpark_all()
                while direction.read - direction.delivered >= self._plan.buffer:
                    await direction.changed.park()
        except BROKEN:
            direction.is_broken = True
            if not direction.is_stalled:
                self._finish(orderly=False)
        direction.has_ended = True
        direction.changed.unpark_all()
        self._look_for_the_end()

    # --- writing

    async def _write(self, direction: _Direction) -> None:
        try:
            while True:
                if direction.is_stalled or not (direction.pieces or direction.has_ended):
                    await direction.changed.park()
                elif direction.pieces:
                    await self._pass_on(direction)
                else:
                    break
            await self._pass_the_end_on(direction)
        except BROKEN:
            other = self._back if direction is self._there else self._there
            if other.is_stalled:
                direction.is_stalled = True  # the news would have to go through a stall, so there is none
            else:
                self._finish(orderly=False)
        self._look_for_the_end()

    async def _pass_on(self, direction: _Direction) -> None:
        due = direction.pieces[0][0]
        if due > trio.current_time():
            await trio.sleep_until(due)
            if direction.is_stalled:
                return
        fated = self._fate.cut_at if self._fate.way is direction.way and not self._was_cut else None
        data = direction.take(READ if fated is None else min(READ, fated - direction.delivered))
        await direction.target.send_all(data)
        direction.delivered += len(data)
        direction.changed.unpark_all()
        if direction.delivered == fated:
            self.cut(self._fate.how, self._fate.way)

    async def _pass_the_end_on(self, direction: _Direction) -> None:
        if direction.arrived_at > trio.current_time():
            await trio.sleep_until(direction.arrived_at)
        if isinstance(direction.target, trio.abc.HalfCloseableStream):
            await direction.target.send_eof()
            direction.is_over = True
        else:
            self._finish(orderly=True)

    def _look_for_the_end(self) -> None:
        if self._there.is_over and self._back.is_over:
            self._finish(orderly=True)
        if self._there.is_broken and self._back.is_broken:  # behind a stall, where each side has to find out alone
            self._finish(orderly=False)


def make_abrupt(stream: trio.abc.Stream) -> None:
    """Let what closes it next be a reset, as far as this kind of stream has one."""
    if isinstance(stream, trio.SocketStream):
        with suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
    elif isinstance(stream, WeatherStream):
        stream.reset()


async def _take_leave(*streams: trio.abc.Stream) -> None:
    async def leave(stream: trio.abc.Stream) -> None:
        with suppress(*BROKEN):
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()
                while await stream.receive_some(READ):
                    pass

    with trio.move_on_after(GOODBYE):
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(leave, stream)


class Chaos:
    """What happens to connections, and what a test may do to them beside the plan."""

    def __init__(self, plan: ChaosPlan, seed: int, on_cut: OnCut | None) -> None:
        self.plan = plan
        self.seed = seed
        self._on_cut = on_cut
        self._stats = ChaosStats()
        self._passages: set[Passage] = set()
        self._refusing_until = -math.inf

    def stats(self) -> ChaosStats:
        """The counters so far; a copy."""
        there = sum(passage.bytes_there for passage in self._passages)
        back = sum(passage.bytes_back for passage in self._passages)
        return attrs.evolve(
            self._stats,
            live=len(self._passages),
            bytes_there=self._stats.bytes_there + there,
            bytes_back=self._stats.bytes_back + back,
        )

    @property
    def connections(self) -> int:
        """How many there were and are."""
        return self._stats.connections

    @property
    def cuts(self) -> int:
        """How many of them were cut."""
        return self._stats.cuts

    def cut_all(self, how: Cut = Cut.RESET) -> None:
        """Cut every live connection now."""
        for passage in [*self._passages]:
            passage.cut(how)

    def refuse(self, seconds: float = math.inf) -> None:
        """Let no new connection in for so long, or until `admit`."""
        self._refusing_until = max(self._refusing_until, trio.current_time() + seconds)

    def admit(self) -> None:
        """Let connections in again."""
        self._refusing_until = -math.inf

    @property
    def is_refusing(self) -> bool:
        return trio.current_time() < self._refusing_until

    def _next_fate(self) -> Fate:
        fate = self.plan.fate(self.seed, self._stats.connections)
        self._stats.connections += 1
        return fate

    async def _pass(self, client: trio.abc.Stream, target: trio.abc.Stream, fate: Fate) -> None:
        """The life of one connection."""

        def on_cut(report: CutReport, is_fate: bool) -> None:
            match report.how:
                case Cut.END:
                    self._stats.ends += 1
                case Cut.RESET:
                    self._stats.resets += 1
                case Cut.STALL:
                    self._stats.stalls += 1
            if is_fate and fate.refuse_for:
                self.refuse(fate.refuse_for)
            if self._on_cut is not None:
                self._on_cut(report)

        passage = Passage(client, target, plan=self.plan, fate=fate, on_cut=on_cut)
        self._passages.add(passage)
        try:
            await passage.run()
        finally:
            self._passages.remove(passage)
            self._stats.bytes_there += passage.bytes_there
            self._stats.bytes_back += passage.bytes_back


class ChaosDial(Chaos):
    """Dials through the weather; made by `chaos_dial`."""

    def __init__(self, dial: Dial, plan: ChaosPlan, seed: int, on_cut: OnCut | None, nursery: trio.Nursery) -> None:
        super().__init__(plan, seed, on_cut)
        self._dial = dial
        self._nursery = nursery

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        """One connection; what was sent on it is still delivered when it is closed, as a kernel would."""
        await trio.lowlevel.checkpoint()
        if self.is_refusing:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "chaos: no connection is let in now")
        fate = self._next_fate()
        pieces = random.Random(f"{self.seed}/{fate.number}/pieces").getrandbits(32)
        ours, theirs = weather_pair(pieces)
        attempt = _Attempt()
        self._nursery.start_soon(self._connect, theirs, fate, attempt)
        try:
            await attempt.over.wait()
        except trio.Cancelled:
            attempt.scope.cancel()
            raise
        if attempt.error is not None:
            raise attempt.error
        ours.peer = attempt.peer
        async with ours:
            yield ours

    async def _connect(self, theirs: WeatherStream, fate: Fate, attempt: _Attempt) -> None:
        try:
            with attempt.scope:
                async with self._dial() as target:
                    attempt.peer = f"{peer_of(target) or 'chaos'} #{fate.number}"
                    attempt.over.set()
                    await self._pass(theirs, target, fate)
        except Exception as error:
            if not attempt.over.is_set():
                self._stats.unreachable += 1
                attempt.error = error
            elif not isinstance(error, (OSError, trio.BrokenResourceError, trio.ClosedResourceError)):
                raise
        finally:
            attempt.over.set()


@attrs.define(eq=False)
class _Attempt:
    over: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    error: Exception | None = None
    peer: str = ""


@asynccontextmanager
async def chaos_dial(
    dial: Dial, plan: ChaosPlan, seed: int = 0, *, on_cut: OnCut | None = None
) -> AsyncGenerator[ChaosDial, None]:
    """A dial whose connections have the weather of `plan`; they end with the block.

    All times are Trio's, so it runs on a virtual clock. What is sent arrives in pieces of random size.
    """
    async with background() as nursery:
        yield ChaosDial(dial, plan, seed, on_cut, nursery)
