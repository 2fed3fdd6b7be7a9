"""The settings of one Aqueduct connection, apart from `Limits`."""

from __future__ import annotations

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE

KIB = 1024


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds, sizes in bytes."""

    channel_field: bool = True
    """Whether ACK_NACK_UNRELIABLE carries its CHANNEL field, as the document says; both sides must agree."""
    flush_delay: float = attrs.field(default=0.025, validator=ABOVE_ZERO)
    """How long acks and datagram counts are collected before they are sent."""
    receipt_deadline: float | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    """How long to wait for a datagram that the peer has counted. None: twice the RTT if it is known, else 1 s."""
    tombstone: float = attrs.field(default=1.0, validator=ABOVE_ZERO)
    """How long the id of a channel that ended is remembered."""
    in_flight: int = attrs.field(default=65_536, validator=ABOVE_ZERO)
    """Messages of one channel that are unsent or unanswered at once. At most 1024 of them may be unsent, or have a
    receipt, an attachment or a stream of their own."""
    unopened: int = attrs.field(default=64, validator=ABOVE_ZERO)
    """Unordered messages of one channel that wait until the peer allows one more stream."""
    unreliable_queue: int = attrs.field(default=256, validator=ABOVE_ZERO)
    """Unreliable messages of one channel that wait for the link; above it the oldest are dropped."""
    streams: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """Streams that the peer may have open at once, beside two for each channel that `Limits.channels` allows."""
    early_bytes: int = attrs.field(default=1024 * KIB, validator=ABOVE_ZERO)
    """Bytes of datagrams that are kept until the peer's connection headers have come."""
    connection_headers: int = attrs.field(default=16 * KIB, validator=ABOVE_ZERO)
    """Header data of the connection."""
    headers: int = attrs.field(default=64 * KIB, validator=ABOVE_ZERO)
    """Header data of one message or channel."""
    header_pairs: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """Headers in one block."""
    attachments: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """Channels attached to one message."""
    gaps: int = attrs.field(default=4096, validator=ABOVE_ZERO)
    """Runs of message numbers with holes between them, for one channel."""
    datagram: int = attrs.field(default=16 * KIB, validator=ABOVE_ZERO)
    """The largest datagram over the byte-stream carrier."""
