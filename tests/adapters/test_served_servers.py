"""Other people's servers serve on the channels of a session: hypercorn, and the WebSocket server of websockets.

The client of muxkit runs them, as a program behind NAT does, and the server of muxkit reaches them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import h11
import hypercorn
import hypercorn.trio
import hypercorn.trio.tcp_server
import hypercorn.trio.worker_context
import hypercorn.utils
import pytest
import trio
import websockets.trio.server
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

import muxkit

ALL = pytest.mark.parametrize(
    "url",
    [
        "bpmux+tcp://127.0.0.1:0",
        "relink+tcp://127.0.0.1:0",
        "aqueduct+tcp://127.0.0.1:0",
        "e3x+udp://127.0.0.1:0",
        "yamux+tcp://127.0.0.1:0",
    ],
)
Message = dict[str, object]
Send = Callable[[Message], Awaitable[None]]
Serve = Callable[[muxkit.Session], Awaitable[object]]


@asynccontextmanager
async def reached_behind_nat(url: str, serve: Serve) -> AsyncIterator[muxkit.Session]:
    """Give the session on which a server of muxkit reaches what `serve` serves at its client."""
    sessions: list[muxkit.Session] = []
    there = trio.Event()

    async def keep(session: muxkit.Session) -> None:
        sessions.append(session)
        there.set()
        await trio.sleep_forever()

    async with muxkit.open_server(keep, url, linger=0.1) as server, muxkit.connect(server.url, linger=0.1) as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, session)
            await (await session.open("here")).aclose()  # over UDP, a server learns of a client by its first packet
            await there.wait()
            yield sessions[0]
            nursery.cancel_scope.cancel()


async def hello(
    scope: dict[str, object],
    receive: Callable[[], Awaitable[object]],
    send: Callable[[dict[str, object]], Awaitable[None]],
) -> None:
    """Answer a request of HTTP, as an ASGI application, with the path and who asks."""
    assert scope["type"] == "http"
    body = f"{scope['path']} for {scope['client']}".encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve_http(session: muxkit.Session) -> None:
    config = hypercorn.Config()
    application = hypercorn.utils.wrap_app(hello, config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
    context = hypercorn.trio.worker_context.WorkerContext(None)
    server = partial(hypercorn.trio.tcp_server.TCPServer, application, config, context, {})
    await trio.serve_listeners(server, [session.listener("http")])


@ALL
async def test_hypercorn_serves_http_on_a_session(url: str) -> None:
    async with reached_behind_nat(url, serve_http) as session:
        for path in ("/tea", "/pot"):
            connection = h11.Connection(h11.CLIENT)
            async with await open_stream(session, "http") as stream:
                request = h11.Request(method="GET", target=path, headers=[("host", "x"), ("connection", "close")])
                await stream.send_all(connection.send(request) or b"")
                await stream.send_all(connection.send(h11.EndOfMessage()) or b"")
                body = b""
                while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        connection.receive_data(bytes(await stream.receive_some()))
                    elif isinstance(event, h11.Data):
                        body += event.data
            assert body.startswith(f"{path} for ('127.0.0.1', ".encode())


async def serve_websocket(session: muxkit.Session) -> None:
    async def echo(websocket: websockets.trio.server.ServerConnection) -> None:
        async for message in websocket:
            await websocket.send(message)

    listeners: list[trio.SocketListener] = [session.listener("ws")]  # type: ignore[list-item]
    await websockets.trio.server.serve(echo, listeners=listeners, compression=None)


@ALL
async def test_websockets_serves_on_a_session(url: str) -> None:
    async with reached_behind_nat(url, serve_websocket) as session, await open_stream(session, "ws") as stream:
        protocol = ClientProtocol(parse_uri("ws://x/"))
        protocol.send_request(protocol.connect())
        answers: list[bytes] = []
        is_sent = False
        while not answers:
            for data in protocol.data_to_send():
                await stream.send_all(data)
            protocol.receive_data(await stream.receive_some())
            answers += [
                bytes(event.data)
                for event in protocol.events_received()
                if isinstance(event, Frame) and event.opcode is Opcode.TEXT
            ]
            if not is_sent and protocol.state.name == "OPEN":
                protocol.send_text(b"tea")
                is_sent = True
    assert answers == [b"tea"]


async def open_stream(session: muxkit.Session, name: str) -> trio.abc.HalfCloseableStream:
    channel = await session.open(name)
    return channel.as_stream()
