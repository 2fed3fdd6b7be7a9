"""Helpers for opening channels and for accepting those that the peer opens.

The sessions of all protocols use them. A channel is a stream in the sense of HTTP/2, and several channels share one
connection.

On the side that opens a channel:

- `session.open()` returns an `Opening`. It opens the channel when it is awaited or entered with `async with`. An
  `Opening` of a channel whose end can carry a reason is a `ChannelOpening`.
- The peer limits how many channels may be open. `SlotQueue` lets tasks wait, first come first served, until the limit
  allows another channel. Servers also use it to limit how many handlers run.

On the side that accepts channels:

- `Backlog` contains the channels that the peer has opened and the application hasn't taken yet. The application takes
  them with `async for channel in session.channels()`.
- An application may never do that, and then the peer would wait forever. `Unclaimed` declines channels that have been
  in a backlog for some time while no task iterates over the backlog.

A protocol may have several kinds of channels, such as bpmux's requests and one-way channels. Each kind has a backlog of
its own. The text below calls all of them items.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Hashable, Sequence
from itertools import count
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, Self, TypeVar

import trio

from muxkit._spans import ChannelSpan
from muxkit.core import Reason, StartPace
from muxkit.runtime._log_pace import may_log
from muxkit.runtime._thread import HomeThread, home_thread
from muxkit.runtime.halves.budget import ErrorMaker

LEFT_BY_ERROR: Final = "the other side left the channel by an error"
LEFT_BY_ERROR_CODE: Final = 500
NOT_TAKEN: Final = 405  # the code for declining a kind of channel that nothing takes; HTTP's "method not allowed"
NOT_OPEN: Final = (
    "the channel is not open yet: expected 'async with session.open() as channel:' or "
    "'channel = await session.open()', got {}"
)
# A `Backlog` runs other tasks after the application has taken this many items without waiting. The application usually
# starts a task for each item, and these tasks must get a chance to run.
YIELD_ITEMS: Final = 16

_log = logging.getLogger("muxkit")


class Openable(Protocol):
    """An object that an `Opening` can open and close."""

    async def aclose(self) -> None: ...
    def abort(self) -> None: ...


class OpenableWithReason(Protocol):
    """An object that a `ChannelOpening` can open and close."""

    async def aclose(self) -> None: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


OpenedT = TypeVar("OpenedT", bound=Openable, covariant=True)
ChannelT = TypeVar("ChannelT", bound=OpenableWithReason, covariant=True)
ItemT = TypeVar("ItemT", bound=Hashable)


class Opening(Generic[OpenedT]):
    """The result of `session.open()`, which opens the channel when it is awaited or entered.

        async with session.open() as channel:  # closes the channel, or aborts it after an exception
            ...
        channel = await session.open()  # the caller must close the channel

    An `Opening` opens only one channel. Using it again raises `RuntimeError`.

    An `Opening` stays in memory as long as its block runs, so it must be small. That is why this class doesn't derive
    from `AbstractAsyncContextManager`: instances would have a `__dict__`.
    """

    __slots__ = ("_open", "_opened")

    # These methods only raise errors that explain how to use an opening. We hide them from type checkers, which would
    # accept the mistakes if they saw the methods.
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(NOT_OPEN.format("'with'"))

        def __exit__(self, *_: object) -> None:
            """Do nothing. Python requires this method before it calls `__enter__`."""

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(NOT_OPEN.format(f".{name}"), name=name, obj=self)

    def __init__(self, open: Callable[[], Awaitable[OpenedT]]) -> None:
        self._open: Callable[[], Awaitable[OpenedT]] | None = open
        self._opened: OpenedT | None = None

    def __await__(self) -> Generator[Any, None, OpenedT]:
        return self._take()().__await__()

    async def __aenter__(self) -> OpenedT:
        self._opened = await self._take()()
        return self._opened

    def _take(self) -> Callable[[], Awaitable[OpenedT]]:
        if self._open is None:
            raise RuntimeError("this channel was opened before; open another one")
        open, self._open = self._open, None  # an opening that is never used again needn't keep the function alive
        return open

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is None:
            return
        if error is None:
            await self._opened.aclose()
        else:
            self._abort(self._opened, error)

    def _abort(self, opened: Any, error: BaseException) -> None:  # noqa: ANN401 - OpenedT is covariant
        opened.abort()


class ChannelOpening(Opening[ChannelT]):
    """An opening that also gives the peer a reason if an exception leaves the block.

    The reason says only that there was an error. It doesn't contain the exception's text, which may be confidential.
    There is no reason if the block is cancelled, or if the exception is a `trio.BrokenResourceError` or
    `trio.EndOfChannel`, which say that the channel or the connection has ended.
    """

    __slots__ = ()

    def _abort(self, opened: Any, error: BaseException) -> None:  # noqa: ANN401 - as above
        span: ChannelSpan | None = getattr(opened, "_span", None)  # one-way channels have none
        if span is not None:
            span.failed(error)
        if isinstance(error, Exception) and not isinstance(error, (trio.BrokenResourceError, trio.EndOfChannel)):
            opened.abort(LEFT_BY_ERROR, code=LEFT_BY_ERROR_CODE)
        else:
            opened.abort()


class SlotQueue:
    """A first-in, first-out queue of tasks that wait for a slot, which is the right to open one more channel.

    The queue's owner counts the open channels, and calls `wake_waiters` when a slot may have become free.

    Args:
        free: Returns the number of free slots. If no channel can be opened any more, for example because the session
            has ended, it must return a huge number. All waiting tasks then wake up, and their attempts to open a
            channel fail.
    """

    __slots__ = ("_free", "_line", "_numbers", "_thread", "_woken")

    def __init__(self, free: Callable[[], int]) -> None:
        self._thread: HomeThread = home_thread()
        self._free = free
        self._numbers = count()  # each waiting task gets the next number
        self._line: list[tuple[int, trio.lowlevel.Task]] = []  # sorted by number
        self._woken = 0  # number of tasks that were woken for a slot and haven't run yet

    async def wait_for_slot(self) -> None:
        """Wait for a free slot. Tasks that called this earlier come first.

        The caller must use the slot before its next checkpoint, and then call `wake_waiters`. This is only a checkpoint
        if it has to wait. Raises `RuntimeError` in another thread.
        """
        self._thread.check()
        if self._free() > self._woken + len(self._line):
            return
        number, task = next(self._numbers), trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._line[bisect_left(self._line, number, key=itemgetter(0))]
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            insort(self._line, (number, task), key=itemgetter(0))
            await trio.lowlevel.wait_task_rescheduled(abort)
            self._woken -= 1
            if self._free() > 0:
                return
            # Another task has used the slot without waiting. Go back to this task's old position in the queue.

    def wake_waiters(self) -> None:
        """Wake as many tasks as there are free slots. Call this whenever the number of free slots may have changed."""
        if self._line:
            ready = self._line[: max(0, self._free() - self._woken)]
            del self._line[: len(ready)]
            self._woken += len(ready)
            for _number, task in ready:
                trio.lowlevel.reschedule(task)


class Taker(ABC, Generic[ItemT]):
    """Takes items from a `Backlog` as they arrive, so that they don't wait for the task that iterates over it.

    Servers have such an object. It starts a handler for each channel, so a handler starts one pass of Trio's loop
    earlier than if the iterating task had to wake up first.
    """

    @abstractmethod
    def may_take(self) -> bool:
        """Return True if this object takes an item now. Otherwise the item goes to the task that iterates."""

    @abstractmethod
    def take(self, item: ItemT, taken: Callable[[ItemT], None]) -> None:
        """Call `taken(item)`, and then use the item.

        This runs in the task that reads the connection, so it must neither wait nor raise.
        """


class Backlog(AsyncIterator[ItemT], Generic[ItemT]):
    """A queue of the items that the peer has opened and the application hasn't taken. Iterating takes them.

    A backlog has no limit of its own, because the protocol limits how many channels the peer may open. A backlog is
    *claimed* once the application iterates over it. `Unclaimed` declines the items of a backlog that isn't claimed.

    The iteration ends once the owner has called `ended` and no items are left, or raises the error that was passed to
    `ended`. Taking an item is a checkpoint for cancellation, but other tasks run only after every 16 items. So if many
    channels arrive together, their handlers start together, and their first answers are written together. If the peer
    has cancelled channels recently, other tasks run before each item. The peer's next cancellation can then arrive
    before we start a handler for nothing.

    While a task iterates, a `taker` may take items that arrive when no other item waits and no pause is necessary.

    Args:
        taken: This function is called with each item that the application takes.
        pace: Limits how fast items are taken from a peer that keeps cancelling the channels it opens. Items that are
            left when the backlog is ended are taken without a pause.
        kind: The name of the items in log lines, such as "requests".
    """

    __slots__ = (
        "_error",
        "_is_over",
        "_items",
        "_lot",
        "_pace",
        "_paused",
        "_since_yield",
        "_taken",
        "_thread",
        "is_claimed",
        "kind",
        "refusal",
        "taker",
    )

    def __init__(
        self, taken: Callable[[ItemT], None], pace: StartPace | None = None, *, kind: str = "channels"
    ) -> None:
        self.kind: str = kind
        self.is_claimed: bool = False
        self.refusal: Reason | None = None
        """The reason for declining all further items, or None while the backlog accepts items."""
        self.taker: Taker[ItemT] | None = None
        """Takes most items as they arrive. Set by the task that iterates over the backlog, for as long as it does."""
        self._thread: HomeThread = home_thread()
        self._taken = taken
        self._pace = pace
        self._items: OrderedDict[object, ItemT] = OrderedDict()
        self._lot = trio.lowlevel.ParkingLot()  # tasks that wait for an item
        self._paused = trio.lowlevel.ParkingLot()  # tasks that `pace` delays; they wake up when the backlog is ended
        self._is_over = False
        self._since_yield = 0  # number of items since the iterator last yielded to other tasks
        self._error: ErrorMaker | None = None

    def __len__(self) -> int:
        return len(self._items)

    def claim(self) -> Self:
        """Mark the backlog as claimed by the application, and return it for iteration."""
        self.is_claimed, self.refusal = True, None
        return self

    def drop_all(self) -> list[ItemT]:
        """Remove and return all items."""
        items = [*self._items.values()]
        self._items.clear()
        return items

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def put(self, item: ItemT, key: object = None, *, is_complete: bool = True) -> None:
        """Give an item to the taker, or add it to the queue.

        Args:
            item: The item.
            key: `drop` finds the item in the queue by this key, which is the item itself by default.
            is_complete: False if a part of the item, such as the name of the channel, arrives only later in the same
                read. The taker doesn't get such an item.
        """
        taker = self.taker if is_complete and not self._items else None
        if taker is not None and (self._pace is None or self._pace.is_full()) and taker.may_take():
            taker.take(item, self._taken)
            return
        self._items[item if key is None else key] = item
        self._lot.unpark()

    def drop(self, key: object) -> ItemT | None:
        """Remove and return the item with this key, or return None if the backlog doesn't contain it."""
        return self._items.pop(key, None)

    def ended(self, error: ErrorMaker | None = None) -> None:
        """End the backlog, because no more items will arrive. Iterators then end, or raise `error()` if it is given."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._lot.unpark_all()
            self._paused.unpark_all()

    async def __anext__(self) -> ItemT:
        self._thread.check()
        pace = self._pace
        if self._items and self._since_yield < YIELD_ITEMS and (pace is None or pace.is_full()):
            await trio.lowlevel.checkpoint_if_cancelled()
        elif self._items or self._is_over:
            await self._yield()
        while True:
            while not self._items:
                if self._error is not None:
                    raise self._error()
                if self._is_over:
                    raise StopAsyncIteration
                await self._lot.park()
                self._since_yield = 0
            now = trio.current_time()
            if pace is None or self._is_over or (seconds := pace.pause(now)) <= 0:
                break
            with trio.move_on_after(seconds):
                await self._paused.park()
        _, item = self._items.popitem(last=False)
        self._since_yield += 1
        if pace is not None:
            pace.started(now)
        self._taken(item)
        return item

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.checkpoint()


class Unclaimed:
    """Declines items that the application doesn't take, so that the peer doesn't wait for an answer forever.

    Nobody can know whether the application will take an item later. So an item waits, and we decline it when its
    backlog still isn't claimed after some time:

    - A server whose handler takes only some kinds of items calls `take_only`. Items of all other kinds are declined as
      soon as they arrive.
    - If the application iterates over another backlog of the connection, it has probably started all the tasks that it
      will start. Items wait for `GRACE_SECONDS`.
    - If the application doesn't iterate over any backlog, as in most clients, it may still be busy with something else.
      Items wait for `UNDECIDED_SECONDS`.

    After that, further items of the same backlog are declined as soon as they arrive. If the application iterates over
    the backlog later nevertheless, the backlog accepts items again.

    Each connection has one `Unclaimed` object for all of its backlogs. The connection calls `arrived` when it has put
    an item into a backlog that isn't claimed. This starts a background task in `nursery`, which waits for the time
    above and then declines the items that are left.

    Args:
        backlogs: All backlogs of the connection.
        decline: This function is called with each item to decline, and with the reason for the peer.
        peer: The name of the peer in log lines.
    """

    GRACE_SECONDS: Final = 10.0
    UNDECIDED_SECONDS: Final = 60.0

    __slots__ = ("_backlogs", "_decline", "_is_watching", "_logged", "_served", "nursery", "peer")

    def __init__(self, backlogs: Sequence[Backlog[Any]], decline: Callable[[Any, Reason], None], *, peer: str) -> None:
        self.nursery: trio.Nursery | None = None
        self._backlogs = backlogs
        self._decline = decline
        self.peer: str = peer
        self._is_watching = False
        self._served = ""
        self._logged: set[str] = set()

    def take_only(self, kinds: Sequence[str]) -> None:
        """Decline all other kinds from now on, unless the application iterates over their backlogs later."""
        self._served = f"only {' and '.join(kinds)}"
        for backlog in self._backlogs:
            if backlog.kind not in kinds and not backlog.is_claimed:
                self._refuse(backlog)

    def refusal(self, backlog: Backlog[Any]) -> Reason | None:
        """Return the reason for declining an item that has just arrived, or None if the backlog accepts it.

        The connection calls this before it puts an item into a backlog that isn't claimed.
        """
        if backlog.refusal is not None:
            self._log(backlog)
        return backlog.refusal

    def arrived(self) -> None:
        """Start the background task, because the connection has put an item into a backlog that isn't claimed."""
        if not (self._is_watching or self.nursery is None):
            self._is_watching = True
            self.nursery.start_soon(self._watch)

    async def _watch(self) -> None:
        began = trio.current_time()
        await trio.sleep(self.GRACE_SECONDS)
        if not any(backlog.is_claimed for backlog in self._backlogs):
            await trio.sleep_until(began + self.UNDECIDED_SECONDS)
        self._is_watching = False
        for backlog in self._backlogs:
            if backlog and not backlog.is_claimed:
                self._refuse(backlog)

    def _refuse(self, backlog: Backlog[Any]) -> None:
        served = f", {self._served}" if self._served else ""
        who = "this server" if self._served else "the other side"
        backlog.refusal = Reason(f"{who} takes no {backlog.kind}{served}", NOT_TAKEN)
        for item in backlog.drop_all():
            self._log(backlog)
            self._decline(item, backlog.refusal)

    def _log(self, backlog: Backlog[Any]) -> None:
        """Log the first declined item of each kind. `may_log` limits the lines of a peer that keeps reconnecting."""
        if backlog.kind not in self._logged:
            self._logged.add(backlog.kind)
            if not may_log("channels and requests that were declined"):
                return
            why = (
                f"{self._served} are taken by this server's handler"
                if self._served
                else "no task of this side takes them"
            )
            # log: The peer opened channels, sent requests or opened another kind that nothing in this program takes, so
            # it was declined with a reason. Logged once for each kind in a session. See [what nobody
            # takes](../how-to/calls.md#channels-and-requests-that-nobody-takes).
            _log.warning("declined %s of %s: %s", backlog.kind, self.peer or "a peer", why)
