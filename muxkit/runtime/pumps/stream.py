"""The pump for an engine on a byte stream such as TCP, TLS or a WebSocket.

The reader never waits for the writer. The engine keeps the replies that it owes as state, for example as the highest
acknowledgement, and not as a growing queue. So reading can go on while writing blocks, and two peers that both send as
much as they can don't deadlock.

Only the writer task calls `send_all`. Cancelling a task in `send` doesn't cancel the writer, so no frame is ever cut.
If no output is queued, `send` writes immediately in the sender's task, with the link's `send_nowait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.core import Answering, BoundedParsing, Buffer, Outbox, Queued, SeparateTimers, StreamEngine
from muxkit.runtime._errors import CLOSED_HERE, HEAD, Phase, Side, looks_like
from muxkit.runtime._links import Explaining, NowaitLink, Parting, may_answer_after_end
from muxkit.runtime._scope import close_at_once
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.pump import BROKEN, CLOSE_TIMEOUT, INLINE_PAUSE, Pump, keep_freed_memory
from muxkit.runtime.pumps.reading import Reading, ReadingOwner
from muxkit.runtime.pumps.turns import LONG_TURN

TURN_FRAMES = 1024  # maximum number of frames to parse in one turn, however fast they are parsed
STEP_FRAMES = 128  # number of frames to parse before their events are dispatched and the time of the turn is checked
BRIEF_BYTES = 256  # a read of at most this many bytes is so fast that its time isn't measured
PARTING_READ_BYTES = 64 * 1024
WRITE_BYTES = 256 * 1024  # maximum number of bytes to take from the engine for one write
JOIN_BELOW = 4 * 1024  # buffers are joined before a write if their average size is below this many bytes
BURST = 2  # if a read causes at least this many events, the replies to them are written together
# If one message between these two sizes is queued, wait for the sender's next message. The sender yields after such a
# message, so its next one comes soon, and one write for two such messages costs a third less than two writes.
LARGE_BYTES = 48 * 1024
LARGE_PAIR_BYTES = 128 * 1024
# If the writer was woken but hasn't run for this many seconds, other tasks are taking long, and a sender writes in the
# writer's place.
LATE_SECONDS = 250e-6


class StreamPump(Pump[EventT], ReadingOwner):
    """Runs a `StreamEngine` over a `trio.abc.Stream`.

    `outbox` is the counter of queued bytes. If it is given, the pump writes large messages in pairs.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        engine: StreamEngine[EventT],
        owner: PumpOwner[EventT],
        *,
        outbox: Queued | None = None,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._timers = engine if isinstance(engine, SeparateTimers) else None
        super().__init__(stream, engine, owner)
        keep_freed_memory()
        self._outbox: Queued = outbox or Outbox()
        self._nowait = stream if isinstance(stream, NowaitLink) else None
        # The engine, once the peer has ended its direction of the stream while this side still owes it answers
        self._answering: Answering | None = None
        self._is_writing = False
        self._under_way: trio.CancelScope | None = None  # the scope of a write that waits for the transport
        self._was_requested = False  # True if `request_write` was called during a write
        self._is_flushing = False  # True if a task has called `flushed` and had to wait
        self._writes_next = False  # True if the output will be written in the next pass
        self._put_off_at = 0.0  # when that was decided
        # True if only `request_write_soon` has asked for that, so that the next message doesn't have to wait for it
        self._may_precede = False
        self._has_waited = False  # True if a large message has waited for a pass for the sender's next message
        self._is_burst = False  # True if the last read woke several tasks, whose replies are written together
        self._pulled = 0  # number of bytes that were last taken from the engine
        self._carry: list[Buffer] = []  # buffers that were taken from the engine and the transport hasn't accepted
        self._wrote_at = perf_counter()
        self._time = trio.lowlevel.current_clock().current_time  # `trio.current_time` would look up the clock each time
        self._parser = engine if isinstance(engine, BoundedParsing) else None
        if self._parser is not None:
            self._parser.frames_at_once = STEP_FRAMES
        self.reading: Reading = Reading(stream, self._parser, self._turns, self)
        """Reads the stream. A task that is blocked in `receive()` may borrow that job."""
        self.phase: Phase = "handshake"
        self._head = b""  # the first `HEAD` bytes that the peer has sent
        self._has_head = False  # True once `_head` is complete

    # --- losing and closing the connection

    def _start_writing(self) -> None:
        # The writer task is only needed once the transport doesn't accept everything that `send_nowait` gets.
        # The first write isn't put off, and even happens if the session has ended before we started. A handler may
        # refuse a client immediately, and our first bytes show the client that we speak its protocol.
        if self._carry:
            self._wake_writer()
        elif self._nowait is not None and self._engine.has_output():
            self._write_now(self._nowait)
        else:
            self.request_write()

    async def _read(self, nursery: trio.Nursery) -> None:
        await self.reading.run()

    async def _close_link(self) -> None:
        if self._farewell and isinstance(self._stream, Explaining):
            with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await self._stream.close_with(self._farewell)
        await close_at_once(self._stream)

    def _stop(self, cause: BaseException | None) -> None:
        self._carry = []
        self.reading.stop()

    def _hint(self, by: Side, cause: BaseException | None) -> str | None:
        if found := self._found(by, cause):
            return f"These bytes look like {found}"
        is_early = self.phase == "handshake" or (self.phase == "leave" and not self._head)
        if isinstance(cause, RemoteProtocolError) or not is_early or by == "local":
            return None
        hint: str | None = getattr(self._stream, "hint_if_silent", None)
        return hint

    def _found(self, by: Side, cause: BaseException | None) -> str | None:
        if isinstance(cause, RemoteProtocolError) or (by != "local" and not self._owner.has_understood_peer()):
            return self._foreign_protocol()
        return None

    @property
    def foreign(self) -> str:
        found = self._foreign_protocol()
        return f"; its bytes look like {found}" if found else ""

    def _foreign_protocol(self) -> str | None:
        found = looks_like(self._head)
        return None if found == self._owner.wire_name else found

    def _last_words(self, parting: Sequence[bytes]) -> Sequence[bytes]:
        if self._hanging_up or not (parting or self._farewell or self._answering is not None):
            return ()
        if self._is_writing:
            if self._under_way is None:
                return ()
            # Finish the current write first, because a frame may be cut if the write is cancelled.
            self._under_way.shield = True
            self._under_way.deadline = self._parting_until
            return parting
        # Shut down cleanly even without a farewell, or a TCP reset may discard data we already sent.
        return [*map(bytes, self._carry), *parting] if parting else [b""]

    async def _part(self) -> None:
        """Write the last bytes, then read until the peer closes the stream.

        If we closed the stream while the peer's bytes are unread, the kernel would send a reset, which may make the
        peer's kernel discard our last bytes.
        """
        try:
            if last := b"".join(self._parting):
                await self._stream.send_all(last)
            if self._farewell and isinstance(self._stream, Explaining):
                return  # `close_with` waits for the peer
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            elif isinstance(self._stream, Parting):
                await self._stream.part()
                return
            while await self._stream.receive_some(PARTING_READ_BYTES):
                pass
        except BROKEN:
            pass

    def write_last(self, data: bytes) -> None:
        """Write bytes before the connection is closed, if the transport accepts them now. This never waits."""
        if self._nowait is not None and not (self._is_writing or self._carry or self.is_lost):
            with suppress(*BROKEN):
                self._nowait.send_nowait([data])

    @property
    def unsent(self) -> int:
        """Number of bytes that the pump has taken from the engine and the transport hasn't accepted."""
        return sum(map(len, self._carry))

    async def flushed(self) -> None:
        """Wait until the engine has no output and the transport has accepted everything."""
        while not self.is_lost and (self._is_writer_awake or self._carry or self._engine.has_output()):
            self._is_flushing = True
            await self._idle.park()

    async def hang_up(self) -> None:
        """End our direction of the stream, and wait until the peer has ended its direction.

        Bytes that are in flight still arrive on both sides.
        """
        if self.is_lost:
            return
        self._hanging_up = True  # from now on nothing is written, even if the peer requests an answer
        try:
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
                await self.hung_up.wait()
            else:
                await self._stream.aclose()
        except BROKEN:
            pass
        self.lose(CLOSED_HERE, by="local")

    # --- writing

    def request_write(self) -> None:
        if self._answering is not None:  # the writer also has to check whether it still owes the peer an answer
            self._was_requested = True
            self._wake_writer()
            return
        if self._is_writing or self._carry:  # the current write has to finish first, and then the writer checks again
            self._was_requested = True
            return
        if self._is_writer_awake or self.is_lost or self._hanging_up or not self._engine.has_output():
            return
        if self._nowait is None:
            self._wake_writer()
            return
        now = perf_counter()
        since = now - self._wrote_at
        if self._writes_next and (self._is_burst or not self._may_precede):
            self._may_precede = False
            if now - self._put_off_at >= LATE_SECONDS:
                self._write_now(self._nowait)
        elif self._is_burst or since < INLINE_PAUSE or LARGE_BYTES <= self._outbox.used < LARGE_PAIR_BYTES:
            self._may_precede = False
            self._write_in_next_pass()  # other tasks may have output in this pass as well, so write it all together
        else:
            self._write_now(self._nowait)

    def request_write_soon(self) -> None:
        if self._nowait is None or self._answering is not None or self._is_writing or self._carry:
            self.request_write()
            return
        if self._writes_next or self._is_writer_awake or self.is_lost or self._hanging_up:
            return
        if self._engine.has_output():
            self._may_precede = True
            self._write_in_next_pass()

    def _write_in_next_pass(self) -> None:
        if not self._writes_next:
            self._writes_next = True
            self._put_off_at = perf_counter()
            self._turns.next_pass.call(self._write_put_off)

    def _write_put_off(self) -> None:
        """Write the output that was put off."""
        self._writes_next = False
        if self._nowait is None or self._is_writing or self._carry or self.is_lost or self._hanging_up:
            return
        if not self._engine.has_output():  # it was written in the meantime, or there was none
            self._has_waited = False
            if self._timers is not None:
                self.rearm()
            return
        if (self._may_precede or LARGE_BYTES <= self._outbox.used < LARGE_PAIR_BYTES) and not self._has_waited:
            # Wait for one more pass, because a task that adds to the output may run after this in the same pass: the
            # sender of a large message, or the handler of a channel that was just opened.
            self._has_waited = True
            self._write_in_next_pass()
            return
        self._has_waited = False
        try:
            self._write_now(self._nowait)
        except BaseException as error:
            self._fail(error)

    def _write_now(self, link: NowaitLink) -> None:
        """Write in the current task instead of the writer, which sleeps or hasn't run yet."""
        try:
            self._write_once(link)
        except BROKEN as error:
            self._broke("writing", error)
        finally:
            if self._carry or self._engine.has_output():
                self._wake_writer()
            elif self._is_flushing:
                self._idle.unpark_all()

    def _write_once(self, link: NowaitLink) -> bool:
        """Write as much as the kernel accepts, and keep the rest in `_carry`. Return False if there was no output."""
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
                self._pulled_out()  # only now, so that handling events doesn't delay the write
            finally:
                self._is_writing = False
                if self._timers is not None:
                    self.rearm()  # the write may have started timers of the engine

    async def _write(self) -> None:
        while True:
            self._was_requested = False
            if self._carry:
                self._is_writing = True
                with trio.CancelScope() as self._under_way:
                    await self._hand_over(self._carry)
                if self.is_lost:
                    if self._under_way.cancelled_caught:
                        self._parting = ()
                    return
                self._under_way = None
                self._is_writing = False
                self._carry = []
                self._wrote_at = perf_counter()
                if self._timers is not None:
                    self.rearm()
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
                if self._answering is not None and not self._answering.owes_peer():
                    self._lose_after_end()
                    return
                await self._sleep_until_requested()

    def _pull(self) -> list[Buffer]:
        buffers = self._engine.buffers_to_send(WRITE_BYTES)
        self._pulled = size = sum(map(len, buffers))
        self.bytes_sent += size
        if self._observer is not None:
            for buffer in buffers:
                self._observer.transport("out", buffer)
        return buffers if size >= JOIN_BELOW * len(buffers) else [b"".join(buffers)]

    def _pulled_out(self) -> None:
        """Dispatch events, and wake senders that can use the free room, because output was taken from the engine."""
        if events := self._engine.events():
            self.dispatch_events(events)
        self._owner.handle_written()

    async def _hand_over(self, buffers: list[Buffer]) -> None:
        if len(buffers) == 1:
            await self._stream.send_all(buffers[0])
        elif self._nowait is not None:
            await self._nowait.send_buffers(buffers)
        else:
            await self._stream.send_all(b"".join(buffers))

    # --- reading

    def handle_bytes(self, data: bytes) -> bool:
        """Parse as many of the bytes as one turn allows, and dispatch the events. Only the reader calls this."""
        if not self._has_head:
            self._keep_head(data)
        parser = self._parser
        if len(data) <= BRIEF_BYTES and (parser is None or (data and not parser.unparsed)):
            self._dispatch(self._engine.receive_bytes(data, self._time()))
            self.reading.is_heavy = False
            return not self._is_burst
        clock = self._turns.now
        began = clock()
        events = self._engine.receive_bytes(data, self._time())
        if parser is not None and parser.unparsed:
            self._parse_in_steps(parser, began, events)
        else:
            self._dispatch(events)
        self.reading.is_heavy = clock() - began > LONG_TURN
        return not self._is_burst

    def _keep_head(self, data: bytes) -> None:
        """Keep the first bytes of the peer for error messages, in case they belong to another protocol."""
        self._head += data[: HEAD - len(self._head)]
        self._has_head = len(self._head) >= HEAD
        self.phase = "open"
        is_silent = self.bytes_sent == 0 and not (self._hanging_up or self.is_lost)
        if is_silent and self._nowait is not None and self._foreign_protocol():
            # The engine will refuse these bytes, and then it writes nothing. So write our first bytes now, because the
            # peer can recognize from them which protocol we use.
            self._write_now(self._nowait)

    def _parse_in_steps(self, parser: BoundedParsing, began: float, events: Sequence[EventT] | None) -> None:
        """Parse in steps, and dispatch the events of each step, so that handling them counts as time of the turn."""
        clock, engine, now = self._turns.now, self._engine, self._time()
        until = began + self._turns.allowance
        for _ in range(TURN_FRAMES // STEP_FRAMES - 1):
            self.dispatch_events(events)
            events = None
            if clock() >= until or self.is_lost or not parser.unparsed:
                break
            events = engine.receive_bytes(b"", now)
        self._dispatch(events)
        self._is_burst = True

    def handle_end(self) -> None:
        """Handle the end of the peer's direction of the stream.

        If the engine still owes the peer answers, the pump goes on writing until they have been written. But if the
        peer has sent a reason for ending the connection, or if this side is hanging up, the peer expects no answers.
        """
        engine: object = self._engine
        is_wanted = self._loss_record.told is None and not self._hanging_up and may_answer_after_end(self._stream)
        is_writing = bool(self._carry)
        if is_wanted and isinstance(engine, Answering) and engine.receive_half_close(self._time(), is_writing):
            self._answering = engine
            self.reading.stop()  # the stream would stay readable forever
            self._dispatch()
            self.rearm()
        else:
            self._lose_after_end()

    def _lose_after_end(self) -> None:
        """Notify the engine of the end of the stream, which may cause events, and then lose the connection."""
        self._dispatch(self._engine.receive_eof(self._time()))
        self.lose("the peer hung up", by="peer")

    def handle_broken(self, error: Exception) -> None:
        self._broke("reading", error)

    def _broke(self, doing: str, error: Exception) -> None:
        if self._answering is not None:  # the peer has closed both directions of the stream, not only its own
            self.lose("the peer hung up", by="peer", cause=error)
        super()._broke(doing, error)

    def _dispatch(self, events: Sequence[EventT] | None = None) -> None:
        events = events or self._engine.events()
        self._is_burst = len(events) >= BURST
        if events:
            self.dispatch_events(events)
        if not self._writes_next or self._answering is not None:
            self.request_write()

    def _engine_deadline(self) -> float | None:
        # The clock doesn't have to wake up for output that is written anyway. Writing rearms the clock.
        is_written = self._is_writer_awake or self._writes_next or self._is_writing or self._carry
        if self._timers is not None and (is_written or self._hanging_up):
            return self._timers.next_timer()
        return self._engine.next_deadline()


def _rest(buffers: list[Buffer], taken: int) -> list[Buffer]:
    """Return the rest of the buffers after the first `taken` bytes."""
    for index, buffer in enumerate(buffers):
        if taken < len(buffer):
            return [memoryview(buffer)[taken:], *buffers[index + 1 :]] if taken else buffers[index:]
        taken -= len(buffer)
    return []
