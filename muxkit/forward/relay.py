"""One forwarded connection: copies bytes between a socket and a channel in both directions, with half-closes and
resets.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import attrs
import trio

from muxkit.forward.streams import END_FOLLOWS, READ, CarriedStream
from muxkit.forward.wire import END, Code
from muxkit.runtime import Channel

log: Final = logging.getLogger("muxkit.forward")


def _count(default: int) -> int:
    number: int = attrs.field(default=default, validator=attrs.validators.ge(1))
    return number


def _seconds(default: float) -> float:
    number: float = attrs.field(default=default, validator=attrs.validators.gt(0))
    return number


@attrs.frozen(kw_only=True)
class ForwardLimits:
    """Limits on the cost of the clients of forwards. Times are in seconds.

    A server applies them to each session, and a client to each of its forwards.
    """

    connections: int = _count(4096)
    """Concurrent connections. A listener accepts no more, and a server refuses more."""
    listeners: int = _count(64)
    """Listeners of one client on a server."""
    pending: int = _count(128)
    """Accepted connections that the client hasn't taken yet. Beyond that, the listener accepts no more."""
    lookups: int = _count(8)
    """Concurrent name lookups for one client, and four times as many for all clients. Others wait."""
    half_open: int = _count(256)
    """Concurrent SOCKS handshakes. One more closes the oldest."""
    handshake: float = _seconds(10.0)
    """The time for a SOCKS handshake."""
    connect: float = _seconds(15.0)
    """The time for resolving a name and connecting to its addresses."""
    take: float = _seconds(60.0)
    """The time for a client to take an accepted connection."""
    idle: float = _seconds(120.0)
    """The time without a datagram after which a UDP sender is forgotten and its socket on the server closed."""


@attrs.frozen(kw_only=True)
class ForwardStats:
    """Current gauges, and counters since the forward began. Bytes are payload."""

    connections: int
    """Open connections."""
    total: int
    """All connections so far."""
    refused: int
    """Connections that could not be forwarded."""
    bytes_in: int
    """Bytes from the sockets of this side to the session."""
    bytes_out: int
    """Bytes from the session to the sockets of this side."""


@attrs.define(eq=False)
class Tally:
    """The counters behind `ForwardStats`, and the slots for connections."""

    most: int
    live: int = 0
    total: int = 0
    refused: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def stats(self) -> ForwardStats:
        return ForwardStats(
            connections=self.live,
            total=self.total,
            refused=self.refused,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
        )

    @property
    def is_full(self) -> bool:
        return self.live >= self.most

    def enter(self) -> None:
        """Take a slot."""
        self.live += 1

    def leave(self) -> None:
        """Give a slot back."""
        self.live -= 1
        self._changed.unpark_all()

    async def wait_for_slot(self) -> None:
        while self.is_full:
            await self._changed.park()

    async def wait_idle(self) -> None:
        """Wait until no connection is forwarded."""
        while self.live:
            await self._changed.park()


class Relay:
    """Forwards one connection over one channel, and closes both."""

    def __init__(self, stream: CarriedStream, channel: Channel, tally: Tally) -> None:
        self._stream = stream
        self._channel = channel
        self._tally = tally
        self._scope = trio.CancelScope()
        self._was_reset = False

    async def run(self, head: bytes = b"") -> None:
        """Copy bytes until both directions have ended. `head` was read from the socket before.

        A reset of one side resets the other, and a cancellation resets both.
        """
        self._tally.total += 1
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._into_channel, head)
                await self._out_of_channel()
            if not self._was_reset:
                await self._channel.aclose()
                self._stream.close()
        except BaseException:
            self._channel.abort("the forward was closed", code=Code.GONE)
            raise
        finally:
            self._stream.reset()  # harmless once it is closed
        if self._was_reset:
            self._channel.abort("the connection was reset", code=Code.RESET)

    def _reset(self) -> None:
        self._was_reset = True
        self._scope.cancel()

    async def _into_channel(self, head: bytes) -> None:
        channel, stream, tally = self._channel, self._stream, self._tally
        data: bytes | None = head or None
        try:
            while True:
                if data is None and (data := stream.receive_nowait(READ)) is None:
                    await stream.wait_readable()
                    continue
                if not data:
                    await channel.send(END)
                    return
                tally.bytes_in += len(data)
                more = stream.receive_nowait(READ) if len(data) < READ else None
                if more == b"":  # a short connection: its data and its end are one write
                    await channel.send_many((data, END))
                    return
                await channel.send(data)
                data = more
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._reset()

    async def _out_of_channel(self) -> None:
        receive, stream, tally = self._channel.receive_many, self._stream, self._tally
        try:
            while True:
                messages = await receive()
                data = messages[0] if len(messages) == 1 else b"".join(messages)
                if data:
                    tally.bytes_out += len(data)
                    written = stream.send_nowait(data, 0 if messages[-1] else END_FOLLOWS)
                    if written < len(data):
                        await stream.send_rest(memoryview(data)[written:])
                if not messages[-1]:
                    with suppress(trio.BrokenResourceError):  # it has closed, and what it sent is still carried
                        stream.end()
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel):
            self._reset()
