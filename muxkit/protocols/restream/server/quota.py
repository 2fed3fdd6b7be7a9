"""Who may make messages now? First come, first served, and never so many at once that others wait for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from muxkit.runtime import protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

IN_A_THREAD: Final = 1024  # messages that are being made at once, in a store with threads of its own
IN_THE_LOOP: Final = 16  # the same in one that works in Trio's thread, where everybody waits for them


class Turns:
    """A number of messages that is lent, in the order in which it is asked for."""

    def __init__(self, room: int = IN_A_THREAD) -> None:
        self.room = room
        self._lent = 0
        self._first = trio.Lock()  # held by who waits for room; the others wait for it, in order
        self._returned = trio.lowlevel.ParkingLot()

    @protected_manager
    async def turn(self, most: int) -> AsyncGenerator[int, None]:
        """Wait for a turn to make up to `most` messages; gives how many it may be."""
        async with self._first:
            count = min(most, self.room)
            while self._lent and self._lent + count > self.room:
                await self._returned.park()
                count = min(most, self.room)
            self._lent += count
        try:
            yield count
        finally:
            self._lent -= count
            self._returned.unpark_all()
