"""The rules of a staging store: what each operation checks, and what it changes in the rows.

They are the same for every kind of store. Each function is one unit of work and may be repeated, so a caller that does
not know whether it was done calls it again. There is no Trio and no disk here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from muxkit.pipeline.staging.store.errors import (
    NotCommitted,
    RowsGone,
    StagingFull,
    TransactionConflict,
    TransactionGone,
)
from muxkit.pipeline.staging.store.rows import (
    NO_BATCH,
    Application,
    Block,
    Encoding,
    Key,
    Rows,
    Span,
    StagingLimits,
    Stream,
    Transaction,
)
from muxkit.storage import StoreCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Now = Callable[[], float]  # seconds since 1970, like `time.time`; called in any thread


@attrs.frozen(kw_only=True)
class Commit:
    """The result of a commit."""

    duplicate: bool
    """The batch, or a later one, was committed before: this call did nothing."""
    rows: int
    head: int
    """The last id of the stream."""


@attrs.frozen(kw_only=True)
class BatchProgress:
    """The progress of an application in a stream."""

    batch: int | None
    """The last committed one."""
    rows: int
    """The number of rows of that batch."""
    staged: int
    """Bytes that are staged and not committed."""
    transactions: int
    head: int
    """The last id of the stream."""
    trimmed: int
    """The last id that may be deleted."""


@attrs.frozen
class Published:
    """Consecutive rows of a stream; the first of them has the id `first`."""

    first: int
    encoding: Encoding
    rows: list[bytes]


@attrs.frozen(eq=False)
class Rules:
    """The rules, with the limits and the clock."""

    limits: StagingLimits
    now: Now

    # ------------------------------------------------------------------------ the first phase

    def begin(self, rows: Rows, id: str, key: Key, batch: int, encoding: Encoding, ttl: float, *, once: bool) -> bool:
        """Begin a transaction, or continue it. False: the batch is committed, and there is nothing to write."""
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = rows.transaction(id)
        if found is not None and not self._is_over(found):
            if (found.key, found.batch, found.encoding) != (key, batch, encoding):
                raise TransactionConflict(
                    f"{key}, batch {batch}: transaction {id} was begun for {found.key}, batch {found.batch}, "
                    f"with rows of {found.encoding.value}"
                )
            found.due = self.now() + found.ttl
            rows.save_transaction(found)
            return True
        if application.transactions - (found is not None) >= self.limits.transactions:
            raise StagingFull(
                f"{key}, batch {batch}: {application.transactions:,} transactions are staged and not committed, all "
                f"that StagingLimits(transactions={self.limits.transactions}) allows; use fewer partitions, let the "
                "failed ones be swept (txnTtl), or raise it"
            )
        if found is not None:
            self._drop(rows, application, found)
        rows.reclaim(id)
        ttl = min(ttl, self.limits.ttl)
        due = self.now() + ttl
        rows.save_transaction(Transaction(id, key, batch, encoding, ttl, due))
        application.transactions += 1
        application.due = due if once else None
        rows.save_application(application)
        return True

    def put(self, rows: Rows, id: str, key: Key, batch: int, blocks: Sequence[Block]) -> bool:
        """Add blocks to a transaction; existing ones stay as they are. False: its batch is committed."""
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = self._staged(rows, id, key, batch)
        new = self._new(rows, found, blocks)
        if new and found.prepared:
            raise TransactionConflict(f"{_named(found)}: rows came after it was prepared with {found.rows:,} rows")
        size = sum(len(block.body) for block in new)
        if application.staged + size > self.limits.staged:
            raise StagingFull(
                f"{_named(found)}: {application.staged:,} bytes are staged and not committed, and {size:,} more would "
                f"pass StagingLimits(staged={self.limits.staged}); write smaller batches, let what failed be swept "
                "(txnTtl), or raise it"
            )
        rows.add(id, new)
        found.rows += sum(block.rows for block in new)
        found.size += size
        found.due = self.now() + found.ttl
        rows.save_transaction(found)
        application.staged += size
        rows.save_application(application)
        return True

    def prepare(self, rows: Rows, id: str, key: Key, batch: int, count: int) -> bool:
        """Promise that the transaction can be committed with `count` rows. False: its batch is committed."""
        application = self._application(rows, key)
        if batch <= application.batch:
            return False
        found = self._staged(rows, id, key, batch)
        whole = 0
        for span in rows.spans(id, 0, count):
            if span.first != whole:
                break
            whole += span.rows
        if whole != count or found.rows != count:
            raise NotCommitted(
                f"{_named(found)}: {found.rows:,} rows are staged, {whole:,} of them without a gap, and {count:,} were "
                "announced"
            )
        found.prepared = True
        found.due = self.now() + found.ttl
        rows.save_transaction(found)
        return True

    # ------------------------------------------------------------------------ the second phase

    def commit(self, rows: Rows, key: Key, batch: int, parts: Mapping[str, int]) -> Commit:
        """Add all of these transactions to the stream, or none. `parts`: the number of rows of each."""
        application = self._application(rows, key)
        if batch <= application.batch:
            stream = rows.look_at_stream(key.stream) or Stream(key.stream)
            count = application.rows if batch == application.batch else 0
            return Commit(duplicate=True, rows=count, head=stream.head)
        found = [self._committable(rows, id, key, batch, count) for id, count in parts.items()]
        stream = rows.stream(key.stream) or Stream(key.stream)
        if application.due is not None:  # long enough for a client that missed the answer to ask again
            application.due = self.now() + max((each.ttl for each in found), default=0.0)
        for each in found:
            each.base, each.due = stream.head, None
            stream.head += each.rows
            application.staged -= each.size
            application.transactions -= 1
            rows.save_transaction(each)
        application.batch = batch
        application.rows = sum(each.rows for each in found)
        # The transactions of failed attempts can never be committed.
        for each in rows.staged(key, batch):
            if each.id not in parts:
                self._drop(rows, application, each)
        rows.save_application(application)
        rows.save_stream(stream)
        rows.changed(key.stream)
        return Commit(duplicate=False, rows=application.rows, head=stream.head)

    def abort(self, rows: Rows, key: Key, batch: int, ids: Iterable[str]) -> int:
        """Delete those of these transactions that are staged for this batch; return how many. Committed ones stay."""
        application = self._application(rows, key)
        dropped = 0
        for id in ids:
            found = rows.transaction(id)
            if found is not None and found.base is None and (found.key, found.batch) == (key, batch):
                self._drop(rows, application, found)
                dropped += 1
        if dropped:
            rows.save_application(application)
        return dropped

    def overdue(self, rows: Rows, most: int) -> list[Transaction]:
        return rows.overdue(self.now(), most)

    def sweep(self, rows: Rows, id: str, key: Key) -> bool:
        """Delete a transaction if it is expired; return True if it was."""
        application = self._application(rows, key)
        found = rows.transaction(id)
        if found is None or not self._is_over(found):
            return False
        self._drop(rows, application, found)
        rows.save_application(application)
        return True

    def overdue_applications(self, rows: Rows, most: int) -> list[Key]:
        return rows.overdue_applications(self.now(), most)

    def forget(self, rows: Rows, key: Key) -> bool:
        """Delete an expired application that was for one batch only; return True if it was."""
        application = rows.application(key)
        if application is None or application.due is None or application.transactions:
            return False
        if application.due > self.now():
            return False
        rows.remove_application(key)
        return True

    # ------------------------------------------------------------------------ the stream

    def read(self, rows: Rows, stream: str, after: int, most_bytes: int) -> Published | None:
        """Return rows after the id `after`, or None if there are none yet."""
        known = rows.look_at_stream(stream) or Stream(stream)
        if not known.trimmed <= after <= known.head:
            raise RowsGone(
                f"stream {stream!a}: rows behind {after} were asked for; those that there are begin behind "
                f"{known.trimmed}, and end with {known.head}"
            )
        if after == known.head:
            return None
        found = rows.published(stream, after + 1)
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
            got.extend(rows_of(block)[row + len(got) - block.first :])
        return Published(after + 1, found.encoding, got)

    def trim(self, rows: Rows, name: str, upto: int, most: int) -> bool:
        """Delete rows up to this id; return True if there are more to delete."""
        stream = rows.stream(name) or Stream(name)
        if upto > stream.head:
            raise RowsGone(f"stream {name!a}: rows up to {upto} were to go, and it ends with {stream.head}")
        gone = rows.passed(name, max(upto, stream.trimmed), most)
        for id in gone:
            rows.remove_transaction(id)
        if upto > stream.trimmed:
            stream.trimmed = upto
            rows.save_stream(stream)
        return len(gone) == most

    def progress(self, rows: Rows, key: Key) -> BatchProgress:
        application = rows.application(key) or Application(key)
        stream = rows.look_at_stream(key.stream) or Stream(key.stream)
        return BatchProgress(
            batch=None if application.batch == NO_BATCH else application.batch,
            rows=application.rows,
            staged=application.staged,
            transactions=application.transactions,
            head=stream.head,
            trimmed=stream.trimmed,
        )

    # ------------------------------------------------------------------------ helpers

    def _application(self, rows: Rows, key: Key) -> Application:
        found = rows.application(key)
        if found is not None:
            return found
        if (count := rows.applications()) >= self.limits.applications:
            raise StagingFull(
                f"{key}: {count:,} applications are all that StagingLimits(applications={self.limits.applications}) "
                "allows; use one txnAppId for what is one application, or raise it"
            )
        return Application(key)

    def _staged(self, rows: Rows, id: str, key: Key, batch: int) -> Transaction:
        found = rows.transaction(id)
        if found is None or found.base is not None or self._is_over(found):
            raise TransactionGone(
                f"{key}, batch {batch}: transaction {id} is not staged any more (it was aborted, or untouched for its "
                "txnTtl); write the partition again"
            )
        if (found.key, found.batch) != (key, batch):
            raise TransactionConflict(
                f"{key}, batch {batch}: transaction {id} was begun for {found.key}, batch {found.batch}"
            )
        return found

    def _new(self, rows: Rows, found: Transaction, blocks: Sequence[Block]) -> list[Block]:
        lowest, highest = min(block.first for block in blocks), max(block.first for block in blocks)
        present = {span.first: span for span in rows.spans(found.id, lowest, highest)}
        new: dict[int, Block] = {}
        for block in blocks:
            known = present.get(block.first)
            if known is None:
                new[block.first] = block
                present[block.first] = Span(*block[:3])
            elif known != block[:3]:
                raise TransactionConflict(f"{_named(found)}: other rows came for row {block.first} than before")
        return list(new.values())

    def _committable(self, rows: Rows, id: str, key: Key, batch: int, count: int) -> Transaction:
        found = rows.transaction(id)
        if found is None or found.base is not None or self._is_over(found):
            raise NotCommitted(
                f"{key}, batch {batch}: transaction {id} is not staged any more (it was aborted, or untouched for its "
                "txnTtl); nothing was committed, the batch has to be written again"
            )
        if (found.key, found.batch) != (key, batch):
            raise NotCommitted(
                f"{key}, batch {batch}: transaction {id} was staged for {found.key}, batch {found.batch}; nothing was "
                "committed"
            )
        if not found.prepared or found.rows != count:
            state = "prepared" if found.prepared else "not prepared"
            raise NotCommitted(
                f"{key}, batch {batch}: transaction {id} is {state} with {found.rows:,} rows, and {count:,} are to be "
                "committed; nothing was committed"
            )
        return found

    def _drop(self, rows: Rows, application: Application, found: Transaction) -> None:
        rows.remove_transaction(found.id)
        application.staged -= found.size
        application.transactions -= 1

    def _is_over(self, found: Transaction) -> bool:
        return found.due is not None and found.due <= self.now()


def rows_of(block: Block) -> list[bytes]:
    """Return the rows of a valid block."""
    lengths = struct.unpack_from(f"<{block.rows}I", block.body)
    got: list[bytes] = []
    at = 4 * block.rows
    for length in lengths:
        got.append(block.body[at : at + length])
        at += length
    return got


def _named(found: Transaction) -> str:
    return f"{found.key}, batch {found.batch}: transaction {found.id}"
