"""How does an application send on a channel of e3x, and how does it learn that the other side is done with it?"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Sending
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, SendHalf

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.e3x._channel import EngineChannel
    from muxkit.protocols.e3x._session_connection import Connection

    ErrorMaker = Callable[[], Exception]


class Receipt:
    """A message that was sent on a reliable channel."""

    __slots__ = ("_sender", "number")

    def __init__(self, sender: Sender, number: int) -> None:
        self._sender = sender
        self.number = number
        """The seq of its last packet."""

    @property
    def is_delivered(self) -> bool:
        return self._sender.delivered >= self.number

    async def delivered(self) -> None:
        """Wait until the application on the other side has processed the message.

        Raises `ChannelStopped` if the peer broke the channel off before, `LinkLost` if it is gone: then it is not
        known. Cancelled, nothing changes.
        """
        await self._sender.wait_delivered(self.number)

    def __repr__(self) -> str:
        return f"<e3x.Receipt {self.number} {'delivered' if self.is_delivered else 'under way'}>"


class Sender(SendHalf):
    """The sending side of a channel; an unreliable one never waits, and has no receipts."""

    __slots__ = (
        "_connection",
        "_engine",
        "_failure",
        "_is_broken",
        "_numbers",
        "_waiting",
        "channel",
        "delivered",
        "end",
        "last",
    )

    def __init__(self, connection: Connection, channel: EngineChannel, *, spoke: bool) -> None:
        super().__init__(connection.room, connection.ring)
        self._connection = connection
        self._engine = connection.engine
        self.channel = channel
        self.last = 0
        """The receipt of the last message."""
        self.end: int | None = None
        """The receipt of our end."""
        self.delivered = 0
        """The other side's application is done with everything up to here."""
        self._numbers: list[int] = []  # a heap of those that somebody waits for
        self._waiting: dict[int, trio.Event] = {}
        self._failure: ErrorMaker | None = None
        self._is_broken = False  # by the peer, who knows that it did not get everything
        if spoke and channel.outgoing is not None:
            self.last = channel.outgoing.next_seq - 1  # what the opening carried

    # --- for the application

    async def post(self, message: bytes) -> Receipt:
        """`send`, and a receipt."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if type(message) is not bytes:
            message = bytes(message)
        size = len(message)
        if self.state is not Sending.OPEN:
            await self._refuse()
        if self.may_send(size):
            self._push(message)
            receipt = Receipt(self, self.last)
        else:
            await self.wait_turn(size)
            try:
                self._push(message)
                receipt = Receipt(self, self.last)
            finally:
                self.end_turn()
        self._request_write()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return receipt

    async def finish(self, payload: bytes = b"") -> None:
        """Say that no more follows, and wait until that has left.

        What the peer confirms is only that its application is done, so nothing tells that it has heard: for that
        there is `wait_delivered`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is Sending.OPEN:
            self.close()
        elif self._error is not None:
            await self._refuse()
        while self._error is None and not self._has_left():
            await self._connection.written.park()
        await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    def _has_left(self) -> bool:
        channel = self.channel
        if channel.outgoing is None:
            return not channel.datagrams
        return channel.gone or self.end is None or channel.outgoing.sent >= self.end

    async def wait_delivered(self, number: int | None = None) -> None:
        """Wait until the peer's application is done with everything up to this receipt; None: with all there is."""
        await trio.lowlevel.checkpoint()
        number = self.everything if number is None else number
        if self.delivered >= number:
            return
        if self._failure is not None:
            raise self._why()
        event = self._waiting.get(number)
        if event is None:
            event = self._waiting[number] = trio.Event()
            heapq.heappush(self._numbers, number)
        await event.wait()
        if self.delivered < number:
            raise self._why()

    @property
    def everything(self) -> int:
        """The receipt of all that was said so far."""
        return self.last if self.end is None else self.end

    # --- for the session

    @property
    def is_undelivered(self) -> bool:
        """Was something sent that the peer's application may not have processed, and did nobody give it up?"""
        if self.channel.outgoing is None or self.given_up or self._is_broken:
            return False
        return self.delivered < self.last

    def advance(self, last: int) -> None:
        """The peer's application is done with everything up to here."""
        self.delivered = last
        while self._numbers and self._numbers[0] <= last:
            self._waiting.pop(heapq.heappop(self._numbers)).set()
        if self.end is not None and last >= self.end:
            self.confirmed()

    def broken(self, error: ErrorMaker) -> None:
        """The peer broke the channel off."""
        self._is_broken = True
        self._fail(error)
        self.stopped(error)

    def lost(self, error: ErrorMaker) -> None:
        self._fail(error)
        super().lost(error)

    def abort(self) -> None:
        super().abort()
        self._fail(_aborted)

    def _why(self) -> Exception:
        """Why nothing more will be confirmed."""
        return _aborted() if self._failure is None else self._failure()

    def _fail(self, error: ErrorMaker) -> None:
        self._failure = self._failure or error
        for event in self._waiting.values():
            event.set()
        self._waiting.clear()
        self._numbers.clear()

    # --- what a half asks its protocol

    def admits(self, size: int) -> bool:
        return self._engine.admits(self.channel, size)

    def watch(self, size: int) -> None:
        self._engine.watch(self.channel, size)

    def _push(self, message: bytes) -> None:
        self.last = self._engine.send(self.channel, message) or self.last
        self._connection.messages_sent += 1

    def check_size(self, size: int) -> None:
        limit = self._engine.limits.message
        if size > limit:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={limit})")

    def _finish(self, payload: bytes) -> None:
        if not self.channel.gone and not self.channel.ended:
            self._connection.touch()
            self.end = self._engine.end(self.channel)

    def _abort(self) -> None:
        self._connection.touch()
        self._engine.err(self.channel, "given up")


def _aborted() -> Exception:
    return trio.ClosedResourceError("this side gave the channel up")
