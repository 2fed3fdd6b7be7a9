"""What the tests of the transports share: a server with one handler, pairs of streams, hostile peers."""

from __future__ import annotations

import gc
import math
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
import trustme

from tests._tasks import living_tasks

if TYPE_CHECKING:
    from muxkit_adapters.tls import TLSStream
    from muxkit_adapters.websocket import WebSocketStream

PATIENCE = 300.0  # s; reached only when something hangs
NEVER = 1000.0  # s, for a limit that is not to be reached

Serve = Callable[..., Awaitable[None]]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@asynccontextmanager
async def serving(serve: Serve, *arguments: object, **options: object) -> AsyncIterator[list[str]]:
    """Run a transport's `serve` for the length of the block; gives the addresses."""
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(*arguments, **options, task_status=task_status)

        yield await nursery.start(run)
        nursery.cancel_scope.cancel()


def wire_of(stream: TLSStream | WebSocketStream) -> Any:  # noqa: ANN401 - a stream of TCP, or of TLS
    """Return the stream below, to cut it or to write past the layer under test."""
    return stream._wire


@asynccontextmanager
async def paired(
    serve: Serve, connect: Callable[[str], AbstractAsyncContextManager[Any]], *arguments: object, **options: object
) -> AsyncIterator[tuple[Any, Any]]:
    """The two ends of one real connection: the one that connected and the one that was accepted."""
    accepted: list[trio.abc.Stream] = []
    arrived, over = trio.Event(), trio.Event()

    async def keep(stream: trio.abc.Stream) -> None:
        accepted.append(stream)
        arrived.set()
        await over.wait()

    async with serving(serve, keep, *arguments, **options) as addresses:
        async with connect(addresses[0]) as stream:
            await arrived.wait()
            try:
                yield stream, accepted[0]
            finally:
                # Neither end may wait for the other's goodbye here; the tests of closing do that.
                await trio.aclose_forcefully(stream)
                await trio.aclose_forcefully(accepted[0])
                over.set()


async def park(stream: trio.abc.Stream) -> None:
    await trio.sleep_forever()


async def flood(stream: trio.abc.SendStream) -> None:
    """Send until the other side has had enough."""
    try:
        while True:
            await stream.send_all(bytes(65_536))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def drain(stream: trio.abc.ReceiveStream) -> None:
    """Receive until the end, whatever it is."""
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass


async def descriptors_and_tasks() -> tuple[int, int]:
    """What is open and alive once everything has come to rest."""
    gc.collect()
    await trio.testing.wait_all_tasks_blocked(0.01)
    return len(os.listdir("/proc/self/fd")), living_tasks()


async def comes_down_to(before: tuple[int, int]) -> None:
    """Wait until no more is open and alive than before: a closed peer may need a moment to be gone."""
    with trio.move_on_after(PATIENCE):
        while True:
            now = await descriptors_and_tasks()
            if now[0] <= before[0] and now[1] <= before[1]:
                return
    raise AssertionError(f"descriptors and tasks: {await descriptors_and_tasks()} are left, before it were {before}")


@contextmanager
def at_most(seconds: float, clock: trio.testing.MockClock) -> Iterator[None]:
    """The block takes no longer than that, by a clock that moves only while every task waits.

    What peers do over real sockets takes none of that time, however busy the machine is; what never comes is waited
    for as long as the code under test says.
    """
    clock.autojump_threshold = 0.01
    with trio.fail_after(seconds):
        yield
    clock.autojump_threshold = math.inf


async def echo(stream: trio.abc.Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


def port_of(address: str) -> int:
    return int(address.partition("/")[0].rpartition(":")[2])


def reset(stream: socket.socket) -> None:
    """Hang up with a RST."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.close()


class Certificates:
    """An authority, and contexts that trust it."""

    def __init__(self, *names: str) -> None:
        self.authority = trustme.CA()
        self.certificate = self.authority.issue_cert(*(names or ("127.0.0.1", "localhost")))

    def server(self) -> ssl.SSLContext:
        return self.server_with(self.certificate)

    def server_with(self, certificate: trustme.LeafCert) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context
