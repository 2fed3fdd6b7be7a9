"""The errors of the pipeline. Each text names the option, the stream and the ids that it is about.

Spark shows only the text of an error, so the pipeline raises a single exception and never a group.
"""

from __future__ import annotations

from typing import ClassVar

from muxkit._errors import MuxError


class PipelineError(MuxError):
    """Base class of the errors that the pipeline raises."""


class OptionError(PipelineError, ValueError):
    """Raised for an option that is missing or invalid. `option` is its name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(option, problem)
        self.option = option

    def __str__(self) -> str:
        return f"option {self.args[0]}: {self.args[1]}"


class OffsetError(PipelineError):
    """Raised for an offset that this version can't read, because a newer version or another source wrote it."""


class _StreamError(PipelineError):
    """Base class of errors about one stream. `stream` is its UUID."""

    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(stream, problem)
        self.stream = stream

    def __str__(self) -> str:
        return f"stream {self.args[0]}: {self.args[1]}"


class StreamUnavailable(_StreamError):
    """Raised when a stream couldn't be reached or read within the time of an option. No messages are lost.

    `can_heal` is False if a retry would not help, for example because a certificate was rejected.
    """

    def __init__(self, stream: str, problem: str, *, can_heal: bool = True) -> None:
        super().__init__(stream, problem)
        self.can_heal = can_heal


class StreamBroken(_StreamError):
    """Raised when a server broke its protocol: a gap, a repetition, invalid JSON, or a wrong CRC."""


class DataLoss(_StreamError):
    """Raised when messages that this query hasn't read were deleted, or differ from those that it knew.

    `stream` is the UUID of the stream, and the text has the ids. `acknowledged` is the last message that the server may
    have deleted, or None if the server didn't report it. With the option `failOnDataLoss=false`, the query logs a
    warning and continues with the remaining messages.
    """

    def __init__(self, stream: str, problem: str, *, acknowledged: int | None = None) -> None:
        super().__init__(stream, problem)
        self.acknowledged = acknowledged

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; option failOnDataLoss=false would log this "
            "and go on with the oldest message that is left"
        )


class CaptureError(PipelineError):
    """Raised when a capture couldn't be written, after which nothing was recorded, or when a file couldn't be read."""


# ---------------------------------------------------------------------------- staging

STAGING_ERRORS: dict[str, type[StagingError]] = {}
"""The classes, by their names in messages."""


class StagingError(PipelineError):
    """Base class of the errors that staging raises. The text names the stream, the application and the batch."""

    kind: ClassVar[str] = "failed"
    """The name of the class in messages."""

    def __init_subclass__(cls, kind: str = "failed") -> None:
        cls.kind = kind
        STAGING_ERRORS.setdefault(kind, cls)


class TransactionGone(StagingError, kind="gone"):
    """Raised when a transaction isn't staged: it never began, it was aborted or deleted, or its batch is committed."""


class TransactionConflict(StagingError, kind="conflict"):
    """Raised when a transaction already exists with another batch, another stream or other rows."""


class NotCommitted(StagingError, kind="uncommitted"):
    """Raised when a commit doesn't match the staged rows. Nothing of the batch was committed."""


class StagingFull(StagingError, kind="full"):
    """Raised when a limit of `StagingLimits` is reached. Nothing was added."""


class StagingRefused(StagingError, kind="refused"):
    """Raised when the server doesn't allow this client to do something."""


class StagingRequestInvalid(StagingError, kind="invalid"):
    """Raised when received bytes are neither a valid request nor a valid block of rows."""


class StagingUnavailable(StagingError, kind="unavailable"):
    """Raised when there is no connection, or when the store of the server has failed. The call may be repeated."""


class RowsGone(StagingError, kind="rows-gone"):
    """Raised when requested rows were trimmed or don't exist yet."""


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group. Any other exception is returned unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
