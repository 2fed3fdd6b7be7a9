"""A session store in memory, which ends with its process."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import AsyncIterator, Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import TypeVar

import attrs
import trio

from muxkit.protocols.restream.store.rules import Data, Rules, Session, State, Wanted
from muxkit.protocols.restream.store.store import SessionStore
from muxkit.protocols.restream.wire import StoredMessage
from muxkit.runtime import protect_package, protected_manager
from muxkit.storage import StoreClosed, StoreFull, Waiters

T = TypeVar("T")

SESSION_BYTES = 1150  # measured: the memory of a session beside its params, state and messages
MESSAGE_BYTES = 140  # measured: the memory of a message beside its data


@protected_manager
async def open_memory(rules: Rules[State, Data]) -> AsyncIterator[SessionStore[State, Data]]:
    """Open a store whose calls never wait."""
    waiters = Waiters()
    backend = _Memory(rules.limits.bytes, waiters)
    try:
        yield SessionStore(backend, rules, waiters)
    finally:
        backend.close()


class _Memory:
    """Both the backend and its rows: units of work cannot overlap, since none of them waits."""

    def __init__(self, most_bytes: int, waiters: Waiters) -> None:
        self._sessions: dict[str, Session] = {}
        self._order: list[str] = []  # uuids, sorted
        self._dues: list[tuple[float, str]] = []  # a heap of sessions by the time when they expire, or expired once
        self._messages: dict[str, KeptMessages] = {}
        self._used = 0
        self._most_bytes = most_bytes
        self._waiters = waiters
        self._is_closed = False

    async def work(self, uuid: str, act: Callable[[_Memory], T], *, grows: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise StoreClosed("the store is closed; open it again")
        return act(self)

    async def look(self, uuid: str, act: Callable[[_Memory], T], wants: Wanted | None = None) -> T:
        return await self.work(uuid, act)

    def close(self) -> None:
        self._is_closed = True
        self._waiters.wake_all()

    # ------------------------------------------------------------------------ rows

    def session(self, uuid: str) -> Session | None:
        session = self._sessions.get(uuid)
        return None if session is None else attrs.evolve(session)

    def save(self, session: Session) -> None:
        old = self._sessions.get(session.uuid)
        growth = _cost(session) - (0 if old is None else _cost(old))
        if old is None:
            self._reserve(growth)
            insort(self._order, session.uuid)
            self._messages[session.uuid] = KeptMessages()
        if session.due is not None and session.due < inf and (old is None or old.due != session.due):
            heappush(self._dues, (session.due, session.uuid))
        self._used += growth
        self._sessions[session.uuid] = session

    def remove(self, uuid: str) -> None:
        self._used -= _cost(self._sessions.pop(uuid)) + sum(map(_message_cost, self._messages.pop(uuid).clear()))
        del self._order[bisect_right(self._order, uuid) - 1]

    def add(self, uuid: str, messages: Sequence[StoredMessage]) -> None:
        growth = sum(map(_message_cost, messages))
        self._reserve(growth)
        self._used += growth
        self._messages[uuid].extend(messages)

    def messages(self, wanted: Wanted) -> list[StoredMessage]:
        return self._messages[wanted.uuid].after(wanted.after, wanted.most, wanted.most_bytes)

    def trim(self, uuid: str, above: int, upto: int) -> None:
        self._used -= sum(map(_message_cost, self._messages[uuid].trim(upto)))

    def count(self) -> int:
        return len(self._sessions)

    def page(self, after: str, most: int, now: float) -> list[Session]:
        found: list[Session] = []
        for index in range(bisect_right(self._order, after), len(self._order)):
            session = self._sessions[self._order[index]]
            if session.due is None or session.due > now:
                found.append(session)
                if len(found) == most:
                    break
        return found

    def several(self, uuids: Sequence[str]) -> list[Session]:
        return [session for uuid in uuids if (session := self._sessions.get(uuid)) is not None]

    def overdue(self, now: float, most: int) -> list[Session]:
        dues, found = self._dues, dict[str, Session]()
        while dues and dues[0][0] <= now and len(found) < most:
            due, uuid = heappop(dues)
            session = self._sessions.get(uuid)
            if session is not None and session.due == due:  # otherwise it came back meanwhile, or was deleted
                found[uuid] = attrs.evolve(session)
        for uuid, session in found.items():  # until they are deleted, which may fail
            heappush(dues, (session.due or 0.0, uuid))
        return list(found.values())

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self._waiters.wake(uuid)

    def shrink(self) -> bool:
        return False

    def _reserve(self, growth: int) -> None:
        if self._used + growth > self._most_bytes:
            raise StoreFull(
                f"{self._used:,} bytes are used and {growth:,} more would pass "
                f"StoreLimits(bytes={self._most_bytes}); wait for acks, or raise it",
                passes=growth <= self._most_bytes,
            )


class KeptMessages:
    """The messages of one session. Reading from any position costs what is read, however many messages are kept.

    They are in a list, in the order of their ids and without gaps. Places of deleted messages are empty until half of
    the list is, so that deleting a message costs a constant number of steps on average.
    """

    __slots__ = ("_deleted", "_first", "_rows")

    def __init__(self) -> None:
        self._rows: list[StoredMessage | None] = []
        self._first = 0  # the id of the first place
        self._deleted = 0  # places that are empty, all at the beginning

    def extend(self, messages: Sequence[StoredMessage]) -> None:
        if not self._rows and messages:
            self._first = messages[0].id
        self._rows.extend(messages)

    def after(self, id: int, most: int, most_bytes: int) -> list[StoredMessage]:
        """Return up to `most` messages after this id; at least one if there is one."""
        found: list[StoredMessage] = []
        size = 0
        start = max(self._deleted, id + 1 - self._first)
        for row in self._rows[start : start + most]:
            assert row is not None
            size += len(row.data)
            if found and size > most_bytes:
                break
            found.append(row)
        return found

    def trim(self, upto: int) -> list[StoredMessage]:
        """Delete the messages up to this id and return them."""
        start, end = self._deleted, max(self._deleted, min(upto + 1 - self._first, len(self._rows)))
        gone = [row for row in self._rows[start:end] if row is not None]
        self._rows[start:end] = [None] * (end - start)
        self._deleted = end
        if 2 * end >= len(self._rows):
            del self._rows[:end]
            self._first += end
            self._deleted = 0
        return gone

    def clear(self) -> list[StoredMessage]:
        """Delete all messages and return them."""
        return self.trim(self._first + len(self._rows))


def _cost(session: Session) -> int:
    return SESSION_BYTES + len(session.params) + len(session.state)


def _message_cost(row: StoredMessage) -> int:
    return MESSAGE_BYTES + len(row.data)


protect_package("muxkit.protocols.restream")
