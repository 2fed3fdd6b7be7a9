"""Simulated connections in memory, for tests of how a program behaves on a bad network.

This function returns two streams that are connected to each other. Bytes take 50 to 70 ms from one to the other, at
most 1 MB per second pass, and the connection breaks after 5,000 bytes:

    one, other = weather_pair(seed=17, latency=0.05, jitter=0.02, bandwidth=1_000_000, reset_at_byte=5_000)

We call such conditions the *weather* of a connection. `PacketWeather.pair` does the same for channels of packets, which
also get lost, duplicated and reordered. Both use Trio's clock. With `trio.testing.MockClock(autojump_threshold=0)` a
test needs no real time for the delays.

Delays and losses are random numbers from a generator that starts with `seed`, so a test that fails can be repeated. The
order in which Trio runs tasks is random as well. A test that depends on it runs inside `replay(seed)`.
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

BUFFER = 64 * 1024  # bytes that may be in flight in one direction; a kernel's buffer for a socket has a similar size
READ = 64 * 1024  # maximum number of bytes that one call of `receive_some` returns


@attrs.define(eq=False, kw_only=True)
class Line:
    """One direction of a connection without faults. It delays bytes, and limits how many pass per second.

    Bytes travel in pieces. A piece is a part of a message that arrives as a whole, like a segment of TCP. Pieces arrive
    in the order in which they were sent.
    """

    delay: float = 0.0  # seconds from the end of sending a piece until it arrives
    rate: float | None = None  # bytes per second, or None for no limit
    pieces: deque[tuple[float, bytes]] = attrs.field(factory=deque)  # the pieces in flight, each with its arrival time
    under_way: int = 0  # number of bytes in flight
    given: int = 0  # number of bytes that the receiver has got, in total
    free_at: float = -math.inf  # the time at which the last piece has been sent, and the next one may be sent
    arrived_at: float = -math.inf  # the time at which the last piece arrives
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)  # tasks that wait for any change

    def add(self, piece: bytes, late: float) -> None:
        """Send a piece, and delay it by `late` seconds in addition to the usual delay.

        If it would overtake an earlier piece, it arrives together with that one.
        """
        self.free_at = max(self.free_at, trio.current_time()) + (len(piece) / self.rate if self.rate else 0.0)
        self.arrived_at = max(self.arrived_at, self.free_at + self.delay + late)
        self.pieces.append((self.arrived_at, piece))
        self.under_way += len(piece)

    def take(self, limit: int) -> bytes:
        """Remove the first piece, or its first `limit` bytes, and return these bytes to the receiver."""
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
    """One direction of a stream, with the faults that a test has chosen.

    Each fault happens after a number of bytes, or never if the number is None.
    """

    dice: random.Random  # decides the sizes and delays of pieces
    jitter: float  # each piece is delayed by a random time up to this many seconds
    buffer: int  # maximum number of bytes in flight
    splits: bool  # whether messages are split into pieces of random size
    stall_after: int | None = None  # later bytes stay in flight forever
    half_open_after: int | None = None  # later bytes are lost in both directions, and neither end is notified
    reset_at: int | None = None  # after these bytes, the receiver finds that the connection was reset
    cut_at: int | None = None  # after these bytes, the receiver finds the end of the stream
    taken: int = 0  # number of bytes that the sender has sent, in total
    ended_at: float | None = None  # the time at which the end of the stream arrives, once the sender has sent it
    clogged: bool = False  # bytes stay in flight until `unclog`
    vanishing: bool = False  # sent bytes are lost, and the sender isn't notified
    unwanted: bool = False  # the receiver has closed its end
    was_reset: bool = False  # the connection was reset, which always happens to both directions

    def put(self, data: memoryview) -> int:
        """Send as many bytes as fit into the buffer, in pieces of random size. Return how many that are."""
        size = min(len(data), self.buffer - self.under_way if self.has_room else 0)
        if self.half_open_after is not None and not self.vanishing:
            # Send only the bytes before the fault now. The caller's next call finds that the fault has happened.
            size = min(size, max(1, self.half_open_after - self.taken))
        if size <= 0:
            return 0
        # To the sender, a half-open connection looks like a working one, so it accepts everything.
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
        """True if at least half of the buffer is free. A blocked sender waits for that, so that pieces aren't tiny."""
        return self.under_way * 2 <= self.buffer

    def end(self) -> None:
        """Send the end of the stream, which arrives after the data."""
        if self.ended_at is None and not self.vanishing:
            self.ended_at = max(self.arrived_at, trio.current_time() + self.delay)
        self.changed.unpark_all()

    @property
    def is_reset(self) -> bool:
        """True once the bytes before a planned reset were received."""
        return self.reset_at is not None and self.given >= self.reset_at

    def next_arrival(self) -> float | None:
        """Return when there will be something to receive, or None while nothing will arrive."""
        if self.is_reset:
            return 0.0  # the reset, which `receive_nowait` causes
        if self.clogged or (self.stall_after is not None and self.given >= self.stall_after):
            return None
        if self.cut_at is not None and self.given >= self.cut_at:
            return 0.0
        if self.pieces:
            return self.pieces[0][0]
        return self.ended_at

    def receive(self, limit: int) -> bytes:
        """Return data that has arrived: at most `limit` bytes, up to the next fault, and b"" at the end."""
        faults = (self.cut_at, self.reset_at, self.stall_after)
        limit = min([limit, *(fault - self.given for fault in faults if fault is not None)])
        return self.take(limit) if limit > 0 and self.pieces else b""


class WeatherStream(trio.abc.HalfCloseableStream):
    """One end of a `weather_pair`. The methods beyond those of a Trio stream let a test cause faults."""

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
        """Hold all data that this end sends until `unclog`. Nothing is lost."""
        self._outgoing.clogged = True

    def unclog(self) -> None:
        """Deliver the data that `clog` has held back, and continue normally."""
        self._outgoing.clogged = False
        self._outgoing.changed.unpark_all()

    def vanish(self) -> None:
        """Lose all data from now on, in both directions, without notifying either end."""
        for way in self._ways:
            way.vanishing = True
            way.changed.unpark_all()

    def reset(self) -> None:
        """Break the connection for both ends. Data in flight is lost."""
        for way in self._ways:
            way.was_reset = True
            way.changed.unpark_all()

    @property
    def bytes_sent(self) -> int:
        """The number of bytes accepted from this end."""
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
                    self._incoming.vanishing = True  # a lost connection is lost in both directions
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
        """Sleep until data may have arrived, or until the stream is closed or reset."""
        arrival = self._incoming.next_arrival()
        if self._closed or self._incoming.was_reset or (arrival is not None and arrival <= trio.current_time()):
            await trio.lowlevel.checkpoint()
        else:
            await self._wait_for_arrival()

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return data that has arrived, b"" at the end of the stream, or None if there is none yet.

        Raises:
            trio.BrokenResourceError: if the connection was reset.
            trio.ClosedResourceError: if this end was closed.
        """
        way = self._incoming
        self._check_open()
        if way.is_reset:
            self.reset()
        if way.was_reset:
            raise trio.BrokenResourceError(f"{self.peer}: the connection was reset")
        arrival = way.next_arrival()
        return way.receive(max_bytes) if arrival is not None and arrival <= trio.current_time() else None

    def stop_waiting(self) -> None:
        """Make `wait_readable` return now."""
        self._incoming.changed.unpark_all()

    async def _wait_for_arrival(self) -> None:
        arrival = self._incoming.next_arrival()
        with trio.move_on_at(math.inf if arrival is None else arrival):
            await self._incoming.changed.park()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            # As in TCP, closing a stream with unread bytes resets the connection.
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
    """Return two connected streams with the same latency and bandwidth in both directions.

    The faults affect the direction from the first stream to the second, after that many bytes. `peer` of both streams
    names the seed, so that errors do too.

    Args:
        seed: decides everything that is left to chance.
        latency: the delay in seconds.
        jitter: up to this many seconds are added at random. Bytes stay in order.
        bandwidth: bytes per second, or None for no limit.
        buffer: bytes that may be in flight in each direction. When the buffer is full, the sender waits.
        stall_after: after this many bytes, nothing more is delivered in this direction.
        half_open_after: after this many bytes, everything is lost in both directions without notice.
        reset_at_byte: after this many bytes, the connection is reset.
        cut_at_byte: after this many bytes, the stream ends.
        splits: whether data arrives in pieces of random size.
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
    """Let the seed decide in which order Trio runs tasks inside the block. An error that leaves the block names it.

    `determined` also makes `random`, `secrets` and UUIDs depend on the seed.
    """
    # Trio has no public way to decide the order of tasks. If these names are missing, only that order varies.
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
    """The network conditions of a pair of packet channels.

    Sending never waits. In addition to the other faults, packets are lost while `queue` packets are in flight in the
    same direction.
    """

    queue: int = 1024

    def pair(self, seed: int) -> tuple[PacketChannel, PacketChannel]:
        """Return two connected channels. The same seed and the same packets give the same losses and delays."""
        there, back = PacketWay(self, f"{seed}/there"), PacketWay(self, f"{seed}/back")
        return PacketChannel(there, back), PacketChannel(back, there)


class PacketWay:
    """One direction: the packets in flight, by arrival time."""

    def __init__(self, weather: PacketWeather, seed: str) -> None:
        self.path: Path = Path("", weather, None, seed)
        self._queue = weather.queue
        self._count = count()
        self.under_way: list[tuple[float, int, bytes]] = []
        self.over_at: float = math.inf  # when the receiver sees the end
        self.unwanted: bool = False  # the receiver was closed without notice
        self.changed: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()

    def put(self, packet: bytes) -> None:
        """Send a packet. It may be lost, duplicated or delayed."""
        journey = Journey(next(self._count), "", len(packet), trio.current_time())
        for arrives, copy in self.path.send(packet, journey):
            if len(self.under_way) < self._queue:
                heapq.heappush(self.under_way, (arrives, next(self._count), copy))
        self.changed.unpark_all()


class PacketChannel(trio.abc.Channel[bytes]):
    """One end of a pair of packet channels. A packet arrives whole or not at all."""

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
