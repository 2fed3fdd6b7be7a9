"""How do packets get in and out with few system calls? One UDP socket, read and written in trains.

The kernel cuts a train of equal packets (UDP_SEGMENT) and puts one together again (UDP_GRO); without either each
packet is one call. docs/reference/quic.md has the figures.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

Address = Any
"""As `socket` has it for the family: (host, port) or (host, port, flow, scope)."""

Packet = tuple[bytes, Address]

UDP_SEGMENT = 103  # linux/udp.h; Python has no names for them
UDP_GRO = 104
SOL_UDP = 17
TRAIN_MOST = 64  # packets, what the kernel cuts at most
TRAIN_BYTES = 65_000
READ = 65_536  # bytes, one packet or one train
TURN_BYTES = 64 * 1024  # to read before the others get their turn
TURN_READS = 64
BUFFER = 4 * 1024 * 1024  # bytes, what the kernel is asked to keep in each direction

CAN_BATCH = sys.platform == "linux"
NO_TRAINS = {errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE}
CLOSED_HERE = {errno.EBADF, errno.ENOTSOCK}


class UdpSocket:
    """A bound UDP socket without blocking; `peer` if it is connected."""

    def __init__(self, sock: socket.socket, peer: Address | None = None) -> None:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        self._socket = sock
        self._peer = peer
        self._sends_trains = CAN_BATCH
        self._receives_trains = CAN_BATCH and _try_gro(sock)
        self._writable = trio.Lock()  # the kernel wakes one waiter only
        self.dropped = 0
        """Packets that the kernel refused to send; they count as lost on the way."""

    @property
    def address(self) -> Address:
        """Where it is bound."""
        return self._socket.getsockname()

    @property
    def socket(self) -> socket.socket:
        """For options; it alone sends, receives and closes."""
        return self._socket

    def close(self) -> None:
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    # --- receiving

    async def receive(self) -> list[Packet]:
        """Wait for packets, then give what there is, within bounds.

        Raises `trio.ClosedResourceError` when it was closed, and the kernel's ConnectionRefusedError when somebody
        at the connected peer says that nobody listens.
        """
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            packets = self._read_all()
            if packets:
                return packets

    def _read_all(self) -> list[Packet]:
        packets: list[Packet] = []
        size = 0
        for _ in range(TURN_READS):
            try:
                size += self._read(packets)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in CLOSED_HERE:
                    raise trio.ClosedResourceError("this socket was closed on our side") from error
                if packets:
                    break  # it is told of errors one at a time, and the next call brings another
                if isinstance(error, ConnectionRefusedError):
                    raise
                continue
            if size >= TURN_BYTES:
                break
        return packets

    def _read(self, packets: list[Packet]) -> int:
        if not self._receives_trains:
            data, address = self._socket.recvfrom(READ)
            packets.append((data, self._peer or address))
            return len(data)
        data, notes, _, address = self._socket.recvmsg(READ, 64)
        address = self._peer or address
        each = _segment_size(notes) if notes else 0
        if 0 < each < len(data):
            packets += [(data[start : start + each], address) for start in range(0, len(data), each)]
        else:
            packets.append((data, address))
        return len(data)

    # --- sending

    def send_nowait(self, packets: Sequence[Packet]) -> int:
        """Send what the kernel takes now, in order; give the number of packets that are dealt with.

        A packet that it refuses for other reasons than a full buffer counts as lost on its way.
        """
        start, total = 0, len(packets)
        while start < total:
            stop = self._train_end(packets, start) if self._sends_trains else start + 1
            try:
                self._send_train(packets, start, stop)
            except (BlockingIOError, InterruptedError):
                return start
            except OSError as error:
                if error.errno in CLOSED_HERE:
                    raise trio.ClosedResourceError("this socket was closed on our side") from error
                if stop - start > 1 and error.errno in NO_TRAINS:
                    self._sends_trains = False
                    continue
                self.dropped += stop - start
            start = stop
        return start

    async def wait_writable(self) -> None:
        async with self._writable:
            if self._socket.fileno() == -1:
                raise trio.ClosedResourceError("this socket was closed on our side")
            await trio.lowlevel.wait_writable(self._socket)

    def _train_end(self, packets: Sequence[Packet], start: int) -> int:
        """Packets of one size to one address; the last may be smaller."""
        data, address = packets[start]
        each = len(data)
        room = TRAIN_BYTES - each
        stop = start + 1
        most = min(len(packets), start + TRAIN_MOST)
        while stop < most:
            size = len(packets[stop][0])
            if size > each or size > room or packets[stop][1] != address:
                break
            room -= size
            stop += 1
            if size < each:
                break
        return stop

    def _send_train(self, packets: Sequence[Packet], start: int, stop: int) -> None:
        data, address = packets[start]
        if stop - start == 1:
            if self._peer is None:
                self._socket.sendto(data, address)
            elif address == self._peer:
                self._socket.send(data)
            return
        train = [packet for packet, _ in packets[start:stop]]
        notes = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", len(data)))]
        if self._peer is None:
            self._socket.sendmsg(train, notes, 0, address)
        elif address == self._peer:
            self._socket.sendmsg(train, notes)


def bound(family: int, address: Address, *, peer: Address | None = None) -> UdpSocket:
    """A socket at `address`, connected to `peer` if one is given."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        if peer is not None:
            sock.connect(peer)
        return UdpSocket(sock, peer)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"quic {address[0]}:{address[1]}: {os.strerror(error.errno or 0)}") from error


def _try_gro(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True


def _segment_size(notes: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in notes:
        if level == SOL_UDP and kind == UDP_GRO:
            return int.from_bytes(data[:4], sys.byteorder)
    return 0
