"""A dial whose connections fail by plan, and what it shares with the relay.

    async with chaos_dial(dial, ChaosPlan(cut_after=(0, 10_000), reset=0.5), seed=17) as chaos:
        await redial(chaos.dial, run)

`muxkit.testing.chaos_relay` is the same between real sockets.
"""

from __future__ import annotations

import errno
import math
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.runtime import Described, Dial, background
from muxkit.testing._chaos.passage import Passage
from muxkit.testing._chaos.plan import ChaosPlan, ChaosStats, Cut, CutReport, Fate, OnCut
from muxkit.testing._weather import WeatherStream, weather_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


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
                    attempt.peer = f"{target.peer if isinstance(target, Described) else 'chaos'} #{fate.number}"
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
