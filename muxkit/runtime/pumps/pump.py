"""`Pump`, the base class of all pumps.

A pump runs an engine on a link. This class starts the reader and the writer of a connection, sets its alarms, passes
on the engine's events, records why the connection is lost, and closes the link. A subclass for each kind of link does
the reading and writing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Final, Generic

import trio

from muxkit._errors import RemoteProtocolError
from muxkit._observer import tell_limit
from muxkit.core import Engine, Reason
from muxkit.runtime._errors import CLOSED_HERE, LossRecord, Phase, Side, can_heal
from muxkit.runtime._links import peer_of
from muxkit.runtime.admission import current_place
from muxkit.runtime.pumps.alarms import Alarm, Sleeper
from muxkit.runtime.pumps.clock import Clock
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.turns import turns

PARTING_TIMEOUT = 1.0  # seconds for sending the peer the reason why the connection ends
CLOSE_TIMEOUT = 1.0  # seconds for closing a link without waiting for the peer
# If a sender calls within this many seconds after the last write, the writer task writes its message, together with
# those of other senders.
INLINE_PAUSE = 30e-6
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)
BLOCK = 8 * 1024 * 1024  # bytes; larger than the buffered data of one connection


class Pump(Clock, Sleeper, Generic[EventT]):
    """Runs an engine on a link until the connection is closed or lost. Each subclass handles one kind of link."""

    def __init__(self, link: object, engine: Engine[EventT], owner: PumpOwner[EventT]) -> None:
        self._owner = owner
        self._rules: Engine[EventT] = engine  # each subclass stores the same engine with a more specific type
        self._observer = owner.observer
        self._facts = owner.facts
        self._turns = turns()
        self._nursery: trio.Nursery | None = None  # the nursery of the writer task
        self._is_writer_awake = False
        self._sleeper: trio.lowlevel.Task | None = None  # the writer task, while it sleeps
        self._idle = trio.lowlevel.ParkingLot()  # tasks that wait until all output has been written
        self._hanging_up = False  # True once `hang_up` was called; nothing is written after that
        self._reminder = owner.reminder
        if self._reminder is not None:
            self._reminder.attach(self)
        self._due = math.inf  # when the clock wakes up
        self._alarm: Alarm | None = None
        # An error that a system task has met when it worked for this connection. `run` raises it.
        self._failure: BaseException | None = None
        self.peer: str = peer_of(link)
        self._loss_record = LossRecord(self.peer)
        self.is_lost: bool = False
        self.loss: Final = self._loss_record.error
        """Creates the error for the lost connection. Each task that raises it needs its own error object."""
        self.hung_up: trio.Event = trio.Event()
        """Set when the connection is closed or lost."""
        self.bytes_sent = 0
        self.phase: Phase = "open"
        """The current phase of the connection. The error contains it if the connection is lost."""
        self._parting: Sequence[bytes] = ()  # the last bytes to send before the connection is closed
        self._parting_until = -math.inf
        self._farewell = Reason()  # the reason for the peer, if the link can transmit one
        self._transport = link
        self._place = current_place()  # this connection's slot at its listener, until the peer has sent a valid frame

    # --- running and losing the connection

    async def run(self) -> None:
        """Run the connection until it is closed or lost. Errors of the link end this normally, and don't raise."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._start_writing()
                if self.is_lost:
                    return
                if (due := self._next_deadline()) > trio.current_time():
                    self.wake_at(due)
                else:
                    self.handle_alarm(trio.current_time())  # this starts the engine's timers
                # When this returns, the writer may still have to answer a peer that has ended its direction.
                await self._move("reading", partial(self._read, nursery))
            if self._failure is not None:
                raise self._failure
        finally:
            self.lose(CLOSED_HERE, by="local")
            # Shield the cleanup for a short time, because a cancellation from outside would replace an error.
            if self._parting:
                with trio.CancelScope(deadline=self._parting_until, shield=True):
                    await self._part()
            await self._close_link()

    async def _move(self, doing: str, move: Callable[[], Awaitable[None]]) -> None:
        try:
            await move()
        except BROKEN as error:
            self._broke(doing, error)

    def _broke(self, doing: str, error: Exception) -> None:
        """Lose the connection after an error of the link."""
        if getattr(self._transport, "peer_reason", None):
            self.lose("the peer closed the connection", by="peer", cause=error)
        else:
            self.lose(f"the connection broke while {doing}", by="network", cause=error)

    def lose(
        self,
        reason: str,
        *,
        by: Side,
        cause: BaseException | None = None,
        parting: Sequence[bytes] = (),
        farewell: Reason | None = None,
    ) -> None:
        """Mark the connection as lost, cancel its tasks, and notify the owner. Only the first call has an effect.

        Args:
            reason: The text of the error that calls on this connection raise.
            by: The side that has ended the connection.
            cause: The exception that has caused the loss.
            parting: The last bytes for the peer. They are sent if the link still allows it.
            farewell: The reason for the peer, which is sent by links that can transmit a reason.
        """
        if self.is_lost:
            return
        self._farewell = farewell or Reason()
        if (told := getattr(self._transport, "peer_reason", None)) is not None:
            self.told(told)
        if self._hanging_up and not isinstance(cause, RemoteProtocolError):
            reason, by, cause = CLOSED_HERE, "local", None
        self.is_lost = True
        self._loss_record.record(
            reason,
            by=by,
            cause=cause,
            unsent=self.unsent + self._owner.queued_bytes(),
            phase=self.phase,
            hint=self._hint(by, cause),
            found=self._found(by, cause),
        )
        self._parting_until = trio.current_time() + PARTING_TIMEOUT
        self._parting = self._last_words(parting)
        self._stop(cause)
        self._cancel_tasks()
        if self._alarm is not None:
            self._alarm.cancel()
        self.hung_up.set()
        self._idle.unpark_all()
        if self._observer is not None and by == "network":
            self._observer.error(self.loss())
        if self._facts is not None:
            tell_limit(self._facts, cause)
            if by == "network":
                self._facts.broken()
        self._owner.handle_lost()

    def _cancel_tasks(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def told(self, reason: Reason) -> None:
        """Record the peer's reason for ending the connection. The end of the connection follows."""
        self._loss_record.tell(reason)

    def _hint(self, by: Side, cause: BaseException | None) -> str | None:
        """Return a hint about the probable reason of a loss for the error message, or None."""
        return None

    def _found(self, by: Side, cause: BaseException | None) -> str | None:
        """Return the name of another protocol that the peer probably speaks, if that is why the connection ended."""
        return None

    @property
    def foreign(self) -> str:
        """The end of an error message that names the peer's protocol, if its first bytes look like another protocol."""
        return ""

    def _last_words(self, parting: Sequence[bytes]) -> Sequence[bytes]:
        """Return the bytes that can still be sent of the last bytes for the peer."""
        return parting

    async def _part(self) -> None:
        """Send the last bytes, and wait until the peer has read them if possible."""

    @property
    def is_refusal(self) -> bool:
        """True if the peer has refused this side with a code from 400 to 499 or in the handshake of the transport.

        A refusal in the handshake can arrive in an open session, because a client of TLS 1.3 may begin its session
        before the server has checked the client's certificate.
        """
        return self._loss_record.is_refusal or (self.is_lost and not can_heal(self.loss()))

    @property
    def is_violated(self) -> bool:
        """True if the connection is lost because the peer broke a rule."""
        return self._loss_record.is_violation

    @property
    def unsent(self) -> int:
        """Number of bytes that the pump has taken from the engine and the link hasn't accepted."""
        return 0

    # --- events and time

    def dispatch_events(self, events: Sequence[EventT] | None = None) -> None:
        """Dispatch the engine's events, and those that are caused by handling them.

        `events` are events that the engine has returned. Without them, its pending events are dispatched.
        """
        if not events:
            events = self._rules.events()
        while events:
            self._owner.handle_events(events)
            if self._place is not None:
                self._heard()
            events = self._rules.events()

    def _heard(self) -> None:
        """Notify the listener that the peer has sent a valid frame."""
        if self._place is not None and not self.is_lost:
            self._place.establish()
            self._place = None

    def _dispatch(self, events: Sequence[EventT] | None = None) -> None:
        """Dispatch the events of a read or a deadline and the events that follow from them, and request a write."""
        self.dispatch_events(events)
        self.request_write()
        self.rearm()

    def handle_alarm(self, now: float) -> None:
        """Handle the deadlines that are due, and set the alarm to the next one."""
        self._due = math.inf
        try:
            if self._reminder is not None:
                self._reminder.ring_if_due(now)
            self._dispatch(self._rules.handle_deadline(now))
            self.wake_at(self._next_deadline())
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Let `run` raise an error that a system task has met when it worked for this connection."""
        self._failure = error
        self._cancel_tasks()

    def _engine_deadline(self) -> float | None:
        """Return the engine's next deadline. Subclasses return a later one if the engine can't act at its deadline."""
        return self._rules.next_deadline()

    def _next_deadline(self) -> float:
        deadline = self._engine_deadline()
        due = math.inf if self._reminder is None else self._reminder.due
        return due if deadline is None or due < deadline else deadline

    def rearm(self) -> None:
        """Make the clock wake up earlier if the engine's next deadline is earlier now.

        Call this after a command that may have set a deadline. If the next deadline is later now, the clock wakes up
        once without effect, and then sleeps until the new deadline.
        """
        deadline = self._engine_deadline()
        if deadline is not None and deadline < self._due:
            self.wake_at(deadline)

    def wake_at(self, due: float) -> None:
        if due < self._due and not self.is_lost:
            self._due = due
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._turns.alarms.set(due, self)

    # --- waking the writer

    def _start_writing(self) -> None:
        """Start the writer task. A subclass can put that off until the writer has to wait for the transport."""
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the writer task, or start it if it hasn't been started."""
        if self._is_writer_awake or self._nursery is None or self.is_lost or self._hanging_up:
            return
        self._is_writer_awake = True
        if self._sleeper is None:
            self._nursery.start_soon(self._move, "writing", self._write)
        else:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)

    async def _sleep_until_requested(self) -> None:
        self._is_writer_awake = False
        self._sleeper = trio.lowlevel.current_task()
        if self._idle:
            self._idle.unpark_all()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper, self._is_writer_awake = None, True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- methods of the subclasses

    @abstractmethod
    def request_write(self) -> None:
        """Write the engine's output now, or wake the writer. Call this whenever the engine may have new output."""

    def request_write_soon(self) -> None:
        """Write the engine's output within two passes of Trio's loop, because the caller will probably add to it."""
        self.request_write()

    @abstractmethod
    async def flushed(self) -> None:
        """Wait until all output that the engine may send now has been written to the link."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the connection cleanly, as far as the link has a clean way to close."""

    @abstractmethod
    async def _read(self, nursery: trio.Nursery) -> None:
        """Read until the connection is closed or lost."""

    @abstractmethod
    async def _write(self) -> None:
        """Write until the connection is closed or lost."""

    @abstractmethod
    def _stop(self, cause: BaseException | None) -> None:
        """Drop the unwritten output, because the connection is lost."""

    @abstractmethod
    async def _close_link(self) -> None:
        """Close the link, within `CLOSE_TIMEOUT` seconds even if the pump is cancelled. Don't wait for the peer."""


@cache  # one call per process is enough, and later calls would have to clear the memory of the block
def keep_freed_memory() -> None:
    """Let the process keep freed memory up to twice `BLOCK`, which makes bulk transfers faster with glibc.

    If more than 128 KiB at the end of the heap are free, glibc returns the memory to the kernel. When the process uses
    the memory again, each page causes a page fault. With a few messages of 64 KiB in flight, allocating a message then
    takes 20 times as long as copying it. glibc raises the limit to twice the size of the largest block that was ever
    freed, so we allocate and free one large block. Its pages are never touched, so this is quick. With other C
    libraries, this has no effect.
    """
    bytes(BLOCK)
