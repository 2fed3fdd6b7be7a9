"""Who moves the bytes? One reader, one writer and one clock for an engine on a byte stream.

The reader never waits for the writer: replies that the engine owes are merged state inside it, so both ends can
push at once over a link that blocks. The writer is the only one in `send_all`, and a sender's cancellation never
reaches it, so no frame is ever cut. When nothing is queued a sender writes at once, on the link's own nowait path.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.core import BoundedParsing, SeparateTimers
from muxkit.runtime._allocator import keep_freed_memory
from muxkit.runtime._clock import Clock
from muxkit.runtime._ending import LossRecord
from muxkit.runtime._links import Described, NowaitLink
from muxkit.runtime._reading import Reading
from muxkit.runtime._turns import LONG_TURN, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer, StreamEngine
    from muxkit.runtime._errors import Side
    from muxkit.runtime._gate import Queued

EventT = TypeVar("EventT")

TURN_FRAMES = 1024  # frames to parse in one turn at most, however cheap they are
STEP_FRAMES = 128  # frames to parse before their events are handed out, and the clock is asked whether the turn is over
BRIEF = 256  # bytes; what so little brings takes no longer than asking the clock is worth
WRITE = 256 * 1024  # bytes to pull at most for one write
JOIN_BELOW = 4 * 1024  # bytes a buffer on average: join smaller ones, hand over larger ones as they are
CLOSE_TIMEOUT = 1.0  # s, for closing a stream without goodbye
BURST = 2  # events at once: for more than one, who will write what they answer together
LARGE = 48 * 1024  # bytes queued: two such messages cost a third less with one write than with two
LARGE_PAIR = 128 * 1024
LATE = 250e-6  # s; the writer was woken so long ago and others had their turns: whoever rings writes what there is
INLINE_PAUSE = 30e-6  # s; senders who come faster than this are served together by the writer


class StreamPump(Generic[EventT]):
    """Runs a `StreamEngine` over a `trio.abc.Stream`.

    `on_events` gets what the engine tells, `on_written` is called when bytes left the engine, `on_lost` once when
    the connection is over, whatever the reason. `outbox` says how much waits for the transport: with it, large
    messages go out in pairs.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        engine: StreamEngine[EventT],
        *,
        on_events: Callable[[Sequence[EventT]], None],
        on_written: Callable[[], None],
        on_lost: Callable[[], None],
        queued: Callable[[], int],
        outbox: Queued | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._on_events = on_events
        self._on_written = on_written
        self._on_lost = on_lost
        self._queued = queued
        self._outbox = outbox
        self._observer = observer
        keep_freed_memory()
        self._nowait = stream if isinstance(stream, NowaitLink) else None
        self._sleeper: trio.lowlevel.Task | None = None  # the writer, while it sleeps
        self._is_writing = False
        self._was_requested = False  # while somebody wrote
        self._burst = False  # what came last was for many, who will all have something to write in a moment
        self._pulled = 0  # bytes that left the engine the last time
        self._carry: list[Buffer] = []  # pulled, and not taken by the transport yet
        self._idle = trio.lowlevel.ParkingLot()  # those who wait for everything to be written
        self._wrote_at = perf_counter()
        self._time = trio.lowlevel.current_clock().current_time  # `trio.current_time` asks for the clock each time
        self._paced = engine if isinstance(engine, BoundedParsing) else None
        if self._paced is not None:
            self._paced.frames_at_once = STEP_FRAMES
        self._turns = turns()
        self._eager = engine if isinstance(engine, SeparateTimers) else None
        self._clock = Clock(self._next_deadline if self._eager is not None else engine.next_deadline, self._on_due)
        self._tasks = trio.CancelScope()
        self._hanging_up = False
        self.rearm = self._clock.rearm
        """A command may have set a deadline while the clock sleeps."""
        self.reading = Reading(
            stream,
            self._paced,
            self._turns,
            take_in=self._take_in,
            on_taken=self.rearm,
            on_end=self._ended,
            on_broken=self._broke_while_reading,
        )
        """Receivers may read in its place."""
        self.peer = stream.peer if isinstance(stream, Described) else ""
        self._loss_record = LossRecord(self.peer)
        self.is_lost = False
        self.loss = self._loss_record.error
        """A new error that says why the connection is over; each waiter gets his own."""
        self.hung_up = trio.Event()
        self.bytes_sent = 0

    # --- the life of the connection

    async def run(self) -> None:
        """Move bytes until the connection is over; raises nothing that a connection may expect."""
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._clock.run)
                    await self.reading.run()
        finally:
            self.lose("we hung up", by="local")
            # Shielded, though it does not wait: a cancellation from outside would take the place of an error.
            with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await trio.aclose_forcefully(self._stream)

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None) -> None:
        """The connection is over; the first reason counts."""
        if self.is_lost:
            return
        if self._hanging_up and not isinstance(cause, RemoteProtocolError):
            reason, by, cause = "we hung up", "local", None
        self.is_lost = True
        self._loss_record.record(reason, by=by, cause=cause, unsent=self.unsent + self._queued())
        self._carry = []
        self._tasks.cancel()
        self.reading.stop()
        self.hung_up.set()
        self._idle.unpark_all()
        if self._observer is not None and by == "network":
            self._observer.error(self.loss())
        self._on_lost()

    @property
    def is_violated(self) -> bool:
        """Is the connection over because the peer broke a rule?"""
        return self._loss_record.is_violation

    @property
    def unsent(self) -> int:
        """Bytes that were pulled and that the transport has not taken."""
        return sum(map(len, self._carry))

    async def flushed(self) -> None:
        """Wait until the engine is silent and the writer idle."""
        while not self.is_lost and (self._sleeper is None or self._carry or self._engine.has_output()):
            await self._idle.park()

    async def hang_up(self) -> None:
        """End our side, then wait until the peer has ended his: what is under way still arrives."""
        if self.is_lost:
            return
        self._hanging_up = True  # nothing is written from here on, whatever the peer may ask for
        try:
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
                await self.hung_up.wait()
            else:
                await self._stream.aclose()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.lose("we hung up", by="local")

    def dispatch_events(self) -> None:
        """A command may have made the engine tell something: hand it out."""
        while events := self._engine.events():
            self._on_events(events)

    # --- writing

    def request_write(self) -> None:
        """The engine may have something to write."""
        if self._is_writing or self._carry:  # whoever is at it looks again; what is left of his write goes first
            self._was_requested = True
            return
        if self._sleeper is None:  # it comes by itself; but others may be slow to let it
            if perf_counter() - self._wrote_at < LATE:
                return
        elif not self._engine.has_output():
            return
        if self._nowait is None or self.is_lost or self._hanging_up:
            self._wake_writer()
        elif self._sleeper is not None and (
            self._burst or self._grows() or perf_counter() - self._wrote_at < INLINE_PAUSE
        ):
            self._wake_writer()  # others may have something to write in this turn, too
        else:
            self._write_now(self._nowait)

    def _grows(self) -> bool:
        """Is a large message queued? Its sender has to yield now, and what he sends next can go with it."""
        return self._outbox is not None and LARGE <= self._outbox.used < LARGE_PAIR

    def _wake_writer(self) -> None:
        if self._sleeper is not None and not self.is_lost and not self._hanging_up:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)

    def _write_now(self, link: NowaitLink) -> None:
        """Without the writer, which sleeps or has not had its turn yet."""
        try:
            self._write_once(link)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.lose("the connection broke while writing", by="network", cause=error)
        finally:
            if self._carry or self._engine.has_output():
                self._wake_writer()

    def _write_once(self, link: NowaitLink) -> bool:
        """What the kernel takes of what there is to write, if there is anything; the rest is carried on."""
        self._is_writing = True
        try:
            buffers = self._carry = self._pull()
            if not buffers:
                return False
            taken = link.send_nowait(buffers)
            self._carry = _rest(buffers, taken) if taken < self._pulled else []
            self._wrote_at = perf_counter()
            return True
        finally:
            try:
                self._pulled_out()  # not before the write: the peer need not wait for that
            finally:
                self._is_writing = False
                if self._eager is not None:
                    self.rearm()  # its timers began when this left

    async def _write(self) -> None:
        try:
            while True:
                self._was_requested = False
                if self._carry:
                    self._is_writing = True
                    await self._hand_over(self._carry)
                    self._is_writing = False
                    self._carry = []
                    self._wrote_at = perf_counter()
                    if self._eager is not None:
                        self.rearm()
                if self._grows():
                    await trio.lowlevel.checkpoint()
                    if self._carry:  # somebody else wrote meanwhile, and not everything was taken
                        continue
                if not self._engine.has_output():
                    is_idle = True
                elif self._nowait is None:
                    self._is_writing = True
                    self._carry = self._pull()
                    self._pulled_out()
                    self._is_writing = False
                    is_idle = not self._carry
                else:
                    is_idle = not self._write_once(self._nowait)
                if is_idle and not self._was_requested:
                    await self._sleep_until_requested()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.lose("the connection broke while writing", by="network", cause=error)

    def _pull(self) -> list[Buffer]:
        buffers = self._engine.buffers_to_send(WRITE)
        self._pulled = size = sum(map(len, buffers))
        self.bytes_sent += size
        if self._observer is not None:
            for buffer in buffers:
                self._observer.transport("out", buffer)
        return buffers if size >= JOIN_BELOW * len(buffers) else [b"".join(buffers)]

    def _pulled_out(self) -> None:
        """Bytes left the engine: tell what it says about that, and those who want their room."""
        self.dispatch_events()
        self._on_written()

    async def _hand_over(self, buffers: list[Buffer]) -> None:
        if len(buffers) == 1:
            await self._stream.send_all(buffers[0])
        elif self._nowait is not None:
            await self._nowait.send_buffers(buffers)
        else:
            await self._stream.send_all(b"".join(buffers))

    async def _sleep_until_requested(self) -> None:
        self._sleeper = trio.lowlevel.current_task()
        if self._idle:
            self._idle.unpark_all()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- reading

    def _take_in(self, data: bytes) -> bool:
        """Parse what came, or a turn's worth of it; gives whether it was for few."""
        paced = self._paced
        if len(data) <= BRIEF and (paced is None or (data and not paced.unparsed)):
            self._engine.receive_bytes(data, self._time())
            self._dispatch()
            self.reading.is_heavy = False
            return not self._burst
        clock = self._turns.now
        began = clock()
        self._engine.receive_bytes(data, self._time())
        if paced is not None and paced.unparsed:
            self._take_in_steps(paced, began)
        else:
            self._dispatch()
        self.reading.is_heavy = clock() - began > LONG_TURN
        return not self._burst

    def _take_in_steps(self, paced: BoundedParsing, began: float) -> None:
        """Hand out what a step told before the next one, so that the turn's time counts what is done about it."""
        clock, engine, now = self._turns.now, self._engine, self._time()
        until = began + self._turns.allowance
        for _ in range(TURN_FRAMES // STEP_FRAMES - 1):
            self._hand_out(engine.events())
            if clock() >= until or self.is_lost or not paced.unparsed:
                break
            engine.receive_bytes(b"", now)
        self._dispatch()
        self._burst = True

    def _ended(self) -> None:
        self._engine.receive_eof(self._time())
        self._dispatch()
        self.lose("the peer hung up", by="peer")

    def _broke_while_reading(self, error: Exception) -> None:
        self.lose("the connection broke while reading", by="network", cause=error)

    def _dispatch(self) -> None:
        events = self._engine.events()
        self._burst = len(events) >= BURST
        self._hand_out(events)
        self.request_write()

    def _hand_out(self, events: Sequence[EventT]) -> None:
        while events:  # what is done about one may lead to another
            self._on_events(events)
            events = self._engine.events()

    def _next_deadline(self) -> float | None:
        if self._eager is not None and (self._is_writing or self._carry or self._hanging_up):
            return self._eager.next_timer()
        return self._engine.next_deadline()

    def _on_due(self, now: float) -> None:
        self._engine.handle_deadline(now)
        self._dispatch()


def _rest(buffers: list[Buffer], taken: int) -> list[Buffer]:
    """What is left of the buffers after `taken` bytes."""
    for index, buffer in enumerate(buffers):
        if taken < len(buffer):
            return [memoryview(buffer)[taken:], *buffers[index + 1 :]] if taken else buffers[index:]
        taken -= len(buffer)
    return []
