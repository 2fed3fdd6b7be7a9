"""The errors of the pipeline; each sentence has the option, the stream and the ids that it is about.

Spark shows the text of such an error only, so a single exception is raised, never a group.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from muxkit._errors import MuxError

if TYPE_CHECKING:
    from collections.abc import Iterator


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


class StreamUnavailable(PipelineError):
    """A stream could not be reached or read within the time of an option; its messages are not lost."""

    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(stream, problem)
        self.stream = stream

    def __str__(self) -> str:
        return f"stream {self.args[0]}: {self.args[1]}"


class StreamBroken(PipelineError):
    """A server broke the rules of its protocol: a gap, a repeat, no JSON, a wrong CRC; its text has the ids."""

    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(stream, problem)
        self.stream = stream

    def __str__(self) -> str:
        return f"stream {self.args[0]}: {self.args[1]}"


class DataLoss(PipelineError):
    """Messages that this query has not read are gone, or are not those that it knew.

    `stream` says of which; the text has the ids. The option `failOnDataLoss=false` goes on with what is left.
    """

    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(stream, problem)
        self.stream = stream

    def __str__(self) -> str:
        return (
            f"stream {self.args[0]}: {self.args[1]}; option failOnDataLoss=false would log this "
            "and go on with the oldest message that is left"
        )


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group of exceptions; anything else unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the first leaf of a group that leaves the block, without the group."""
    told: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        told = first_error(group)
    if told is not None:
        raise told.with_traceback(None) from None
