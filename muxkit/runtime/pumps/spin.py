"""Looking again before sleeping, since to be woken by the kernel costs more than many looks at the socket.

A reader that sleeps while the answer of a quick peer is under way pays for that sleep with most of the round trip, and
with more processor time than it saves. So it looks again in each pass of Trio's loop for a while, in which other tasks
run as usual, if that is worth it: the last sleep was short, the last spins found something, and no other reader of this
Trio run spins. A connection that is idle, or whose peer needs long, sleeps as if there were no spin, and so do all on a
machine that has no processor left for the peer: each spin in vain doubles the number of sleeps until the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from muxkit.runtime.pumps.turns import Turns

SHORT_SLEEP: Final = 3  # spins; half of a sleep that takes no longer than that is the wake-up
MOST_SLEEPS: Final = 256  # after a spin in vain, however many of them there were before


class Spin:
    """Decides for one reader whether it spins before it sleeps; `Turns.spin` says for how long at most."""

    __slots__ = ("_is_short", "_sleeps", "_sleeps_after", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_short = False  # the last sleep was
        self._sleeps = 0  # that come before the next spin
        self._sleeps_after = 1  # the next spin in vain

    def is_due(self) -> bool:
        """Return True if `until` is worth its time now; otherwise sleep, and call `slept`."""
        return self._is_short and not self._sleeps and not self._turns.is_spinning

    async def until(self, look: Callable[[], bool]) -> bool:
        """Let other tasks run and call `look`, again and again until it returns True; False if the time is up.

        Always a checkpoint. Cancelled means that `look` has not returned True.
        """
        turns = self._turns
        end = turns.now() + turns.spin
        turns.is_spinning = True
        try:
            while True:
                await trio.lowlevel.checkpoint()
                if look():
                    self._sleeps_after = 1
                    return True
                if turns.now() >= end:
                    self._sleeps, self._sleeps_after = self._sleeps_after, min(2 * self._sleeps_after, MOST_SLEEPS)
                    return False
        finally:
            turns.is_spinning = False

    def slept(self, seconds: float) -> None:
        """Note how long the reader slept until there was something to read."""
        self._is_short = seconds < SHORT_SLEEP * self._turns.spin
        if self._sleeps:
            self._sleeps -= 1
