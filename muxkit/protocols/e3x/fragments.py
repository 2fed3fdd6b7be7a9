"""How does a message larger than a packet travel? In pieces, each but the last with the number of those to come.

Ours: the document has no such thing. Pieces before the last are processed by the engine as they come, so that a
message may be larger than the window; the last one is processed when the application is done with the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muxkit._limits import Limits


def cut(body: bytes, first: int, other: int) -> Iterator[tuple[int, bytes]]:
    """The pieces of a message, each with the number of those after it. `first` is the room in the first packet."""
    yield pieces_after(len(body), first, other), body[:first]
    for start in range(first, len(body), other):
        yield (len(body) - start - 1) // other, body[start : start + other]


def pieces_after(size: int, first: int, other: int) -> int:
    """How many pieces follow the first."""
    return max(0, -(-(size - first) // other))


class Reassembly:
    """Bytes of unfinished messages, of all channels of one engine."""

    __slots__ = ("limits", "used")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = 0


class Assembly:
    """One message that is being put together."""

    __slots__ = ("_bytes", "_shared", "expected", "size")

    def __init__(self, shared: Reassembly) -> None:
        self._shared = shared
        self._bytes = bytearray()  # not the pieces: each may have a byte, and cost fifty
        self.size = 0
        self.expected = 0  # pieces still to come

    def add(self, frag: int, piece: bytes) -> bytes | None:
        """The whole message with its last piece, None before it."""
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
        # Pieces are of one size but for the last: what the first one says is refused before much of it is kept.
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
        """Forget what has come."""
        self._shared.used -= self.size
        self._bytes = bytearray()
        self.size = self.expected = 0
