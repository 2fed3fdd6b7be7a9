"""How do many UDP peers share one socket? By their addresses; an address must prove itself before it gets much."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Literal

import trio

from muxkit.runtime import close_at_once, turns

from ._addresses import join_host_port
from ._packets import STEP_PACKETS, TURN, Address, Refusals
from ._packets_link import UdpLink
from ._packets_socket import PacketSocket

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit import Limits

    from ._packets import ServerCounters
    from ._packets_peers import Peers

Validation = Literal["answer", "told"]
"""What proves an address: a packet that comes after one of ours, or only a call of `validate()`."""

AMPLIFICATION = 3  # bytes for each one that came from an address without proof
HEADER = 28  # bytes of IP and UDP, counted on both sides as well, so that tiny packets are no way around
INBOX_PACKETS = 1024  # waiting for the handler of one peer
FIRST_PACKETS = 32  # the same while its address has no proof
FIRST_BYTES = 16_384
LATE = 3.0  # s after a link was closed here, in which its peer's packets start nothing


class PeerLink(UdpLink):
    """One of the peers of a listener; what comes from its address waits in a bounded inbox."""

    def __init__(self, listener: Listener, address: Address, peer: str) -> None:
        super().__init__(
            listener.wire, peer, address, largest=listener.largest, refusals=Refusals(listener.most_refusals)
        )
        self._listener = listener
        self._waiting_bytes = 0
        self._came = trio.lowlevel.ParkingLot()
        self._allowance_grew = trio.lowlevel.ParkingLot()
        self._is_validated = False
        self._heard_at = trio.current_time()

    @property
    def is_validated(self) -> bool:
        """Whether the address has proved itself; until then it gets at most three times what came from it."""
        return self._is_validated

    def validate(self) -> None:
        """Say that the peer is where its packets claim: it has answered something that it could not have guessed."""
        if not self._is_validated:
            self._is_validated = True
            self._listener.peers.establish(self)
            self._allowance_grew.unpark_all()

    @property
    def expires(self) -> float:
        listener = self._listener
        return self._heard_at + (listener.idle if self._is_validated else min(listener.idle, listener.limits.handshake))

    def arrived(self, packets: list[bytes]) -> None:
        """Called by the listener."""
        self._refusals.heard()
        self._heard_at = trio.current_time()
        size = sum(map(len, packets))
        self._received += len(packets)
        self._received_bytes += size
        if not self._is_validated:
            if self._sent and self._listener.validation == "answer":
                self.validate()
            else:
                self._allowance_grew.unpark_all()
        most_packets, most_bytes = self._inbox_limits()
        if len(self._inbox) + len(packets) <= most_packets and self._waiting_bytes + size <= most_bytes:
            self._inbox.extend(packets)
            self._waiting_bytes += size
        else:
            for packet in packets:
                if len(self._inbox) < most_packets and self._waiting_bytes + len(packet) <= most_bytes:
                    self._inbox.append(packet)
                    self._waiting_bytes += len(packet)
                else:
                    self._dropped += 1
                    self._listener.counters.dropped += 1
        self._came.unpark_all()

    def refused(self, error: OSError) -> None:
        """Called by the listener: the network says that nobody is there."""
        # Without proof it was not the peer that was heard, but somebody who used his address.
        self._refusals.was_heard = self._is_validated
        if self._refusals.refused() and self._broken is None:
            self._listener.counters.refused += 1
            self._listener.peers.remove(self)
            self._end(error)

    def forget(self, reason: str) -> None:
        """Called by the table of peers."""
        self._end(reason)

    async def aclose(self) -> None:
        self._is_closed = True
        self._listener.remove(self, late=self._broken is None)
        self._wake()
        await trio.lowlevel.checkpoint()

    def _end(self, why: OSError | str) -> None:
        if self._broken is None:
            self._broken = why
        self._listener.remove(self, late=False)
        self._wake()

    def _wake(self) -> None:
        self._came.unpark_all()
        self._allowance_grew.unpark_all()

    def _inbox_limits(self) -> tuple[int, int]:
        if self._is_validated:
            return INBOX_PACKETS, self._listener.limits.channel_bytes
        return FIRST_PACKETS, FIRST_BYTES

    # What the base asks

    def _take(self) -> bytes:
        packet = self._inbox.popleft()
        self._waiting_bytes -= len(packet)
        return packet

    def _fill(self) -> bool:
        return bool(self._inbox)

    def _has_more(self) -> bool:
        return False

    async def _arrival(self) -> None:
        await self._came.park()

    def _allowed(self, packets: Sequence[bytes]) -> int:
        if self._is_validated:
            return len(packets)
        room = AMPLIFICATION * self._received_bytes - self._sent_bytes
        on_wire = AMPLIFICATION * (self._received_bytes + HEADER * self._received)
        on_wire -= self._sent_bytes + HEADER * self._sent
        for index, packet in enumerate(packets):
            room -= len(packet)
            on_wire -= len(packet) + HEADER
            if room < 0 or on_wire < 0:
                return index
        return len(packets)

    async def _wait_until_sendable(self, packet: bytes) -> None:
        if self._allowed([packet]):
            await self._wire.wait_writable()
        else:
            await self._allowance_grew.park()


class Listener:
    """One bound socket and the peers behind it."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[PeerLink], Awaitable[None]],
        *,
        limits: Limits,
        counters: ServerCounters,
        largest: int,
        idle: float,
        refusals: int | None,
        validation: Validation,
        receive_buffer: int,
        send_buffer: int,
        suffix: str,
    ) -> None:
        self.wire = PacketSocket(
            sock,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refused=self._refused,
            is_connected=False,
        )
        self.limits = limits
        self.counters = counters
        self.largest = largest
        self.idle = idle
        self.most_refusals = refusals
        self.validation = validation
        self.peers: Peers
        self._handler = handler
        self._suffix = suffix
        self._links: dict[Address, PeerLink] = {}
        self._late: OrderedDict[Address, float] = OrderedDict()

    async def run(self, peers: Peers) -> None:
        """Hand out what comes, until cancelled or the socket fails."""
        self.peers = peers
        wire, clock = self.wire, turns().now
        try:
            while True:
                if wire.has_more:
                    await trio.lowlevel.checkpoint()
                else:
                    await wire.wait_readable()
                until = clock() + TURN
                while True:
                    for address, packets in wire.receive(STEP_PACKETS):
                        if address is not None:
                            self._arrived(address, packets)
                    if not wire.has_more or clock() >= until:
                        break
                self.counters.dropped_by_kernel = max(self.counters.dropped_by_kernel, wire.dropped)
        finally:
            for link in [*self._links.values()]:
                link.forget("the listener was closed")
            wire.close()

    def remove(self, link: PeerLink, *, late: bool) -> None:
        address = link._address
        if address is None or self._links.get(address) is not link:
            return
        del self._links[address]
        self.peers.remove(link)
        if late:
            self._late[address] = trio.current_time() + LATE
            if len(self._late) > self.limits.tombstones:
                self._late.popitem(last=False)

    def _arrived(self, address: Address, packets: list[bytes]) -> None:
        link = self._links.get(address)
        if link is None:
            link = self._first(address, packets)
        if link is not None:
            link.arrived(packets)

    def _first(self, address: Address, packets: list[bytes]) -> PeerLink | None:
        until = self._late.get(address)
        if until is not None:
            if trio.current_time() < until:
                self.counters.late += len(packets)
                return None
            del self._late[address]
        if not any(packets):
            self.counters.empty += len(packets)
            return None
        if not self.peers.has_room:
            self.counters.turned_away += 1
            return None
        link = PeerLink(self, address, f"udp {join_host_port(*address[:2])}{self._suffix}")
        scope = self.peers.admit(link)
        if scope is None:
            return None
        self.peers.start(link, scope, partial(self._handle, link))
        self._links[address] = link
        return link

    def _refused(self, address: Address | None, error: OSError) -> None:
        link = None if address is None else self._links.get(address)
        if link is not None:
            link.refused(error)

    async def _handle(self, link: PeerLink) -> None:
        try:
            await self._handler(link)
        finally:
            await close_at_once(link)
