"""A listener in memory, links to it, and a network between them that tests can break."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
import trio.testing

from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, Link
from muxkit.runtime import Backoff, background
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit import Limits
    from muxkit.protocols.relink import Keep, Listener

QUIET = Config(keepalive=None)
TRANSACTIONS = Config(keepalive=None, connector_transactions=True, listener_transactions=True)
SOON = Backoff(first=0.01, most=0.1)


@attrs.define(eq=False)
class World:
    """One listener; dialling it makes a pair of memory streams."""

    listener: Listener
    nursery: trio.Nursery
    links: list[Link] = attrs.field(factory=list)
    """The listener's side of each link, in the order in which they began; they live until the test lets them go."""
    is_reachable: bool = True
    dialled: int = 0
    capacity: int = 65_536
    live: list[memory.MemoryStream] = attrs.field(factory=list)
    _began: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _let_go: trio.Event = attrs.field(factory=trio.Event)

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        await trio.lowlevel.checkpoint()
        self.dialled += 1
        if not self.is_reachable:
            raise ConnectionRefusedError("the test lets no connection in")
        here, there = memory.pair(capacity=self.capacity)
        self.live += [here, there]
        self.nursery.start_soon(self.listener.handle, there)
        async with here:
            yield here

    def link(self, endpoint: str | None = None, **options: Any) -> AbstractAsyncContextManager[Link]:
        options.setdefault("config", QUIET)
        options.setdefault("backoff", SOON)
        return relink.link(self.dial, endpoint, **options)

    async def cut(self) -> None:
        """Break every connection; bytes under way are lost."""
        live, self.live = self.live, []
        for stream in live:
            await trio.aclose_forcefully(stream)

    async def hold(self, link: Link) -> None:
        """Handle a link by recording it for the test, until the test lets all handlers return."""
        self.links.append(link)
        self._began.unpark_all()
        await self._let_go.wait()

    async def other(self, number: int = 0) -> Link:
        """Wait for the listener's side of the n-th link."""
        while len(self.links) <= number:
            await self._began.park()
        return self.links[number]

    def let_go(self) -> None:
        """Let all handlers return, so that their links are left."""
        self._let_go.set()


@asynccontextmanager
async def world(
    config: Config = QUIET,
    *,
    handler: Callable[[Link], Awaitable[object]] | None = None,
    keep: Keep | None = None,
    limits: Limits | None = None,
    linger: float = 5.0,
    endpoints: dict[str, Endpoint] | None = None,
) -> AsyncIterator[World]:
    async def handle(link: Link) -> None:
        await (handler or made.hold)(link)

    served = endpoints or {config.endpoint: Endpoint(handle, config)}
    async with background() as nursery, relink.listener(served, keep=keep, limits=limits, linger=linger) as listener:
        made = World(listener, nursery)
        yield made


@attrs.define(eq=False)
class Both:
    world: World
    one: Link
    """The connector's side."""
    other: Link
    """The listener's."""


@asynccontextmanager
async def both(config: Config = QUIET, *, limits: Limits | None = None, **options: Any) -> AsyncIterator[Both]:
    """Run both sides of one link; when the block ends, both leave it."""
    async with world(config, limits=limits) as made:
        async with made.link(config=config, limits=limits, **options) as one:
            yield Both(made, one, await made.other())
            made.let_go()


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


class Packets:
    """An observer that records packets and bytes in both directions."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.data = {"in": b"", "out": b""}

    def frame(self, direction: str, channel: str, name: str, size: int) -> None:
        self.seen.append((direction, channel, name))

    def credit(self, direction: str, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...

    def transport(self, direction: str, data: bytes | memoryview) -> None:
        self.data[direction] += bytes(data)
