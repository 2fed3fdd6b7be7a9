"""The sessions of a listener by key: those that have a connection, and absent ones that wait for their next.

    sessions: Registry[bytes, Link] = Registry(weigh=Link.retained_bytes, forgotten=Link.forgotten)

    async def handle(stream):
        hello, stream = await handshakes.read_handshake(stream, HelloEngine())
        async with sessions.adopt(hello.link, make=lambda: Link(hello)) as adopted:
            await adopted.session.run_connection(stream)      # ends when a newer connection comes

A session is held by one connection at a time: adopting it waits until the previous connection has been cancelled and
has left its block.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from enum import Enum
from typing import Generic, TypeVar

import attrs
import trio

from muxkit.runtime._errors import LinkLost
from muxkit.runtime._scope import protected_manager

KeyT = TypeVar("KeyT", bound=Hashable)
SessionT = TypeVar("SessionT")

MIB = 1024 * 1024


class Forgotten(Enum):
    """Why an absent session was given up."""

    TOO_MANY = "more sessions were absent than are kept"
    TOO_LARGE = "absent sessions held more bytes than are kept"
    TOO_OLD = "it was absent for longer than it is kept"


@attrs.define(eq=False)
class Adopted(Generic[SessionT]):
    """A connection's hold on its session, inside the block of `Registry.adopt`."""

    session: SessionT
    is_new: bool
    """True if the session was made for this connection."""
    was_replaced: bool = False
    """True if a newer connection took over; then this block is being cancelled, or was."""
    _is_over: bool = attrs.field(default=False, init=False)

    def forget(self) -> None:
        """The session is over: do not keep it when this block ends."""
        self._is_over = True


@attrs.define(eq=False)
class _Entry(Generic[SessionT]):
    session: SessionT
    scope: trio.CancelScope | None = None  # of the connection that holds it
    adopted: Adopted[SessionT] | None = None
    newest: object = None  # the connection that came last
    waiting: int = 0  # connections that wait for it
    is_known: bool = True  # False once forgotten, though its last connection has not left yet
    until: float = 0.0  # when it is forgotten, while absent
    weight: int = 0  # bytes, while absent
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)


@attrs.define(eq=False, kw_only=True)
class Registry(Generic[KeyT, SessionT]):
    """The sessions of one listener by key.

    A session without a connection is absent. At most `most` absent sessions are kept, with at most `most_bytes` in all
    as `weigh` counts them, each for at most `most_age` seconds of `clock`; the one that has been absent for longest is
    given up first. `forgotten` is called with each session that is given up. Run `expire` in a nursery to have that
    happen in time; otherwise it happens when the registry is next used.
    """

    _weigh: Callable[[SessionT], int] = lambda session: 0
    _forgotten: Callable[[SessionT, Forgotten], None] = lambda session, why: None
    _most: int = 1024
    _most_bytes: int = 64 * MIB
    _most_age: float = 30.0
    _clock: Callable[[], float] = trio.current_time
    _entries: dict[KeyT, _Entry[SessionT]] = attrs.field(factory=dict, init=False)
    _absent: dict[KeyT, _Entry[SessionT]] = attrs.field(factory=dict, init=False)  # absent for longest first
    # Of `expire`, while no session is absent.
    _absences: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    absent_bytes: int = attrs.field(default=0, init=False)
    """What the absent sessions weigh together."""

    # --- looking up

    def find(self, key: KeyT) -> SessionT | None:
        """Return the session with this key, with or without a connection."""
        self.forget_the_old()
        entry = self._entries.get(key)
        return entry.session if entry is not None and entry.is_known else None

    def __iter__(self) -> Iterator[SessionT]:
        """Iterate over a copy of all sessions, so the registry may change meanwhile."""
        return iter([entry.session for entry in self._entries.values() if entry.is_known])

    def __len__(self) -> int:
        return sum(entry.is_known for entry in self._entries.values())

    @property
    def absent(self) -> int:
        """How many sessions have no connection."""
        return len(self._absent)

    # --- connections

    @protected_manager
    async def adopt(
        self, key: KeyT, *, make: Callable[[], SessionT] | None = None, takeover: bool = True
    ) -> AsyncGenerator[Adopted[SessionT], None]:
        """Hold the session with this key for one connection; the session is absent when the block ends.

        A connection that holds it already is cancelled, and has left its own block before this one begins. This block
        may be cancelled in the same way: it then ends without an error, and `was_replaced` is set. `make` makes a
        session if there is none.

        Raises LookupError if there is none and no `make`; `trio.BusyResourceError` if another connection holds it and
        `takeover` is not set; `LinkLost` if a still newer connection came while this one waited.
        """
        self.forget_the_old()
        is_new = key not in self._entries
        if is_new:
            self._entries[key] = _Entry(_made(make))
        entry = self._entries[key]
        if entry.scope is not None:
            if entry.is_known and not takeover:
                raise trio.BusyResourceError("another connection holds this session")
            await self._take_over(key, entry)
        if not entry.is_known:
            try:
                entry.session = _made(make)
            except BaseException:
                self._keep_or_drop(key, entry)
                raise
            entry.is_known = is_new = True
        self._leave_absence(key, entry)
        entry.newest = entry.adopted = adopted = Adopted(entry.session, is_new)
        entry.scope = trio.CancelScope()
        try:
            with entry.scope:
                yield adopted
        finally:
            entry.scope = entry.adopted = None
            entry.is_known = entry.is_known and not adopted._is_over
            entry.changed.unpark_all()
            self._keep_or_drop(key, entry)

    async def _take_over(self, key: KeyT, entry: _Entry[SessionT]) -> None:
        """Wait until no connection holds it; nothing can run between this and the moment when the caller does."""
        mine = entry.newest = object()
        if entry.adopted is not None and entry.scope is not None:
            entry.adopted.was_replaced = True
            entry.scope.cancel()
        entry.changed.unpark_all()  # a connection that waited before is not the newest any more
        entry.waiting += 1
        has_it = False
        try:
            while entry.scope is not None and entry.newest is mine:
                await entry.changed.park()
            has_it = entry.newest is mine
        finally:
            entry.waiting -= 1
            if not has_it:
                self._keep_or_drop(key, entry)
        if not has_it:
            raise LinkLost("a newer connection of the same session came", by="peer")

    def _keep_or_drop(self, key: KeyT, entry: _Entry[SessionT]) -> None:
        """Keep a session that no connection holds or waits for as absent, or drop it if it was forgotten."""
        if entry.scope is not None or entry.waiting:
            return
        if entry.is_known:
            self._begin_absence(key, entry)
        else:
            del self._entries[key]

    def forget(self, key: KeyT) -> None:
        """Drop a session; a connection that holds it is cancelled. `forgotten` is not called."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_known = False
        self._leave_absence(key, entry)
        if entry.scope is not None:
            entry.scope.cancel()  # it has to leave before the key can be used again
        else:
            self._keep_or_drop(key, entry)

    # --- absence

    def reweigh(self, key: KeyT) -> None:
        """Weigh a session again, if it is absent; it may be given up for that."""
        entry = self._absent.get(key)
        if entry is not None:
            self.absent_bytes -= entry.weight
            entry.weight = self._weigh(entry.session)
            self.absent_bytes += entry.weight
            self._forget_the_many(key, entry)

    def forget_the_old(self) -> None:
        """Give up the sessions that have been absent for too long."""
        now = self._clock()
        while self._absent:
            key, entry = next(iter(self._absent.items()))
            if entry.until > now:
                return
            self._give_up(key, entry, Forgotten.TOO_OLD)

    async def expire(self) -> None:
        """Give up each absent session when its time is over; runs until it is cancelled."""
        while True:
            self.forget_the_old()
            if not self._absent:
                await self._absences.park()
                continue
            oldest = next(iter(self._absent.values()))
            await trio.sleep(max(0.0, oldest.until - self._clock()))

    def _begin_absence(self, key: KeyT, entry: _Entry[SessionT]) -> None:
        entry.until = self._clock() + self._most_age
        entry.weight = self._weigh(entry.session)
        self.absent_bytes += entry.weight
        self._absent[key] = entry
        self._absences.unpark_all()
        self._forget_the_many(key, entry)

    def _leave_absence(self, key: KeyT, entry: _Entry[SessionT]) -> None:
        if self._absent.pop(key, None) is not None:
            self.absent_bytes -= entry.weight
            entry.weight = 0

    def _forget_the_many(self, key: KeyT, entry: _Entry[SessionT]) -> None:
        if entry.weight > self._most_bytes:  # giving up others would not help
            self._give_up(key, entry, Forgotten.TOO_LARGE)
        while len(self._absent) > self._most or self.absent_bytes > self._most_bytes:
            why = Forgotten.TOO_MANY if len(self._absent) > self._most else Forgotten.TOO_LARGE
            key, entry = next(iter(self._absent.items()))
            self._give_up(key, entry, why)

    def _give_up(self, key: KeyT, entry: _Entry[SessionT], why: Forgotten) -> None:
        entry.is_known = False
        self._leave_absence(key, entry)
        del self._entries[key]
        self._forgotten(entry.session, why)


def _made(make: Callable[[], SessionT] | None) -> SessionT:
    if make is None:
        raise LookupError("there is no such session")
    return make()
