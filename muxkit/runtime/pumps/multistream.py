"""The pump for an engine on a link that carries streams and datagrams side by side.

The link never makes the writer wait: it says how much room a stream has, and the writer takes no more than that out
of the engine, so that what waits can still be chosen, dropped or counted. A stream without room is parked in the
engine until the link has some again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.core import CODE_MOST, Consumed, Lent, MultistreamEngine, Reason, Reset, Stop, StreamId
from muxkit.runtime._errors import CLOSED_HERE, Side
from muxkit.runtime._links import Arrival, Datagram, MultistreamLink, StreamData, StreamReset, StreamStopped
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.pump import BROKEN, Pump, keep_freed_memory
from muxkit.runtime.pumps.turns import LONG_TURN

TURN_BYTES = 64 * 1024  # to feed before other sessions get their turn
TURN_ARRIVALS = 128
TURN_FRAMES = 1024  # the same, if the engine counts them
STEP_FRAMES = 32  # frames to parse before their events are handed out
CHUNK_BYTES = 64 * 1024  # of one stream at a time
SLICE_BYTES = 4 * 1024  # of an arrival to feed at once, so that frames are counted often enough
WRITE_BYTES = 256 * 1024  # to pull before other tasks run
WRITE_DATAGRAMS = 64  # to pull before the streams get their turn


class MultistreamPump(Pump[EventT]):
    """Runs a `MultistreamEngine` over a `MultistreamLink`.

    The engine hears that the peer ended the connection in order before `PumpOwner.handle_lost` is called.
    """

    def __init__(self, link: MultistreamLink, engine: MultistreamEngine[EventT], owner: PumpOwner[EventT]) -> None:
        super().__init__(link, engine, owner)
        keep_freed_memory()
        self._link = link
        self._engine = engine
        self._is_heavy = False  # the last turn was long, so the next one waits for its place
        self._parked: set[StreamId] = set()  # streams that wait for room
        self._next: StreamId = 2 if link.role == "client" else 3  # of ours, not opened yet
        self.bytes_received: int = 0
        self._goodbye = Reason()

    # --- the life of the connection

    def _last_words(self, parting: Sequence[bytes]) -> Sequence[bytes]:
        """Take the reason out, which goes in the goodbye of the link."""
        if parting:
            self._goodbye = Reason.decode(parting[0])
        return ()

    def _stop(self, cause: BaseException | None) -> None:
        """Tell the peer why: which rule it broke, or what the session gave as the reason."""
        if self._goodbye and not self._hanging_up:
            self._link.close(error=self._goodbye.text or "ended", code=self._goodbye.code or None)
        elif isinstance(cause, RemoteProtocolError):
            self._link.close(error=cause.message)
        elif not self._hanging_up:
            self._link.close(error="the other side hung up")

    async def _close_link(self) -> None:
        await trio.aclose_forcefully(self._link)

    @property
    def round_trip(self) -> float | None:
        """Seconds, as the link has measured it."""
        return self._link.round_trip

    async def flushed(self) -> None:
        """Wait until the engine is silent, no stream waits for room, and the peer has all that was written."""
        while not self.is_lost:
            if not self._is_silent():
                await self._idle.park()
                continue
            try:
                await self._link.wait_delivered()
            except BROKEN:
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
        """Wake the writer when streams have room, one more may be opened, or the queue of datagrams has emptied."""
        try:
            while True:
                for stream in await self._link.wait_writable():
                    self._parked.discard(stream)
                    self._engine.stream_writable(stream)
                self._wake_writer()
        except BROKEN:
            pass  # the reader says why, after it has brought what came before

    def _pull(self) -> bool:
        """Hand the link what it takes; return True if there may be more, and only the bytes of a turn were used up."""
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
            self._engine.stream_to_send(stream, 0)  # takes it out of the line until the link has room
        self._parked.add(stream)

    def _pull_datagrams(self) -> bool:
        limit = self._link.datagram_limit
        for count in range(WRITE_DATAGRAMS):
            # Asked before it is pulled: the engine numbers what it returns, and may still drop what it keeps.
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
        """Lend what the frame lacks beyond the credit that is out, at most `amount`.

        A loan that was not needed would be repaid with bytes that should have renewed the window, and the window would
        never be used up and never grow.
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
            arrivals = ()  # not kept while waiting for more

    def _broke(self, doing: str, error: Exception) -> None:
        """Lose the connection; the link may know which rule its peer broke, or that it was the peer that ended it."""
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
        """Take in what came, in turns: a flood of tiny frames must not keep other connections waiting."""
        clock = self._turns.now
        if self._is_heavy:
            await self._turns.wait()
        began = clock()
        size = count = 0
        frames = handed_out = self._engine.frames
        events: list[EventT] = []  # that the engine returned and that were not handled yet
        for arrival in arrivals:
            if self.is_lost:
                return
            for part in self._slices(arrival):
                size += self._feed_one(part, events)
                counted = self._engine.frames
                if counted - handed_out >= STEP_FRAMES:  # the time of a turn counts what is done about its events
                    handed_out = counted
                    self._handle(events)
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
        """Give the engine what came, add the events that it returns, and return how many bytes it was."""
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
        """Yield the pieces of an arrival, each cut when the last was fed: small, except where no frame can end."""
        if not isinstance(arrival, StreamData) or len(arrival.data) <= SLICE_BYTES:
            yield arrival
            return
        stream, data, start = arrival.stream, arrival.data, 0
        while start < len(data):
            stop = start + max(SLICE_BYTES, self._engine.missing(stream))
            yield StreamData(stream, data[start:stop], arrival.is_last and stop >= len(data))
            start = stop
