"""Byte streams in memory with latency, stalls, resets and clogs from a seed, on virtual time.

    one, other = weather_pair(17, latency=0.05, jitter=0.02, bandwidth=1_000_000, reset_at_byte=5_000)

Use them with `trio.testing.MockClock(autojump_threshold=0)`. With `replay(seed)` around it Trio's scheduler follows
the seed too, so that a run happens again exactly.
"""

from __future__ import annotations

import heapq
import math
import operator
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import attrs
import trio

from muxkit.runtime import OneAtATime
from muxkit.runtime.pumps.turns import untimed
from muxkit.testing._network import Journey, Path, PathWeather

BUFFER = 64 * 1024  # bytes under way in one direction, as a kernel would hold them
READ = 64 * 1024  # bytes that one receive gives at most


@attrs.define(eq=False, kw_only=True)
class Line:
    """Pieces under way in one direction: each leaves at the rate of the wire and arrives later, none before another."""

    delay: float = 0.0
    rate: float | None = None  # bytes a second
    pieces: deque[tuple[float, bytes]] = attrs.field(factory=deque)  # each with the moment of its arrival
    under_way: int = 0
    given: int = 0  # bytes that were taken out in all
    free_at: float = -math.inf  # when the wire has sent what it took so far
    arrived_at: float = -math.inf  # when the last piece will have
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def add(self, piece: bytes, late: float) -> None:
        """Send a piece, which takes so many seconds longer than it must, unless that is too few to be in order."""
        self.free_at = max(self.free_at, trio.current_time()) + (len(piece) / self.rate if self.rate else 0.0)
        self.arrived_at = max(self.arrived_at, self.free_at + self.delay + late)
        self.pieces.append((self.arrived_at, piece))
        self.under_way += len(piece)

    def take(self, limit: int) -> bytes:
        """Take out at most `limit` bytes of the first piece."""
        arrival, piece = self.pieces.popleft()
        if len(piece) > limit:
            self.pieces.appendleft((arrival, piece[limit:]))
            piece = piece[:limit]
        self.given += len(piece)
        self.under_way -= len(piece)
        self.changed.unpark_all()
        return piece


@attrs.define(eq=False, kw_only=True)
class StreamWay(Line):
    """One direction of a `weather_pair`, with its faults."""

    dice: random.Random
    jitter: float
    buffer: int
    splits: bool
    stall_after: int | None = None
    half_open_after: int | None = None
    reset_at: int | None = None
    cut_at: int | None = None
    taken: int = 0  # bytes that senders have handed over in all
    ended_at: float | None = None  # when the end of the stream arrives
    clogged: bool = False
    vanishing: bool = False  # what is sent is lost without a sign
    unwanted: bool = False  # the receiver is gone
    was_reset: bool = False  # with its other direction

    def put(self, data: memoryview) -> int:
        """Take what fits, in random pieces; gives its size."""
        size = min(len(data), self.buffer - self.under_way if self.has_room else 0)
        if self.half_open_after is not None and not self.vanishing:
            size = min(size, max(1, self.half_open_after - self.taken))
        if size <= 0:
            return 0
        if self.vanishing or (self.half_open_after is not None and self.taken >= self.half_open_after):
            self.vanishing = True
            self.taken += len(data)
            return len(data)
        self.taken += size
        position = 0
        while position < size:
            step = self.dice.randint(1, size - position) if self.splits else size - position
            self.add(bytes(data[position : position + step]), self.dice.uniform(0, self.jitter))
            position += step
        self.changed.unpark_all()
        return size

    @property
    def has_room(self) -> bool:
        """Senders wait for half of the buffer, or they would send ever smaller pieces."""
        return self.under_way * 2 <= self.buffer

    def end(self) -> None:
        """The sender is done; the news takes its time like everything else."""
        if self.ended_at is None and not self.vanishing:
            self.ended_at = max(self.arrived_at, trio.current_time() + self.delay)
        self.changed.unpark_all()

    @property
    def is_reset(self) -> bool:
        return self.reset_at is not None and self.given >= self.reset_at

    def next_arrival(self) -> float | None:
        if self.is_reset:
            return 0.0  # the reset, which `receive_nowait` makes
        if self.clogged or (self.stall_after is not None and self.given >= self.stall_after):
            return None
        if self.cut_at is not None and self.given >= self.cut_at:
            return 0.0
        if self.pieces:
            return self.pieces[0][0]
        return self.ended_at

    def receive(self, limit: int) -> bytes:
        """Return what has arrived, at most `limit` bytes and up to the next fault; b"" is the end."""
        faults = (self.cut_at, self.reset_at, self.stall_after)
        limit = min([limit, *(fault - self.given for fault in faults if fault is not None)])
        return self.take(limit) if limit > 0 and self.pieces else b""


class WeatherStream(trio.abc.HalfCloseableStream):
    """One end of `weather_pair`; its methods beyond those of a stream are for the test that makes the weather."""

    def __init__(self, outgoing: StreamWay, incoming: StreamWay, peer: str) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._ways = (outgoing, incoming)
        self._closed = False
        self._ended = False
        self._one_sends = OneAtATime("sending on this stream")
        self._one_receives = OneAtATime("receiving on this stream")
        self.peer = peer

    # --- the weather

    def clog(self) -> None:
        """Deliver nothing of what this end sends, and lose nothing, until `unclog`."""
        self._outgoing.clogged = True

    def unclog(self) -> None:
        self._outgoing.clogged = False
        self._outgoing.changed.unpark_all()

    def vanish(self) -> None:
        """From now on nothing is delivered, and neither end is told."""
        for way in self._ways:
            way.vanishing = True
            way.changed.unpark_all()

    def reset(self) -> None:
        """Break the connection for both ends; what is under way is lost."""
        for way in self._ways:
            way.was_reset = True
            way.changed.unpark_all()

    @property
    def bytes_sent(self) -> int:
        """What the link has taken from this end."""
        return self._outgoing.taken

    # --- the stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._one_sends:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            view = memoryview(data).cast("B")
            while view:
                taken = self._outgoing.put(view)
                if self._outgoing.vanishing:
                    self._incoming.vanishing = True  # a peer that is gone is gone for both directions
                view = view[taken:]
                if not taken:
                    await self._outgoing.changed.park()
                self._check_sendable()

    async def wait_send_all_might_not_block(self) -> None:
        with self._one_sends:
            await trio.lowlevel.checkpoint()
            way = self._outgoing
            while not (self._closed or way.unwanted or self._incoming.was_reset) and not way.has_room:
                await way.changed.park()
            self._check_open()

    async def send_eof(self) -> None:
        self._one_sends.check()
        await trio.lowlevel.checkpoint()
        self._check_open()
        self._ended = True
        self._outgoing.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = READ if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        with self._one_receives:
            await trio.lowlevel.checkpoint()
            while (data := self.receive_nowait(size)) is None:
                await self._wait_for_arrival()
            return data

    async def wait_readable(self) -> None:
        """Sleep until something may have arrived, or it is closed or reset."""
        arrival = self._incoming.next_arrival()
        if self._closed or self._incoming.was_reset or (arrival is not None and arrival <= trio.current_time()):
            await trio.lowlevel.checkpoint()
        else:
            await self._wait_for_arrival()

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """What has arrived, b"" at the end, None while there is nothing."""
        way = self._incoming
        self._check_open()
        if way.is_reset:
            self.reset()
        if way.was_reset:
            raise trio.BrokenResourceError(f"{self.peer}: the connection was reset")
        arrival = way.next_arrival()
        return way.receive(max_bytes) if arrival is not None and arrival <= trio.current_time() else None

    def stop_waiting(self) -> None:
        """Let `wait_readable` return now."""
        self._incoming.changed.unpark_all()

    async def _wait_for_arrival(self) -> None:
        arrival = self._incoming.next_arrival()
        with trio.move_on_at(math.inf if arrival is None else arrival):
            await self._incoming.changed.park()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            # As in TCP, a close with unread bytes resets the connection.
            if self._incoming.under_way and not self._incoming.vanishing:
                self.reset()
            self._outgoing.end()
            if not self._incoming.vanishing:
                self._incoming.unwanted = True
            for way in self._ways:
                way.changed.unpark_all()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")

    def _check_sendable(self) -> None:
        self._check_open()
        if self._ended:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")
        if self._incoming.was_reset or self._outgoing.unwanted:
            raise trio.BrokenResourceError(f"{self.peer}: the connection was reset")


def weather_pair(
    seed: int,
    *,
    latency: float = 0.0,
    jitter: float = 0.0,
    bandwidth: float | None = None,
    buffer: int = BUFFER,
    stall_after: int | None = None,
    half_open_after: int | None = None,
    reset_at_byte: int | None = None,
    cut_at_byte: int | None = None,
    splits: bool = True,
) -> tuple[WeatherStream, WeatherStream]:
    """Two connected streams; times in seconds, `bandwidth` in bytes a second, the same in both directions.

    What is counted in bytes concerns the way from the first stream to the second, and happens behind so many
    bytes: `stall_after` delivers nothing more, `half_open_after` loses everything from then on in both
    directions without a sign, `reset_at_byte` breaks the connection, `cut_at_byte` ends the stream. With
    `splits` what is sent arrives in pieces of random size.
    """
    make = partial(StreamWay, delay=latency, jitter=jitter, rate=bandwidth, buffer=buffer, splits=splits)
    there = make(
        dice=random.Random(f"{seed}/there"),
        stall_after=stall_after,
        half_open_after=half_open_after,
        reset_at=reset_at_byte,
        cut_at=cut_at_byte,
    )
    back = make(dice=random.Random(f"{seed}/back"))
    name = f"weather seed={seed}"
    return WeatherStream(there, back, name), WeatherStream(back, there, name)


@contextmanager
def replay(seed: int) -> Iterator[None]:
    """Inside, Trio's scheduler follows the seed as well; an error that leaves the block names it."""
    # Trio has no public way to do this. Without these names runs still differ only in the order of tasks.
    from trio._core import _run

    scheduling = getattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", None)
    dice: random.Random | None = getattr(_run, "_r", None)
    if scheduling is not None and dice is not None:
        vars(_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
        dice.seed(seed)
    try:
        with untimed():
            yield
    except BaseException as error:
        if not isinstance(error, trio.Cancelled):
            error.add_note(f"with seed={seed}")
        raise
    finally:
        if scheduling is not None and dice is not None:
            vars(_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = scheduling
            dice.seed()


@attrs.frozen(kw_only=True)
class PacketWeather(PathWeather):
    """The weather of a pair of packet channels: `queue` packets may be under way in one direction, more are lost.

    Sending never waits.
    """

    queue: int = 1024

    def pair(self, seed: int) -> tuple[PacketChannel, PacketChannel]:
        """Two connected channels; the same seed and the same packets give the same weather."""
        there, back = PacketWay(self, f"{seed}/there"), PacketWay(self, f"{seed}/back")
        return PacketChannel(there, back), PacketChannel(back, there)


class PacketWay:
    """One direction: packets under way, by the moment of their arrival."""

    def __init__(self, weather: PacketWeather, seed: str) -> None:
        self.path: Path = Path("", weather, None, seed)
        self._queue = weather.queue
        self._count = count()
        self.under_way: list[tuple[float, int, bytes]] = []
        self.over_at: float = math.inf  # when its receiver is told that no more will come
        self.unwanted: bool = False  # the receiver is gone, without a word
        self.changed: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()

    def put(self, packet: bytes) -> None:
        journey = Journey(next(self._count), "", len(packet), trio.current_time())
        for arrives, copy in self.path.send(packet, journey):
            if len(self.under_way) < self._queue:
                heapq.heappush(self.under_way, (arrives, next(self._count), copy))
        self.changed.unpark_all()


class PacketChannel(trio.abc.Channel[bytes]):
    """One end: what arrives is whole or does not arrive at all."""

    def __init__(self, outgoing: PacketWay, incoming: PacketWay) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def send(self, value: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")
        if self._outgoing.over_at <= trio.current_time():
            raise trio.BrokenResourceError("the other end was closed")
        if not self._outgoing.unwanted:
            self._outgoing.put(bytes(value))

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        path = self._incoming
        while True:
            if self._closed:
                raise trio.ClosedResourceError("this channel was closed")
            arrival = path.under_way[0][0] if path.under_way else math.inf
            if arrival <= trio.current_time():
                return heapq.heappop(path.under_way)[2]
            if not path.under_way and path.over_at <= trio.current_time():
                raise trio.EndOfChannel
            with trio.move_on_at(arrival if path.under_way else path.over_at):
                await path.changed.park()

    async def aclose(self) -> None:
        self._closed = True
        for path in (self._incoming, self._outgoing):
            path.over_at = -math.inf
            path.changed.unpark_all()
        await trio.lowlevel.checkpoint()
