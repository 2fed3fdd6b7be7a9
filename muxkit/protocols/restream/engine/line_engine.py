"""What both engines do alike: lines are parsed in portions and have to come in time, and events wait to be fetched."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Generic, TypeVar

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Deadlines, StallWatch
from muxkit.protocols.restream.wire.blocks import BEGIN as BLOCK_BEGIN
from muxkit.protocols.restream.wire.blocks import Block, parse_header

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


class Lines:
    """Gives whole lines, without their line feeds, to a function.

    `limit` is the longest line in bytes; it may be changed between two lines. Each byte is searched once, however
    small the received pieces are. One call of `feed` gives at most `at_once` lines; the others wait for the next call,
    which may bring no bytes.
    """

    __slots__ = (
        "_held",
        "_needed",
        "_whole",
        "at_once",
        "count",
        "limit",
        "limit_name",
        "offset",
        "stopped",
        "unparsed",
    )

    def __init__(self, limit: int, limit_name: str) -> None:
        self.limit: int = limit
        self.limit_name: str = limit_name
        self.at_once: int = sys.maxsize
        self.count: int = 0  # lines given so far
        self.offset: int = 0  # of the present line, in all received bytes
        self.unparsed: int = 0  # bytes of whole lines that wait for the next call
        self.stopped: bool = False
        self._whole: deque[bytes] = deque()
        self._held = bytearray()
        self._needed = 0  # bytes of a block that is held in part

    @property
    def held(self) -> int:
        """Bytes of an unfinished line."""
        return len(self._held)

    @property
    def received(self) -> int:
        """The number of all received bytes."""
        return self.offset + self.unparsed + len(self._held)

    def stop(self) -> None:
        """Ignore all that comes from now on."""
        self.stopped = True
        self._forget()

    def restart(self) -> None:
        """Start again for another connection."""
        self.stopped = False
        self.offset = 0
        self._forget()

    def feed(self, data: bytes, take: Callable[[bytes], None]) -> RemoteProtocolError | None:
        """Give each line to `take`; return the violation that ended it, with the offset of its line."""
        if self.stopped:
            return None
        end = data.rfind(b"\n")
        if end >= 0:
            whole = bytes(self._held) + data[:end] if self._held else data[:end]
            self._held.clear()
            self._whole.extend(whole.split(b"\n"))
            self.unparsed += len(whole) + 1
        self._held += data[end + 1 :]
        lines, last = self._whole, self.count + self.at_once
        try:
            while lines and self.count < last:
                line = lines.popleft()
                size = len(line)
                self.count += 1
                if size > self.limit:
                    raise self._too_long()
                self.unparsed -= size + 1
                take(line)
                self.offset += size + 1
            if len(self._held) > self.limit and not lines:
                raise self._too_long()
        except RemoteProtocolError as error:
            error.offset = self.offset
            return error
        return None

    def feed_mixed(
        self, data: bytes | bytearray, take: Callable[[bytes], None], take_block: Callable[[Block], None]
    ) -> RemoteProtocolError | None:
        """Give all whole lines to `take` together, with their line feeds, and each block to `take_block`.

        Returns the violation that ended it. A function that looks at lines one by one sets `offset`, so that a
        violation is reported for its line.
        """
        if self.stopped:
            return None
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return None  # a large block comes in many pieces, and isn't looked at before it is whole
            data, self._held = self._held, bytearray()
        self._needed = 0
        position = 0
        try:
            while position < len(data) and not self.stopped:
                before = self.offset
                if data.startswith(BLOCK_BEGIN, position):
                    end = self._end_of_block(data, position, take_block)
                else:
                    end = self._end_of_lines(data, position)
                    if end > position:
                        good = self._before_too_long(bytes(data[position:end]))
                        if good:
                            take(good)
                        if self.stopped:
                            return None
                        self.offset = before + len(good)
                        if len(good) < end - position:
                            raise self._too_long()
                if end <= position:
                    break
                position, self.offset = end, before + end - position
            if not self.stopped:
                self._held += memoryview(data)[position:]
                if len(self._held) > self.limit and not self._needed:
                    raise self._too_long()
        except RemoteProtocolError as error:
            error.offset = self.offset
            return error
        return None

    def _end_of_lines(self, data: bytes | bytearray, position: int) -> int:
        """Return the end of the whole lines from here on, up to the next block."""
        # A line feed is the end of a line, because the data of a line is JSON on a single line.
        block = data.find(b"\n" + BLOCK_BEGIN, position)
        return (block if block >= 0 else data.rfind(b"\n", position)) + 1

    def _end_of_block(self, data: bytes | bytearray, position: int, take_block: Callable[[Block], None]) -> int:
        """Give a block to `take_block` and return its end. Return 0 if it isn't whole yet."""
        begin = data.find(b"\n", position) + 1
        if not begin:
            return 0
        if begin - position > self.limit:
            raise self._too_long()
        header = parse_header(bytes(data[position:begin]), self.limit)
        end = begin + sum(header.sizes)
        if end > len(data):
            self._needed = end - position
            return 0
        take_block(Block(header.first, header.sizes, header.times, memoryview(data)[begin:end]))
        return end

    def _forget(self) -> None:
        self._whole.clear()
        self.unparsed = 0
        self._held.clear()
        self._needed = 0

    def _before_too_long(self, block: bytes) -> bytes:
        """Return the lines before the first one that is too long."""
        if len(block) <= self.limit:
            return block
        size = 0
        for line in block.splitlines(keepends=True):
            if len(line) > self.limit + 1:
                break
            size += len(line)
        return block[:size]

    def _too_long(self) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"a line of more than {self.limit} bytes; {self.limit_name} allows no more", rule="restream-F12"
        )


class LineEngine(ABC, Generic[EventT]):
    """The reading side of an engine, which sets `_take` and fills in `_fail` and `_fall_silent`."""

    _take: Callable[[bytes], None]  # handles a line; raises RemoteProtocolError for a violation

    def __init__(self, line: int, limit_name: str, limits: Limits | None, observer: Observer | None) -> None:
        self.limits: Limits = limits or Limits()
        self._observer = observer
        self._events: list[EventT] = []
        self._lines = Lines(line, limit_name)
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._stall = StallWatch(self._deadlines, Timer.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes)
        self._started = True  # False: the first line has a deadline, which is set when the engine is told the time

    @property
    def bytes_received(self) -> int:
        """Bytes that came, on the present connection or the last one."""
        return self._lines.received

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
        error = self._feed(data)
        if error is not None:
            self._fail(error)
        elif lines.held:
            self._stall.watch(now, lines.received)
        else:
            self._stall.stop()

    def _feed(self, data: bytes) -> RemoteProtocolError | None:
        """Take in received bytes; return the violation that ended it."""
        return self._lines.feed(data, self._take)

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
