"""The receiving half of a channel as Aqueduct still has it; `receiving` is the form that replaces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import trio

from muxkit.core import Receiving, Step, advance
from muxkit.runtime._thread import Owner, owner, refuse_thread
from muxkit.runtime.halves.budget import ErrorMaker
from muxkit.runtime.halves.mailbox import ItemQueue, Storage
from muxkit.runtime.halves.receiving import EMPTY, NO_ITEMS, NO_WAITERS, Waiter
from muxkit.runtime.halves.sending import YIELD_BYTES, YIELD_LEAST
from muxkit.runtime.pumps.reading import OFFERED, Reading
from muxkit.runtime.pumps.turns import turns

ItemT = TypeVar("ItemT")

DRAINING = Receiving.DRAINING  # looked up for each item
PORTION_LEAST = 4  # items; fewer are handed out one by one


def _closed() -> Exception:
    return trio.ClosedResourceError("this side of the channel was closed")


class Inbox(ABC, Generic[ItemT]):
    """What came on one channel and was not taken, with the tasks that wait for it, first come, first served.

    A protocol subclasses it, names its `_next_item` and `_next_items` as its applications know them (`ReceiveHalf` does
    that), fills in `_taken` and `_stop`, and calls `_deliver` and `_ended`.
    """

    __slots__ = (
        "_error",
        "_owner",
        "_portion",
        "_portion_bytes",
        "_request_write",
        "_since_yield",
        "_stored",
        "_waiters",
        "state",
    )

    _new_storage: ClassVar[type[Storage[Any]]] = ItemQueue
    """Made when the first item has to wait; `Mailbox` packs short messages."""
    _size_of: staticmethod[[Any], int] = staticmethod(len)
    """Bytes of one item, which decide when a call yields, and which `_taken` is told."""
    _portion_most: ClassVar[int] = 0
    """Items that are handed out at most before `_taken` is called, if `_may_wait_untold` allows; 0 for one by one."""

    def __init__(self, request_write: Callable[[], None]) -> None:
        self._request_write = request_write
        self._owner: Owner = owner()
        self._stored: Storage[ItemT] = EMPTY
        self._portion: list[ItemT] = (
            NO_ITEMS  # what is handed out next, the oldest at the end; `_taken` is told behind it
        )
        self._portion_bytes = 0  # with what was handed out
        self._waiters: list[Waiter[ItemT]] = NO_WAITERS
        self._error: ErrorMaker = trio.EndOfChannel
        self._since_yield = 0  # bytes
        self.state: Receiving = Receiving.OPEN

    # --- for the application

    async def _next_item(self) -> ItemT:
        """The next item. Cancelled means that none was taken.

        Checks for cancellation in every call, yields at the latest on every 64th call or 128 KiB of this half,
        and always when it had to wait. What came before the end or the loss of the connection is given first.

        Raises `trio.EndOfChannel` at the clean end, `ChannelCancelled` when the peer gave up before it was done,
        `LinkLost` when the connection is gone, `trio.ClosedResourceError` after `aclose`.
        """
        if not (self._portion or self._stored.count):
            item = await self._wait()
            self._took((item,), self._size_of(item))
            return item
        await trio.lowlevel.checkpoint_if_cancelled()
        portion = self._portion
        if portion:  # usually
            item = portion.pop()
            if portion:  # the engine counts a portion as a whole, so this call changes nothing but the list
                return item
            if get_ident() != self._owner.ident:
                portion.append(item)
                refuse_thread()
            self._portion_taken()
        else:
            self._owner.check()
            item = self._take_stored()
        if self._since_yield >= YIELD_BYTES and not self._portion:
            await self._yield()
        return item

    def _try_receive(self) -> ItemT | None:
        """Take an item that is stored, outside of Trio's tasks; None if there is none."""
        if get_ident() != self._owner.ident:
            refuse_thread()
        if self._portion:
            item = self._portion.pop()
            if not self._portion:
                self._portion_taken()
            return item
        return self._take_stored() if self._stored.count else None

    async def _next_items(self, limit: int | None = None) -> list[ItemT]:
        """Wait for at least one item, then give all that have come, at most `limit`; one checkpoint.

        Cancelled means that none was taken.
        """
        self._owner.check()
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._return_portion()
        has_waited = not self._stored.count
        items: list[ItemT] = []
        if has_waited:
            items.append(await self._wait())
            self._return_portion()  # another task may have made one of what came behind the item
        items += self._stored.take_all(None if limit is None else limit - len(items))
        self._took(items, sum(map(self._size_of, items)))
        if not has_waited:
            await self._yield()
        return items

    def close(self) -> None:
        """Stop receiving without a checkpoint: what came is dropped, and the peer is told to send no more."""
        self._owner.check()
        if self.state is Receiving.OPEN:
            self._stop()
        if self.state is not Receiving.CLOSED:
            self.state = advance(self.state, Step.STOP)
        self._error = _closed
        self._return_portion()
        if self._stored.count:
            self._took((), self._discard())
        self._request_write()
        if self._waiters:
            self._wake_all()

    @property
    def unread(self) -> int:
        """Items that wait to be taken."""
        return self._stored.count + len(self._portion)

    # --- for the session

    def _deliver(self, item: ItemT) -> None:
        """Hand an item that came to the task that waits longest, or store it."""
        if self.state is Receiving.CLOSED:
            self._taken((), self._size_of(item))
            return
        if self._waiters:  # then nothing is stored
            waiter = self._waiters.pop(0)
            if not self._waiters:
                self._waiters = NO_WAITERS
            waiter.items = (item,)
            waiter.call()
        else:
            if self._stored is EMPTY:
                self._stored = self._new_storage()
            self._stored.put(item)

    def _deliver_all(self, items: list[ItemT]) -> None:
        """Do the same with items that came together; the list is this half's from now on."""
        if self.state is Receiving.CLOSED:
            self._taken((), sum(map(self._size_of, items)))
            return
        if self._waiters:
            handed_over = len(self._waiters)
            for item in items[:handed_over]:
                self._deliver(item)
            del items[:handed_over]
        if items:
            if self._stored is EMPTY:
                self._stored = self._new_storage()
            self._stored.put_all(items)

    def _ended(self, error: ErrorMaker) -> None:
        """No more will come; `error` makes what is raised once everything stored was taken."""
        if self.state is Receiving.OPEN:
            self.state = advance(self.state, Step.ENDED)
            self._error = error
            self._drain()
            if self._waiters:
                turns().wake(self._wake_all)

    # --- what a protocol fills in

    @abstractmethod
    def _taken(self, items: Sequence[ItemT], size: int) -> bool:
        """Tell the engine that the application has taken these items, of `size` bytes together.

        Without items, so many bytes were dropped. Returns True if the engine may have something to write.
        """

    @abstractmethod
    def _stop(self) -> None:
        """Tell the engine that the application wants no more."""

    def _may_wait_untold(self) -> int:
        """Return the bytes that may be taken before `_taken` is called, while more items wait; then it has no items."""
        return 0

    def _discard(self) -> int:
        """Drop what is stored and return its bytes, for `_taken`; a protocol whose items own something overrides it."""
        return self._stored.clear()

    def _reading(self) -> Reading | None:
        """Return the reader of the connection if a task that waits here may read in its place."""
        return None

    # --- inside

    async def _wait(self) -> ItemT:
        """Return the next item, in the order in which the waiting tasks came. Always a checkpoint."""
        self._owner.check()
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.checkpoint()  # a loop around this call must let other tasks run
            raise self._error()
        waiter: Waiter[ItemT] = Waiter()  # calling the subscripted class would cost 1 µs
        if self._waiters is NO_WAITERS:
            self._waiters = []
        self._waiters.append(waiter)
        reading = self._reading()
        if reading is not None:
            reading.is_wanted = True
            if reading.state is OFFERED:
                waiter.reading = reading
                try:
                    await reading.read_for(waiter)
                except BaseException:
                    if not waiter.is_called:
                        self._waiters.remove(waiter)
                    raise
                finally:
                    waiter.reading = None
        if not waiter.is_called:

            def abort(_: object) -> trio.lowlevel.Abort:
                self._waiters.remove(waiter)
                return trio.lowlevel.Abort.SUCCEEDED

            waiter.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        self._since_yield = 0
        if not waiter.items:
            raise self._error()
        return waiter.items[0]

    def _take_stored(self) -> ItemT:
        """Take the oldest item that is stored, with a portion of those behind it if that is worth while."""
        item = self._stored.take()
        size = self._size_of(item)
        if not self._portion_most or not self._stored.count or not self._take_portion(size):
            self._took((item,), size)
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        return item

    def _take_portion(self, size: int) -> bool:
        """Make a portion of the items behind one of `size` bytes, which was taken; return False if it is too small."""
        bytes_most = self._may_wait_untold()
        if size * PORTION_LEAST > bytes_most:
            return False
        left = YIELD_BYTES - self._since_yield  # a portion is handed out without a yield
        bytes_most = min(bytes_most, left)
        most = min(self._portion_most, left // YIELD_LEAST, bytes_most // max(size, 1))
        if most < PORTION_LEAST:
            return False
        portion = self._stored.take_all(most - 1)
        size += sum(map(self._size_of, portion))
        if size > bytes_most:
            self._stored.put_back(portion)
            return False
        portion.reverse()
        self._portion, self._portion_bytes = portion, size
        self._since_yield += max(size, YIELD_LEAST * (len(portion) + 1))
        return True

    def _portion_taken(self) -> None:
        """Count what was handed out of the portion, now that nothing of it is left."""
        self._portion = NO_ITEMS
        self._took((), self._portion_bytes)

    def _return_portion(self) -> None:
        """Put what is left of the portion back, and count what was handed out."""
        if self._portion:
            size = self._handed_out
            left, self._portion = self._portion, NO_ITEMS
            left.reverse()
            if self._stored is EMPTY:  # another task took what was stored beside the portion
                self._stored = self._new_storage()
            self._stored.put_back(left)
            self._took((), size)

    @property
    def _handed_out(self) -> int:
        """Bytes of the portion that were handed out."""
        return self._portion_bytes - sum(map(self._size_of, self._portion)) if self._portion else 0

    def _took(self, items: Sequence[ItemT], size: int) -> None:
        if not self._stored.count:
            self._stored = EMPTY
        if self._taken(items, size):
            self._request_write()
        if self.state is DRAINING:
            self._drain()

    def _drain(self) -> None:
        if not self._stored.count and not self._portion:
            self.state = advance(self.state, Step.DRAINED)

    def _wake_all(self) -> None:
        waiters, self._waiters = self._waiters, NO_WAITERS
        for waiter in waiters:
            waiter.call()

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()


class ReceiveHalf(Inbox[ItemT], trio.abc.ReceiveChannel[ItemT]):
    """An `Inbox` that is a `trio.abc.ReceiveChannel` of its items.

    Several tasks may receive at once: items go to them in the order in which they came to wait.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        async def receive(self) -> ItemT:
            """Wait for the next item and take it."""

        async def receive_many(self, limit: int | None = None) -> list[ItemT]:
            """Wait for an item, and take what is there, at most `limit` items."""
    else:  # not one more coroutine for each item
        receive = Inbox._next_item
        receive_many = Inbox._next_items

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


# The name of a coroutine is what Python prints if it is never awaited; a program knows the channel, not its halves.
Inbox._next_item.__qualname__ = "Channel.receive"
Inbox._next_items.__qualname__ = "Channel.receive_many"
