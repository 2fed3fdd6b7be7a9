"""Turns of processor time: a busy session works in turns, one turn of one session in each pass of Trio's loop.

What a session takes in within one turn costs no wait. A session that has more to take in, or whose last turn was long,
queues for the next one, and the queue gives out one turn in each pass of Trio's loop. So the delay that floods add to a
pass is one turn, however many sessions flood, and accept loops and quiet sessions run in every pass.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

TURN_MOST: Final = 1e-3  # s that a turn may take while the passes of the loop are short
TURN_LEAST: Final = 0.2e-3  # s; and while they are long, because of the tasks that turns wake
LONG_TURN: Final = 0.5e-3  # s; a session whose turn was longer queues for the next one
LONG_PASS: Final = 3e-3  # s
REST_MOST: Final = 4  # passes without a turn after a long one


class Turns:
    """The turns of one Trio run; `clock` returns seconds."""

    __slots__ = ("_handed_at", "_is_handed", "_queue", "allowance", "given", "now")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.now = clock
        self._queue: deque[trio.lowlevel.Task] = deque()
        self._is_handed = False  # a task that waited goes on in the next pass
        self._handed_at = 0.0
        self.allowance = TURN_MOST
        """Seconds that a turn may take now."""
        self.given = 0

    async def wait(self) -> None:
        """Return when the caller may work for `allowance` seconds, in the next pass of the loop at the earliest."""
        is_first = not self._is_handed
        if is_first:
            self._is_handed = True
            self._handed_at = self.now()
        else:
            await self._queue_up()
        try:
            if is_first:
                await trio.lowlevel.checkpoint()
            await self._rest()
            self.given += 1
        finally:
            self._hand_on()

    async def _queue_up(self) -> None:
        task = trio.lowlevel.current_task()
        self._queue.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._queue.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _hand_on(self) -> None:
        """Let the task that waits longest go on in the next pass."""
        if self._queue:
            self._handed_at = self.now()
            trio.lowlevel.reschedule(self._queue.popleft())
        else:
            self._is_handed = False

    async def _rest(self) -> None:
        """After a long pass make turns shorter and further apart: the tasks that turns wake take long."""
        now = self.now()
        if now - self._handed_at < LONG_PASS:
            self.allowance = min(TURN_MOST, 1.5 * self.allowance)
            return
        self.allowance = max(TURN_LEAST, self.allowance / 2)
        for _ in range(REST_MOST):
            await trio.lowlevel.checkpoint()
            before, now = now, self.now()
            if now - before < LONG_PASS:
                break


_TURNS: Final = trio.lowlevel.RunVar[Turns]("muxkit turns")


def turns() -> Turns:
    """Return the turns that all sessions of this run share."""
    try:
        return _TURNS.get()
    except LookupError:
        made = Turns()
        _TURNS.set(made)
        return made


def share_turns(made: Turns) -> None:
    """Make the sessions that begin from now on share these; for tests, with a clock of their own."""
    _TURNS.set(made)
