"""A staging store over any backend: it holds transactions until they are committed, and the streams of committed rows.

Each operation is a unit of work, which makes all checks first and then changes the rows. Repeating a unit is harmless.
So a caller that doesn't know whether an operation was done can call it again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import attrs
import trio

from muxkit.pipeline.errors import NotCommitted, RowsGone, StagingFull, TransactionConflict, TransactionGone
from muxkit.pipeline.staging import records
from muxkit.pipeline.staging.rows import RecordT, Rows
from muxkit.storage import StoreCorrupt, Waiters

Now = Callable[[], float]  # seconds since 1970, as `time.time`; called in any thread


P = ParamSpec("P")
T = TypeVar("T")

SWEPT_AT_ONCE = 100
READ_BYTES = 1 << 20

# The uncommitted transactions of an application, in batches up to a certain one.
STAGED = "base IS NULL AND stream = ? AND app = ? AND batch <= ?"
# In a stream, the committed transaction that contains a certain row; and those whose rows all have ids up to a bound.
PUBLISHED = "base IS NOT NULL AND stream = ? AND base < ? AND row_count > 0 ORDER BY base DESC LIMIT 1"
# The index doesn't contain the sum. The second bound ends the index scan at the first transaction that is kept.
PASSED = "base IS NOT NULL AND stream = ? AND base + row_count <= ? AND base <= ? ORDER BY base LIMIT ?"


class Backend(Protocol):
    """Holds the rows and runs units of work on them."""

    async def work(self, key: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        """Run a unit of work, and return when it is durable. Backends ignore the key.

        `grows` marks work that adds rows. All other work must succeed even on a full disk, because it makes room.
        """


def unit_of_work(
    act: Callable[Concatenate[Staging, Rows, P], T],
) -> Callable[Concatenate[Staging, P], Coroutine[Any, Any, T]]:
    """Turn a method that takes the rows into one that tasks call without them. The method runs in the backend."""
    return _method(act, grows=False)


def growing_unit_of_work(
    act: Callable[Concatenate[Staging, Rows, P], T],
) -> Callable[Concatenate[Staging, P], Coroutine[Any, Any, T]]:
    """Do the same for a method that adds rows, which fails when the disk is full."""
    return _method(act, grows=True)


def _method(
    act: Callable[Concatenate[Staging, Rows, P], T], *, grows: bool
) -> Callable[Concatenate[Staging, P], Coroutine[Any, Any, T]]:
    @wraps(act)
    async def method(store: Staging, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store._backend.work("", lambda rows: act(store, rows, *args, **kwargs), grows=grows)

    return method


@attrs.define(eq=False, slots=False)
class Staging:
    """A staging store. Several tasks may use it simultaneously.

    Every method is a checkpoint. When a method returns, its effect is as durable as the store. A cancelled call has
    either taken effect completely or not at all. Every call may be repeated.

    With `poll_interval`, the store looks for commits of other servers every so many seconds. None means that there
    are no other servers.
    """

    _backend: Backend
    _waiters: Waiters
    limits: records.StagingLimits
    _now: Now
    _poll_interval: float | None = attrs.field(default=None, kw_only=True)

    # ------------------------------------------------------------------------ the first phase

    @growing_unit_of_work
    def begin(
        self,
        rows: Rows,
        id: str,
        key: records.Key,
        batch: int,
        encoding: records.Encoding,
        ttl: float,
        *,
        once: bool = False,
    ) -> bool:
        """Begin a transaction, or continue it.

        Args:
            rows: passed by the backend. Callers leave it out, here and in the other methods.
            id: the name of the transaction.
            key: the stream and the application.
            batch: the number of the batch.
            encoding: the encoding of the rows.
            ttl: the seconds without a change after which the transaction is deleted.
            once: True if the application has only this batch. It is then deleted `ttl` seconds after the commit.

        Returns:
            False if the batch is already committed, so that there is nothing to write.

        Raises:
            TransactionConflict: if a transaction with this name was begun for something else.
            StagingFull: if a limit is reached.
        """
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = rows.get(records.Transaction, id)
        if found is not None and not self._is_over(found):
            if (found.key, found.batch, found.encoding) != (key, batch, encoding):
                raise TransactionConflict(
                    f"{key}, batch {batch}: transaction {id} was begun for {found.key}, batch {found.batch}, "
                    f"with rows of {found.encoding.value}"
                )
            found.due = self._now() + found.ttl
            rows.save(found)
            return True
        if application.transactions - (found is not None) >= self.limits.transactions:
            raise StagingFull(
                f"{key}, batch {batch}: {application.transactions:,} transactions are staged and not committed, all "
                f"that StagingLimits(transactions={self.limits.transactions}) allows; use fewer partitions, let the "
                "failed ones be swept (txnTtl), or raise it"
            )
        if found is not None:
            _drop(rows, application, found)
        rows.reclaim(id)
        ttl = min(ttl, self.limits.ttl)
        due = self._now() + ttl
        rows.save(records.Transaction(id, *key, batch, encoding, ttl, due))
        application.transactions += 1
        application.due = due if once else None
        rows.save(application)
        return True

    @growing_unit_of_work
    def put(self, rows: Rows, id: str, key: records.Key, batch: int, blocks: Sequence[records.Block]) -> bool:
        """Add blocks to a transaction. Blocks that it already has are left unchanged.

        Returns:
            False if the batch is already committed.

        Raises:
            TransactionGone: if the transaction isn't staged.
            TransactionConflict: if it was begun for something else, if it is prepared, or if a block differs from
                the one that it already has.
            StagingFull: if a limit is reached.
        """
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = self._staged(rows, id, key, batch)
        new = self._new(rows, found, blocks)
        if new and found.prepared:
            raise TransactionConflict(f"{found}: rows came after it was prepared with {found.rows:,} rows")
        size = sum(len(block.body) for block in new)
        if application.staged + size > self.limits.staged:
            raise StagingFull(
                f"{found}: {application.staged:,} bytes are staged and not committed, and {size:,} more would "
                f"pass StagingLimits(staged={self.limits.staged}); write smaller batches, let what failed be swept "
                "(txnTtl), or raise it"
            )
        rows.add(id, new)
        found.rows += sum(block.rows for block in new)
        found.size += size
        found.due = self._now() + found.ttl
        rows.save(found)
        application.staged += size
        rows.save(application)
        return True

    @unit_of_work
    def prepare(self, rows: Rows, id: str, key: records.Key, batch: int, count: int) -> bool:
        """Check that a transaction has exactly `count` rows, and guarantee that it can be committed.

        Returns:
            False if the batch is already committed.

        Raises:
            NotCommitted: if it has another number of rows.
            TransactionGone: if the transaction isn't staged.
            TransactionConflict: if it was begun for something else.
        """
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = self._staged(rows, id, key, batch)
        whole = 0
        for first, number, _ in rows.spans(id, 0, count):
            if first != whole:
                break
            whole += number
        if whole != count or found.rows != count:
            raise NotCommitted(
                f"{found}: {found.rows:,} rows are staged, {whole:,} of them without a gap, and {count:,} were "
                "announced"
            )
        found.prepared = True
        found.due = self._now() + found.ttl
        rows.save(found)
        return True

    # ------------------------------------------------------------------------ the second phase

    @unit_of_work
    def commit(self, rows: Rows, key: records.Key, batch: int, parts: Mapping[str, int]) -> records.Committed:
        """Add these transactions to the stream: either all of them, in this order, or none.

        Args:
            rows: passed by the backend.
            key: the stream and the application.
            batch: the number of the batch.
            parts: the number of rows of each transaction, by its name.

        Returns:
            The result. A batch that isn't above the last committed one is a duplicate, and changes nothing.

        Raises:
            NotCommitted: if a transaction isn't staged and prepared, or has another number of rows.
        """
        application = self._application(rows, key)
        if batch <= application.batch:
            stream = rows.get(records.Stream, key.stream) or records.Stream(key.stream)
            count = application.rows if batch == application.batch else 0
            return records.Committed(duplicate=True, rows=count, head=stream.head)
        found = [self._committable(rows, id, key, batch, count) for id, count in parts.items()]
        stream = rows.get(records.Stream, key.stream, locked=True) or records.Stream(key.stream)
        if application.due is not None:  # keep it long enough for a client that missed the answer to repeat its request
            application.due = self._now() + max((each.ttl for each in found), default=0.0)
        for each in found:
            each.base, each.due = stream.head, None
            stream.head += each.rows
            application.staged -= each.size
            application.transactions -= 1
            rows.save(each)
        application.batch = batch
        application.rows = sum(each.rows for each in found)
        # Drop the transactions of failed attempts, because they can never be committed.
        for each in rows.find(records.Transaction, STAGED, *key, batch):
            if each.id not in parts:
                _drop(rows, application, each)
        rows.save(application)
        rows.save(stream)
        rows.changed(key.stream)
        return records.Committed(duplicate=False, rows=application.rows, head=stream.head)

    async def abort(self, key: records.Key, batch: int, ids: Iterable[str]) -> int:
        """Delete these transactions of a batch, and return how many there were. A committed batch isn't changed."""
        return await self._abort(key, batch, tuple(ids))

    @unit_of_work
    def _abort(self, rows: Rows, key: records.Key, batch: int, ids: tuple[str, ...]) -> int:
        application = self._application(rows, key)
        dropped = 0
        for id in ids:
            found = rows.get(records.Transaction, id)
            if found is not None and found.base is None and (found.key, found.batch) == (key, batch):
                _drop(rows, application, found)
                dropped += 1
        if dropped:
            rows.save(application)
        return dropped

    # ------------------------------------------------------------------------ cleaning up

    async def sweep(self) -> int:
        """Delete expired transactions and applications, and return the number of transactions.

        Call this every few seconds. `StagingService.sweep` does so.
        """

        async def overdue(kind: type[RecordT], also: str = "") -> list[RecordT]:
            condition = f"due IS NOT NULL AND due <= ?{also} LIMIT ?"
            return await self._backend.work("", lambda rows: rows.find(kind, condition, self._now(), SWEPT_AT_ONCE))

        dropped = 0
        while transactions := await overdue(records.Transaction):
            for transaction in transactions:
                dropped += await self._sweep(transaction.id, transaction.key)
        while applications := await overdue(records.Application, " AND transactions = 0"):
            for application in applications:
                await self._forget(application.key)
        # The portions are small, so that a commit doesn't have to wait for long.
        while await self._backend.work("", lambda rows: rows.purge()):
            pass
        while await self._backend.work("", lambda rows: rows.shrink()):
            pass
        return dropped

    @unit_of_work
    def _sweep(self, rows: Rows, id: str, key: records.Key) -> bool:
        """Delete a transaction if it has expired. Return True if it had."""
        application = self._application(rows, key)
        found = rows.get(records.Transaction, id)
        if found is None or not self._is_over(found):
            return False
        _drop(rows, application, found)
        rows.save(application)
        return True

    @unit_of_work
    def _forget(self, rows: Rows, key: records.Key) -> None:
        """Delete an application for a single batch if it is still expired."""
        found = rows.get(records.Application, *key, locked=True)
        if found is not None and found.due is not None and not found.transactions and found.due <= self._now():
            rows.remove(records.Application, *key)

    # ------------------------------------------------------------------------ the stream

    @unit_of_work
    def read(self, rows: Rows, stream: str, after: int, *, most_bytes: int = READ_BYTES) -> records.Published | None:
        """Return rows after the id `after`, or None if there are none yet. 0 starts at the first row.

        The result has at least one row, and about `most_bytes` at most.

        Raises:
            RowsGone: if `after` is below the trimmed rows or beyond the end of the stream.
        """
        known = rows.get(records.Stream, stream) or records.Stream(stream)
        if not known.trimmed <= after <= known.head:
            raise RowsGone(
                f"stream {stream!a}: rows behind {after} were asked for; those that there are begin behind "
                f"{known.trimmed}, and end with {known.head}"
            )
        if after == known.head:
            return None
        found = next(iter(rows.find(records.Transaction, PUBLISHED, stream, after + 1)), None)
        if found is None or found.base is None:
            raise StoreCorrupt(
                f"stream {stream!a}: row {after + 1} is missing, though {known.head} were committed and only "
                f"{known.trimmed} trimmed; restore the store from a copy"
            )
        got: list[bytes] = []
        row = after - found.base
        for block in rows.blocks(found.id, row, most_bytes):
            if not block.first <= row + len(got) < block.first + block.rows:
                raise StoreCorrupt(f"stream {stream!a}: rows behind {after + len(got)} are missing")
            got.extend(records.rows_of(block)[row + len(got) - block.first :])
        return records.Published(after + 1, found.encoding, got)

    async def wait(self, stream: str, after: int) -> None:
        """Sleep until there is a row after `after`."""
        while True:
            with self._waiters.watching(stream) as changed:
                if await self.head(stream) > after:
                    return
                with trio.move_on_after(self._poll_interval or float("inf")):
                    await changed.wait()

    async def trim(self, stream: str, upto: int) -> None:
        """Delete the rows up to this id. Space becomes free by whole transactions, during `sweep`.

        Raises:
            RowsGone: if the stream is shorter.
        """
        while await self._trim(stream, upto):
            pass

    @unit_of_work
    def _trim(self, rows: Rows, name: str, upto: int) -> bool:
        """Delete some of the rows up to this id. Return True if there are more to delete."""
        stream = rows.get(records.Stream, name, locked=True) or records.Stream(name)
        if upto > stream.head:
            raise RowsGone(f"stream {name!a}: rows up to {upto} were to go, and it ends with {stream.head}")
        last = max(upto, stream.trimmed)
        gone = rows.find(records.Transaction, PASSED, name, last, last, SWEPT_AT_ONCE)
        for each in gone:
            rows.remove_transaction(each.id)
        if upto > stream.trimmed:
            stream.trimmed = upto
            rows.save(stream)
        return len(gone) == SWEPT_AT_ONCE

    @unit_of_work
    def head(self, rows: Rows, stream: str) -> int:
        """Return the last id of a stream, or 0 before the first row."""
        found = rows.get(records.Stream, stream)
        return 0 if found is None else found.head

    @unit_of_work
    def progress(self, rows: Rows, key: records.Key) -> records.BatchProgress:
        """Return the progress of an application in a stream."""
        application = rows.get(records.Application, *key, locked=True) or records.Application(*key)
        stream = rows.get(records.Stream, key.stream) or records.Stream(key.stream)
        return records.BatchProgress(
            batch=None if application.batch == records.NO_BATCH else application.batch,
            rows=application.rows,
            staged=application.staged,
            transactions=application.transactions,
            head=stream.head,
            trimmed=stream.trimmed,
        )

    # ------------------------------------------------------------------------ helpers

    def _application(self, rows: Rows, key: records.Key) -> records.Application:
        found = rows.get(records.Application, *key, locked=True)
        if found is not None:
            return found
        if (count := rows.applications()) >= self.limits.applications:
            raise StagingFull(
                f"{key}: {count:,} applications are all that StagingLimits(applications={self.limits.applications}) "
                "allows; use one txnAppId for what is one application, or raise it"
            )
        return records.Application(*key)

    def _staged(self, rows: Rows, id: str, key: records.Key, batch: int) -> records.Transaction:
        found = rows.get(records.Transaction, id)
        if found is None or found.base is not None or self._is_over(found):
            raise TransactionGone(
                f"{key}, batch {batch}: transaction {id} is not staged any more: it was aborted, or untouched for its "
                "txnTtl, and has to be written again"
            )
        if (found.key, found.batch) != (key, batch):
            raise TransactionConflict(
                f"{key}, batch {batch}: transaction {id} was begun for {found.key}, batch {found.batch}"
            )
        return found

    def _new(self, rows: Rows, found: records.Transaction, blocks: Sequence[records.Block]) -> list[records.Block]:
        lowest, highest = min(block.first for block in blocks), max(block.first for block in blocks)
        present = {span[0]: span for span in rows.spans(found.id, lowest, highest)}
        new: dict[int, records.Block] = {}
        for block in blocks:
            known = present.get(block.first)
            if known is None:
                new[block.first] = block
                present[block.first] = block[:3]
            elif known != block[:3]:
                raise TransactionConflict(f"{found}: other rows came for row {block.first} than before")
        return list(new.values())

    def _committable(self, rows: Rows, id: str, key: records.Key, batch: int, count: int) -> records.Transaction:
        try:
            found = self._staged(rows, id, key, batch)
        except (TransactionGone, TransactionConflict) as error:
            raise NotCommitted(f"{error}; nothing was committed") from error
        if not found.prepared or found.rows != count:
            state = "prepared" if found.prepared else "not prepared"
            raise NotCommitted(
                f"{key}, batch {batch}: transaction {id} is {state} with {found.rows:,} rows, and {count:,} are to be "
                "committed; nothing was committed"
            )
        return found

    def _is_over(self, found: records.Transaction) -> bool:
        return found.due is not None and found.due <= self._now()


def _drop(rows: Rows, application: records.Application, found: records.Transaction) -> None:
    rows.remove_transaction(found.id)
    application.staged -= found.size
    application.transactions -= 1
