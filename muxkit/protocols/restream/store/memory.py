"""A session store in memory, which ends with its process."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from typing import TypeVar

import attrs
import trio

from muxkit.protocols.restream.store.rules import Data, Row, Rules, Session, State, Wanted
from muxkit.protocols.restream.store.store import SessionStore
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
        self._messages: dict[str, deque[Row]] = {}
        self._used = 0
        self._most_bytes = most_bytes
        self._waiters = waiters
        self._is_closed = False

    async def work(self, uuid: str, act: Callable[[_Memory], T], wants: Wanted | None = None) -> T:
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise StoreClosed("the store is closed; open it again")
        return act(self)

    look = work

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
            self._messages[session.uuid] = deque()
        self._used += growth
        self._sessions[session.uuid] = session

    def remove(self, uuid: str) -> None:
        self._used -= _cost(self._sessions.pop(uuid)) + sum(map(_message_cost, self._messages.pop(uuid)))
        del self._order[bisect_right(self._order, uuid) - 1]

    def add(self, uuid: str, messages: Sequence[Row]) -> None:
        growth = sum(map(_message_cost, messages))
        self._reserve(growth)
        self._used += growth
        self._messages[uuid].extend(messages)

    def messages(self, wanted: Wanted) -> list[Row]:
        kept = self._messages[wanted.uuid]
        found: list[Row] = []
        if not kept:
            return found
        size = 0
        start = max(0, wanted.after + 1 - kept[0].id)
        for row in islice(kept, start, start + wanted.most):
            size += len(row.data)
            if found and size > wanted.most_bytes:
                break
            found.append(row)
        return found

    def trim(self, uuid: str, above: int, upto: int) -> None:
        kept = self._messages[uuid]
        while kept and kept[0].id <= upto:
            self._used -= _message_cost(kept.popleft())

    def count(self) -> int:
        return len(self._sessions)

    def page(self, after: str, most: int, now: float) -> list[Session]:
        found: list[Session] = []
        for uuid in islice(self._order, bisect_right(self._order, after), None):
            session = self._sessions[uuid]
            if session.due is None or session.due > now:
                found.append(session)
                if len(found) == most:
                    break
        return found

    def several(self, uuids: Sequence[str]) -> list[Session]:
        return [session for uuid in uuids if (session := self._sessions.get(uuid)) is not None]

    def overdue(self, now: float, most: int) -> list[str]:
        over = (each.uuid for each in self._sessions.values() if each.due is not None and each.due <= now)
        return list(islice(over, most))

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self._waiters.wake(uuid)

    def shrink(self) -> bool:
        return False

    def _reserve(self, growth: int) -> None:
        if self._used + growth > self._most_bytes:
            raise StoreFull(
                f"{self._used:,} bytes are used and {growth:,} more would pass "
                f"StoreLimits(bytes={self._most_bytes}); wait for acks, or raise it"
            )


def _cost(session: Session) -> int:
    return SESSION_BYTES + len(session.params) + len(session.state)


def _message_cost(row: Row) -> int:
    return MESSAGE_BYTES + len(row.data)


protect_package("muxkit.protocols.restream")
