"""Engines and links in memory for the pumps, and what a test sees of a pump that runs."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast

import trio
import trio.testing

from muxkit.core import Consumed, Lent, Reset, Stop, StreamControl
from muxkit.runtime import Arrival, MultistreamLink, MultistreamPump, PumpOwner, StreamPump

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muxkit.core import Buffer


Link = trio.abc.Stream


class Lines:
    """An engine that gives what came as events and sends what it is told; `echo` sends it back."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.out: list[Buffer] = []
        self.pending: list[bytes] = []
        self.deadline: float | None = None
        self.called_at: list[float] = []
        self.fed: list[int] = []

    def receive_bytes(self, data: bytes, now: float) -> None:
        self.fed.append(len(data))
        self.pending.append(data)
        if self.echo:
            self.out.append(data)

    def receive_eof(self, now: float) -> None:
        self.pending.append(b"eof")

    def events(self) -> Sequence[bytes]:
        events, self.pending = self.pending, []
        return events

    def next_deadline(self) -> float | None:
        return self.deadline

    def handle_deadline(self, now: float) -> None:
        self.called_at.append(now)
        self.deadline = None

    def has_output(self) -> bool:
        return bool(self.out)

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        buffers, self.out = self.out, []
        return buffers


class Letters(Lines):
    """The same, but each byte is a frame of its own, and only so many are taken at once."""

    def __init__(self) -> None:
        super().__init__()
        self.frames_at_once = sys.maxsize
        self._rest = b""

    @property
    def unparsed(self) -> int:
        return len(self._rest)

    def receive_bytes(self, data: bytes, now: float) -> None:
        data = self._rest + data
        now_parsed, self._rest = data[: self.frames_at_once], data[self.frames_at_once :]
        self.fed.append(len(now_parsed))
        self.pending += [bytes([byte]) for byte in now_parsed]


class Running(PumpOwner[bytes]):
    """A pump at work on one end, and what it told."""

    def __init__(self, link: Link, engine: Lines, observer: Watcher | None = None) -> None:
        self.engine = engine
        self.observer = observer
        self.got: list[bytes] = []
        self.written = 0
        self.losses = 0
        self.on_event: Callable[[bytes], None] = lambda event: None
        self.on_lost: Callable[[], None] = lambda: None
        self.pump: StreamPump[bytes] = StreamPump(link, engine, self, outbox=self)

    @property
    def used(self) -> int:
        """Bytes that wait for the transport."""
        return sum(map(len, self.engine.out))

    def handle_events(self, events: Sequence[bytes]) -> None:
        for event in events:
            self.got.append(event)
            self.on_event(event)

    def handle_written(self) -> None:
        self.written += 1

    def queued_bytes(self) -> int:
        return self.used

    def handle_lost(self) -> None:
        self.losses += 1
        self.on_lost()

    def send(self, data: bytes) -> None:
        self.engine.out.append(data)
        self.pump.request_write()


class Watcher:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.bytes: dict[str, bytes] = {"in": b"", "out": b""}
        self.errors: list[BaseException] = []

    def frame(self, direction: str, channel: str, name: str, size: int) -> None: ...
    def credit(self, direction: str, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...

    def error(self, error: BaseException) -> None:
        self.errors.append(error)

    def transport(self, direction: Literal["in", "out"], data: bytes | memoryview) -> None:
        self.bytes[direction] += data


@asynccontextmanager
async def running(link: Link, engine: Lines | None = None, observer: Watcher | None = None) -> AsyncIterator[Running]:
    async with trio.open_nursery() as nursery:
        run = Running(link, engine or Lines(), observer)
        nursery.start_soon(run.pump.run)
        yield run
        nursery.cancel_scope.cancel()


class Slow(trio.abc.Stream):
    """A stream without the nowait path, whose every step the test can see; a write waits until it is let through."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.let_through = trio.Semaphore(0)
        self.incoming_send, self.incoming = trio.open_memory_channel[bytes](math.inf)
        self.was_closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.let_through.acquire()
        self.writes.append(bytes(data))

    async def wait_send_all_might_not_block(self) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self.incoming.receive()

    async def aclose(self) -> None:
        self.was_closed = True
        await trio.lowlevel.checkpoint()


class Streams:
    """An engine that sends what is queued for its streams, and gives what came as events."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[bytes]] = {}
        self.finished: set[int] = set()
        self.parked: set[int] = set()
        self.turns: deque[int] = deque()
        self.datagrams: deque[bytes] = deque()
        self.control: list[StreamControl] = []
        self.pending: list[object] = []
        self.deadline: float | None = None
        self.rtt = 0.0
        self.frames = 0
        self.wanted = 0  # bytes of the frame that is under way
        self.on_receive: Callable[[], None] = lambda: None
        self.pulled = 0

    def queue(self, stream: int, data: bytes, *, last: bool = False) -> None:
        self.queues.setdefault(stream, deque()).append(data)
        if last:
            self.finished.add(stream)
        if stream not in self.turns and stream not in self.parked:
            self.turns.append(stream)

    def receive_stream(self, stream: int, data: bytes, fin: bool, now: float) -> Sequence[object]:
        self.frames += len(data)
        self.pending.append((stream, data, fin))
        self.on_receive()
        return self.events()

    def missing(self, stream: int) -> int:
        return self.wanted

    def receive_reset(self, stream: int, now: float) -> Sequence[object]:
        self.pending.append(("reset", stream))
        return self.events()

    def receive_stopped(self, stream: int, now: float) -> Sequence[object]:
        self.pending.append(("stopped", stream))
        return self.events()

    def receive_datagram(self, data: bytes, now: float) -> Sequence[object]:
        self.pending.append(data)
        return self.events()

    def receive_closed(self, now: float, *, clean: bool = True) -> Sequence[object]:
        self.pending.append("closed")
        return self.events()

    def set_rtt(self, seconds: float) -> None:
        self.rtt = seconds

    def events(self) -> Sequence[object]:
        events, self.pending = self.pending, []
        return events

    def next_deadline(self) -> float | None:
        return self.deadline

    def handle_deadline(self, now: float) -> None:
        self.deadline = None
        self.pending.append(("time", now))

    def has_output(self, may_open: bool) -> bool:
        return bool(self.control or self.datagrams or self.turns)

    def control_to_run(self) -> Sequence[StreamControl]:
        control, self.control = self.control, []
        return control

    def next_stream(self, may_open: bool) -> int | None:
        return self.turns[0] if self.turns else None

    def stream_to_send(self, stream: int, limit: int) -> tuple[bytes, bool]:
        self.turns.remove(stream)
        if limit <= 0:
            self.parked.add(stream)
            return b"", False
        queue = self.queues[stream]
        data = b"".join(queue)
        part, rest = data[:limit], data[limit:]
        queue.clear()
        if rest:
            queue.append(rest)
            self.turns.append(stream)
        self.pulled += len(part)
        return part, not rest and stream in self.finished

    def stream_writable(self, stream: int) -> None:
        self.parked.discard(stream)
        if self.queues.get(stream):
            self.turns.append(stream)

    def datagram_to_send(self, limit: int) -> bytes | None:
        return self.datagrams.popleft() if self.datagrams else None


class SteppedLink(MultistreamLink):
    """A link whose every step a test can see and decide."""

    def __init__(self) -> None:
        self.rooms: dict[int, int] = {}
        self.written: list[tuple[int, bytes, bool]] = []
        self.wanted: list[int] = []
        self.done: list[object] = []
        self.credits: dict[int, int] = {}
        self.opened: list[int] = []
        self.datagrams: list[bytes] = []
        self.datagram_room = 100
        self.closings: list[str] = []
        self.was_closed = False
        self.delivered = trio.Event()
        self.to_receive, self._incoming = trio.open_memory_channel[Sequence[Arrival]](1000)
        self.to_grant, self._granted = trio.open_memory_channel[Sequence[int]](1000)

    @property
    def role(self) -> Literal["client", "server"]:
        return "client"

    @property
    def peer(self) -> str:
        return "toy"

    @property
    def round_trip(self) -> float | None:
        return 0.25

    async def receive(self) -> Sequence[Arrival]:
        try:
            return await self._incoming.receive()
        except trio.EndOfChannel as error:
            raise trio.BrokenResourceError("no answer") from error

    def may_open(self) -> bool:
        return True

    def open(self) -> int:
        self.opened.append(2 + 4 * len(self.opened))
        return self.opened[-1]

    def room(self, stream: int) -> int:
        room = self.rooms.get(stream, 1_000_000)
        if not room:
            self.wanted.append(stream)
        return room

    def write(self, stream: int, data: bytes, is_last: bool) -> None:
        self.rooms[stream] = self.rooms.get(stream, 1_000_000) - len(data)
        assert self.rooms[stream] >= 0
        self.written.append((stream, data, is_last))

    async def wait_writable(self) -> Sequence[int]:
        streams = await self._granted.receive()
        for stream in streams:
            self.rooms[stream] = 1_000_000
        return streams

    def reset(self, stream: int) -> None:
        self.done.append(Reset(stream))

    def stop(self, stream: int) -> None:
        self.done.append(Stop(stream))

    def consumed(self, stream: int, amount: int) -> None:
        self.done.append(Consumed(stream, amount))

    def credit(self, stream: int) -> int:
        return self.credits.get(stream, 0)

    def lend(self, stream: int, amount: int) -> None:
        self.done.append(Lent(stream, amount))

    @property
    def datagram_limit(self) -> int:
        return 1000

    def may_send_datagram(self) -> bool:
        return len(self.datagrams) < self.datagram_room

    def send_datagram(self, data: bytes) -> bool:
        self.datagrams.append(data)
        return True

    async def wait_delivered(self) -> None:
        await self.delivered.wait()

    def close(self, *, error: str = "", code: int | None = None) -> None:
        self.closings.append(error)

    async def aclose(self) -> None:
        self.was_closed = True
        await trio.lowlevel.checkpoint()


class RunningMultistream(PumpOwner[object]):
    """A pump at work, and what it told."""

    def __init__(self) -> None:
        self.link = SteppedLink()
        self.engine = Streams()
        self.got: list[object] = []
        self.written = 0
        self.losses = 0
        self.queued = 0
        self.pump: MultistreamPump[object] = MultistreamPump(self.link, self.engine, self)

    def of_streams(self) -> list[tuple[int, bytes, bool]]:
        """What came, if it was data of streams only."""
        return [cast("tuple[int, bytes, bool]", event) for event in self.got]

    def handle_events(self, events: Sequence[object]) -> None:
        self.got.extend(events)

    def queued_bytes(self) -> int:
        return self.queued

    def handle_written(self) -> None:
        self.written += 1

    def handle_lost(self) -> None:
        self.losses += 1


@asynccontextmanager
async def running_multistream() -> AsyncIterator[RunningMultistream]:
    async with trio.open_nursery() as nursery:
        run = RunningMultistream()
        nursery.start_soon(run.pump.run)
        await trio.testing.wait_all_tasks_blocked()
        yield run
        nursery.cancel_scope.cancel()
