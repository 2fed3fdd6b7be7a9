"""Where do staged transactions live until they are committed, and the streams that they become? In a store.

Every method is a checkpoint. When one returns, its effect is durable (as durable as the store is). A call that is
cancelled may have taken effect or not, but never half of it; each may be repeated.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from muxkit.pipeline.staging.store.rows import StagingLimits
from muxkit.pipeline.staging.store.rules import Rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from muxkit.pipeline.staging.store.rows import Block, Encoding, Key, Rows
    from muxkit.pipeline.staging.store.rules import Commit, Now, Published, Standing
    from muxkit.storage.waiters import Waiters

T = TypeVar("T")

LIMITS = StagingLimits()
KINDS = "memory:, sqlite:PATH or postgresql://…"
SWEPT_AT_ONCE = 100
READ_BYTES = 1 << 20


def open_staging(
    where: str, *, limits: StagingLimits = LIMITS, now: Now = time.time
) -> AbstractAsyncContextManager[Staging]:
    """Open `memory:`, `sqlite:PATH` or `postgresql://…`; leaving the context closes it, when all is stored."""
    return _open(where, Rules(limits, now))


@asynccontextmanager
async def _open(where: str, rules: Rules) -> AsyncIterator[Staging]:
    # Imported where needed: most programs use one of them.
    kind, colon, rest = where.partition(":")
    if kind == "memory" and colon and not rest:
        from muxkit.pipeline.staging.store.memory import open_memory

        async with open_memory(rules) as memory:
            yield memory
    elif kind == "sqlite" and rest:
        from muxkit.pipeline.staging.store.sqlite import open_sqlite

        async with open_sqlite(Path(rest), rules) as sqlite:
            yield sqlite
    elif kind in ("postgresql", "postgres") and rest:
        from muxkit.pipeline.staging.store.postgres import open_postgres

        async with open_postgres(where, rules) as postgres:
            yield postgres
    else:
        raise ValueError(f"{where!r} names no store: {KINDS}")


class Backend(Protocol):
    """Whatever holds the rows."""

    async def work(self, act: Callable[[Rows], T]) -> T:
        """Run a unit of work; return when it is durable."""

    @property
    def looks_after(self) -> float | None:
        """Seconds after which to look again for what others have done; None: nobody else can do anything."""


class Staging:
    """A staging store over any backend. Several tasks may use it at once."""

    def __init__(self, backend: Backend, rules: Rules, waiters: Waiters) -> None:
        self._backend = backend
        self._rules = rules
        self._waiters = waiters

    @property
    def limits(self) -> StagingLimits:
        return self._rules.limits

    # ------------------------------------------------------------------------ the two phases

    async def begin(self, id: str, key: Key, batch: int, encoding: Encoding, ttl: float, *, once: bool = False) -> bool:
        """Begin a transaction, or go on with it. False: the batch is committed, and there is nothing to write.

        `once`: the application has this one batch only, and is forgotten `ttl` seconds after it.
        """
        return await self._backend.work(lambda rows: self._rules.begin(rows, id, key, batch, encoding, ttl, once=once))

    async def put(self, id: str, key: Key, batch: int, blocks: Sequence[Block]) -> bool:
        """Add blocks to a transaction, those that are not there yet. False: its batch is committed.

        Raises `TransactionGone`, `TransactionConflict` and `StagingFull`.
        """
        return await self._backend.work(lambda rows: self._rules.put(rows, id, key, batch, blocks))

    async def prepare(self, id: str, key: Key, batch: int, count: int) -> bool:
        """Check that a transaction has exactly so many rows, and promise them. False: its batch is committed."""
        return await self._backend.work(lambda rows: self._rules.prepare(rows, id, key, batch, count))

    async def commit(self, key: Key, batch: int, parts: Mapping[str, int]) -> Commit:
        """Add these transactions to the stream, in this order, all or none; `parts`: the rows that each must have.

        Raises `NotCommitted` when one is not staged, prepared and as long as it should be. A batch that is not above
        the last one is a duplicate, which is no error.
        """
        return await self._backend.work(lambda rows: self._rules.commit(rows, key, batch, parts))

    async def abort(self, key: Key, batch: int, ids: Iterable[str]) -> int:
        """Drop these transactions of a batch; how many there were. Once it is committed nothing happens."""
        named = list(ids)
        return await self._backend.work(lambda rows: self._rules.abort(rows, key, batch, named))

    async def sweep(self) -> int:
        """Drop the transactions that nobody has touched for their time; call it every few seconds. How many."""
        dropped = 0
        found = await self._backend.work(lambda rows: self._rules.overdue(rows, SWEPT_AT_ONCE))
        while found:
            for each in found:
                dropped += await self._sweep(each.id, each.key)
            found = await self._backend.work(lambda rows: self._rules.overdue(rows, SWEPT_AT_ONCE))
        forgotten = await self._backend.work(lambda rows: self._rules.overdue_applications(rows, SWEPT_AT_ONCE))
        while forgotten:
            for key in forgotten:
                await self._forget(key)
            forgotten = await self._backend.work(lambda rows: self._rules.overdue_applications(rows, SWEPT_AT_ONCE))
        # In small portions, so that nobody who commits meanwhile waits for long.
        while await self._backend.work(lambda rows: rows.purge()):
            pass
        while await self._backend.work(lambda rows: rows.shrink()):
            pass
        return dropped

    async def _sweep(self, id: str, key: Key) -> bool:
        return await self._backend.work(lambda rows: self._rules.sweep(rows, id, key))

    async def _forget(self, key: Key) -> bool:
        return await self._backend.work(lambda rows: self._rules.forget(rows, key))

    # ------------------------------------------------------------------------ what was committed

    async def read(self, stream: str, after: int, *, most_bytes: int = READ_BYTES) -> Published | None:
        """Rows behind the id `after` (0: from the beginning), or None if there are none yet.

        At least one row if there is one. Raises `RowsGone` below what was trimmed and above the end.
        """
        return await self._backend.work(lambda rows: self._rules.read(rows, stream, after, most_bytes))

    async def wait(self, stream: str, after: int) -> None:
        """Sleep until there may be a row behind `after`."""
        while True:
            with self._waiters.watching(stream) as changed:
                if await self.head(stream) > after:
                    return
                with trio.move_on_after(self._backend.looks_after or float("inf")):
                    await changed.wait()

    async def trim(self, stream: str, upto: int) -> None:
        """Let the rows up to this id go. What they took is free when a whole transaction has gone, and was swept."""
        while await self._backend.work(lambda rows: self._rules.trim(rows, stream, upto, SWEPT_AT_ONCE)):
            pass

    async def head(self, stream: str) -> int:
        """The last id of a stream; 0 before the first row."""
        found = await self._backend.work(lambda rows: rows.look_at_stream(stream))
        return 0 if found is None else found.head

    async def standing(self, key: Key) -> Standing:
        """How far an application is in a stream."""
        return await self._backend.work(lambda rows: self._rules.standing(rows, key))
