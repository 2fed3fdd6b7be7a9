"""Which peers does a listener for packets have? So many with proof, so many without, and none that went silent."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Protocol

import trio

from muxkit.runtime import turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muxkit import Limits

    from ._packets import ServerCounters

# What forged addresses may cost: each that makes another give way costs a handler's whole life.
EVICTIONS = 100.0  # a second
EVICTIONS_BURST = 200.0

log = logging.getLogger("muxkit.adapters")


class Peer(Protocol):
    """A link as the listener's table sees it."""

    @property
    def expires(self) -> float:
        """When it will have been silent for too long."""

    def forget(self, reason: str) -> None:
        """It is over; whoever waits on it must hear so."""


class Peers:
    """Admission, eviction and expiry; handlers run in `nursery`, each with a scope of its own."""

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
        """Would `admit` take one more now? When all places are taken, so many a second get one from the oldest."""
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
        """Take in a peer without proof if there is room, for `run` with this scope; what still runs counts too."""
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
        """The whole life of an admitted peer; what its handler raises is logged, and the others go on."""
        try:
            with scope:
                await work()
        except (ConnectionError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.info("a peer's handler ended with %s", type(error).__name__)
        except Exception as error:
            # A message may hold what a peer sent, so it is for debugging only.
            log.error("a peer's handler failed with %s", type(error).__name__)
            log.debug("the handler's failure", exc_info=True)
        finally:
            self._running -= 1
            self._counters.finished += 1
            self.remove(peer)

    def establish(self, peer: Peer) -> None:
        """It has proved itself, and is not given up for newer ones any more."""
        if self._half_open.pop(peer, None) is not None:
            self._established.add(peer)
            self._count()

    def remove(self, peer: Peer) -> None:
        """It is over; its handler may still run for a while."""
        self._half_open.pop(peer, None)
        self._established.discard(peer)
        self._count()

    async def expire(self) -> None:
        """Forget who went silent; runs beside the listener."""
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
