"""A worker thread that runs queued jobs in groups and returns their results to the Trio tasks that wait for them.

Databases are fastest when several changes share one transaction. The worker therefore runs jobs in groups: all jobs
that were queued while one group ran form the next group. One message to Trio's thread wakes all tasks of a group.

Cancelling a task that waits for a job never blocks. A job whose task was cancelled before its group started doesn't
run. A job whose task was cancelled later runs to its end, and its result is discarded.

The module also holds `Waiters`, with which tasks sleep until a row changes.
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

MAX_GROUP_JOBS = 128  # the first job of a group waits for all others, so this bounds its delay
MAX_WATCHED = 100_000  # keys that a watch holds, about 10 MB
MAX_WOKEN_AT_ONCE = 16  # tasks to wake per turn of Trio's loop; other tasks get to run between two turns


class Watch:
    """The keys that have changed since the last `take`, whether a task waits for them or not.

    If more than `MAX_WATCHED` keys have changed, the watch forgets them and reports that any key may have changed. So
    its memory is bounded although nobody may call `take` for a long time.
    """

    __slots__ = ("_is_everything", "_keys")

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._is_everything = True

    def add(self, key: str) -> None:
        """Note that a key has changed."""
        if not self._is_everything:
            self._keys.add(key)
            if len(self._keys) > MAX_WATCHED:
                self.add_all()

    def add_all(self) -> None:
        """Note that any key may have changed."""
        self._is_everything = True
        self._keys.clear()

    def take(self) -> set[str] | None:
        """Return the changed keys and forget them, or None if any key may have changed, as in the first call."""
        keys, self._keys = self._keys, set()
        is_everything, self._is_everything = self._is_everything, False
        return None if is_everything else keys


class Waiters:
    """The tasks that sleep until a row changes, by key, such as a UUID. Keys without sleeping tasks use no memory."""

    __slots__ = ("_asleep", "_watches")

    def __init__(self) -> None:
        self._asleep: dict[str, set[trio.Event]] = {}
        self._watches: list[Watch] = []

    def __len__(self) -> int:
        return sum(map(len, self._asleep.values()))

    @contextmanager
    def watching(self, key: str) -> Iterator[trio.Event]:
        """Enter a block that yields an event, which the next change of `key` sets.

        Read the rows inside the block. A change between reading and entering the block would be missed.
        """
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

    def watch(self) -> Watch:
        """Return a set of the keys that change from now on. It lives as long as the `Waiters`."""
        watch = Watch()
        self._watches.append(watch)
        return watch

    def wake(self, key: str) -> None:
        """Wake the tasks that wait for `key`."""
        for watch in self._watches:
            watch.add(key)
        for event in self._asleep.pop(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake every task, because any key may have changed or the store was closed."""
        for watch in self._watches:
            watch.add_all()
        for key in list(self._asleep):
            self.wake(key)


@attrs.define(eq=False)
class Job(Generic[RowsT]):
    """A unit of work, the task that waits for it, and its result.

    Attributes:
        key: the row or entity that the job works on, such as a UUID.
        act: the function to run in the thread. Its argument is the rows, and its return value is the job's result.
        reads: True if the job changes nothing.
        wants: the rows that the job will read, for backends that fetch the rows of a group in advance.
        grows: True if the job adds rows. Other jobs may use the space that a store reserves for a full disk.
        task: the waiting task, or None if it was cancelled.
        result: the return value of `act`.
        error: the exception that `act` raised, or None.
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
    """Set an error on each of these jobs, whose common transaction was rolled back. Each job gets its own exception."""
    for job in jobs:
        job.result = None
        job.error = copy_of(error)


@attrs.define(eq=False)
class _Call:
    """A function that runs between two groups, for opening and closing the store."""

    act: Callable[[], None]
    done: trio.Event
    error: BaseException | None = None
    is_last: bool = False


class Worker(Generic[RowsT]):
    """One thread and its queue of jobs.

    The thread calls `run_group` with each group, and `run_group` sets the result or the error of each job. It also adds
    the changed keys to `changed`. The worker then wakes the `waiters` of these keys in Trio's thread, before it wakes
    the tasks of the group.

    `run_group` sets `is_failed` when all later jobs would fail too. From then on the worker wakes all waiters after
    each group, so that they notice. `stop` wakes them as well.
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
        # A daemon thread doesn't delay the exit of a program that forgot to close its store. As after a kill, the
        # program loses only work that wasn't committed.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def work(
        self, key: str, act: Callable[[RowsT], T], *, reads: bool = False, wants: object = None, grows: bool = False
    ) -> T:
        """Run `act` in the thread and wait for its result. Changes are durable when this method returns.

        If the task is cancelled before the job's group started, the job doesn't run. Later the job runs to its end, and
        its result is discarded.

        Args:
            key: the row or entity that the job works on.
            act: the function to run, with the rows as its argument.
            reads: pass True if the job changes nothing. Its group may then need no transaction.
            wants: the rows that the job will read, for backends that fetch them in advance.
            grows: pass True if the job adds rows.

        Returns:
            The return value of `act`.

        Raises:
            StoreClosed: if the store was closed.
            StoreError: if the store failed. Other exceptions of `act` are raised unchanged.
        """
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
                job.error = None  # break the reference cycle: the traceback refers to this frame, which holds the job
        return cast("T", job.result)  # what `act` returned

    async def look(self, key: str, act: Callable[[RowsT], T], wants: object = None) -> T:
        """Run a job that changes nothing. The arguments are those of `work`."""
        return await self.work(key, act, reads=True, wants=wants)

    async def call(self, act: Callable[[], None]) -> None:
        """Run a function in the thread between two groups. It runs to its end even if the caller is cancelled."""
        await self._do(_Call(act, trio.Event()))

    async def stop(self, last: Callable[[], None], *, shield: bool = True) -> None:
        """Finish the queued jobs, run `last` in the thread, end the thread, and wake all waiters.

        Calling this method again does nothing. With `shield`, a cancellation takes effect only after the thread ended.
        """
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
            del jobs, item  # don't keep the last group alive while the queue is empty

    def _group_of(self, first: Job[RowsT]) -> tuple[list[Job[RowsT]], Job[RowsT] | _Call | None]:
        """Return the group that starts with `first`, and the next queue item if it was taken but isn't in the group."""
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
        with suppress(trio.RunFinishedError):  # Trio has ended, so there is no task to wake
            self._token.run_sync_soon(act, *values)
