"""Reassembly of messages that were cut into pieces.

The specification has no messages larger than a packet. muxkit cuts a larger message into pieces (`packets.cut`), and
the field `frag` of each piece contains the number of pieces that follow. The receiver acks a piece as soon as the
pieces before it have arrived, so a message may be larger than the window. Only the last piece isn't acked until the
application has processed the message.
"""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits


class Reassembly:
    """The number of bytes in incomplete messages, counted over all channels of an engine."""

    __slots__ = ("limits", "used")

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.used: int = 0


class Assembly:
    """The incomplete message of one channel."""

    __slots__ = ("_bytes", "_shared", "expected", "size")

    def __init__(self, shared: Reassembly) -> None:
        self._shared = shared
        self._bytes = bytearray()  # not a list of pieces, because a piece of 1 byte would need 50 bytes of memory
        self.size: int = 0
        self.expected: int = 0  # number of pieces that are still missing

    def add(self, frag: int, piece: bytes) -> bytes | None:
        """Add a piece that has `frag` pieces after it. Return the message if the piece was the last one, else None.

        Raises:
            RemoteProtocolError: The piece doesn't continue the message, or a limit would be exceeded.
        """
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
        # All pieces except the last have the same size. So the first piece shows the approximate size of the message,
        # and a message above the limit is refused before its other pieces are stored.
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
        """Discard the incomplete message."""
        self._shared.used -= self.size
        self._bytes = bytearray()
        self.size = self.expected = 0
