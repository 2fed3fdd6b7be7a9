"""A listener over the channels of a session, for servers that were written for Trio's streams."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Final, Protocol

import trio

from muxkit._info import SessionInfo

WRONG_NAME: Final = 404  # the code of a channel with another name


class Carrier(Protocol):
    """A session, as far as a listener needs it."""

    @property
    def info(self) -> SessionInfo: ...


class Streamable(Protocol):
    """A channel, as far as a listener needs it."""

    @property
    def name(self) -> str: ...
    def as_stream(self) -> trio.abc.HalfCloseableStream: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


class ChannelSocket:
    """The addresses of the session below a stream, with the methods by which servers ask a socket for them.

    Over TCP and UDP they are pairs of an IP address and a port, and the family says which. Elsewhere they are texts, as
    those of Unix sockets are.
    """

    def __init__(self, info: SessionInfo) -> None:
        self._local = _address(info.local)
        self._peer = _address(info.peer)

    @property
    def family(self) -> socket.AddressFamily:
        """The kind of the addresses: `AF_INET`, `AF_INET6` or `AF_UNIX`."""
        address = self._peer
        if isinstance(address, str):
            return getattr(socket, "AF_UNIX", socket.AF_UNSPEC)
        return socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    def getsockname(self) -> tuple[str, int] | str:
        """Return the address of this side."""
        return self._local

    def getpeername(self) -> tuple[str, int] | str:
        """Return the address of the peer."""
        return self._peer


class AcceptedStream(trio.abc.HalfCloseableStream):
    """A channel that was accepted as a stream of bytes. Its `socket` tells the addresses of the session."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, info: SessionInfo) -> None:
        self._stream = stream
        self.socket: ChannelSocket = ChannelSocket(info)
        """The addresses; it isn't a real socket."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _address(text: str) -> tuple[str, int] | str:
    """Return the IP address and the port in a text such as "tcp 127.0.0.1:7000", or the text if it has none."""
    host, _, port = text.rpartition(" ")[2].rpartition(":")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return text


class ChannelListener(trio.abc.Listener[AcceptedStream]):
    """Accepts the channels that the peer opens as streams of bytes, made by `session.listener`.

    Servers that want to know addresses, as hypercorn and websockets do, find them in `socket`, and in that of each
    stream.
    """

    def __init__(self, session: Carrier, channels: AsyncIterator[Streamable], name: str) -> None:
        self._session = session
        self._channels = channels
        self._name = name
        self._scope: trio.CancelScope | None = None
        self._is_closed = False

    @property
    def socket(self) -> ChannelSocket:
        """The addresses of the session; it isn't a real socket."""
        return ChannelSocket(self._session.info)

    async def accept(self) -> AcceptedStream:
        """Wait for the next channel with the name, and return it as a stream. Channels with other names are refused.

        Raises `trio.ClosedResourceError` once the listener is closed, or the peer opens no more channels, and
        `LinkLost` when the connection is lost.
        """
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError("this listener was closed")
        with trio.CancelScope() as self._scope:
            async for channel in self._channels:
                if channel.name == self._name:
                    return AcceptedStream(channel.as_stream(), self._session.info)
                channel.abort(f"only channels named {self._name!r} are accepted here", code=WRONG_NAME)
        self._is_closed = True
        raise trio.ClosedResourceError("no more channels come: this listener was closed, or the peer leaves")

    async def aclose(self) -> None:
        """Accept no more channels; the session and the accepted streams stay open."""
        self._is_closed = True
        if self._scope is not None:
            self._scope.cancel()
        await trio.lowlevel.checkpoint()
