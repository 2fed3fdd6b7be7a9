"""How does work get into a thread of its own and its outcome back, many jobs at a time?

Whatever was queued while one group ran is the next group. A group's callers are woken by one message to Trio. A job
that was cancelled before its group began is left out; one that is cancelled later is done, and nobody hears of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

import attrs
import trio

from muxkit.protocols.restream.store.errors import StoreClosed

if TYPE_CHECKING:
    from muxkit.protocols.restream.store.rows import Rows

T = TypeVar("T")

MOST_AT_ONCE = 128  # jobs of one group, so that no caller waits for long
MOST_WOKEN_AT_ONCE = 16  # callers in one turn of Trio's loop, so that others get theirs between them


@attrs.define(eq=False)
class Job:
    """A unit of work, who waits for it, and what came of it. `after`, `most`, `size`: the messages it will read."""

    uuid: str
    act: Callable[[Rows], object]
    reads: bool
    after: int = -1
    most: int = 0
    size: int = 0
    task: trio.lowlevel.Task | None = None
    result: object = None
    error: BaseException | None = None

    @property
    def is_abandoned(self) -> bool:
        return self.task is None


@attrs.define(eq=False)
class _Alone:
    """Something that is no unit of work: opening, or the end."""

    act: Callable[[], None]
    done: trio.Event
    error: BaseException | None = None
    is_last: bool = False


RunGroup = Callable[[list[Job]], None]  # called in the thread; sets each job's result or error


class Worker:
    """One thread and its queue."""

    def __init__(self, name: str, run: RunGroup, delivered: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[Job | _Alone] = queue.SimpleQueue()
        self._run = run
        self._delivered = delivered
        self._token = trio.lowlevel.current_trio_token()
        self._is_stopping = False
        # A daemon: a program that ends without closing its store is not held up, and loses no more than by a kill.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def ask(
        self, uuid: str, act: Callable[[Rows], T], *, reads: bool, after: int = -1, most: int = 0, size: int = 0
    ) -> T:
        """Sleep until the job is done; what it gave or raised."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_stopping:
            raise StoreClosed("the store is closed; open it again")
        job = Job(uuid, act, reads, after, most, size, trio.lowlevel.current_task())
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

    async def call(self, act: Callable[[], None]) -> None:
        """Run something in the thread between two groups. It goes on there if the caller is cancelled."""
        await self._do(_Alone(act, trio.Event()))

    async def stop(self, last: Callable[[], None], *, patiently: bool = True) -> None:
        """Finish what is queued, then do `last`, then end; patiently: not before that is over, even if cancelled."""
        if self._is_stopping:
            return
        self._is_stopping = True
        ending = _Alone(last, trio.Event(), is_last=True)
        with trio.CancelScope(shield=patiently):
            await self._do(ending)
            self._thread.join()

    async def _do(self, item: _Alone) -> None:
        self._queue.put(item)
        await item.done.wait()
        if item.error is not None:
            try:
                raise item.error
            finally:
                item.error = None

    # ------------------------------------------------------------------------ in Trio's thread

    def _deliver(self, jobs: list[Job]) -> None:
        self._delivered()
        for job in jobs[:MOST_WOKEN_AT_ONCE]:
            task, job.task = job.task, None
            if task is not None:
                trio.lowlevel.reschedule(task)
        if len(jobs) > MOST_WOKEN_AT_ONCE:
            self._tell(lambda: self._deliver(jobs[MOST_WOKEN_AT_ONCE:]))

    # ------------------------------------------------------------------------ in the thread

    def _main(self) -> None:
        held: Job | _Alone | None = None
        while True:
            item = self._queue.get() if held is None else held
            held = None
            if isinstance(item, _Alone):
                try:
                    item.act()
                except BaseException as error:
                    item.error = error
                self._tell(item.done.set)
                if item.is_last:
                    return
            else:
                held = self._run_group(item)

    def _run_group(self, first: Job) -> Job | _Alone | None:
        """A group that begins with this job. What came out of the queue and does not belong to it is handed back."""
        jobs = [first]
        held: Job | _Alone | None = None
        while len(jobs) < MOST_AT_ONCE:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(following, _Alone):
                held = following
                break
            jobs.append(following)
        wanted = [job for job in jobs if not job.is_abandoned]
        try:
            self._run(wanted)
        except BaseException as error:
            for job in wanted:
                job.error = error
        self._tell(lambda: self._deliver(wanted))
        return held

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):  # nobody is left to hear it
            self._token.run_sync_soon(what)
