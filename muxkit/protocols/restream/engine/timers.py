"""How long may a line take? A first line has to come in time, and a line that has begun has to go on."""

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
    """When to give up on a client that has not said what it wants."""
    STALL = "stall"
    """When to look whether an unfinished line has grown."""


class Patience:
    """The clock of one connection."""

    def __init__(self, lines: Lines, limits: Limits, observer: Observer | None) -> None:
        self._lines = lines
        self._limits = limits
        self._observer = observer
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._mark = 0  # bytes received when the present span of a stall began

    def next(self) -> float | None:
        return self._deadlines.next

    def expect_first_line(self, now: float) -> None:
        self._deadlines.set(Timer.FIRST_LINE, now + self._limits.handshake)

    def first_line_came(self) -> None:
        self._deadlines.stop(Timer.FIRST_LINE)

    def heard(self, now: float) -> None:
        """Something came, and its whole lines were handed over."""
        if not self._lines.held:
            self._deadlines.stop(Timer.STALL)
        elif Timer.STALL not in self._deadlines:
            self._watch(now)

    def stop(self) -> None:
        """The connection is over, or will soon be."""
        for timer in Timer:
            self._deadlines.stop(timer)

    def handle(self, now: float) -> RemoteProtocolError | Silent | None:
        """Act on what is due; gives the violation if the peer was too slow, or that nothing at all came."""
        for timer in self._deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if timer is Timer.FIRST_LINE:
                return self._too_slow(f"no first line within {self._limits.handshake} s", "handshake")
            came = self._lines.received - self._mark
            if not came:  # a dead line looks the same, and the peer must not be blamed for it
                return Silent(self._limits.stall)
            if came < self._limits.stall_bytes:
                least = self._limits.stall_bytes
                what = f"{came} bytes in {self._limits.stall} s while a line is unfinished, {least} are asked"
                return self._too_slow(what, "stall")
            self._watch(now)
        return None

    def _watch(self, now: float) -> None:
        self._mark = self._lines.received
        self._deadlines.set(Timer.STALL, now + self._limits.stall)

    def _too_slow(self, what: str, limit: str) -> RemoteProtocolError:
        return RemoteProtocolError(what, offset=self._lines.offset, limit=limit)
