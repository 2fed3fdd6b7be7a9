"""Who sleeps until something happens to a session? One entry for each sleeper, none for anybody else."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiters:
    """Sleepers by the uuid of their session."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep: dict[str, set[trio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._asleep.values()))

    @contextmanager
    def watching(self, uuid: str) -> Iterator[trio.Event]:
        """The event that the next change sets. Look at the session only inside, or a change may slip past."""
        event = trio.Event()
        self._asleep.setdefault(uuid, set()).add(event)
        try:
            yield event
        finally:
            asleep = self._asleep.get(uuid)
            if asleep is not None:
                asleep.discard(event)
                if not asleep:
                    del self._asleep[uuid]

    def wake(self, uuid: str) -> None:
        """Something happened to this session."""
        for event in self._asleep.pop(uuid, ()):
            event.set()

    def wake_all(self) -> None:
        """Something may have happened to any of them."""
        for uuid in list(self._asleep):
            self.wake(uuid)
