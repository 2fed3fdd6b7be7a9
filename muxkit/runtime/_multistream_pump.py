"""Who moves the bytes where streams run side by side? A reader, a writer and a clock for an engine on such a link.

The link never makes the writer wait: it says how much room a stream has, and the writer takes no more than that out
of the engine, so what waits stays where it can still be chosen, dropped or counted. A stream without room is parked
in the engine until the link has some again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.core import CloseAware, Consumed, FrameCounting, Lent, MissingBytes, Reset, RoundTripAware, Stop
from muxkit.runtime._allocator import keep_freed_memory
from muxkit.runtime._clock import Clock
from muxkit.runtime._ending import LossRecord
from muxkit.runtime._links import Datagram, MultistreamLink, StreamData, StreamReset, StreamStopped
from muxkit.runtime._slices import slices
from muxkit.runtime._turns import LONG_TURN, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import MultistreamEngine, StreamId
    from muxkit.runtime._errors import Side
    from muxkit.runtime._links import Arrival

EventT = TypeVar("EventT")

TURN_BYTES = 64 * 1024  # to feed before the others get their turn
TURN_ARRIVALS = 128
TURN_FRAMES = 1024  # the same, if the engine counts them
STEP_FRAMES = 32  # frames to parse before their events are handed out
CHUNK = 64 * 1024  # bytes of one stream at a time
WRITE = 256 * 1024  # bytes to pull before the others get their turn
DATAGRAMS = 64  # to pull before the streams get theirs
CLOSE_TIMEOUT = 1.0  # s, for closing a link without goodbye


class MultistreamPump(Generic[EventT]):
    """Runs a `MultistreamEngine` over a `MultistreamLink`, with the face of a `StreamPump`.

    `on_events` gets what the engine tells, `on_written` is called when bytes left the engine, `on_lost` once when
    the connection is over, whatever the reason. If the engine has `receive_closed`, it is called before that when it
    was the peer who ended the connection in order; if it has `set_rtt`, it is told the link's round trip.
    """

    def __init__(
        self,
        link: MultistreamLink,
        engine: MultistreamEngine[EventT],
        *,
        on_events: Callable[[Sequence[EventT]], None],
        on_written: Callable[[], None],
        on_lost: Callable[[], None],
        queued: Callable[[], int],
        observer: Observer | None = None,
    ) -> None:
        self._link = link
        self._engine = engine
        self._on_events = on_events
        self._on_written = on_written
        self._on_lost = on_lost
        self._queued = queued
        self._observer = observer
        keep_freed_memory()
        self._sleeper: trio.lowlevel.Task | None = None  # the writer, while it sleeps
        self._aware = engine if isinstance(engine, RoundTripAware) else None
        self._counting = engine if isinstance(engine, FrameCounting) else None
        self._foreseeing = engine if isinstance(engine, MissingBytes) else None
        self._turns = turns()
        self._is_heavy = False  # the last turn was long: the next one is queued for
        self._parked: set[StreamId] = set()  # streams that wait for room
        self._next: StreamId = 2 if link.role == "client" else 3  # of ours, not opened yet
        self._idle = trio.lowlevel.ParkingLot()  # those who wait for everything to be written
        self._clock = Clock(engine.next_deadline, self._on_due)
        self._tasks = trio.CancelScope()
        self._hanging_up = False
        self.peer = link.peer
        self._loss_record = LossRecord(self.peer)
        self.is_lost = False
        self.loss = self._loss_record.error
        """A new error that says why the connection is over; each waiter gets his own."""
        self.rearm = self._clock.rearm
        """A command may have set a deadline while the clock sleeps."""
        self.hung_up = trio.Event()
        self.bytes_sent = 0
        self.bytes_received = 0

    # --- the life of the connection

    async def run(self) -> None:
        """Move bytes until the connection is over; raises nothing that a connection may expect."""
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._make_room)
                    nursery.start_soon(self._clock.run)
                    await self._read()
        finally:
            self.lose("we hung up", by="local")
            # Shielded, though it does not wait: a cancellation from outside would take the place of an error.
            with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await trio.aclose_forcefully(self._link)

    @property
    def round_trip(self) -> float | None:
        """Seconds, as the link has measured it."""
        return self._link.round_trip

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None) -> None:
        """The connection is over; the first reason counts. A peer who broke a rule is told which."""
        if self.is_lost:
            return
        if self._hanging_up and not isinstance(cause, RemoteProtocolError):
            reason, by, cause = "we hung up", "local", None
        self.is_lost = True
        self._loss_record.record(reason, by=by, cause=cause, unsent=self._queued())
        if isinstance(cause, RemoteProtocolError):
            self._link.close(error=cause.message)
        elif not self._hanging_up:
            self._link.close(error="the other side hung up")
        self._tasks.cancel()
        self.hung_up.set()
        self._idle.unpark_all()
        if self._observer is not None and by == "network":
            self._observer.error(self.loss())
        self._on_lost()

    @property
    def is_violated(self) -> bool:
        """Is the connection over because the peer broke a rule?"""
        return self._loss_record.is_violation

    async def flushed(self) -> None:
        """Wait until the engine is silent, no stream waits for room, and the peer has all that was written."""
        while not self.is_lost:
            if not self._is_silent():
                await self._idle.park()
                continue
            try:
                await self._link.wait_delivered()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the reader says so in a moment
            if self._is_silent():
                return

    def _is_silent(self) -> bool:
        return self._sleeper is not None and not self._parked and not self._has_output()

    async def hang_up(self) -> None:
        """Say goodbye. What is under way is lost, in both directions: there is no half of a link to close."""
        if self.is_lost:
            return
        self._hanging_up = True  # nothing is written from here on, whatever the peer may ask for
        self._link.close()
        try:
            await self._link.aclose()
        finally:
            self.lose("we hung up", by="local")

    def dispatch_events(self) -> None:
        """A command may have made the engine tell something: hand it out."""
        self._hand_out_events()

    # --- writing

    def request_write(self) -> None:
        """The engine may have something to write."""
        if self._sleeper is not None and not self._hanging_up and self._has_output():
            self._wake_writer()

    def _has_output(self) -> bool:
        return self._engine.has_output(self._link.may_open())

    def _wake_writer(self) -> None:
        if self._sleeper is not None and not self.is_lost and not self._hanging_up:
            task, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(task)

    async def _write(self) -> None:
        try:
            while True:
                if self._pull():
                    await trio.lowlevel.checkpoint()
                else:
                    await self._sleep_until_requested()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.lose("the connection broke while writing", by="network", cause=error)

    async def _make_room(self) -> None:
        """Streams that had no room have some, or one more may be opened, or the queue of datagrams has emptied."""
        try:
            while True:
                for stream in await self._link.wait_writable():
                    self._parked.discard(stream)
                    self._engine.stream_writable(stream)
                self._wake_writer()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader says why, after it has brought what came before

    def _pull(self) -> bool:
        """Hand the link what it takes; True if there may be more, and only the time was up."""
        has_moved = self._run_control() | self._pull_datagrams()
        until = self.bytes_sent + WRITE
        while self.bytes_sent < until:
            stream = self._engine.next_stream(self._link.may_open())
            if stream is None:
                break
            self._pull_stream(stream)
            has_moved = True
        self._hand_out_events()
        if has_moved:
            self._on_written()
        return has_moved and self._has_output()

    def _pull_stream(self, stream: StreamId) -> None:
        if stream >= self._next:
            self._next = self._link.open() + 4
        room = self._link.room(stream)
        data, is_last = self._engine.stream_to_send(stream, min(CHUNK, max(0, room)))
        if data or is_last:
            self.bytes_sent += len(data)
            if self._observer is not None:
                self._observer.transport("out", data)
            self._link.write(stream, data, is_last)
        if is_last or len(data) < room:
            return
        if room > 0:
            if self._link.room(stream) > 0:
                return
            self._engine.stream_to_send(stream, 0)  # out of the line, until the link says otherwise
        self._parked.add(stream)

    def _pull_datagrams(self) -> bool:
        limit = self._link.datagram_limit
        for count in range(DATAGRAMS):
            # Asked before it is pulled: the engine numbers what it gives, and may still drop what it keeps.
            datagram = self._engine.datagram_to_send(limit) if self._link.may_send_datagram() else None
            if datagram is None:
                return count > 0
            self.bytes_sent += len(datagram)
            if self._observer is not None:
                self._observer.transport("out", datagram)
            self._link.send_datagram(datagram)
        return True

    def _run_control(self) -> bool:
        controls = self._engine.control_to_run()
        for control in controls:
            match control:
                case Consumed(stream, amount):
                    self._link.consumed(stream, amount)
                case Lent(stream, amount):
                    self._link.lend(stream, amount)
                case Reset(stream):
                    self._parked.discard(stream)
                    self._link.reset(stream)
                case Stop(stream):
                    self._link.stop(stream)
        return bool(controls)

    async def _sleep_until_requested(self) -> None:
        self._sleeper = trio.lowlevel.current_task()
        self._idle.unpark_all()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- reading

    async def _read(self) -> None:
        try:
            while not self.is_lost:
                arrivals = await self._link.receive()
                if not arrivals:
                    self._end()
                    return
                if self._aware is not None and (round_trip := self._link.round_trip) is not None:
                    self._aware.set_rtt(round_trip)
                await self._feed(arrivals)
                arrivals = ()  # not kept while waiting for more
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._broke(error)

    def _broke(self, error: Exception) -> None:
        """A link may know which rule its peer broke, or that it was the peer who ended it."""
        if isinstance(error.__cause__, RemoteProtocolError):
            if self._observer is not None:
                self._observer.error(error.__cause__)
            self.lose(str(error.__cause__), by="peer", cause=error.__cause__)
        else:
            by: Side = "peer" if getattr(error, "by", "network") == "peer" else "network"
            self.lose("the connection broke while reading", by=by, cause=error)

    def _end(self) -> None:
        if isinstance(self._engine, CloseAware):
            self._engine.receive_closed(trio.current_time())
            self._dispatch()
        self.lose("the peer hung up", by="peer")

    async def _feed(self, arrivals: Sequence[Arrival]) -> None:
        """Take in what came, in turns: a flood of tiny frames must not keep the other connections waiting."""
        clock = self._turns.now
        if self._is_heavy:
            await self._turns.wait()
        began = clock()
        size = count = 0
        frames = told = self._frames()
        for arrival in arrivals:
            if self.is_lost:
                return
            for part in slices(arrival, self._foreseeing):
                size += self._feed_one(part)
                counted = self._frames()
                if counted - told >= STEP_FRAMES:  # the time of a turn counts what is done about its events
                    told = counted
                    self._hand_out_events()
                if (
                    size >= TURN_BYTES
                    or count >= TURN_ARRIVALS
                    or counted - frames >= TURN_FRAMES
                    or clock() - began >= self._turns.allowance
                ):
                    self._dispatch()
                    await self._turns.wait()
                    if self.is_lost:
                        return
                    began = clock()
                    size = count = 0
                    frames = told = self._frames()
            count += 1
        self._dispatch()
        self._is_heavy = clock() - began > LONG_TURN

    def _feed_one(self, arrival: Arrival) -> int:
        now = trio.current_time()
        match arrival:
            case StreamData(stream, data, is_last):
                self._count(data)
                self._engine.receive_stream(stream, data, is_last, now)
                return len(data)
            case Datagram(data):
                self._count(data)
                self._engine.receive_datagram(data, now)
                return len(data)
            case StreamReset(stream):
                self._engine.receive_reset(stream, now)
            case StreamStopped(stream):
                self._parked.discard(stream)
                self._idle.unpark_all()
                self._engine.receive_stopped(stream, now)
        return 0

    def _count(self, data: bytes) -> None:
        self.bytes_received += len(data)
        if self._observer is not None:
            self._observer.transport("in", data)

    def _frames(self) -> int:
        return self._counting.frames if self._counting is not None else 0

    def _dispatch(self) -> None:
        self._hand_out_events()
        self.request_write()
        self.rearm()

    def _hand_out_events(self) -> None:
        """Until there are no more: what is done about one event may lead to another."""
        while events := self._engine.events():
            self._on_events(events)

    def _on_due(self, now: float) -> None:
        self._engine.handle_deadline(now)
        self._dispatch()
