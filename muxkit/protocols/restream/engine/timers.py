"""What both engines do alike: lines are parsed in portions, and have to come in time."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines, StallWatch
from muxkit.protocols.restream.engine.events import Silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.wire.lines import Lines


EventT = TypeVar("EventT")


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
        self._stall = StallWatch(self._deadlines, Timer.STALL, seconds=limits.stall, least=limits.stall_bytes)

    def next(self) -> float | None:
        return self._deadlines.next

    def expect_first_line(self, now: float) -> None:
        self._deadlines.set(Timer.FIRST_LINE, now + self._limits.handshake)

    def first_line_came(self) -> None:
        self._deadlines.stop(Timer.FIRST_LINE)

    def received(self, now: float) -> None:
        """Bytes came, and their whole lines were handled."""
        if self._lines.held:
            self._stall.watch(now, self._lines.received)
        else:
            self._stall.stop()

    def stop(self) -> None:
        """Stop all timers: the connection is ending."""
        self._deadlines.stop(Timer.FIRST_LINE)
        self._stall.stop()

    def handle(self, now: float) -> RemoteProtocolError | Silent | None:
        """Handle the due timers; return a violation if the peer was too slow, or `Silent` if nothing came."""
        lines = self._lines
        for timer in self._deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if timer is Timer.FIRST_LINE:
                what = f"no first line within {self._limits.handshake} s"
                return RemoteProtocolError(what, offset=lines.offset, limit="handshake")
            came = self._stall.shortfall(lines.received)
            if came == 0:  # a dead connection looks the same, so this is no violation
                return Silent(self._limits.stall)
            if came is not None:
                return self._stall.error(came, "line", lines.offset)
            self._stall.watch(now, lines.received)
        return None


class LineEngine(Generic[EventT]):
    """The reading side of an engine: its lines, its timers, and the events that were not fetched yet."""

    _lines: Lines
    _timers: LineTimers
    _events: list[EventT]

    @property
    def unparsed(self) -> int:
        """Bytes of lines beyond `frames_at_once`; `receive_bytes(b"", now)` continues with them."""
        return self._lines.unparsed

    @property
    def frames_at_once(self) -> int:
        """The number of lines that one call of `receive_bytes` parses."""
        return self._lines.at_once

    @frames_at_once.setter
    def frames_at_once(self, count: int) -> None:
        self._lines.at_once = count

    def events(self) -> Sequence[EventT]:
        """Return the events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events
