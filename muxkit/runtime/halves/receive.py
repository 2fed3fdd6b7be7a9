"""The receiving half of a channel: a queue of received items, and the tasks that wait for items.

A new item goes to the task that has waited longest, or is stored if no task waits. When the application takes an item,
the half notifies the engine, which then grants new credit to the peer. While several items are stored, the half
notifies the engine once for a *portion* of items instead of each item, which is faster. `Receiver.lag` limits the size
of a portion.

`ReceiveHalf` knows nothing about frames. It calls the methods of the engine's half, which is `receiver`. The table
`muxkit.core.RECEIVING` has the legal changes of `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import trio

from muxkit.core import Reason, Receiving, Step, advance
from muxkit.core.halves import Receiver
from muxkit.runtime._thread import HomeThread, refuse_thread
from muxkit.runtime.halves.budget import ErrorMaker
from muxkit.runtime.halves.mailbox import ItemQueue, Mailbox, Storage
from muxkit.runtime.halves.owner import HalfOwner
from muxkit.runtime.halves.send import YIELD_BYTES, YIELD_LEAST, closed
from muxkit.runtime.pumps.reading import OFFERED, Reading
from muxkit.runtime.pumps.turns import turns

if TYPE_CHECKING:
    from muxkit.runtime.channel import MuxChannel

ItemT = TypeVar("ItemT")

# Globals are faster than attributes of an enum, and these are read for each item.
OPEN, DRAINING = Receiving.OPEN, Receiving.DRAINING
PORTION_LEAST = 4  # minimum number of items in a portion


class Waiter(Generic[ItemT]):
    """A task that waits for an item."""

    __slots__ = ("is_called", "items", "reading", "task")

    def __init__(self) -> None:
        self.items: tuple[ItemT, ...] = ()  # the item for this task; once it is set, the task can't be cancelled
        self.is_called: bool = False
        self.task: trio.lowlevel.Task | None = None  # the task, while it sleeps
        self.reading: Reading | None = None  # set while the task reads the link, and must not be rescheduled

    def call(self) -> None:
        """Wake the task, because it has its item or will get none."""
        self.is_called = True
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
        elif self.reading is not None and self.reading.borrower_sleeps:
            self.reading.wake_borrower()


class _Nothing(ItemQueue[Any]):
    """Shared placeholder for halves with no stored items. Putting an item into it is a bug."""

    __slots__ = ()

    def put(self, item: object) -> None:
        raise AssertionError("an item was put into what all halves share")

    def put_all(self, items: list[Any]) -> None:
        self.put(items)

    def put_back(self, items: list[Any]) -> None:
        self.put(items)


# Most halves are empty most of the time, so they share these objects. Nothing is ever put into them.
EMPTY: Storage[Any] = _Nothing()
NO_WAITERS: list[Waiter[Any]] = []
NO_ITEMS: list[Any] = []


class ReceiveHalf(Generic[ItemT]):
    """Stores the received items of one channel. Several tasks may receive, and they are served in order.

    Items are messages of type `bytes`. A subclass may use another type, and then overrides `size_of`.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_portion",
        "_portion_bytes",
        "_portion_count",
        "_since_yield",
        "_stored",
        "_thread",
        "_waiters",
        "channel",
        "reason",
        "receiver",
        "state",
    )

    new_storage: ClassVar[type[Storage[Any]]] = Mailbox
    """The class of the storage: `Mailbox` for messages of bytes, `ItemQueue` for any other items.

    A half creates its storage when an item has to be stored for the first time.
    """
    size_of: staticmethod[[Any], int] = staticmethod(len)
    """Returns the size of an item in bytes. The size decides when a call yields, and how much credit is returned."""
    portion_most: ClassVar[int] = 64
    """Maximum number of items in a portion, if the `lag` of the engine allows that many. 0 turns portions off."""

    def __init__(self, connection: HalfOwner, receiver: Receiver[ItemT]) -> None:
        self.receiver: Final = receiver
        self._connection = connection
        self._thread: HomeThread = connection.budget.thread
        self._stored: Storage[ItemT] = EMPTY
        # The rest of the current portion, with the oldest item at the end. `receive` takes items from here first.
        self._portion: list[ItemT] = NO_ITEMS
        self._portion_bytes = 0  # size of the whole portion, including items that were already taken
        self._portion_count = 0  # number of items in the whole portion
        self._waiters: list[Waiter[ItemT]] = NO_WAITERS
        self._error: ErrorMaker = trio.EndOfChannel
        self._since_yield = 0  # bytes received since the last yield, with `YIELD_LEAST` as the minimum charge per call
        self.state: Receiving = Receiving.OPEN
        self.reason: bytes = b""
        """The payload with which the peer has cancelled this half, as it was received."""
        self.channel: MuxChannel | None = None
        """The two-way channel that this half belongs to. None if there is none, or once the half has ended."""
        receiver.owner = self  # type: ignore[misc]  # each implementation has that slot

    # --- for the application

    async def receive(self) -> ItemT:
        """Wait for the next item and return it. If this is cancelled, no item has been taken.

        Every call checks for cancellation. A call yields to other tasks if it has to wait, and otherwise after 64 calls
        or 128 KiB on this half at the latest. Items that arrived before the end of the channel, or before the loss of
        the connection, are returned before the error is raised.

        Raises:
            trio.EndOfChannel: The peer has finished the channel.
            ChannelCancelled: The peer has cancelled the channel, so messages are missing.
            LinkLost: The connection is lost.
            trio.ClosedResourceError: This side has called `aclose`.
        """
        if not (self._portion or self._stored.count):
            item = await self._wait()
            self._took((item,), self.size_of(item))
            return item
        await trio.lowlevel.checkpoint_if_cancelled()
        portion = self._portion
        if portion:  # usually
            item = portion.pop()
            if portion:  # the engine is only notified of whole portions, so there is nothing else to do
                return item
            if get_ident() != self._thread.ident:
                portion.append(item)
                refuse_thread()
            self._portion_taken()
        else:
            self._thread.check()
            item = self._take_stored()
        if self._since_yield >= YIELD_BYTES and not self._portion:
            await self._yield()
        return item

    def try_receive(self) -> ItemT | None:
        """Return a stored item without a checkpoint, for callers outside of Trio tasks. None if nothing is stored."""
        if get_ident() != self._thread.ident:
            refuse_thread()
        if self._portion:
            item = self._portion.pop()
            if not self._portion:
                self._portion_taken()
            return item
        return self._take_stored() if self._stored.count else None

    async def receive_many(self, limit: int | None = None) -> list[ItemT]:
        """Wait for at least one item, and return all items that have arrived, up to `limit`. Executes one checkpoint.

        If this is cancelled, no item has been taken.
        """
        self._thread.check()
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._return_portion()
        has_waited = not self._stored.count
        items: list[ItemT] = []
        if has_waited:
            items.append(await self._wait())
            self._return_portion()  # while this task waited, another task may have made a portion of later items
        items += self._stored.take_all(None if limit is None else limit - len(items))
        self._took(items, sum(map(self.size_of, items)))
        if not has_waited:
            await self._yield()
        return items

    async def aclose(self) -> None:
        """Stop receiving, drop the stored items, and ask the peer to stop sending."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self, reason: Reason | None = None) -> None:
        """Close the half like `aclose`, but without a checkpoint. The peer gets the reason."""
        self.close_quietly(reason)
        self._connection.request_write()

    def close_quietly(self, reason: Reason | None = None) -> None:
        """Close the half like `close`, for a caller that requests the write later."""
        self._thread.check()
        if self.state is Receiving.OPEN:
            self.receiver.stop(reason or Reason())
            self._connection.dispatch_events()
        if self.state is not Receiving.CLOSED:
            self.state = advance(self.state, Step.STOP)
        self._error = closed
        self._return_portion()
        if self._stored.count:
            self._took((), self._stored.clear())
        if self._waiters:
            self._wake_all()

    @property
    def unread_bytes(self) -> int:
        """Number of received bytes that the application hasn't taken."""
        return self.receiver.held - self.handed_out

    @property
    def unread(self) -> int:
        """Number of items that wait to be received."""
        return self._stored.count + len(self._portion)

    def __repr__(self) -> str:
        return f"<{self.receiver.label} {self.state.value}, {self.unread} unread>"

    def end(self) -> Exception:
        """Return the error that `receive` raises once all items have been received."""
        return self._error()

    # --- for the connection

    def deliver(self, item: ItemT) -> None:
        """Give a received item to the task that has waited longest, or store it if no task waits."""
        if self.state is Receiving.CLOSED:
            self.receiver.consumed((), self.size_of(item))
            return
        if self._waiters:  # tasks only wait while nothing is stored
            waiter = self._waiters.pop(0)
            if not self._waiters:
                self._waiters = NO_WAITERS
            waiter.items = (item,)
            waiter.call()
        else:
            if self._stored is EMPTY:
                self._stored = self.new_storage()
            self._stored.put(item)

    def deliver_all(self, items: list[ItemT]) -> None:
        """Deliver several items that arrived together. The half owns the list from now on."""
        if self.state is Receiving.CLOSED:
            self.receiver.consumed((), sum(map(self.size_of, items)))
            return
        if self._waiters:
            handed_over = len(self._waiters)
            for item in items[:handed_over]:
                self.deliver(item)
            del items[:handed_over]
        if items:
            if self._stored is EMPTY:
                self._stored = self.new_storage()
            self._stored.put_all(items)

    def ended(self, error: ErrorMaker) -> None:
        """End the half, because no more items will arrive. `receive` raises `error()` once no item is stored."""
        if self.state is Receiving.OPEN:
            self.state = advance(self.state, Step.ENDED)
            self._error = error
            self._drain()
            if self._waiters:
                turns().wake(self._wake_all)

    # --- waiting and portions

    async def _wait(self) -> ItemT:
        """Wait for the next item in the queue of waiting tasks. This always executes a checkpoint."""
        if get_ident() != self._thread.ident:
            refuse_thread()
        if self.state is not OPEN:
            await trio.lowlevel.checkpoint()  # so that a loop around `receive` lets other tasks run
            raise self._error()
        waiter: Waiter[ItemT] = Waiter()  # not `Waiter[ItemT]()`, which takes 1 µs longer
        if self._waiters is NO_WAITERS:
            self._waiters = []
        self._waiters.append(waiter)
        reading = self._connection.reading
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
        """Take the oldest stored item. If enough items follow, make them the current portion."""
        item = self._stored.take()
        size = self.size_of(item)
        if not self.portion_most or not self._stored.count or not self._take_portion(size):
            self._took((item,), size)
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        return item

    def _take_portion(self, size: int) -> bool:
        """Make a portion of an item of `size` bytes, which was just taken, and the stored items that follow it.

        Return False if the portion would be too small.
        """
        bytes_most = self.receiver.lag
        if size * PORTION_LEAST > bytes_most:
            return False
        left = YIELD_BYTES - self._since_yield  # `receive` doesn't yield within a portion
        bytes_most = min(bytes_most, left)
        most = min(self.portion_most, left // YIELD_LEAST, bytes_most // max(size, 1))
        if most < PORTION_LEAST:
            return False
        portion = self._stored.take_all(most - 1)
        size += sum(map(self.size_of, portion))
        if size > bytes_most:
            self._stored.put_back(portion)
            return False
        portion.reverse()
        count = len(portion) + 1
        self._portion, self._portion_bytes, self._portion_count = portion, size, count
        self._since_yield += max(size, YIELD_LEAST * count)
        return True

    def _portion_taken(self) -> None:
        """Notify the engine of the current portion, whose items have all been taken."""
        self._portion = NO_ITEMS
        self._took_portion(self._portion_count, self._portion_bytes)

    def _return_portion(self) -> None:
        """Put the rest of the portion back into the storage, and notify the engine of the items that were taken."""
        if self._portion:
            size = self.handed_out
            left, self._portion = self._portion, NO_ITEMS
            left.reverse()
            if self._stored is EMPTY:  # another task has taken all other stored items
                self._stored = self.new_storage()
            self._stored.put_back(left)
            self._took_portion(self._portion_count - len(left), size)

    @property
    def handed_out(self) -> int:
        """Number of bytes of the current portion that the application has taken."""
        return self._portion_bytes - sum(map(self.size_of, self._portion)) if self._portion else 0

    def _took(self, items: Sequence[ItemT], size: int) -> None:
        if not self._stored.count:
            self._stored = EMPTY
        if self.receiver.consumed(items, size):
            self._connection.request_write()
        if self.state is DRAINING:
            self._drain()

    def _took_portion(self, count: int, size: int) -> None:
        if not self._stored.count:
            self._stored = EMPTY
        if self.receiver.consumed_portion(count, size):
            self._connection.request_write()
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


# Python prints this name in the warning for a coroutine that was never awaited, so it must be the public name.
ReceiveHalf.receive.__qualname__ = "Channel.receive"
ReceiveHalf.receive_many.__qualname__ = "Channel.receive_many"
