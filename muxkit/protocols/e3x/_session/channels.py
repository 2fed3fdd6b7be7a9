"""What does an application hold? A channel of e3x, reliable or not, with receipts for what was processed."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import trio

from muxkit.protocols.e3x._session.receiving import Inbox
from muxkit.protocols.e3x._session.sending import Receipt, Sender
from muxkit.runtime import Channel as CommonChannel
from muxkit.runtime import ChannelCancelled, ChannelStopped, Unsupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from types import TracebackType

    from muxkit.protocols.e3x._session.connection import Connection
    from muxkit.protocols.e3x.engine._channel_old import EngineChannel

    ErrorMaker = Callable[[], Exception]


class Channel(CommonChannel):
    """A channel; made by `session.open`, or taken from `session.incoming`.

    On a reliable one a message counts as processed, and the peer is told, when the next is asked for, when `done` says
    so, or when the channel is closed; with `receive_many` all that it gave together. On an unreliable one `send` never
    waits, each message must fit into one packet (`quota`), and the oldest make way if too much waits at either end.
    """

    __slots__ = ("_connection", "_has_opening", "engine_channel", "inbox", "sender")

    def __init__(
        self, connection: Connection, engine_channel: EngineChannel, opening: bytes = b"", *, spoke: bool = False
    ) -> None:
        self._connection = connection
        self._has_opening = bool(opening)
        self.engine_channel = engine_channel
        self.sender = Sender(connection, engine_channel, spoke=spoke)
        self.inbox = Inbox(connection, engine_channel)
        if opening:
            self.inbox.deliver(opening)

    @property
    def id(self) -> int:
        return self.engine_channel.id

    @property
    def type(self) -> str:
        """What it is about, as its opener said."""
        return self.engine_channel.type

    @property
    def is_reliable(self) -> bool:
        return self.engine_channel.is_reliable

    @property
    def quota(self) -> int:
        """Bytes that fit into the next packet: on an unreliable channel the largest message."""
        return self._connection.engine.quota(self.engine_channel)

    @property
    def dropped(self) -> int:
        """Messages of an unreliable channel that came, and made way for newer ones before anybody took them."""
        return self.inbox.dropped

    # --- sending

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sender.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sender.send_many(messages)

    async def post(self, message: bytes) -> Receipt:
        """`send` with a receipt: `await receipt.delivered()` returns when the peer's application has processed it."""
        self._need_receipts()
        return await self.sender.post(message)

    async def delivered(self) -> None:
        """Wait until the peer's application has processed everything that was sent so far, a `finish` included."""
        self._need_receipts()
        await self.sender.wait_delivered()

    async def finish(self) -> None:
        """Say that no more messages follow, and wait until that has left; receiving goes on.

        e3x confirms only what an application has processed. So this cannot wait until the peer has heard it;
        `delivered` can wait until the peer is done.
        """
        await self.sender.finish()

    # --- receiving

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.inbox.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.inbox.receive_many(limit)

    def done(self) -> None:
        """What was received is processed; for those who do not ask for the next message at once."""
        self.inbox.done()

    # --- the end

    async def aclose(self) -> None:
        """End our side behind everything that was sent, and take nothing more.

        Does not wait. A peer that sends on is told once all of ours is processed (`ChannelStopped`).
        """
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.sender.close()
        self.inbox.close()
        self._connection.close(self.engine_channel)

    def abort(self) -> None:
        self.inbox.drop()
        self.sender.abort()
        self._connection.aborted(self)

    def __repr__(self) -> str:
        kind = "reliable" if self.is_reliable else "unreliable"
        return (
            f"<e3x.Channel {self.id} {self.type[:64]!r}, {kind}, {self.sender.state.value}, {self.inbox.unread} unread>"
        )

    # --- for the session

    def took(self) -> None:
        """The application has it; an opening that said nothing is processed with that."""
        if self._has_opening:
            self._connection.engine.accept(self.engine_channel)
        else:
            self._connection.done(self.engine_channel)

    def broken(self, text: str) -> None:
        """The peer broke it off."""
        said = text.encode(errors="replace")
        self.sender.broken(lambda: ChannelStopped("the peer broke the channel off", payload=said))
        self.inbox.ended(lambda: ChannelCancelled("the peer broke the channel off", payload=said))

    def lost(self, error: ErrorMaker) -> None:
        self.sender.lost(error)
        self.inbox.ended(error)

    def _need_receipts(self) -> None:
        if not self.is_reliable:
            raise Unsupported("an unreliable channel confirms nothing, so it has no receipts")


class Opening(AbstractAsyncContextManager[Channel]):
    """Opens when the block is entered; closes when it is left normally, aborts when by an error."""

    __slots__ = ("_channel", "_open")

    def __init__(self, open: Callable[[], Awaitable[Channel]]) -> None:
        self._open: Callable[[], Awaitable[Channel]] | None = open
        self._channel: Channel | None = None

    async def __aenter__(self) -> Channel:
        if self._open is None:
            raise RuntimeError("this block was entered before; open another channel")
        open, self._open = self._open, None
        self._channel = await open()
        return self._channel

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is None:
            return
        if kind is None:
            await self._channel.aclose()
        else:
            self._channel.abort()
