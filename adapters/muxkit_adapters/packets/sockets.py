"""Non-blocking UDP sockets: bursts of packets in few system calls, and the network's error reports about packets.

UDP, DTLS and QUIC send and receive through `PacketSocket`. On Linux it sends and receives runs of packets of one size
with a single call, and attributes each error report to the address that it concerns. On other systems it makes one call
per packet.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, cast

import trio

from .._addresses import join_host_port
from .._errors import failed
from .._sockets import CLOSED_HERE
from . import kernel
from .options import TURN_BYTES, TURN_PACKETS, UNREACHABLE, Address, Buffers, PacketOptions

log: Final = logging.getLogger("muxkit.adapters")

RECEIVE_SIZE = 65_535  # bytes; no UDP packet is larger
FULL = {errno.EAGAIN, errno.EWOULDBLOCK}
SOURCES = 4096  # peers of a wildcard socket for which we remember the local address that they use
NO_RUNS = {errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # `localhost` may resolve to an IPv6 address that is disabled

CLOSED = "this socket was closed on our side"

Burst = list[tuple[Address, list[bytes]]]


class PacketSocket:
    """A UDP socket, connected to `peer` if one is given. The object owns `sock`, and never blocks on it.

    The network may report that an earlier packet couldn't be delivered. `refused` is then called with the address of
    that packet and the error.
    """

    def __init__(
        self,
        sock: socket.socket,
        options: PacketOptions,
        *,
        refused: Callable[[Address, OSError], object],
        peer: Address | None = None,
    ) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.peer = peer
        self.headers: int = kernel.HEADERS.get(sock.family, 48)
        self.lost: int = 0
        self.dropped: int = 0
        self.has_more: bool = False
        """True if the last `receive` stopped before the socket was empty."""
        self._refused = refused
        self._runs = kernel.prepare(sock, reports=peer is None)
        self._sources: OrderedDict[Address, kernel.Note] | None = None
        is_wildcard = sock.getsockname()[0] in ("0.0.0.0", "::")
        if peer is None and is_wildcard and kernel.ask_for_destinations(sock):
            self._sources = OrderedDict()
        self._is_waiting = False
        self._writable = trio.lowlevel.ParkingLot()
        self.buffers: Buffers = _ask_for_buffers(sock, options.receive_buffer, options.send_buffer)

    @property
    def is_closed(self) -> bool:
        """True once the socket is closed."""
        return self.socket.fileno() == -1

    @property
    def address(self) -> Address:
        """The local address."""
        return cast("Address", self.socket.getsockname())

    def close(self) -> None:
        """Close the socket, and wake the tasks that wait for it. Calling this again does nothing."""
        if not self.is_closed:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()
            self._writable.unpark_all()

    def path_mtu(self, address: Address) -> int | None:
        """Return the MTU of the path to a peer in bytes, including headers, or None if the system doesn't report it."""
        return kernel.path_mtu(self.socket, address if self.peer is None else None)

    def room_on_path(self, address: Address) -> int:
        """Return the size of the largest packet for the path to a peer, as far as the kernel knows."""
        most = kernel.MOST_PAYLOAD.get(self.socket.family, 65_507)
        mtu = self.path_mtu(address)
        return most if mtu is None else max(1, min(most, mtu - self.headers))

    # Receiving

    async def wait_readable(self) -> None:
        """Sleep until a packet or a report may have arrived. Raises `trio.ClosedResourceError` once closed."""
        if self.is_closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError(CLOSED)
        await trio.lowlevel.wait_readable(self.socket)

    def receive(self, most: int = TURN_PACKETS) -> Burst:
        """Return packets that have arrived, about `most` of them.

        The result is empty if there are no packets, or only reports about earlier ones.

        Raises:
            trio.ClosedResourceError: if the socket is closed.
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
                packets += 1  # reports count too, because a flood of them must not delay other tasks
                continue
            burst.append((self.peer or address, arrived))
            packets += len(arrived)
            size += sum(map(len, arrived))
        if not burst and self.peer is None:
            # Some reports don't raise an error, and the socket stays readable until they are read.
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
        """Remember the local address that a peer uses, because answers must come from that address."""
        sources = self._sources
        if sources is not None:
            sources[address] = source
            sources.move_to_end(address)
            if len(sources) > SOURCES:
                sources.popitem(last=False)

    def _failed(self, error: OSError) -> None:
        if error.errno in CLOSED_HERE:
            raise trio.ClosedResourceError(CLOSED) from None
        if self.peer is None:
            self._hear_reports()
        elif error.errno in UNREACHABLE:
            self._refused(self.peer, error)

    def _hear_reports(self) -> None:
        for address, number in kernel.reported(self.socket, TURN_PACKETS):
            if number in UNREACHABLE:
                self._refused(address, OSError(number, "reported by the network"))

    # Sending

    async def wait_writable(self) -> None:
        """Sleep until the kernel may accept more packets. Several tasks may wait simultaneously."""
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

    def send(self, packets: Sequence[bytes], address: Address) -> int:
        """Send as many packets as the kernel accepts now, in order. Return the number that were sent or lost.

        A connected socket sends to its peer only.

        Raises:
            trio.ClosedResourceError: if the socket is closed.
            OSError: with EMSGSIZE if the first packet is too large for the path.
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

    def _one_by_one(self, packets: Sequence[bytes], address: Address) -> int:
        """Send the packets that still fit, after the path MTU became smaller."""
        could, self._runs = self._runs, False
        try:
            return self.send(packets, address)
        finally:
            self._runs = could

    def _send_run(self, packets: Sequence[bytes], address: Address) -> None:
        """Send one run of packets. After an error about an earlier packet, record it and try again.

        The kernel raises such an error instead of sending, once for each report.
        """
        attempts = 1 if self.peer is not None else TURN_PACKETS
        for _ in range(attempts):
            try:
                return self._call(packets, address)
            except OSError as error:
                if error.errno not in UNREACHABLE:
                    raise
                self._failed(error)
        self._call(packets, address)

    def _call(self, packets: Sequence[bytes], address: Address) -> None:
        notes = [kernel.run_note(len(packets[0]))] if len(packets) > 1 else []
        if self._sources and address in self._sources:
            notes.append(self._sources[address])
        if self.peer is not None:
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
        """Return how many packets from `start` fit into one call: all have one size, but the last may be smaller."""
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
    """Open a UDP socket, and bind or connect it, or both."""
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


async def bind_all(kind: str, host: str, port: int, *, one_port: bool = False) -> list[socket.socket]:
    """Open a bound socket for each address of `host` that this machine has.

    Args:
        kind: the transport, for error texts.
        host: the host. An empty host binds all addresses.
        port: the port. 0 chooses a free one.
        one_port: bind all sockets to the port of the first.

    Raises:
        OSError: if an address can't be bound, or if this machine has none of them.
    """
    bound: list[socket.socket] = []
    reasons: list[OSError] = []
    try:
        for family, address in await resolve(kind, host, port, socket.AI_PASSIVE):
            if one_port and bound:
                address = cast("Address", (address[0], bound[0].getsockname()[1], *address[2:]))
            try:
                bound.append(open_socket(family, bind=address))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise failed(f"{kind} {join_host_port(*address[:2])}", error) from error
                reasons.append(error)
        if not bound:
            raise failed(f"{kind} {join_host_port(host, port)}", reasons[0]) from reasons[0]
    except BaseException:
        for sock in bound:
            sock.close()
        raise
    return bound


async def resolve(kind: str, host: str, port: int, flags: int = 0) -> list[tuple[int, Address]]:
    """Return the families and addresses of a host, starting with the one that the system prefers."""
    try:
        found = await trio.socket.getaddrinfo(host or None, port, type=socket.SOCK_DGRAM, flags=flags)
    except OSError as error:
        raise failed(f"{kind} {join_host_port(host, port)}", error) from error
    # The annotation of `getaddrinfo` has a third form of addresses, for Pythons without IPv6.
    return [(family, cast("Address", address)) for family, _, _, _, address in found]


def _ask_for_buffers(sock: socket.socket, receive: int, send: int) -> Buffers:
    got = []
    for option, asked in ((socket.SO_RCVBUF, receive), (socket.SO_SNDBUF, send)):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, asked)
        # Linux doubles the requested size for its own bookkeeping, and reports the doubled size.
        got.append(sock.getsockopt(socket.SOL_SOCKET, option) // (2 if kernel.LINUX else 1))
    buffers = Buffers(receive, got[0], send, got[1])
    if got[0] < receive or got[1] < send:
        # log: The kernel grants smaller buffers than requested, so bulk data over UDP may lose packets. Raise the two
        # Linux settings.
        log.info(
            "UDP buffers: asked for %d and %d bytes (receive, send), got %d and %d (net.core.rmem_max, wmem_max)",
            receive,
            send,
            *got,
        )
    return buffers
