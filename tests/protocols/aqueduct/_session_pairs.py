"""Pairs of Aqueduct connections over every link, and helpers for tests of sessions."""

from __future__ import annotations

import tempfile
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
import trio.testing

from muxkit import Limits, LinkLost
from muxkit.protocols import aqueduct
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import SessionPair
from muxkit_adapters import memory, quic, tcp, tls, unix, websocket
from tests.adapters._links import Certificates, port_of
from tests.adapters._quic import FILES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit import Observer
    from muxkit.protocols.aqueduct import Client, Config, Message, Receiver, Sender, Server, Ticket
    from muxkit.runtime import MultistreamLink

    Link = trio.abc.Stream | MultistreamLink
    MakeLinks = Callable[[], AbstractAsyncContextManager[tuple[Any, Any]]]

GOOD = Certificates()
QUICK = 0.2  # s, the close timeout of these links
TINY = Limits(channel_bytes=1000, channel_floor=100, channel_first=1000, outbox=2000)  # windows that fill up soon
CALM = 1e-3  # s of virtual time without any task running


@asynccontextmanager
async def over_memory() -> AsyncIterator[tuple[Any, Any]]:
    yield memory.pair()


@asynccontextmanager
async def over_a_narrow_link() -> AsyncIterator[tuple[Any, Any]]:
    """A link that takes a few bytes at a time."""
    yield memory.pair(capacity=10)


@asynccontextmanager
async def over_a_plain_link() -> AsyncIterator[tuple[Any, Any]]:
    """A link that takes nothing without a checkpoint, so messages sent without one stay in the engine."""
    yield trio.testing.memory_stream_pair()


@asynccontextmanager
async def accepted(
    serve: Callable[..., Awaitable[None]],
    connect: Callable[[str], AbstractAsyncContextManager[Any]],
    *arguments: object,
    **options: object,
) -> AsyncIterator[tuple[Any, Any]]:
    """Give the two ends of one real connection; errors come out without an exception group."""
    streams: list[Any] = []
    arrived, over = trio.Event(), trio.Event()

    async def keep(stream: trio.abc.AsyncResource) -> None:
        streams.append(stream)
        arrived.set()
        await over.wait()

    async with background() as nursery:
        addresses = await nursery.start(partial(serve, keep, *arguments, **options))
        async with connect(addresses[0]) as stream:
            await arrived.wait()
            try:
                yield stream, streams[0]
            finally:
                for end in (stream, streams[0]):
                    await trio.aclose_forcefully(end)
                over.set()


@asynccontextmanager
async def over_tcp() -> AsyncIterator[tuple[Any, Any]]:
    async with accepted(tcp.serve, tcp.transport.connect) as links:
        yield links


@asynccontextmanager
async def over_tls() -> AsyncIterator[tuple[Any, Any]]:
    def connect(address: str) -> AbstractAsyncContextManager[Any]:
        return tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client(), close_timeout=QUICK)

    async with accepted(tls.serve, connect, ssl_context=GOOD.server(), close_timeout=QUICK) as links:
        yield links


@asynccontextmanager
async def over_unix() -> AsyncIterator[tuple[Any, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        async with accepted(unix.serve, unix.transport.connect, Path(folder) / "x.sock") as links:
            yield links


@asynccontextmanager
async def over_websocket() -> AsyncIterator[tuple[Any, Any]]:
    def connect(address: str) -> AbstractAsyncContextManager[Any]:
        return websocket.connect(f"ws://{address}", close_timeout=QUICK)

    async with accepted(websocket.serve, connect, close_timeout=QUICK) as links:
        yield links


@asynccontextmanager
async def over_quic() -> AsyncIterator[tuple[Any, Any]]:
    def connect(address: str) -> AbstractAsyncContextManager[Any]:
        return quic.connect("127.0.0.1", port_of(address), ca=FILES.ca)

    async with accepted(quic.serve, connect, certificate=FILES.certificate, key=FILES.key) as links:
        yield links


REAL: dict[str, MakeLinks] = {
    "tcp": over_tcp,
    "tls": over_tls,
    "unix": over_unix,
    "ws": over_websocket,
    "quic": over_quic,
}
"""Each gives the client's end and the server's end of one real connection."""
LINKS: dict[str, MakeLinks] = {"memory": over_memory, **REAL}


@attrs.frozen
class Pair:
    """The two ends of one connection."""

    client: Client
    server: Server


@asynccontextmanager
async def connected(
    links: MakeLinks = over_memory,
    *,
    limits: Limits | None = None,
    config: Config | None = None,
    linger: float = 5.0,
    observer: Observer | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    answer: tuple[tuple[bytes, bytes], ...] = (),
) -> AsyncIterator[Pair]:
    """Run both ends; both must close in order."""
    common: dict[str, Any] = {"limits": limits, "config": config, "linger": linger}
    async with (
        links() as (here, there),
        aqueduct.connection(here, headers=headers, observer=observer, **common) as client,
        aqueduct.connection(there, role="server", headers=answer, **common) as server,
    ):
        yield Pair(client, server)


@asynccontextmanager
async def rough(
    links: MakeLinks = over_memory, *, limits: Limits | None = None, config: Config | None = None
) -> AsyncIterator[Pair]:
    """The same for tests that leave channels open: the link is cut at the end."""
    with suppress(LinkLost):
        async with connected(links, limits=limits, config=config, linger=0.1) as pair:
            yield pair
            cut(pair)


def cut(pair: Pair) -> None:
    for side in (pair.client, pair.server):
        connection_of(side).pump.lose("the test cut it", by="network")


@asynccontextmanager
async def session_pair(
    links: MakeLinks = over_memory, *, limits: Limits | None = None, config: Config | None = None, linger: float = 1.0
) -> AsyncIterator[SessionPair]:
    """For `check_session`."""
    async with connected(links, limits=limits, config=config, linger=linger) as pair:
        yield SessionPair(pair.client, pair.server, lambda: cut(pair))


async def carried_sender(pair: Pair, **options: Any) -> tuple[Sender, Receiver]:
    """Open a channel from the server to the client, by sending the sender."""
    receiver, ticket = pair.client.channel(**options)
    await pair.client.entrypoint.send(b"to you", attachments=[ticket])
    return (await pair.server.entrypoint.receive()).sender(), receiver


async def carried_receiver(pair: Pair, **options: Any) -> tuple[Sender, Receiver]:
    """Open a channel from the client to the server, by sending the receiver."""
    sender, ticket = pair.client.channel("sender", **options)
    await pair.client.entrypoint.send(b"from me", attachments=[ticket])
    return sender, (await pair.server.entrypoint.receive()).receiver()


async def payloads(receiver: Receiver) -> list[bytes]:
    """Receive everything until the clean end."""
    return [message.payload async for message in receiver]


async def send_on(sender: Sender, message: bytes = bytes(10_000)) -> None:
    """Send until the task is cancelled or fails."""
    while True:
        await sender.send(message)


async def take(receiver: Receiver, count: int) -> list[Message]:
    return [await receiver.receive() for _ in range(count)]


async def canary(pair: Pair) -> None:
    """Check with messages in both directions on new channels that the connection works."""
    back, forth = await carried_sender(pair)
    await back.send(b"canary")
    assert (await forth.receive()).payload == b"canary"
    await back.finish()
    out, into = await carried_receiver(pair)
    await out.send(b"canary")
    assert (await into.receive()).payload == b"canary"
    await out.finish()


def tickets(side: Client | Server, count: int) -> list[Ticket]:
    return [side.channel()[1] for _ in range(count)]


def leftovers(pair: Pair) -> list[object]:
    """Give what is left on either side of the application's channels and their messages."""
    left: list[object] = []
    for side in (pair.client, pair.server):
        connection = connection_of(side)
        state = connection.engine.state
        left += [half for half in connection.engine.halves if half not in connection.reserved]
        left += [
            f"{name} {value}"
            for name, value in (
                ("outbox", state.outbox),
                ("unread", state.unread_limit.unread),
                ("closing", len(state.closing)),
                ("waiting", state.table.census.waiting),
            )
            if value
        ]
    return left


async def at_rest(calm: float = 0.0) -> None:
    """Wait until no task runs; with a clock that jumps, wait `calm` seconds more."""
    await trio.testing.wait_all_tasks_blocked()
    if calm:
        await trio.sleep(calm)
        await trio.testing.wait_all_tasks_blocked()
