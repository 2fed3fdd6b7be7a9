"""What all decoders share: incomplete frames are held back, gaps of the recording and broken rules are reported."""

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

LARGEST: Final = 2**40  # bytes of a message; the recorder's own limits already held
SEARCHED: Final = 1 << 20  # bytes behind a gap in which frames have to be found again
OTHER: Final[dict[Direction, Direction]] = {"in": "out", "out": "in"}


@attrs.define
class Half:
    """The state of one direction. All of it is plain data, so that it can be stored and another process can go on."""

    held: list[bytes] = attrs.field(factory=list)
    """The beginning of a frame whose rest has not come."""
    size: int = 0
    """Bytes that are held."""
    wanted: int = 0
    """Parsing waits until so many bytes are held."""
    offset: int = 0
    """Of the next byte that comes."""
    announced: int = 0
    """Bytes of a message in parts whose first part comes next."""
    lost: bool = False
    """A frame could not be parsed or was not recorded, so nothing after it can be parsed, unless it is found again."""
    gap_end: int | None = None
    """Where the bytes after a gap begin, in which frames are looked for; None: there was none, or they were found."""
    found_again: bool = False
    """Frames were found behind a gap: what cannot be parsed is then a wrong find, and no fault of a peer."""
    seen: set[int] = attrs.field(factory=set)
    """Channels of this direction (bpmux): eight times the id, and the type."""


def _both_halves() -> dict[str, Half]:
    return {"in": Half(), "out": Half()}


@attrs.define
class Decoder(ABC):
    """Turns the bytes of one connection into rows: holds back incomplete frames, and reports gaps and violations."""

    halves: dict[str, Half] = attrs.field(factory=_both_halves)
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        """Decode the next bytes; `offset` shows whether any are missing before them. Never raises for their content."""
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, found)
        return found

    @abstractmethod
    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        """Parse one frame and add its rows. Raises `NeedMore` and `RemoteProtocolError`."""

    def dump(self) -> bytes:
        """Serialise the state for `restore`."""
        return msgspec.msgpack.encode(self)

    def begin(self, direction: Direction, data: bytes, segment: int, offset: int | None, found: list[Found]) -> bool:
        """Note the position of the next bytes; return False if they cannot be parsed."""
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
        """Begin a new transport: unfinished frames of the old one are dropped."""
        self.halves = _both_halves()

    def cut(self, direction: Direction, data: bytes, found: list[Found]) -> None:
        """Parse each complete frame in the held bytes and `data`."""
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
        """Look behind a gap for what can be parsed again, and go on with it.

        `find` returns where that begins in the bytes, and True; or where it may once there are more, and False.
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
