"""Finds the session to which a new connection belongs, for servers whose sessions outlive their connections.

A `Registry` contains the sessions of a listener. When a client reconnects, its handshake contains the key of its
session, and the new connection *adopts* the session:

    sessions: Registry[bytes, Link] = Registry(weigh=Link.retained_bytes, forgotten=Link.forgotten)

    async def handle(stream):
        hello, stream = await handshakes.read_handshake(stream, HelloEngine())
        async with sessions.adopt(hello.link, make=lambda: Link(hello)) as adopted:
            await adopted.session.run_connection(stream)  # cancelled when a newer connection adopts the session

Only one connection at a time runs a session. If a second one adopts it, the block of the first one is cancelled, and
the second one waits until that block has ended. Between two connections, a session is *absent*. The registry keeps
absent sessions for a limited time and with a limited size, and then gives them up.
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
    """The result of `Registry.adopt`, which a connection uses while it runs the session."""

    session: SessionT
    is_new: bool
    """True if the session was created for this connection."""
    was_replaced: bool = False
    """True if a newer connection has adopted the session, so that this block was cancelled."""
    _is_over: bool = attrs.field(default=False, init=False)

    def forget(self) -> None:
        """Remove the session when this block ends, because it has ended."""
        self._is_over = True


@attrs.define(eq=False)
class _Entry(Generic[SessionT]):
    session: SessionT
    scope: trio.CancelScope | None = None  # the block of the connection that runs the session
    adopted: Adopted[SessionT] | None = None  # the result of that connection's `adopt`
    newest: object = None  # identifies the last connection that has called `adopt`
    waiting: int = 0  # number of connections that wait until the previous one has ended
    is_known: bool = True  # False once the session was removed, although a connection may still run it
    until: float = 0.0  # when an absent session is given up
    weight: int = 0  # the size of an absent session in bytes
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)


@attrs.define(eq=False, kw_only=True)
class Registry(Generic[KeyT, SessionT]):
    """The sessions of one listener by key.

    If a limit for absent sessions is exceeded, the session that has been absent for the longest time is given up. Run
    `expire` in a nursery, or sessions that are too old are only given up when the registry is used.

    Args:
        weigh: Returns the size of an absent session in bytes.
        forgotten: Called with each session that is given up, and with the reason.
        most: The maximum number of absent sessions.
        most_bytes: The maximum size of all absent sessions together.
        most_age: How many seconds a session may be absent.
        clock: Returns the current time.
    """

    _weigh: Callable[[SessionT], int] = lambda session: 0
    _forgotten: Callable[[SessionT, Forgotten], None] = lambda session, why: None
    _most: int = 1024
    _most_bytes: int = 64 * MIB
    _most_age: float = 30.0
    _clock: Callable[[], float] = trio.current_time
    _entries: dict[KeyT, _Entry[SessionT]] = attrs.field(factory=dict, init=False)
    _absent: dict[KeyT, _Entry[SessionT]] = attrs.field(factory=dict, init=False)  # longest absence first
    _absences: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)  # for `expire`
    absent_bytes: int = attrs.field(default=0, init=False)
    """The size of all absent sessions together."""

    # --- looking up

    def find(self, key: KeyT) -> SessionT | None:
        """Return the session with this key, or None. It doesn't matter if it has a connection."""
        self.forget_the_old()
        entry = self._entries.get(key)
        return entry.session if entry is not None and entry.is_known else None

    def __iter__(self) -> Iterator[SessionT]:
        """Iterate over a copy of all sessions. The registry may change during the iteration."""
        return iter([entry.session for entry in self._entries.values() if entry.is_known])

    def __len__(self) -> int:
        return sum(entry.is_known for entry in self._entries.values())

    @property
    def absent(self) -> int:
        """The number of absent sessions."""
        return len(self._absent)

    # --- connections

    @protected_manager
    async def adopt(
        self, key: KeyT, *, make: Callable[[], SessionT] | None = None, takeover: bool = True
    ) -> AsyncGenerator[Adopted[SessionT], None]:
        """Let a connection run the session with this key inside the block.

        If another connection runs the session, its block is cancelled, and this waits until that block has ended. If a
        newer connection adopts the session in turn, this block is cancelled and ends without an error, and
        `Adopted.was_replaced` is True.

        Args:
            key: The key of the session.
            make: Creates a session if there is none with this key.
            takeover: Whether to cancel another connection that runs the session.

        Raises:
            LookupError: If there is no such session, and no `make`.
            trio.BusyResourceError: If another connection runs the session, and `takeover` is False.
            LinkLost: If a newer connection has adopted the session while this one was waiting.
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
        """Cancel the connection that runs the session, and wait until its block has ended.

        No other task runs between the end of this method and the moment when the caller adopts the session.
        """
        mine = entry.newest = object()
        if entry.adopted is not None and entry.scope is not None:
            entry.adopted.was_replaced = True
            entry.scope.cancel()
        entry.changed.unpark_all()  # other waiting connections aren't the newest any more, so they must give up
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
        """Make a session absent that no connection runs or waits for, or drop it if it was removed."""
        if entry.scope is not None or entry.waiting:
            return
        if entry.is_known:
            self._begin_absence(key, entry)
        else:
            del self._entries[key]

    def forget(self, key: KeyT) -> None:
        """Remove a session and cancel the connection that runs it. `forgotten` isn't called."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_known = False
        self._leave_absence(key, entry)
        if entry.scope is not None:
            entry.scope.cancel()  # the key can't be used again before this block has ended
        else:
            self._keep_or_drop(key, entry)

    # --- absence

    def reweigh(self, key: KeyT) -> None:
        """Update the size of a session if it is absent. If it is too large now, sessions are given up."""
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
        """Give up each absent session when it becomes too old. Runs until it is cancelled."""
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
        if entry.weight > self._most_bytes:  # it would be too large even if we gave up all other sessions
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
