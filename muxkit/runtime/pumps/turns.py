"""Turns of processor time: a busy session works in turns, one turn of one session in each pass of Trio's loop.

What a session takes in within one turn costs no wait. A session that has more to take in, or whose last turn was long,
queues for the next one, and the queue gives out one turn in each pass of Trio's loop. So the delay that floods add to a
pass is one turn, however many sessions flood, and accept loops and quiet sessions run in every pass.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import trio

from muxkit.runtime.pumps.quota import cpu_quota

TURN_MOST: Final = 1e-3  # s that a turn may take while the passes of the loop are short
TURN_LEAST: Final = 0.2e-3  # s; and while they are long, because of the tasks that turns wake
LONG_TURN: Final = 0.5e-3  # s; a session whose turn was longer queues for the next one
LONG_PASS: Final = 3e-3  # s
REST_MOST: Final = 4  # passes without a turn after a long one
NEW: Final = 0.05  # s after a connection came, in which turns are short: its handshake takes many passes
SPIN: Final = "MUXKIT_SPIN"  # the environment variable with the microseconds to spin
SPIN_USUAL: Final = 200.0  # microseconds; a round trip of Aqueduct on loopback, or two wake-ups
WAKES: Final = 32  # tasks that the end of a session wakes in one turn


class Turns:
    """The turns of one Trio run; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter, *, spin: float = 0.0) -> None:
        self.now = clock
        self.spin: float = spin
        """Seconds for which a reader looks again before it sleeps, while answers come as fast as that; 0 for never."""
        self.is_spinning: bool = False
        """True while a reader does; the others sleep."""
        self.allowance: float = TURN_MOST
        """Seconds that a turn may take now."""
        self.given: int = 0
        self._line = trio.lowlevel.ParkingLot()
        self._is_handed = False  # a task that waited goes on in the next pass
        self._handed_at = 0.0
        self._short_until = 0.0
        self._spread: list[Callable[[], object]] | None = None  # within `spreading`
        self._wakes: deque[Callable[[], object]] = deque()
        self._is_waking = False

    async def wait(self) -> None:
        """Return when the caller may work for `allowance` seconds, in the next pass of the loop at the earliest."""
        is_first = not self._is_handed
        if is_first:
            self._is_handed = True
            self._handed_at = self.now()
        else:
            await self._line.park()
        try:
            if is_first:
                await trio.lowlevel.checkpoint()
            await self._rest()
            self.given += 1
        finally:
            self._hand_on()

    def connection_came(self) -> None:
        """Shorten the turns for a while: the handshake of a new connection takes many passes of the loop."""
        self._short_until = self.now() + NEW

    def _hand_on(self) -> None:
        """Let the task that waits longest go on in the next pass."""
        if self._line:
            self._handed_at = self.now()
            self._line.unpark()
        else:
            self._is_handed = False

    async def _rest(self) -> None:
        """After a long pass make turns shorter and further apart: the tasks that turns wake take long."""
        now = self.now()
        if now - self._handed_at < LONG_PASS:
            self.allowance = TURN_LEAST if now < self._short_until else min(TURN_MOST, 1.5 * self.allowance)
            return
        self.allowance = max(TURN_LEAST, self.allowance / 2)
        for _ in range(REST_MOST):
            await trio.lowlevel.checkpoint()
            before, now = now, self.now()
            if now - before < LONG_PASS:
                break

    # --- the end of a session with very many channels

    @contextmanager
    def spreading(self) -> Iterator[None]:
        """Spread what `wake` is given in this block, which must not wait, over turns: the tasks wake in groups."""
        spread: list[Callable[[], object]] = []
        self._spread = spread
        try:
            yield
        finally:
            self._spread = None
            for call in spread[:WAKES]:
                call()
            self._wakes += spread[WAKES:]
            if self._wakes and not self._is_waking:
                self._is_waking = True
                # A task of Trio's own, since the session may be left before it is through.
                trio.lowlevel.spawn_system_task(self._wake_the_rest)

    def wake(self, call: Callable[[], object]) -> None:
        """Call a function that wakes tasks: now, or within `spreading` in a later turn.

        The caller has changed all that the tasks will look at, so that the delay is all that they can notice.
        """
        if self._spread is None:
            call()
        else:
            self._spread.append(call)

    async def _wake_the_rest(self) -> None:
        try:
            while self._wakes:
                await self.wait()
                for _ in range(min(WAKES, len(self._wakes))):
                    self._wakes.popleft()()
        finally:
            self._is_waking = False
            while self._wakes:  # the run is being cancelled
                self._wakes.popleft()()


_TURNS: Final = trio.lowlevel.RunVar[Turns]("muxkit turns")
_replays = 0  # blocks of `untimed` that are entered


def turns() -> Turns:
    """Return the turns that all sessions of this run share."""
    try:
        return _TURNS.get()
    except LookupError:
        made = Turns(lambda: 0.0) if _replays else Turns(spin=usual_spin())
        _TURNS.set(made)
        return made


def usual_spin() -> float:
    """Return for how many seconds readers of a new Trio run spin.

    `MUXKIT_SPIN` decides if it is set. Otherwise readers don't spin under a CPU quota, which spinning would use up.
    """
    told = os.environ.get(SPIN, "")
    try:
        if told:
            return max(0.0, float(told)) * 1e-6
    except ValueError:
        raise ValueError(f"{SPIN}={told!r}: must be a number of microseconds, 0 for no spin") from None
    return SPIN_USUAL * 1e-6 if cpu_quota() is None else 0.0


@contextmanager
def untimed() -> Iterator[None]:
    """Let no turn of the runs that begin inside depend on processor time, so that a run can be repeated exactly."""
    global _replays
    _replays += 1
    try:
        yield
    finally:
        _replays -= 1


def share_turns(made: Turns) -> None:
    """Make the sessions that begin from now on share these; for tests, with a clock of their own."""
    _TURNS.set(made)
