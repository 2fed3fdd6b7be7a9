"""The bounds on what a peer can cost: one object, every default finite, each named in the error that it raises."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, TypeVar

import attrs

from muxkit._settings import ABOVE_ZERO

KIB = 1024
MIB = 1024 * KIB

SHORT_WINDOW = 1 * MIB  # bytes; the largest window of a channel on a path that nobody has measured, see `core`

MAX_HEADERS = 65_535  # bytes of the headers of a channel: their length is a 16-bit number on the wire

NumberT = TypeVar("NumberT", int, float)


def _limit(default: NumberT) -> NumberT:
    number: NumberT = attrs.field(default=default, validator=ABOVE_ZERO)
    return number


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds on what a peer can cost; sizes in bytes, times in seconds."""

    # Counts
    connections: int = _limit(1024)
    """Live connections of one listener; more wait in the kernel's backlog, or in place of one that has been idle for
    longest without a channel."""
    half_open: int = _limit(4096)
    """Connections of one listener whose handshake is unfinished, or whose peer has not said a valid word yet; over UDP,
    addresses that are not verified yet. More wait until one makes progress, or gives way because it makes none."""
    half_open_per_address: int = _limit(4096)
    """The same of one address: an IPv4 address, or the first 64 bits of an IPv6 address. Further ones are closed."""
    channels: int = _limit(16_384)
    """Live channels in one connection that the peer opened, and as many that we opened; `channel_memory` may allow
    fewer."""
    backlog: int = _limit(16_384)
    """Channels that the peer opened and the application has not taken yet; more are refused."""
    pongs: int = _limit(1_048_576)
    """Answers to pings that may wait because the peer does not read them."""
    tombstones: int = _limit(4096)
    """Ended channels whose late frames are still recognised."""
    resets_per_second: int = _limit(200)
    """Channels that the peer may cancel before we are done with them, sustained."""
    resets_burst: int = _limit(1000)
    """The same, at once."""

    # Bytes
    channel_memory: int = _limit(32 * MIB)
    """What the live channels that the peer opened may cost beside their windows: objects, queues, a task that handles
    each. Each protocol says what one of its channels costs."""
    channel_bytes: int = _limit(32 * MIB)
    """The largest window of one channel: credit granted and data not yet consumed. A window exceeds 1 MiB only while
    the path holds that much and the application takes it."""
    channel_first: int = _limit(128 * KIB)
    """The window that a channel begins with; it grows while the channel is busy, up to `channel_bytes`."""
    channel_floor: int = _limit(4 * KIB)
    """The window that a channel gets even when `connection_bytes` is spent."""
    connection_bytes: int = _limit(64 * MIB)
    """The windows of all channels of one connection together, floors apart."""
    headers: int = _limit(16 * KIB)
    """The headers of one channel that are accepted, or sent, as they are encoded; at most 65,535."""
    message: int = _limit(16 * MIB)
    """The largest message that is accepted, or sent."""
    reassembly: int = _limit(64 * MIB)
    """Credit lent beyond the windows to messages that arrive in parts, for each connection."""
    outbox: int = _limit(1 * MIB)
    """Bytes that `send` may queue ahead of the transport, for each connection."""

    # Times
    handshake: float = _limit(10.0)
    """A TLS, DTLS or WebSocket handshake must be finished by then, and an unverified UDP address may be silent that
    long. When the listener is full, who makes no progress for a tenth of it gives way."""
    stall: float = _limit(30.0)
    """While a message is unfinished, `stall_bytes` must come in each such interval."""
    stall_bytes: int = _limit(1024)

    bound_of_channels: ClassVar[str] = "channels"
    """The field that says how many channels there can be: this one, or `channel_memory`."""

    @property
    def short_window(self) -> int:
        """The largest window of a channel where windows don't follow the path: 1 MiB, or `channel_bytes` if lower."""
        return min(self.channel_bytes, SHORT_WINDOW)

    def at_price(self, price: int) -> Limits:
        """Return the same limits, with at most as many channels as `channel_memory` pays for at `price` bytes each."""
        most = max(1, self.channel_memory // price)
        return self if most >= self.channels else _at_most(self, most)

    def __attrs_post_init__(self) -> None:
        if self.reassembly < self.message:
            raise ValueError(
                f"Limits(reassembly={self.reassembly}) is below message={self.message}: "
                "such a message could never be put together"
            )
        if self.headers > MAX_HEADERS:
            raise ValueError(
                f"Limits(headers={self.headers}) is above {MAX_HEADERS}, which their length field can hold"
            )
        if self.channel_floor > self.channel_bytes:
            raise ValueError(f"Limits(channel_floor={self.channel_floor}) is above channel_bytes={self.channel_bytes}")


class _LimitsByMemory(Limits):
    """Limits whose `channels` follow from `channel_memory`."""

    bound_of_channels = "channel_memory"


@lru_cache(maxsize=64)  # each session asks, and the sessions of a server have the same limits
def _at_most(limits: Limits, channels: int) -> _LimitsByMemory:
    values = attrs.asdict(limits, recurse=False)
    return _LimitsByMemory(**values | {"channels": channels, "backlog": min(channels, limits.backlog)})
