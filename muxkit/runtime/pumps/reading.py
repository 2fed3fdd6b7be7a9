"""Reading of a stream by the pump's own task, or by a receiver that waits for a message anyway.

A reader that delivers to another task has to wake it, and Trio's loop makes one more pass before the answer can leave.
So a receiver that finds nothing may borrow the reader's place while that is free, and returns it when it has what it
waits for. The reader offers its place, if a receiver asked, after reads that brought little: bulk it serves better
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import attrs
import trio

from muxkit.core import BoundedParsing
from muxkit.runtime._links import WaitableLink
from muxkit.runtime.pumps.spin import Spin
from muxkit.runtime.pumps.turns import Turns

READ_SMALL = 64 * 1024  # bytes to ask for while reads come short
READ_LARGE = 512 * 1024  # and while they bring half of READ_SMALL
LITTLE_BYTES = 4 * 1024  # a task that got more is busy with it for a while


class BorrowingReader(Protocol):
    """A task that waits for something which only reading can bring."""

    is_called: bool
    """True once it has what it waits for, or an error."""


@attrs.define(eq=False)
class Reading:
    """Reads a stream until `stop`, one task at a time.

    `take_in` parses and hands out what came, b"" if that is only the rest of what came before; it returns True if few
    tasks were woken, which will call receive() again soon. `on_taken` is for what no task waits for: it is called soon
    after, when a borrower has gone on with its item. Any of them may call `stop`.
    """

    _stream: trio.abc.ReceiveStream
    _parser: BoundedParsing | None
    _turns: Turns
    _take_in: Callable[[bytes], bool] = attrs.field(kw_only=True)
    _on_taken: Callable[[], None] = attrs.field(kw_only=True)
    _on_end: Callable[[], None] = attrs.field(kw_only=True)
    _on_broken: Callable[[Exception], None] = attrs.field(kw_only=True)

    is_heavy: bool = attrs.field(default=False, init=False)
    """True if what was taken in last took long: then the next read waits for a turn."""
    borrower_sleeps: bool = attrs.field(default=False, init=False)
    is_free: bool = attrs.field(default=False, init=False)
    """True if a task may read in the reader's place now."""
    is_wanted: bool = attrs.field(default=False, init=False)
    """Set by a task that found the place taken: it is offered when it is free."""
    _link: WaitableLink | None = attrs.field(init=False)
    _size: int = attrs.field(default=READ_SMALL, init=False)
    _may_hold_more: bool = attrs.field(default=False, init=False)  # the last read brought all that it had asked for
    _reader: trio.lowlevel.Task | None = attrs.field(default=None, init=False)  # while it waits for its place
    _failure: BaseException | None = attrs.field(default=None, init=False)  # of a borrower's read; the reader raises it
    _is_borrowed: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _is_running: bool = attrs.field(default=False, init=False)
    _wakes_few: bool = attrs.field(default=False, init=False)  # what was read last, so another task may have the place
    # Something is left to parse, by the reader, which lets other sessions have their turns.
    _is_behind: bool = attrs.field(default=False, init=False)

    _spin: Spin = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._spin = Spin(self._turns)
        self._link = self._stream if isinstance(self._stream, WaitableLink) else None

    def take_in_by(self, take_in: Callable[[bytes], bool]) -> None:
        """Let another function take in what comes from now on."""
        self._take_in = take_in

    def stop(self) -> None:
        """The connection is over, and will be closed, which wakes the task that reads."""
        self._is_over = True
        self.is_free = False

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
            if self._failure is not None:  # before a cancellation, which it may have caused
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
            self._on_taken()  # also after what a borrower read that was gone before the reader ran
            while self._is_borrowed:
                await self._wait_for_return()
                self._on_taken()
            if self._failure is not None:
                return
            if self._is_behind:
                await self._catch_up()
            self.is_free = is_read = False
            if self._may_hold_more:
                await trio.lowlevel.checkpoint()
            elif self._spin.is_due() and not self.is_heavy:
                is_read = await self._spin.until(partial(self._read_now, link))
            else:
                await self._sleep(link)
            if not is_read:
                if self.is_heavy:
                    await self._turns.wait()
                self._read_now(link)
            if self._wakes_few and self.is_wanted:
                self._offer()
                await trio.lowlevel.checkpoint()

    async def _catch_up(self) -> None:
        """Parse the rest in turns: a flood of tiny frames must not keep other connections waiting."""
        while self._is_behind and not self._is_over:
            await self._turns.wait()
            if self._is_over:
                return
            self._take_in(b"")
            self._on_taken()
            self._is_behind = self._parser is not None and self._parser.unparsed > 0

    async def _wait_for_return(self) -> None:
        """Sleep until the borrower returns the place."""
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- the borrower

    async def read_for(self, borrower: BorrowingReader) -> None:
        """Read in the reader's place, if it `is_free`, until the borrower is called or has to return the place.

        Cancelled means that nothing was read which did not reach its receiver.
        """
        assert self._link is not None
        self.is_free = False
        self._is_borrowed = True
        try:
            while not (borrower.is_called or self._is_over or self._is_behind or self.is_heavy or self._failure):
                if self._spin.is_due():
                    await self._spin.until(partial(self._look_as_borrower, self._link, borrower))
                else:
                    self.borrower_sleeps = True
                    await self._sleep(self._link)
                    self.borrower_sleeps = False
                    self._read_as_borrower(self._link)
                if not borrower.is_called:  # otherwise the reader comes next
                    self._on_taken()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._on_broken(error)
        finally:
            self.borrower_sleeps = self._is_borrowed = False
            self._offer()
            if self._reader is not None:
                task, self._reader = self._reader, None
                trio.lowlevel.reschedule(task)

    def _look_as_borrower(self, link: WaitableLink, borrower: BorrowingReader) -> bool:
        """Return True if the borrower need not look again: something came, or another task has called it."""
        return borrower.is_called or self._is_over or self._failure is not None or self._read_as_borrower(link)

    def _read_as_borrower(self, link: WaitableLink) -> bool:
        """Read, and leave an error on the way to the reader: it concerns items of other receivers."""
        try:
            try:
                return self._read_now(link)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._on_broken(error)
        except BaseException as error:
            if self._is_running:
                self._failure = error
            if not self._is_running or not isinstance(error, Exception):
                raise
        return True

    def wake_borrower(self) -> None:
        """Called while `borrower_sleeps`; at other times it is reading, and looks whether it was called."""
        if self._link is not None:
            self.borrower_sleeps = False
            self._link.stop_waiting()

    # --- what both do

    def _offer(self) -> None:
        self.is_wanted = False
        self.is_free = not (self._is_over or self._failure or self._is_behind or self.is_heavy)

    async def _sleep(self, link: WaitableLink) -> None:
        clock = self._turns.now
        began = clock()
        await link.wait_readable()
        self._spin.slept(clock() - began)

    def _read_now(self, link: WaitableLink) -> bool:
        """Take in what has come; return False if nothing has, and more may come."""
        if self._is_over:  # the protocol may have gone on to another connection
            return True
        data = link.receive_nowait(self._size)
        if data is None:
            self._may_hold_more = self._wakes_few = False
            return False
        self._took(data)
        return True

    def _took(self, data: bytes) -> None:
        size, asked = len(data), self._size
        self._may_hold_more = size == asked
        self._size = READ_LARGE if size >= READ_SMALL // 2 else READ_SMALL
        self._wakes_few = False
        if not size:
            self._on_end()
            return
        wakes_few = self._take_in(data)
        self._is_behind = self._parser is not None and self._parser.unparsed > 0
        self._wakes_few = wakes_few and size < LITTLE_BYTES and not self.is_heavy
