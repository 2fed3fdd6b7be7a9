"""Dialling again when a connection is lost: at once after a working connection, with pauses after failures.

The engine that survives is the caller's; this brings it one connection after another.
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
"""Returns a context manager that connects when it is entered and closes the connection when it is left."""


class Ended(Enum):
    """How one connection ended, as the caller's `run` sees it."""

    DONE = "there is nothing left to do: no more dialling"
    WORKED = "it is gone, and it had brought the work forward: dial again at once"
    LOST = "it is gone: dial again at once if it had held for `Backoff.brief`, after a pause otherwise"


Run = Callable[[trio.abc.Stream], Awaitable[Ended | Exception]]
"""Runs one connection to its end; an exception that it *returns* says why this connection counts as a failed attempt.

What it raises ends the dialling.
"""

OnFailed = Callable[[Exception, float], None]
"""Told of each failed attempt: the reason, and the seconds until the next one."""

_log = logging.getLogger("muxkit")

SHORTEST_SHOWN = 0.05  # s; a shorter pause would be shown as 0.0 s
BRIEF_CONNECTIONS = 8  # that worked, in a row, before `breath` counts


def _seconds(default: float) -> float:
    number: float = attrs.field(default=default, validator=NOT_NEGATIVE)
    return number


class _ModuleRandom(random.Random):
    """Draws what the module `random` draws, so that `random.seed` repeats the pauses of a program."""

    def random(self) -> float:
        return random.random()

    def getrandbits(self, k: int, /) -> int:
        return random.getrandbits(k)


@attrs.frozen(kw_only=True)
class Backoff:
    """How long to wait after a failed attempt: `least` and a random part, whose bound doubles up to `most` in all.

    Times in seconds. The random part begins at 0 ("full jitter"), so clients that lost the same server do not come
    back together.
    """

    first: float = _seconds(0.1)
    """The bound of the random part after the first failure in a row."""
    most: float = _seconds(30.0)
    """No wait is longer."""
    least: float = _seconds(0.0)
    """No wait is shorter; for protocols that say so."""
    stable: float = _seconds(30.0)
    """A connection that held so long resets the count of failures."""
    brief: float = _seconds(1.0)
    """A connection that was only lost, sooner than this, counts as a failure: otherwise a server that hangs up on
    every client would be dialled without a pause."""
    random: random.Random = attrs.field(factory=_ModuleRandom, eq=False, repr=False)
    """Where the random part comes from; a seeded one repeats it, and so does `random.seed`."""

    def __attrs_post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"Backoff(most={self.most}) is below least={self.least}")

    def wait(self, failures: int) -> float:
        """Return the seconds to wait after the n-th failure in a row, counted from 1."""
        # 2.0 ** 64 doublings are more than any bound, and far from an overflow.
        bound = min(self.most - self.least, self.first * 2.0 ** min(failures - 1, 64))
        return self.least + self.random.uniform(0.0, bound)


@attrs.define
class Outage:
    """What went wrong lately; given to `redial`, and read by tasks that wait for a connection."""

    failures: int = 0
    """Failed attempts since a connection last was stable."""
    last: Exception | None = None
    """Why there is no connection; None if nothing failed since the last good one."""

    def over(self) -> None:
        """Call this when a connection is known to work: earlier failures explain nothing any more."""
        self.last = None

    @contextmanager
    def fail_after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """`trio.fail_after`, whose TooSlowError has the last failure as its cause."""
        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            yield scope
        if scope.cancelled_caught:
            because = "" if self.last is None else f": {self.last}"
            raise trio.TooSlowError(f"not within {seconds:g} s{because}") from self.last


class OutageLog:
    """Logs an outage: a WARNING for its first failure and for each doubling, DEBUG for the others."""

    def __init__(self, what: str, *, patience: float | None = None) -> None:
        self._what = what
        self._limit = "no time limit" if patience is None else f"giving up after {patience:g} s"
        self._began: float | None = None
        self._next = 0.0  # seconds of outage after which the next warning is due

    def failed(self, error: Exception, pause: float) -> None:
        """An attempt failed; the next one follows after `pause` seconds."""
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
        """There is a connection again."""
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
    """Dial and `run` one connection after another, until `run` says that all is done.

    It has no deadline of its own: cancel it, or put `outage.fail_after` around it. Failed attempts are repeated if
    `can_heal` says so. Every other error of `dial` and all that `run` raises come out as they are. A connection is
    closed, at the latest, when its `run` is over, and the next is dialled only then. `breath` bounds the random pause,
    in seconds, that follows each connection that worked when more than 8 in a row were shorter than `Backoff.brief`.
    """
    policy = backoff or Backoff()
    trouble = outage or Outage()
    short = 0  # working connections in a row that were brief
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
    """Run one connection; return whether there was one, how it ended or why it failed, and the seconds it lived."""
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
                # Without a goodbye to a peer that is gone, which could take its time.
                await close_at_once(stream)
    except RETRIED_ERRORS as error:
        if not ran:
            return False, error, 0.0
        if ended is None:
            raise  # it is what `run` raised
        # Trouble with closing changes nothing about how it went.
    if ended is None:
        raise RuntimeError("dial swallowed an error that ended a connection")
    return True, ended, over - began
