"""The table of a packet listener's peers: limits on their numbers, and on their silence."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

from muxkit.runtime import bare_nursery, close_at_once, turns

from .._addresses import join_host_port
from .._listen import log_failure
from .links import PacketLink
from .sockets import PacketSocket

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit import Limits

    from .options import Address, ListenerOptions, ServerCounters

# Bounds what forged addresses cost: each that replaces an older peer starts and ends a handler.
EVICTIONS = 100.0  # per second
EVICTIONS_BURST = 200.0

log = logging.getLogger("muxkit.adapters")

LinkT = TypeVar("LinkT", bound=PacketLink)


class Peer(Protocol):
    """A link as the table of peers sees it."""

    @property
    def expires(self) -> float:
        """When the peer counts as silent for too long."""

    def forget(self, reason: str) -> None:
        """End the link; the tasks that wait on it raise an error."""


class Peers:
    """Admits, evicts and expires peers; handlers run in `nursery`, each in a scope of its own."""

    def __init__(self, nursery: trio.Nursery, limits: Limits, counters: ServerCounters) -> None:
        self._nursery = nursery
        self._limits = limits
        self._counters = counters
        self._running = 0
        self._half_open: dict[Peer, trio.CancelScope] = {}  # oldest first
        self._established: set[Peer] = set()
        self._alarm = trio.CancelScope()
        self._evictions = EVICTIONS_BURST
        self._refilled_at = -math.inf
        self._turns = turns()

    @property
    def has_room(self) -> bool:
        """True if `admit` would take one more peer now; if all places are taken, evictions are limited in rate."""
        limits = self._limits
        if len(self._established) >= limits.connections or self._running >= limits.connections + limits.half_open:
            return False
        if not self._must_evict:
            return True
        now = trio.current_time()
        self._evictions = min(EVICTIONS_BURST, self._evictions + (now - self._refilled_at) * EVICTIONS)
        self._refilled_at = now
        return self._evictions >= 1

    def admit(self, peer: Peer) -> trio.CancelScope | None:
        """Admit a peer without proof and return the scope for `run`, or None; handlers that still run count too."""
        if not self.has_room:
            self._counters.turned_away += 1
            return None
        while self._must_evict:
            self._evict_oldest()
        self._turns.connection_came()
        scope = trio.CancelScope()
        self._half_open[peer] = scope
        self._running += 1
        self._counters.admitted += 1
        self._count()
        self._alarm.deadline = min(self._alarm.deadline, peer.expires)
        return scope

    def start(self, peer: Peer, scope: trio.CancelScope, work: Callable[[], Awaitable[None]]) -> None:
        """`run` in a task of its own."""
        self._nursery.start_soon(self.run, peer, scope, work)

    async def run(self, peer: Peer, scope: trio.CancelScope, work: Callable[[], Awaitable[None]]) -> None:
        """Run the handler of an admitted peer and log what it raises."""
        try:
            with scope:
                await work()
        except Exception as error:
            log_failure("peer", error)
        finally:
            self._running -= 1
            self._counters.finished += 1
            self.remove(peer)

    def establish(self, peer: Peer) -> None:
        """Mark a peer as proved, so that newer ones do not replace it any more."""
        if self._half_open.pop(peer, None) is not None:
            self._established.add(peer)
            self._count()

    def remove(self, peer: Peer) -> None:
        """Forget a peer whose link is over; its handler may still run for a while."""
        self._half_open.pop(peer, None)
        self._established.discard(peer)
        self._count()

    async def expire(self) -> None:
        """Forget silent peers; a task that runs beside the listeners."""
        while True:
            now = trio.current_time()
            for peer in [*self._half_open, *self._established]:
                if peer.expires <= now:
                    self._counters.idle += 1
                    self.remove(peer)
                    peer.forget("silent for too long")
            soonest = min((peer.expires for peer in [*self._half_open, *self._established]), default=math.inf)
            self._alarm = trio.CancelScope(deadline=soonest)
            with self._alarm:
                await trio.sleep_forever()

    @property
    def _must_evict(self) -> bool:
        limits, half_open = self._limits, len(self._half_open)
        return half_open >= limits.half_open or len(self._established) + half_open >= limits.connections

    def _evict_oldest(self) -> None:
        peer, scope = next(iter(self._half_open.items()))
        del self._half_open[peer]
        self._counters.evicted += 1
        self._evictions -= 1
        log.info("a peer without proof gave way to a newer one: Limits(half_open=%d)", self._limits.half_open)
        peer.forget("gave way to newer peers before it had proved itself")
        scope.cancel()

    def _count(self) -> None:
        self._counters.half_open = len(self._half_open)
        self._counters.peers = len(self._established)


class PacketListener(ABC, Generic[LinkT]):
    """One bound socket, the task that reads it, and the links of its peers."""

    peers: Peers

    def __init__(
        self, sock: socket.socket, handler: Callable[[LinkT], Awaitable[None]], options: ListenerOptions
    ) -> None:
        self.packets = PacketSocket(sock, options, refused=self._refused, is_connected=False)
        self.options = options
        self._handler = handler
        self._links: dict[Address, LinkT] = {}

    @abstractmethod
    async def run(self, peers: Peers, *, task_status: trio.TaskStatus[None]) -> None:
        """Pass packets to the links of their senders, until cancelled."""

    async def _handle(self, link: LinkT) -> None:
        try:
            await self._handler(link)
        finally:
            await close_at_once(link)

    def _refused(self, address: Address | None, error: OSError) -> None:
        link = None if address is None else self._links.get(address)
        if link is not None and link.refused(error):
            self.options.counters.refused += 1
            self.peers.remove(link)


async def serve_listeners(
    listeners: Sequence[PacketListener[LinkT]], options: ListenerOptions, started: Callable[[list[str]], None]
) -> None:
    """Run listeners that share one table of peers, until cancelled, and close their sockets."""
    try:
        async with bare_nursery() as nursery:
            peers = Peers(nursery, options.limits, options.counters)
            nursery.start_soon(peers.expire)
            for listener in listeners:
                await nursery.start(listener.run, peers)
            started([join_host_port(*listener.packets.socket.getsockname()[:2]) for listener in listeners])
    finally:
        for listener in listeners:
            listener.packets.close()
