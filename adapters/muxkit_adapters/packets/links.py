"""Packet links: the parts that UDP and DTLS share, and the UDP link of a client.

A link never splits or joins packets, and sending never waits for the peer to read. Links adapt their largest packet to
the path MTU that the kernel reports, and count packets that they lose.
"""

from __future__ import annotations

import errno
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import trio

from .._sockets import OneAtATime, local_name
from .options import Address, Buffers, PacketOptions, PacketStats, PacketTooLarge, Refusals, loss
from .sockets import PacketSocket

CLOSED = "this link was closed on our side"


class PacketLink(trio.abc.Channel[bytes]):
    """Packets exchanged with one peer. Keeps their size limit and their counters, and records how the link ended."""

    def __init__(self, packets: PacketSocket, peer: str, address: Address, options: PacketOptions) -> None:
        self._packets = packets
        self._peer = peer
        self._address = address
        self._largest = options.largest
        self._limit = 0
        self._refusals = Refusals(options.refusals)
        self._is_closed = False
        self._broken: OSError | str | None = None
        self._received = self._received_bytes = self._sent = self._sent_bytes = self._lost = 0

    @property
    def peer(self) -> str:
        """The name of the other end, such as `udp 127.0.0.1:7000`."""
        return self._peer

    @property
    def local(self) -> str:
        """The name of this end, in the form of `peer`. Empty once the socket is closed."""
        return local_name(self._peer, self._packets.socket)

    @property
    def packet_limit(self) -> int:
        """The largest packet that can be sent now, in bytes: the configured size, or less for a small path MTU."""
        return self._limit

    @property
    def path_mtu(self) -> int | None:
        """The largest IP packet that the kernel believes the path can carry, including headers. None if it is unknown.

        Reading this property also updates `packet_limit`.
        """
        if self._is_closed or self._packets.is_closed:
            return None
        self._fit_path()
        return self._packets.path_mtu(self._address)

    @property
    def buffers(self) -> Buffers:
        """Requested and granted sizes of the socket's buffers in the kernel."""
        return self._packets.buffers

    def stats(self) -> PacketStats:
        """Return the counters so far. Packets of a handshake aren't counted."""
        return PacketStats(
            received=self._received,
            received_bytes=self._received_bytes,
            sent=self._sent,
            sent_bytes=self._sent_bytes,
            dropped=self._count_dropped(),
            lost=self._lost,
            refused=self._refusals.total,
        )

    def _state(self) -> str:
        return ", closed" if self._is_closed else ", lost" if self._broken is not None else ""

    async def send(self, value: bytes) -> None:
        """Pass one packet to the kernel, and wait while the kernel has no room. If cancelled, nothing was sent.

        Raises:
            PacketTooLarge: if the packet is larger than `packet_limit`.
            trio.BrokenResourceError: if the peer is known to be lost.
            trio.ClosedResourceError: if the link was closed on this side.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        try:
            while not self.send_nowait([value]):
                await self._wait_until_sendable(value)
                waited = True
        finally:
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    @abstractmethod
    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send as many packets as may be sent now, in order. Return their number."""

    async def _wait_until_sendable(self, packet: bytes) -> None:
        await self._packets.wait_writable()

    def _fit_path(self) -> None:
        """Update the largest packet from the kernel's knowledge of the path."""
        self._limit = min(self._largest, self._packets.room_on_path(self._address))

    def _refuse_large(self, size: int, *, is_begun: bool = False) -> int:
        """Handle a packet that the kernel found too large, after the path MTU became smaller.

        Returns:
            The number of packets that are done. 0 is possible only with `is_begun`, because the caller then has to
            report the packets that were sent before.

        Raises:
            PacketTooLarge: if the packet doesn't fit and no packet was sent before.
        """
        mtu = self.path_mtu
        if mtu is None:  # the system doesn't report the size that would fit
            self._largest -= self._limit - size + 1
            self._limit = size - 1
        if size <= self._limit:
            self._packets.lost += 1  # the packet fits, so the error was about an earlier one
            return 1
        if is_begun:
            return 0
        raise PacketTooLarge(self._peer, size, self._limit, mtu)

    @abstractmethod
    def _count_dropped(self) -> int:
        """Return the number of packets that were lost because the inbox was full."""

    # The end

    def refused(self, error: OSError) -> bool:
        """Record a report of the network that the peer is unreachable. Return True if that ended the link."""
        if not self._refusals.refused() or self._broken is not None:
            return False
        self.forget(error)
        return True

    def forget(self, reason: OSError | str) -> None:
        """End the link. Tasks that wait on it raise an error with this reason."""
        if self._broken is None:
            self._broken = reason
            self._wake()

    @property
    def expires(self) -> float:
        """The time at which the peer will have been silent for too long."""
        return math.inf

    def _wake(self) -> None:
        """Wake the tasks that wait on a link that has ended."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError(CLOSED)
        if self._broken is not None:
            raise loss(self._peer, self._broken)


class UdpLink(PacketLink):
    """Packets exchanged with one peer. A packet arrives whole or not at all, and it may arrive twice or late.

    UDP doesn't report that a peer has closed. The protocol above has to find out whether the peer is still there.
    """

    def __init__(self, packets: PacketSocket, peer: str, address: Address, options: PacketOptions) -> None:
        super().__init__(packets, peer, address, options)
        self._inbox: deque[bytes] = deque()
        self._receiving = OneAtATime("receiving from this link")
        self._dropped = 0
        self._fit_path()

    def __repr__(self) -> str:
        return f"<UdpLink {self._peer}{self._state()}>"

    # Sending

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send as many packets as may be sent now, in order, and return their number.

        A run of packets of one size takes one system call.

        Raises:
            PacketTooLarge: if a packet is too large. Then none was sent.
        """
        self._check_open()
        if not packets:
            return 0
        largest = max(map(len, packets))
        if largest > self._limit:
            raise PacketTooLarge(self._peer, largest, self._limit)
        allowed = self._allowed(packets)
        if allowed < len(packets):
            packets = packets[:allowed]
        lost = self._packets.lost
        try:
            taken = self._packets.send(packets, self._address)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            taken = self._refuse_large(len(packets[0]))
        self._lost += self._packets.lost - lost
        self._sent += taken
        self._sent_bytes += sum(map(len, packets[:taken]))
        self._check_open()
        return taken

    def _allowed(self, packets: Sequence[bytes]) -> int:
        """Return how many of the packets may be sent to this peer now."""
        return len(packets)

    def _count_dropped(self) -> int:
        return self._dropped

    # Receiving

    async def receive(self) -> bytes:
        """Return the next packet. Only one task may receive. If cancelled, no packet is lost.

        Raises:
            trio.BrokenResourceError: once the peer is known to be lost and all received packets were returned.
            trio.ClosedResourceError: if the link was closed on this side.
        """
        self._receiving.begin()
        try:
            if self._inbox or self._has_more():
                await trio.lowlevel.checkpoint()
            else:
                self._check_receivable()
                await self._arrival()
            while True:
                self._check_receivable()
                if self._inbox or self._fill():
                    return self._take()
                if not self._has_more():
                    self._check_receivable()
                    await self._arrival()
        finally:
            self._receiving.is_busy = False

    def receive_nowait(self, limit: int) -> list[bytes]:
        """Return packets that have already been received, at most `limit`."""
        self._receiving.check()
        self._check_receivable()
        if not self._inbox:
            self._fill()
        return [self._take() for _ in range(min(limit, len(self._inbox)))]

    def _take(self) -> bytes:
        return self._inbox.popleft()

    @abstractmethod
    def _fill(self) -> bool:
        """Move packets from the kernel into the inbox. Return True if the inbox isn't empty."""

    @abstractmethod
    def _has_more(self) -> bool: ...

    @abstractmethod
    async def _arrival(self) -> None:
        """Sleep until a packet may have arrived or the link has ended."""

    def _check_receivable(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError(CLOSED)
        if self._broken is not None and not self._inbox:
            raise loss(self._peer, self._broken)


class ClientLink(UdpLink):
    """A client's link. It owns its connected socket."""

    async def aclose(self) -> None:
        self._is_closed = True
        self._packets.close()
        await trio.lowlevel.checkpoint()

    def _fill(self) -> bool:
        for _, packets in self._packets.receive():
            self._refusals.heard()
            self._received += len(packets)
            self._received_bytes += sum(map(len, packets))
            self._inbox.extend(packets)
        self._dropped = self._packets.dropped
        return bool(self._inbox)

    def _has_more(self) -> bool:
        return self._packets.has_more

    async def _arrival(self) -> None:
        await self._packets.wait_readable()
