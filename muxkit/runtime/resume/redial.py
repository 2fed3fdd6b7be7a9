"""Reconnects when a connection is lost: immediately after a connection that worked, and with pauses after failures.

`redial` is for clients whose sessions outlive a connection, such as those of Relink. It opens one connection after
another, and passes each to the caller's function `run`, which runs the session over it. `muxkit.reconnecting`, which
opens a new session for each connection, uses the same rules.

- `Backoff` has the rules for the pauses.
- `Outage` contains the reason why there is no connection at the moment, for the tasks that wait for one.
- `OutageLog` writes the log lines about failed attempts.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import Enum

import attrs
import trio

from muxkit._settings import NOT_NEGATIVE
from muxkit.runtime._errors import RETRIED_ERRORS, can_heal
from muxkit.runtime._scope import close_at_once

Dial = Callable[[], AbstractAsyncContextManager[trio.abc.Stream]]
"""A function that returns a context manager, which opens a connection, and closes it when the block ends."""


class Ended(Enum):
    """How one connection has ended. The caller's function `run` returns it."""

    DONE = "there is nothing left to do: no more dialling"
    WORKED = "it is gone, and it had brought the work forward: dial again at once"
    LOST = "it is gone: dial again at once if it had held for `Backoff.brief`, after a pause otherwise"


Run = Callable[[trio.abc.Stream], Awaitable[Ended | Exception]]
"""A function that runs the session over one connection, until the connection ends.

It returns how the connection has ended, or an exception if the connection counts as a failed attempt. An exception that
it raises ends `redial`.
"""

OnFailed = Callable[[Exception, float], None]
"""A function that is called after each failed attempt, with the error and the seconds until the next attempt."""

_log = logging.getLogger("muxkit")

SHORTEST_SHOWN = 0.05  # seconds; a shorter pause would be logged as 0.0 s
BRIEF_CONNECTIONS = 8  # number of brief connections in a row after which `breath` applies


def _seconds(default: float) -> float:
    number: float = attrs.field(default=default, validator=NOT_NEGATIVE)
    return number


class _ModuleRandom(random.Random):
    """Returns the numbers of the module `random`, so that a program can repeat its pauses with `random.seed`."""

    def random(self) -> float:
        return random.random()

    def getrandbits(self, k: int, /) -> int:
        return random.getrandbits(k)


@attrs.frozen(kw_only=True)
class Backoff:
    """The pauses after failed attempts. All times are in seconds.

    A pause is the sum of `least` and a random number. The random number is between 0 and a maximum that doubles with
    each failure ("full jitter"). So clients that have lost the same server don't all reconnect at the same time.
    """

    first: float = _seconds(0.1)
    """The maximum of the random part after the first failure."""
    most: float = _seconds(30.0)
    """The longest possible pause."""
    least: float = _seconds(0.0)
    """The shortest possible pause, for protocols that demand one."""
    stable: float = _seconds(30.0)
    """A connection that has lasted this long resets the number of failures."""
    brief: float = _seconds(1.0)
    """A connection that was lost sooner than this counts as a failure. Otherwise, a client would reconnect without a
    pause to a server that hangs up on every client."""
    random: random.Random = attrs.field(factory=_ModuleRandom, eq=False, repr=False)
    """The source of the random numbers. Use a seeded one to get the same pauses each time."""

    def __attrs_post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"Backoff(most={self.most}) is below least={self.least}")

    def wait(self, failures: int) -> float:
        """Return the pause after this number of failures in a row, which is at least 1."""
        # After 64 doublings the maximum is larger than any `most`, and the number can't overflow.
        bound = min(self.most - self.least, self.first * 2.0 ** min(failures - 1, 64))
        return self.least + self.random.uniform(0.0, bound)


@attrs.define
class Outage:
    """The recent failures of `redial`, for tasks that wait for a connection."""

    failures: int = 0
    """The number of failed attempts since the last connection that lasted for `Backoff.stable`."""
    last: Exception | None = None
    """The error of the last attempt, or None if the last connection worked."""

    def over(self) -> None:
        """Forget the last error, because a connection works."""
        self.last = None

    @contextmanager
    def fail_after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Limit the time of a block like `trio.fail_after`. The last failure is the cause of the `TooSlowError`."""
        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            yield scope
        if scope.cancelled_caught:
            because = "" if self.last is None else f": {self.last}"
            raise trio.TooSlowError(f"not within {seconds:g} s{because}") from self.last


class OutageLog:
    """Logs the failed attempts of an outage.

    The first failure is a WARNING, and so is one each time that the outage has doubled in length. The others are DEBUG.
    """

    def __init__(self, what: str, *, patience: float | None = None) -> None:
        self._what = what
        self._limit = "no time limit" if patience is None else f"giving up after {patience:g} s"
        self._began: float | None = None
        self._next = 0.0  # seconds of outage after which the next warning is due

    def failed(self, error: Exception, pause: float) -> None:
        """Log a failed attempt. The next attempt follows after `pause` seconds."""
        now = trio.current_time()
        if self._began is None:
            self._began = now
        lasted = now - self._began
        is_due = lasted >= self._next
        if is_due:
            self._next = max(2 * lasted, 1.0)
        what = str(error).removeprefix(f"{self._what}: ")
        if lasted >= 1.0:
            what = f"no connection for {lasted:.0f} s: {what}"
        when = "reconnecting now" if pause < SHORTEST_SHOWN else f"trying again in {pause:.1f} s"
        level = logging.WARNING if is_due else logging.DEBUG
        # log WARNING, DEBUG: A connection failed or was lost, such as `bpmux+tcp://127.0.0.1:7000: connection lost
        # after 0.88 s; reconnecting now (no time limit)`. WARNING for the first failure of an outage and each time the
        # outage has doubled in length, DEBUG for the failures in between.
        _log.log(level, "%s: %s; %s (%s)", self._what, what, when, self._limit)

    def over(self) -> None:
        """Log that there is a connection again, if there was an outage."""
        if self._began is not None:
            # log: The outage is over.
            _log.info("%s: connected again after %.0f s", self._what, trio.current_time() - self._began)
        self._began, self._next = None, 0.0


async def redial(
    dial: Dial,
    run: Run,
    *,
    backoff: Backoff | None = None,
    on_failed: OnFailed | None = None,
    outage: Outage | None = None,
    breath: float = 0.0,
) -> None:
    """Open one connection after another and run each, until `run` returns `Ended.DONE`.

    A connection is closed when its `run` has returned, before the next one is opened. There is no time limit. Cancel
    this function to stop it, or use it inside `outage.fail_after`.

    Args:
        dial: Opens a connection.
        run: Runs the session over a connection.
        backoff: The pauses after failed attempts.
        on_failed: Called after each failed attempt.
        outage: Updated with the failures.
        breath: If more than 8 connections in a row have worked, but were shorter than `Backoff.brief`, each is followed
            by a random pause of at most this many seconds.

    Raises:
        Exception: An error of `dial`, or one that `run` returned, that another attempt wouldn't heal (see `can_heal`).
            Errors that `run` raises.
    """
    policy = backoff or Backoff()
    trouble = outage or Outage()
    short = 0  # number of connections in a row that worked but were brief
    while True:
        connected, ended, lived = await _attempt(dial, run)
        if connected and lived >= policy.stable:
            trouble.failures = 0
        if ended is Ended.DONE:
            return
        if ended is Ended.WORKED or (ended is Ended.LOST and lived >= policy.brief):
            trouble.last = None
            short = short + 1 if lived < policy.brief else 0
            if short > BRIEF_CONNECTIONS and breath:
                await trio.sleep(policy.random.uniform(0.0, min(policy.first, breath)))
            continue
        failure = ended if isinstance(ended, Exception) else ConnectionError(f"connection lost after {lived:.2f} s")
        if not can_heal(failure):
            raise failure
        trouble.failures += 1
        trouble.last = failure
        pause = policy.wait(trouble.failures)
        if on_failed is not None:
            on_failed(failure, pause)
        await trio.sleep(pause)


async def _attempt(dial: Dial, run: Run) -> tuple[bool, Ended | Exception, float]:
    """Open and run one connection.

    Returns:
        True if a connection was opened, how it ended or the error, and how many seconds it lasted.
    """
    ended: Ended | Exception | None = None
    ran = False
    began = over = trio.current_time()
    try:
        async with dial() as stream:
            ran = True
            began = trio.current_time()
            ended = await run(stream)
            over = trio.current_time()
            if ended is not Ended.DONE:
                # Close the stream without waiting, because the peer may not answer any more.
                await close_at_once(stream)
    except RETRIED_ERRORS as error:
        if not ran:
            return False, error, 0.0
        if ended is None:
            raise  # `run` has raised the error
        # The error occurred while the connection was closed, so it doesn't matter.
    if ended is None:
        raise RuntimeError("dial swallowed an error that ended a connection")
    return True, ended, over - began
