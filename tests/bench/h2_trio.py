"""HTTP/2 as a multiplexer: h2 does the protocol, Trio the connection; a stream is a channel.

Set up for this purpose: windows as large as others have them, large frames, no checks of headers.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muxkit_bench.bench_work import Connection, Conversation, Peer, Server, StreamConversation, play
else:
    from bench_work import Connection, Conversation, Peer, Server, StreamConversation, play

READ = 262_144  # bytes
STREAM_WINDOW = 262_144
CONNECTION_WINDOW = 16 * 1024 * 1024
FRAME = 65_536
STREAMS = 20_000
REQUEST = [(b":method", b"POST"), (b":path", b"/"), (b":scheme", b"http"), (b":authority", b"bench")]
RESPONSE = [(b":status", b"200")]


class H2Stream(StreamConversation):
    """A stream of HTTP/2."""

    __slots__ = ("_carrier", "_data", "_news", "has_ended", "id")

    def __init__(self, carrier: Carrier, id: int) -> None:
        super().__init__(self.write, self.read)
        self.id = id
        self._carrier = carrier
        self._data: list[bytes] = []
        self._news = trio.Event()
        self.has_ended = False

    async def write(self, data: bytes) -> None:
        engine = self._carrier.engine
        at = 0
        while at < len(data):
            room = min(engine.local_flow_control_window(self.id), engine.max_outbound_frame_size)
            if room <= 0:
                await self._carrier.window_opened.wait()
                continue
            engine.send_data(self.id, data[at : at + room])
            at += room
            await self._carrier.flush()

    async def read(self, most: int) -> bytes:
        while not self._data:
            if self.has_ended:
                return b""
            self._news = trio.Event()
            await self._news.wait()
        data = b"".join(self._data) if len(self._data) > 1 else self._data[0]
        self._data.clear()
        if not self.has_ended:
            self._carrier.engine.acknowledge_received_data(len(data), self.id)
            await self._carrier.flush()
        return data

    async def end(self) -> None:
        self._carrier.engine.end_stream(self.id)
        await self._carrier.flush()

    def came(self, data: bytes) -> None:
        self._data.append(data)
        self._news.set()

    def ended(self) -> None:
        self.has_ended = True
        self._news.set()


class Carrier(Connection):
    """A connection, at either end."""

    def __init__(self, stream: trio.SocketStream, *, is_client: bool, opened: Callable[[H2Stream], None]) -> None:
        self._stream = stream
        self._opened = opened
        self._writing = trio.Lock()
        self._streams: dict[int, H2Stream] = {}
        self.window_opened = trio.Event()
        self.ready = trio.Event()
        self.engine = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=is_client,
                header_encoding=None,
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        codes = h2.settings.SettingCodes
        self.engine.local_settings = h2.settings.Settings(
            client=is_client,
            initial_values={
                codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                codes.MAX_FRAME_SIZE: FRAME,
                codes.MAX_CONCURRENT_STREAMS: STREAMS,
                codes.ENABLE_PUSH: 0,
            },
        )
        self.engine.max_inbound_frame_size = FRAME
        self.engine.incoming_buffer.max_frame_size = FRAME

    async def start(self) -> None:
        self.engine.initiate_connection()
        self.engine.increment_flow_control_window(CONNECTION_WINDOW)
        await self.flush()

    async def flush(self) -> None:
        """The task with the lock writes for all tasks that wait for it."""
        async with self._writing:
            data = self.engine.data_to_send()
            if data:
                await self._stream.send_all(data)

    async def read(self) -> None:
        """Until the other end hangs up."""
        try:
            while data := await self._stream.receive_some(READ):
                for event in self.engine.receive_data(bytes(data)):
                    self._apply(event)
                await self.flush()
        except trio.BrokenResourceError:
            pass

    def _apply(self, event: object) -> None:
        match event:
            case h2.events.DataReceived():
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    stream.came(event.data)
            case h2.events.WindowUpdated():
                self._open_window()
            case h2.events.RemoteSettingsChanged():
                self.ready.set()
                self._open_window()
            case h2.events.RequestReceived():
                stream = self._streams[event.stream_id] = H2Stream(self, event.stream_id)
                self._opened(stream)
            case h2.events.StreamEnded() | h2.events.StreamReset():
                ended = self._streams.pop(event.stream_id, None)
                if ended is not None:
                    ended.ended()

    def _open_window(self) -> None:
        self.window_opened.set()
        self.window_opened = trio.Event()

    # --- for the client

    async def open(self) -> H2Stream:
        id = self.engine.get_next_available_stream_id()
        stream = self._streams[id] = H2Stream(self, id)
        self.engine.send_headers(id, REQUEST)
        await self.flush()
        return stream

    async def close(self, conversation: Conversation) -> None:
        assert isinstance(conversation, H2Stream)
        await conversation.end()

    async def echo_once(self, message: bytes) -> bytes:
        stream = await self.open()
        await stream.send(message)
        answer = await stream.receive()
        await stream.end()
        return answer


class H2(Peer):
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        async def handle(connection: trio.SocketStream) -> None:
            async with trio.open_nursery() as nursery:

                async def converse(stream: H2Stream) -> None:
                    with suppress(trio.BrokenResourceError):  # the client need not wait for our end
                        carrier.engine.send_headers(stream.id, RESPONSE)
                        await server.serve(stream)
                        await stream.end()

                def opened(stream: H2Stream) -> None:
                    if not server.keeps(stream):
                        nursery.start_soon(converse, stream)

                carrier = Carrier(connection, is_client=False, opened=opened)
                await carrier.start()
                await carrier.read()
                nursery.cancel_scope.cancel()
            await connection.aclose()

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        started(str(listeners[0].socket.getsockname()[1]))
        await trio.serve_listeners(handle, listeners)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[Connection]:
        stream = await trio.open_tcp_stream("127.0.0.1", int(address))
        async with stream, trio.open_nursery() as nursery:
            carrier = Carrier(stream, is_client=True, opened=lambda _: None)
            await carrier.start()
            nursery.start_soon(carrier.read)
            await carrier.ready.wait()
            yield carrier
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    sys.exit(play(H2()))
