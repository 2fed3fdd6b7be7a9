"""The channel objects that applications use.

`MuxChannel` is the two-way channel of every protocol, and has a sending half and a receiving half. `Sink` and `Source`
are the one-way channels of protocols that have them, and have one half each. All these classes only delegate to their
halves, so "go to definition" leads from `channel.send` to `SendHalf.send`, and from there to the engine's `Sender`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import trio

from muxkit._observer import tell
from muxkit._spans import ChannelSpan
from muxkit.core import Headers, Receiving, Sending, decode_headers, without_name
from muxkit.runtime._session import Channel, ChannelStats, Session
from muxkit.runtime.halves.bytestream import ByteStream
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.runtime.connection import MuxConnection


class MuxChannel(Channel):
    """A two-way channel of whole messages: a sending half and a receiving half."""

    __slots__ = ("_connection", "_opening", "_span", "receiving", "sending")

    def __init__(
        self, connection: MuxConnection[Any, Any], sending: SendHalf, receiving: ReceiveHalf[Any], opening: bytes = b""
    ) -> None:
        self._connection = connection
        self._opening = opening
        self._span: ChannelSpan | None = None
        self.sending: SendHalf = sending
        self.receiving: ReceiveHalf[Any] = receiving  # its items are messages, or a subclass converts them to messages
        sending.channel = receiving.channel = self

    @property
    def session(self) -> Session:
        return self._connection.session

    def _observe_span(self, ids: Mapping[str, str]) -> None:
        if ids:
            tell(self._connection.observer, "span", self._observed_name, ids["trace_id"], ids["span_id"])

    @property
    def _observed_name(self) -> str:
        """The channel as the engine names it to observers."""
        return self.sending.sender.label

    @property
    def sent_with_opening(self) -> bytes:
        """The opening as it was sent: the name, the headers and the payload."""
        return self._opening

    @property
    def name(self) -> str:
        return without_name(self.sent_with_opening).name

    @property
    def opening(self) -> bytes:
        return without_name(self.sent_with_opening).payload

    @property
    def headers(self) -> Headers:
        return decode_headers(without_name(self.sent_with_opening).headers)

    def _opened_with(self) -> tuple[str, Headers, bytes]:
        opened = without_name(self.sent_with_opening)
        return opened.name, decode_headers(opened.headers), opened.payload

    # These methods return the half's coroutine instead of awaiting it, because another coroutine per message is slow.

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sending.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sending.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.receiving.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.receiving.receive_many(limit)

    def _cancel_when_stopped(self, scope: trio.CancelScope | None) -> None:
        self.sending.cancel_when_over(scope)

    def _try_send(self, message: bytes) -> bool:
        return self.sending.try_send(message)

    def _try_send_last(self, message: bytes) -> bool:
        self._connection.hold_writes()
        try:
            if not self.sending.try_send(message):
                return False
            self._cancel_when_stopped(None)  # nobody needs to be cancelled, because this ends the work
            self.close()
            return True
        finally:
            self._connection.release_writes()

    def _try_receive(self) -> bytes | None:
        return self.receiving.try_receive()

    async def finish(self, payload: bytes = b"") -> None:
        await self.sending.finish(payload)

    async def aclose(self) -> None:
        is_open = self.sending.state is Sending.OPEN
        self.close()
        if is_open:
            await self._connection.yield_after_closing()
        else:
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        # Close the sending half first, because a peer treats the opposite order as a cancelled channel.
        self.sending.close_quietly()
        self.receiving.close_quietly()
        self._connection.request_write_soon()
        if self._span is not None:
            self._span.end()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        if self._span is not None:
            self._span.end(code)
        self.sending.abort(reason, code=code)
        self.receiving.close()
        self._connection.channel_aborted(self)

    async def ping(self) -> float:
        """Ping the peer and return the round-trip time in seconds. The ping is about this channel if possible."""
        return await ping_half(self._connection, self.sending if self.sending.state is Sending.OPEN else self.receiving)

    def as_stream(self) -> ByteStream:
        """Return a `trio.abc.HalfCloseableStream` that sends and receives on this channel.

        Don't mix the methods of the stream with those of the channel.
        """
        return ByteStream(self.sending, self.receiving, self._span)

    def stats(self) -> ChannelStats:
        sender, receiver = self.sending.sender, self.receiving.receiver
        return ChannelStats(
            queued=sender.queued,
            unread=self.receiving.unread_bytes,
            credit_out=sender.credit_out,
            credit_in=receiver.credit_in,
            waiting_since=self.sending.waiting_since,
        )

    def __repr__(self) -> str:
        protocol = self._connection.info.protocol
        return f"<{protocol} channel: {self.sending!r} {self.receiving!r}>"


class Sink(trio.abc.SendChannel[bytes]):
    """A channel for sending only. It uses a single sending half, or the sending half of a two-way channel."""

    __slots__ = ("_connection", "half")

    def __init__(self, connection: MuxConnection[Any, Any], half: SendHalf) -> None:
        self._connection = connection
        self.half: SendHalf = half

    @property
    def state(self) -> Sending:
        """The state of the sending half: open, finishing or closed."""
        return self.half.state

    @property
    def waiting_since(self) -> float | None:
        """The time at which the first waiting sender began to wait, or None if no task waits."""
        return self.half.waiting_since

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        """Send one message. See `Channel.send`."""
        return self.half.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        """Send several messages with one checkpoint. If this is cancelled, a prefix of the messages has been sent."""
        return self.half.send_many(messages)

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size can probably be sent without waiting."""
        await self.half.wait_for_room(size)

    async def finish(self, payload: bytes = b"") -> None:
        """Send the end of the channel, and wait until the peer has confirmed it. See `SendHalf.finish`."""
        await self.half.finish(payload)

    async def wait_over(self) -> None:
        """Wait until the peer has confirmed the end. Raises an error if the half has ended in another way."""
        await self.half.wait_over()

    def cancel_when_over(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the half is closed. See `SendHalf.cancel_when_over`."""
        self.half.cancel_when_over(scope)

    async def aclose(self) -> None:
        """Send the end of the channel, after all messages, without waiting for the peer."""
        await self.half.aclose()

    def close(self) -> None:
        """Close the channel like `aclose`, but without a checkpoint."""
        self.half.close()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel the channel. The peer is notified that messages are missing, and gets the reason."""
        self.half.abort(reason, code=code)

    async def ping(self) -> float:
        """Send a ping about this channel, and return the round-trip time in seconds."""
        return await ping_half(self._connection, self.half)

    def __repr__(self) -> str:
        return repr(self.half)


class Source(trio.abc.ReceiveChannel[bytes]):
    """A channel for receiving only. It uses a single receiving half, or the receiving half of a two-way channel."""

    __slots__ = ("_connection", "half")

    def __init__(self, connection: MuxConnection[Any, Any], half: ReceiveHalf[bytes]) -> None:
        self._connection = connection
        self.half: ReceiveHalf[bytes] = half

    @property
    def state(self) -> Receiving:
        """The state of the receiving half: open, draining or closed."""
        return self.half.state

    @property
    def unread(self) -> int:
        """Number of messages that wait to be received."""
        return self.half.unread

    @property
    def end_payload(self) -> bytes:
        """The payload with which the peer has cancelled the channel. By convention, it describes an error."""
        return self.half.reason

    def receive(self) -> Coroutine[object, object, bytes]:
        """Wait for the next message. See `Channel.receive`."""
        return self.half.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        """Wait for at least one message, and return all messages that have arrived, up to `limit`."""
        return self.half.receive_many(limit)

    async def aclose(self) -> None:
        """Stop receiving, drop the unread messages, and ask the peer to stop sending."""
        await self.half.aclose()

    def close(self) -> None:
        """Close the channel like `aclose`, but without a checkpoint."""
        self.half.close()

    def abort(self) -> None:
        """Close the channel. This does the same as `close`."""
        self.half.close()

    async def ping(self) -> float:
        """Send a ping about this channel, and return the round-trip time in seconds."""
        return await ping_half(self._connection, self.half)

    def __repr__(self) -> str:
        return repr(self.half)


async def ping_half(connection: MuxConnection[Any, Any], half: SendHalf | ReceiveHalf[Any]) -> float:
    """Send a ping about a half of a channel, and return the round-trip time in seconds.

    If the half isn't open, this raises the error that `send` or `receive` would raise.
    """
    if isinstance(half, SendHalf):
        if half.state is not Sending.OPEN:
            await trio.lowlevel.checkpoint_if_cancelled()
            await half.refuse()
        return await connection.ping_about(half.sender)
    if half.state is not Receiving.OPEN:
        await trio.lowlevel.checkpoint()
        raise half.end()
    return await connection.ping_about(half.receiver)


# Python prints this name in the warning for a coroutine that was never awaited, so it must be the public name.
for _method in (MuxChannel.finish, MuxChannel.aclose, MuxChannel.ping):
    _method.__qualname__ = f"Channel.{_method.__name__}"
