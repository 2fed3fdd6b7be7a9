"""What do recorded bytes say? They are cut into frames by the protocols' own parsers, whatever the pieces they come in.

A decoder is fed with what one connection sent and received, in the order in which it did, and gives what an observer
would have been told, with more of it: the numbers of messages and of what acknowledgements name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit._observer import Direction

Side = Literal["connector", "listener"]
"""Which end of a Relink link recorded the bytes."""

Found = tuple[
    str,  # event
    "Direction | None",
    str | None,  # channel
    str | None,  # kind
    int | None,  # size
    int | None,  # credit
    int | None,  # id
    str | None,  # rule
    str | None,  # text
]
"""A row of a capture from `event` on."""


@attrs.define
class Half:
    """How far one direction has come; all of it is plain data, so that it can be kept and gone on with elsewhere."""

    held: list[bytes] = attrs.field(factory=list)
    """The beginning of a frame whose rest has not come."""
    size: int = 0
    """Bytes that are held."""
    wanted: int = 0
    """Size of the held bytes with which parsing may get on."""
    offset: int = 0
    """Of the next byte that comes."""
    announced: int = 0
    """Bytes of a message in parts whose first part comes next."""
    lost: bool = False
    """A frame could not be parsed or was not recorded, so nothing behind it can be parsed."""

    def restart(self, segment_offset: int = 0) -> None:
        """Another transport: what was begun is not continued."""
        self.held, self.size, self.wanted = [], 0, 0
        self.offset, self.announced, self.lost = segment_offset, 0, False


class Decoder(Protocol):
    """The bytes of one connection become what was said."""

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        """The next bytes; `offset` shows whether any are missing before them. Never raises for what they hold."""

    def dump(self) -> bytes:
        """What `restore` goes on with."""


class Cutting:
    """What the decoders share: holding back what is incomplete, gaps, violations."""

    halves: dict[str, Half]
    segment: int

    def begin(self, direction: Direction, data: bytes, segment: int, offset: int | None, found: list[Found]) -> bool:
        """Note what came before; False if it cannot be parsed."""
        if segment != self.segment:
            self.segment = segment
            for half in self.halves.values():
                half.restart()
            self.on_segment()
        half = self.halves[direction]
        if offset is not None and offset != half.offset and not half.lost:
            half.lost = True
            missing = offset - half.offset
            text = f"{missing} bytes before byte {offset} of segment {segment} were not recorded"
            found.append(("gap", direction, None, None, missing, None, offset, None, text))
        half.offset += len(data)
        return not half.lost

    def on_segment(self) -> None:
        """Another transport carries what comes now."""

    def cut(self, direction: Direction, data: bytes, parse: Callable[[Cursor], None], found: list[Found]) -> None:
        """Call `parse` for each frame in what is held and what comes."""
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
            found.append(violation(error, direction))


def violation(error: RemoteProtocolError, direction: Direction) -> Found:
    """The row that tells of one."""
    return ("error", direction, None, type(error).__name__, None, None, error.offset, error.rule, str(error))


BOTH: Final = ("in", "out")
