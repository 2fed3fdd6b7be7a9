"""Runs Trio inside an asyncio loop, and lets each of them call coroutine functions of the other.

A `Guest` is a run of Trio in guest mode (`trio.lowlevel.start_guest_run`). Trio and asyncio run in the same thread, one
step of either at a time.

**Calls from asyncio into Trio.** A Trio task runs the function, and the asyncio task waits for a `Call`, which is a
future. The difficult part is cancellation. When `asyncio.Task.cancel` is called, the Trio task may already have sent
the message, or received one that would be lost. So cancelling the `Call` doesn't end it. It only cancels the Trio task,
and waits for the result:

- The Trio task was cancelled, and has done nothing. Then the `Call` is cancelled, and the asyncio task gets its
  `CancelledError`.
- The Trio task has completed. Then the asyncio task gets the result. The cancellation must not get lost either, so it
  is *late*: we repeat it, so that the next `await` of the task raises `CancelledError`.

**Calls from Trio into asyncio.** An asyncio task runs the coroutine, for example a handler, and the Trio task waits for
it. If the Trio task is cancelled, the asyncio task is cancelled, and the Trio task waits until it has ended.

**Blocks.** A session is an async context manager of Trio. `Block` lets an asyncio task enter one: a Trio task enters
it, waits, and leaves it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import trio

from muxkit import _spans
from muxkit.runtime import home_thread

if TYPE_CHECKING:
    from types import TracebackType

    from outcome import Outcome  # Trio's own dependency

T = TypeVar("T")
Job = Callable[[], Awaitable[object]]

IDLE_MOST: Final = 64  # maximum number of Trio tasks without a call that are kept for the next calls
ENDED: Final = "the run of Trio that serves the sessions of this loop has ended"


class Call(asyncio.Future[T]):
    """The future of a call into Trio. An asyncio task waits for it, and only the Trio task completes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scope: trio.CancelScope | None = None) -> None:
        super().__init__(loop=loop)
        self.is_unwanted: bool = False
        """True if the asyncio task was cancelled while it waited."""
        self.message: object = None
        """The message of that cancellation."""
        self.before: int | None = None
        """If that was a repeated late cancellation: `Task.cancelling()` before it was made for the first time."""
        self._scope = scope  # of the Trio task

    def cancel(self, msg: object = None) -> bool:
        """Cancel the Trio task. `asyncio.Task.cancel` calls this. The result True means that we take care of the
        rest."""
        if not self.is_unwanted:
            self.is_unwanted = True
            self.message = msg
            self.before = _LOCAL.before
            if self._scope is not None and not self.done():
                self._scope.cancel()
        return True

    def stopped(self) -> None:
        """Record that the Trio task was cancelled and has done nothing."""
        if not self.get_loop().is_closed():
            super().cancel(self.message)

    def succeeded(self, result: T) -> None:
        if not self.get_loop().is_closed():
            self.set_result(result)

    def failed(self, error: BaseException) -> None:
        """Propagate an error, dropping the frame that would create a reference cycle: it refers to this call."""
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        if not self.get_loop().is_closed():
            self.set_exception(error)


async def outcome_of(call: Call[T]) -> T:
    """Wait for a call and return its result. If the task was cancelled too late for the call, cancel it again."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        return await call
    finally:
        if not call.done():
            call.cancel()  # the coroutine was closed while it waited
        elif call.is_unwanted and not call.cancelled() and task is not None:
            before = before if call.before is None else call.before
            _LOCAL.late[task] = late = _Late(before, call.message)
            call.get_loop().call_soon(_cancel_again, task, late)
        del call, task  # they would form a reference cycle with the traceback of an error


class _Late(NamedTuple):
    """A late cancellation of a task, which we repeat."""

    before: int
    """`Task.cancelling()` of the task before the cancellation."""
    message: object
    """The message of the cancellation."""


def _cancel_again(task: asyncio.Task[Any], late: _Late) -> None:
    """Repeat a late cancellation of a task.

    Do nothing if the cancellation came from a block, such as `asyncio.timeout` or a task group, that has ended since.
    It has called `uncancel`, so the count in `Task.cancelling()` is lower.
    """
    if _LOCAL.late.get(task) is not late:
        return
    del _LOCAL.late[task]
    if not task.done() and task.cancelling() > late.before:
        task.uncancel()  # `cancel` counts it again, but it is the same cancellation
        _LOCAL.before = late.before
        try:
            task.cancel(late.message)
        finally:
            _LOCAL.before = None


async def _settle(call: Call[T], scope: trio.CancelScope, function: Callable[[], Awaitable[T]]) -> None:
    """Run the function of a call in a Trio task, and complete the call."""
    try:
        with scope:
            result = await function()
    except trio.Cancelled:
        call.failed(RuntimeError(ENDED))
        raise
    except BaseException as error:
        call.failed(error)
    else:
        if scope.cancelled_caught:
            call.stopped()
        else:
            call.succeeded(result)
    finally:
        del call, scope, function  # they would form a reference cycle with the traceback of an error


def _cancel_now() -> bool:
    """Repeat a late cancellation of the running task now. Return False if there is none.

    A task that makes one call after the other, and never waits in them, would run before the repetition each time.
    """
    task = asyncio.current_task()
    if task not in _LOCAL.late:
        return False
    _cancel_again(task, _LOCAL.late[task])
    return True


class Guest:
    """A run of Trio inside an asyncio loop. It begins with the first block that needs it and ends with the last one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.is_ending: bool = False
        self._thread = home_thread()
        self._users = 0
        self._stop = trio.Event()
        self._over: list[Call[None]] = []
        self._idle: list[_Worker] = []
        # The steps of Trio that the loop must call. A loop forgets its callbacks when it is closed, and `move_to` needs
        # them.
        self._ticks: deque[Callable[[], object]] = deque()
        trio.lowlevel.start_guest_run(
            self._stop.wait,
            run_sync_soon_threadsafe=self._soon_from_thread,
            run_sync_soon_not_threadsafe=self._soon,
            done_callback=self._done,
            host_uses_signal_set_wakeup_fd=True,
        )

    # --- the life of the run

    def enter(self) -> None:
        """Keep the run alive until `leave` is called."""
        self._users += 1

    async def leave(self) -> None:
        """End the run and wait for its end, unless another block needs it."""
        self._users -= 1
        if not self._users and not self.is_ending:
            self.end()
            await self.over()

    def end(self) -> None:
        """Cancel every Trio task and end the run."""
        self.is_ending = True
        self._stop.set()

    async def over(self) -> None:
        """Wait until the run has ended, even if the task is cancelled."""
        if _LOCAL.guest is self:
            call: Call[None] = Call(self.loop)
            self._over.append(call)
            await outcome_of(call)

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """End a run whose loop was closed while blocks were open. Another loop runs Trio's last steps."""
        if not self.loop.is_closed():
            raise RuntimeError(
                "another asyncio loop of this thread has sessions of muxkit: close them or that loop first, "
                "or run this loop in another thread"
            )
        self.loop = loop
        for _ in self._ticks:
            loop.call_soon(self._tick)
        self.end()

    def _done(self, result: Outcome[None]) -> None:
        """Called by Trio at the end of the run. A `KeyboardInterrupt` leaves this method and the loop."""
        _LOCAL.guest = None
        _LOCAL.late.clear()
        self.is_ending = True
        for call in self._over:
            call.succeeded(None)
        try:
            result.unwrap()
        except Exception as error:
            self.loop.call_exception_handler({"message": ENDED, "exception": error})

    def _soon(self, tick: Callable[[], object]) -> None:
        self._ticks.append(tick)
        with suppress(RuntimeError):  # the loop is closed, see `move_to`
            self.loop.call_soon(self._tick)

    def _soon_from_thread(self, tick: Callable[[], object]) -> None:
        self._ticks.append(tick)
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        if self._ticks:
            self._ticks.popleft()()

    # --- from asyncio into Trio

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a coroutine function in Trio. Return its result, or raise its exception.

        If the task is cancelled, this raises `CancelledError` only if the function was cancelled too.
        """
        self._thread.check()
        if self.is_ending:
            raise trio.ClosedResourceError("the block of this session or server was left")
        if _LOCAL.late and _cancel_now():
            await asyncio.sleep(0)  # raises `CancelledError`
        return await outcome_of(self._begin(function))

    def _begin(self, function: Callable[[], Awaitable[T]]) -> Call[T]:
        scope = trio.CancelScope()
        call: Call[T] = Call(self.loop, scope)
        if _spans.maker is not None:  # the worker would run the call with another current span
            function = _spans.maker.in_this_context(function)
        job = partial(_settle, call, scope, function)
        if self._idle:
            self._idle.pop().go_on(job)
        else:
            trio.lowlevel.spawn_system_task(_Worker(self._idle, job).run, name="calls of asyncio tasks")
        return call

    # --- from Trio into asyncio

    async def run_in_asyncio(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in an asyncio task. If this is cancelled, cancel that task and wait until it has ended."""
        waiting = trio.lowlevel.current_task()
        task: asyncio.Task[T] | None = None
        failure: Exception | None = None
        is_unwanted = False

        # Not called directly, because some loops run the first step of a new task immediately, inside Trio's step.
        def begin() -> None:
            nonlocal task, failure
            try:
                task = None if is_unwanted else self.loop.create_task(function())
            except Exception as error:  # for example, the handler isn't a coroutine function
                failure = error
            if task is None:
                trio.lowlevel.reschedule(waiting)
            else:
                task.add_done_callback(lambda _: trio.lowlevel.reschedule(waiting))

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal is_unwanted
            is_unwanted = True
            if self.loop.is_closed():
                return trio.lowlevel.Abort.SUCCEEDED
            if task is not None:
                task.cancel()
            return trio.lowlevel.Abort.FAILED

        self.loop.call_soon(begin)
        await trio.lowlevel.wait_task_rescheduled(abort)
        if failure is not None:
            raise failure
        if task is None or task.cancelled():
            if is_unwanted:
                await trio.lowlevel.checkpoint_if_cancelled()
            raise RuntimeError("the asyncio task was cancelled")
        return task.result()


class _Worker:
    """A Trio task that runs one call after another, because waking a task is cheaper than starting one."""

    def __init__(self, idle: list[_Worker], job: Job) -> None:
        self._idle = idle
        self._job: Job | None = job
        self._task: trio.lowlevel.Task | None = None

    def go_on(self, job: Job) -> None:
        """Wake the idle task for the next job."""
        assert self._task is not None
        self._job = job
        trio.lowlevel.reschedule(self._task)

    async def run(self) -> None:
        self._task = trio.lowlevel.current_task()
        while self._job is not None:
            job, self._job = self._job, None
            await job()
            del job
            if len(self._idle) < IDLE_MOST:
                self._idle.append(self)
                await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._idle.remove(self)
        return trio.lowlevel.Abort.SUCCEEDED


class _Local(threading.local):
    """The state of a thread, which can have only one run of Trio."""

    def __init__(self) -> None:
        self.guest: Guest | None = None
        self.before: int | None = None  # `_Late.before` of the cancellation that is being repeated
        self.late: dict[asyncio.Task[Any], _Late] = {}  # the late cancellations that haven't been repeated yet


_LOCAL: Final = _Local()


async def enter_guest() -> Guest:
    """Return the guest of the running loop, and start it if there is none. The caller must call `leave` later."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if not trio.lowlevel.in_trio_task():
            raise
        raise RuntimeError(
            "muxkit.asyncio runs on asyncio: expected a running asyncio loop, got a Trio task. "
            "Use the same function of muxkit here, such as muxkit.connect or muxkit.open_server"
        ) from None
    while (guest := _LOCAL.guest) is not None:
        if guest.loop is not loop:
            guest.move_to(loop)
        if not guest.is_ending:
            break
        await guest.over()
    if guest is None:
        if trio.lowlevel.in_trio_run():
            raise RuntimeError("Trio runs in this thread already: use muxkit itself in its tasks, not muxkit.asyncio")
        guest = _LOCAL.guest = Guest(loop)
    guest.enter()
    return guest


def guest_of_loop() -> Guest:
    """Return the guest of the running loop. Raises `RuntimeError` if no session or server is open."""
    guest = _LOCAL.guest
    if guest is None or guest.loop is not asyncio.get_running_loop() or guest.is_ending:
        raise RuntimeError(
            "no session or server of muxkit.asyncio is open on this loop: expected a call inside a block of connect, "
            "open_server or reconnecting"
        )
    return guest


class Block(Generic[T]):
    """A block of Trio that an asyncio task enters and leaves, and in which a Trio task waits meanwhile.

    If a background task of the block fails, Trio cancels the block. We do the same with the body in asyncio: we cancel
    the task that has entered the block, as `asyncio.TaskGroup` does, and leaving the block raises the failure.
    """

    def __init__(self, make: Callable[[Guest], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._scope = trio.CancelScope()
        self._released = trio.Event()
        self._error: BaseException | None = None  # the error with which the body has ended
        self._guest: Guest | None = None
        self._left: Call[None] | None = None
        self._task: asyncio.Task[Any] | None = None  # the task that has entered the block, while its body runs
        self._is_interrupted = False

    async def enter(self) -> tuple[Guest, T]:
        """Enter the block. If this is cancelled, the block wasn't entered, or was left again."""
        if self._guest is not None:
            raise RuntimeError("this block was entered before; make another one")
        self._guest = guest = await enter_guest()
        entered: Call[T] = Call(guest.loop, self._scope)
        self._left = Call(guest.loop, self._scope)
        try:
            trio.lowlevel.spawn_system_task(
                self._hold, guest, entered, self._left, name="block of asyncio", context=contextvars.copy_context()
            )
            value = await outcome_of(entered)
            self._task = asyncio.current_task()
            return guest, value
        except BaseException:
            await guest.leave()
            raise
        finally:
            del entered

    async def leave(self, error: BaseException | None) -> None:
        """Leave the block, with this error if it isn't None. If the block raises another error, raise that."""
        guest, left = self._guest, self._left
        if guest is None or left is None:
            return
        task, self._task = self._task, None
        if self._is_interrupted and task is not None:
            task.uncancel()
        traceback: TracebackType | None = None if error is None else error.__traceback__
        self._error = error
        if error is None or isinstance(error, Exception):
            self._released.set()
        else:
            self._scope.cancel()
        if isinstance(error, GeneratorExit):  # the coroutine is being closed, so it can't wait
            guest._users -= 1
            if not guest._users:
                guest.end()
            return
        try:
            await outcome_of(left)
        except BaseException as failure:
            if self._is_interrupted and failure.__cause__ is None:
                failure.__suppress_context__ = True  # the context is our own cancellation of the body
            raise
        finally:
            if error is not None:
                error.__traceback__ = traceback  # without the frames that Trio has added
            self._error = None
            self._left = None
            await guest.leave()
            del error, traceback, left

    async def _hold(self, guest: Guest, entered: Call[T], left: Call[None]) -> None:
        try:
            with self._scope:
                async with self._make(guest) as value:
                    entered.succeeded(value)
                    await self._released.wait()
                    if self._error is not None:
                        raise self._error
        except trio.Cancelled:
            for call in (entered, left):
                if not call.done():
                    call.failed(RuntimeError(ENDED))
            raise
        except BaseException as error:
            if not entered.done():
                entered.failed(error)
            elif error is self._error:
                left.succeeded(None)
            else:
                left.failed(error)
                self._interrupt()
        else:
            if not entered.done():
                entered.stopped()
            elif self._scope.cancelled_caught and self._error is None:
                left.stopped()
            else:
                left.succeeded(None)
        finally:
            del entered, left  # as in `_settle`

    def _interrupt(self) -> None:
        """Cancel the body of the block, because a background task of the block has failed. `leave` raises its error."""
        task = self._task
        if task is not None and not task.done() and not task.get_loop().is_closed():
            self._is_interrupted = True
            task.cancel()
