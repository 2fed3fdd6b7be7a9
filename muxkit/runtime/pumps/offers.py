"""Takes back readers' jobs that nobody has borrowed, for all connections of a Trio run.

A receiver that has borrowed a reader's job (see `reading`) usually needs the job again very soon: it answers the
message and waits for the next one. So it offers the job when it returns it, and the reader task goes on sleeping. If
nobody borrows the job until the next pass of Trio's loop, the reader task has to wake up and take it.

To find that out, each reader task could wake up after each message. But waking a task is one of the most expensive
steps of a message. So one system task looks after all offered jobs. However many connections have offered a job in one
pass, only this task wakes up in the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import trio

TASK_NAME: Final = "muxkit offers"


class Offerer(ABC):
    """A reader that has offered its job."""

    @abstractmethod
    def offer_expired(self) -> None:
        """Take the job back if nobody has borrowed it. Called in the pass after each offer. Never raises."""


class Offers:
    """The offers of one Trio run."""

    def __init__(self) -> None:
        self._offerers: list[Offerer] = []
        self._is_started = False
        self._sleeper: trio.lowlevel.Task | None = None  # the system task, while it sleeps

    def add(self, offerer: Offerer) -> None:
        """Call `offer_expired` in the next pass of Trio's loop."""
        self._offerers.append(offerer)
        if self._sleeper is not None:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)
        elif not self._is_started:
            self._is_started = True
            trio.lowlevel.spawn_system_task(self._run, name=TASK_NAME)

    async def _run(self) -> None:
        try:
            while True:
                self._expire()
                self._sleeper = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            self._is_started = False  # the Trio run is ending

    def _expire(self) -> None:
        # This isn't a part of `_run`, whose variables would keep the last connections alive while it sleeps.
        offerers, self._offerers = self._offerers, []
        for offerer in offerers:
            offerer.offer_expired()

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED
