"""Reads one byte stream, for the pump that owns the stream and for all tasks that receive from it.

Each connection has a *reader task*. The task waits until the stream has bytes, and the owner of the stream parses them
and delivers each message to the task that waits for it. That delivery has a price: Trio runs the receiving task in its
next pass, after another look at the kernel, so each round trip takes one pass more than raw Trio needs. We avoid that
pass by letting a task that is blocked in `receive()` *borrow* the reader's job. The borrower waits on the stream
itself, has the bytes of all channels parsed, and returns the job as soon as its own message has come. Decision 15 has
the measurements.

We keep the answer to "who may read now?" in one place, `Reading.state`:

- READING: the reader task has the job. It waits for bytes, or it reads them.
- OFFERED: the first receiver that comes may borrow the job. The reader offers it until the next pass of Trio's loop,
  if a receiver has asked for it and the latest read was small. A borrower that returns the job offers it as well, so
  that the same task can borrow it again. Meanwhile the reader task sleeps. If nobody borrows the job, it is woken in
  the next pass.
- LENT: a borrower has the job. The reader task sleeps.
- BEHIND: a read brought more frames than one turn of processor time allows. The reader task has the rest parsed, turn
  by turn, and nobody reads until nothing is left. A borrower leaves such a backlog to the reader task.
- CLOSED: nobody reads any more. The owner has stopped us, the reader task has ended, or a borrower has failed.

`ReaderStep` contains the steps from one state to another, and `READER` is the table of all legal steps. Any other step
is a bug in muxkit and raises `RuntimeError`. The other attributes of `Reading` don't decide who may read. They record
the size of the latest read, if a receiver has asked for the job, and whether the borrower sleeps. The borrower may
still sleep for a moment after the state has become CLOSED.

These rules make borrowing safe:

- At most one task reads. Only the step BORROW lets a task other than the reader read, and it needs OFFERED, in which
  the reader task doesn't read.
- A borrower awaits nothing between taking bytes from the stream and delivering the last message in them. When it is
  cancelled, all bytes that it has read are therefore delivered, or are left to the reader task in the state BEHIND.
- An error of the stream goes to `ReadingOwner.handle_broken`, whichever task has met it. Any other error that a
  borrower meets while it reads may concern messages of other tasks, so it must not come out of the borrower's
  `receive()`. We close, keep the error, and the reader task raises it. Only an error that isn't an `Exception`, such as
  `KeyboardInterrupt`, comes out of both tasks.
- The clock is rearmed after each read. If a borrower has got its message, that happens in the next pass, when its offer
  expires. So deadlines are kept that a borrowed read has set, and an answer doesn't have to wait for them.

A stream that can't be waited for (that isn't a `WaitableLink`) is read by the reader task alone, so its states are
READING, BEHIND and CLOSED.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Final, Protocol

import attrs
import trio

from muxkit.core import BoundedParsing
from muxkit.runtime._links import WaitableLink
from muxkit.runtime.pumps.spin import Spin
from muxkit.runtime.pumps.turns import Turns

READ_SMALL = 64 * 1024  # size of a read in bytes while reads return less than half of this
READ_LARGE = 512 * 1024  # size of a read in bytes while reads return at least half of READ_SMALL
# If a read returned at least this many bytes, the receiving task will be busy with them, and won't read again soon.
LITTLE_BYTES = 4 * 1024


class ReaderState(Enum):
    """Who may read the stream now. The module's docstring explains each state."""

    READING = "reading"
    OFFERED = "offered"
    LENT = "lent"
    BEHIND = "behind"
    CLOSED = "closed"


class ReaderStep(Enum):
    """A step from one state of the reader to another."""

    OFFER = "offer"
    """Let the first receiver that comes borrow the job."""
    BORROW = "borrow"
    """A receiver takes the job."""
    RESUME = "resume"
    """The reader task takes the job back."""
    FALL_BEHIND = "fall behind"
    """A read has left frames to parse."""
    CATCH_UP = "catch up"
    """The reader task has parsed them all."""
    CLOSE = "close"
    """Nothing may be read any more."""


# The hash of an enum's member is a call in Python. Each round trip looks several steps up, so use the hash of objects.
ReaderState.__hash__ = object.__hash__  # type: ignore[method-assign]
ReaderStep.__hash__ = object.__hash__  # type: ignore[method-assign]

# Reading a member of an enum is slow in Python 3.11 as well.
READING, OFFERED, LENT, BEHIND, CLOSED = ReaderState
OFFER, BORROW, RESUME, FALL_BEHIND, CATCH_UP, CLOSE = ReaderStep


class _Steps(dict[tuple[ReaderState, ReaderStep], ReaderState]):
    """A table of steps that refuses any other step. It is a dict, so that a legal step costs no call."""

    def __missing__(self, key: tuple[ReaderState, ReaderStep]) -> ReaderState:
        state, step = key
        legal = " or ".join(repr(other.value) for before, other in self if before is state) or "no further step"
        raise RuntimeError(f"illegal step of the reader in state {state.value!r}: expected {legal}, got {step.value!r}")


READER: Final[Mapping[tuple[ReaderState, ReaderStep], ReaderState]] = _Steps(
    {
        (READING, OFFER): OFFERED,
        (READING, FALL_BEHIND): BEHIND,
        (READING, CLOSE): CLOSED,
        (OFFERED, BORROW): LENT,
        (OFFERED, RESUME): READING,
        (OFFERED, CLOSE): CLOSED,
        (LENT, OFFER): OFFERED,
        (LENT, RESUME): READING,  # after a long read, the job isn't offered, because the next read must wait for a turn
        (LENT, FALL_BEHIND): BEHIND,
        (LENT, CLOSE): CLOSED,
        (BEHIND, CATCH_UP): READING,
        (BEHIND, CLOSE): CLOSED,
    }
)


class ReadingOwner(ABC):
    """Handles the bytes that `Reading` reads. The owner is the pump, which calls the engine and the session.

    Each of these methods may call `Reading.stop`. `handle_bytes`, `handle_end` and `handle_broken` run in the task that
    has the reader's job, and must not raise because of one receiver's message.
    """

    @abstractmethod
    def handle_bytes(self, data: bytes) -> bool:
        """Parse the bytes and deliver the messages in them.

        `b""` asks to parse more of the bytes that earlier calls have left. The owner sets `Reading.is_heavy`, and
        returns True if the bytes woke only few tasks, which will probably call `receive()` again soon.
        """

    @abstractmethod
    def handle_end(self) -> None:
        """Handle the end of the stream. If the connection isn't lost by it, the owner calls `Reading.stop`."""

    @abstractmethod
    def handle_broken(self, error: Exception) -> None:
        """Handle an error of the stream: the connection is lost."""

    @abstractmethod
    def rearm(self) -> None:
        """Rearm the clock after `handle_bytes`, which may have set an earlier deadline.

        Receivers don't have to wait for that. So a borrower that has got its message leaves this to the reader task.
        """


class BorrowingReader(Protocol):
    """A task that waits for a message, which only arrives if a task reads the stream."""

    is_called: bool
    """True once the task has its message or an error."""


@attrs.define(eq=False)
class Reading:
    """Reads a stream until `stop`, one task at a time. The module's docstring explains how tasks share that job."""

    _stream: trio.abc.ReceiveStream
    _parser: BoundedParsing | None
    _turns: Turns
    _owner: ReadingOwner

    state: ReaderState = attrs.field(default=READING, init=False)
    is_heavy: bool = attrs.field(default=False, init=False)
    """True if handling the latest read took long, so the next read has to wait for a turn. The owner sets this."""
    is_wanted: bool = attrs.field(default=False, init=False)
    """Set by a receiver that has to wait. The reader offers its job only if a receiver has asked for it like this."""
    borrower_sleeps: bool = attrs.field(default=False, init=False)
    """True while the borrower waits on the stream. Otherwise it is running, and will notice that it was called."""

    _link: WaitableLink | None = attrs.field(init=False)
    _size: int = attrs.field(default=READ_SMALL, init=False)
    # True if the latest read returned as many bytes as were requested, so the stream may contain more
    _may_hold_more: bool = attrs.field(default=False, init=False)
    # True if the latest read was small and woke few tasks
    _may_offer: bool = attrs.field(default=False, init=False)
    # The reader task, while its job is offered or lent
    _reader: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    # The exception that the reader task has to raise
    _failure: BaseException | None = attrs.field(default=None, init=False)
    _spin: Spin = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._spin = Spin(self._turns)
        self._link = self._stream if isinstance(self._stream, WaitableLink) else None

    def stop(self) -> None:
        """Stop reading. This doesn't wake a task that waits on the stream. Closing the stream wakes the task."""
        if self.state is not CLOSED:
            self.state = READER[self.state, CLOSE]

    # --- the reader task

    async def run(self) -> None:
        """Read until the stream ends, breaks, or `stop` is called. Raises the failure of a borrower."""
        try:
            if self._link is None:
                await self._receive(self._stream)
            else:
                await self._wait_and_read(self._link)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._broke(error)
        finally:
            self.stop()  # a borrower couldn't return the job any more
            if self._failure is not None:  # raise this instead of a cancellation, which the failure may have caused
                raise self._failure

    async def _receive(self, stream: trio.abc.ReceiveStream) -> None:
        while self.state is not CLOSED:
            data = await stream.receive_some(self._size)
            if self.is_heavy:
                await self._turns.wait()
            self._took(data if type(data) is bytes else bytes(data))
            self._owner.rearm()
            data = b""  # don't keep the bytes alive while waiting for more
            if self.state is BEHIND:
                await self._catch_up()

    async def _wait_and_read(self, link: WaitableLink) -> None:
        while self.state is not CLOSED:
            self._owner.rearm()
            if self.state is OFFERED or self.state is LENT:
                await self._sleep_until_returned()
            elif self.state is BEHIND:
                await self._catch_up()
            else:
                await self._read_once(link)
                if self._may_offer and self.is_wanted and self.state is READING:
                    self.is_wanted = False
                    self._offer()

    async def _read_once(self, link: WaitableLink) -> None:
        """Wait until the stream has bytes, and read them. It may turn out that there are none."""
        is_read = False
        if self._may_hold_more:
            await trio.lowlevel.checkpoint()
        elif self._spin.is_due() and not self.is_heavy:
            is_read = await self._spin.until(partial(self._read_now, link))
        else:
            began = self._turns.now()
            await link.wait_readable()
            self._spin.slept(self._turns.now() - began)
        if not is_read:
            if self.is_heavy:
                await self._turns.wait()
            self._read_now(link)

    async def _catch_up(self) -> None:
        """Parse the rest in turns, because a flood of tiny frames must not keep other connections waiting."""
        while self.state is BEHIND:
            await self._turns.wait()
            if self.state is CLOSED:
                return
            self._owner.handle_bytes(b"")
            self._owner.rearm()
            if self.state is BEHIND and not (self._parser is not None and self._parser.unparsed):
                self.state = READER[BEHIND, CATCH_UP]

    async def _sleep_until_returned(self) -> None:
        """Sleep until the reader task has to take the job back, or the stream is closed."""
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake_reader(self) -> None:
        if self._reader is not None:
            task, self._reader = self._reader, None
            trio.lowlevel.reschedule(task)

    # --- offers

    def _offer(self) -> None:
        """Let the first receiver that comes borrow the job, until the next pass."""
        self.state = READER[self.state, OFFER]
        self._turns.next_pass.call(self._offer_expired)

    def _offer_expired(self) -> None:
        """Take the job back if nobody has borrowed it."""
        self._owner.rearm()  # a borrower may have left this to us
        if self.state is OFFERED:
            self.state = READER[OFFERED, RESUME]
        if self.state is not LENT:
            self._wake_reader()

    # --- the borrower

    async def read_for(self, borrower: BorrowingReader) -> None:
        """Borrow the reader's job, which must be OFFERED, until the borrower is called or has to return the job.

        The borrower may have to return the job before it is called. Then it waits as any receiver does. If this is
        cancelled, all messages that were read have reached their receivers.
        """
        link = self._link
        assert link is not None  # the job of reading another kind of stream is never offered
        self.state = READER[self.state, BORROW]
        try:
            while self.state is LENT and not (borrower.is_called or self.is_heavy):
                if self._spin.is_due():
                    await self._spin.until(partial(self._look_as_borrower, link, borrower))
                else:
                    self.borrower_sleeps = True
                    began = self._turns.now()
                    await link.wait_readable()
                    self._spin.slept(self._turns.now() - began)
                    self.borrower_sleeps = False
                    self._read_now(link)
                if not borrower.is_called:  # otherwise the offer expires in the next pass
                    self._owner.rearm()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._broke(error)
        finally:
            self.borrower_sleeps = self.is_wanted = False
            if self.state is LENT and not self.is_heavy:
                self._offer()
            else:
                if self.state is LENT:
                    self.state = READER[LENT, RESUME]
                self._wake_reader()

    def _look_as_borrower(self, link: WaitableLink, borrower: BorrowingReader) -> bool:
        """Return True if the borrower can stop looking, since it has read or another task has called it."""
        return borrower.is_called or self._read_now(link)

    def wake_borrower(self) -> None:
        """Wake the borrower, which has been called. Only to be used while `borrower_sleeps`."""
        if self._link is not None:
            self.borrower_sleeps = False
            self._link.stop_waiting()

    # --- for both

    def _read_now(self, link: WaitableLink) -> bool:
        """Read the bytes that have arrived. Return False if there are none, and some may still come.

        If anything fails other than the stream, the reader task raises the exception, whichever task has read.
        """
        if self.state is CLOSED:  # don't read, because the session may have resumed on another connection
            return True
        try:
            data = link.receive_nowait(self._size)
            if data is None:
                self._may_hold_more = self._may_offer = False
                return False
            self._took(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._broke(error)
        except BaseException as error:
            self._failure = error
            self.stop()
            if not isinstance(error, Exception):
                raise
        return True

    def _broke(self, error: Exception) -> None:
        self.stop()
        self._owner.handle_broken(error)

    def _took(self, data: bytes) -> None:
        """Handle the bytes of one read, and use their number to decide how to read next."""
        size, asked = len(data), self._size
        self._may_hold_more = size == asked
        self._size = READ_LARGE if size >= READ_SMALL // 2 else READ_SMALL
        self._may_offer = False
        if not size:
            self._owner.handle_end()
            return
        wakes_few = self._owner.handle_bytes(data)
        if self._parser is not None and self._parser.unparsed and self.state is not CLOSED:
            self.state = READER[self.state, FALL_BEHIND]
        self._may_offer = wakes_few and size < LITTLE_BYTES and not self.is_heavy
