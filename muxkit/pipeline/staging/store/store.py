"""A staging store over any backend: transactions until they are committed, and the streams that they become.

Every method is a checkpoint. When one returns, its effect is durable (as durable as the store is). A call that is
cancelled may have taken effect or not, but never half of it; each may be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from muxkit.pipeline.staging.store.rows import Block, Encoding, Key, Rows, StagingLimits
    from muxkit.pipeline.staging.store.rules import BatchProgress, Commit, Published, Rules
    from muxkit.storage import Waiters

T = TypeVar("T")

SWEPT_AT_ONCE = 100
READ_BYTES = 1 << 20


class Backend(Protocol):
    """What holds the rows and runs units of work on them."""

    async def work(self, key: str, act: Callable[[Rows], T]) -> T:
        """Run a unit of work; return when it is durable. No backend uses the key."""


class Staging:
    """A staging store over any backend. Several tasks may use it at once.

    `poll_interval`: seconds between two looks for the commits of other servers; None: there can be no other server.
    """

    def __init__(self, backend: Backend, rules: Rules, waiters: Waiters, *, poll_interval: float | None = None) -> None:
        self._backend = backend
        self._rules = rules
        self._waiters = waiters
        self._poll_interval = poll_interval

    @property
    def limits(self) -> StagingLimits:
        return self._rules.limits

    # ------------------------------------------------------------------------ the two phases

    async def begin(self, id: str, key: Key, batch: int, encoding: Encoding, ttl: float, *, once: bool = False) -> bool:
        """Begin a transaction, or continue it. False: the batch is committed, and there is nothing to write.

        `once`: the application has this one batch only, and is deleted `ttl` seconds after it.
        """
        return await self._work(lambda rows: self._rules.begin(rows, id, key, batch, encoding, ttl, once=once))

    async def put(self, id: str, key: Key, batch: int, blocks: Sequence[Block]) -> bool:
        """Add the blocks that a transaction does not have yet. False: its batch is committed.

        Raises `TransactionGone`, `TransactionConflict` and `StagingFull`.
        """
        return await self._work(lambda rows: self._rules.put(rows, id, key, batch, blocks))

    async def prepare(self, id: str, key: Key, batch: int, count: int) -> bool:
        """Check that a transaction has exactly `count` rows, and promise them. False: its batch is committed."""
        return await self._work(lambda rows: self._rules.prepare(rows, id, key, batch, count))

    async def commit(self, key: Key, batch: int, parts: Mapping[str, int]) -> Commit:
        """Add these transactions to the stream, in this order, all or none; `parts`: the number of rows of each.

        Raises `NotCommitted` when one is not staged, prepared and as long as it should be. A batch that is not above
        the last one is a duplicate, which is no error.
        """
        return await self._work(lambda rows: self._rules.commit(rows, key, batch, parts))

    async def abort(self, key: Key, batch: int, ids: Iterable[str]) -> int:
        """Delete these transactions of a batch; return how many there were. Once it is committed nothing happens."""
        named = list(ids)
        return await self._work(lambda rows: self._rules.abort(rows, key, batch, named))

    async def sweep(self) -> int:
        """Delete expired transactions, whose number it returns, and applications; call it every few seconds."""
        dropped = 0
        found = await self._work(lambda rows: self._rules.overdue(rows, SWEPT_AT_ONCE))
        while found:
            for each in found:
                dropped += await self._sweep(each.id, each.key)
            found = await self._work(lambda rows: self._rules.overdue(rows, SWEPT_AT_ONCE))
        forgotten = await self._work(lambda rows: self._rules.overdue_applications(rows, SWEPT_AT_ONCE))
        while forgotten:
            for key in forgotten:
                await self._forget(key)
            forgotten = await self._work(lambda rows: self._rules.overdue_applications(rows, SWEPT_AT_ONCE))
        # In small portions, so that a commit does not wait for long.
        while await self._work(lambda rows: rows.purge()):
            pass
        while await self._work(lambda rows: rows.shrink()):
            pass
        return dropped

    async def _sweep(self, id: str, key: Key) -> bool:
        return await self._work(lambda rows: self._rules.sweep(rows, id, key))

    async def _forget(self, key: Key) -> bool:
        return await self._work(lambda rows: self._rules.forget(rows, key))

    # ------------------------------------------------------------------------ committed rows

    async def read(self, stream: str, after: int, *, most_bytes: int = READ_BYTES) -> Published | None:
        """Return rows after the id `after` (0: from the beginning), or None if there are none yet.

        It returns at least one row if there is one. Raises `RowsGone` below what was trimmed and above the end.
        """
        return await self._work(lambda rows: self._rules.read(rows, stream, after, most_bytes))

    async def wait(self, stream: str, after: int) -> None:
        """Sleep until there may be a row after `after`."""
        while True:
            with self._waiters.watching(stream) as changed:
                if await self.head(stream) > after:
                    return
                with trio.move_on_after(self._poll_interval or float("inf")):
                    await changed.wait()

    async def trim(self, stream: str, upto: int) -> None:
        """Delete the rows up to this id. Space is freed by whole transactions, in `sweep`."""
        while await self._work(lambda rows: self._rules.trim(rows, stream, upto, SWEPT_AT_ONCE)):
            pass

    async def head(self, stream: str) -> int:
        """Return the last id of a stream; 0 before the first row."""
        found = await self._work(lambda rows: rows.look_at_stream(stream))
        return 0 if found is None else found.head

    async def progress(self, key: Key) -> BatchProgress:
        """Return the progress of an application in a stream."""
        return await self._work(lambda rows: self._rules.progress(rows, key))

    async def _work(self, act: Callable[[Rows], T]) -> T:
        return await self._backend.work("", act)
