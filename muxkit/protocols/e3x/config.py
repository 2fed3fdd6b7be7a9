"""Settings of an e3x engine beside the limits."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

PACKET = 1400  # bytes of a datagram's payload
FIRST_WINDOW = 50  # packets before the first miss; the original implementations buffer so many
LEAST_PACKET = 256  # bytes; in a smaller packet a head could leave no space for a body
MOST_PACKET = 65_507  # bytes that UDP can carry over IPv4
DEFAULT_TYPE = "muxkit"  # the type of channels without a name


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    packet: int = PACKET
    """The largest packet to send, in bytes, without the heads of UDP, IP and DTLS."""
    reliable: bool = True
    """Accept reliable channels; otherwise an opening of one is answered with an err."""
    unreliable_types: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Types of channels that are always unreliable; an opening of one with `seq` is answered with an err."""
    window: int = 850
    """Packets of a channel that may be received and not processed. They become more, within `Limits.channel_bytes`,
    while the path holds more and the application processes them."""
    first_window: int = FIRST_WINDOW
    """Packets to send ahead of the acks before the peer has announced its window."""
    most_window: int = 32_768
    """Packets to send ahead of the acks at most, even if the peer announces a larger window."""
    frag: bool = True
    """Split messages larger than a packet, and join those of the peer. Not in the document: off for foreign peers."""
    congestion: bool = True
    """Limit the rate to what the path carries; off where the link does so itself, as TCP does."""
    timeout: float = 10.0
    """A channel that waits for an ack and receives nothing for so long is broken."""
    keepalive: float | None = 20.0
    """A session that received nothing for so long sends a ping; None never pings."""
    refusal_is_fatal: bool = False
    """End a session when the network reports that the peer is unreachable; such reports can be forged."""

    def __attrs_post_init__(self) -> None:
        if not LEAST_PACKET <= self.packet <= MOST_PACKET:
            raise ValueError(f"Config(packet={self.packet}): from {LEAST_PACKET} to {MOST_PACKET} bytes")
        for name in ("window", "first_window", "most_window"):
            if not 1 <= getattr(self, name) < 2**32:
                raise ValueError(f"Config({name}={getattr(self, name)}): from 1 to 4294967295")
        for name, seconds in (("timeout", self.timeout), ("keepalive", self.keepalive)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"Config({name}={seconds}): must be finite and above 0 s")
