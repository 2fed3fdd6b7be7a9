"""Receivers of a link, whose messages take the peer's window until they are consumed or answered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Receiving
from muxkit.protocols.relink._session.core import Core
from muxkit.protocols.relink.engine.events import Arrived
from muxkit.protocols.relink.frames import Parts
from muxkit.runtime import ErrorMaker, Reading, ReceiveHalf, run_interruptible, turns

Handler = Callable[["Message"], Awaitable[object]]


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
        return f"<relink.Message {self.number}, {_size(self)} bytes in {len(self.parts)} parts>"


def _size(message: Message) -> int:
    return sum(map(len, message.parts))


class Receiver(ReceiveHalf[Message]):
    """A channel of the peer, in its present life or the next one if it is not open.

    As an iterator it consumes (under transactions: commits) each message when the next one is asked for, so what a
    loop's body did not get through with is given again. Answers and consumption always cover everything before.

    `receive` raises `trio.EndOfChannel` behind the last message of a closed channel, `LinkChanged` or `LinkLost` at
    once when the link is gone, since nothing can be consumed any more, `trio.ClosedResourceError` after `close`.
    """

    __slots__ = (
        "_came",
        "_core",
        "_current",
        "_done",
        "_given",
        "_has_ended",
        "_is_open",
        "_unusable",
        "channel",
        "has_transactions",
    )

    _size_of = staticmethod(_size)

    def __init__(self, core: Core, channel: int) -> None:
        super().__init__(core.request_write)
        self._core = core
        self.channel = channel
        self.has_transactions = core.in_transactions
        self._is_open = channel in core.peer_channels
        self._has_ended = False
        self._came = -1  # the last message that the engine gave
        self._given = -1  # the last that the application has
        self._done = -1  # consumed or answered through this one
        self._current: Message | None = None  # of the iterator, and not consumed yet
        self._unusable: ErrorMaker | None = None  # why nothing can be consumed: the link is gone, or it was closed

    # --- for the application

    def consume(self, *, through: Message | int) -> None:
        """Consume the messages through this one; under transactions the same as `committed`."""
        engine = self._core.engine
        self._tell(engine.committed if self.has_transactions else engine.consume, through)

    def committed(self, *, through: Message | int) -> None:
        """We have processed the messages through this one that are not answered yet."""
        self._tell(self._core.engine.committed, through)

    def uncommitted(self, *, through: Message | int) -> None:
        """We could not process the messages through this one that are not answered yet."""
        self._tell(self._core.engine.uncommitted, through)

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
                if not self.has_transactions or self._unusable is not None:
                    raise
                # A message may hold what a peer sent, so it is for debugging only.
                _log.info("channel %d: %s, answered with uncommitted", self.channel, type(error).__name__)
                _log.debug("in full", exc_info=error)

    def close(self) -> None:
        """Release the channel; messages that were not consumed go to the next receiver that is opened for it."""
        if self._unusable is not trio.ClosedResourceError:
            self._unusable = trio.ClosedResourceError
            if self._core.ins.get(self.channel) is self:
                del self._core.ins[self.channel]
            super().close()

    async def __anext__(self) -> Message:
        if self._current is not None:
            current, self._current = self._current, None
            if current.number > self._done:
                current.consume()
        self._current = await super().__anext__()
        return self._current

    def __repr__(self) -> str:
        is_closed = self._unusable is trio.ClosedResourceError
        state = "closed" if is_closed else "ended" if self._has_ended else "open" if self._is_open else "not open"
        return f"<relink.Receiver {self.channel} {state}, {self.unread} unread>"

    # --- for the link

    def opened(self) -> bool:
        was_open, self._is_open = self._is_open, True
        return not was_open

    def arrived(self, event: Arrived) -> None:
        if event.first <= self._came:
            return  # a receiver that is new has asked for everything, and got this before the event came
        self._came = event.first + len(event.messages) - 1
        for number, parts in enumerate(event.messages, event.first):
            self.deliver(Message(self, number, parts))

    def peer_closed(self) -> None:
        self._has_ended = True
        self.ended(trio.EndOfChannel)
        self._forget_if_over()

    def lost(self, error: ErrorMaker) -> None:
        self._unusable = self._error = error
        self.state = Receiving.CLOSED
        self._discard()
        if self._waiters:
            turns().wake(self._wake_all)

    # --- inside

    def _taken(self, items: Sequence[Message], size: int) -> bool:
        if items:
            self._given = items[-1].number
            self._core.messages_received += len(items)
        return False

    def _stop(self) -> None:
        """Do nothing: the peer does not learn that a receiver was closed."""

    def _reading(self) -> Reading | None:
        return self._core.reading()

    def _tell(self, command: Callable[..., None], through: Message | int) -> None:
        """Consume or answer the messages through this one, once."""
        if self._unusable is not None:
            raise self._unusable()
        number = through.number if isinstance(through, Message) else through
        if number > self._given:
            raise LocalProtocolError(
                f"channel {self.channel}: message {number}; {self._given} is the last that was received"
            )
        if number > self._done:
            command(self.channel, through=number, now=trio.current_time())
            self._done = number
            self._forget_if_over()
            self._core.after_consuming()

    def _forget_if_over(self) -> None:
        """Remove a closed channel once all is consumed; the peer can then open it anew, for another receiver."""
        core = self._core
        if self._has_ended and self._done >= self._came and core.ins.get(self.channel) is self:
            del core.ins[self.channel]
            core.peer_channels.pop(self.channel, None)
