"""Decides which connections a listener keeps when it has too many of them.

Every listener, whatever its transport and protocol, has an `Admission`. The `Admission` has a `Place` for each
connection of the listener, which records the state of the connection and for how long it has made no progress. If the
listener is full and another client wants to connect, an existing connection may have to *give way*: the listener closes
it.

Theory of operation
===================

We have two conflicting goals. If a thousand honest clients connect at the same time, all of them must be served, so a
new connection mustn't replace one whose handshake makes progress. But a thousand attackers that connect and then send
nothing mustn't keep an honest client out, so a connection that makes no progress must give way.

A connection is *half-open* while its handshake is unfinished, or until its peer has sent the first valid frame of the
protocol. These are the states of a `Place`:

    HALF_OPEN  -> WAITING, SERVED, EVICTED, LEFT
    WAITING    -> HALF_OPEN, LEFT
    SERVED     -> HALF_OPEN, EVICTED, LEFT
    EVICTED    -> LEFT
    LEFT       (final)

- HALF_OPEN: see above.
- WAITING: The peer has begun a handshake, but we delay it, because too many others are going on. The connection still
  counts as half-open.
- SERVED: The handler of the connection is running.
- EVICTED: The connection has had to give way and is being closed. It doesn't count any more.
- LEFT: The connection was closed.

A listener is full while `Limits.half_open` connections are half-open, or while it has `Limits.connections` connections.
While it is full, it accepts no connections. New clients wait in the kernel's backlog. A client of DTLS waits in a queue
of the listener, after it has proved its address. A client of UDP or QUIC has to send its packet again.

Who gives way:

- While the listener isn't full, no connection gives way.
- A half-open connection makes progress when its bytes allow us to answer or to finish the handshake
  (`Place.progressed`). Single bytes that complete nothing don't count, so it doesn't help an attacker to send one now
  and then.
- When the listener is full, the half-open connection gives way that has made no progress for the longest time, but only
  after a tenth of `Limits.handshake`. If several addresses have such connections, the address with the most half-open
  connections loses one first.
- If no connection is half-open, the session without channels gives way that has been idle for the longest time, but
  only after `Limits.handshake` seconds. A session with a channel never gives way.
- The session gets a reason before it is closed. If no connection can give way for half of `Limits.handshake`, new
  clients get the reason that the listener is full, if the protocol can transmit one.

Apart from that, a handshake without progress for `Limits.handshake` seconds fails. A session, however, may be idle
forever while the listener isn't full. It may be an honest client that waits for the server to open a channel.

One address (an IPv4 address, or the first 64 bits of an IPv6 address) may have `Limits.half_open_per_address` half-open
connections. Another one is closed, unless an older one of the same address can give way.

Handshakes cost processor time. If a thousand of them went on at the same time, all of them would finish late, and the
clients would have given up by then. So handshakes start one after the other, as soon as fewer than `AT_ONCE` of those
that started within the last tenth of `Limits.handshake` are unfinished (`Admission.start`). We start a handshake only
after its first byte has arrived, so that silent connections don't delay the others.

A protocol uses `current_place()`, which returns the `Place` of the connection that the calling task serves. The pump
reports to it when the peer has sent its first valid frames. A protocol with a handshake of its own uses
`Place.handshake`. A server passes its session to `Place.occupy`. The `Admission` asks the session for its channels only
when the listener is full, so this costs nothing otherwise.
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
"""The fraction of `Limits.handshake` for which a half-open connection of a full listener may make no progress.

By default, this is one second. A round trip around the world takes a third of that, and a client program that opens a
thousand connections simultaneously needs about as long to answer on each.
"""

AT_ONCE: Final = 64
"""The number of handshakes that go on at the same time. On one core, 64 TLS handshakes take a tenth of a second. So
while we wait for one client, there is enough work for the others."""

LEAVING: Final = 1.0
"""The time in seconds in which a session that has to give way can send the reason. Then its connection is closed."""

NETWORK_BITS: Final = 64
"""How many bits of an IPv6 address we compare, because every host has at least a network of this size."""

CODE: Final = 503
"""The code of the reason for clients that can't be served. As in HTTP, it means that they may try again later."""

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
    """The interface of a session for the `Place` of its connection."""

    def activity(self) -> int | None:
        """Return None if the session has a channel, and otherwise a number.

        The number grows with the messages of the session. So if two calls return the same number, the session has been
        idle in between.
        """

    def send_away(self, refused: Refused) -> None:
        """End the session, and send the reason to the peer."""


@runtime_checkable
class Refusing(Protocol, metaclass=QuickCheck):
    """A handler of connections that can also refuse a connection with a reason."""

    async def refuse(self, link: object, refused: Refused, /) -> None:
        """Send the reason to the peer instead of serving it."""


@attrs.define(eq=False)
class Place:
    """The record of one connection in its listener's `Admission`. `Admission.admit` creates it."""

    _admission: Admission
    source: str
    """The address of the peer, as `source_of` returns it, or "" if it isn't known."""
    since: float
    """When a half-open connection last made progress."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """The scope of the connection. It is cancelled if the handshake takes too long or the connection gives way."""
    standing: Standing = Standing.HALF_OPEN
    """The state of the connection."""
    occupant: Occupant | None = None
    """The session on the connection, while its handler is running."""
    gave_way: bool = False
    """True once the connection has had to give way."""
    _idle_since: float | None = None
    _activity: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Serve the connection in this block. The block is cancelled, and ends without an error, if it gives way."""
        token = _current.set(self)
        try:
            with self.scope:
                yield
        finally:
            _current.reset(token)
            self.leave()

    @property
    def timed_out(self) -> bool:
        """True if the handshake has taken too long. Only meaningful inside the block of `held`."""
        return self.standing is Standing.HALF_OPEN and self.scope.cancel_called

    def progressed(self) -> None:
        """Record that the handshake has made progress. This also extends its deadline."""
        if self.standing is Standing.HALF_OPEN:
            self.since = trio.current_time()
            if self.scope.deadline < math.inf:
                self.scope.deadline = self.since + self._admission._limits.handshake
            self._admission._move(self, Standing.HALF_OPEN)

    def establish(self) -> None:
        """Record that the handshake is finished."""
        if self.standing is Standing.HALF_OPEN:
            self.scope.deadline = math.inf
            self._admission._move(self, Standing.SERVED)

    def leave(self) -> None:
        """Record that the connection was closed."""
        self._admission._move(self, Standing.LEFT)

    @contextmanager
    def handshake(self) -> Iterator[None]:
        """Count the connection as half-open while the block runs. The caller must limit the time of the handshake."""
        self._reopen()
        try:
            yield
        finally:
            self.establish()

    def await_word(self) -> None:
        """Count the connection as half-open until `establish` is called, without a limit for the time."""
        self._reopen()

    @contextmanager
    def occupy(self, occupant: Occupant) -> Iterator[None]:
        """Run the handler of a session in this block.

        Inside, `current_place` returns None, because the handler may connect to other servers, and their answers aren't
        progress of this connection.
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
        """Called when `standing` has changed. Listeners with counters of their own override this."""

    def give_way(self, why: str) -> None:
        """Close the connection in favour of another one. Only `Admission` calls this."""
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
    """Return the `Place` of the connection that this task serves, or None if it serves no connection of a listener."""
    return _current.get()


class Admission:
    """The connections of one listener, and the decisions about them. The module explains the rules."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # The half-open connections by address. Those that have made no progress for the longest time come first.
        self._half_open: dict[str, dict[Place, None]] = {}
        self._served: dict[Place, None] = {}  # the connections in the state SERVED, oldest first
        self.half_open: int = 0
        """How many connections are half-open."""
        self._started: dict[Place, float] = {}  # the handshakes that go on, and when they started, oldest first
        self._turn = trio.Lock()  # lets handshakes start in the order in which they came
        self._full_since = math.inf  # since when the listener has been full without a connection that can give way
        self._looked_at = -math.inf  # when we last looked for idle sessions
        self._changed = trio.lowlevel.ParkingLot()  # tasks that wait until the listener isn't full
        self._finished = trio.lowlevel.ParkingLot()  # the task that waits until a handshake is finished

    def __len__(self) -> int:
        """Return the number of connections, without those that had to give way."""
        return self.half_open + len(self._served)

    @property
    def served(self) -> int:
        """How many connections have finished their handshake."""
        return len(self._served)

    @property
    def has_room(self) -> bool:
        """True if the listener isn't full."""
        return self.half_open < self._limits.half_open and len(self) < self._limits.connections

    def make_room(self) -> bool:
        """Return True if another connection can be accepted. If necessary, make a connection give way."""
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
        """Wait until another connection can be accepted.

        Returns:
            True, or False if the listener has been full for `patience` seconds without a connection that can give way.
        """
        if not self.make_room():
            turned_away("connections" if self.half_open < self._limits.half_open else "half_open")
        while not self.make_room():
            if trio.current_time() >= self._full_since + patience:
                return False
            with trio.CancelScope(deadline=min(self._next_chance(), self._full_since + patience)):
                await self._changed.park()
            # If this program was busy, bytes may have arrived in the meantime. Let the connections read them before we
            # decide which one makes no progress.
            await trio.lowlevel.checkpoint()
        return True

    @overload
    def admit(self, source: str = "") -> Place | None: ...
    @overload
    def admit(self, source: str, kind: type[PlaceT]) -> PlaceT | None: ...
    def admit(self, source: str = "", kind: type[Place] = Place) -> Place | None:
        """Add a connection from an address.

        The caller has called `wait_for_place` before. If several tasks do so at the same time, the limits may be
        exceeded by their number.

        Args:
            source: The address, as `source_of` returns it.
            kind: The class of the result.

        Returns:
            The `Place` of the connection, or None if its address already has too many half-open connections.
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
        place.scope.deadline = math.inf  # we cause the delay, so it mustn't count against the peer
        async with self._turn:
            while len(self._started) >= AT_ONCE:
                oldest, began = next(iter(self._started.items()))
                with trio.CancelScope(deadline=began + self._grace) as scope:
                    await self._finished.park()
                if scope.cancelled_caught:
                    self._started.pop(oldest, None)  # this handshake waits for its peer and needs no processor time
            place.since = self._started[place] = trio.current_time()
        place.scope.deadline = place.since + self._limits.handshake
        self._move(place, Standing.HALF_OPEN)

    # --- inside

    @property
    def _grace(self) -> float:
        return GRACE * self._limits.handshake

    def _move(self, place: Place, to: Standing) -> None:
        if to not in MOVES[place.standing]:
            return  # the connection has given way or was closed in the meantime
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
            why = "the server is full, and nothing has arrived on this connection"
        if may_log("connections that gave way to newer ones"):
            # log: The listener was full. The connection had made no progress in its handshake (`half_open`), or its
            # session had been idle for longest (`connections`).
            _log.info("a connection gave way to a newer one: Limits(%s=%d)", limit, getattr(self._limits, limit))
        turned_away(limit)
        place.give_way(why)

    def _silent_for_longest(self, now: float) -> Place | None:
        """Return the half-open connection that has to give way, or None if all of them are making progress."""
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
            self._move(place, Standing.SERVED)  # the peer is silent, but this side has opened a channel
        return None

    def _idle_for_longest(self, now: float) -> Place | None:
        """Return the idle session that has to give way, or None. This looks at the sessions only now and then."""
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
        """Return the time at which the next connection may have to give way."""
        silent = [next(iter(of_source)).since for of_source in self._half_open.values()]
        chances = [since + self._grace for since in silent]
        if self.half_open < self._limits.half_open:
            chances.append(self._looked_at + self._grace)
        return min(chances, default=math.inf)


@lru_cache(maxsize=1024)
def source_of(host: str) -> str:
    """Return the address of a host for `Admission.admit`: an IPv4 address, or the first 64 bits of an IPv6 address.

    The result is "" if `host` isn't an IP address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, NETWORK_BITS), strict=False).network_address)
