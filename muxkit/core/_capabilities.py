"""Optional capabilities of an engine, which a pump looks for and uses when they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from muxkit.core._engine import StreamId


@runtime_checkable
class BoundedParsing(Protocol):
    """An engine that parses a bounded number of frames at a time, so that its pump can end a turn in time.

    Bytes alone are no measure: a read that is full of the smallest frames takes a thousand times as long as one
    with a single message. Nor are frames: one that does more than others counts as several.
    """

    frames_at_once: int
    """`receive_bytes` parses at most so many; all, unless a pump says otherwise."""

    @property
    def unparsed(self) -> int:
        """Bytes that it has kept because of that; call `receive_bytes(b"", now)` until there are none."""


@runtime_checkable
class SeparateTimers(Protocol):
    """An engine whose `next_deadline` is now while it has something to send, as its timers begin when that leaves.

    While its transport takes nothing a pump goes by `next_timer`, or it would call such an engine without end.
    """

    def next_timer(self) -> float | None:
        """`next_deadline` without what waits to be sent."""


@runtime_checkable
class FrameCounting(Protocol):
    """An engine that counts the frames which it has parsed."""

    @property
    def frames(self) -> int: ...


@runtime_checkable
class MissingBytes(Protocol):
    """An engine that knows how many more bytes of a stream it only collects: no frame ends before that."""

    def missing(self, stream: StreamId) -> int: ...


@runtime_checkable
class CloseAware(Protocol):
    """An engine that is told when nothing more can come, nor be sent."""

    def receive_closed(self, now: float, *, clean: bool = True) -> None: ...


@runtime_checkable
class RoundTripAware(Protocol):
    """An engine that is told how long a round trip of its link takes, in seconds."""

    def set_rtt(self, seconds: float) -> None: ...
