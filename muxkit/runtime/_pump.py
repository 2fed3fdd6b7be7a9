"""Who moves the bytes? One reader, one writer and one clock for an engine on a byte stream.

The reader never waits for the writer: replies that the engine owes are merged state inside it, so both ends can
push at once over a link that blocks. The writer is the only one in `send_all`, and a sender's cancellation never
reaches it, so no frame is ever cut. When nothing is queued a sender writes at once, on the link's own nowait path.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from muxkit.core import CountsFrames
from muxkit.runtime._errors import LinkLost, Side
from muxkit.runtime._links import Described, NowaitLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer, StreamEngine

EventT = TypeVar("EventT")

READ_SMALL = 64 * 1024  # bytes to ask for while reads come short
READ_LARGE = 256 * 1024  # and while they fill what was asked for
TURN_FRAMES = 1024  # frames to parse before the others get their turn; with more from one slice, the next is smaller
TURN_BYTES = 64 * 1024  # the same in bytes
SLICE_FIRST = 16 * 1024  # bytes to hand to the engine at once, to begin with
SLICE_LEAST = 1024
WRITE = 256 * 1024  # bytes to pull at most for one write
JOIN_BELOW = 4 * 1024  # bytes a buffer on average: join smaller ones, hand over larger ones as they are
CLOSE = 1.0  # s, for closing a stream without goodbye
INLINE_PAUSE = 30e-6  # s; senders who come faster than this are served together by the writer


class StreamPump(Generic[EventT]):
    """Runs a `StreamEngine` over a `trio.abc.Stream`.

    `on_events` gets what the engine tells, `on_written` is called when bytes left the engine, `on_lost` once when
    the connection is over, whatever the reason.
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
        observer: Observer | None = None,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._on_events = on_events
        self._on_written = on_written
        self._on_lost = on_lost
        self._queued = queued
        self._observer = observer
        self._nowait = stream if isinstance(stream, NowaitLink) else None
        self._writer: trio.lowlevel.Task | None = None  # while it sleeps
        self._carry: list[Buffer] = []  # pulled, and not taken by the transport yet
        self._idle = trio.lowlevel.ParkingLot()  # those who wait for everything to be written
        self._wrote_at = 0.0
        self._slice = SLICE_FIRST
        self._counter = engine if isinstance(engine, CountsFrames) else None
        self._alarm = trio.CancelScope()
        self._tasks = trio.CancelScope()
        self._began = trio.current_time()
        self._loss: tuple[str, Side, BaseException | None] | None = None
        self._hanging_up = False
        self._after: float | None = None
        self._unsent = 0
        self.peer = stream.peer if isinstance(stream, Described) else ""
        self.hung_up = trio.Event()
        self.bytes_sent = 0

    # --- the life of the connection

    async def run(self) -> None:
        """Move bytes until the connection is over; raises nothing that a connection may expect."""
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._tick)
                    await self._read()
        finally:
            self.lose("we hung up", by="local")
            # Shielded, though it does not wait: a cancellation from outside would take the place of an error.
            with trio.move_on_after(CLOSE, shield=True):
                await trio.aclose_forcefully(self._stream)

    @property
    def is_lost(self) -> bool:
        return self._loss is not None

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None) -> None:
        """The connection is over; the first reason counts."""
        if self._loss is not None:
            return
        self._loss = ("we hung up", "local", None) if self._hanging_up else (reason, by, cause)
        self._after = trio.current_time() - self._began
        self._unsent = self.unsent + self._queued()
        self._carry = []
        self._tasks.cancel()
        self.hung_up.set()
        self._idle.unpark_all()
        if self._observer is not None and by == "network":
            self._observer.error(self.loss())
        self._on_lost()

    def loss(self) -> LinkLost:
        """A new error that says why; each waiter gets his own."""
        reason, by, cause = self._loss or ("the connection is over", "local", None)
        error = LinkLost(reason, by=by, peer=self.peer, after=self._after, unsent=self._unsent)
        error.__cause__ = cause
        return error

    @property
    def unsent(self) -> int:
        """Bytes that were pulled and that the transport has not taken."""
        return sum(map(len, self._carry))

    async def flushed(self) -> None:
        """Wait until the engine is silent and the writer idle."""
        while not self.is_lost and (self._writer is None or self._carry or self._engine.has_output()):
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

    def settle(self) -> None:
        """A command may have made the engine tell something: hand it out."""
        self._hand_out_events()

    # --- writing

    def ring(self) -> None:
        """The engine may have something to write."""
        if self._writer is None or self._loss is not None or self._hanging_up or not self._engine.has_output():
            return
        if self._nowait is None or perf_counter() - self._wrote_at < INLINE_PAUSE:
            self._wake_writer()
        else:
            self._write_now(self._nowait)

    def _wake_writer(self) -> None:
        if self._writer is not None:
            task, self._writer = self._writer, None
            trio.lowlevel.reschedule(task)

    def _write_now(self, link: NowaitLink) -> None:
        writer, self._writer = self._writer, None  # whoever rings now finds somebody writing
        buffers = self._pull()
        try:
            taken = link.send_nowait(buffers)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._carry = buffers
            self.lose("the connection broke while writing", by="network", cause=error)
            return
        self._carry = _rest(buffers, taken)
        self._wrote_at = perf_counter()
        self._writer = writer
        if self._carry or self._engine.has_output():
            self._wake_writer()

    async def _write(self) -> None:
        try:
            while True:
                buffers = self._carry or self._pull()
                if not buffers:
                    await self._sleep_until_rung()
                    continue
                self._carry = buffers
                await self._hand_over(buffers)
                self._carry = []
                self._wrote_at = perf_counter()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.lose("the connection broke while writing", by="network", cause=error)

    def _pull(self) -> list[Buffer]:
        buffers = self._engine.buffers_to_send(WRITE)
        self.bytes_sent += sum(map(len, buffers))
        if self._observer is not None:
            for buffer in buffers:
                self._observer.transport("out", buffer)
        self._hand_out_events()
        self._on_written()
        return buffers

    async def _hand_over(self, buffers: list[Buffer]) -> None:
        if len(buffers) == 1:
            await self._stream.send_all(buffers[0])
        elif self._nowait is not None and sum(map(len, buffers)) >= JOIN_BELOW * len(buffers):
            await self._nowait.send_buffers(buffers)
        else:
            await self._stream.send_all(b"".join(buffers))

    async def _sleep_until_rung(self) -> None:
        self._writer = trio.lowlevel.current_task()
        self._idle.unpark_all()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._writer = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- reading

    async def _read(self) -> None:
        size = READ_SMALL
        try:
            while self._loss is None:
                data = await self._stream.receive_some(size)
                if not data:
                    self._engine.receive_eof(trio.current_time())
                    self._dispatch()
                    self.lose("the peer hung up", by="peer")
                    return
                size = READ_LARGE if len(data) == size else READ_SMALL
                await self._feed(data if type(data) is bytes else bytes(data))
                data = b""  # not kept while waiting for more
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.lose("the connection broke while reading", by="network", cause=error)

    async def _feed(self, data: bytes) -> None:
        """Bounded work at a time: a flood of tiny frames must not keep the other connections waiting."""
        position = turn = work = 0
        while True:
            part = data[position : position + self._slice]  # no copy if it is all
            position += len(part)
            before = self._frames()
            self._engine.receive_bytes(part, trio.current_time())
            events = self._dispatch()
            count = max(events, self._frames() - before)
            if count > TURN_FRAMES:
                self._slice = max(SLICE_LEAST, self._slice * TURN_FRAMES // count)
            else:
                self._slice = min(TURN_BYTES, self._slice * 2)
            if position >= len(data):
                return
            work += count
            if work > TURN_FRAMES or position - turn >= TURN_BYTES:
                work, turn = 0, position
                await trio.lowlevel.checkpoint()

    def _frames(self) -> int:
        return 0 if self._counter is None else self._counter.frames

    def _dispatch(self) -> int:
        count = self._hand_out_events()
        self.ring()
        deadline = self._engine.next_deadline()
        if deadline is not None and deadline < self._alarm.deadline:
            self._alarm.deadline = deadline
        return count

    def _hand_out_events(self) -> int:
        """Until there are no more: what is done about one event may lead to another."""
        count = 0
        while events := self._engine.events():
            count += len(events)
            self._on_events(events)
        return count

    # --- time

    async def _tick(self) -> None:
        while True:
            deadline = self._engine.next_deadline()
            self._alarm = trio.CancelScope(deadline=math.inf if deadline is None else deadline)
            with self._alarm:
                await trio.sleep_forever()
            self._engine.handle_deadline(trio.current_time())
            self._dispatch()


def _rest(buffers: list[Buffer], taken: int) -> list[Buffer]:
    """What is left of the buffers after `taken` bytes."""
    for index, buffer in enumerate(buffers):
        if taken < len(buffer):
            return [memoryview(buffer)[taken:], *buffers[index + 1 :]] if taken else buffers[index:]
        taken -= len(buffer)
    return []
