"""The settings of one Aqueduct connection, apart from `Limits`."""

from __future__ import annotations

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE

KIB = 1024


@attrs.frozen(kw_only=True)
class Config:
    """The settings of a connection. Times are in seconds, sizes in bytes. Those after `tombstone` are limits."""

    channel_field: bool = True
    """Whether ACK_NACK_UNRELIABLE has a CHANNEL field, as in the specification. Both sides must use the same value."""
    flush_delay: float = attrs.field(default=0.025, validator=ABOVE_ZERO)
    """How long acks and counts of datagrams are collected before they are sent. They may go earlier with a message."""
    receipt_deadline: float | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    """How long to wait for a datagram that the peer has sent, before it is reported as lost. By default, this is twice
    the round-trip time if it is known, and otherwise 1 second."""
    tombstone: float = attrs.field(default=1.0, validator=ABOVE_ZERO)
    """How long the id of a channel is remembered after the channel has ended."""
    in_flight: int = attrs.field(default=65_536, validator=ABOVE_ZERO)
    """The number of messages of one channel that may be unsent or unanswered. At most 1024 of them may be unsent, or
    have a receipt, an attachment or a stream of their own."""
    unopened: int = attrs.field(default=64, validator=ABOVE_ZERO)
    """The number of unordered messages of one channel that may wait until the peer allows another stream."""
    unreliable_queue: int = attrs.field(default=256, validator=ABOVE_ZERO)
    """The number of unreliable messages of one channel that may wait for the link. If there are more, the oldest ones
    are dropped."""
    streams: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """The number of streams that the peer may have open, in addition to two for each channel that `Limits.channels`
    allows."""
    early_bytes: int = attrs.field(default=1024 * KIB, validator=ABOVE_ZERO)
    """The size of the datagrams that are kept until the peer's connection headers have arrived."""
    connection_headers: int = attrs.field(default=16 * KIB, validator=ABOVE_ZERO)
    """The size of the connection headers."""
    headers: int = attrs.field(default=64 * KIB, validator=ABOVE_ZERO)
    """The size of the headers of one message or channel."""
    header_pairs: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """The number of headers of one message, channel or connection."""
    attachments: int = attrs.field(default=1024, validator=ABOVE_ZERO)
    """The number of channels that may be attached to one message."""
    gaps: int = attrs.field(default=4096, validator=ABOVE_ZERO)
    """The number of separate ranges of received message numbers that are kept for one channel."""
    datagram: int = attrs.field(default=16 * KIB, validator=ABOVE_ZERO)
    """The size of the largest datagram when Aqueduct runs over a byte stream."""
