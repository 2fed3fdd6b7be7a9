"""Targets, and servers that forward to them."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import trio
import trio.testing

import muxkit
from muxkit import forward

PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]
PATIENCE = 60.0  # s

Handle = Callable[[trio.SocketStream], Awaitable[object]]


async def reset(stream: trio.SocketStream) -> None:
    """Close a connection so that its peer sees it broken."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)


async def echo(stream: trio.SocketStream) -> None:
    """Send back what comes, and the end."""
    async for data in stream:
        await stream.send_all(data)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([data async for data in stream])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def dial(address: str) -> trio.SocketStream:
    """Connect to where a forward listens."""
    if "/" in address:
        return await trio.open_unix_socket(address)
    return await trio.open_tcp_stream("127.0.0.1", port_of(address))


async def until_refused(address: str) -> None:
    """Connect until no socket listens there any more."""
    while True:
        try:
            stream = await dial(address)
        except OSError:
            return
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def target(handle: Handle = echo) -> AsyncIterator[int]:
    """A TCP server on a free port of loopback."""

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # a forward that ends resets what it carries
            await handle(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@attrs.frozen
class Pair:
    """A server that forwards, and a session with it."""

    handler: forward.ForwardHandler
    server: muxkit.Server
    session: muxkit.Session


@asynccontextmanager
async def pair(
    url: str,
    allow: Iterable[str] = (),
    *,
    listen: Iterable[str] = (),
    limits: forward.ForwardLimits | None = None,
    tls: tuple[muxkit.TLS | None, muxkit.TLS | None] = (None, None),
) -> AsyncIterator[Pair]:
    """Serve forwards and connect to them; `tls` is for the server and for the client."""
    handler = forward.handler(allow, listen=listen, limits=limits)
    async with (
        muxkit.open_server(handler, url, tls=tls[0], linger=0.5) as server,
        muxkit.connect(server.url, tls=tls[1]) as session,
    ):
        yield Pair(handler, server, session)


class Names(trio.abc.HostnameResolver):
    """A name server of these tests; it notes what it was asked."""

    def __init__(self, known: dict[str, list[str]]) -> None:
        self.known = known
        self.asked: list[str] = []
        self.silent: set[str] = set()
        """Names that are answered only when `answer` is set."""
        self.answer = trio.Event()
        self.waiting = 0

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        name = (host or b"").decode()
        self.asked.append(name)
        if name in self.silent:
            self.waiting += 1
            with trio.CancelScope(deadline=trio.current_time() + PATIENCE, shield=True):  # as a thread in a lookup
                await self.answer.wait()
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in self.known[name]
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:  # noqa: ANN401 - as in Trio
        raise NotImplementedError


def names() -> Names:
    """Resolve names by a dictionary, in this run of Trio."""
    resolver = Names({})
    trio.socket.set_custom_hostname_resolver(resolver)
    return resolver
