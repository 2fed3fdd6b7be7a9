"""What do the packet transports have in common? Sizes, what a refusal means, and what is counted."""

from __future__ import annotations

import errno
import os

import attrs
import trio

from muxkit import LocalProtocolError

LARGEST = 1232  # bytes: fits IPv6's minimum MTU of 1280 less 48 of headers, so it passes where more is swallowed
RECEIVE_BUFFER = 4 * 1024 * 1024  # bytes asked of the kernel; it may give less
SEND_BUFFER = 1024 * 1024
IDLE = 60.0  # s of silence after which a server forgets a peer
REFUSALS = 8  # in a row, with nothing received in between, until a peer that had been heard counts as gone
TURN_PACKETS = 128  # received without giving way to other tasks
TURN_BYTES = 65_536
TURN = 0.001  # s that a server works on packets before the others get their turn
STEP_PACKETS = 16  # received before the clock is asked

Address = tuple[str, int] | tuple[str, int, int, int]
"""As the socket module writes it: of IPv4, or of IPv6."""

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
"""What a network says about a packet sent before; anybody on the way can say so."""


class PacketTooLarge(LocalProtocolError, ValueError):
    """A packet is larger than its link can send now; it was not sent, and the link goes on.

    `size` is what it has, `limit` what fits, both in bytes.
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
    """What the kernel was asked to hold for a socket, and what it granted, in bytes."""

    receive_asked: int
    receive: int
    send_asked: int
    send: int


@attrs.frozen(kw_only=True)
class PacketStats:
    """What became of the packets of one link."""

    received: int
    received_bytes: int
    sent: int
    sent_bytes: int
    dropped: int
    """Came while the inbox was full, since nobody received; a client's inbox is the socket's buffer."""
    lost: int
    """Those of them that the kernel would not send: no route, a packet filter, no memory."""
    refused: int
    """Times that the network said that the peer cannot be reached."""


@attrs.define(kw_only=True)
class ServerCounters:
    """What a listener has seen; it counts while it runs."""

    admitted: int = 0
    """Addresses for which a handler was started."""
    finished: int = 0
    """Handlers that ended."""
    turned_away: int = 0
    """First packets that found `Limits.connections` handlers running, or too many newcomers before them."""
    evicted: int = 0
    """Addresses without proof that gave way to newer ones: `Limits.half_open`."""
    idle: int = 0
    """Peers forgotten after too long a silence."""
    refused: int = 0
    """Peers forgotten because the network says that nobody is there."""
    empty: int = 0
    """Empty packets from addresses that were not peers; they start nothing."""
    late: int = 0
    """Packets of a conversation that had ended here a moment before."""
    dropped: int = 0
    """Packets that found the inbox of their peer full."""
    dropped_by_kernel: int = 0
    """Packets that found the socket's receive buffer full, where the kernel tells."""
    half_open: int = 0
    """Peers now that have not proved their address, or not finished their handshake."""
    peers: int = 0
    """Peers now that have."""


@attrs.define
class Refusals:
    """When does a refusal end a link? The first one if nobody was ever heard, then `most` in a row; None is never.

    Refusals come by ICMP, which can be forged; so one of them is no proof once the peer has been heard.
    """

    most: int | None = REFUSALS
    was_heard: bool = False
    in_a_row: int = 0
    total: int = 0

    def heard(self) -> None:
        self.was_heard = True
        self.in_a_row = 0

    def refused(self) -> bool:
        """Count one; whether it is over."""
        self.total += 1
        self.in_a_row += 1
        return self.most is not None and (not self.was_heard or self.in_a_row >= self.most)


def loss(peer: str, why: OSError | str) -> trio.BrokenResourceError:
    """What is raised where somebody waits for a peer that is gone."""
    if not isinstance(why, OSError):
        return trio.BrokenResourceError(f"{peer}: {why}")
    error = trio.BrokenResourceError(f"{peer}: {os.strerror(why.errno or errno.ECONNREFUSED)}")
    error.__cause__ = why
    return error


def check_largest(largest: int, *, least: int = 1) -> None:
    if not least <= largest <= 65_507:
        raise ValueError(f"largest={largest}: a packet may have {least} to 65,507 bytes")
