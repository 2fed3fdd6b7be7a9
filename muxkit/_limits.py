"""`Limits`, which bound how much memory and work a peer can cause.

Each setting has a finite default. If a peer exceeds a limit, the error or the log line names the setting.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, TypeVar

import attrs

from muxkit._settings import ABOVE_ZERO

KIB = 1024
MIB = 1024 * KIB

# The largest window of a channel, in bytes, while the round-trip time isn't known (`core.receive_windows`)
SHORT_WINDOW = 1 * MIB

MAX_HEADERS = 65_535  # bytes; the length of the headers is a 16-bit number on the wire

NumberT = TypeVar("NumberT", int, float)


def _limit(default: NumberT) -> NumberT:
    number: NumberT = attrs.field(default=default, validator=ABOVE_ZERO)
    return number


@attrs.frozen(kw_only=True)
class Limits:
    """Limits for the memory and work that a peer can cause. Sizes are in bytes, and times in seconds."""

    # Counts
    connections: int = _limit(1024)
    """How many connections a listener may have. If there are more clients, a session that has been idle without a
    channel is closed for a new one. Otherwise, new clients wait in the kernel's backlog."""
    half_open: int = _limit(4096)
    """How many connections of a listener may be half-open. A connection is half-open until its handshakes are finished
    and its peer has sent the first valid frame. Over UDP, an address is half-open until it is verified. If there are
    more, a connection that makes no progress is closed for a new one. Otherwise, new clients wait."""
    half_open_per_address: int = _limit(4096)
    """The same limit for a single address, which is an IPv4 address or the first 64 bits of an IPv6 address. Further
    connections from this address are closed."""
    channels: int = _limit(16_384)
    """How many channels of a connection the peer may have open. This side may open the same number. `channel_memory`
    may lower it."""
    backlog: int = _limit(16_384)
    """How many channels may wait until the application accepts them, for each connection. Further ones are refused."""
    pongs: int = _limit(1_048_576)
    """How many answers to pings may wait to be written, because the peer sends pings and doesn't read the answers."""
    tombstones: int = _limit(4096)
    """How many ended channels are remembered for each connection, so that frames which arrive late are recognized."""
    resets_per_second: int = _limit(200)
    """How many of its channels the peer may cancel per second, on average, before their handlers have finished. If it
    cancels more, further handlers start later."""
    resets_burst: int = _limit(1000)
    """How many the peer may cancel in quick succession before `resets_per_second` applies."""

    # Bytes
    channel_memory: int = _limit(32 * MIB)
    """How much memory the peer's open channels may need, without their windows, for each connection. This is memory for
    objects, queues and the tasks of handlers. Each protocol knows how much one of its channels needs."""
    channel_bytes: int = _limit(32 * MIB)
    """The largest window of a channel: how many bytes may be under way or waiting for the application. A window grows
    beyond 1 MiB only if the round-trip time is so long, and the application so fast, that it helps."""
    channel_first: int = _limit(128 * KIB)
    """The first window of a channel. It grows while the channel is busy, up to `channel_bytes`."""
    channel_floor: int = _limit(4 * KIB)
    """The part of each window that doesn't count in `connection_bytes`. So each channel has at least this window."""
    connection_bytes: int = _limit(64 * MIB)
    """The total of all windows of a connection, not counting `channel_floor` bytes of each."""
    headers: int = _limit(16 * KIB)
    """The largest encoded headers of a channel that this side accepts or sends. At most 65,535."""
    message: int = _limit(16 * MIB)
    """The largest message that this side accepts or sends."""
    reassembly: int = _limit(64 * MIB)
    """How much credit may be lent to messages that are larger than their windows, for each connection."""
    outbox: int = _limit(1 * MIB)
    """How many bytes `send` may accept before the transport takes them, for each connection."""

    # Times
    handshake: float = _limit(10.0)
    """How long a TLS, DTLS or WebSocket handshake may take, and how long a UDP address that isn't verified may be
    silent. If a listener is full, a connection whose handshake has made no progress for a tenth of this time is closed
    for a new one."""
    stall: float = _limit(30.0)
    """The interval of `stall_bytes`."""
    stall_bytes: int = _limit(1024)
    """How many bytes of an unfinished message must arrive in each interval of `stall` seconds."""

    bound_of_channels: ClassVar[str] = "channels"
    """The name of the setting that limits the number of channels: "channels" or "channel_memory"."""

    @property
    def short_window(self) -> int:
        """The largest window of a channel while the round-trip time isn't known: 1 MiB, or `channel_bytes` if lower."""
        return min(self.channel_bytes, SHORT_WINDOW)

    def at_price(self, price: int) -> Limits:
        """Return these limits with fewer `channels`, if `channel_memory` isn't enough for all at `price` bytes each."""
        most = max(1, self.channel_memory // price)
        return self if most >= self.channels else _at_most(self, most)

    def __attrs_post_init__(self) -> None:
        if self.reassembly < self.message:
            raise ValueError(
                f"Limits(reassembly={self.reassembly}) is below message={self.message}: expected at least as much, "
                "because a message that is larger than its window needs this credit"
            )
        if self.headers > MAX_HEADERS:
            raise ValueError(
                f"Limits(headers={self.headers}) is above {MAX_HEADERS}, the largest size that can be encoded"
            )
        if self.channel_floor > self.channel_bytes:
            raise ValueError(f"Limits(channel_floor={self.channel_floor}) is above channel_bytes={self.channel_bytes}")


class _LimitsByMemory(Limits):
    """Limits whose `channels` were lowered because of `channel_memory`."""

    bound_of_channels = "channel_memory"


@lru_cache(maxsize=64)  # each session calls this, and all sessions of a server have the same limits
def _at_most(limits: Limits, channels: int) -> _LimitsByMemory:
    values = attrs.asdict(limits, recurse=False)
    return _LimitsByMemory(**values | {"channels": channels, "backlog": min(channels, limits.backlog)})
