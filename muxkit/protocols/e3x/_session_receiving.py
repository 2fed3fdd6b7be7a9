"""How does an application receive on a channel of e3x? Message by message: asking for the next confirms the last."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from muxkit.core import NO_QUEUE
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.e3x._channel import EngineChannel
    from muxkit.protocols.e3x._session_connection import Connection

    ErrorMaker = Callable[[], Exception]

OVERHEAD = 64  # bytes that a waiting message costs beside its own
MOST = 1_000_000  # messages that one call takes


class _Waiter:
    __slots__ = ("message", "task")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task = task
        self.message: bytes | None = None  # handed over: from then on a cancellation comes too late


class Inbox:
    """What has come on a channel.

    On a reliable channel the packets wait in the engine, so that the peer's window counts them; here lies at most the
    one that is to be taken next. On an unreliable one they wait here, and the oldest make way.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_line",
        "_ready",
        "_since_yield",
        "_size",
        "_taken",
        "channel",
        "dropped",
    )

    def __init__(self, connection: Connection, channel: EngineChannel) -> None:
        self._connection = connection
        self.channel = channel
        self._ready: deque[bytes] = NO_QUEUE
        self._size = 0  # bytes in `_ready`, with what they cost
        self._line: list[_Waiter] = []  # mostly one
        self._taken = False  # the application has something that it is not done with
        self._error: ErrorMaker | None = None
        self._since_yield = 0  # bytes
        self.dropped = 0

    # --- for the application

    async def receive(self) -> bytes:
        """The next message, and we are done with the one before. Cancelled means that none was taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.done()
        if not self._ready:
            return await self._wait()
        message = self._take()
        self._since_yield += max(len(message), YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return message

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, then take all that have come; we are done with all together."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        self.done()
        has_waited = not self._ready
        messages = [await self._wait() if has_waited else self._take()]
        most = MOST if limit is None else limit
        while self._ready and len(messages) < most:
            messages.append(self._take())
        if self.channel.is_reliable and len(messages) < most:
            further = self._connection.engine.take(self.channel, most - len(messages))
            self._connection.messages_received += len(further)
            messages += further
        if not has_waited:
            await self._yield()
        return messages

    def done(self) -> None:
        """The application has processed what it took: the peer is told. Harmless if it took nothing."""
        if self._taken:
            self._taken = False
            self._connection.done(self.channel)

    def close(self) -> None:
        """The application takes nothing more; what it took is processed."""
        self.done()
        self._error = trio.ClosedResourceError
        self._clear()
        self._wake_all()

    def drop(self) -> None:
        """The same, but what it took last is not processed."""
        self._taken = False
        self.close()

    # --- for the session

    def deliver(self, message: bytes) -> None:
        """A message came."""
        if self._error is trio.ClosedResourceError:
            return
        if self._line:  # then nothing lies here
            waiter = self._line.pop(0)
            waiter.message = message
            self._taken = self.channel.is_reliable
            trio.lowlevel.reschedule(waiter.task)
            return
        if self._ready is NO_QUEUE:
            self._ready = deque()
        self._ready.append(message)
        self._count(len(message) + OVERHEAD)
        if not self.channel.is_reliable:
            self._make_room()

    def ended(self, error: ErrorMaker) -> None:
        """No more will come; `error` says why, once everything was taken."""
        if self._error is None:
            self._error = error
            if self._line:
                turns().wake(self._wake_all)

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        waiting = 0 if self.channel.incoming is None else self.channel.incoming.waiting
        return max(len(self._ready), waiting)

    # --- inside

    def _take(self) -> bytes:
        message = self._ready.popleft()
        self._count(-len(message) - OVERHEAD)
        self._taken = self.channel.is_reliable
        return message

    def _make_room(self) -> None:
        """The newest count most: the oldest go when one channel, or all together, hold too much."""
        connection = self._connection
        limits = connection.engine.limits
        while self._ready and (self._size > limits.channel_first or connection.unread > limits.connection_bytes):
            self._count(-len(self._ready.popleft()) - OVERHEAD)
            self.dropped += 1
            connection.dropped += 1

    def _count(self, size: int) -> None:
        self._size += size
        self._connection.unread += size

    def _clear(self) -> None:
        self._ready = NO_QUEUE
        self._count(-self._size)

    async def _wait(self) -> bytes:
        if self._error is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()  # a loop around it must not keep everybody waiting
            raise self._why()
        waiter = _Waiter(trio.lowlevel.current_task())
        self._line.append(waiter)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._line.remove(waiter)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._since_yield = 0
        if waiter.message is None:
            raise self._why()
        return waiter.message

    def _why(self) -> Exception:
        """Why no more comes."""
        return trio.EndOfChannel() if self._error is None else self._error()

    def _wake_all(self) -> None:
        line, self._line = self._line, []
        for waiter in line:
            trio.lowlevel.reschedule(waiter.task)

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()
