"""Channels as applications hold them: a half to send on and a half to receive from, one of them, or both.

`MuxChannel` is the two-way channel of every protocol. `Sink` and `Source` are the one-way channels of those that have
such. None of them does anything but hand calls to its halves, so "go to definition" leads from `channel.send` to
`SendHalf.send`, and from there to the engine's `Sender`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING

import trio

from muxkit.core import Headers, Sending, decode_headers, without_name
from muxkit.runtime._session import Channel, ChannelStats, Session
from muxkit.runtime.halves.bytestream import ByteStream
from muxkit.runtime.halves.receiving import ReceiveHalf
from muxkit.runtime.halves.sending import SendHalf

if TYPE_CHECKING:
    from muxkit.runtime.mux import MuxSession


class MuxChannel(Channel):
    """A two-way channel of whole messages: a sending half and a receiving half."""

    __slots__ = ("_opening", "_session", "receiving", "sending")

    def __init__(
        self, session: MuxSession, sending: SendHalf, receiving: ReceiveHalf[bytes], opening: bytes = b""
    ) -> None:
        self._session = session
        self._opening = opening
        self.sending: SendHalf = sending
        self.receiving: ReceiveHalf[bytes] = receiving
        sending.beside = receiving

    @property
    def session(self) -> Session:
        return self._session

    @property
    def sent_with_opening(self) -> bytes:
        """All bytes of the opening's payload, with the name."""
        return self._opening

    @property
    def name(self) -> str:
        return without_name(self._opening).name

    @property
    def opening(self) -> bytes:
        return without_name(self._opening).payload

    @property
    def headers(self) -> Headers:
        return decode_headers(without_name(self._opening).headers)

    # These return the half's own coroutine, because one more coroutine for each message takes time.

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sending.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sending.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.receiving.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.receiving.receive_many(limit)

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
        self._session.channel_aborted(self)

    async def ping(self) -> float:
        """Wait for one round trip about this channel, if the protocol has such pings; return its seconds."""
        half = self.sending.sender if self.sending.state is Sending.OPEN else self.receiving.receiver
        return await self._session.ping_about(half)

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel."""
        return ByteStream(self.sending, self.receiving)

    def stats(self) -> ChannelStats:
        sender, receiver = self.sending.sender, self.receiving.receiver
        return ChannelStats(
            queued=sender.queued,
            unread=self.receiving.unread_bytes,
            credit_out=sender.credit,
            credit_in=receiver.credit,
            waiting_since=self.sending.waiting_since,
        )

    def __repr__(self) -> str:
        protocol = self._session.info.protocol
        return f"<{protocol} channel: {self.sending!r} {self.receiving!r}>"
