"""The errors of the pipeline; each sentence has the option, the stream and the ids that it is about.

Spark shows the text of such an error only, so a single exception is raised, never a group.
"""

from __future__ import annotations

from typing import ClassVar

from muxkit._errors import MuxError


class PipelineError(MuxError):
    """Base of what the pipeline raises itself."""


class OptionError(PipelineError, ValueError):
    """An option that is missing or has an invalid value; `option` is its name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(option, problem)
        self.option = option

    def __str__(self) -> str:
        return f"option {self.args[0]}: {self.args[1]}"


class OffsetError(PipelineError):
    """An offset that this version cannot read: from a newer version, or from another source."""


class _StreamError(PipelineError):
    """An error about one stream, whose uuid is `stream`."""

    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(stream, problem)
        self.stream = stream

    def __str__(self) -> str:
        return f"stream {self.args[0]}: {self.args[1]}"


class StreamUnavailable(_StreamError):
    """A stream could not be reached or read within the time of an option; its messages are not lost.

    `can_heal` is False if trying again would not help, such as with a certificate that was refused.
    """

    def __init__(self, stream: str, problem: str, *, can_heal: bool = True) -> None:
        super().__init__(stream, problem)
        self.can_heal = can_heal


class StreamBroken(_StreamError):
    """A server broke the rules of its protocol: a gap, a repeat, no JSON, a wrong CRC; its text has the ids."""


class DataLoss(_StreamError):
    """Messages that this query has not read are gone, or are not those that it knew.

    `stream` says of which; the text has the ids. `acknowledged` is the last message that the server may have deleted,
    if it said so. The option `failOnDataLoss=false` goes on with what is left.
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
    """A capture could not be written, and from then on nothing more was recorded; or a file could not be read."""


# ---------------------------------------------------------------------------- staging

STAGING_ERRORS: dict[str, type[StagingError]] = {}
"""The classes by their names on the wire."""


class StagingError(PipelineError):
    """The base of all errors that staging raises on its own account; each names stream, application and batch."""

    kind: ClassVar[str] = "failed"
    """The name of the class on the wire."""

    def __init_subclass__(cls, kind: str = "failed") -> None:
        cls.kind = kind
        STAGING_ERRORS.setdefault(kind, cls)


class TransactionGone(StagingError, kind="gone"):
    """The transaction is not staged: it was never begun, was aborted or deleted, or its batch is committed."""


class TransactionConflict(StagingError, kind="conflict"):
    """The transaction exists with another batch, another stream or other rows than those that were sent."""


class NotCommitted(StagingError, kind="uncommitted"):
    """The commit does not match the staged rows. Nothing of the batch was committed."""


class StagingFull(StagingError, kind="full"):
    """A limit of `StagingLimits` is reached. Nothing was added."""


class StagingRefused(StagingError, kind="refused"):
    """The server does not allow this client to do that."""


class StagingRequestInvalid(StagingError, kind="invalid"):
    """The received bytes are no request, or no block of rows."""


class StagingUnavailable(StagingError, kind="unavailable"):
    """There is no connection, or the store of the server has failed. The call may be repeated."""


class RowsGone(StagingError, kind="rows-gone"):
    """The requested rows were trimmed, or do not exist yet."""


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group of exceptions; anything else unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
