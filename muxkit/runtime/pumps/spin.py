"""Spinning: a reader polls its socket for a short time before it sleeps.

If the peer answers quickly, most of the round trip is the time that the kernel needs to wake a sleeping reader, and the
wake-up takes more processor time than polling. So a reader polls its socket once in each pass of Trio's loop for a
while. Other tasks run as usual in these passes.

A reader spins only if that is likely to pay off: the reader's last sleep was short, its last spins were successful, and
no other reader of this Trio run is spinning. Each unsuccessful spin doubles the number of sleeps before the next spin.
So an idle connection hardly ever spins, nor does a connection with a slow peer, and nor does any connection on a
machine where the peer has to wait for a processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from muxkit.runtime.pumps.turns import Turns

# A sleep is short if it takes at most this many times as long as a spin. Half of such a sleep is the wake-up.
SHORT_SLEEP: Final = 3
MOST_SLEEPS: Final = 256  # maximum number of sleeps before the next spin


class Spin:
    """Decides for one reader whether it spins before it sleeps. `Turns.spin` is the maximum duration of a spin."""

    __slots__ = ("_is_short", "_sleeps", "_sleeps_after", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_short = False  # True if the last sleep was short
        self._sleeps = 0  # number of sleeps before the next spin
        self._sleeps_after = 1  # number of sleeps that will follow the next unsuccessful spin

    def is_due(self) -> bool:
        """Return True if the reader should call `until` now. Otherwise, it should sleep and then call `slept`."""
        return self._is_short and not self._sleeps and not self._turns.is_spinning

    async def until(self, look: Callable[[], bool]) -> bool:
        """Call `look` in each pass of Trio's loop until it returns True. Return False if the time is up before that.

        This is always a checkpoint. If it is cancelled, `look` hasn't returned True.
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
        """Record how long the reader slept until the socket had bytes."""
        self._is_short = seconds < SHORT_SLEEP * self._turns.spin
        if self._sleeps:
            self._sleeps -= 1
