"""Options, counters and errors of the packet transports.

UDP, DTLS and partly QUIC use them. The constants are the defaults of the options, and the limits of the work that a
task does before others run.
"""

from __future__ import annotations

import errno
import os
from typing import TypedDict

import attrs
import trio

from muxkit import Limits, LocalProtocolError

LARGEST = 1232  # bytes: IPv6's minimum MTU of 1280 minus 48 of headers, so it passes where larger packets are dropped
RECEIVE_BUFFER = 4 * 1024 * 1024  # bytes requested from the kernel, which may grant less
SEND_BUFFER = 1024 * 1024
IDLE_TIMEOUT = 60.0  # s of silence after which a server forgets a peer
REFUSALS = 8  # reports in a row, without a packet in between, after which a peer counts as lost
TURN_PACKETS = 128  # packets to receive before other tasks run
TURN_BYTES = 65_536
TURN = 0.001  # s of work on packets in a server before other tasks run
STEP_PACKETS = 16  # packets to receive between two looks at the clock

Address = tuple[str, int] | tuple[str, int, int, int]
"""An IPv4 or IPv6 address in the form of the socket module."""

UNREACHABLE = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,  # Windows reports this instead of ECONNREFUSED
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EACCES,
    errno.EPERM,  # from a packet filter
    errno.EPROTO,
    errno.ENOPROTOOPT,
}
"""Errors with which the network reports that an earlier packet wasn't delivered. Hosts on the path can forge them."""


class PacketTooLarge(LocalProtocolError, ValueError):
    """Raised for a packet that is larger than its link can send now. It wasn't sent, and the link remains usable.

    `size` is the size of the packet and `limit` the largest size that fits, in bytes.
    """

    def __init__(self, peer: str, size: int, limit: int, path_mtu: int | None = None) -> None:
        path = "" if path_mtu is None else f" (path MTU {path_mtu:,})"
        super().__init__(f"{peer}: a packet of {size:,} bytes is above packet_limit={limit:,}{path}")
        self.peer = peer
        self.size = size
        self.limit = limit
        self.path_mtu = path_mtu


@attrs.frozen
class Buffers:
    """Requested and granted sizes of a socket's buffers in the kernel, in bytes."""

    receive_asked: int
    receive: int
    send_asked: int
    send: int


@attrs.frozen(kw_only=True)
class PacketStats:
    """Counters of one packet link."""

    received: int
    received_bytes: int
    sent: int
    sent_bytes: int
    dropped: int
    """Packets lost because the inbox was full. The inbox of a client is the socket's buffer."""
    lost: int
    """Packets that the kernel didn't send: no route, a packet filter, or no memory. They also count as sent."""
    refused: int
    """Reports of the network that the peer is unreachable."""


@attrs.define(kw_only=True)
class ServerCounters:
    """Counters of one listener, updated while it runs."""

    admitted: int = 0
    """Addresses for which a handler was started."""
    finished: int = 0
    """Handlers that have ended."""
    turned_away: int = 0
    """First packets that arrived while `Limits.connections` handlers ran, or while too many newcomers waited."""
    evicted: int = 0
    """Unproved addresses that were dropped for newer ones because of `Limits.half_open`."""
    idle: int = 0
    """Peers that were forgotten because they were silent for too long."""
    refused: int = 0
    """Peers that were forgotten because the network reported them as unreachable."""
    empty: int = 0
    """Empty packets from unknown addresses. They don't start a handler."""
    late: int = 0
    """Packets for links that had just been closed on this side."""
    dropped: int = 0
    """Packets lost because the inbox of their peer was full."""
    dropped_by_kernel: int = 0
    """Packets lost because the socket's receive buffer was full, on systems that count them."""
    half_open: int = 0
    """Current number of peers with an unproved address or an unfinished handshake."""
    waiting: int = 0
    """Current number of peers with a proved address that wait for a place."""
    peers: int = 0
    """Current number of peers with a proved address and a finished handshake."""


class PacketKeywords(TypedDict, total=False):
    """Keywords of `connect` and `serve` for the packets of one socket, which `PacketOptions` describes."""

    largest: int
    receive_buffer: int
    send_buffer: int
    refusals: int | None


class ListenerKeywords(PacketKeywords, total=False):
    """Keywords of `serve`, which `ListenerOptions` describes."""

    idle: float
    counters: ServerCounters | None


@attrs.frozen(kw_only=True)
class PacketOptions:
    """Limits for the packets of one socket."""

    largest: int = LARGEST
    """The largest packet to send, in bytes. A smaller path MTU lowers it."""
    receive_buffer: int = RECEIVE_BUFFER
    """Receive buffer requested from the kernel, in bytes."""
    send_buffer: int = SEND_BUFFER
    """Send buffer requested from the kernel, in bytes."""
    refusals: int | None = REFUSALS
    """Reports in a row that the peer is unreachable, after which it counts as lost. None ignores such reports."""

    def check(self, *, least: int = 1) -> None:
        """Raise ValueError if `largest` is out of range. `least` is the smallest size that the transport can use."""
        if not least <= self.largest <= 65_507:
            raise ValueError(f"largest={self.largest}: a packet may have {least} to 65,507 bytes")


def _given_or_new(counters: ServerCounters | None) -> ServerCounters:
    return ServerCounters() if counters is None else counters


@attrs.frozen(kw_only=True)
class ListenerOptions(PacketOptions):
    """Limits for the peers of a listener."""

    limits: Limits
    idle: float = IDLE_TIMEOUT
    """Seconds of silence after which a peer is forgotten."""
    counters: ServerCounters = attrs.field(factory=ServerCounters, converter=_given_or_new)


@attrs.define
class Refusals:
    """Counts the network's reports that a peer is unreachable, and decides when they end the link.

    Reports can be forged. If no packet was received from the peer yet, the first report ends the link. Otherwise `most`
    reports in a row end it. With `most=None` no report does.
    """

    most: int | None = REFUSALS
    was_heard: bool = False
    in_a_row: int = 0
    total: int = 0

    def heard(self) -> None:
        """Record that a packet was received, which resets the count of reports in a row."""
        self.was_heard = True
        self.in_a_row = 0

    def refused(self) -> bool:
        """Count one report. Return True if it ends the link."""
        self.total += 1
        self.in_a_row += 1
        return self.most is not None and (not self.was_heard or self.in_a_row >= self.most)


def loss(peer: str, why: OSError | str) -> trio.BrokenResourceError:
    """Return the error for tasks that wait for a lost peer."""
    if not isinstance(why, OSError):
        return trio.BrokenResourceError(f"{peer}: {why}")
    error = trio.BrokenResourceError(f"{peer}: {os.strerror(why.errno or errno.ECONNREFUSED)}")
    error.__cause__ = why
    return error
