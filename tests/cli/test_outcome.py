"""The exit code of each error."""

from __future__ import annotations

import pytest
import trio

import muxkit
from muxkit.cli.terminal import CommandFailed, Exit, failure_of


def lost(cause: BaseException | None = None) -> muxkit.LinkLost:
    error = muxkit.LinkLost("the peer hung up", by="peer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (lost(), Exit.FAILED),
        (lost(muxkit.RemoteProtocolError("bad")), Exit.VIOLATION),
        (muxkit.RemoteProtocolError("bad"), Exit.VIOLATION),
        (muxkit.ChannelStopped("stopped"), Exit.FAILED),
        (trio.TooSlowError("slow"), Exit.TIMED_OUT),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
        (OSError("no space left"), Exit.FAILED),
        (CommandFailed("no peer there", Exit.NOT_CONNECTED), Exit.NOT_CONNECTED),
    ],
    ids=lambda value: repr(value),
)
def test_each_foreseen_error_has_its_exit_code(error: BaseException, code: Exit) -> None:
    failure = failure_of(error)
    assert failure is not None
    assert failure.exit is code


def test_of_many_errors_the_most_telling_one_is_told() -> None:
    group = BaseExceptionGroup("", [lost(), BaseExceptionGroup("", [lost(muxkit.RemoteProtocolError("bad")), lost()])])
    failure = failure_of(group)
    assert failure is not None
    assert failure.exit is Exit.VIOLATION


def test_an_error_that_nobody_foresaw_keeps_its_traceback() -> None:
    assert failure_of(BaseExceptionGroup("", [lost(), AttributeError("a bug")])) is None


def test_a_sentence_is_never_empty() -> None:
    failure = failure_of(trio.BrokenResourceError())
    assert failure is not None
    assert failure.sentence
