"""The deadlines of a connection: the first line has to come in time, and an unfinished line has to grow."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines
from muxkit.protocols.restream.engine.events import Silent

if TYPE_CHECKING:
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.wire.lines import Lines


class Timer(Enum):
    """The deadlines of a connection."""

    FIRST_LINE = "first line"
    """When a client without a first line is refused."""
    STALL = "stall"
    """When to check that an unfinished line has grown."""


class LineTimers:
    """The timers of one connection."""

    def __init__(self, lines: Lines, limits: Limits, observer: Observer | None) -> None:
        self._lines = lines
        self._limits = limits
        self._observer = observer
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._received_before = 0  # bytes at the beginning of the present stall interval

    def next(self) -> float | None:
        return self._deadlines.next

    def expect_first_line(self, now: float) -> None:
        self._deadlines.set(Timer.FIRST_LINE, now + self._limits.handshake)

    def first_line_came(self) -> None:
        self._deadlines.stop(Timer.FIRST_LINE)

    def received(self, now: float) -> None:
        """Bytes came, and their whole lines were handled."""
        if not self._lines.held:
            self._deadlines.stop(Timer.STALL)
        elif Timer.STALL not in self._deadlines:
            self._watch(now)

    def stop(self) -> None:
        """Stop all timers: the connection is ending."""
        for timer in Timer:
            self._deadlines.stop(timer)

    def handle(self, now: float) -> RemoteProtocolError | Silent | None:
        """Handle the due timers; return a violation if the peer was too slow, or `Silent` if nothing came."""
        for timer in self._deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if timer is Timer.FIRST_LINE:
                return self._violation(f"no first line within {self._limits.handshake} s", "handshake")
            came = self._lines.received - self._received_before
            if not came:  # a dead connection looks the same, so this is no violation
                return Silent(self._limits.stall)
            if came < self._limits.stall_bytes:
                least = self._limits.stall_bytes
                what = f"{came} bytes in {self._limits.stall} s while a line is unfinished, {least} are asked"
                return self._violation(what, "stall")
            self._watch(now)
        return None

    def _watch(self, now: float) -> None:
        self._received_before = self._lines.received
        self._deadlines.set(Timer.STALL, now + self._limits.stall)

    def _violation(self, what: str, limit: str) -> RemoteProtocolError:
        return RemoteProtocolError(what, offset=self._lines.offset, limit=limit)
