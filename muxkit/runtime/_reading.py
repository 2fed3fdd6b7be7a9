"""Who waits for bytes? A task of the pump's own, or a receiver who waits for his message anyway.

A reader who delivers to somebody else has to wake him, and Trio's loop makes one more turn before the answer can
leave. So a receiver who finds nothing takes the reader's place while that is free, and gives it back when he has what
he wants. The reader offers it, if somebody asked, after reads that brought little: bulk he serves better himself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from muxkit.runtime._links import WaitableLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.core import BoundedParsing
    from muxkit.runtime._turns import Turns

READ_SMALL = 64 * 1024  # bytes to ask for while reads come short
READ_LARGE = 256 * 1024  # and while they bring half of that
LITTLE = 4 * 1024  # bytes; whoever got more is busy with it for a while


class BorrowingReader(Protocol):
    """A task that waits for something which only reading can bring."""

    is_called: bool
    """Has it what it waits for, or an error?"""


class Reading:
    """Reads a stream until `stop`, one task at a time.

    `take_in` parses and hands out what came, b"" if that is only the rest of what came before; it gives whether it was
    for few, who will probably be back at once. `on_taken` is for what nobody waits for: it is called soon after, when
    a guest has gone on with what he got. Any of them may call `stop`.
    """

    __slots__ = (
        "_failure",
        "_is_behind",
        "_is_borrowed",
        "_is_free",
        "_is_over",
        "_is_running",
        "_is_wanted",
        "_link",
        "_may_hold_more",
        "_on_broken",
        "_on_end",
        "_on_taken",
        "_paced",
        "_reader",
        "_size",
        "_stream",
        "_take_in",
        "_turns",
        "borrower_sleeps",
        "is_heavy",
    )

    def __init__(
        self,
        stream: trio.abc.ReceiveStream,
        paced: BoundedParsing | None,
        turns: Turns,
        *,
        take_in: Callable[[bytes], bool],
        on_taken: Callable[[], None],
        on_end: Callable[[], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._stream = stream
        self._link = stream if isinstance(stream, WaitableLink) else None
        self._paced = paced
        self._turns = turns
        self.is_heavy = False
        """What was taken in last took long: the next read waits for a turn."""
        self._take_in = take_in
        self._on_taken = on_taken
        self._on_end = on_end
        self._on_broken = on_broken
        self._size = READ_SMALL
        self._may_hold_more = False  # the last read brought all that it had asked for
        self._reader: trio.lowlevel.Task | None = None  # while he stands back
        self._is_borrowed = False
        self.borrower_sleeps = False
        self._failure: BaseException | None = None  # of what a guest's read led to; it is the reader who raises it
        self._is_over = False
        self._is_running = False
        self._is_behind = False  # something is left to parse, which is for the reader: he lets others have their turns
        self._is_free = False
        self._is_wanted = False

    def stop(self) -> None:
        """The connection is over, and will be closed, which wakes whoever reads."""
        self._is_over = True
        self._is_free = False

    # --- the reader

    async def run(self) -> None:
        self._is_running = True
        try:
            if self._link is None:
                await self._receive(self._stream)
            else:
                await self._wait_and_read(self._link)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._on_broken(error)
        finally:
            self._is_running = False
            if self._failure is not None:  # it counts for more than a cancellation, which it may have led to
                raise self._failure

    async def _receive(self, stream: trio.abc.ReceiveStream) -> None:
        while not self._is_over:
            data = await stream.receive_some(self._size)
            if self.is_heavy:
                await self._turns.wait()
            self._took(data if type(data) is bytes else bytes(data))
            self._on_taken()
            data = b""  # not kept while waiting for more
            if self._is_behind:
                await self._catch_up()

    async def _wait_and_read(self, link: WaitableLink) -> None:
        while not self._is_over:
            self._on_taken()  # after what a guest has read, too, who was gone before the reader stood back
            while self._is_borrowed:
                await self._wait_for_return()
                self._on_taken()
            if self._failure is not None:
                return
            if self._is_behind:
                await self._catch_up()
            self._is_free = False
            if self._may_hold_more:
                await trio.lowlevel.checkpoint()
            else:
                await link.wait_readable()
            if self.is_heavy:
                await self._turns.wait()
            if self._read_now(link) and self._is_wanted:
                self._offer()
                await trio.lowlevel.checkpoint()

    async def _catch_up(self) -> None:
        """Parse the rest in turns: a flood of tiny frames must not keep the other connections waiting."""
        while self._is_behind and not self._is_over:
            await self._turns.wait()
            if self._is_over:
                return
            self._take_in(b"")
            self._on_taken()
            self._is_behind = self._paced is not None and self._paced.unparsed > 0

    async def _wait_for_return(self) -> None:
        """Until the guest is gone."""
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- the guest

    def can_borrow(self) -> bool:
        """May somebody read in the reader's place now? If not, he is remembered for the next time."""
        self._is_wanted = True
        return self._is_free

    async def read_for(self, borrower: BorrowingReader) -> None:
        """Take the reader's place, if `can_borrow`, until the guest is called or has to leave it.

        Cancelled, nothing was read that somebody has not got.
        """
        assert self._link is not None
        self._is_free = False
        self._is_borrowed = True
        try:
            while not (borrower.is_called or self._is_over or self._is_behind or self.is_heavy or self._failure):
                self.borrower_sleeps = True
                await self._link.wait_readable()
                self.borrower_sleeps = False
                self._read_as_borrower(self._link)
                if not borrower.is_called:  # else the reader comes next
                    self._on_taken()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._on_broken(error)
        finally:
            self.borrower_sleeps = self._is_borrowed = False
            self._offer()
            if self._reader is not None:
                task, self._reader = self._reader, None
                trio.lowlevel.reschedule(task)

    def _read_as_borrower(self, link: WaitableLink) -> None:
        """What fails on the way is not for the guest to tell: some of what came has not reached the others."""
        try:
            try:
                self._read_now(link)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._on_broken(error)
        except BaseException as error:
            if self._is_running:
                self._failure = error
            if not self._is_running or not isinstance(error, Exception):
                raise

    def wake_borrower(self) -> None:
        """For when `borrower_sleeps`; else he reads just now, and will see for himself."""
        if self._link is not None:
            self.borrower_sleeps = False
            self._link.stop_waiting()

    # --- what both do

    def _offer(self) -> None:
        self._is_wanted = False
        self._is_free = not (self._is_over or self._failure or self._is_behind or self.is_heavy)

    def _read_now(self, link: WaitableLink) -> bool:
        """What has come, if anything has; gives whether somebody else should have the place."""
        # Once it is over the protocol may have gone on to another connection.
        data = None if self._is_over else link.receive_nowait(self._size)
        if data is None:
            self._may_hold_more = False
            return False
        return self._took(data)

    def _took(self, data: bytes) -> bool:
        size, asked = len(data), self._size
        self._may_hold_more = size == asked
        self._size = READ_LARGE if size >= READ_SMALL // 2 else READ_SMALL
        if not size:
            self._on_end()
            return False
        is_for_few = self._take_in(data)
        self._is_behind = self._paced is not None and self._paced.unparsed > 0
        return is_for_few and size < LITTLE and not self.is_heavy
