"""How does Aqueduct have the common channels? Pairs of its own, made by messages on one channel in each direction.

The client's first message on the entrypoint carries the receiver of nothing but the sender of a channel on which the
server opens its own. Every further message on either of the two opens one: it carries a receiver and a sender.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Receiving, Sending
from muxkit.protocols.aqueduct._session_errors import closed, refused
from muxkit.protocols.aqueduct._session_receiving import Receiver
from muxkit.protocols.aqueduct._session_sending import Sender
from muxkit.runtime import Backlog
from muxkit.runtime import Channel as CommonChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable
    from types import TracebackType

    from muxkit.protocols.aqueduct._events import Arrived
    from muxkit.protocols.aqueduct._session_core import Core
    from muxkit.protocols.aqueduct._session_errors import ErrorMaker

HELLO: Final = b"muxkit channels"  # the payload of the client's first message
OPENING_SIZE: Final = 64  # bytes, what a message that opens a channel counts


class Channel(CommonChannel):
    """A sender and a receiver: the common two-way channel."""

    __slots__ = ("_core", "_is_ours", "receiver", "sender")

    def __init__(self, core: Core, sender: Sender, receiver: Receiver, *, is_ours: bool) -> None:
        self._core = core
        self._is_ours = is_ours
        self.sender = sender
        self.receiver = receiver

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sender.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sender.send_many(messages)

    async def receive(self) -> bytes:
        return self._payload(await self.receiver.next())

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        return [self._payload(arrived) for arrived in await self.receiver.next_many(limit)]

    def _payload(self, arrived: Arrived) -> bytes:
        for half in self._core.attachments_of(arrived):  # there is no place for them here
            half.close()
        return arrived.payload

    async def finish(self) -> None:
        await self.sender.finish()

    async def aclose(self) -> None:
        self.sender.close()
        await self.receiver.aclose()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.sender.close()
        self.receiver.close()

    def abort(self) -> None:
        is_news = self.sender.state is not Sending.CLOSED or self.receiver.state is not Receiving.CLOSED
        self.sender.abort()
        self.receiver.close()
        if is_news and not self._is_ours:
            self._core.engine.blame()
            self._core.did()

    def __repr__(self) -> str:
        return f"<aqueduct.Channel {self.sender!r} {self.receiver!r}>"


class Faces:
    """The common channels of one connection, which carries these or what the application makes of its entrypoint."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entrypoint = core.face_of(core.engine.entrypoint)
        self._way_out: Sender | None = None  # where we open
        self._way_in: Receiver | None = None  # where the peer opens
        self._opened: dict[Channel, Arrived] = {}
        self._backlog: Backlog[Channel] = Backlog(self._taken)
        self._is_draining = False
        self.is_common = False
        core.on_goodbye = self.goodbye

    def use(self) -> None:
        """From now on the connection carries common channels."""
        if self.is_common:
            return
        entrypoint, core = self._entrypoint, self._core
        if isinstance(entrypoint, Receiver):
            if entrypoint.taken:
                raise LocalProtocolError("the entrypoint is in use: its messages may open common channels, or be yours")
            self.is_common = True
            self._way_in = entrypoint
            entrypoint.divert(self._offered)
            return
        if entrypoint.sent:
            raise LocalProtocolError("the entrypoint is in use: it may open common channels, or be yours")
        self.is_common = True
        self._way_out = entrypoint
        if entrypoint.state is Sending.OPEN:
            receiver, ticket = core.new_receiver()
            core.base.add(receiver.machine)
            self._way_in = receiver
            entrypoint.push(HELLO, [ticket])
            receiver.divert(self._offered)
            core.did()

    def check_free(self) -> None:
        """May the application have the entrypoint for itself?"""
        if self.is_common:
            raise LocalProtocolError("this connection carries common channels, which need its entrypoint")

    # --- what the peer opens

    def incoming(self) -> AsyncIterator[Channel]:
        self.use()
        return self._backlog

    def _offered(self, arrived: Arrived | None) -> None:
        """A message of the peer that opens something; None when there will be no more."""
        core = self._core
        if arrived is None:
            if not core.pump.is_lost:  # else `goodbye` says so in a moment
                self._backlog.ended()
                core.moved.unpark_all()
            return
        halves = core.attachments_of(arrived)
        match halves:
            case (Sender() as sender,) if self._way_out is None:
                core.consumed(arrived)
                core.base.add(sender.machine)
                self._way_out = sender
                core.moved.unpark_all()
                if self._is_draining:
                    sender.close()
            case (Receiver() as receiver, Sender() as sender) if not self._is_draining:
                channel = Channel(core, sender, receiver, is_ours=False)
                self._opened[channel] = arrived
                self._backlog.put(channel)
            case _:
                core.dispose(arrived)

    def _taken(self, channel: Channel) -> None:
        self._core.consumed(self._opened.pop(channel))
        self._core.did()

    # --- what we open

    async def open(self) -> Channel:
        """A channel; the peer hears of it at once."""
        self.use()
        await trio.lowlevel.checkpoint_if_cancelled()
        core = self._core
        way = await self._turn()
        try:
            sender, to_sender = core.new_sender()
            receiver, to_receiver = core.new_receiver()
            way.push(b"", [to_sender, to_receiver])
        finally:
            way.end_turn()
        core.did()
        return Channel(core, sender, receiver, is_ours=True)

    async def _turn(self) -> Sender:
        """Wait until a channel may be opened; the caller must do so before his next checkpoint, then `end_turn`."""
        while True:
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            way = self._way_out
            if way is None or not self._has_room():
                await self._core.moved.park()
                continue
            try:
                await way.wait_turn(OPENING_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                continue
            if self._has_room() and way.state is Sending.OPEN and way.admits(OPENING_SIZE):
                return way
            way.end_turn()

    def _has_room(self) -> bool:
        """The peer may not have heard of the end of those that ended last, so a part of what it allows is left."""
        most = self._core.limits.channels
        return self._core.engine.ours + 2 <= most - most // 8

    def _closed(self) -> Exception | None:
        """Why nothing can be opened any more, or None."""
        core = self._core
        if core.pump.is_lost:
            return core.pump.loss()
        if core.is_leaving:
            return closed()
        way = self._way_out
        if way is None:
            has_ended = self._way_in is None or self._way_in.state is not Receiving.OPEN
            return refused() if has_ended else None
        return None if way.state is Sending.OPEN else refused()

    # --- the end

    def drain(self) -> None:
        """Take no more; what has come before can still be taken."""
        self._is_draining = True
        self._backlog.ended()
        if self._way_in is not None:
            self._way_in.take_no_more()
        elif isinstance(self._entrypoint, Receiver):
            self._entrypoint.take_no_more()

    def goodbye(self, error: ErrorMaker | None) -> None:
        """Nothing more comes: the connection is lost, or one of us takes leave."""
        self._is_draining = True
        self._backlog.ended(error)


class Opening(AbstractAsyncContextManager[Channel]):
    """Opens when the block is entered; closes when it is left normally, aborts when by an error."""

    __slots__ = ("_channel", "_faces")

    def __init__(self, faces: Faces) -> None:
        self._faces: Faces | None = faces
        self._channel: Channel | None = None

    async def __aenter__(self) -> Channel:
        if self._faces is None:
            raise RuntimeError("this block was entered before; open another channel")
        faces, self._faces = self._faces, None
        self._channel = await faces.open()
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
