"""Where does a line end? Cuts what arrives at its line feeds, and bounds what has no end yet."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable


class Lines:
    """Hands over whole lines, without their line feeds.

    `limit` is the longest line in bytes; it may be changed between two lines. Each byte is looked at once, however
    small the pieces are in which it comes. At most `at_once` lines are handed over in one call of `feed`; the others
    wait for the next, which may bring nothing.
    """

    __slots__ = ("_held", "_whole", "at_once", "count", "limit", "limit_name", "offset", "stopped", "unparsed")

    def __init__(self, limit: int, limit_name: str) -> None:
        self.limit = limit
        self.limit_name = limit_name
        self.at_once = sys.maxsize
        self.count = 0  # lines handed over so far
        self.offset = 0  # where the line that is handed over, or waited for, begins in all that came
        self.unparsed = 0  # bytes of whole lines that were not handed over yet
        self.stopped = False
        self._whole: deque[bytes] = deque()
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Bytes of a line that is not whole yet."""
        return len(self._held)

    @property
    def received(self) -> int:
        """All bytes that came."""
        return self.offset + self.unparsed + len(self._held)

    def stop(self) -> None:
        """Hand over nothing more, whatever comes."""
        self.stopped = True
        self._forget()

    def restart(self) -> None:
        """Another connection begins."""
        self.stopped = False
        self.offset = 0
        self._forget()

    def feed(self, data: bytes, take: Callable[[bytes], None]) -> RemoteProtocolError | None:
        """Hand each line to `take`; gives the violation that ended it, with the offset of its line."""
        if self.stopped:
            return None
        end = data.rfind(b"\n")
        if end >= 0:
            whole = bytes(self._held) + data[:end] if self._held else data[:end]
            self._held.clear()
            self._whole.extend(whole.split(b"\n"))
            self.unparsed += len(whole) + 1
        self._held += data[end + 1 :]
        try:
            self._hand_over(take)
            if len(self._held) > self.limit and not self._whole:
                raise self._too_long()
        except RemoteProtocolError as error:
            error.offset = self.offset
            return error
        return None

    def _hand_over(self, take: Callable[[bytes], None]) -> None:
        lines, last = self._whole, self.count + self.at_once
        while lines and self.count < last:
            line = lines.popleft()
            size = len(line)
            self.count += 1
            if size > self.limit:
                raise self._too_long()
            self.unparsed -= size + 1
            take(line)
            self.offset += size + 1

    def _forget(self) -> None:
        self._whole.clear()
        self.unparsed = 0
        self._held.clear()

    def _too_long(self) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"a line of more than {self.limit} bytes; {self.limit_name} allows no more", rule="restream-F12"
        )
