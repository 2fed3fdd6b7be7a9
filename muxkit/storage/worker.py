"""A thread that runs jobs in groups and hands their results back to Trio tasks, and the tasks that wait for a change.

The jobs that were queued while one group ran are the next group. The tasks of a group are woken by one message to
Trio. A job that was cancelled before its group began is left out; one that is cancelled later is done, and its result
is dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast

import attrs
import trio

from muxkit.storage.errors import StoreClosed, StoreError, copy_of

T = TypeVar("T")
RowsT = TypeVar("RowsT")

MAX_GROUP_JOBS = 128  # bounds how long one caller waits
MAX_WOKEN_AT_ONCE = 16  # callers in one turn of Trio's loop; other tasks run between two turns


class Waiters:
    """The tasks that sleep until a row changes, by a key such as a uuid; a key without one takes no memory."""

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


@attrs.define(eq=False)
class Job(Generic[RowsT]):
    """A unit of work, the task that waits for it, and its result.

    `key` is what it is about, `wants` what it will read if the rows are to be fetched ahead. `grows` marks a job that
    adds rows. All other jobs may use the space that a store keeps for them when its disk is full.
    """

    key: str
    act: Callable[[RowsT], object]
    reads: bool = False
    wants: object = None
    grows: bool = False
    task: trio.lowlevel.Task | None = None  # None: it was abandoned
    result: object = None
    error: BaseException | None = None


def fail_jobs(jobs: list[Job[RowsT]], error: StoreError) -> None:
    """Give all of these jobs, which were undone together, an error of their own."""
    for job in jobs:
        job.result = None
        job.error = copy_of(error)


@attrs.define(eq=False)
class _Call:
    """A function to run between two groups: opening, or the end."""

    act: Callable[[], None]
    done: trio.Event
    error: BaseException | None = None
    is_last: bool = False


class Worker(Generic[RowsT]):
    """One thread and its queue.

    `run_group` is called in the thread with each group and sets the result or error of each job. It adds the keys that
    changed to `changed`: their `waiters` are woken, in Trio's thread, before the tasks of the group; all of them once
    `is_failed` is set, since every later job will fail, and when the worker is stopped.
    """

    def __init__(
        self, name: str, run_group: Callable[[list[Job[RowsT]]], None], waiters: Waiters | None = None
    ) -> None:
        self._queue: queue.SimpleQueue[Job[RowsT] | _Call] = queue.SimpleQueue()
        self._run_group = run_group
        self._waiters = Waiters() if waiters is None else waiters
        self.changed: list[str] = []
        self.is_failed = False
        self._token = trio.lowlevel.current_trio_token()
        self._is_stopping = False
        # A daemon: a program that ends without closing its store is not held up, and loses no more than by a kill.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def work(
        self, key: str, act: Callable[[RowsT], T], *, reads: bool = False, wants: object = None, grows: bool = False
    ) -> T:
        """Sleep until the job is done, and durable unless it only reads; return or raise what `act` did."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_stopping:
            raise StoreClosed("the store is closed; open it again")
        job = Job(key, act, reads, wants, grows, trio.lowlevel.current_task())
        self._queue.put(job)

        def abandon(_: Callable[[], None]) -> trio.lowlevel.Abort:
            job.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abandon)
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # or the traceback would hold the job that holds it
        return cast("T", job.result)  # what `act` returned

    async def look(self, key: str, act: Callable[[RowsT], T], wants: object = None) -> T:
        """Run a job that only reads; `wants` is what it will read."""
        return await self.work(key, act, reads=True, wants=wants)

    async def call(self, act: Callable[[], None]) -> None:
        """Run a function in the thread between two groups. It goes on there if the caller is cancelled."""
        await self._do(_Call(act, trio.Event()))

    async def stop(self, last: Callable[[], None], *, shield: bool = True) -> None:
        """Finish the queued jobs, run `last`, then end the thread. With `shield` a cancellation waits for all that."""
        if self._is_stopping:
            return
        self._is_stopping = True
        with trio.CancelScope(shield=shield):
            await self._do(_Call(last, trio.Event(), is_last=True))
            self._thread.join()
        self._waiters.wake_all()

    async def _do(self, call: _Call) -> None:
        self._queue.put(call)
        await call.done.wait()
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None

    # ------------------------------------------------------------------------ in Trio's thread

    def _deliver(self, jobs: list[Job[RowsT]]) -> None:
        if self.is_failed:
            self._waiters.wake_all()
        while self.changed:
            self._waiters.wake(self.changed.pop())
        for job in jobs[:MAX_WOKEN_AT_ONCE]:
            task, job.task = job.task, None
            if task is not None:
                trio.lowlevel.reschedule(task)
        if len(jobs) > MAX_WOKEN_AT_ONCE:
            self._run_in_trio(self._deliver, jobs[MAX_WOKEN_AT_ONCE:])

    # ------------------------------------------------------------------------ in the thread

    def _main(self) -> None:
        following: Job[RowsT] | _Call | None = None
        while True:
            item = self._queue.get() if following is None else following
            if isinstance(item, _Call):
                following = None
                try:
                    item.act()
                except BaseException as error:
                    item.error = error
                self._run_in_trio(item.done.set)
                if item.is_last:
                    return
                continue
            jobs, following = self._group_of(item)
            try:
                self._run_group(jobs)
            except BaseException as error:
                for job in jobs:
                    job.error = error
            self._run_in_trio(self._deliver, jobs)
            del jobs, item  # an idle thread keeps no job

    def _group_of(self, first: Job[RowsT]) -> tuple[list[Job[RowsT]], Job[RowsT] | _Call | None]:
        """Return the group that begins with this job, and what was taken from the queue and is not part of it."""
        jobs = [first]
        following: Job[RowsT] | _Call | None = None
        while len(jobs) < MAX_GROUP_JOBS:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(following, _Call):
                break
            jobs.append(following)
            following = None
        return [job for job in jobs if job.task is not None], following

    def _run_in_trio(self, act: Callable[..., None], *values: Any) -> None:
        with suppress(trio.RunFinishedError):  # no task is left
            self._token.run_sync_soon(act, *values)
