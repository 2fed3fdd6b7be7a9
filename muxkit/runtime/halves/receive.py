"""The receiving half of a channel: a queue of what came, and the tasks that wait for it.

Items that come go to the task that waits longest, or are stored. The engine hears of what the application has taken,
because a grant of credit follows from it: of each item, or, while more of them wait, of a portion of items at once
(`Receiver.lag`). `receiver` is the engine's half, and its methods are called directly. `state` goes by the table
`muxkit.core.RECEIVING`.
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

DRAINING = Receiving.DRAINING  # looked up for each item
PORTION_LEAST = 4  # items; fewer are handed out one by one


class Waiter(Generic[ItemT]):
    """A task that waits for an item."""

    __slots__ = ("is_called", "items", "reading", "task")

    def __init__(self) -> None:
        self.items: tuple[ItemT, ...] = ()  # the item that was handed over: then a cancellation comes too late
        self.is_called: bool = False
        self.task: trio.lowlevel.Task | None = None  # while it sleeps
        self.reading: Reading | None = None  # while it reads the connection, and must not be rescheduled

    def call(self) -> None:
        """Wake it: it has its item, or will get none."""
        self.is_called = True
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
        elif self.reading is not None and self.reading.borrower_sleeps:
            self.reading.wake_borrower()


class _Nothing(ItemQueue[Any]):
    """The storage of all halves that store nothing, which therefore takes nothing."""

    __slots__ = ()

    def put(self, item: object) -> None:
        raise AssertionError("an item was put into what all halves share")

    def put_all(self, items: list[Any]) -> None:
        self.put(items)

    def put_back(self, items: list[Any]) -> None:
        self.put(items)


# What most halves have most of the time. Nothing is ever put into these.
EMPTY: Storage[Any] = _Nothing()
NO_WAITERS: list[Waiter[Any]] = []
NO_ITEMS: list[Any] = []


class ReceiveHalf(Generic[ItemT]):
    """What came on one channel and was not taken, with the tasks that wait for it, first come, first served.

    Items are messages of bytes, or of another type in a subclass, which then says how large one is.
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
    """Made when the first item has to wait; `Mailbox` packs short messages, `ItemQueue` holds items of any kind."""
    size_of: staticmethod[[Any], int] = staticmethod(len)
    """Bytes of one item, which decide when a call yields, and which the engine hears of."""
    portion_most: ClassVar[int] = 64
    """Items that are handed out at most before the engine hears of them, if its `lag` allows."""

    def __init__(self, connection: HalfOwner, receiver: Receiver[ItemT]) -> None:
        self.receiver: Final = receiver
        self._connection = connection
        self._thread: HomeThread = connection.budget.thread
        self._stored: Storage[ItemT] = EMPTY
        self._portion: list[ItemT] = (
            NO_ITEMS  # what is handed out next, the oldest at the end; the engine hears of it behind the last
        )
        self._portion_bytes = 0  # with what was handed out
        self._portion_count = 0  # the same in items
        self._waiters: list[Waiter[ItemT]] = NO_WAITERS
        self._error: ErrorMaker = trio.EndOfChannel
        self._since_yield = 0  # bytes
        self.state: Receiving = Receiving.OPEN
        self.reason: bytes = b""
        """What the peer said when it gave up sending here, as it came."""
        self.channel: MuxChannel | None = None
        """The two-way channel that this is a half of, until the half has ended."""
        receiver.owner = self  # type: ignore[misc]  # each implementation has that slot

    # --- for the application

    async def receive(self) -> ItemT:
        """The next item. Cancelled means that none was taken.

        Checks for cancellation in every call, yields at the latest on every 64th call or 128 KiB of this half,
        and always when it had to wait. What came before the end or the loss of the connection is given first.

        Raises `trio.EndOfChannel` at the clean end, `ChannelCancelled` when the peer gave up before it was done,
        `LinkLost` when the connection is gone, `trio.ClosedResourceError` after `aclose`.
        """
        if not (self._portion or self._stored.count):
            item = await self._wait()
            self._took((item,), self.size_of(item))
            return item
        await trio.lowlevel.checkpoint_if_cancelled()
        portion = self._portion
        if portion:  # usually
            item = portion.pop()
            if portion:  # the engine counts a portion as a whole, so this call changes nothing but the list
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
        """Take an item that is stored, outside of Trio's tasks; None if there is none."""
        if get_ident() != self._thread.ident:
            refuse_thread()
        if self._portion:
            item = self._portion.pop()
            if not self._portion:
                self._portion_taken()
            return item
        return self._take_stored() if self._stored.count else None

    async def receive_many(self, limit: int | None = None) -> list[ItemT]:
        """Wait for at least one item, then give all that have come, at most `limit`; one checkpoint.

        Cancelled means that none was taken.
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
            self._return_portion()  # another task may have made one of what came behind the item
        items += self._stored.take_all(None if limit is None else limit - len(items))
        self._took(items, sum(map(self.size_of, items)))
        if not has_waited:
            await self._yield()
        return items

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self, reason: Reason | None = None) -> None:
        """Stop receiving without a checkpoint: what came is dropped, and the peer is told to send no more, and why."""
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
        self._connection.request_write()
        if self._waiters:
            self._wake_all()

    @property
    def unread_bytes(self) -> int:
        """Bytes that came and that the application hasn't taken."""
        return self.receiver.held - self.handed_out

    @property
    def unread(self) -> int:
        """Items that wait to be taken."""
        return self._stored.count + len(self._portion)

    def __repr__(self) -> str:
        return f"<{self.receiver.label} {self.state.value}, {self.unread} unread>"

    def end(self) -> Exception:
        """Make the error that `receive` raises once everything was received."""
        return self._error()

    # --- for the connection

    def deliver(self, item: ItemT) -> None:
        """Hand an item that came to the task that waits longest, or store it."""
        if self.state is Receiving.CLOSED:
            self.receiver.consumed((), self.size_of(item))
            return
        if self._waiters:  # then nothing is stored
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
        """Do the same with items that came together; the list is this half's from now on."""
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
        """No more will come; `error` makes what is raised once everything stored was taken."""
        if self.state is Receiving.OPEN:
            self.state = advance(self.state, Step.ENDED)
            self._error = error
            self._drain()
            if self._waiters:
                turns().wake(self._wake_all)

    # --- inside

    async def _wait(self) -> ItemT:
        """Return the next item, in the order in which the waiting tasks came. Always a checkpoint."""
        self._thread.check()
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.checkpoint()  # a loop around this call must let other tasks run
            raise self._error()
        waiter: Waiter[ItemT] = Waiter()  # calling the subscripted class would cost 1 µs
        if self._waiters is NO_WAITERS:
            self._waiters = []
        self._waiters.append(waiter)
        reading = self._connection.reading()
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
        size = self.size_of(item)
        if not self.portion_most or not self._stored.count or not self._take_portion(size):
            self._took((item,), size)
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        return item

    def _take_portion(self, size: int) -> bool:
        """Make a portion of the items behind one of `size` bytes, which was taken; return False if it is too small."""
        bytes_most = self.receiver.lag
        if size * PORTION_LEAST > bytes_most:
            return False
        left = YIELD_BYTES - self._since_yield  # a portion is handed out without a yield
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
        """Count what was handed out of the portion, now that nothing of it is left."""
        self._portion = NO_ITEMS
        self._took_portion(self._portion_count, self._portion_bytes)

    def _return_portion(self) -> None:
        """Put what is left of the portion back, and count what was handed out."""
        if self._portion:
            size = self.handed_out
            left, self._portion = self._portion, NO_ITEMS
            left.reverse()
            if self._stored is EMPTY:  # another task took what was stored beside the portion
                self._stored = self.new_storage()
            self._stored.put_back(left)
            self._took_portion(self._portion_count - len(left), size)

    @property
    def handed_out(self) -> int:
        """Bytes of the portion that were handed out."""
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


# The name of a coroutine is what Python prints if it is never awaited; a program knows the channel, not its halves.
ReceiveHalf.receive.__qualname__ = "Channel.receive"
ReceiveHalf.receive_many.__qualname__ = "Channel.receive_many"
