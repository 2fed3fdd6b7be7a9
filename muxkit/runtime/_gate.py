"""Who may send now? Senders wait in line for their half's window and for room in the connection's outbox.

Nobody polls: a sender sleeps until a grant, a drained queue or a write changes the answer for the first in his
line. Newcomers go behind. Between the wake-up and the sender's next step the room is kept for him.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import trio

ErrorMaker = Callable[[], Exception]

SHARE = 4 * 1024  # bytes for somebody who is woken and sends small messages
PORTION = 8  # no more than such a part of the outbox is kept for somebody, unless his first message is larger
PATIENCE = 16  # times that others may slip past a message that is too large for the room that is left


class Admission(Protocol):
    """What a gate asks its half."""

    def admits(self, size: int) -> bool:
        """Does the half's own window have room?"""

    def watch(self, size: int) -> None:
        """Call the gate's `poke` when it may have room for a message of this size."""


class Queued(Protocol):
    """What a room asks: how many bytes wait for the transport."""

    @property
    def used(self) -> int: ...


class Room:
    """The outbox of one connection: how many bytes may wait for the transport.

    Halves whose window is open but for whom there is no room stand in line. A newcomer whose message fits may
    slip past them, so that a short one need not wait behind a bulk transfer, but not for ever.
    """

    __slots__ = ("_gates", "_limit", "_outbox", "_portion", "_promised", "_refused")

    def __init__(self, limit: int, outbox: Queued) -> None:
        self._limit = limit
        self._portion = limit // PORTION
        self._outbox = outbox
        self._promised = 0  # to senders that were woken and have not run yet
        self._gates: OrderedDict[Gate, None] = OrderedDict()
        self._refused = 0  # times that the first in line found too little room

    def admits(self, size: int) -> bool:
        """May somebody who comes now go in at once?"""
        used = self._outbox.used + self._promised  # as in `_fits`, which would be one more call for each message
        return (used == 0 or used + size <= self._limit) and (not self._gates or self._refused < PATIENCE)

    def share(self, size: int) -> int:
        """What is kept for somebody who is woken to send `size` bytes, which is more unless they are many.

        Or he would have to be woken for each of his messages.
        """
        return max(size, min(max(2 * size, SHARE), self._portion), 1)

    def promise(self, share: int) -> None:
        """Keep room for somebody who is being woken."""
        self._promised += share

    def settle(self, share: int) -> None:
        """He runs now."""
        self._promised -= share

    def wait(self, gate: Gate) -> None:
        """Poke the gate when there is room again."""
        self._gates.setdefault(gate)

    def forget(self, gate: Gate) -> None:
        """The gate waits for its half's window, or need not wait, so nobody has to wait for it here."""
        self._gates.pop(gate, None)

    def leave(self, gate: Gate) -> None:
        """Nobody waits at this gate any more."""
        if gate in self._gates:
            del self._gates[gate]
            self._refused = 0
            self.release()

    def release(self) -> None:
        """There may be more room than there was: let in as many as fit, in order."""
        while self._gates:
            gate = next(iter(self._gates))
            share = self.share(gate.wanted)
            if not self._fits(share):
                self._refused += 1
                return
            del self._gates[gate]
            gate.enter(share)
            self._refused = 0

    def _fits(self, size: int) -> bool:
        used = self._outbox.used + self._promised
        return used == 0 or used + size <= self._limit


class _Waiter:
    __slots__ = ("error", "promised", "size", "task")

    def __init__(self, task: trio.lowlevel.Task, size: int) -> None:
        self.task = task
        self.size = size
        self.promised = 0  # bytes
        self.error: ErrorMaker | None = None


class Gate:
    """The line of senders on one half."""

    __slots__ = ("_half", "_line", "_room")

    def __init__(self, half: Admission, room: Room) -> None:
        self._half = half
        self._room = room
        self._line: deque[_Waiter] = deque()

    def __bool__(self) -> bool:
        """Does anybody stand in line?"""
        return bool(self._line)

    @property
    def wanted(self) -> int:
        """The size of the message of the first in line, if he waits."""
        return self._line[0].size if self._line and not self._line[0].promised else 0

    async def wait(self, size: int) -> None:
        """Sleep until it is our turn; on return the caller must act before his next checkpoint, then `pass_on`."""
        waiter = _Waiter(trio.lowlevel.current_task(), size)
        self._line.append(waiter)
        if self._line[0] is waiter:
            self._ask_for(size)

        def abort(_: object) -> trio.lowlevel.Abort:
            was_first = self._line[0] is waiter
            self._line.remove(waiter)
            if was_first:
                self.pass_on()
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            await trio.lowlevel.wait_task_rescheduled(abort)
            if waiter.promised:
                self._room.settle(waiter.promised)
            if waiter.error is not None:
                self._room.release()  # what was kept for us is free
                raise waiter.error()
            if self._half.admits(size):
                break
            waiter.promised = 0  # other halves were told of the same room, and have taken it
            self._ask_for(size)
        self._line.popleft()

    def pass_on(self) -> None:
        """The first in line has acted, or gave up: it is the next one's turn, here and in the room."""
        if self._line:
            self.poke()
        else:
            self._room.leave(self)
        self._room.release()

    def poke(self) -> None:
        """The window may have changed: wake the first in line if he can go now."""
        if self._line and not self._line[0].promised:
            size = self._line[0].size
            if self._room.admits(size):  # like a newcomer
                self._room.forget(self)
                self.enter(max(size, 1))
            else:
                self._ask_for(size)

    def enter(self, share: int) -> None:
        """For the room, which has so much to spare: it is this gate's turn there."""
        if not self._line or self._line[0].promised:
            return
        first = self._line[0]
        if self._half.admits(first.size):
            first.promised = share
            self._room.promise(share)
            trio.lowlevel.reschedule(first.task)
        else:
            self._ask_for(first.size)

    def shut(self, error: ErrorMaker) -> None:
        """Nobody will be let in any more."""
        line, self._line = self._line, deque()
        for waiter in line:
            waiter.error = error
            if not waiter.promised:
                trio.lowlevel.reschedule(waiter.task)
        self._room.leave(self)

    def _ask_for(self, size: int) -> None:
        if self._half.admits(size):
            self._room.wait(self)
        else:
            self._room.forget(self)  # it may have come there for another message, that was smaller
            self._half.watch(size)
