"""What can be chosen for one e3x engine, apart from the limits?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKET = 1400  # bytes of a datagram's payload
FIRST_WINDOW = 50  # packets, before the first miss: what the original implementations buffer
LEAST_PACKET = 256  # bytes; below it a head could leave no room for a body


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    packet: int = PACKET
    """The largest packet to send, in bytes; the path must carry it beside the heads of UDP and IP, and of DTLS."""
    reliable: bool = True
    """Take reliable channels; otherwise an opening that asks for one is answered with an err."""
    unreliable_types: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Types of channels known to be unreliable; an opening of such a one with `seq` is answered with an err."""
    window: int = 1000
    """Packets of a channel that may be received and not processed yet, as far as `Limits.channel_bytes` holds them."""
    first_window: int = FIRST_WINDOW
    """Packets that we send ahead of the acks before the peer has told its window."""
    most_window: int = 4096
    """Packets that we send ahead of the acks, whatever window the peer tells."""
    frag: bool = True
    """Cut messages larger than a packet, and join such messages of the peer. Ours: off towards foreign peers."""
    congestion: bool = True
    """Pace what is sent by what the path bears; off where the link does that itself, as TCP does."""
    timeout: float = 10.0
    """A channel that waits for an ack and hears nothing for so long is over."""
    keepalive: float | None = 20.0
    """A session that heard nothing for so long asks whether the peer is still there; None: it never asks."""
    refusal_is_fatal: bool = False
    """End a session when the network says that nobody is there; anybody who can forge a packet can say so."""

    def __attrs_post_init__(self) -> None:
        if not LEAST_PACKET <= self.packet <= 65_507:
            raise ValueError(f"Config(packet={self.packet}): from {LEAST_PACKET} to 65507 bytes")
        for name, number in (
            ("window", self.window),
            ("first_window", self.first_window),
            ("most_window", self.most_window),
        ):
            if not 1 <= number < 2**32:
                raise ValueError(f"Config({name}={number}): from 1 to 4294967295")
        for name, seconds in (("timeout", self.timeout), ("keepalive", self.keepalive)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"Config({name}={seconds}): must be finite and above 0 s")
