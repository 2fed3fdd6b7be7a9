"""A restream server in the test's own Trio loop, reached without sockets; and the options of a source that reads it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.planner import Planner
from muxkit.protocols import restream
from muxkit.runtime import background
from muxkit_adapters import memory
from tests.pipeline._source_servers import KEEP, ONE, feed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from muxkit.pipeline.source.offsets import Span
    from muxkit.protocols.restream.wire import Block

    Script = Callable[[list[dict[str, Any]], trio.abc.Stream], Any]


class Place:
    """A server and its store."""

    def __init__(self, url: str, store: Any) -> None:  # noqa: ANN401 - any kind of store
        self.url = url
        self.store = store

    async def feed(self, uuid: str, count: int, *, first: int = 1) -> None:
        """Messages whose data is `{"n": their number}`."""
        await feed(self.store, uuid, [{"n": n} for n in range(first, first + count)])

    async def acknowledged(self, uuid: str) -> int:
        status = await self.store.status(uuid)
        number: int = status.acknowledged
        return number

    def options(self, streams: str | None = ONE, **options: object) -> SourceOptions:
        given = {"servers": self.url, "streams": streams} | options
        return SourceOptions.parse({name: str(value) for name, value in given.items() if value is not None})

    def client(self, **options: object) -> Client:
        return Client(self.options(ONE, **options))

    def planner(self, streams: str | None = ONE, **options: object) -> Planner:
        return Planner(self.options(streams, **options))


@asynccontextmanager
async def place(
    name: str = "source",
    *,
    status: bool = True,
    store: Any = None,  # noqa: ANN401 - any kind of store
    **options: Any,
) -> AsyncIterator[Place]:
    """A server of fed sessions whose clock is Trio's."""
    if store is None:
        async with (
            restream.open_store("memory:", keep=KEEP, now=trio.current_time) as opened,
            place(name, status=status, store=opened, **options) as there,
        ):
            yield there
        return
    async with background() as nursery:
        served = await nursery.start(
            partial(
                restream.serve,
                f"restream+mem://{name}",
                store,
                application=options.pop("application", restream.Fed()),
                config=restream.ServerConfig(
                    status=status, listing=status and options.pop("listing", True), line=4 << 20
                ),
                **options,
            )
        )
        yield Place(served.url, store)


@asynccontextmanager
async def scripted(name: str, act: Script) -> AsyncIterator[str]:
    """A server that does what `act(requests so far, stream)` does on each connection, once it has read a line."""
    requests: list[dict[str, Any]] = []

    async def handle(stream: trio.abc.Stream) -> None:
        async with stream:
            line = b""
            while not line.endswith(b"\n"):
                data = await stream.receive_some(65_536)
                if not data:
                    return
                line += data
            requests.append(json.loads(line))
            try:
                await act(requests, stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async with background() as nursery:
        await nursery.start(partial(memory.serve, handle, name))
        yield f"restream+mem://{name}"


def lines(*messages: object) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


async def ids(client: Client, span: Span) -> list[int]:
    """What a range holds."""
    got: list[int] = []

    async def take(block: Block) -> None:
        await trio.lowlevel.checkpoint()
        got.extend(range(block.first, block.last + 1))

    await client.fetch(span, take)
    return got


async def step(planner: Planner, start: Mapping[str, object], *, limited: bool = True) -> Mapping[str, object]:
    """What Spark does with an offset between two calls: it is text."""
    end = await planner.latest(json.loads(json.dumps(start)), limited=limited)
    told: Mapping[str, object] = json.loads(json.dumps(end))
    return told


async def ranges(
    planner: Planner, start: Mapping[str, object], end: Mapping[str, object]
) -> dict[str, tuple[int, int]]:
    return {span.uuid: (span.begin, span.end) for span in await planner.spans(start, end)}
