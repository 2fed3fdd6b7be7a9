"""The listing of a server's sessions, from which clients learn cheaply which sessions there are and which have changed.

A client that follows many sessions, such as the Spark source with `subscribePattern`, asks again and again. The answer
should cost what has changed, and not what there is. So the server keeps an index of all sessions, in the order of their
last change, and numbers the changes. A client names the last number that it has seen, and gets the sessions after it.

The index is made by the first request. Later requests read only the sessions that the store reports as changed. A store
that other processes share doesn't report all of their changes, so the index is compared with the whole store when it
is older than `MAX_AGE`.

Removed sessions stay in the index as `None`, so that clients learn about their end. Only the newest `MAX_REMOVED` are
kept. A client that asks for changes before those, or that talked to another process before, gets a whole listing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Final

import trio

from muxkit.protocols.restream.store import SessionStore, Status
from muxkit.protocols.restream.wire import ListedSession, Listing
from muxkit.protocols.restream.wire import Status as WireStatus

MAX_LISTED: Final = 5_000  # sessions per listing: about a megabyte, and 20 ms of work
MAX_REMOVED: Final = 10_000  # removed sessions to remember
MAX_AGE: Final = 10.0  # s; a whole read of 10,000 sessions takes about 0.1 s, so this costs at most 1 % of a core
NAME: Final = "stream"  # the name of a session in its params, which `muxkit.pipeline.forward` sets as well


class SessionIndex:
    """The sessions of a store, in the order of their last change."""

    def __init__(self, store: SessionStore[Any, Any], *, now: Callable[[], float] = trio.current_time) -> None:
        self._store = store
        self._now = now
        self._watch = store.watch()
        self._refreshing = trio.Lock()
        self._id = secrets.token_hex(4)  # numbers of another process mean nothing here
        self._entries: dict[str, tuple[int, Status | None]] = {}  # in ascending order of the number
        self._number = 0  # of the last change
        self._removed = 0  # entries that are None
        self._forgotten = 0  # the number of the last change that was forgotten
        self._read_at = 0.0  # when the whole store was read

    async def since(self, since: str, told: Callable[[Status], WireStatus]) -> Listing:
        """Return the sessions that have changed since the `next` of an earlier listing, at most `MAX_LISTED`.

        Args:
            since: the `next` of an earlier listing, or any other text to get all sessions.
            told: returns the status that the client gets.
        """
        async with self._refreshing:
            await self._refresh()
        number = self._number_of(since)
        is_whole = number is None
        after = number or 0
        newer = takewhile(lambda each: each[1][0] > after, reversed(self._entries.items()))
        # A client that starts from the beginning has nothing to remove.
        changed = [each for each in newer if each[1][1] is not None or not is_whole]
        changed.reverse()
        page = changed[:MAX_LISTED]
        last = page[-1][1][0] if len(page) < len(changed) else self._number
        return Listing(
            {
                uuid: None if status is None else ListedSession(name_of(status), told(status))
                for uuid, (_, status) in page
            },
            f"{self._id}-{last}",
            whole=is_whole,
            more=len(page) < len(changed),
        )

    def _number_of(self, since: str) -> int | None:
        """Return the number in the `next` of an earlier listing, or None if a whole listing is needed."""
        id, _, digits = since.partition("-")
        if id != self._id or not digits.isdecimal() or len(digits) > 18:
            return None
        number = int(digits)
        return number if self._forgotten <= number <= self._number else None

    async def _refresh(self) -> None:
        changed = self._watch.take()
        is_old = self._store.is_shared and self._now() - self._read_at >= MAX_AGE
        try:
            if changed is None or is_old:
                await self._read_all()
            elif changed:
                found = await self._store.statuses([*changed])
                for uuid in changed:
                    self._note(uuid, found.get(uuid))
        except BaseException:
            self._watch.add_all()  # what was taken from the watch is not in the index
            raise

    async def _read_all(self) -> None:
        began = self._now()
        left = {uuid for uuid, (_, status) in self._entries.items() if status is not None}
        after = ""
        while page := await self._store.sessions(after):
            for status in page:
                self._note(status.uuid, status)
                left.discard(status.uuid)
            after = page[-1].uuid
        for uuid in left:
            self._note(uuid, None)
        self._read_at = began

    def _note(self, uuid: str, status: Status | None) -> None:
        known = self._entries.get(uuid)
        before = None if known is None else known[1]
        if status == before:
            return
        self._entries.pop(uuid, None)
        self._number += 1
        self._entries[uuid] = self._number, status
        self._removed += (status is None) - (known is not None and before is None)
        if self._removed > MAX_REMOVED:
            self._forget_removed()

    def _forget_removed(self) -> None:
        """Forget the older half of the removed sessions, so that this runs once per thousands of removals."""
        removed = [uuid for uuid, (_, status) in self._entries.items() if status is None]
        for uuid in removed[: len(removed) // 2]:
            self._forgotten, _ = self._entries.pop(uuid)
            self._removed -= 1


def name_of(status: Status) -> str:
    """Return the name of a session: the text `stream` of its params, or its UUID if they have none."""
    name = status.params.get(NAME) if isinstance(status.params, dict) else None
    return name if isinstance(name, str) else status.uuid
