"""The settings of a yamux session that its document leaves to each side."""

from __future__ import annotations

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between

INITIAL_WINDOW = 256 * 1024  # bytes that each side may send on a new stream before it has received a window update
LARGEST_FRAME = 1024 * 1024  # bytes; other implementations refuse larger data frames (rust-yamux)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of one side; the other side doesn't have to know them. Times are in seconds."""

    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Send a ping after this long without received bytes; None sends none."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """End the connection if nothing arrives for this long after such a ping."""
    unacknowledged: int = attrs.field(default=256, validator=ABOVE_ZERO)
    """Streams that this side may have opened without an acknowledgement of the peer. Further ones wait.

    256 is the backlog of the implementations in Go and Rust, which reset or refuse what exceeds it.
    """
    frame: int = attrs.field(default=64 * 1024, validator=between(1, LARGEST_FRAME))
    """The most bytes that one data frame carries. Smaller frames let short messages pass bulk transfers sooner."""
    close_timeout: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """Reset a stream that this side has closed if the peer doesn't close its side for this long."""
