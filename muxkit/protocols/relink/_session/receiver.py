"""Receivers of a link, whose messages take the peer's window until they are consumed or answered."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.runtime import run_interruptible, turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from muxkit.protocols.relink._session.core import Core, ErrorMaker
    from muxkit.protocols.relink.frames import Parts

    Handler = Callable[["Message"], Awaitable[object]]


YIELD_CALLS = 64

_log = logging.getLogger("muxkit")


class Message:
    """A message of the peer. As a block it is processed: left normally it is committed (without transactions:
    consumed), left by an `Exception` it is answered `uncommitted` (without transactions: it stays unconsumed); the
    exception goes on. A cancellation leaves it as it is, and a receiver that is opened anew gives it again.
    """

    __slots__ = ("_receiver", "number", "parts")

    def __init__(self, receiver: Receiver, number: int, parts: Parts) -> None:
        self._receiver = receiver
        self.number = number
        """Counted from 0 since the peer opened the channel."""
        self.parts = parts

    @property
    def data(self) -> bytes:
        """All parts in one."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def consume(self) -> None:
        """Consume this message and those before it; under transactions the same as `committed`."""
        self._receiver.consume(through=self.number)

    def committed(self) -> None:
        """We have processed it, and those before it."""
        self._receiver.committed(through=self.number)

    def uncommitted(self) -> None:
        """We could not process it, nor those before it that are not answered yet."""
        self._receiver.uncommitted(through=self.number)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.consume()
        elif isinstance(error, Exception) and self._receiver.has_transactions:
            self.uncommitted()

    def __repr__(self) -> str:
        size = sum(map(len, self.parts))
        return f"<relink.Message {self.number}, {size} bytes in {len(self.parts)} parts>"


class Receiver:
    """A channel of the peer, in its present life or the next one if it is not open.

    As an iterator it consumes (under transactions: commits) each message when the next one is asked for, so what a
    loop's body did not get through with is given again. Answers and consumption always cover everything before.
    """

    def __init__(self, core: Core, channel: int) -> None:
        self._core = core
        self._engine = core.engine
        self.channel = channel
        self.has_transactions = core.in_transactions
        self._ready: deque[tuple[int, Parts]] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._is_open = channel in core.peer_channels
        self._has_ended = core.peer_channels.get(channel, False)
        self._taken = -1  # the last that the engine gave
        self._done = -1  # consumed or answered through this one
        self._given: Message | None = None  # by the iterator, and not consumed yet
        self._is_closed = False
        self._error: ErrorMaker | None = None
        self._calls = 0

    # --- for the application

    async def receive(self) -> Message:
        """The next message, which stays the peer's until it is consumed. Cancelled means that none was taken.

        Raises `trio.EndOfChannel` behind the last message of a closed channel, `LinkChanged` or `LinkLost` at once
        when the link is gone, since nothing can be consumed any more, `trio.ClosedResourceError` after `close`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._ready:
            await self._wait()
        self._check()
        number, parts = self._ready.popleft()
        self._core.messages_received += 1
        self._calls += 1
        if self._calls >= YIELD_CALLS:
            self._calls = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        return Message(self, number, parts)

    async def _wait(self) -> None:
        self._fill()
        if self._ready:
            return
        try:
            self._check()
            if self._has_ended:
                self._forget_if_over()
                raise trio.EndOfChannel
        except BaseException:
            await trio.lowlevel.cancel_shielded_checkpoint()  # a loop of failing calls must not starve other tasks
            raise
        self._calls = 0
        await self._lot.park()

    def consume(self, *, through: Message | int) -> None:
        """Consume the messages through this one; under transactions the same as `committed`."""
        if self.has_transactions:
            self.committed(through=through)
            return
        number = self._check_answer(through)
        if number > self._done:
            self._engine.consume(self.channel, through=number, now=trio.current_time())
            self._did(number)

    def committed(self, *, through: Message | int) -> None:
        """We have processed the messages through this one that are not answered yet."""
        number = self._check_answer(through)
        if number > self._done:
            self._engine.committed(self.channel, through=number, now=trio.current_time())
            self._did(number)

    def uncommitted(self, *, through: Message | int) -> None:
        """We could not process the messages through this one that are not answered yet."""
        number = self._check_answer(through)
        if number > self._done:
            self._engine.uncommitted(self.channel, through=number, now=trio.current_time())
            self._did(number)

    async def process(self, handler: Handler) -> None:
        """Call `handler` with each message until the channel ends, and answer what became of it.

        What it raises is logged and, under transactions, answered `uncommitted`; the next message follows. Without
        transactions there is no such answer: the error comes out, and the message stays unconsumed.
        """
        while True:
            try:
                message = await self.receive()
            except trio.EndOfChannel:
                return
            try:
                with message:
                    await run_interruptible(handler, message)
            except Exception as error:
                if not self.has_transactions or self._error is not None:
                    raise
                # A message may hold what a peer sent, so it is for debugging only.
                _log.info("channel %d: %s, answered with uncommitted", self.channel, type(error).__name__)
                _log.debug("in full", exc_info=error)

    def close(self) -> None:
        """Release the channel; messages that were not consumed go to the next receiver that is opened for it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ready.clear()
        self._lot.unpark_all()
        if self._core.ins.get(self.channel) is self:
            del self._core.ins[self.channel]
            self._engine.rewind(self.channel)
            self._core.dispatch_events()

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Message:
        if self._given is not None:
            given, self._given = self._given, None
            if given.number > self._done:
                given.consume()
        try:
            message = self._given = await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        return message

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "ended" if self._has_ended else "open" if self._is_open else "not open"
        return f"<relink.Receiver {self.channel} {state}, {len(self._ready)} unread>"

    # --- for the link

    def opened(self) -> bool:
        if self._is_open:
            return False
        self._is_open = True
        return True

    def arrived(self) -> None:
        if self._lot or len(self._ready) < YIELD_CALLS:
            self._fill()
        self._lot.unpark_all()

    def ended(self) -> None:
        self._has_ended = True
        self._fill()
        self._lot.unpark_all()
        self._forget_if_over()

    def in_lost(self, error: ErrorMaker) -> None:
        self._error = self._error or error
        self._ready.clear()
        if self._lot:
            turns().wake(self._lot.unpark_all)

    # --- inside

    def _fill(self) -> None:
        """Take the messages that wait in the engine; they stay in the peer's window until consumed."""
        if not self._is_open or self._is_closed or self._error is not None:
            return
        while True:
            first, batch = self._engine.receive(self.channel)
            if not batch:
                break
            self._ready.extend(enumerate(batch, first))
            self._taken = first + len(batch) - 1

    def _check(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this receiver was closed")
        if self._error is not None:
            raise self._error()

    def _check_answer(self, through: Message | int) -> int:
        self._check()
        number = through.number if isinstance(through, Message) else through
        given = self._ready[0][0] - 1 if self._ready else self._taken
        if number > given:
            raise LocalProtocolError(f"channel {self.channel}: message {number}; {given} is the last that was received")
        return number

    def _did(self, number: int) -> None:
        self._done = number
        if self._has_ended:
            self._forget_if_over()
        self._core.after_consuming()

    def _forget_if_over(self) -> None:
        """Remove a closed channel once all is consumed; the peer can then open it anew, for another receiver."""
        core = self._core
        if self._has_ended and not self._ready and self._done >= self._taken and core.ins.get(self.channel) is self:
            del core.ins[self.channel]
            core.peer_channels.pop(self.channel, None)
