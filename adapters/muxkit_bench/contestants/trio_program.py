"""The baseline: a connection for each channel over Trio's own streams, with nothing in between.

`python -m muxkit_bench.contestants.trio_program server tcp`, or `unix:PATH`; see `bench_work.play`.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from muxkit_bench.bench_work import Connection, Conversation, Peer, Server, StreamConversation, play

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

BACKLOG = 4096
UNIX = "unix:"  # and a path


class RawConversation(StreamConversation):
    """A channel that is a connection."""

    __slots__ = ("stream",)

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream.send_all, stream.receive_some)
        self.stream = stream


class RawConnection(Connection):
    """A connection in name only: each channel is a real one."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> Conversation:
        return RawConversation(await self._connect())

    async def open_to_keep(self) -> object:
        return await self._connect()

    async def close(self, conversation: Conversation) -> None:
        assert isinstance(conversation, RawConversation)
        await conversation.stream.aclose()

    async def echo_once(self, message: bytes) -> bytes:
        conversation = RawConversation(await self._connect())
        await conversation.send(message)
        answer = await conversation.receive()
        await conversation.stream.aclose()
        return answer

    async def _connect(self) -> trio.SocketStream:
        if self._address.startswith(UNIX):
            return await trio.open_unix_socket(self._address.removeprefix(UNIX))
        # Not `open_tcp_stream`: it would look up names and race addresses.
        sock = trio.socket.socket()
        await sock.connect(("127.0.0.1", int(self._address)))
        return trio.SocketStream(sock)


class RawTrio(Peer):
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        async def handle(stream: trio.SocketStream) -> None:
            if server.keeps(stream):
                return
            try:
                async with stream:
                    await server.serve(RawConversation(stream))
            except trio.BrokenResourceError:
                pass  # the client closed without an end

        if address.startswith(UNIX):
            path = address.removeprefix(UNIX)
            await trio.Path(path).unlink(missing_ok=True)  # the socket of an earlier server
            listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
            await listening.bind(path)
            listening.listen(BACKLOG)
            started(address)
            await trio.serve_listeners(handle, [trio.SocketListener(listening)])
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=BACKLOG)
        started(str(listeners[0].socket.getsockname()[1]))
        await trio.serve_listeners(handle, listeners)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[Connection]:
        yield RawConnection(address)


if __name__ == "__main__":
    sys.exit(play(RawTrio()))
