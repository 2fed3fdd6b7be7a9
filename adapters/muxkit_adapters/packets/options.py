"""Options, counters and errors of the packet transports."""

from __future__ import annotations

import errno
import os
from typing import TypedDict

import attrs
import trio

from muxkit import Limits, LocalProtocolError

LARGEST = 1232  # bytes: fits IPv6's minimum MTU of 1280 less 48 of headers, so it passes where more is swallowed
RECEIVE_BUFFER = 4 * 1024 * 1024  # bytes asked of the kernel; it may give less
SEND_BUFFER = 1024 * 1024
IDLE_TIMEOUT = 60.0  # s of silence after which a server forgets a peer
REFUSALS = 8  # in a row, with nothing received in between, after which a peer counts as gone
TURN_PACKETS = 128  # received before other tasks run
TURN_BYTES = 65_536
TURN = 0.001  # s of work on packets in a server before other tasks run
STEP_PACKETS = 16  # received between two looks at the clock

Address = tuple[str, int] | tuple[str, int, int, int]
"""An address as the socket module writes it: of IPv4, or of IPv6."""

UNREACHABLE = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,  # Windows says so for ECONNREFUSED
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EACCES,
    errno.EPERM,  # a packet filter
    errno.EPROTO,
    errno.ENOPROTOOPT,
}
"""Errors that the network reports about a packet sent before; any machine on the path can forge them."""


class PacketTooLarge(LocalProtocolError, ValueError):
    """A packet is larger than its link can send now; it was not sent, and the link goes on.

    `size` is its size and `limit` what fits, in bytes.
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
    """Sizes of a socket's buffers in the kernel, asked for and granted, in bytes."""

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
    """Packets that found the inbox full; a client's inbox is the socket's buffer."""
    lost: int
    """Packets, counted as sent too, that the kernel would not send: no route, a packet filter, no memory."""
    refused: int
    """Reports of the network that the peer cannot be reached."""


@attrs.define(kw_only=True)
class ServerCounters:
    """Counters of one listener, updated while it runs."""

    admitted: int = 0
    """Addresses for which a handler was started."""
    finished: int = 0
    """Handlers that ended."""
    turned_away: int = 0
    """First packets that found `Limits.connections` handlers running, or too many newcomers before them."""
    evicted: int = 0
    """Addresses without proof that gave way to newer ones: `Limits.half_open`."""
    idle: int = 0
    """Peers forgotten because they were silent for too long."""
    refused: int = 0
    """Peers forgotten because the network reported them as unreachable."""
    empty: int = 0
    """Empty packets from addresses that were not peers; they start nothing."""
    late: int = 0
    """Packets for a link that was closed on this side a moment before."""
    dropped: int = 0
    """Packets that found the inbox of their peer full."""
    dropped_by_kernel: int = 0
    """Packets that found the socket's receive buffer full, on systems that count them."""
    half_open: int = 0
    """Peers at present without a proved address, or with an unfinished handshake."""
    waiting: int = 0
    """Peers at present with a proved address that wait for a place."""
    peers: int = 0
    """Peers at present with a proved address and a finished handshake."""


class PacketKeywords(TypedDict, total=False):
    """Keywords of `connect` and `serve` that bound the packets of one socket; `PacketOptions` has their meaning."""

    largest: int
    receive_buffer: int
    send_buffer: int
    refusals: int | None


class ListenerKeywords(PacketKeywords, total=False):
    """Keywords of `serve`; `ListenerOptions` has their meaning."""

    idle: float
    counters: ServerCounters | None


@attrs.frozen(kw_only=True)
class PacketOptions:
    """What bounds the packets of one socket."""

    largest: int = LARGEST
    """The largest packet to send, in bytes; a narrow path lowers it."""
    receive_buffer: int = RECEIVE_BUFFER
    """Bytes asked of the kernel."""
    send_buffer: int = SEND_BUFFER
    """Bytes asked of the kernel."""
    refusals: int | None = REFUSALS
    """Reports in a row that the peer is unreachable, after which it counts as gone; None for never."""

    def check(self, *, least: int = 1) -> None:
        """Raise ValueError if `largest` is out of bounds; `least` is the smallest that the transport can use."""
        if not least <= self.largest <= 65_507:
            raise ValueError(f"largest={self.largest}: a packet may have {least} to 65,507 bytes")


def _given_or_new(counters: ServerCounters | None) -> ServerCounters:
    return ServerCounters() if counters is None else counters


@attrs.frozen(kw_only=True)
class ListenerOptions(PacketOptions):
    """What bounds the peers of a listener."""

    limits: Limits
    idle: float = IDLE_TIMEOUT
    """Seconds of silence after which a peer is forgotten."""
    counters: ServerCounters = attrs.field(factory=ServerCounters, converter=_given_or_new)


@attrs.define
class Refusals:
    """Counts the network's reports that a peer is unreachable, and decides when they end the link.

    The first one ends it if no packet has been received yet; later ones end it once `most` come in a row, since ICMP
    can be forged. With `most=None` none does.
    """

    most: int | None = REFUSALS
    was_heard: bool = False
    in_a_row: int = 0
    total: int = 0

    def heard(self) -> None:
        self.was_heard = True
        self.in_a_row = 0

    def refused(self) -> bool:
        """Count one report; return True if it ends the link."""
        self.total += 1
        self.in_a_row += 1
        return self.most is not None and (not self.was_heard or self.in_a_row >= self.most)


def loss(peer: str, why: OSError | str) -> trio.BrokenResourceError:
    """Make the error for the tasks that wait for a lost peer."""
    if not isinstance(why, OSError):
        return trio.BrokenResourceError(f"{peer}: {why}")
    error = trio.BrokenResourceError(f"{peer}: {os.strerror(why.errno or errno.ECONNREFUSED)}")
    error.__cause__ = why
    return error
