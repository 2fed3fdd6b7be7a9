"""Moves bytes between a protocol engine and a transport that has streams of its own, such as QUIC.

A *pump* is the part of a session that reads and writes. The *engine* implements the rules of the protocol and does no
I/O. The *link* is the transport. Here it carries many streams and also datagrams, and each stream has flow control of
its own.

The writer task never waits for a single stream, because the others must continue meanwhile. The link says how many
bytes of each stream it can take, and the writer gets only as many bytes of that stream from the engine. All other bytes
stay in the engine, which may still send them in another order, or drop them when their channel is reset. If the link
can take nothing of a stream, the stream is *parked* until the link reports room for it.

Parsing and writing for one session must not keep others waiting, so a pump works in *turns* of limited length. See
`turns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.core import CODE_MOST, Consumed, Lent, MultistreamEngine, Reason, Reset, Stop, StreamId
from muxkit.runtime._errors import CLOSED_HERE, Side
from muxkit.runtime._links import Arrival, Datagram, MultistreamLink, StreamData, StreamReset, StreamStopped
from muxkit.runtime._scope import close_at_once
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.pump import BROKEN, Pump, keep_freed_memory
from muxkit.runtime.pumps.turns import LONG_TURN

# The reader's turn ends after it has passed this much to the engine. Other tasks run before the next turn.
TURN_BYTES = 64 * 1024
TURN_ARRIVALS = 128  # events of the link, such as bytes of a stream, the end of a stream, or a datagram
TURN_FRAMES = 1024
STEP_FRAMES = 32  # number of frames to parse before their events are dispatched
# Received bytes are passed to the engine in slices of this size. The reader counts frames after each slice, and a slice
# of tiny frames must not exceed `TURN_FRAMES` by much.
SLICE_BYTES = 4 * 1024
CHUNK_BYTES = 64 * 1024  # maximum number of bytes to take from the engine for one stream before another one is served
WRITE_BYTES = 256 * 1024  # maximum number of bytes to take from the engine before other tasks run
WRITE_DATAGRAMS = 64  # maximum number of datagrams to take from the engine before the streams are served


class MultistreamPump(Pump[EventT]):
    """Runs a `MultistreamEngine` over a `MultistreamLink`.

    If the peer closes the connection cleanly, the pump notifies the engine before it calls `PumpOwner.handle_lost`.
    """

    def __init__(self, link: MultistreamLink, engine: MultistreamEngine[EventT], owner: PumpOwner[EventT]) -> None:
        super().__init__(link, engine, owner)
        keep_freed_memory()  # otherwise the C library returns the memory of each large read to the kernel
        self._link = link
        self._engine = engine
        self._is_heavy = False  # True if the last turn was long, so the next turn has to wait in the queue of turns
        self._parked: set[StreamId] = set()  # streams that wait for room
        self._next: StreamId = 2 if link.role == "client" else 3  # the id of the next stream that this side opens
        self.bytes_received: int = 0
        self._goodbye = Reason()  # the session's reason for closing, which the link transmits when it closes

    # --- losing and closing the connection

    def _last_words(self, parting: Sequence[bytes]) -> Sequence[bytes]:
        """Keep the session's reason for closing until the link closes, because the link itself can transmit it.

        `parting` contains the encoded reason. Other pumps return the bytes to write before closing, but here there are
        none.
        """
        if parting:
            self._goodbye = Reason.decode(parting[0])
        return ()

    def _stop(self, cause: BaseException | None) -> None:
        """Close the link, and let it tell the peer why: the session's own reason, or the rule that the peer broke."""
        if self._goodbye and not self._hanging_up:
            self._link.close(error=self._goodbye.text or "ended", code=self._goodbye.code or None)
        elif isinstance(cause, RemoteProtocolError):
            self._link.close(error=cause.message)
        elif not self._hanging_up:
            self._link.close(error="the other side hung up")

    async def _close_link(self) -> None:
        await close_at_once(self._link)

    @property
    def round_trip(self) -> float | None:
        """The round-trip time in seconds, as measured by the link, or None if it hasn't been measured."""
        return self._link.round_trip

    async def flushed(self) -> None:
        """Wait until the engine has no output, no stream waits for room, and the peer has received all output."""
        while not self.is_lost:
            if not self._is_silent():
                await self._idle.park()
                continue
            try:
                await self._link.wait_delivered()
            except BROKEN:
                return  # the reader will notice the error as well, and lose the connection
            if self._is_silent():
                return

    def _is_silent(self) -> bool:
        """Return True if the writer sleeps, and neither the engine nor a parked stream has output."""
        return self._sleeper is not None and not self._parked and not self._has_output()

    async def hang_up(self) -> None:
        """Close the link.

        A link with streams can only be closed as a whole, so bytes in flight are lost. Call `flushed` first to avoid
        that.
        """
        if self.is_lost:
            return
        self._hanging_up = True  # from now on nothing is written, even if the peer requests an answer
        self._link.close()
        try:
            await self._link.aclose()
        finally:
            self.lose(CLOSED_HERE, by="local")

    # --- writing

    def request_write(self) -> None:
        if self._sleeper is not None and not self._hanging_up and self._has_output():
            self._wake_writer()

    def _has_output(self) -> bool:
        return self._engine.has_output(self._link.may_open())

    async def _write(self) -> None:
        while True:
            if self._pull():
                await trio.lowlevel.checkpoint()
            else:
                await self._sleep_until_requested()

    async def _make_room(self) -> None:
        """Wake the writer when streams have room, another stream may be opened, or the datagram queue is empty."""
        try:
            while True:
                for stream in await self._link.wait_writable():
                    self._parked.discard(stream)
                    self._engine.stream_writable(stream)
                self._wake_writer()
        except BROKEN:
            pass  # the reader will notice the error as well, after it has delivered the bytes that arrived before

    def _pull(self) -> bool:
        """Pass output to the link, up to `WRITE_BYTES`. Return True if the engine may have more output for the link."""
        has_moved = self._run_control() | self._pull_datagrams()
        until = self.bytes_sent + WRITE_BYTES
        while self.bytes_sent < until:
            stream = self._engine.next_stream(self._link.may_open())
            if stream is None:
                break
            self._pull_stream(stream)
            has_moved = True
        self.dispatch_events()
        if has_moved:
            self._owner.handle_written()
        return has_moved and self._has_output()

    def _pull_stream(self, stream: StreamId) -> None:
        if stream >= self._next:
            self._next = self._link.open() + 4
        room = self._link.room(stream)
        data, is_last = self._engine.stream_to_send(stream, min(CHUNK_BYTES, max(0, room)))
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
            self._engine.stream_to_send(stream, 0)  # this makes the engine skip the stream until the link has room
        self._parked.add(stream)

    def _pull_datagrams(self) -> bool:
        limit = self._link.datagram_limit
        for count in range(WRITE_DATAGRAMS):
            # Ask the link first. The engine numbers the datagrams that it returns, and may still drop the others.
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
                    self._lend(stream, amount)
                case Reset(stream):
                    self._parked.discard(stream)
                    self._link.reset(stream)
                case Stop(stream):
                    self._link.stop(stream)
        return bool(controls)

    def _lend(self, stream: StreamId, amount: int) -> None:
        """Lend the stream the credit that it needs to complete the current frame, but at most `amount`.

        Don't lend more than necessary. A loan is repaid with bytes that would otherwise renew the window, so with
        unnecessary loans, the window would never be used up and would never grow.
        """
        lacking = min(amount, self._engine.missing(stream) - self._link.credit(stream))
        if lacking > 0:
            self._link.lend(stream, lacking)

    # --- reading

    async def _read(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._make_room)
        while not self.is_lost:
            arrivals = await self._link.receive()
            if not arrivals:
                self._end()
                return
            if (round_trip := self._link.round_trip) is not None:
                self._engine.set_rtt(round_trip)
            await self._feed(arrivals)
            arrivals = ()  # free the bytes before waiting for more

    def _broke(self, doing: str, error: Exception) -> None:
        """Lose the connection.

        The error of the link may show that the peer has broken a rule, or that the peer has closed the connection.
        """
        if isinstance(error.__cause__, RemoteProtocolError):
            if self._observer is not None:
                self._observer.error(error.__cause__)
            self.lose(str(error.__cause__), by="peer", cause=error.__cause__)
        else:
            by: Side = "peer" if getattr(error, "by", "network") == "peer" else "network"
            what = f"the connection broke while {doing}"
            if by == "peer":
                what = "the peer closed the connection"
                code: int = getattr(error, "code", 0) if getattr(error, "is_application", False) else 0
                self.told(Reason(getattr(error, "reason", ""), code if 0 <= code <= CODE_MOST else 0))
            self.lose(what, by=by, cause=error)

    def _end(self) -> None:
        self._dispatch(self._engine.receive_closed(trio.current_time()))
        self.lose("the peer hung up", by="peer")

    async def _feed(self, arrivals: Sequence[Arrival]) -> None:
        """Handle received data in turns, because a flood of tiny frames must not keep other connections waiting."""
        clock = self._turns.now
        if self._is_heavy:
            await self._turns.wait()
        began = clock()
        size = count = 0
        frames = handed_out = self._engine.frames
        events: list[EventT] = []  # events that the engine has returned and that haven't been dispatched
        for arrival in arrivals:
            if self.is_lost:
                return
            for part in self._slices(arrival):
                size += self._feed_one(part, events)
                counted = self._engine.frames
                if counted - handed_out >= STEP_FRAMES:  # handling events has to count as time of the turn
                    handed_out = counted
                    self.dispatch_events(events)
                    events = []
                if (
                    size >= TURN_BYTES
                    or count >= TURN_ARRIVALS
                    or counted - frames >= TURN_FRAMES
                    or clock() - began >= self._turns.allowance
                ):
                    self._dispatch(events)
                    events = []
                    await self._turns.wait()
                    if self.is_lost:
                        return
                    began = clock()
                    size = count = 0
                    frames = handed_out = self._engine.frames
            count += 1
        self._dispatch(events)
        self._is_heavy = clock() - began > LONG_TURN

    def _feed_one(self, arrival: Arrival, events: list[EventT]) -> int:
        """Pass received data to the engine, append the events to `events`, and return the number of bytes."""
        now = trio.current_time()
        match arrival:
            case StreamData(stream, data, is_last):
                self._count(data)
                events += self._engine.receive_stream(stream, data, is_last, now)
                return len(data)
            case Datagram(data):
                self._count(data)
                events += self._engine.receive_datagram(data, now)
                return len(data)
            case StreamReset(stream):
                events += self._engine.receive_reset(stream, now)
            case StreamStopped(stream):
                self._parked.discard(stream)
                self._idle.unpark_all()
                events += self._engine.receive_stopped(stream, now)
        return 0

    def _count(self, data: bytes) -> None:
        self.bytes_received += len(data)
        if self._observer is not None:
            self._observer.transport("in", data)

    def _slices(self, arrival: Arrival) -> Iterator[Arrival]:
        """Yield the slices of an arrival.

        A slice is `SLICE_BYTES` long, or longer if the current frame doesn't end before that. So each slice is cut only
        after the slice before it has been parsed.
        """
        if not isinstance(arrival, StreamData) or len(arrival.data) <= SLICE_BYTES:
            yield arrival
            return
        stream, data, start = arrival.stream, arrival.data, 0
        while start < len(data):
            stop = start + max(SLICE_BYTES, self._engine.missing(stream))
            yield StreamData(stream, data[start:stop], arrival.is_last and stop >= len(data))
            start = stop
