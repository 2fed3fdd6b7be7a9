"""What does a program see of one UDP peer? Packets, the largest one that fits, and what became of them."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import trio

from .._sockets import OneAtATime
from .options import Address, Buffers, PacketStats, PacketTooLarge, Refusals, loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sockets import PacketSocket


class UdpLink(trio.abc.Channel[bytes]):
    """Packets with one peer; each arrives whole or not at all, perhaps twice or late.

    UDP has no end and no goodbye: whether the peer is still there, the protocol above must find out.
    """

    def __init__(
        self, wire: PacketSocket, peer: str, address: Address | None, *, largest: int, refusals: Refusals
    ) -> None:
        self._wire = wire
        self._peer = peer
        self._address = address
        self._largest = largest
        self._limit = min(largest, wire.room_on_path(address))
        self._inbox: deque[bytes] = deque()
        self._receiving = OneAtATime("receiving from this link")
        self._refusals = refusals
        self._is_closed = False
        self._broken: OSError | str | None = None
        self._received = self._received_bytes = self._sent = self._sent_bytes = self._dropped = self._lost = 0

    @property
    def peer(self) -> str:
        """The other end, for people: `udp 127.0.0.1:7000`."""
        return self._peer

    @property
    def packet_limit(self) -> int:
        """The largest packet that can be sent now, in bytes: what was configured, or less on a narrow path."""
        return self._limit

    @property
    def path_mtu(self) -> int | None:
        """The largest IP packet that the kernel believes the path takes, headers included; None where it does not say.

        Asking also renews `packet_limit`.
        """
        if self._is_closed or self._wire.is_closed:
            return None
        self._limit = min(self._largest, self._wire.room_on_path(self._address))
        return self._wire.path_mtu(self._address)

    @property
    def buffers(self) -> Buffers:
        """The kernel's buffers for the socket, asked for and granted."""
        return self._wire.buffers

    def stats(self) -> PacketStats:
        """What became of the packets so far."""
        return PacketStats(
            received=self._received,
            received_bytes=self._received_bytes,
            sent=self._sent,
            sent_bytes=self._sent_bytes,
            dropped=self._dropped,
            lost=self._lost,
            refused=self._refusals.total,
        )

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", lost" if self._broken is not None else ""
        return f"<UdpLink {self._peer}{state}>"

    # Sending

    async def send(self, value: bytes) -> None:
        """Hand one packet to the kernel; cancelled, it was not sent.

        Raises `PacketTooLarge`, and BrokenResourceError once the peer is known to be gone.
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

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send what may go now, in order; give how many went. Packets of one size in a row cost one call together.

        Raises `PacketTooLarge`, and then none has been sent.
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
        lost = self._wire.lost
        try:
            taken = self._wire.send(packets, self._address)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            self._refuse_large(packets[0])
            return 1
        self._lost += self._wire.lost - lost
        self._sent += taken
        self._sent_bytes += sum(map(len, packets[:taken]))
        self._check_open()
        return taken

    def _refuse_large(self, packet: bytes) -> None:
        """The path became narrower than we knew."""
        mtu = self.path_mtu
        if mtu is None:  # a system that does not say how much it would be
            self._largest = self._limit = len(packet) - 1
        if len(packet) > self._limit:
            raise PacketTooLarge(self._peer, len(packet), self._limit, mtu)
        # It would fit now: what came back was about an earlier one.
        self._sent += 1
        self._sent_bytes += len(packet)
        self._lost += 1

    @abstractmethod
    def _allowed(self, packets: Sequence[bytes]) -> int:
        """How many of them may be sent to this peer now."""

    @abstractmethod
    async def _wait_until_sendable(self, packet: bytes) -> None: ...

    # Receiving

    async def receive(self) -> bytes:
        """The next packet; cancelled, none is lost. One task at a time.

        Raises BrokenResourceError once the peer is known to be gone, after what had come before.
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
        """What has come already, at most `limit` packets."""
        self._receiving.check()
        self._check_receivable()
        if not self._inbox:
            self._fill()
        return [self._take() for _ in range(min(limit, len(self._inbox)))]

    def _take(self) -> bytes:
        return self._inbox.popleft()

    @abstractmethod
    def _fill(self) -> bool:
        """Move what the kernel has into the inbox; whether there is something now."""

    @abstractmethod
    def _has_more(self) -> bool: ...

    @abstractmethod
    async def _arrival(self) -> None:
        """Sleep until something may have come, or the link ended."""

    # The end

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this link was closed on our side")
        if self._broken is not None:
            raise loss(self._peer, self._broken)

    def _check_receivable(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this link was closed on our side")
        if self._broken is not None and not self._inbox:
            raise loss(self._peer, self._broken)


class ClientLink(UdpLink):
    """Over a connected socket that is the link's own."""

    def __init__(self, wire: PacketSocket, peer: str, *, largest: int, refusals: Refusals) -> None:
        super().__init__(wire, peer, None, largest=largest, refusals=refusals)

    def refused(self, error: OSError) -> None:
        if self._refusals.refused() and self._broken is None:
            self._broken = error

    async def aclose(self) -> None:
        self._is_closed = True
        self._wire.close()
        await trio.lowlevel.checkpoint()

    def _fill(self) -> bool:
        for _, packets in self._wire.receive():
            self._refusals.heard()
            self._received += len(packets)
            self._received_bytes += sum(map(len, packets))
            self._inbox.extend(packets)
        self._dropped = self._wire.dropped
        return bool(self._inbox)

    def _has_more(self) -> bool:
        return self._wire.has_more

    async def _arrival(self) -> None:
        await self._wire.wait_readable()

    def _allowed(self, packets: Sequence[bytes]) -> int:
        return len(packets)

    async def _wait_until_sendable(self, packet: bytes) -> None:
        await self._wire.wait_writable()
