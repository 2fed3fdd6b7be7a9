"""What the tests of staging share: rows that say where they belong, a clock, places for stores, a server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from muxkit.pipeline import (
    Encoding,
    Key,
    Staging,
    StagingClient,
    StagingLimits,
    make_block,
    open_staging,
    serve_staging,
)
from tests.protocols.restream.stores import Clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import pytest

    import muxkit
    from muxkit.pipeline.staging.records import Block
    from muxkit.pipeline.staging.server import Authorize
    from muxkit.pipeline.staging.store import Backend

KEY = Key("orders", "query")
DAY = 86_400.0

StagingT = TypeVar("StagingT", bound=Staging)


def rows(first: int, count: int, size: int = 8) -> list[bytes]:
    return [b"%0*d" % (size, number) for number in range(first, first + count)]


def backend_of(store: Staging) -> Backend:
    """Return where a store keeps its rows."""
    return store._backend


def on_backend(kind: type[StagingT], store: Staging, backend: Backend) -> StagingT:
    """Return a store with the clock, the limits and the waiting tasks of another one, and with its own backend."""
    return kind(backend, store._waiters, store.limits, store._now)


@attrs.define
class Place:
    """Where a store is, and the clock of the process that opens it."""

    where: str
    clock: Clock

    @asynccontextmanager
    async def open(self, limits: StagingLimits | None = None) -> AsyncIterator[Staging]:
        async with open_staging(self.where, limits=limits or StagingLimits(), now=self.clock) as store:
            yield store


def place_of(request: pytest.FixtureRequest, kind: str) -> Place:
    """An empty place of this kind."""
    if kind == "memory":
        where = "memory:"
    elif kind == "sqlite":
        where = f"sqlite:{request.getfixturevalue('staging_path')}"
    else:
        where = request.getfixturevalue("schema")
    return Place(where, Clock())


async def stage(
    store: Staging, txn: str, batch: int, content: Sequence[bytes], *, key: Key = KEY, prepared: bool = True
) -> dict[str, int]:
    """A whole transaction in one block; what a commit has to know of it."""
    assert await store.begin(txn, key, batch, Encoding.BINARY, DAY)
    if content:
        assert await store.put(txn, key, batch, [make_block(0, content)])
    if prepared:
        assert await store.prepare(txn, key, batch, len(content))
    return {txn: len(content)}


async def everything(store: Staging, stream: str = KEY.stream, *, most_bytes: int = 1 << 20) -> list[bytes]:
    """All rows that are committed and not trimmed."""
    at = (await store.progress(Key(stream, ""))).trimmed
    found: list[bytes] = []
    while (published := await store.read(stream, at, most_bytes=most_bytes)) is not None:
        assert published.first == at + 1
        found += published.rows
        at += len(published.rows)
    assert at == await store.head(stream)
    return found


class Given:
    """Rows as a client gives them, some at a time; `each` is told how many were taken before the next ones are."""

    def __init__(
        self, content: Sequence[bytes], *, at_once: int = 10, each: Callable[[int], None] = lambda taken: None
    ) -> None:
        self._content = content
        self._at_once = at_once
        self._each = each
        self.taken = 0

    def __aiter__(self) -> Given:
        return self

    async def __anext__(self) -> Block:
        await trio.lowlevel.checkpoint()
        self._each(self.taken)
        some = self._content[self.taken : self.taken + self._at_once]
        if not some:
            raise StopAsyncIteration
        block = make_block(self.taken, some)
        self.taken += len(some)
        return block


@asynccontextmanager
async def serving(
    store: Staging, url: str = "bpmux+tcp://127.0.0.1:0", *, authorize: Authorize | None = None
) -> AsyncIterator[muxkit.Server]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(serve_staging, url, store, authorize=authorize))
        nursery.cancel_scope.cancel()


async def write(
    client: StagingClient, txn: str, batch: int, content: Sequence[bytes], *, key: Key = KEY, at_once: int = 10
) -> dict[str, int]:
    """Stage a transaction over a connection; what a commit has to know of it."""
    written = await client.write(txn, key, batch, Given(content, at_once=at_once), encoding=Encoding.BINARY)
    assert written.rows == len(content)
    return {txn: len(content)}
