"""Opening of channels: the block that opens one, the line for slots under a limit, and the channels the peer opened."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Hashable, Sequence
from itertools import count
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, Self, TypeVar

import trio

from muxkit.core import Reason, StartPace
from muxkit.runtime._log_pace import may_log
from muxkit.runtime._thread import HomeThread, home_thread
from muxkit.runtime.halves.budget import ErrorMaker

LEFT_BY_ERROR: Final = "the other side left the channel by an error"
LEFT_BY_ERROR_CODE: Final = 500
NOT_TAKEN: Final = 405  # the code of what was declined because nothing here takes its kind, as in HTTP
NOT_OPEN: Final = (
    "the channel is not open yet: expected 'async with session.open() as channel:' or "
    "'channel = await session.open()', got {}"
)
YIELD_ITEMS: Final = 16  # items that an iterator gives before it yields; each usually begins a task

_log = logging.getLogger("muxkit")


class Openable(Protocol):
    """What an `Opening` can close."""

    async def aclose(self) -> None: ...
    def abort(self) -> None: ...


class OpenableWithReason(Protocol):
    """What a `ChannelOpening` can close."""

    async def aclose(self) -> None: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


OpenedT = TypeVar("OpenedT", bound=Openable, covariant=True)
ChannelT = TypeVar("ChannelT", bound=OpenableWithReason, covariant=True)
ItemT = TypeVar("ItemT", bound=Hashable)


class Opening(Generic[OpenedT]):
    """Opens a channel when it is awaited, or when its block is entered.

    The block closes the channel when it is left normally, and aborts it when it is left by an error. What was awaited
    has to be closed by the caller. It is kept as long as its channel, so it does without `AbstractAsyncContextManager`
    and that class's `__dict__`.
    """

    __slots__ = ("_open", "_opened")

    if not TYPE_CHECKING:  # type checkers find these mistakes by themselves

        def __enter__(self) -> NoReturn:
            raise TypeError(NOT_OPEN.format("'with'"))

        def __exit__(self, *_: object) -> None:
            """Exist, since Python looks for it before it calls `__enter__`."""

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
        open, self._open = self._open, None  # frees what it refers to
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

    def _abort(self, opened: Any, error: BaseException) -> None:  # noqa: ANN401 - an argument cannot be covariant
        opened.abort()


class ChannelOpening(Opening[ChannelT]):
    """Opens a channel whose other side is told if the block is left by an error, but not by which."""

    __slots__ = ()

    def _abort(self, opened: Any, error: BaseException) -> None:  # noqa: ANN401 - as above
        if isinstance(error, Exception) and not isinstance(error, (trio.BrokenResourceError, trio.EndOfChannel)):
            opened.abort(LEFT_BY_ERROR, code=LEFT_BY_ERROR_CODE)
        else:
            opened.abort()


class SlotQueue:
    """Tasks that wait for one of a number of slots, which the caller counts, first come, first served.

    `free` returns how many slots there are now. When there will be none any more it returns more than the tasks that
    wait, so that all of them wake and find out.
    """

    __slots__ = ("_free", "_line", "_numbers", "_thread", "_woken")

    def __init__(self, free: Callable[[], int]) -> None:
        self._thread: HomeThread = home_thread()
        self._free = free
        self._numbers = count()  # in the order in which the tasks came
        self._line: list[tuple[int, trio.lowlevel.Task]] = []  # sorted
        self._woken = 0  # tasks that were woken for a slot and have not run yet

    async def wait_for_slot(self) -> None:
        """Wait for a slot that no earlier task waits for; take it before the next checkpoint, then `wake_waiters`.

        Checks for cancellation and yields only if it has to wait. Raises RuntimeError in another thread.
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
            # A task that did not wait was quicker: go back to the place that this one had.

    def wake_waiters(self) -> None:
        """Slots were freed, taken or given up: wake as many tasks as there are slots."""
        if self._line:
            ready = self._line[: max(0, self._free() - self._woken)]
            del self._line[: len(ready)]
            self._woken += len(ready)
            for _number, task in ready:
                trio.lowlevel.reschedule(task)


class Backlog(AsyncIterator[ItemT], Generic[ItemT]):
    """What the peer opened and the application has not taken yet, to iterate over; the protocol bounds it.

    `kind` is what users call the items, such as "requests". A backlog is claimed once the application has asked for it.
    Items that come before that wait, but not for ever: see `Unclaimed`.

    `taken` is called with each item that the application gets. `pace` says when the next one may be taken: a peer that
    cancels channels as fast as it opens them starts no more work than its allowance; what is left when the backlog is
    ended comes without a pause. Iterating ends when the backlog has been ended and is empty, or raises what `ended` was
    given. It checks for cancellation with each item, and yields at the latest with every 16th, so that the first
    answers to channels that came together leave together; or with each from a peer that broke some off lately, so that
    what it breaks off meanwhile is not begun.
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
    )

    def __init__(
        self, taken: Callable[[ItemT], None], pace: StartPace | None = None, *, kind: str = "channels"
    ) -> None:
        self.kind: str = kind
        self.is_claimed: bool = False
        self.refusal: Reason | None = None
        """Why the session declines further items; None while it keeps them."""
        self._thread: HomeThread = home_thread()
        self._taken = taken
        self._pace = pace
        self._items: OrderedDict[object, ItemT] = OrderedDict()
        self._lot = trio.lowlevel.ParkingLot()
        self._paused = trio.lowlevel.ParkingLot()
        self._is_over = False
        self._since_yield = 0  # items
        self._error: ErrorMaker | None = None

    def __len__(self) -> int:
        return len(self._items)

    def claim(self) -> Self:
        """Note that the application takes these items, and return the backlog to iterate over."""
        self.is_claimed, self.refusal = True, None
        return self

    def drop_all(self) -> list[ItemT]:
        """Forget and return all items."""
        items = [*self._items.values()]
        self._items.clear()
        return items

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def put(self, item: ItemT, key: object = None) -> None:
        """Add an item; `drop` finds it by `key`, by default itself."""
        self._items[item if key is None else key] = item
        self._lot.unpark()

    def drop(self, key: object) -> ItemT | None:
        """Forget and return an item; None if it is not here any more."""
        return self._items.pop(key, None)

    def ended(self, error: ErrorMaker | None = None) -> None:
        """No more will come; `error` makes what to raise, None stands for an orderly end."""
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
    """Declines what a peer opens and the application never asks for, so that the peer doesn't wait for ever.

    A session has one of these. It gives it all its backlogs, calls `arrived` when it has put an item into one of
    the unclaimed ones, and runs `decline` for each item to be declined. There are three cases:

    - A server whose handler takes only some kinds calls `take_only`. All others are declined as soon as they arrive.
    - The application has asked for some kinds but not for this one. It may still do so, in another task or after its
      first step, so items wait for `GRACE_SECONDS`.
    - The application has asked for nothing yet, as most clients never do. It may be busy with something else before it
      starts, so items wait for `UNDECIDED_SECONDS`.

    A kind that was declined is accepted again as soon as the application asks for it. No task runs while nothing
    unclaimed waits: `nursery` is used to start one.
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
        """Decline all other kinds from now on, unless the application asks for them later."""
        self._served = f"only {' and '.join(kinds)}"
        for backlog in self._backlogs:
            if backlog.kind not in kinds and not backlog.is_claimed:
                self._refuse(backlog)

    def refusal(self, backlog: Backlog[Any]) -> Reason | None:
        """Return why an item that has just arrived must be declined, or None if the backlog takes it."""
        if backlog.refusal is not None:
            self._log(backlog)
        return backlog.refusal

    def arrived(self) -> None:
        """Note that the session has put an item into a backlog that isn't claimed."""
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
        """Log it once for each kind and session; `may_log` bounds the lines of peers that reconnect to repeat it."""
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
