"""Packet listeners: one socket shared by many peers, the limits on their number and silence, and the UDP listener.

Packets can carry a forged source address. Until an address has proved itself, a listener sends only little data to it.
"""

from __future__ import annotations

import logging
import math
import socket
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Generic, Literal, TypeVar

import attrs
import trio

from muxkit import Limits
from muxkit.runtime import (
    Admission,
    Occupant,
    Place,
    TokenBucket,
    bare_nursery,
    close_at_once,
    source_of,
    turned_away,
    turns,
)

from .._addresses import join_host_port
from .._listen import log_failure
from .links import PacketLink, UdpLink
from .options import STEP_PACKETS, TURN, Address, ListenerOptions, ServerCounters
from .sockets import PacketSocket

# Limits the cost of forged addresses. Each one that replaces an older peer starts and ends a handler.
EVICTIONS = 100.0  # per second
EVICTIONS_BURST = 200.0

Validation = Literal["answer", "told"]
"""What proves an address: a packet that arrives after one was sent there, or only a call of `validate()`."""

AMPLIFICATION = 3  # bytes to send at most per byte received from an unproved address
HEADER = 28  # bytes of IP and UDP headers; counted in both directions, so that tiny packets can't evade the limit
INBOX_PACKETS = 1024  # packets that may wait for the handler of one peer
FIRST_PACKETS = 32  # the same while its address is unproved
FIRST_BYTES = 16_384
BACKLOG = 1024  # peers with a proved address that may wait for a place, at about 30 KiB each
LATE = 3.0  # s after a link was closed on this side, during which packets of its peer start no new link

log: Final = logging.getLogger("muxkit.adapters")

LinkT = TypeVar("LinkT", bound=PacketLink)


@attrs.define(eq=False)
class PeerPlace(Place):
    """The place of a peer. It stays half-open until the address is proved, even if data arrives."""

    is_proved: bool = False
    peer: PacketLink | None = None
    peers: Peers | None = None

    def establish(self) -> None:
        """Mark the place as established, but only if the address is proved."""
        if self.is_proved:
            super().establish()

    def give_way(self, why: str) -> None:
        """Leave the place to a newer peer. An unproved peer is forgotten immediately."""
        if self.peer is not None and self.peers is not None and not self.is_proved:
            self.peers.evicted(self.peer)
            self.occupant: Occupant | None = None  # no reason is sent to an unproved address
        super().give_way(why)

    def moved(self) -> None:
        """Update the counters after the place has changed its state."""
        if self.peers is not None:
            self.peers.count()


class Peers:
    """The places of a listener's peers. Their handlers run in `nursery`, each in its own cancel scope.

    `muxkit.runtime.Admission` decides who is admitted and who has to leave. We keep no state for an unproved address. A
    newcomer for which there is no place therefore has to send its packet again. A peer with a proved address waits here
    in order of arrival. It would send its packet again too, but after 1, 3, 7 and 15 seconds, at the same moments as
    all others.
    """

    def __init__(self, nursery: trio.Nursery, limits: Limits, counters: ServerCounters) -> None:
        self._nursery = nursery
        self._limits = limits
        self._counters = counters
        self._running = 0
        self._admission = Admission(limits)
        self._places: dict[PacketLink, PeerPlace] = {}
        self._alarm = trio.CancelScope()
        self._evictions = TokenBucket(EVICTIONS, EVICTIONS_BURST)
        self._turns = turns()
        self._next = trio.Lock()  # held by the peer that is next in line for a place

    def make_room(self) -> bool:
        """Return True if `admit` would succeed now. If necessary, drop an unproved peer, at a limited rate."""
        limits = self._limits
        if self._running >= limits.connections + limits.half_open:
            return False
        if self._admission.has_room:
            return True
        return self._evictions.has_token(trio.current_time()) and self._admission.make_room()

    def admit(self, peer: PacketLink, source: str = "") -> PeerPlace | None:
        """Admit an unproved peer. Return its place for `run`, or None if there is none. Running handlers count too."""
        place = self._admission.admit(source, PeerPlace) if self.make_room() else None
        if place is None:
            self._turn_away()
            return None
        place.scope.deadline = math.inf  # `expires` takes over, which counts from the last packet
        place.peer, place.peers = peer, self
        self._places[peer] = place
        self._turns.connection_came()
        self._running += 1
        self._counters.admitted += 1
        self.count()
        self._alarm.deadline = min(self._alarm.deadline, peer.expires)
        return place

    async def admit_in_turn(self, peer: PacketLink, source: str) -> PeerPlace | None:
        """Admit a peer with a proved address once there is room. Return None if `BACKLOG` peers wait already."""
        if self._counters.waiting >= BACKLOG:
            self._turn_away()
            return None
        self._counters.waiting += 1
        try:
            async with self._next:
                await self._admission.wait_for_place()
                return self.admit(peer, source)
        finally:
            self._counters.waiting -= 1

    async def start_handshake(self, place: PeerPlace) -> None:
        """Wait until an admitted peer may start its handshake. A thousand of them simultaneously would all time out."""
        await self._admission.start(place)
        place.scope.deadline = math.inf  # see `admit`

    def start(self, peer: PacketLink, place: PeerPlace, work: Callable[[], Awaitable[None]]) -> None:
        """Call `run` in a new task."""
        self._nursery.start_soon(self.run, peer, place, work)

    async def run(self, peer: PacketLink, place: PeerPlace, work: Callable[[], Awaitable[None]]) -> None:
        """Run the handler of an admitted peer, and log its exceptions."""
        try:
            with place.held():
                await work()
        except Exception as error:
            log_failure("peer", error)
        finally:
            self._running -= 1
            self._counters.finished += 1
            self.remove(peer)

    def establish(self, peer: PacketLink) -> None:
        """Mark the address of a peer as proved."""
        if (place := self._places.get(peer)) is not None:
            place.is_proved = True
            place.establish()

    def remove(self, peer: PacketLink) -> None:
        """Forget a peer whose link has ended. Its handler may still run for a while."""
        if (place := self._places.pop(peer, None)) is not None:
            place.leave()

    async def expire(self) -> None:
        """Forget silent peers. Runs in its own task until cancelled."""
        while True:
            now = trio.current_time()
            for peer in [*self._places]:
                if peer.expires <= now:
                    self._counters.idle += 1
                    self.remove(peer)
                    peer.forget("silent for too long")
            soonest = min((peer.expires for peer in self._places), default=math.inf)
            self._alarm = trio.CancelScope(deadline=soonest)
            with self._alarm:
                await trio.sleep_forever()

    def evicted(self, peer: PacketLink) -> None:
        """Forget an unproved peer that is dropped for another."""
        self._places.pop(peer, None)
        self._counters.evicted += 1
        self._evictions.take(trio.current_time())
        peer.forget("gave way to newer peers before it had proved itself")

    def _turn_away(self) -> None:
        self._counters.turned_away += 1
        turned_away("connections" if self._admission.half_open < self._limits.half_open else "half_open")

    def count(self) -> None:
        """Update the counters of the listener."""
        self._counters.half_open = self._admission.half_open
        self._counters.peers = self._admission.served


class PacketListener(ABC, Generic[LinkT]):
    """A bound socket, the task that reads it, and the links of its peers."""

    peers: Peers

    def __init__(
        self, sock: socket.socket, handler: Callable[[LinkT], Awaitable[None]], options: ListenerOptions
    ) -> None:
        self.packets: PacketSocket = PacketSocket(sock, options, refused=self._refused)
        self.options = options
        self._handler = handler
        self._links: dict[Address, LinkT] = {}

    @abstractmethod
    async def run(self, peers: Peers, *, task_status: trio.TaskStatus[None]) -> None:
        """Dispatch packets to the links of their senders, until cancelled."""

    async def _handle(self, link: LinkT) -> None:
        try:
            await self._handler(link)
        finally:
            await close_at_once(link)

    def _refused(self, address: Address, error: OSError) -> None:
        link = self._links.get(address)
        if link is not None and link.refused(error):
            self.options.counters.refused += 1
            self.peers.remove(link)


async def serve_listeners(
    listeners: Sequence[PacketListener[LinkT]], options: ListenerOptions, started: Callable[[list[str]], None]
) -> None:
    """Run listeners that share one table of peers until cancelled, and close their sockets afterwards."""
    try:
        async with bare_nursery() as nursery:
            peers = Peers(nursery, options.limits, options.counters)
            nursery.start_soon(peers.expire)
            for listener in listeners:
                await nursery.start(listener.run, peers)
            started([join_host_port(*listener.packets.address[:2]) for listener in listeners])
    finally:
        for listener in listeners:
            listener.packets.close()


# UDP


class PeerLink(UdpLink):
    """A listener's link with one peer. Packets from the peer's address wait in a bounded inbox."""

    def __init__(self, listener: UdpListener, address: Address, peer: str) -> None:
        super().__init__(listener.packets, peer, address, listener.options)
        self._listener = listener
        self._waiting_bytes = 0
        self._came = trio.lowlevel.ParkingLot()
        self._allowance_grew = trio.lowlevel.ParkingLot()
        self.is_validated: bool = False
        """True once the address has proved itself. Until then, it gets at most three times the bytes that it sent."""
        self._heard_at = trio.current_time()

    def validate(self) -> None:
        """Treat the address as proved. Call this when the peer has sent something that it could only have received."""
        if not self.is_validated:
            self.is_validated = True
            self._listener.peers.establish(self)
            self._allowance_grew.unpark_all()

    @property
    def expires(self) -> float:
        options = self._listener.options
        return self._heard_at + (options.idle if self.is_validated else min(options.idle, options.limits.handshake))

    def arrived(self, packets: list[bytes]) -> None:
        """Add packets of the peer to the inbox. The listener calls this."""
        self._refusals.heard()
        self._heard_at = trio.current_time()
        size = sum(map(len, packets))
        self._received += len(packets)
        self._received_bytes += size
        if not self.is_validated:
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

    def refused(self, error: OSError) -> bool:
        # Packets from an unproved address may have come from another host with a forged address, so they don't count.
        self._refusals.was_heard = self.is_validated
        return super().refused(error)

    async def aclose(self) -> None:
        self._is_closed = True
        self._listener.remove(self, late=self._broken is None)
        self._wake()
        await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._listener.remove(self, late=False)
        self._came.unpark_all()
        self._allowance_grew.unpark_all()

    def _inbox_limits(self) -> tuple[int, int]:
        if self.is_validated:
            return INBOX_PACKETS, self._listener.options.limits.short_window
        return FIRST_PACKETS, FIRST_BYTES

    # Implementation of UdpLink's abstract methods

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
        if self.is_validated:
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
            await self._packets.wait_writable()
        else:
            await self._allowance_grew.park()


class UdpListener(PacketListener[PeerLink]):
    """A bound socket and the links of its peers."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[PeerLink], Awaitable[None]],
        options: ListenerOptions,
        *,
        validation: Validation,
        suffix: str,
    ) -> None:
        super().__init__(sock, handler, options)
        self.counters: ServerCounters = options.counters
        self.validation = validation
        self._suffix = suffix
        self._late: OrderedDict[Address, float] = OrderedDict()

    async def run(self, peers: Peers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Dispatch packets to the links of their senders, until cancelled or until the socket fails."""
        self.peers = peers
        wire, clock = self.packets, turns().now
        task_status.started()
        try:
            while True:
                if wire.has_more:
                    await trio.lowlevel.checkpoint()
                else:
                    await wire.wait_readable()
                until = clock() + TURN
                while True:
                    for address, packets in wire.receive(STEP_PACKETS):
                        self._arrived(address, packets)
                    if not wire.has_more or clock() >= until:
                        break
                self.counters.dropped_by_kernel = max(self.counters.dropped_by_kernel, wire.dropped)
        finally:
            for link in [*self._links.values()]:
                link.forget("the listener was closed")
            wire.close()

    def remove(self, link: PeerLink, *, late: bool) -> None:
        """Forget a link. With `late`, ignore packets of its peer for a while."""
        address = link._address
        if self._links.get(address) is not link:
            return
        del self._links[address]
        self.peers.remove(link)
        if late:
            self._late[address] = trio.current_time() + LATE
            if len(self._late) > self.options.limits.tombstones:
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
        if not self.peers.make_room():
            self.counters.turned_away += 1
            return None
        link = PeerLink(self, address, f"udp {join_host_port(*address[:2])}{self._suffix}")
        place = self.peers.admit(link, source_of(address[0]))
        if place is None:
            return None
        self.peers.start(link, place, partial(self._handle, link))
        self._links[address] = link
        return link
