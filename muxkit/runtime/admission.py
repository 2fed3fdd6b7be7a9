"""Places of a listener: who is admitted, who waits, and who gives way when the listener is full.

Theory of operation. Every listener, whatever its transport and protocol, has one `Admission`, and every connection that
it accepts holds one `Place`. We have two goals that pull against each other. A thousand honest clients that connect in
the same moment must all be served, so a newcomer must not push out a handshake that is going on. And a thousand peers
that connect and say nothing must not keep an honest client out, so a peer that makes no progress must go. The rules
below follow from that:

    HALF_OPEN  the handshake is unfinished, or the peer
               has not said a valid word of its protocol       -> WAITING, SERVED, EVICTED, LEFT
    WAITING    the peer has begun a handshake, which goes on
               when it is its turn; it counts as half-open     -> HALF_OPEN, LEFT
    SERVED     a handler runs                                  -> HALF_OPEN, EVICTED, LEFT
    EVICTED    it gave way to a newcomer and is closing; it
               no longer counts                                -> LEFT
    LEFT       the connection was closed

- A listener is full while `Limits.half_open` of its places are half-open, or `Limits.connections` of them are taken.
  While it is full it accepts nothing: newcomers wait in the kernel's backlog. Those of DTLS wait in a line of the
  listener once their address is proved, and those of UDP and QUIC send their packet again.
- Nobody gives way while there is room, and nobody who makes progress gives way at all. A half-open connection makes
  progress when its bytes let us answer, or finish: `Place.progressed`. Single bytes that complete nothing are none, so
  dribbling does not help. `Limits.handshake` seconds without progress end a handshake in any case.
- When the listener is full, the half-open connection that has made no progress for longest gives way once that has
  lasted for a tenth of `Limits.handshake`. If several addresses have half-open connections, the one that has most of
  them loses one first. If there is nobody half-open, the session without a channel that has been idle for longest gives
  way, once that has lasted for `Limits.handshake` seconds. A session with a channel never gives way.
- One address (an IPv4 address, or the first 64 bits of an IPv6 address) may have `Limits.half_open_per_address`
  half-open connections. A further one is closed, unless another of the same address can give way.
- Handshakes cost processor time. If a thousand of them went on side by side, each would be finished when all are, and
  by then their clients have given up. So they start in the order in which they came, as soon as fewer than `AT_ONCE`
  of those that started within the last tenth of `Limits.handshake` are unfinished: `Admission.start`. A connection
  that has sent nothing waits for its first byte before that, so silent ones do not delay the others.
- A session that gives way is told why. If nobody can give way for half of `Limits.handshake`, newcomers are told that
  the listener is full, where the protocol has words for that.

A session may be silent and honest: a client that waits for the server to open a channel, for example. That is why
silence alone ends nothing while there is room.

A protocol takes part through `current_place()`, which returns the place of the connection whose task calls it. A pump
reports the first events that the peer's bytes cause. `Place.handshake` is a block for a handshake of the protocol's
own. With `Place.occupy` a server gives its session to the place, which asks it for its channels only when the listener
is full, so an ordinary session costs nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import Final, Protocol, TypeVar, overload, runtime_checkable

import attrs
import trio

from muxkit._errors import Refused
from muxkit._limits import Limits
from muxkit._observer import turned_away
from muxkit._quick_check import QuickCheck
from muxkit.runtime._log_pace import may_log

GRACE: Final = 0.1
"""Part of `Limits.handshake` for which a half-open connection of a full listener may make no progress. With the default
it is one second: a round trip around the world takes a third of that, and a client program that opens a thousand
connections at once needs about as long to answer each."""

AT_ONCE: Final = 64
"""Handshakes that go on at the same time. On one core 64 TLS handshakes take a tenth of a second, so the round trip of
each is hidden behind the work for the others."""

LEAVING: Final = 1.0
"""Seconds for a session that gave way to tell its peer why; then its connection is cut."""

NETWORK_BITS: Final = 64
"""Bits of an IPv6 address that count as one address, because every host has at least a network of that size."""

CODE: Final = 503
"""The code of the reason that those read who cannot be served: they may try again later."""

_log = logging.getLogger("muxkit")


class Standing(Enum):
    """The state of a place."""

    HALF_OPEN = "the handshake is unfinished, or the peer has not said a valid word"
    WAITING = "the peer has begun a handshake, which goes on when it is its turn"
    SERVED = "a handler runs"
    EVICTED = "it gave way and is closing"
    LEFT = "the connection was closed"


HALF_OPEN: Final = {Standing.HALF_OPEN, Standing.WAITING}

MOVES: Final = {
    Standing.HALF_OPEN: {*Standing},
    Standing.WAITING: {Standing.HALF_OPEN, Standing.LEFT},
    Standing.SERVED: {Standing.HALF_OPEN, Standing.SERVED, Standing.EVICTED, Standing.LEFT},
    Standing.EVICTED: {Standing.EVICTED, Standing.LEFT},
    Standing.LEFT: {Standing.LEFT},
}


class Occupant(Protocol):
    """A session on a connection, as its place sees it."""

    def activity(self) -> int | None:
        """Return None while there is a channel, otherwise a number that has grown if there was one since the last call.

        A session that was idle the last time and returns the same number has been idle all the time.
        """

    def send_away(self, refused: Refused) -> None:
        """End, and tell the peer why."""


@runtime_checkable
class Refusing(Protocol, metaclass=QuickCheck):
    """A handler of connections that can also tell a peer why it is not served."""

    async def refuse(self, link: object, refused: Refused, /) -> None:
        """Tell the peer, in place of serving it."""


@attrs.define(eq=False)
class Place:
    """The place of one connection; made by `Admission.admit`, and left when the block of `held` ends."""

    _admission: Admission
    source: str
    """The address that the connection comes from, as `source_of` returns it; "" if it is not known."""
    since: float
    """When a half-open connection last made progress."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Around the whole connection; it is cancelled when the handshake takes too long or the connection gives way."""
    standing: Standing = Standing.HALF_OPEN
    occupant: Occupant | None = None
    gave_way: bool = False
    """True once the connection has had to give way to another."""
    _idle_since: float | None = None
    _activity: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run a connection in this block, which ends without an error if the connection has to give way."""
        token = _current.set(self)
        try:
            with self.scope:
                yield
        finally:
            _current.reset(token)
            self.leave()

    @property
    def timed_out(self) -> bool:
        """True if the handshake was not finished within `Limits.handshake`; to be asked inside `held`."""
        return self.standing is Standing.HALF_OPEN and self.scope.cancel_called

    def progressed(self) -> None:
        """Note that the peer's bytes have completed something, and that from now on we wait for the peer again."""
        if self.standing is Standing.HALF_OPEN:
            self.since = trio.current_time()
            if self.scope.deadline < math.inf:
                self.scope.deadline = self.since + self._admission._limits.handshake
            self._admission._move(self, Standing.HALF_OPEN)

    def establish(self) -> None:
        """Note that the handshake is finished."""
        if self.standing is Standing.HALF_OPEN:
            self.scope.deadline = math.inf
            self._admission._move(self, Standing.SERVED)

    def leave(self) -> None:
        """Give the place back."""
        self._admission._move(self, Standing.LEFT)

    @contextmanager
    def handshake(self) -> Iterator[None]:
        """Count the connection as half-open during a handshake of its protocol; the caller bounds its time."""
        self._reopen()
        try:
            yield
        finally:
            self.establish()

    def await_word(self) -> None:
        """Count the connection as half-open until `establish`, for as long as that takes while there is room."""
        self._reopen()

    @contextmanager
    def occupy(self, occupant: Occupant) -> Iterator[None]:
        """Run the handler of a session in this block, for which `current_place` returns None.

        The handler may be a client of other servers, whose answers are no progress of this connection.
        """
        self.occupant = occupant
        token = _current.set(None)
        try:
            yield
        finally:
            _current.reset(token)
            self.occupant = None

    def _reopen(self) -> None:
        if self.standing is Standing.SERVED:
            self.since = trio.current_time()
            self._admission._move(self, Standing.HALF_OPEN)

    def moved(self) -> None:
        """Notice that `standing` has changed; for listeners that keep counters of their own."""

    def give_way(self, why: str) -> None:
        """Leave the place to another connection; `Admission` calls this."""
        self._admission._move(self, Standing.EVICTED)
        self.gave_way = True
        if self.occupant is None:
            self.scope.cancel()
        else:
            self.scope.deadline = trio.current_time() + LEAVING
            self.occupant.send_away(Refused(why, code=CODE))


PlaceT = TypeVar("PlaceT", bound=Place)

_current: ContextVar[Place | None] = ContextVar("the place of this connection", default=None)


def current_place() -> Place | None:
    """Return the place of the connection that this task serves, None if it serves none of a listener with places."""
    return _current.get()


class Admission:
    """The places of one listener."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._half_open: dict[str, dict[Place, None]] = {}  # by source; the longest without progress first
        self._served: dict[Place, None] = {}  # oldest first
        self.half_open: int = 0
        """How many connections are half-open."""
        self._started: dict[Place, float] = {}  # handshakes, and when they started; oldest first
        self._turn = trio.Lock()  # of those that wait to start theirs, first come, first served
        self._full_since = math.inf
        self._looked_at = -math.inf  # for idle sessions
        self._changed = trio.lowlevel.ParkingLot()
        self._finished = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        """Return how many places are taken."""
        return self.half_open + len(self._served)

    @property
    def served(self) -> int:
        """How many connections have finished their handshake."""
        return len(self._served)

    @property
    def has_room(self) -> bool:
        """True if one more can be admitted now without any other giving way."""
        return self.half_open < self._limits.half_open and len(self) < self._limits.connections

    def make_room(self) -> bool:
        """Return True if one more can be admitted now, if need be because another gives way; see the module."""
        now, limit = trio.current_time(), "half_open"
        while not self.has_room:
            place = self._silent_for_longest(now)
            if place is None and self.half_open < self._limits.half_open:
                place, limit = self._idle_for_longest(now), "connections"
            if place is None:
                self._full_since = min(self._full_since, now)
                return False
            self._evict(place, limit)
        self._full_since = math.inf
        return True

    async def wait_for_place(self, *, patience: float = math.inf) -> bool:
        """Wait until one more can be admitted; return False once nobody could be for `patience` seconds."""
        if not self.make_room():
            turned_away("connections" if self.half_open < self._limits.half_open else "half_open")
        while not self.make_room():
            if trio.current_time() >= self._full_since + patience:
                return False
            with trio.CancelScope(deadline=min(self._next_chance(), self._full_since + patience)):
                await self._changed.park()
            # What came from a peer while this program was busy is taken in now, before anybody is judged.
            await trio.lowlevel.checkpoint()
        return True

    @overload
    def admit(self, source: str = "") -> Place | None: ...
    @overload
    def admit(self, source: str, kind: type[PlaceT]) -> PlaceT | None: ...
    def admit(self, source: str = "", kind: type[Place] = Place) -> Place | None:
        """Take a place for a connection from this address; None if the address has as many half-open ones as it may.

        The caller has made room. Several callers that wait for connections at the same time may exceed the limits by
        their number.
        """
        limits, now = self._limits, trio.current_time()
        of_source = self._half_open.get(source, {})
        if source and len(of_source) >= limits.half_open_per_address:
            oldest = self._first_silent(of_source)
            if oldest is not None and len(of_source) >= limits.half_open_per_address:
                if oldest.since + self._grace > now:
                    if may_log("connections of an address with too many half-open ones"):
                        # log: One address has as many connections as it may have whose peers have not said a valid word
                        # yet.
                        _log.info(
                            "a connection was closed: its address has Limits(half_open_per_address=%d) half-open ones",
                            limits.half_open_per_address,
                        )
                    turned_away("half_open_per_address")
                    return None
                self._evict(oldest, "half_open_per_address")
        place = kind(self, source, now)
        place.scope.deadline = now + limits.handshake
        self._half_open.setdefault(source, {})[place] = None
        self.half_open += 1
        return place

    async def start(self, place: Place) -> None:
        """Wait until the handshake of a connection may start."""
        self._move(place, Standing.WAITING)
        place.scope.deadline = math.inf  # the delay is not the peer's
        async with self._turn:
            while len(self._started) >= AT_ONCE:
                oldest, began = next(iter(self._started.items()))
                with trio.CancelScope(deadline=began + self._grace) as scope:
                    await self._finished.park()
                if scope.cancelled_caught:
                    self._started.pop(oldest, None)  # it waits for its peer, so it costs nothing meanwhile
            place.since = self._started[place] = trio.current_time()
        place.scope.deadline = place.since + self._limits.handshake
        self._move(place, Standing.HALF_OPEN)

    # --- inside

    @property
    def _grace(self) -> float:
        return GRACE * self._limits.handshake

    def _move(self, place: Place, to: Standing) -> None:
        if to not in MOVES[place.standing]:
            return  # it has given way or left meanwhile
        if place.standing is Standing.HALF_OPEN:
            of_source = self._half_open[place.source]
            del of_source[place]
            if not of_source:
                del self._half_open[place.source]
        self.half_open += (to in HALF_OPEN) - (place.standing in HALF_OPEN)
        if place.standing is Standing.SERVED:
            del self._served[place]
        place.standing = to
        if to is Standing.HALF_OPEN:
            self._half_open.setdefault(place.source, {})[place] = None
        elif to is Standing.SERVED:
            place._idle_since = None
            self._served[place] = None
        if to not in HALF_OPEN and self._started.pop(place, None) is not None:
            self._finished.unpark_all()
        place.moved()
        if self._changed and self.has_room:
            limits = self._limits
            self._changed.unpark(count=min(limits.half_open - self.half_open, limits.connections - len(self)))

    def _evict(self, place: Place, limit: str) -> None:
        if limit == "connections":
            why = f"the server is full (Limits(connections={self._limits.connections})), and this session was idle"
        else:
            why = "the server is full, and nothing came on this connection"
        if may_log("connections that gave way to newer ones"):
            # log: The listener was full. The connection had made no progress in its handshake (`half_open`), or its
            # session had been idle for longest (`connections`).
            _log.info("a connection gave way to a newer one: Limits(%s=%d)", limit, getattr(self._limits, limit))
        turned_away(limit)
        place.give_way(why)

    def _silent_for_longest(self, now: float) -> Place | None:
        """Return the half-open connection that has to give way, if there is one that may be asked to."""
        found: Place | None = None
        most = 0
        for of_source in [*self._half_open.values()]:
            place = self._first_silent(of_source)
            if place is None or place.since + self._grace > now:
                continue
            if len(of_source) > most or (len(of_source) == most and found is not None and place.since < found.since):
                found, most = place, len(of_source)
        return found

    def _first_silent(self, of_source: dict[Place, None]) -> Place | None:
        while of_source:
            place = next(iter(of_source))
            if place.occupant is None or place.occupant.activity() is not None:
                return place
            self._move(place, Standing.SERVED)  # a session of few words: we opened a channel
        return None

    def _idle_for_longest(self, now: float) -> Place | None:
        """Return the session that has to give way; the sessions are only looked at once in a while."""
        if now < self._looked_at + self._grace:
            return None
        self._looked_at = now
        found: Place | None = None
        for place in self._served:
            activity = None if place.occupant is None else place.occupant.activity()
            if activity is None:
                place._idle_since = None
            elif place._idle_since is None or activity != place._activity:
                place._idle_since = now
            place._activity = activity
            since = place._idle_since
            if since is None or since + self._limits.handshake > now:
                continue
            if found is None or found._idle_since is None or since < found._idle_since:
                found = place
        return found

    def _next_chance(self) -> float:
        """Return when the next connection may have to give way, as far as is known now."""
        silent = [next(iter(of_source)).since for of_source in self._half_open.values()]
        chances = [since + self._grace for since in silent]
        if self.half_open < self._limits.half_open:
            chances.append(self._looked_at + self._grace)
        return min(chances, default=math.inf)


@lru_cache(maxsize=1024)
def source_of(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, NETWORK_BITS), strict=False).network_address)
