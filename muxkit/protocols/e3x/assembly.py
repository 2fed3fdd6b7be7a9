"""Messages that are put together from pieces.

Pieces are not in the document. A message that is larger than a packet is cut (`packets.cut`), and each piece tells in
`frag` how many follow. Those before the last are processed when they arrive, so that a message may be larger than the
window; the last one is processed when the application is done with the message.
"""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits


class Reassembly:
    """Counts the bytes of incomplete messages on all channels of an engine."""

    __slots__ = ("limits", "used")

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.used: int = 0


class Assembly:
    """The message of one channel that is put together now."""

    __slots__ = ("_bytes", "_shared", "expected", "size")

    def __init__(self, shared: Reassembly) -> None:
        self._shared = shared
        self._bytes = bytearray()  # not a list: a piece of one byte would cost fifty
        self.size: int = 0
        self.expected: int = 0  # pieces missing

    def add(self, frag: int, piece: bytes) -> bytes | None:
        """Add a piece; return the message with its last piece, None before that."""
        if self.expected == 0 and frag == 0:
            return piece
        self._check(frag, piece)
        if frag == 0:
            message = bytes(self._bytes + piece)
            self.drop()
            return message
        self._bytes += piece
        self.expected = frag
        self.size += len(piece)
        self._shared.used += len(piece)
        return None

    def _check(self, frag: int, piece: bytes) -> None:
        if self.expected and frag != self.expected - 1:
            raise RemoteProtocolError(f"a piece before {frag} others where one before {self.expected - 1} must come")
        if not piece:
            raise RemoteProtocolError(f"an empty piece before {frag} others")
        limits = self._shared.limits
        # Pieces have one size, except the last: a message above the limit is refused at its first piece.
        announced = self.size + len(piece) * max(1, frag if not self.expected else 1)
        if announced > limits.message:
            raise RemoteProtocolError(
                f"a message of at least {announced} bytes against {limits.message} allowed", limit="message"
            )
        if self._shared.used + len(piece) > limits.reassembly:
            raise RemoteProtocolError(
                f"{self._shared.used} bytes of unfinished messages against {limits.reassembly} allowed",
                limit="reassembly",
            )

    def drop(self) -> None:
        """Discard the pieces."""
        self._shared.used -= self.size
        self._bytes = bytearray()
        self.size = self.expected = 0
