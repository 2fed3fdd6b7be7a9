"""The settings of one Aqueduct connection, apart from `Limits`."""

from __future__ import annotations

import attrs

KIB = 1024


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds, sizes in bytes."""

    channel_field: bool = True
    """Whether ACK_NACK_UNRELIABLE carries its CHANNEL field, as the document says; both sides must agree."""
    flush_delay: float = 0.025
    """How long acks and datagram counts are collected before they are sent."""
    receipt_deadline: float | None = None
    """How long to wait for a datagram that the peer has counted. None: twice the RTT if it is known, else 1 s."""
    tombstone: float = 1.0
    """How long the id of a channel that ended is remembered."""
    in_flight: int = 1024
    """Messages of one channel that are unsent or unanswered at once."""
    unopened: int = 64
    """Unordered messages of one channel that wait until the peer allows one more stream."""
    unreliable_queue: int = 256
    """Unreliable messages of one channel that wait for the link; above it the oldest are dropped."""
    streams: int = 1024
    """Streams that the peer may have open at once, beside two for each channel that `Limits.channels` allows."""
    early_bytes: int = 1024 * KIB
    """Bytes of datagrams that are kept until the peer's connection headers have come."""
    connection_headers: int = 16 * KIB
    """Header data of the connection."""
    headers: int = 64 * KIB
    """Header data of one message or channel."""
    header_pairs: int = 1024
    """Headers in one block."""
    attachments: int = 1024
    """Channels attached to one message."""
    gaps: int = 4096
    """Runs of message numbers with holes between them, for one channel."""
    datagram: int = 16 * KIB
    """The largest datagram over the byte-stream carrier."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Config):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"Config({field.name}={value}): must be above 0")
