"""Sessions on a WebSocket endpoint of a web application: under hypercorn on Trio, and under uvicorn on asyncio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import hypercorn
import hypercorn.trio
import pytest
import trio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

import muxkit
import muxkit.asyncio
from muxkit import HandshakeFailed
from muxkit_adapters import asgi

PATIENCE = 60.0  # s
SIZES = (0, 1, 1000, 100_000, 1_000_000)


async def hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello over REST")


def application(lifespan: object) -> Starlette:
    """A web application with REST and mux on one port."""
    routes = [Route("/hello", hello), WebSocketRoute("/mux", asgi.app("mux")), WebSocketRoute("/off", asgi.app("off"))]
    return Starlette(routes=routes, lifespan=lifespan)  # type: ignore[arg-type]  # one for each library


async def get(port: int, path: str) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
        return b"".join([piece async for piece in stream])


# --- hypercorn on Trio


@asynccontextmanager
async def under_hypercorn(handler: object, **options: object) -> AsyncIterator[int]:
    """Serve the application on Trio, and yield its port."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with muxkit.open_server(handler, "bpmux+asgi://mux", **options):  # type: ignore[arg-type]
            yield

    stop = trio.Event()
    config = hypercorn.Config()
    config.bind = ["127.0.0.1:0"]
    config.loglevel = "CRITICAL"
    async with trio.open_nursery() as nursery:
        serve = partial(hypercorn.trio.serve, application(lifespan), config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]
        (url,) = await nursery.start(serve)
        yield int(url.rpartition(":")[2])
        stop.set()


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def test_rest_and_mux_share_a_port_under_hypercorn() -> None:
    with trio.fail_after(PATIENCE):
        async with under_hypercorn(echo) as port:
            answer = await get(port, "/hello")
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"hello over REST")
            async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}/mux") as session:
                async with session.open("talk") as channel:
                    for size in SIZES:
                        message = bytes(size)
                        await channel.send(message)
                        assert await channel.receive() == message


async def test_a_handler_sees_the_request_and_the_peer() -> None:
    seen: list[muxkit.SessionInfo] = []

    async def note(session: muxkit.Session) -> None:
        seen.append(session.info)
        async for channel in session:
            await channel.aclose()

    with trio.fail_after(PATIENCE):
        async with under_hypercorn(note) as port:
            url = f"bpmux+ws://127.0.0.1:{port}/mux?room=1"
            async with muxkit.connect(url, headers={"X-Trace": "7"}) as session, session.open() as channel:
                with pytest.raises(trio.EndOfChannel):
                    await channel.receive()
    (info,) = seen
    assert info.transport == "asgi"
    assert info.peer.startswith("asgi 127.0.0.1:")
    assert info.request is not None
    assert (info.request.path, info.request.query) == ("/mux", "room=1")
    assert ("x-trace", "7") in info.request.headers


async def test_authorization_and_reasons_reach_a_client() -> None:
    async def nobody(info: muxkit.SessionInfo, token: str | None) -> str | None:
        raise muxkit.Refused("come back with a token", code=401)

    with trio.fail_after(PATIENCE):
        async with under_hypercorn(echo, authorize=nobody) as port:
            with pytest.raises(muxkit.LinkLost, match="come back with a token"):
                async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}/mux") as session:
                    await session.ping()


@pytest.mark.parametrize(
    ("path", "headers"), [("/off", {}), ("/mux", {"Origin": "https://evil.example"})], ids=["no server", "origin"]
)
async def test_a_foreign_page_and_a_name_that_nobody_serves_are_refused(path: str, headers: dict[str, str]) -> None:
    with trio.fail_after(PATIENCE):
        async with under_hypercorn(echo) as port:
            with pytest.raises(HandshakeFailed, match="403"):
                async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}{path}", headers=headers):
                    pass
            # Neither has harmed anybody else.
            async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}/mux") as session:
                await session.ping()


async def test_a_page_of_a_listed_origin_may_connect() -> None:
    with trio.fail_after(PATIENCE):
        async with under_hypercorn(echo, origins=["https://good.example"]) as port:
            headers = {"Origin": "https://good.example"}
            async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}/mux", headers=headers) as session:
                await session.ping()


async def test_a_server_that_stops_ends_its_sessions_in_order() -> None:
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            async with under_hypercorn(echo) as port:
                session = await nursery.start(hold, port)
                channel = await session.open()
                await channel.send(b"before")
                assert await channel.receive() == b"before"
                nursery.cancel_scope.cancel()


async def hold(port: int, task_status: trio.TaskStatus[muxkit.Session]) -> None:
    async with muxkit.connect(f"bpmux+ws://127.0.0.1:{port}/mux") as session:
        task_status.started(session)
        await trio.sleep_forever()


# --- uvicorn on asyncio


def test_rest_and_mux_share_a_port_under_uvicorn() -> None:
    async def echo_in_asyncio(channel: muxkit.asyncio.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with muxkit.asyncio.open_server(echo_in_asyncio, "bpmux+asgi://mux"):
            yield

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(application(lifespan), log_level="critical", ws="wsproto"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /hello HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"hello over REST")
            writer.close()
            async with muxkit.asyncio.connect(f"bpmux+ws://127.0.0.1:{port}/mux") as session:
                async with session.open("talk") as channel:
                    for size in SIZES:
                        message = bytes(size)
                        await channel.send(message)
                        assert await channel.receive() == message
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def test_no_client_connects_to_the_inside_of_an_application() -> None:
    with pytest.raises(muxkit.Unsupported, match="connect with ws://"):
        async with muxkit.connect("bpmux+asgi://mux"):
            pass
