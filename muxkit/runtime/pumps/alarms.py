"""The alarms of all clocks of a Trio run.

Each connection has a clock, which wakes up at the next deadline of the connection. If each clock were a task, a
connection would need more memory, and each short one would start and end a task that never does anything. So one system
task sleeps until the earliest deadline of all connections, and then calls the clocks that are due.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from typing import Final

import trio

TASK_NAME: Final = "muxkit: alarms"
# If an alarm is this late, in seconds, the whole process was suspended or the machine was asleep.
HELD_UP_SECONDS: Final = 1.0
# Checkpoints before late alarms ring. One isn't enough: a socket that several links share passes on the packets that it
# reads, and a peer in the same process has to send its answer first.
HELD_UP_TURNS: Final = 10


async def read_first(due: float) -> None:
    """If an alarm is late, let the readers read the bytes that have arrived, before a peer is treated as silent."""
    if trio.current_time() - due >= HELD_UP_SECONDS:
        for _ in range(HELD_UP_TURNS):
            await trio.lowlevel.checkpoint()


class Sleeper(ABC):
    """Has an alarm."""

    @abstractmethod
    def handle_alarm(self, now: float) -> None:
        """Called when the alarm is due. It must not raise, because an error would end the whole Trio run."""


class Alarm:
    """One time at which a sleeper is called."""

    __slots__ = ("due", "sleeper")

    def __init__(self, due: float, sleeper: Sleeper) -> None:
        self.due: float = due
        self.sleeper: Sleeper | None = sleeper  # None once the alarm was cancelled or has rung

    def __lt__(self, other: Alarm) -> bool:
        return self.due < other.due

    def cancel(self) -> None:
        """Don't call the sleeper any more."""
        self.sleeper = None


class Alarms:
    """The alarms of one Trio run."""

    def __init__(self) -> None:
        self._heap: list[Alarm] = []
        self._is_started = False
        self._sleep = trio.CancelScope()  # the scope in which the system task sleeps

    def set(self, due: float, sleeper: Sleeper) -> Alarm:
        """Call the sleeper at this time. An alarm for a time that has passed rings in the next pass."""
        alarm = Alarm(due, sleeper)
        heapq.heappush(self._heap, alarm)
        if self._heap[0] is alarm:
            self._sleep.deadline = due
        if not self._is_started:
            self._is_started = True
            trio.lowlevel.spawn_system_task(self._run, name=TASK_NAME)
        return alarm

    async def _run(self) -> None:
        try:
            while True:
                while self._heap and self._heap[0].sleeper is None:
                    heapq.heappop(self._heap)
                due = self._heap[0].due if self._heap else math.inf
                with trio.CancelScope(deadline=due) as self._sleep:
                    await trio.sleep_forever()
                now = trio.current_time()
                if self._heap:
                    await read_first(self._heap[0].due)
                self._ring(now)  # alarms that have become due since then may be late as well
        finally:
            self._is_started = False  # the Trio run is ending

    def _ring(self, now: float) -> None:
        """Call the sleepers that are due. Alarms that they set ring in a later pass, however early they are due."""
        due: list[Alarm] = []
        while self._heap and self._heap[0].due <= now:
            due.append(heapq.heappop(self._heap))
        for alarm in due:
            sleeper, alarm.sleeper = alarm.sleeper, None
            if sleeper is not None:
                sleeper.handle_alarm(now)
