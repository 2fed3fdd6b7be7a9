"""Forwarded connections arrive whole, over every protocol: listeners here, listeners at the server, ends and resets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

import muxkit
from muxkit import forward

PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x"]
PATIENCE = 60.0  # s


@pytest.fixture(params=PROTOCOLS)
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.param}+tcp://127.0.0.1:0"


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def listen(nursery: trio.Nursery, handle: Callable[[trio.SocketStream], Awaitable[object]]) -> int:
    """Serve a target on a free port of loopback."""
    (listener,) = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
    port: int = listener.socket.getsockname()[1]
    return port


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([data async for data in stream])


async def test_a_connection_is_carried_to_a_target_of_the_server(url: str) -> None:
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            port = await listen(nursery, echo)
            async with (
                muxkit.open_server(forward.handler([str(port)]), url) as server,
                muxkit.connect(server.url) as session,
                forward.open_local(session, "0", str(port)) as local,
            ):
                async with await trio.open_tcp_stream("127.0.0.1", port_of(local.address)) as stream:
                    await stream.send_all(b"tea" * 100_000)
                    await stream.send_eof()
                    assert await read_all(stream) == b"tea" * 100_000
            nursery.cancel_scope.cancel()
