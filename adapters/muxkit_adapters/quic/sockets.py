"""UDP sockets for QUIC, read and written in runs of packets to save system calls.

The kernel cuts a run of equal packets (UDP_SEGMENT) and joins one again (UDP_GRO); without them each packet is one
call. docs/reference/quic.md has the figures.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import trio

from .._sockets import CLOSED_HERE
from ..packets import kernel
from ..packets.sockets import open_socket

Address = Any
"""An address as `socket` has it for the family: (host, port) or (host, port, flow, scope)."""

Packet = tuple[bytes, Address]

READ_SIZE = 65_536  # bytes, one packet or one run
TURN_BYTES = 64 * 1024  # to read before other tasks run
TURN_READS = 64  # calls, for the same reason
BUFFER_SIZE = 4 * 1024 * 1024  # bytes asked of the kernel in each direction

CAN_BATCH = sys.platform == "linux"
NO_RUNS = {errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE}


class UdpSocket:
    """A bound UDP socket without blocking; `peer` is its address if the socket is connected."""

    def __init__(self, sock: socket.socket, peer: Address | None = None) -> None:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)
        self._socket = sock
        self._peer = peer
        self._sends_runs = CAN_BATCH
        self._receives_runs = CAN_BATCH and _try_gro(sock)
        self._writable = trio.Lock()  # the kernel wakes one waiter only
        self.dropped = 0
        """Packets that the kernel refused to send; they count as lost."""

    @property
    def address(self) -> Address:
        """Where it is bound."""
        return self._socket.getsockname()

    @property
    def socket(self) -> socket.socket:
        """The socket underneath, for its options and addresses."""
        return self._socket

    def close(self) -> None:
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    # --- receiving

    async def receive(self) -> list[Packet]:
        """Wait for packets and return those that have come, within the limits of a turn.

        Raises ClosedResourceError once it is closed, and ConnectionRefusedError when the network reports that no
        program listens at the connected peer.
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
                    break  # the next call reports another error
                if isinstance(error, ConnectionRefusedError):
                    raise
                continue
            if size >= TURN_BYTES:
                break
        return packets

    def _read(self, packets: list[Packet]) -> int:
        if not self._receives_runs:
            data, address = self._socket.recvfrom(READ_SIZE)
            packets.append((data, self._peer or address))
            return len(data)
        data, notes, _, address = self._socket.recvmsg(READ_SIZE, kernel.ANCILLARY)
        address = self._peer or address
        each = kernel.read_notes(notes)[0] if notes else 0
        if 0 < each < len(data):
            packets += [(data[start : start + each], address) for start in range(0, len(data), each)]
        else:
            packets.append((data, address))
        return len(data)

    # --- sending

    def send_nowait(self, packets: Sequence[Packet]) -> int:
        """Send what the kernel takes now, in order; return the number of packets that were sent or lost.

        A packet that the kernel refuses for other reasons than a full buffer counts as lost.
        """
        start, total = 0, len(packets)
        while start < total:
            stop = self._run_end(packets, start) if self._sends_runs else start + 1
            try:
                self._send_run(packets, start, stop)
            except (BlockingIOError, InterruptedError):
                return start
            except OSError as error:
                if error.errno in CLOSED_HERE:
                    raise trio.ClosedResourceError("this socket was closed on our side") from error
                if stop - start > 1 and error.errno in NO_RUNS:
                    self._sends_runs = False
                    continue
                self.dropped += stop - start
            start = stop
        return start

    async def wait_writable(self) -> None:
        async with self._writable:
            if self._socket.fileno() == -1:
                raise trio.ClosedResourceError("this socket was closed on our side")
            await trio.lowlevel.wait_writable(self._socket)

    def _run_end(self, packets: Sequence[Packet], start: int) -> int:
        """Return where a run ends: packets of one size to one address, of which the last may be smaller."""
        data, address = packets[start]
        each = len(data)
        room = kernel.MOST_RUN - each
        stop = start + 1
        most = min(len(packets), start + kernel.MOST_SEGMENTS)
        while stop < most:
            size = len(packets[stop][0])
            if size > each or size > room or packets[stop][1] != address:
                break
            room -= size
            stop += 1
            if size < each:
                break
        return stop

    def _send_run(self, packets: Sequence[Packet], start: int, stop: int) -> None:
        data, address = packets[start]
        if stop - start == 1:
            if self._peer is None:
                self._socket.sendto(data, address)
            elif address == self._peer:
                self._socket.send(data)
            return
        run = [packet for packet, _ in packets[start:stop]]
        notes = [kernel.run_note(len(data))]
        if self._peer is None:
            self._socket.sendmsg(run, notes, 0, address)
        elif address == self._peer:
            self._socket.sendmsg(run, notes)


def bound(family: int, address: Address, *, peer: Address | None = None) -> UdpSocket:
    """Open a socket at `address`, connected to `peer` if one is given."""
    try:
        return UdpSocket(open_socket(family, bind=address, connect=peer), peer)
    except OSError as error:
        raise OSError(error.errno, f"quic {address[0]}:{address[1]}: {os.strerror(error.errno or 0)}") from error


def _try_gro(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(kernel.SOL_UDP, kernel.UDP_GRO, 1)
    except OSError:
        return False
    return True
