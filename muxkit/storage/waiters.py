"""The tasks that sleep until a row changes, by a key such as the uuid of a session."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiters:
    """Sleeping tasks by key; a key without one takes no memory."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep: dict[str, set[trio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._asleep.values()))

    @contextmanager
    def watching(self, key: str) -> Iterator[trio.Event]:
        """Return the event that the next change sets. Read the rows only inside, or a change may be missed."""
        event = trio.Event()
        self._asleep.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            asleep = self._asleep.get(key)
            if asleep is not None:
                asleep.discard(event)
                if not asleep:
                    del self._asleep[key]

    def wake(self, key: str) -> None:
        """Wake the tasks that wait for this key."""
        for event in self._asleep.pop(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake every task: any key may have changed, or the store is closed."""
        for key in list(self._asleep):
            self.wake(key)
