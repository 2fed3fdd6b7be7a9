"""Channels as applications hold them: a half to send on and a half to receive from, one of them, or both.

`MuxChannel` is the two-way channel of every protocol. `Sink` and `Source` are the one-way channels of those that have
such. None of them does anything but hand calls to its halves, so "go to definition" leads from `channel.send` to
`SendHalf.send`, and from there to the engine's `Sender`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import trio

from muxkit.core import Headers, Receiving, Sending, decode_headers, without_name
from muxkit.runtime._session import Channel, ChannelStats, Session
from muxkit.runtime.halves.bytestream import ByteStream
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.runtime.connection import MuxConnection


class MuxChannel(Channel):
    """A two-way channel of whole messages: a sending half and a receiving half."""

    __slots__ = ("_connection", "_opening", "receiving", "sending")

    def __init__(
        self, connection: MuxConnection[Any, Any], sending: SendHalf, receiving: ReceiveHalf[Any], opening: bytes = b""
    ) -> None:
        self._connection = connection
        self._opening = opening
        self.sending: SendHalf = sending
        self.receiving: ReceiveHalf[Any] = receiving  # of messages, or of more if the subclass makes messages of it
        sending.channel = receiving.channel = self

    @property
    def session(self) -> Session:
        return self._connection.session

    @property
    def sent_with_opening(self) -> bytes:
        """All bytes of the opening's payload, with the name."""
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

    # These return the half's own coroutine, because one more coroutine for each message takes time.

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sending.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sending.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.receiving.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.receiving.receive_many(limit)

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        self.sending.cancel_when_over(scope)

    def _try_send(self, message: bytes) -> bool:
        return self.sending.try_send(message)

    def _try_receive(self) -> bytes | None:
        return self.receiving.try_receive()

    async def finish(self, payload: bytes = b"") -> None:
        await self.sending.finish(payload)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.sending.close_quietly()  # first: peers count the other order as breaking off
        self.receiving.close()  # writes both ends

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self.sending.abort(reason, code=code)
        self.receiving.close()
        self._connection.channel_aborted(self)

    async def ping(self) -> float:
        """Wait for one round trip about this channel, if the protocol has such pings; return its seconds."""
        return await ping_half(self._connection, self.sending if self.sending.state is Sending.OPEN else self.receiving)

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel."""
        return ByteStream(self.sending, self.receiving)

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
    """A channel to send on: a sending half alone, or that of a two-way channel."""

    __slots__ = ("_connection", "half")

    def __init__(self, connection: MuxConnection[Any, Any], half: SendHalf) -> None:
        self._connection = connection
        self.half: SendHalf = half

    @property
    def state(self) -> Sending:
        """Whether messages can be sent, the end is under way, or it is over."""
        return self.half.state

    @property
    def waiting_since(self) -> float | None:
        """The time since which the first sender waits; None if no task does."""
        return self.half.waiting_since

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        """Send one message; see `Channel.send`."""
        return self.half.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        """Send several messages with one checkpoint; cancelled, a prefix of them was sent."""
        return self.half.send_many(messages)

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size might be sent without waiting; no promise."""
        await self.half.wait_for_room(size)

    async def finish(self, payload: bytes = b"") -> None:
        """Say that no more follows, and wait until the peer has heard it."""
        await self.half.finish(payload)

    async def wait_over(self) -> None:
        """Wait until the peer confirmed the end; raises what came instead."""
        await self.half.wait_over()

    def cancel_when_over(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the half is over; see `SendHalf.cancel_when_over`."""
        self.half.cancel_when_over(scope)

    async def aclose(self) -> None:
        """Say that no more follows, after everything that was sent; does not wait for the peer."""
        await self.half.aclose()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.half.close()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up: the peer learns that messages are missing, and why."""
        self.half.abort(reason, code=code)

    async def ping(self) -> float:
        """Wait for one round trip about this channel; return its seconds."""
        return await ping_half(self._connection, self.half)

    def __repr__(self) -> str:
        return repr(self.half)


class Source(trio.abc.ReceiveChannel[bytes]):
    """A channel to receive from: a receiving half alone, or that of a two-way channel."""

    __slots__ = ("_connection", "half")

    def __init__(self, connection: MuxConnection[Any, Any], half: ReceiveHalf[bytes]) -> None:
        self._connection = connection
        self.half: ReceiveHalf[bytes] = half

    @property
    def state(self) -> Receiving:
        """Whether messages can come, the rest is to be received, or it is over."""
        return self.half.state

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return self.half.unread

    @property
    def end_payload(self) -> bytes:
        """What the peer said at its end, an error by convention."""
        return self.half.reason

    def receive(self) -> Coroutine[object, object, bytes]:
        """Wait for the next message; see `Channel.receive`."""
        return self.half.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        """Wait for at least one message, then return all that have come, at most `limit`."""
        return self.half.receive_many(limit)

    async def aclose(self) -> None:
        """Stop receiving: what came is dropped, and the peer is told to send no more."""
        await self.half.aclose()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.half.close()

    def abort(self) -> None:
        """The same as `close`."""
        self.half.close()

    async def ping(self) -> float:
        """Wait for one round trip about this channel; return its seconds."""
        return await ping_half(self._connection, self.half)

    def __repr__(self) -> str:
        return repr(self.half)


async def ping_half(connection: MuxConnection[Any, Any], half: SendHalf | ReceiveHalf[Any]) -> float:
    """Wait for one round trip about a half of a channel, and return its seconds; raises why the half is not open."""
    if isinstance(half, SendHalf):
        if half.state is not Sending.OPEN:
            await trio.lowlevel.checkpoint_if_cancelled()
            await half.refuse()
        return await connection.ping_about(half.sender)
    if half.state is not Receiving.OPEN:
        await trio.lowlevel.checkpoint()
        raise half.end()
    return await connection.ping_about(half.receiver)


# Python prints the name of a coroutine that is never awaited. A program knows the channel by its public name.
for _method in (MuxChannel.finish, MuxChannel.aclose, MuxChannel.ping):
    _method.__qualname__ = f"Channel.{_method.__name__}"
