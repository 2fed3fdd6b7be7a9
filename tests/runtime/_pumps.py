"""A pump at work on an engine that does next to nothing, and links whose every step a test can see."""

from __future__ import annotations

import math
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import trio
import trio.testing

from muxkit.runtime import StreamPump

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

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


class Running:
    """A pump at work on one end, and what it told."""

    def __init__(self, link: Link, engine: Lines, observer: Watcher | None = None) -> None:
        self.engine = engine
        self.got: list[bytes] = []
        self.written = 0
        self.losses = 0
        self.on_event: Callable[[bytes], None] = lambda event: None
        self.on_lost: Callable[[], None] = lambda: None
        self.pump: StreamPump[bytes] = StreamPump(
            link,
            engine,
            on_events=self._take,
            on_written=self._count,
            on_lost=self._lose,
            queued=lambda: self.used,
            outbox=self,
            observer=observer,
        )

    @property
    def used(self) -> int:
        """Bytes that wait for the transport."""
        return sum(map(len, self.engine.out))

    def _take(self, events: Sequence[bytes]) -> None:
        for event in events:
            self.got.append(event)
            self.on_event(event)

    def _count(self) -> None:
        self.written += 1

    def _lose(self) -> None:
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
