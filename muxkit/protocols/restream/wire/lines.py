"""Splits received bytes into lines, and limits their length."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable


class Lines:
    """Gives whole lines, without their line feeds, to a function.

    `limit` is the longest line in bytes; it may be changed between two lines. Each byte is searched once, however
    small the received pieces are. One call of `feed` gives at most `at_once` lines; the others wait for the next call,
    which may bring no bytes.
    """

    __slots__ = ("_held", "_whole", "at_once", "count", "limit", "limit_name", "offset", "stopped", "unparsed")

    def __init__(self, limit: int, limit_name: str) -> None:
        self.limit = limit
        self.limit_name = limit_name
        self.at_once = sys.maxsize
        self.count = 0  # lines given so far
        self.offset = 0  # of the present line, in all received bytes
        self.unparsed = 0  # bytes of whole lines that wait for the next call
        self.stopped = False
        self._whole: deque[bytes] = deque()
        self._held = bytearray()

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

    def _forget(self) -> None:
        self._whole.clear()
        self.unparsed = 0
        self._held.clear()

    def _too_long(self) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"a line of more than {self.limit} bytes; {self.limit_name} allows no more", rule="restream-F12"
        )
