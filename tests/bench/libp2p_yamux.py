"""The yamux of py-libp2p, straight on a Trio connection; nothing is negotiated and nothing encrypted."""

from __future__ import annotations

import logging
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from libp2p.io.trio import TrioTCPStream  # type: ignore[import-not-found]
from libp2p.network.connection.raw_connection import RawConnection  # type: ignore[import-not-found]
from libp2p.peer.id import ID  # type: ignore[import-not-found]
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset  # type: ignore[import-not-found]
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muxkit_bench.bench_work import Connection, Conversation, Peer, Server, StreamConversation, play
else:
    from bench_work import Connection, Conversation, Peer, Server, StreamConversation, play


class YamuxConversation(StreamConversation):
    """A stream of yamux."""

    __slots__ = ("stream",)

    def __init__(self, stream: YamuxStream) -> None:
        super().__init__(stream.write, self.read)
        self.stream = stream

    async def read(self, most: int) -> bytes:
        try:
            data: bytes = await self.stream.read(most)
        except (MuxedStreamEOF, MuxedStreamReset):
            return b""
        return data


class YamuxConnection(Connection):
    def __init__(self, mux: Yamux) -> None:
        self._mux = mux

    async def open(self) -> Conversation:
        return YamuxConversation(await self._mux.open_stream())

    async def close(self, conversation: Conversation) -> None:
        assert isinstance(conversation, YamuxConversation)
        await conversation.stream.close()

    async def echo_once(self, message: bytes) -> bytes:
        conversation = YamuxConversation(await self._mux.open_stream())
        await conversation.send(message)
        answer = await conversation.receive()
        await conversation.stream.close()
        return answer


class Libp2pYamux(Peer):
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        async def converse(stream: YamuxStream) -> None:
            await server.serve(YamuxConversation(stream))
            await stream.close()

        async def handle(connection: trio.SocketStream) -> None:
            mux = _mux(connection, is_client=False)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mux.start)
                try:
                    while True:
                        stream = await mux.accept_stream()
                        if not server.keeps(stream):
                            nursery.start_soon(converse, stream)
                except MuxedConnUnavailable:
                    nursery.cancel_scope.cancel()

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        started(str(listeners[0].socket.getsockname()[1]))
        await trio.serve_listeners(handle, listeners)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[Connection]:
        stream = await trio.open_tcp_stream("127.0.0.1", int(address))
        mux = _mux(stream, is_client=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mux.start)
            await mux.event_started.wait()
            yield YamuxConnection(mux)
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(stream)


def _mux(stream: trio.SocketStream, *, is_client: bool) -> Yamux:
    return Yamux(RawConnection(TrioTCPStream(stream), is_client), ID(b"peer"), is_initiator=is_client)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.exit(play(Libp2pYamux()))
