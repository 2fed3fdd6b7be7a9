"""Pairs of e3x sessions on every kind of link."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

import muxkit
from muxkit.protocols import e3x
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import PacketWeather, SessionPair
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muxkit import Limits
    from muxkit.protocols.e3x import Channel, Config, Session
    from muxkit.runtime import PacketLink

CALM = PacketWeather(delay=0.01)
BENT = PacketWeather(delay=0.02, jitter=0.01, loss=0.05, duplication=0.05, reordering=0.1)
# A packet that is lost alone is sent again after a second, so a check of many echoes allows only few losses.
ROUGH = PacketWeather(delay=0.002, jitter=0.001, loss=0.01, duplication=0.05, reordering=0.1, late=0.005)


class Cable(trio.abc.Channel[bytes]):
    """A link that can be cut silently in both directions."""

    def __init__(self, link: PacketLink) -> None:
        self._link = link
        self.is_cut = False

    async def send(self, value: bytes) -> None:
        if self.is_cut:
            await trio.lowlevel.checkpoint()
        else:
            await self._link.send(value)

    async def receive(self) -> bytes:
        while True:
            packet = await self._link.receive()
            if not self.is_cut:
                return packet

    async def aclose(self) -> None:
        await self._link.aclose()


@asynccontextmanager
async def sessions(
    here: PacketLink | trio.abc.Stream,
    there: PacketLink | trio.abc.Stream,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    linger: float = 5.0,
) -> AsyncIterator[SessionPair]:
    """Run two sessions on one link; the listener leaves first."""

    def cut() -> None:
        for session in (one, other):
            connection_of(session).pump.lose("the test cut it", by="network")

    async with e3x.session(here, role="connector", config=config, limits=limits, linger=linger) as one:
        async with e3x.session(there, role="listener", config=config, limits=limits, linger=linger) as other:
            yield SessionPair(one, other, cut)


@asynccontextmanager
async def channels(pair: SessionPair, **options: Any) -> AsyncIterator[tuple[Channel, Channel]]:
    """Open a channel that the other side has accepted; yield both ends."""
    one, other = pair.one, pair.other
    assert isinstance(one, e3x.Session)
    assert isinstance(other, e3x.Session)
    async with one.open(**options) as here:
        yield here, await next_channel(other)


@asynccontextmanager
async def on_packets(
    weather: PacketWeather = CALM,
    seed: int = 1,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    linger: float = 5.0,
) -> AsyncIterator[SessionPair]:
    async with sessions(*weather.pair(seed), config=config, limits=limits, linger=linger) as pair:
        yield pair


@asynccontextmanager
async def on_streams(
    *, config: Config | None = None, limits: Limits | None = None, linger: float = 5.0
) -> AsyncIterator[SessionPair]:
    async with sessions(*memory.pair(), config=config, limits=limits, linger=linger) as pair:
        yield pair


@asynccontextmanager
async def over_url(
    url: str,
    *,
    linger: float = 5.0,
    on_server: dict[str, Any] | None = None,
    on_client: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[SessionPair]:
    """Run a client and a server of `url` over real sockets."""
    others: list[Session] = []
    has_come, over = trio.Event(), trio.Event()

    async def keep(session: muxkit.Session) -> None:
        assert isinstance(session, e3x.Session)
        others.append(session)
        has_come.set()
        await over.wait()

    def cut() -> None:
        for session in (one, *others):
            connection_of(session).pump.lose("the test cut it", by="network")

    async with background() as nursery:
        serve = partial(muxkit.serve, keep, url, linger=linger, **options, **(on_server or {}))
        served: muxkit.Server = await nursery.start(serve)
        async with muxkit.connect(served.url, linger=linger, **options, **(on_client or {})) as session:
            assert isinstance(session, e3x.Session)
            one = session
            await one.ping()  # a packet link has no handshake of its own
            await has_come.wait()
            yield SessionPair(one, others[0], cut)
            over.set()


async def next_channel(session: Session) -> Channel:
    """Return the next channel that the peer has opened."""
    async for channel in session.incoming():
        assert isinstance(channel, e3x.Channel)
        return channel
    raise AssertionError("nothing more comes in")


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)
