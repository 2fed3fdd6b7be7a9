"""The common two-way channels of `muxkit.Session`, made of Aqueduct's own channels.

The client's first message on the entrypoint carries the sender of a channel on which the server opens its channels.
Every further message on either of the two opens one: it carries a receiver and a sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Receiving, Sending
from muxkit.protocols.aqueduct._session.core import Receiver, Sender, closed, refused
from muxkit.runtime import Backlog
from muxkit.runtime import Channel as CommonChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

    from muxkit.protocols.aqueduct._session.core import Core
    from muxkit.protocols.aqueduct.engine import Arrived
    from muxkit.runtime import ErrorMaker

CLIENT_MARKER: Final = b"muxkit channels"  # the payload of the client's first message
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
        return self._payload(await self.receiver.next_arrived())

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        return [self._payload(arrived) for arrived in await self.receiver.next_all(limit)]

    def _payload(self, arrived: Arrived) -> bytes:
        if arrived.attachments:  # a common channel cannot give them to the application
            for half in self._core.attachments_of(arrived):
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
            self._core.engine.charge_failure()
            self._core.after_command()

    def __repr__(self) -> str:
        return f"<aqueduct.Channel {self.sender!r} {self.receiver!r}>"


class CommonChannels:
    """The common channels of one connection; they exclude any other use of its entrypoint."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entrypoint = core.half_of(core.engine.entrypoint)
        self._opener: Sender | None = None  # where we open channels
        self._acceptor: Receiver | None = None  # where the peer opens channels
        self._opened: dict[Channel, Arrived] = {}
        self._backlog: Backlog[Channel] = Backlog(self._taken)
        self._is_draining = False
        self._in_use = False
        core.on_end = self.end

    def use(self) -> None:
        """Carry common channels from now on."""
        if self._in_use:
            return
        entrypoint, core = self._entrypoint, self._core
        if isinstance(entrypoint, Receiver):
            if entrypoint.taken:
                raise LocalProtocolError("the entrypoint is in use: its messages may open common channels, or be yours")
            self._in_use = True
            self._acceptor = entrypoint
            entrypoint.redirect(self._offered)
            return
        if entrypoint.sent:
            raise LocalProtocolError("the entrypoint is in use: it may open common channels, or be yours")
        self._in_use = True
        self._opener = entrypoint
        if entrypoint.state is Sending.OPEN:
            receiver, ticket = core.new_receiver()
            core.reserved.add(receiver.machine)
            self._acceptor = receiver
            entrypoint.push(CLIENT_MARKER, [ticket])
            receiver.redirect(self._offered)
            core.after_command()

    def check_unused(self) -> None:
        """Raise `LocalProtocolError` if the entrypoint carries common channels."""
        if self._in_use:
            raise LocalProtocolError("this connection carries common channels, which need its entrypoint")

    # --- channels that the peer opens

    def incoming(self) -> AsyncIterator[Channel]:
        self.use()
        return self._backlog

    def _offered(self, arrived: Arrived | None) -> None:
        """Take a message of the peer that opens a channel; None when no more will come."""
        core = self._core
        if arrived is None:
            if not core.pump.is_lost:  # else `end` follows
                self._backlog.ended()
                core.changed.unpark_all()
            return
        match core.attachments_of(arrived):
            case (Sender() as sender,) if self._opener is None:
                core.engine.consumed(arrived, trio.current_time())
                core.reserved.add(sender.machine)
                self._opener = sender
                core.changed.unpark_all()
                if self._is_draining:
                    sender.close()
            case (Receiver() as receiver, Sender() as sender) if not self._is_draining:
                channel = Channel(core, sender, receiver, is_ours=False)
                self._opened[channel] = arrived
                self._backlog.put(channel)
            case _:
                core.dispose(arrived)

    def _taken(self, channel: Channel) -> None:
        self._core.engine.consumed(self._opened.pop(channel), trio.current_time())
        self._core.after_command()

    # --- channels that we open

    async def open(self) -> Channel:
        """Open a channel; the peer hears of it at once."""
        self.use()
        await trio.lowlevel.checkpoint_if_cancelled()
        core = self._core
        opener = await self._wait_turn()
        try:
            sender, to_sender = core.new_sender()
            receiver, to_receiver = core.new_receiver()
            opener.push(b"", [to_sender, to_receiver])
        finally:
            opener.end_turn()
        core.after_command()
        return Channel(core, sender, receiver, is_ours=True)

    async def _wait_turn(self) -> Sender:
        """Wait until a channel may be opened; the caller opens it before its next checkpoint, then calls `end_turn`."""
        while True:
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            opener = self._opener
            if opener is None or not self._has_room():
                await self._core.changed.park()
                continue
            try:
                await opener.wait_turn(OPENING_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                continue
            if self._has_room() and opener.state is Sending.OPEN:
                return opener
            opener.end_turn()

    def _has_room(self) -> bool:
        """Leave an eighth of what the peer allows: it may not have heard of the end of the latest channels."""
        most = self._core.limits.channels
        return self._core.engine.ours + 2 <= most - most // 8

    def _closed(self) -> Exception | None:
        """Give the reason why no channel can be opened any more, or None."""
        core = self._core
        if core.pump.is_lost:
            return core.pump.loss()
        if core.is_leaving:
            return closed()
        if self._opener is None:
            has_ended = self._acceptor is None or self._acceptor.state is not Receiving.OPEN
            return refused() if has_ended else None
        return None if self._opener.state is Sending.OPEN else refused()

    # --- the end

    def drain(self) -> None:
        """Accept no more channels; those that have come can still be taken."""
        self._is_draining = True
        self._backlog.ended()
        if self._acceptor is not None:
            self._acceptor.refuse_more()
        elif isinstance(self._entrypoint, Receiver):
            self._entrypoint.refuse_more()

    def end(self, error: ErrorMaker | None) -> None:
        """Expect no more channels: the connection is lost, or one side is leaving it."""
        self._is_draining = True
        self._backlog.ended(error)
