"""Exit codes, and the errors that they stand for."""

from __future__ import annotations

from enum import IntEnum

import trio

from muxkit import LinkLost, MuxError, RemoteProtocolError
from muxkit.runtime import leaves_of


class Exit(IntEnum):
    """The exit codes of `muxkit`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_CONNECTED = 3
    VIOLATION = 4
    TIMED_OUT = 5
    INTERRUPTED = 130


# Of several errors, the one that comes first here is reported; it usually caused the others.
TELLING = (Exit.INTERRUPTED, Exit.VIOLATION, Exit.NOT_CONNECTED, Exit.TIMED_OUT, Exit.USAGE, Exit.FAILED)


class CommandFailed(Exception):
    """A command failed: a sentence for people, and an exit code."""

    def __init__(self, sentence: str, exit: Exit = Exit.FAILED) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit = exit


def failure_of(error: BaseException) -> CommandFailed | None:
    """Return the sentence and the exit code of an error, or None if it is unexpected and needs its traceback."""
    failures = [_failure(leaf) for leaf in leaves_of(error)]
    known = [failure for failure in failures if failure is not None]
    if len(known) < len(failures):
        return None
    return min(known, key=lambda failure: TELLING.index(failure.exit))


def _failure(error: BaseException) -> CommandFailed | None:
    match error:
        case CommandFailed():
            return error
        case KeyboardInterrupt():
            return CommandFailed("interrupted", Exit.INTERRUPTED)
        case RemoteProtocolError():
            return CommandFailed(str(error), Exit.VIOLATION)
        case LinkLost() if isinstance(error.__cause__, RemoteProtocolError):
            return CommandFailed(str(error), Exit.VIOLATION)
        case trio.TooSlowError() | TimeoutError():
            return CommandFailed(str(error) or "it took too long", Exit.TIMED_OUT)
        case MuxError() | OSError() | trio.BrokenResourceError():
            return CommandFailed(str(error) or type(error).__name__)
        case _:
            return None
