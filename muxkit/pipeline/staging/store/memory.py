"""A staging store in memory, which ends with its process."""

from __future__ import annotations

from bisect import bisect_right, insort
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from muxkit.pipeline.staging.store.errors import StagingFull
from muxkit.pipeline.staging.store.rows import Block, Span
from muxkit.pipeline.staging.store.store import Staging
from muxkit.storage import StoreClosed, Waiters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from muxkit.pipeline.staging.store.rows import Application, Key, Stream, Transaction
    from muxkit.pipeline.staging.store.rules import Rules

T = TypeVar("T")

MAX_BLOCKS_READ = 1000  # blocks that one read looks at


@asynccontextmanager
async def open_memory(rules: Rules) -> AsyncIterator[Staging]:
    """Open a store whose calls never wait."""
    waiters = Waiters()
    backend = _Memory(rules.limits.bytes, waiters)
    try:
        yield Staging(backend, rules, waiters)
    finally:
        backend.close()


class _Memory:
    """Both the backend and its rows: units of work cannot overlap, since none of them waits."""

    def __init__(self, most_bytes: int, waiters: Waiters) -> None:
        self._applications: dict[Key, Application] = {}
        self._transactions: dict[str, Transaction] = {}
        self._by_key: dict[Key, set[str]] = {}  # the transactions that are not committed
        self._published: dict[str, list[tuple[int, str]]] = {}  # by stream: base and id of those with rows, sorted
        self._streams: dict[str, Stream] = {}
        self._blocks: dict[str, dict[int, Block]] = {}
        self._firsts: dict[str, list[int]] = {}  # the first rows of each transaction's blocks, sorted
        self._used = 0
        self._most_bytes = most_bytes
        self._waiters = waiters
        self._is_closed = False

    async def work(self, key: str, act: Callable[[_Memory], T]) -> T:
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise StoreClosed("the store is closed; open it again")
        return act(self)

    def close(self) -> None:
        self._is_closed = True
        self._waiters.wake_all()

    # ------------------------------------------------------------------------ rows

    def application(self, key: Key) -> Application | None:
        found = self._applications.get(key)
        return None if found is None else attrs.evolve(found)

    def save_application(self, application: Application) -> None:
        self._applications[application.key] = application

    def applications(self) -> int:
        return len(self._applications)

    def remove_application(self, key: Key) -> None:
        del self._applications[key]
        self._by_key.pop(key, None)

    def overdue_applications(self, now: float, most: int) -> list[Key]:
        known = self._applications.values()
        over = (each.key for each in known if each.due is not None and each.due <= now and not each.transactions)
        return list(islice(over, most))

    def transaction(self, id: str) -> Transaction | None:
        found = self._transactions.get(id)
        return None if found is None else attrs.evolve(found)

    def save_transaction(self, transaction: Transaction) -> None:
        id, key = transaction.id, transaction.key
        self._transactions[id] = transaction
        if transaction.base is None:
            self._by_key.setdefault(key, set()).add(id)
        else:
            self._by_key.get(key, set()).discard(id)
            if transaction.rows:
                insort(self._published.setdefault(key.stream, []), (transaction.base, id))

    def remove_transaction(self, id: str) -> None:
        gone = self._transactions.pop(id)
        if gone.base is None:
            self._by_key[gone.key].discard(id)
        elif gone.rows:
            self._published[gone.key.stream].remove((gone.base, id))
        self._firsts.pop(id, None)
        self._used -= sum(len(block.body) for block in self._blocks.pop(id, {}).values())

    def reclaim(self, id: str) -> None:
        pass  # deleted blocks are gone at once

    def purge(self) -> bool:
        return False

    def staged(self, key: Key, upto: int) -> list[Transaction]:
        found = (self._transactions[id] for id in self._by_key.get(key, ()))
        return [attrs.evolve(each) for each in found if each.batch <= upto]

    def overdue(self, now: float, most: int) -> list[Transaction]:
        over = (each for each in self._transactions.values() if each.due is not None and each.due <= now)
        return list(islice(over, most))

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        growth = sum(len(block.body) for block in blocks)
        if self._used + growth > self._most_bytes:
            raise StagingFull(
                f"{self._used:,} bytes are used and {growth:,} more would pass "
                f"StagingLimits(bytes={self._most_bytes}); trim streams that were read, or raise it"
            )
        self._used += growth
        known, firsts = self._blocks.setdefault(id, {}), self._firsts.setdefault(id, [])
        for block in blocks:
            known[block.first] = block
            insort(firsts, block.first)

    def spans(self, id: str, first: int, last: int) -> list[Span]:
        known = self._blocks.get(id, {})
        return [Span(*known[at][:3]) for at in self._firsts.get(id, ()) if first <= at <= last]

    def blocks(self, id: str, row: int, most_bytes: int) -> list[Block]:
        known, firsts = self._blocks[id], self._firsts[id]
        start = bisect_right(firsts, row) - 1
        found: list[Block] = []
        size = 0
        for at in firsts[start : start + MAX_BLOCKS_READ]:
            size += len(known[at].body)
            if found and size > most_bytes:
                break
            found.append(known[at])
        return found

    def stream(self, name: str) -> Stream | None:
        found = self._streams.get(name)
        return None if found is None else attrs.evolve(found)

    look_at_stream = stream

    def save_stream(self, stream: Stream) -> None:
        self._streams[stream.name] = stream

    def published(self, stream: str, id: int) -> Transaction | None:
        known = self._published.get(stream, [])
        at = bisect_right(known, (id - 1, "\U0010ffff")) - 1
        return self._transactions[known[at][1]] if at >= 0 else None

    def passed(self, stream: str, upto: int, most: int) -> list[str]:
        found: list[str] = []
        for base, id in self._published.get(stream, []):
            if base + self._transactions[id].rows > upto or len(found) == most:
                break
            found.append(id)
        return found

    def changed(self, stream: str) -> None:
        self._waiters.wake(stream)

    def shrink(self) -> bool:
        return False
