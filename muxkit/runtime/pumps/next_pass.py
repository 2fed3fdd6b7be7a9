"""Work for the next pass of Trio's loop, for all connections of a Trio run.

A connection often puts a small step off until the other tasks that can run now have run. A reader whose job was offered
takes it back if nobody has borrowed it by then (see `reading`). The output of several tasks is written together (see
`stream`). If each connection had a task of its own that woke up for such a step, the wake-up would cost more than the
step. So one system task does them all. However many connections have put a step off in one pass, only this task wakes
up in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

TASK_NAME: Final = "muxkit: next pass"


class NextPass:
    """The steps that the connections of one Trio run have put off."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._is_started = False
        self._sleeper: trio.lowlevel.Task | None = None  # the system task, while it sleeps

    def call(self, step: Callable[[], object]) -> None:
        """Call `step` in the next pass. It must not raise, because an error would end the whole Trio run."""
        self._steps.append(step)
        if self._sleeper is not None:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)
        elif not self._is_started:
            self._is_started = True
            trio.lowlevel.spawn_system_task(self._run, name=TASK_NAME)

    async def _run(self) -> None:
        try:
            while True:
                self._do_steps()
                if self._steps:  # they put off others, which are for the pass after this one
                    await trio.lowlevel.checkpoint()
                else:
                    self._sleeper = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            self._is_started = False  # the Trio run is ending

    def _do_steps(self) -> None:
        # This isn't a part of `_run`, whose variables would keep the last connections alive while it sleeps.
        steps, self._steps = self._steps, []
        for step in steps:
            step()

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED
