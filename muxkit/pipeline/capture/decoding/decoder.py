"""The common part of all decoders: it holds back incomplete frames, and reports gaps and violations.

A protocol's decoder implements `parse` for one frame. A decoder never raises because of the
recorded bytes. If a violation hides where the next frame starts, decoding of that direction stops. The state of a
decoder is plain data, so that Spark can store it between micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import attrs
import msgspec

from muxkit import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore
from muxkit.pipeline.capture.files import Found, row

LARGEST: Final = 2**40  # bytes of a message; the recorder has already enforced its own limits
SEARCHED: Final = 1 << 20  # bytes after a gap in which frames have to be found again
OTHER: Final[dict[Direction, Direction]] = {"in": "out", "out": "in"}


@attrs.define
class Half:
    """The state of one direction. It is plain data, so that it can be stored and continued in another process."""

    held: list[bytes] = attrs.field(factory=list)
    """The beginning of an incomplete frame."""
    size: int = 0
    """The number of bytes in `held`."""
    wanted: int = 0
    """Parsing waits until this many bytes are held."""
    offset: int = 0
    """The position of the next byte."""
    announced: int = 0
    """The size of a message whose first part comes next, if the message has several parts."""
    lost: bool = False
    """A frame was invalid or wasn't recorded, so later bytes can't be parsed unless frames are found again."""
    gap_end: int | None = None
    """The position after a gap from which frames are searched. None if there was no gap or frames were found."""
    found_again: bool = False
    """Frames were found after a gap. If they can't be parsed, the find was wrong, and the peer isn't at fault."""
    seen: set[int] = attrs.field(factory=set)
    """The channels of this direction (bpmux): eight times the id, plus the type."""


def _both_halves() -> dict[str, Half]:
    return {"in": Half(), "out": Half()}


@attrs.define
class Decoder(ABC):
    """Turns the bytes of one connection into rows. Holds back incomplete frames, and reports gaps and violations."""

    halves: dict[str, Half] = attrs.field(factory=_both_halves)
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        """Decode the next bytes and return their rows.

        Never raises because of the content.

        Args:
            direction: `in` for received bytes, and `out` for sent ones.
            data: the bytes.
            segment: the number of the transport. A new number starts a new transport.
            offset: the position of the bytes in this direction of the segment, which shows whether bytes are missing.
        """
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, found)
        return found

    @abstractmethod
    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        """Parse one frame and add its rows. Raises `NeedMore` and `RemoteProtocolError`."""

    def dump(self) -> bytes:
        """Serialize the state for `restore`."""
        return msgspec.msgpack.encode(self)

    def begin(self, direction: Direction, data: bytes, segment: int, offset: int | None, found: list[Found]) -> bool:
        """Record the position of the next bytes. Return False if they can't be parsed."""
        if segment != self.segment:
            self.segment = segment
            self.restart()
        half = self.halves[direction]
        if offset is not None and offset != half.offset and (not half.lost or half.gap_end is not None):
            missing = offset - half.offset
            text = f"{missing} bytes before byte {offset} of segment {segment} were not recorded"
            found.append(row("gap", direction, size=missing, id=offset, text=text))
            half.lost, half.gap_end, half.offset = True, offset, offset
            half.held, half.size, half.wanted, half.announced = [], 0, 0, 0
        half.offset += len(data)
        return not half.lost

    def restart(self) -> None:
        """Start a new transport, and drop incomplete frames of the old one."""
        self.halves = _both_halves()

    def cut(self, direction: Direction, data: bytes, found: list[Found]) -> None:
        """Parse all complete frames in the held bytes and `data`."""
        half = self.halves[direction]
        if half.size:
            half.held.append(data)
            half.size += len(data)
            if half.size < half.wanted:
                return
            data = b"".join(half.held)
            half.held, half.size = [], 0
        cursor, end = Cursor(data), len(data)
        start = 0
        try:
            while start < end:
                self.parse(direction, found, cursor)
                start = cursor.position
        except NeedMore as need:
            half.held, half.size = [data[start:]], end - start
            half.wanted = half.size + need.missing
        except RemoteProtocolError as error:
            half.lost = True
            if half.found_again:
                half.gap_end = half.offset
                text = f"what was found behind a gap could not be parsed at byte {half.offset - (end - start)}"
                found.append(row("gap", direction, size=0, id=half.offset, text=text))
                return
            error.offset = half.offset - (end - start)
            kind = type(error).__name__
            found.append(row("error", direction, None, kind, id=error.offset, rule=error.rule, text=str(error)))

    def search(
        self,
        direction: Direction,
        data: bytes,
        found: list[Found],
        *,
        what: str,
        find: Callable[[bytes], tuple[int, bool]],
    ) -> None:
        """Search for frames after a gap, and continue with them.

        `find` returns their position in the bytes and True, or the position where they may start once there are more
        bytes, and False.
        """
        half = self.halves[direction]
        half.held.append(data)
        half.size += len(data)
        if half.size < half.wanted:
            return
        held = b"".join(half.held)
        start, is_sure = find(held)
        begins = half.offset - len(held) + start
        half.held, half.size, half.wanted = [held[start:]], len(held) - start, len(held) - start + 1
        if not is_sure:
            return
        skipped = begins - (half.gap_end or 0)
        text = f"{skipped} bytes behind a gap were passed over, and {what} were found again at byte {begins}"
        found.append(row("found", direction, size=skipped, id=begins, text=text))
        half.lost, half.gap_end, half.found_again = False, None, True
        half.held, half.size, half.wanted = [], 0, 0
        self.cut(direction, held[start:], found)
