"""The errors of a staging server, each with a sentence that says what to do.

Each text names the stream, the application and the batch. On the wire a class is sent as its `kind`.
"""

from __future__ import annotations

from typing import ClassVar

from muxkit.pipeline._errors import PipelineError


class StagingError(PipelineError):
    """The base of all errors that staging raises on its own account."""

    kind: ClassVar[str] = "failed"


class TransactionGone(StagingError):
    """The transaction is not staged: it was never begun, was aborted or deleted, or its batch is committed."""

    kind = "gone"


class TransactionConflict(StagingError):
    """The transaction exists with another batch, another stream or other rows than those that were sent."""

    kind = "conflict"


class NotCommitted(StagingError):
    """The commit does not match the staged rows. Nothing of the batch was committed."""

    kind = "uncommitted"


class StagingFull(StagingError):
    """A limit of `StagingLimits` or the disk is full. Nothing was added."""

    kind = "full"


class StagingRefused(StagingError):
    """The server does not allow this client to do that."""

    kind = "refused"


class StagingRequestInvalid(StagingError):
    """The received bytes are no request, or no block of rows."""

    kind = "invalid"


class StagingUnavailable(StagingError):
    """There is no connection, or the store of the server has failed. The call may be repeated."""

    kind = "unavailable"


class RowsGone(StagingError):
    """The requested rows were trimmed, or do not exist yet."""

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
