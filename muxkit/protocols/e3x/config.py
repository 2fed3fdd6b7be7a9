"""Settings of an e3x engine beside the limits."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between

PACKET = 1400  # bytes of a datagram's payload
FIRST_WINDOW = 50  # packets before the first miss; the original implementations buffer so many
LEAST_PACKET = 256  # bytes; in a smaller packet a head could leave no space for a body
MOST_PACKET = 65_507  # bytes that UDP can carry over IPv4
U32_MAX = 2**32 - 1
DEFAULT_TYPE = "muxkit"  # the type of channels without a name


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    packet: int = attrs.field(default=PACKET, validator=between(LEAST_PACKET, MOST_PACKET))
    """The largest packet to send, in bytes, without the heads of UDP, IP and DTLS."""
    reliable: bool = True
    """Accept reliable channels; otherwise an opening of one is answered with an err."""
    unreliable_types: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Types of channels that are always unreliable; an opening of one with `seq` is answered with an err."""
    window: int = attrs.field(default=850, validator=between(1, U32_MAX))
    """Packets of a channel that may be received and not processed. They become more, within `Limits.channel_bytes`,
    while the path holds more and the application processes them."""
    first_window: int = attrs.field(default=FIRST_WINDOW, validator=between(1, U32_MAX))
    """Packets to send ahead of the acks before the peer has announced its window."""
    most_window: int = attrs.field(default=32_768, validator=between(1, U32_MAX))
    """Packets to send ahead of the acks at most, even if the peer announces a larger window."""
    frag: bool = True
    """Split messages larger than a packet, and join those of the peer. Not in the document: off for foreign peers."""
    congestion: bool = True
    """Limit the rate to what the path carries; off where the link does so itself, as TCP does."""
    timeout: float = attrs.field(default=10.0, validator=ABOVE_ZERO)
    """A channel that waits for an ack and receives nothing for so long is broken."""
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """A session that received nothing for so long sends a ping; None never pings."""
    refusal_is_fatal: bool = False
    """End a session when the network reports that the peer is unreachable; such reports can be forged."""
