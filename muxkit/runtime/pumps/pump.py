"""What the pumps share: the life and the loss of a connection, its clock, its events, and the sleep of its writer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Final, Generic, NoReturn

import trio

from muxkit._errors import RemoteProtocolError
from muxkit._observer import tell_limit
from muxkit.core import Engine, Reason
from muxkit.runtime._errors import CLOSED_HERE, LossRecord, Phase, Side, can_heal
from muxkit.runtime._links import peer_of
from muxkit.runtime.admission import current_place
from muxkit.runtime.pumps.clock import Clock
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.turns import turns

PARTING_TIMEOUT = 1.0  # s, for telling the peer why the connection ends
CLOSE_TIMEOUT = 1.0  # s, for closing a link without goodbye
HELD_UP_SECONDS = 1.0  # a clock that is so late was held up with the whole process, or the machine slept
HELD_UP_TURNS = 10  # a socket that several links share hands on what it reads, and a peer in this process answers first
INLINE_PAUSE = 30e-6  # s; senders that come faster than this are served together, by the writer
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)
BLOCK = 8 * 1024 * 1024  # bytes; larger than what one connection's windows hold at a time


async def read_first(due: float) -> None:
    """After a clock that is late, let what has come meanwhile be read, before its peer is taken for silent."""
    if trio.current_time() - due >= HELD_UP_SECONDS:
        for _ in range(HELD_UP_TURNS):
            await trio.lowlevel.checkpoint()


class Pump(Clock, Generic[EventT]):
    """One reader, one writer and one clock that run an engine on a link until the connection is over.

    A subclass knows one kind of link.
    """

    def __init__(self, link: object, engine: Engine[EventT], owner: PumpOwner[EventT]) -> None:
        self._owner = owner
        self._rules: Engine[EventT] = engine  # a subclass has the same object, by the type that its links need
        self._observer = owner.observer
        self._facts = owner.facts
        self._turns = turns()
        self._sleeper: trio.lowlevel.Task | None = None  # the writer, while it sleeps
        self._idle = trio.lowlevel.ParkingLot()  # of tasks that wait until everything is written
        self._tasks = trio.CancelScope()
        self._hanging_up = False  # then nothing is written any more
        self._reminder = owner.reminder
        if self._reminder is not None:
            self._reminder.attach(self)
        self._due = math.inf  # when the clock wakes
        self._alarm = trio.CancelScope()
        self.peer: str = peer_of(link)
        self._loss_record = LossRecord(self.peer)
        self.is_lost: bool = False
        self.loss: Final = self._loss_record.error
        """Makes an error that says why the connection is over; each task that raises it needs one of its own."""
        self.hung_up: trio.Event = trio.Event()
        """Set when the connection is over."""
        self.bytes_sent = 0
        self.phase: Phase = "open"
        """When the connection is, for the error that says when it was lost."""
        self._parting: Sequence[bytes] = ()  # to send before the connection is closed
        self._parting_until = -math.inf
        self._farewell = Reason()  # for a link that can carry one
        self._transport = link
        self._place = current_place()  # of this connection at its listener, until the peer has said a valid word

    # --- the life of the connection

    async def run(self) -> None:
        """Move bytes until the connection is over; raises nothing that a connection may expect."""
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._move, "writing", self._write)
                    nursery.start_soon(self._keep_time)
                    await self._move("reading", partial(self._read, nursery))
        finally:
            self.lose(CLOSED_HERE, by="local")
            # Shielded, though briefly: a cancellation from outside would take the place of an error.
            if self._parting:
                with trio.CancelScope(deadline=self._parting_until, shield=True):
                    await self._part()
            with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await self._close_link()

    async def _move(self, doing: str, move: Callable[[], Awaitable[None]]) -> None:
        try:
            await move()
        except BROKEN as error:
            self._broke(doing, error)

    def _broke(self, doing: str, error: Exception) -> None:
        """The link says that it is gone."""
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
        """The connection is over; the first reason counts.

        `parting` is sent to the peer if that can be done, and `farewell` by a link that can carry a reason.
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
        self._tasks.cancel()
        self.hung_up.set()
        self._idle.unpark_all()
        if self._observer is not None and by == "network":
            self._observer.error(self.loss())
        if self._facts is not None:
            tell_limit(self._facts, cause)
            if by == "network":
                self._facts.broken()
        self._owner.handle_lost()

    def told(self, reason: Reason) -> None:
        """The peer said why it ends the connection, which follows."""
        self._loss_record.tell(reason)

    def _hint(self, by: Side, cause: BaseException | None) -> str | None:
        """Return what may be the reason of a loss, and what to try."""
        return None

    def _found(self, by: Side, cause: BaseException | None) -> str | None:
        """Return the name of another protocol that the peer probably speaks, if that is why the connection ended."""
        return None

    @property
    def foreign(self) -> str:
        """What the peer probably speaks, as the end of a sentence, if what it sent first looks like something else."""
        return ""

    def _last_words(self, parting: Sequence[bytes]) -> Sequence[bytes]:
        """Return what can still be sent of what should be."""
        return parting

    async def _part(self) -> None:
        """Send the last bytes, and let the peer read them."""

    @property
    def is_refusal(self) -> bool:
        """True if the peer sent this side away, by a code from 400 to 499 or in the handshake of the transport.

        A client of TLS 1.3 may begin its session before the server has seen its certificate.
        """
        return self._loss_record.is_refusal or (self.is_lost and not can_heal(self.loss()))

    @property
    def is_violated(self) -> bool:
        """True if the connection is over because the peer broke a rule."""
        return self._loss_record.is_violation

    @property
    def unsent(self) -> int:
        """Bytes that have left the engine and that the link has not taken."""
        return 0

    # --- events and time

    def dispatch_events(self) -> None:
        """Hand out what a command made the engine tell, and what follows from that."""
        while events := self._rules.events():
            self._owner.handle_events(events)
            if self._place is not None:
                self._heard()

    def _handle(self, events: Sequence[EventT] | None) -> None:
        """Handle events that the engine returned, and then the ones that handling them caused."""
        if events:
            self._owner.handle_events(events)
            if self._place is not None:
                self._heard()
        self.dispatch_events()

    def _heard(self) -> None:
        """Report to the listener that the peer has said something that the engine understood."""
        if self._place is not None and not self.is_lost:
            self._place.establish()
            self._place = None

    def _dispatch(self, events: Sequence[EventT] | None = None) -> None:
        """Handle the events that a read or a deadline returned, then the ones that they caused, and write."""
        self._handle(events)
        self.request_write()
        self.rearm()

    async def _keep_time(self) -> NoReturn:
        while True:
            self._due = self._next_deadline()
            self._alarm = trio.CancelScope(deadline=self._due)
            with self._alarm:
                await trio.sleep_forever()
            await read_first(self._due)
            now = trio.current_time()
            if self._reminder is not None:
                self._reminder.ring_if_due(now)
            self._dispatch(self._rules.handle_deadline(now))

    def _engine_deadline(self) -> float | None:
        """Return when the engine wants to be called; a subclass may know why it must wait until later."""
        return self._rules.next_deadline()

    def _next_deadline(self) -> float:
        deadline = self._engine_deadline()
        due = math.inf if self._reminder is None else self._reminder.due
        return due if deadline is None or due < deadline else deadline

    def rearm(self) -> None:
        """Let the clock wake earlier if the deadline has come nearer; a later one is noticed at the wake-up.

        To be called after a command that may have set a deadline.
        """
        deadline = self._next_deadline()
        if deadline < self._due:
            self._alarm.deadline = self._due = deadline

    # --- the writer's sleep

    def _wake_writer(self) -> None:
        if self._sleeper is not None and not self.is_lost and not self._hanging_up:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)

    async def _sleep_until_requested(self) -> None:
        self._sleeper = trio.lowlevel.current_task()
        if self._idle:
            self._idle.unpark_all()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- what depends on the link

    @abstractmethod
    def request_write(self) -> None:
        """The engine may have something to write: write it now, or wake the writer."""

    @abstractmethod
    async def flushed(self) -> None:
        """Wait until everything that the engine may send now has left."""

    @abstractmethod
    async def hang_up(self) -> None:
        """End the connection in the orderly way that the link has."""

    @abstractmethod
    async def _read(self, nursery: trio.Nursery) -> None:
        """Read until the connection is over."""

    @abstractmethod
    async def _write(self) -> None:
        """Write until the connection is over."""

    @abstractmethod
    def _stop(self, cause: BaseException | None) -> None:
        """The connection is over: drop what was not written, and let go of the link."""

    @abstractmethod
    async def _close_link(self) -> None:
        """Close the link without waiting for the peer."""


@cache  # once is enough, and later the block would have to be cleared
def keep_freed_memory() -> None:
    """Let the process keep freed memory up to twice `BLOCK`, which makes bulk transfers faster with glibc.

    glibc returns what is free at the end of its heap to the kernel as soon as that is more than 128 KiB, and each page
    costs a fault when it is wanted again: a few messages of 64 KiB in flight then cost 20 times as much to make as to
    copy. It raises that bound to twice the size of the largest block that was ever freed. The pages of this block are
    never touched, so this is quick; with other C libraries it does nothing.
    """
    bytes(BLOCK)
