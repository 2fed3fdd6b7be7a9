"""The settings of a yamux session. yamux doesn't negotiate them, so each side chooses its own."""

from __future__ import annotations

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, AT_LEAST_ONE, between

# How many bytes each side may send on a new stream before the first window update arrives.
INITIAL_WINDOW = 256 * 1024
# The largest payload of a data frame. rust-yamux refuses larger data frames.
LARGEST_FRAME = 1024 * 1024


@attrs.frozen(kw_only=True)
class Config:
    """The settings of one side. The other side may have different settings. Times are in seconds."""

    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Send a ping if no bytes have arrived for this long. None disables these pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """End the connection if no bytes arrive for this long after a keepalive ping."""
    unacknowledged: int = attrs.field(default=256, validator=AT_LEAST_ONE)
    """How many streams this side may open before the peer acknowledges them. Opening further streams waits.

    256 is the backlog of the implementations in Go and Rust, which reset or refuse streams beyond it.
    """
    frame: int = attrs.field(default=64 * 1024, validator=between(1, LARGEST_FRAME))
    """The largest payload of a data frame in bytes. With smaller frames, short messages overtake large ones sooner."""
    close_timeout: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """Reset a stream if the peer doesn't close its side within this time after we have closed ours."""
