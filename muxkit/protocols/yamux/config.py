"""The settings of a yamux session that its document leaves to each side."""

from __future__ import annotations

import attrs

INITIAL_WINDOW = 256 * 1024  # bytes that each side may send on a new stream before it has received a window update
LARGEST_FRAME = 1024 * 1024  # bytes; other implementations refuse larger data frames (rust-yamux)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of one side; the other side doesn't have to know them. Times are in seconds."""

    keepalive: float | None = 20.0
    """Send a ping after this long without received bytes; None sends none."""
    keepalive_timeout: float = 20.0
    """End the connection if nothing arrives for this long after such a ping."""
    unacknowledged: int = 256
    """Streams that this side may have opened without an acknowledgement of the peer. Further ones wait.

    256 is the backlog of the implementations in Go and Rust, which reset or refuse what exceeds it.
    """
    frame: int = 64 * 1024
    """The most bytes that one data frame carries. Smaller frames let short messages pass bulk transfers sooner."""
    close_timeout: float = 300.0
    """Reset a stream that this side has closed if the peer doesn't close its side for this long."""

    def __attrs_post_init__(self) -> None:
        for name in ("keepalive", "keepalive_timeout", "close_timeout"):
            span: float | None = getattr(self, name)
            if span is not None and not span > 0:
                raise ValueError(f"Config({name}={span}): must be above 0 s")
        if self.unacknowledged < 1:
            raise ValueError(f"Config(unacknowledged={self.unacknowledged}): must be at least 1")
        if not 1 <= self.frame <= LARGEST_FRAME:
            raise ValueError(f"Config(frame={self.frame}): must be from 1 to {LARGEST_FRAME}")
