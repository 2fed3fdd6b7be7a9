"""How do packets get through a kernel socket without blocking? In bursts, with what the network says counted."""

from __future__ import annotations

import errno
import logging
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from . import _packets_kernel as kernel
from ._packets import TURN_BYTES, TURN_PACKETS, UNREACHABLE, Address, Buffers
from ._sockets import CLOSED_HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("muxkit.adapters")

RECEIVE_SIZE = 65_535  # bytes: no UDP packet is larger, so none is cut
FULL = {errno.EAGAIN, errno.EWOULDBLOCK}
SOURCES = 4096  # peers of a wildcard socket, of which it is known which of our addresses they use
NO_RUNS = {errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT}

CLOSED = "this socket was closed on our side"

Burst = list[tuple[Address | None, list[bytes]]]


class PacketSocket:
    """A UDP socket, connected or not; it owns `sock` and never blocks.

    `refused` is called with what the network says about earlier packets, and the address that it is about (None
    where the socket is connected).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        receive_buffer: int,
        send_buffer: int,
        refused: Callable[[Address | None, OSError], None],
        is_connected: bool,
    ) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.headers = kernel.HEADERS.get(sock.family, 48)
        self.lost = 0
        self.dropped = 0
        self.has_more = False
        """The last turn ended before the kernel had no more."""
        self._refused = refused
        self._is_connected = is_connected
        self._runs = kernel.prepare(sock, reports=not is_connected)
        self._sources: OrderedDict[Address, kernel.Note] | None = None
        if not is_connected and _is_wildcard(sock) and kernel.ask_for_destinations(sock):
            self._sources = OrderedDict()
        self._is_waiting = False
        self._writable = trio.lowlevel.ParkingLot()
        self.buffers = _ask_for_buffers(sock, receive_buffer, send_buffer)

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() == -1

    def close(self) -> None:
        if not self.is_closed:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()
            self._writable.unpark_all()

    def path_mtu(self, address: Address | None) -> int | None:
        """In bytes, headers included; None where the system does not say."""
        return kernel.path_mtu(self.socket, address)

    def room_on_path(self, address: Address | None) -> int:
        """The largest packet that the way to a peer takes, as far as the kernel knows."""
        most = kernel.MOST_PAYLOAD.get(self.socket.family, 65_507)
        mtu = self.path_mtu(address)
        return most if mtu is None else max(1, min(most, mtu - self.headers))

    # Receiving

    async def wait_readable(self) -> None:
        if self.is_closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError(CLOSED)
        await trio.lowlevel.wait_readable(self.socket)

    def receive(self, most: int = TURN_PACKETS) -> Burst:
        """What has come, up to about `most` packets; nothing if nothing has, or only news about packets sent before.

        Raises ClosedResourceError once closed.
        """
        burst: Burst = []
        packets = size = 0
        self.has_more = True
        while packets < most and size < TURN_BYTES:
            try:
                address, arrived = self._receive_one()
            except OSError as error:
                if error.errno in FULL:
                    self.has_more = False
                    break
                self._failed(error)
                packets += 1  # a flood of refusals must not hold up the others either
                continue
            burst.append((None if self._is_connected else address, arrived))
            packets += len(arrived)
            size += sum(map(len, arrived))
        if not burst and not self._is_connected:
            # Some news comes without an error, and would wake us again and again until it is taken.
            self._hear_reports()
        return burst

    def _receive_one(self) -> tuple[Address, list[bytes]]:
        if not kernel.LINUX:
            data, address = self.socket.recvfrom(RECEIVE_SIZE)
            return address, [data]
        data, notes, _, address = self.socket.recvmsg(RECEIVE_SIZE, kernel.ANCILLARY)
        if not notes:
            return address, [data]
        size, dropped, source = kernel.read_notes(notes)
        if dropped is not None:
            self.dropped = dropped
        if source is not None and self._sources is not None:
            self._remember(address, source)
        if not 0 < size < len(data):
            return address, [data]
        return address, [data[at : at + size] for at in range(0, len(data), size)]

    def _remember(self, address: Address, source: kernel.Note) -> None:
        """On a machine with several addresses, an answer must come from the one that was asked."""
        sources = self._sources
        if sources is not None:
            sources[address] = source
            sources.move_to_end(address)
            if len(sources) > SOURCES:
                sources.popitem(last=False)

    def _failed(self, error: OSError) -> None:
        if error.errno in CLOSED_HERE:
            raise trio.ClosedResourceError(CLOSED) from None
        if self._is_connected and error.errno in UNREACHABLE:
            self._refused(None, error)
        elif not self._is_connected:
            self._hear_reports()

    def _hear_reports(self) -> None:
        for report in kernel.reported(self.socket, TURN_PACKETS):
            if report.errno in UNREACHABLE:
                self._refused(report.address, OSError(report.errno, "reported by the network"))

    # Sending

    async def wait_writable(self) -> None:
        """Until the kernel may take more; several tasks may wait, where Trio admits one."""
        if self.is_closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError(CLOSED)
        if self._is_waiting:
            await self._writable.park()
            return
        self._is_waiting = True
        try:
            await trio.lowlevel.wait_writable(self.socket)
        finally:
            self._is_waiting = False
            self._writable.unpark_all()

    def send(self, packets: Sequence[bytes], address: Address | None = None) -> int:
        """Send what the kernel takes now, in order; give how many packets are done with, sent or lost.

        Raises ClosedResourceError once closed, OSError(EMSGSIZE) when the first packet is too large for the path.
        """
        done = 0
        while done < len(packets):
            run = self._run(packets, done) if self._runs else 1
            try:
                self._send_run(packets[done : done + run], address)
            except OSError as error:
                if error.errno in FULL:
                    return done
                if run > 1 and error.errno in NO_RUNS:
                    self._runs = False
                    continue
                if error.errno == errno.EMSGSIZE:
                    if run > 1:
                        return done + self._one_by_one(packets[done : done + run], address)
                    if done:
                        return done
                    raise
                if error.errno in CLOSED_HERE:
                    self._failed(error)
                self.lost += run
            done += run
        return done

    def _one_by_one(self, packets: Sequence[bytes], address: Address | None) -> int:
        """After the path has become narrower: the ones that still fit."""
        could, self._runs = self._runs, False
        try:
            return self.send(packets, address)
        finally:
            self._runs = could

    def _send_run(self, packets: Sequence[bytes], address: Address | None) -> None:
        try:
            self._call(packets, address)
        except OSError as error:
            if error.errno not in UNREACHABLE:
                raise
            # News about an earlier packet came instead; what comes now is about this one.
            self._failed(error)
            self._call(packets, address)

    def _call(self, packets: Sequence[bytes], address: Address | None) -> None:
        notes = [kernel.run_note(len(packets[0]))] if len(packets) > 1 else []
        if self._sources and address is not None and address in self._sources:
            notes.append(self._sources[address])
        if address is None:
            if notes:
                self.socket.sendmsg(packets, notes)
            else:
                self.socket.send(packets[0])
        elif notes:
            self.socket.sendmsg(packets, notes, 0, address)
        else:
            self.socket.sendto(packets[0], address)

    @staticmethod
    def _run(packets: Sequence[bytes], start: int) -> int:
        """How many packets from there can go in one call: all of one size, the last may be smaller."""
        size = len(packets[start])
        if not size:
            return 1
        most = min(len(packets), start + kernel.MOST_SEGMENTS, start + max(1, kernel.MOST_RUN // size))
        end = start + 1
        while end < most:
            following = len(packets[end])
            if not 0 < following <= size:
                break
            end += 1
            if following < size:
                break
        return end - start


def open_socket(family: int, *, bind: Address | None = None, connect: Address | None = None) -> socket.socket:
    """A UDP socket, bound or connected."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if bind is not None:
            if family == socket.AF_INET6:
                with suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(bind)
        if connect is not None:
            sock.connect(connect)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_wildcard(sock: socket.socket) -> bool:
    return sock.getsockname()[0] in ("0.0.0.0", "::")


def _ask_for_buffers(sock: socket.socket, receive: int, send: int) -> Buffers:
    got = []
    for option, asked in ((socket.SO_RCVBUF, receive), (socket.SO_SNDBUF, send)):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, asked)
        # Linux doubles what was asked, for its own bookkeeping, and tells the double.
        got.append(sock.getsockopt(socket.SOL_SOCKET, option) // (2 if kernel.LINUX else 1))
    buffers = Buffers(receive, got[0], send, got[1])
    if got[0] < receive or got[1] < send:
        log.info(
            "UDP buffers: asked for %d and %d bytes (receive, send), got %d and %d (net.core.rmem_max, wmem_max)",
            receive,
            send,
            *got,
        )
    return buffers
