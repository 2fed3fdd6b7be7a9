"""Pairs of bpmux sessions, and helpers that many tests of sessions share."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio
import trio.testing

from muxkit import Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muxkit import Observer
    from muxkit.protocols.bpmux import Config, Duplex, IncomingRequest, Session, Sink, Source

    Links = tuple[trio.abc.Stream, trio.abc.Stream]

MIB = 1024 * 1024

TINY = Limits(channel_bytes=1000, channel_floor=100, outbox=2000)  # windows that are soon full


@attrs.frozen
class Pair:
    """Two sessions on the ends of one link."""

    one: Session
    other: Session


@asynccontextmanager
async def sessions(
    links: Links | None = None,
    *,
    limits: Limits | None = None,
    config: Config | None = None,
    linger: float = 5.0,
    observer: Observer | None = None,
) -> AsyncIterator[Pair]:
    """Run two sessions; both must be left in order."""
    here, there = links or memory.pair()
    async with (
        bpmux.session(here, limits=limits, config=config, linger=linger, observer=observer) as one,
        bpmux.session(there, limits=limits, config=config, linger=linger) as other,
    ):
        yield Pair(one, other)


@asynccontextmanager
async def rough_sessions(
    links: Links | None = None, *, limits: Limits | None = None, config: Config | None = None
) -> AsyncIterator[Pair]:
    """Run two sessions for tests that leave channels open: the link is cut at the end."""
    with suppress(LinkLost):
        async with sessions(links, limits=limits, config=config, linger=0.1) as pair:
            yield pair
            cut(pair)


def cut(pair: Pair) -> None:
    for session in (pair.one, pair.other):
        connection_of(session).pump.lose("the test cut it", by="network")


async def next_duplex(session: Session) -> Duplex:
    return await anext(session.incoming())


async def next_source(session: Session) -> Source:
    source, _ = await anext(session.sources())
    return source


async def next_sink(session: Session) -> Sink:
    sink, _ = await anext(session.sinks())
    return sink


async def next_request(session: Session) -> IncomingRequest:
    return await anext(session.requests())


async def echo_each(session: Session) -> None:
    """Echo the messages of each channel, until the peer opens no more."""

    async def echo(channel: Duplex) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

    async with trio.open_nursery() as nursery:
        with suppress(LinkLost):
            async for channel in session.incoming():
                nursery.start_soon(echo, channel)


async def answer_each(session: Session) -> None:
    """Answer each request with its payload, doubled."""

    async def answer(request: IncomingRequest) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with request:
                await request.respond(request.payload * 2)

    async with trio.open_nursery() as nursery:
        with suppress(LinkLost):
            async for request in session.requests():
                nursery.start_soon(answer, request)


async def canary(pair: Pair) -> None:
    """Send a message on a new channel in each direction, to check that the connection works."""
    for session, peer in ((pair.one, pair.other), (pair.other, pair.one)):
        async with session.open_sink() as sink:
            await sink.send(b"canary")
            source = await next_source(peer)
            assert await source.receive() == b"canary"
            await source.aclose()


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked()


class SilentStream(trio.abc.HalfCloseableStream):
    """A stream that takes everything, never receives anything and is not closed by the peer."""

    def __init__(self) -> None:
        self.taken = 0
        self._closed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.taken += len(data)
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None: ...

    async def send_eof(self) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self._closed.wait()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self._closed.set()
        await trio.lowlevel.checkpoint()


T = TypeVar("T")


def once(values: list[T]) -> T:
    """Return the only value."""
    (value,) = values
    return value
