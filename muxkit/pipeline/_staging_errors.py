"""What can a staging server refuse? One class for each, and sentences that say what to do.

Each names the stream, the application and the batch that it is about. To a client the class travels as its `kind`.
"""

from __future__ import annotations

from typing import ClassVar

from muxkit.pipeline.errors import PipelineError


class StagingError(PipelineError):
    """Everything that staging raises on its own account."""

    kind: ClassVar[str] = "failed"


class TransactionGone(StagingError):
    """The transaction is not staged: it was never begun, was aborted or swept, or its batch is committed."""

    kind = "gone"


class TransactionConflict(StagingError):
    """The transaction is there and is another one: its batch, its stream or its rows are not those that were sent."""

    kind = "conflict"


class NotCommitted(StagingError):
    """A commit that did not fit what is staged. Nothing of the batch was committed."""

    kind = "uncommitted"


class StagingFull(StagingError):
    """A bound of `StagingLimits`, or the disk. What was to be added was not."""

    kind = "full"


class StagingRefused(StagingError):
    """The server does not let this client do that."""

    kind = "refused"


class StagingRequestInvalid(StagingError):
    """What came is no request, or no block of rows."""

    kind = "invalid"


class StagingUnavailable(StagingError):
    """There is no answer to be had now: no connection, or a server whose store is in trouble. May be tried again."""

    kind = "unavailable"


class RowsGone(StagingError):
    """Rows of a stream were asked for that were trimmed, or that do not exist yet."""

    kind = "rows-gone"


KINDS: dict[str, type[StagingError]] = {
    each.kind: each
    for each in (
        StagingError,
        TransactionGone,
        TransactionConflict,
        NotCommitted,
        StagingFull,
        StagingRefused,
        StagingRequestInvalid,
        StagingUnavailable,
        RowsGone,
    )
}
