"""What all decoders of recorded bytes share: holding back incomplete frames, gaps, violations.

A decoder is fed with what one connection sent and received, in that order. It gives the rows that an observer would
have been told, with more in them: the numbers of messages, and those that acknowledgements name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import attrs
import msgspec

from muxkit._errors import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore
from muxkit.pipeline.capture.files import Found, row


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
    """A frame could not be parsed or was not recorded, so nothing after it can be parsed."""

    def restart(self) -> None:
        """Start with a new transport: an unfinished frame of the old one is dropped."""
        self.held, self.size, self.wanted = [], 0, 0
        self.offset, self.announced, self.lost = 0, 0, False


@attrs.define
class Decoder(ABC):
    """Turns the bytes of one connection into rows: holds back incomplete frames, and reports gaps and violations."""

    halves: dict[str, Half] = attrs.field(factory=lambda: {"in": Half(), "out": Half()})
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        """Decode the next bytes; `offset` shows whether any are missing before them. Never raises for their content."""
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, partial(self.parse, direction, found), found)
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
        if offset is not None and offset != half.offset and not half.lost:
            half.lost = True
            missing = offset - half.offset
            text = f"{missing} bytes before byte {offset} of segment {segment} were not recorded"
            found.append(row("gap", direction, size=missing, id=offset, text=text))
        half.offset += len(data)
        return not half.lost

    def restart(self) -> None:
        """Begin a new transport."""
        for half in self.halves.values():
            half.restart()

    def cut(self, direction: Direction, data: bytes, parse: Callable[[Cursor], None], found: list[Found]) -> None:
        """Call `parse` for each complete frame in the held bytes and `data`."""
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
                parse(cursor)
                start = cursor.position
        except NeedMore as need:
            half.held, half.size = [data[start:]], end - start
            half.wanted = half.size + need.missing
        except RemoteProtocolError as error:
            half.lost = True
            error.offset = half.offset - (end - start)
            kind = type(error).__name__
            found.append(row("error", direction, None, kind, id=error.offset, rule=error.rule, text=str(error)))
