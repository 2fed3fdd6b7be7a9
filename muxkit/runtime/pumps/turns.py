"""Turns of processor time, which keep busy sessions from delaying others.

A turn is a limited amount of time in which a session handles received bytes. A session that hasn't been busy takes a
turn without waiting. If a session has more bytes than it can handle in one turn, or if its last turn was long, it
queues for the next turn. The queue grants one turn in each pass of Trio's loop. So however many sessions are flooded, a
flood delays each pass by one turn only, and accept loops and quiet sessions run in every pass.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import trio

from muxkit.runtime.pumps import alarms, next_pass
from muxkit.runtime.pumps.alarms import Alarms
from muxkit.runtime.pumps.next_pass import NextPass
from muxkit.runtime.pumps.quota import cpu_quota

TURN_MOST: Final = 1e-3  # maximum duration of a turn in seconds while the passes of Trio's loop are short
TURN_LEAST: Final = 0.2e-3  # the same while the passes are long because of the tasks that turns wake
LONG_TURN: Final = 0.5e-3  # a session whose turn took longer than this many seconds queues for its next turn
LONG_PASS: Final = 3e-3  # a pass of Trio's loop is long if it takes more than this many seconds
REST_MOST: Final = 4  # maximum number of passes without a turn after a long pass
# Turns are short for this many seconds after a connection was accepted, because its handshake takes many passes.
NEW: Final = 0.05
SPIN: Final = "MUXKIT_SPIN"  # the environment variable with the duration of a spin in microseconds
SPIN_USUAL: Final = 200.0  # microseconds; about a round trip of Aqueduct on loopback, or two wake-ups
SYSTEM_TASKS: Final = frozenset({alarms.TASK_NAME, next_pass.TASK_NAME})
"""The names of the system tasks that all sessions of a Trio run share."""
WAKES: Final = 32  # number of tasks that the end of a session wakes in one turn


class Turns:
    """The turns of one Trio run. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter, *, spin: float = 0.0) -> None:
        self.now = clock
        self.spin: float = spin
        """Maximum number of seconds for which a reader polls its socket before it sleeps (`Spin`). 0 disables that."""
        self.is_spinning: bool = False
        """True while a reader spins. Only one reader spins at a time."""
        self.allowance: float = TURN_MOST
        """Number of seconds that a turn may take now."""
        self.given: int = 0
        self.next_pass: NextPass = NextPass()
        """The steps that connections have put off until the next pass of the loop."""
        self.alarms: Alarms = Alarms()
        """The deadlines of all connections."""
        self._line = trio.lowlevel.ParkingLot()
        self._is_handed = False  # True if a task has been granted the next turn
        self._handed_at = 0.0
        self._short_until = 0.0
        self._spread: list[Callable[[], object]] | None = None  # a list inside a `spreading` block
        self._wakes: deque[Callable[[], object]] = deque()
        self._is_waking = False

    async def wait(self) -> None:
        """Wait for a turn, in which the caller may work for `allowance` seconds. This is always a checkpoint."""
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
        """Shorten the turns for a while, because the handshake of a new connection takes many passes of the loop."""
        self._short_until = self.now() + NEW

    def _hand_on(self) -> None:
        """Grant the next turn to the task that has waited longest."""
        if self._line:
            self._handed_at = self.now()
            self._line.unpark()
        else:
            self._is_handed = False

    async def _rest(self) -> None:
        """After a long pass, make turns shorter and less frequent, because the tasks that turns wake take long."""
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
        """Make `wake` defer its calls in this block, so that tasks wake up in small groups over several turns.

        The block must not contain a checkpoint.
        """
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
                # Use a system task, because the session's nursery may be closed before all tasks have been woken.
                trio.lowlevel.spawn_system_task(self._wake_the_rest)

    def wake(self, call: Callable[[], object]) -> None:
        """Call a function that wakes tasks, either now, or in a later turn if this is inside a `spreading` block.

        The caller must have made all state changes before this call, so that the woken tasks notice only the delay.
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
            while self._wakes:  # only if the Trio run is being cancelled
                self._wakes.popleft()()


_TURNS: Final = trio.lowlevel.RunVar[Turns]("muxkit turns")
_replays = 0  # number of active `untimed` blocks


def turns() -> Turns:
    """Return the `Turns` object that all sessions of this Trio run share."""
    try:
        return _TURNS.get()
    except LookupError:
        made = Turns(lambda: 0.0) if _replays else Turns(spin=usual_spin())
        _TURNS.set(made)
        return made


def usual_spin() -> float:
    """Return the duration of a spin in seconds for a new Trio run.

    If `MUXKIT_SPIN` is set, its value is used. Otherwise, readers don't spin under a CPU quota, because spinning would
    use up the quota.
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
    """Make Trio runs that start inside this block independent of processor time, so that they are reproducible."""
    global _replays
    _replays += 1
    try:
        yield
    finally:
        _replays -= 1


def share_turns(made: Turns) -> None:
    """Use this `Turns` object for all sessions that start from now on. Tests use this with their own clock."""
    _TURNS.set(made)
