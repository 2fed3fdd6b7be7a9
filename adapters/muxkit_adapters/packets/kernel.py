"""Linux's options for UDP sockets: runs of packets in one call, the path MTU, and errors with an address.

Python's socket module lacks most of these constants, which are part of Linux's stable interface. On other systems, the
functions here report that nothing is supported, and the callers use plain calls.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

from .options import Address

LINUX = sys.platform == "linux"

SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
IP_MTU_DISCOVER, IP_RECVERR, IP_MTU = 10, 11, 14
IPV6_MTU_DISCOVER, IPV6_MTU, IPV6_RECVERR = 23, 24, 25
PMTUDISC_DO = 2  # never fragment, and raise EMSGSIZE instead
IP_PKTINFO, IPV6_RECVPKTINFO, IPV6_PKTINFO = 8, 49, 50
SO_RXQ_OVFL = 40
MSG_ERRQUEUE = 0x2000

ANCILLARY = 128  # bytes for the ancillary data below
MOST_SEGMENTS = 64  # packets per run; older kernels accept no more
MOST_RUN = 65_000  # bytes per run
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # bytes of IP and UDP in each packet
MOST_PAYLOAD = {socket.AF_INET: 65_507, socket.AF_INET6: 65_527}

_segment = struct.Struct("=H")
_number = struct.Struct("=i")
_count = struct.Struct("=I")
_packet_info = struct.Struct("=i4s4s")  # interface, local address, destination in the header
_packet_info6 = struct.Struct("=16si")  # destination, interface
_extended_error = struct.Struct("=IBBBBII")


Note = tuple[int, int, bytes]
"""An item of ancillary data: level, type, content."""


def prepare(sock: socket.socket, *, reports: bool) -> bool:
    """Turn off fragmentation and turn on receiving runs of packets. Return True if runs can also be sent.

    `reports` turns on the errors that `reported` reads. Without them, an unconnected socket doesn't learn that a packet
    was refused.
    """
    if not LINUX:
        return False
    _set(sock, IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_DO)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
    if reports:
        _set(sock, IP_RECVERR, IPV6_RECVERR, 1)
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
        sock.getsockopt(SOL_UDP, UDP_SEGMENT)
    except OSError:
        return False
    return True


def ask_for_destinations(sock: socket.socket) -> bool:
    """Request the local address of each received packet. Return True if the system supports it."""
    return LINUX and _set(sock, IP_PKTINFO, IPV6_RECVPKTINFO, 1)


def path_mtu(sock: socket.socket, address: Address | None = None) -> int | None:
    """Return the largest IP packet, including headers, that the kernel believes the path can carry.

    Returns None if it is unknown. If `sock` isn't connected, pass the `address` of the peer.
    """
    if not LINUX:
        return None
    level, option = _pick(sock, IP_MTU, IPV6_MTU)
    try:
        if address is None:
            return sock.getsockopt(level, option)
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
            # Connecting sends nothing. It looks up the route, and only a connected socket can report the MTU.
            probe.connect(address)
            return probe.getsockopt(level, option)
    except OSError:
        return None


def run_note(size: int) -> Note:
    """Return ancillary data that tells the kernel to split one buffer into packets of `size`."""
    return SOL_UDP, UDP_SEGMENT, _segment.pack(size)


def read_notes(notes: list[Note]) -> tuple[int, int | None, Note | None]:
    """Read the ancillary data of a received run.

    Returns:
        The size of its packets (0 for a single packet), the number of packets that the kernel has dropped so far, and
        ancillary data that sends answers from the address at which the run arrived.
    """
    size, dropped, source = 0, None, None
    for level, kind, data in notes:
        if level == SOL_UDP and kind == UDP_GRO:
            (size,) = _number.unpack_from(data)
        elif level == socket.SOL_SOCKET and kind == SO_RXQ_OVFL:
            (dropped,) = _count.unpack_from(data)
        elif level == socket.IPPROTO_IP and kind == IP_PKTINFO:
            local = _packet_info.unpack_from(data)[1]
            source = (level, kind, _packet_info.pack(0, local, b""))
        elif level == socket.IPPROTO_IPV6 and kind == IPV6_PKTINFO:
            local = _packet_info6.unpack_from(data)[0]
            source = (level, kind, _packet_info6.pack(local, 0))
    return size, dropped, source


def reported(sock: socket.socket, most: int) -> Iterator[tuple[Address, int]]:
    """Read the network's reports about earlier packets, at most `most`. Yield the packets' addresses and the errors."""
    if not LINUX:
        return
    for _ in range(most):
        try:
            _, notes, _, address = sock.recvmsg(0, 512, MSG_ERRQUEUE)
        except OSError:
            return
        for level, kind, data in notes:
            if (level, kind) in {(socket.IPPROTO_IP, IP_RECVERR), (socket.IPPROTO_IPV6, IPV6_RECVERR)}:
                yield address, _extended_error.unpack_from(data)[0]


def _set(sock: socket.socket, v4: int, v6: int, value: int) -> bool:
    try:
        sock.setsockopt(*_pick(sock, v4, v6), value)
    except OSError:
        return False
    return True


def _pick(sock: socket.socket, v4: int, v6: int) -> tuple[int, int]:
    """Return the level and the number of an option that has different numbers for IPv4 and IPv6."""
    return (socket.IPPROTO_IPV6, v6) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, v4)
