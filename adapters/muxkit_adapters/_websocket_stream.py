"""How does a WebSocket become a byte stream? Bytes leave in pieces, messages lose their boundaries."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

import attrs
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection
from wsproto.utilities import ProtocolError

from muxkit.runtime import bare_nursery, close_at_once, protected_manager

from ._errors import HandshakeFailed
from ._sockets import OneAtATime
from ._websocket_guard import GuardedStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CLOSE_TIMEOUT = 5.0  # s, for the peer to answer our close frame
PIECE = 65_536  # bytes, the largest message that we send
RECEIVE_SIZE = 65_536
CLEAN = {1000, 1001, 1005}  # done, going away, and a close frame that gives no code (RFC 6455, 7.4.1)


@attrs.frozen
class Opening:
    """What the two ends do differently, and what bounds them."""

    start: Callable[[trio.Nursery, trio.abc.Stream], Awaitable[WebSocketConnection]]
    peer: str
    handshake_timeout: float
    close_timeout: float
    message_most: int


class WebSocketStream(trio.abc.Stream):
    """A byte stream in binary messages; its end is only clean after a close frame."""

    def __init__(
        self, websocket: WebSocketConnection, wire: GuardedStream, opening: Opening, identity: bytes | None
    ) -> None:
        self._websocket = websocket
        self._wire = wire
        self._peer = opening.peer
        self._identity = identity
        self._close_timeout = opening.close_timeout
        self._rest = memoryview(b"")
        self._closed = False
        self._sending = OneAtATime("sending on this WebSocket")
        self._receiving = OneAtATime("receiving from this WebSocket")

    @property
    def peer(self) -> str:
        """The other end, for people: `ws 127.0.0.1:7000/chat`."""
        return self._peer

    @property
    def identity(self) -> bytes | None:
        """What the stream below knows about its peer: over TLS the certificate that was verified, in DER."""
        return self._identity

    def __repr__(self) -> str:
        return f"<WebSocketStream {self._peer}{', closed' if self._closed else ''}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else max_bytes
        if not isinstance(size, int):
            raise TypeError(f"max_bytes={max_bytes!r}: must be a whole number")
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        with self._receiving:
            if self._closed or self._rest:
                await trio.lowlevel.checkpoint()
            while not self._rest:
                try:
                    message = await self._websocket.get_message()
                except ConnectionClosed as closed:
                    return self._end(closed)
                assert isinstance(message, bytes)  # the guard lets no text through
                self._rest = memoryview(message)
            if self._closed:
                raise self._closed_here()
            taken, self._rest = bytes(self._rest[:size]), self._rest[size:]
            return taken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending:
            view = memoryview(data).cast("B")
            if not view.nbytes or self._closed or self._wire.torn:
                await trio.lowlevel.checkpoint()
            for start in range(0, view.nbytes or 1, PIECE):
                if self._closed:
                    raise self._closed_here()
                if self._wire.torn:
                    raise trio.BrokenResourceError(f"{self._peer}: an earlier send was cut short inside a message")
                piece = bytes(view[start : start + PIECE])
                if piece:
                    await self._send(piece)

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self._closed:
                await trio.lowlevel.checkpoint()
                raise self._closed_here()
            await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Exchange close frames and hang up, within the close timeout; what is still unread is discarded."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        try:
            with trio.move_on_after(self._close_timeout):
                if not self._wire.torn:
                    await self._websocket.aclose()
                await self._wire.aclose()
        finally:
            await close_at_once(self._wire)

    async def _send(self, piece: bytes) -> None:
        try:
            await self._websocket.send_message(piece)
        except (ConnectionClosed, ProtocolError) as error:
            if self._closed:
                raise self._closed_here() from None
            raise trio.BrokenResourceError(f"{self._peer}: {self._why(error)}") from error

    def _end(self, closed: ConnectionClosed) -> bytes:
        if self._closed:
            raise self._closed_here() from None
        if self._wire.failure is None and closed.reason is not None and closed.reason.code in CLEAN:
            return b""
        raise trio.BrokenResourceError(f"{self._peer}: {self._why(closed)}") from (self._wire.failure or closed)

    def _why(self, error: Exception) -> str:
        if self._wire.failure is not None:
            return str(self._wire.failure)
        reason = self._websocket.closed
        if reason is None:
            return f"the WebSocket is over ({type(error).__name__})"
        if reason.code == 1006:
            return "the connection ended without a close frame"
        return f"closed with {reason.code} {reason.name}{f': {reason.reason!r}' if reason.reason else ''}"

    def _closed_here(self) -> trio.ClosedResourceError:
        return trio.ClosedResourceError("this WebSocket was closed on our side")


class _Tasks:
    """Stands in for the nursery: a task's failure is remembered where someone waits for it, not raised."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.waiting = trio.CancelScope()
        self.failure: Exception | None = None

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, task)

    async def _run(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:
            self.failure = error
        finally:
            self.waiting.cancel()


@protected_manager
async def websocket_over(wire: trio.abc.Stream, opening: Opening) -> AsyncIterator[WebSocketStream]:
    """Entering it is the upgrade; leaving it normally exchanges close frames, by an error hangs up."""
    failure: BaseException
    try:
        async with bare_nursery() as nursery:
            guarded = GuardedStream(wire, message_most=opening.message_most)
            try:
                websocket = await _upgrade(nursery, guarded, opening)
                identity: bytes | None = getattr(wire, "identity", None)
                stream = WebSocketStream(websocket, guarded, opening, identity)
                yield stream
                await stream.aclose()
            finally:
                await close_at_once(guarded)
                nursery.cancel_scope.cancel()
        return
    except BaseExceptionGroup as group:
        # The tasks never raise on their own account, so beside cancellations this is the block's exception.
        own = [error for error in group.exceptions if not isinstance(error, trio.Cancelled)]
        if len(own) > 1:
            raise
        failure = own[0] if own else group.exceptions[0]
    raise failure


async def _upgrade(nursery: trio.Nursery, wire: GuardedStream, opening: Opening) -> WebSocketConnection:
    tasks = _Tasks(nursery)
    tasks.waiting.deadline = trio.current_time() + opening.handshake_timeout
    with tasks.waiting, suppress(ConnectionClosed):  # the peer is gone before the answer is
        # Of the nursery only `start_soon` is used.
        return await opening.start(cast("trio.Nursery", tasks), wire)
    if isinstance(tasks.failure, ConnectionRejected):
        why = f"the upgrade was answered with HTTP {tasks.failure.status_code}"
    elif wire.failure is not None:
        why = str(wire.failure)
    elif trio.current_time() >= tasks.waiting.deadline:
        why = f"the upgrade was not over within {opening.handshake_timeout:g} s"
    else:
        why = "the peer hung up during the upgrade, or does not speak WebSocket"
    raise HandshakeFailed(f"{opening.peer}: {why}") from tasks.failure
