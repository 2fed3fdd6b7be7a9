"""What both engines do alike: lines are parsed in portions and have to come in time, and events wait to be fetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Deadlines, StallWatch
from muxkit.protocols.restream.wire.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer

EventT = TypeVar("EventT")

KIB: Final = 1024
FIRST_LINE_EXTRA: Final = 4 * KIB  # bytes beside the longest integer of a line
WRITE_BYTES: Final = 64 * KIB


@attrs.define
class HungUp:
    """The peer will send nothing more. An unfinished line is dropped."""


@attrs.define
class Silent:
    """Nothing came for `seconds` while a line was unfinished: the connection is dead, and no rule was broken.

    A server still has its error line to write: flush, then close.
    """

    seconds: float


@attrs.define
class Failed:
    """The peer broke a rule. A server still has its error line to write: flush, then close."""

    error: RemoteProtocolError


class Timer(Enum):
    """The deadlines of a connection."""

    FIRST_LINE = "first line"
    """When a client without a first line is refused."""
    STALL = "stall"
    """When to check that an unfinished line has grown."""


class LineEngine(ABC, Generic[EventT]):
    """The reading side of an engine, which sets `_take` and fills in `_fail` and `_fall_silent`."""

    _take: Callable[[bytes], None]  # handles a line; raises RemoteProtocolError for a violation

    def __init__(self, line: int, limit_name: str, limits: Limits | None, observer: Observer | None) -> None:
        self.limits = limits or Limits()
        self._observer = observer
        self._events: list[EventT] = []
        self._lines = Lines(line, limit_name)
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._stall = StallWatch(self._deadlines, Timer.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes)
        self._started = True  # False: the first line has a deadline, which is set when the engine is told the time

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

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse received bytes; never raises."""
        if not self._started:
            self._start(now)
        lines = self._lines
        if lines.stopped:
            return
        if self._observer is not None and data:
            self._observer.transport("in", data)
        error = lines.feed(data, self._take)
        if error is not None:
            self._fail(error)
        elif lines.held:
            self._stall.watch(now, lines.received)
        else:
            self._stall.stop()

    def next_deadline(self) -> float | None:
        """Return the next deadline; at once before the engine was told the time."""
        return self._deadlines.next if self._started else float("-inf")

    def handle_deadline(self, now: float) -> None:
        """Handle the due timers: fail if the peer was too slow, or fall silent if nothing came."""
        if not self._started:
            self._start(now)
        lines = self._lines
        for timer in self._deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if timer is Timer.FIRST_LINE:
                what = f"no first line within {self.limits.handshake} s"
                self._fail(RemoteProtocolError(what, offset=lines.offset, limit="handshake"))
                return
            came = self._stall.shortfall(lines.received)
            if came is None:
                self._stall.watch(now, lines.received)
            elif came == 0:  # a dead connection looks the same, so this is no violation
                self._fall_silent(Silent(self.limits.stall), now)
                return
            else:
                self._fail(self._stall.error(came, "line", lines.offset))
                return

    @abstractmethod
    def _fail(self, error: RemoteProtocolError) -> None:
        """End the connection after a violation of the peer."""

    @abstractmethod
    def _fall_silent(self, silent: Silent, now: float) -> None:
        """End the connection, which brought nothing in time."""

    def _start(self, now: float) -> None:
        self._started = True
        self._deadlines.set(Timer.FIRST_LINE, now + self.limits.handshake)

    def _stop_reading(self) -> None:
        """Ignore all that the peer sends from now on, and stop all timers."""
        self._started = True
        self._lines.stop()
        self._deadlines.stop(Timer.FIRST_LINE)
        self._stall.stop()


def check_sizes(config: str, **sizes: int) -> None:
    """Refuse a setting below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{config}({name}={size}): must be at least 1")
