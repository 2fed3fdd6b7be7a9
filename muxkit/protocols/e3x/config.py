"""Settings of an e3x engine, apart from the limits that all protocols share (`Limits`)."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between

PACKET = 1400  # default maximum size of a packet in bytes, which is the payload of a UDP datagram
# The window in packets before the peer has announced its window in a miss. The original implementations buffer this
# many packets.
FIRST_WINDOW = 50
# Default maximum size of a packet over a byte stream, in bytes. Most of the work for a packet doesn't depend on its
# size. A short message waits for one packet of each other channel that sends, which at 1 GBit/s takes 0.3 ms.
STREAM_PACKET = 32 * 1024
LEAST_PACKET = 256  # bytes. In a smaller packet, the head could leave no room for a body.
MOST_PACKET = 65_507  # maximum payload of a UDP datagram over IPv4 in bytes
U32_MAX = 2**32 - 1
DEFAULT_TYPE = "muxkit"  # the type of a channel that was opened without a name


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine. Times are in seconds."""

    packet: int = attrs.field(default=PACKET, validator=between(LEAST_PACKET, MOST_PACKET))
    """Maximum size of a packet to send in bytes, without the headers of UDP, IP and DTLS."""
    stream_packet: int = attrs.field(default=STREAM_PACKET, validator=between(LEAST_PACKET, MOST_PACKET))
    """Maximum size of a packet to send over a byte stream, in bytes. The window of a channel counts packets, so the
    sender also limits the bytes that the peer hasn't acked: to `packet` bytes for each packet of the window."""
    reliable: bool = True
    """Accept reliable channels from the peer. If False, the engine refuses them with an err."""
    unreliable_types: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Types of channels that are always unreliable. The engine refuses reliable channels of these types with an err."""
    window: int = attrs.field(default=850, validator=between(1, U32_MAX))
    """Initial receive window of a channel in packets. The window grows, up to `Limits.channel_bytes`, if the path can
    use a larger window and the application processes the packets quickly enough."""
    first_window: int = attrs.field(default=FIRST_WINDOW, validator=between(1, U32_MAX))
    """Window in packets for sending on a channel before the peer has announced its own window."""
    most_window: int = attrs.field(default=32_768, validator=between(1, U32_MAX))
    """Maximum window in packets for sending on a channel, even if the peer announces a larger window."""
    frag: bool = True
    """Cut messages that are larger than a packet into pieces, and join the peer's pieces.

    The specification doesn't have pieces, so set this to False if the peer isn't muxkit.
    """
    congestion: bool = True
    """Limit the sending rate to the capacity of the path. Off for links with their own congestion control, as TCP."""
    timeout: float = attrs.field(default=10.0, validator=ABOVE_ZERO)
    """A channel breaks if it waits for an ack and receives no packet for this long."""
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """The session sends a ping if the peer has been silent for this long. None turns keepalive pings off."""
    refusal_is_fatal: bool = False
    """End the session if the network reports that the peer is unreachable. Such reports can be forged."""
