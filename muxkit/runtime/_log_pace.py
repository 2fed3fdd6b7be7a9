"""Limits how often the log lines that peers can cause are written, so that nobody can fill a disk with them.

A peer that breaks a rule costs one line, and it may reconnect a thousand times per second. Sessions, listeners and
handlers ask `may_log` before they write such a line. All of them in one Trio run share the allowance of its kind.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from muxkit.core import TokenBucket

LINES_AT_ONCE: Final = 50  # per kind; more than anybody reads, and less than 10 KiB
LINES_PER_SECOND: Final = 1.0  # per kind; about 10 MB per day
TRACEBACK_EVERY: Final = 60.0  # s between two tracebacks from the same place
MAX_PLACES: Final = 1024  # that are remembered; the code of a program has fewer places that fail

_log = logging.getLogger("muxkit")


class LogPace:
    """The allowances of one Trio run, by the kind of the line, and the tracebacks that were logged lately."""

    def __init__(self) -> None:
        self._allowances: dict[str, TokenBucket] = {}
        self._left_out: dict[str, int] = {}
        self._traced: dict[str, float] = {}

    def may_log(self, kind: str, now: float) -> bool:
        """Take one line of this kind from the allowance. Log how many were left out before, if any were."""
        allowance = self._allowances.get(kind)
        if allowance is None:
            allowance = self._allowances[kind] = TokenBucket(LINES_PER_SECOND, LINES_AT_ONCE)
        if not allowance.take(now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        if left_out := self._left_out.pop(kind, 0):
            # log: Peers caused more lines of this kind than muxkit writes: 50 at once, and one per second after that.
            # The number says how many were left out since the last line of the kind.
            _log.warning("%s: %d more were too many to log each of them", kind, left_out)
        return True

    def may_trace(self, place: str, now: float) -> bool:
        """Return True if no traceback from this place was logged in the last `TRACEBACK_EVERY` seconds."""
        logged_at = self._traced.get(place)
        if logged_at is not None and now < logged_at + TRACEBACK_EVERY:
            return False
        if len(self._traced) >= MAX_PLACES:
            self._traced.clear()
        self._traced[place] = now
        return True


_PACE: Final = trio.lowlevel.RunVar[LogPace]("muxkit log pace")


def _pace() -> LogPace:
    try:
        return _PACE.get()
    except LookupError:
        made = LogPace()
        _PACE.set(made)
        return made


def may_log(kind: str) -> bool:
    """Return True if a log line of this kind, which a peer caused, may be written now.

    `kind` is a constant that a reader of the log understands, such as "peers that broke a rule". Lines that are left
    out are counted, and the next line of the kind is preceded by their number.
    """
    return _pace().may_log(kind, trio.current_time())


def may_trace(place: str) -> bool:
    """Return True if a failure at this place may be logged with its traceback, which happens once per minute."""
    return _pace().may_trace(place, trio.current_time())
