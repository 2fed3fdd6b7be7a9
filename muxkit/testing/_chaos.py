"""Connections that fail as planned: the plans, the fate that a seed draws from a plan, and `chaos_dial`.

    async with chaos_dial(dial, ChaosPlan(cut_after=(0, 10_000), reset=0.5), seed=17) as chaos:
        await redial(chaos.dial, run)

`muxkit.testing.chaos_relay` does the same between real sockets.
"""

from __future__ import annotations

import errno
import math
import random
import socket
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from functools import partial
from typing import cast

import attrs
import trio

from muxkit._door import Door
from muxkit._limits import KIB, MIB, Limits
from muxkit._plugins import load_transport
from muxkit._settings import ABOVE_ZERO_OR_NONE, NOT_NEGATIVE, between, must_be
from muxkit.runtime import Dial, background, peer_of
from muxkit.testing._weather import Line, WeatherStream, weather_pair

BLOCK = 4 * KIB  # bytes that share one draw of jitter
READ = 1024 * KIB  # bytes to read at most per call
READ_LEAST = 16 * KIB  # with a rate, the largest piece, unless a larger one takes less than `TICK_FAST` on the line
TICK = 0.02  # s; with a rate, the longest time that a piece may take on the line
TICK_FAST = 0.001  # s
FASTEST = 2 * 1024 * MIB  # bytes per second; the buffer of a line without a rate is computed with this rate
GOODBYE = 1.0  # s to keep reading after an orderly end, because closing with unread bytes causes a reset
LINGER_ZERO = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


# Plans


class Cut(Enum):
    """The ways in which a connection is lost."""

    END = "end"
    """Both sides see the end of the stream."""
    RESET = "reset"
    """Both sides see an error, and bytes in flight may be lost."""
    STALL = "stall"
    """Nothing is delivered any more, and neither side is notified."""


class Way(Enum):
    """A direction, or both directions."""

    THERE = "there"
    """From the client to the target."""
    BACK = "back"
    """From the target to the client."""
    BOTH = "both"
    """Both directions together, for counting bytes."""


BOTH_WAYS = (Way.THERE, Way.BACK)

SHARE = between(0, 1)
RANGE = must_be("(least, most), not below 0", lambda value: 0 <= value[0] <= value[1])


@attrs.frozen(kw_only=True)
class ChaosPlan:
    """The faults of connections. The default plan has none. Times are in seconds, and shares are from 0 to 1."""

    delay: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Every byte arrives this much later, in both directions."""
    jitter: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Up to this much is added to `delay` at random. On a stream, bytes stay in order."""
    rate: float | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    """Bytes per second, in each direction of each connection. None means no limit."""
    loss: float = attrs.field(default=0.0, validator=SHARE)
    """The share of packets that a packet relay loses. Streams lose nothing."""
    buffer: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    """Bytes in flight in each direction. When the buffer is full, the sender waits. Together with `delay`, the buffer
    limits the throughput. The default is the number of bytes that the line carries during the delay, plus two pieces
    that wait in front of it."""
    cut_after: tuple[int, int] | None = attrs.field(default=None, validator=attrs.validators.optional(RANGE))
    """A connection is cut after a number of bytes drawn from this range, counted as `cut_ways` says. None: no cuts."""
    cut_ways: tuple[Way, ...] = attrs.field(default=BOTH_WAYS, validator=attrs.validators.min_len(1))
    """For each connection, one of these is drawn, and the bytes are counted in that direction. A connection that
    carries fewer bytes there isn't cut. `(Way.BOTH,)` counts both directions together."""
    cut_share: float = attrs.field(default=1.0, validator=SHARE)
    """The share of connections that are cut."""
    reset: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts that are resets."""
    stall: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts that are stalls, of one direction or both. The other cuts are orderly ends."""
    stall_for: float = attrs.field(default=60.0, validator=NOT_NEGATIVE)
    """A stalled connection is reset after this many seconds."""
    refuse: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts after which new connections are refused for a while."""
    refuse_for: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """How many seconds connections are refused."""

    def __attrs_post_init__(self) -> None:
        if self.reset + self.stall > 1.0:
            raise ValueError(f"ChaosPlan(reset={self.reset}, stall={self.stall}): more than 1 in all")

    @property
    def bytes_under_way(self) -> int:
        """The number of bytes that may be in flight in each direction."""
        if self.buffer is not None:
            return self.buffer
        return 2 * max(READ_LEAST, self.piece) + math.ceil((self.delay + self.jitter) * (self.rate or FASTEST))

    @property
    def piece(self) -> int:
        """The largest number of bytes that are relayed as one piece."""
        if self.jitter:
            return READ_LEAST  # larger pieces would contain many blocks with the same draw of jitter
        if self.rate is None:
            return READ
        return max(1, min(READ, max(min(READ_LEAST, int(self.rate * TICK)), int(self.rate * TICK_FAST))))

    def fate(self, seed: int, number: int) -> Fate:
        """Return the fate of the n-th connection, counted from 0. It depends on the seed, and not on timing."""
        dice = random.Random(f"{seed}/{number}")
        # Draw every value even if it isn't used, so that changing one setting doesn't change the draws of the others.
        is_cut = dice.random() < self.cut_share
        way = dice.choice(self.cut_ways)
        where = dice.random()
        kind = dice.random()
        stalled = dice.choice(((Way.THERE,), (Way.BACK,), BOTH_WAYS))
        is_refused = dice.random() < self.refuse
        how = Cut.RESET if kind < self.reset else Cut.STALL if kind < self.reset + self.stall else Cut.END
        cut_at = None
        if self.cut_after is not None and is_cut:
            least, most = self.cut_after
            cut_at = least + int(where * (most - least + 1))
        return Fate(
            number=number,
            cut_at=cut_at,
            way=way,
            how=how,
            stalled=stalled if how is Cut.STALL else (),
            refuse_for=self.refuse_for if is_refused else 0.0,
            seed=seed,
        )


@attrs.frozen(kw_only=True)
class Fate:
    """The fate of one connection."""

    number: int
    """The number of the connection, in the order in which connections were accepted, from 0."""
    cut_at: int | None
    """The number of bytes after which the connection is cut, or None if it isn't cut."""
    way: Way
    """The direction in which these bytes are counted, or `Way.BOTH`."""
    how: Cut
    stalled: tuple[Way, ...]
    """The directions in which a stall stops delivery."""
    refuse_for: float
    """For how many seconds after the cut new connections are refused."""
    seed: int

    def lateness(self, way: Way, offset: int) -> float:
        """Return the share, from 0 to 1, of the jitter that the byte at `offset` gets."""
        return random.Random(f"{self.seed}/{self.number}/{way.value}/{offset // BLOCK}").random()


@attrs.frozen(kw_only=True)
class CutReport:
    """A report of a cut."""

    number: int
    """The number of the connection."""
    how: Cut
    way: Way | None
    """The direction in which the bytes were counted, or `Way.BOTH`. None if the test cut the connection."""
    bytes_there: int
    bytes_back: int
    after: float
    """Seconds since the connection was accepted."""


OnCut = Callable[[CutReport], None]


@attrs.define(kw_only=True)
class ChaosStats:
    """Counters of a relay, dial or URL."""

    connections: int = 0
    live: int = 0
    ends: int = 0
    resets: int = 0
    stalls: int = 0
    unreachable: int = 0
    """Connections that were dropped because the target was unreachable."""
    bytes_there: int = 0
    """Bytes delivered to the target."""
    bytes_back: int = 0
    """Bytes delivered to the client."""

    @property
    def cuts(self) -> int:
        """The number of connections that were cut, in any way."""
        return self.ends + self.resets + self.stalls


# Connections


@attrs.define(eq=False, kw_only=True)
class _Direction(Line):
    """Relays bytes from one stream to the other."""

    way: Way
    source: trio.abc.Stream
    target: trio.abc.Stream
    read: int = 0  # bytes read from the source
    delivered: int = 0  # bytes written to the target
    has_ended: bool = False  # the source sends nothing more
    is_broken: bool = False  # the source is lost, so it receives nothing more either
    is_over: bool = False  # the end was relayed to the target
    is_stalled: bool = False


class Passage:
    """One relayed connection. `run` returns when the connection has ended, and then both streams are closed."""

    def __init__(self, chaos: Chaos, client: trio.abc.Stream, target: trio.abc.Stream, fate: Fate) -> None:
        self._chaos = chaos
        self._plan = plan = chaos.plan
        self._fate = fate
        make = partial(_Direction, delay=plan.delay, rate=plan.rate)
        self.there = make(way=Way.THERE, source=client, target=target)
        self.back = make(way=Way.BACK, source=target, target=client)
        self._directions = {Way.THERE: self.there, Way.BACK: self.back}
        self._most_under_way = plan.bytes_under_way
        self._read_most = plan.piece
        self._began = trio.current_time()
        self._life = trio.CancelScope()
        self._was_cut = False
        self._taken = 0  # bytes delivered or being delivered, in both directions
        self._is_orderly = False

    async def run(self) -> None:
        """Relay bytes until the connection ends or is cut. Both streams are closed afterwards."""
        client, target = self.there.source, self.there.target
        try:
            with self._life:
                async with background() as nursery:
                    if self._fate.cut_at == 0:
                        self.cut(self._fate.how, self._fate.way)
                    for direction in self._directions.values():
                        nursery.start_soon(self._read, direction)
                        nursery.start_soon(self._write, direction)
                    await trio.sleep_forever()
            if self._is_orderly:
                await _take_leave(client, target)
        finally:
            for stream in (client, target):
                if not self._is_orderly:
                    make_abrupt(stream)
                # `aclose_forcefully` doesn't wait, but without the shield a cancellation would skip the second stream.
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    # --- its end

    def cut(self, how: Cut, way: Way | None = None) -> None:
        """Cut the connection now. Only the first cut counts. A cut by the plan names the direction that was counted."""
        if self._was_cut or self._life.cancel_called:
            return
        self._was_cut = True
        if how is Cut.STALL:
            for each in BOTH_WAYS if way is None else self._fate.stalled:
                self._directions[each].is_stalled = True
            for direction in self._directions.values():
                direction.changed.unpark_all()  # a direction may be waiting for the byte that triggers the cut
            self._life.deadline = trio.current_time() + self._plan.stall_for
        else:
            self._finish(orderly=how is Cut.END)
        report = CutReport(
            number=self._fate.number,
            how=how,
            way=way,
            bytes_there=self.there.delivered,
            bytes_back=self.back.delivered,
            after=trio.current_time() - self._began,
        )
        self._chaos.was_cut(report, self._fate)

    def _finish(self, *, orderly: bool) -> None:
        if not self._life.cancel_called:
            self._is_orderly = orderly
            self._life.cancel()

    # --- reading

    async def _read(self, direction: _Direction) -> None:
        try:
            while data := await direction.source.receive_some(self._read_most):
                late = self._fate.lateness(direction.way, direction.read) if self._plan.jitter else 0.0
                direction.add(data if isinstance(data, bytes) else bytes(data), self._plan.jitter * late)
                direction.read += len(data)
                direction.changed.unpark_all()
                while direction.read - direction.delivered >= self._most_under_way:
                    await direction.changed.park()
        except BROKEN:
            direction.is_broken = True
            if not direction.is_stalled:
                self._finish(orderly=False)
        direction.has_ended = True
        direction.changed.unpark_all()
        self._look_for_the_end()

    # --- writing

    async def _write(self, direction: _Direction) -> None:
        try:
            while True:
                if direction.is_stalled or not (direction.pieces or direction.has_ended):
                    await direction.changed.park()
                elif direction.pieces:
                    await self._pass_on(direction)
                else:
                    break
            await self._pass_the_end_on(direction)
        except BROKEN:
            other = self.back if direction is self.there else self.there
            if other.is_stalled:
                direction.is_stalled = True  # the loss would have to cross the stall, so the source doesn't learn of it
            else:
                self._finish(orderly=False)
        self._look_for_the_end()

    async def _pass_on(self, direction: _Direction) -> None:
        due = direction.pieces[0][0]
        if due > trio.current_time():
            await trio.sleep_until(due)
            if direction.is_stalled:
                return
        is_counted = self._fate.way in (direction.way, Way.BOTH) and not self._was_cut
        fated = self._fate.cut_at if is_counted else None
        is_both = self._fate.way is Way.BOTH
        left = READ if fated is None else fated - (self._taken if is_both else direction.delivered)
        if not left:
            await direction.changed.park()  # the other direction is delivering the last byte before the cut
            return
        data = direction.take(min(READ, left))
        self._taken += len(data)
        await direction.target.send_all(data)
        direction.delivered += len(data)
        direction.changed.unpark_all()
        if fated == (self.there.delivered + self.back.delivered if is_both else direction.delivered):
            self.cut(self._fate.how, self._fate.way)

    async def _pass_the_end_on(self, direction: _Direction) -> None:
        if direction.arrived_at > trio.current_time():
            await trio.sleep_until(direction.arrived_at)
        if isinstance(direction.target, trio.abc.HalfCloseableStream):
            await direction.target.send_eof()
            direction.is_over = True
        else:
            self._finish(orderly=True)

    def _look_for_the_end(self) -> None:
        if self.there.is_over and self.back.is_over:
            self._finish(orderly=True)
        if self.there.is_broken and self.back.is_broken:  # in a stall, each side has to notice the loss on its own
            self._finish(orderly=False)


def make_abrupt(stream: trio.abc.Stream) -> None:
    """Make the next close of this stream a reset, if this kind of stream can be reset."""
    if isinstance(stream, trio.SocketStream):
        with suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
    elif isinstance(stream, WeatherStream):
        stream.reset()


async def _take_leave(*streams: trio.abc.Stream) -> None:
    async def leave(stream: trio.abc.Stream) -> None:
        with suppress(*BROKEN):
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()
                while await stream.receive_some(READ):
                    pass

    with trio.move_on_after(GOODBYE):
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(leave, stream)


class Chaos:
    """The base of everything that relays connections with faults. A test can also cause faults with its methods."""

    def __init__(self, plan: ChaosPlan, seed: int, on_cut: OnCut | None) -> None:
        self.plan = plan
        self.seed = seed
        self._on_cut = on_cut
        self._stats = ChaosStats()
        self._passages: set[Passage] = set()
        self._refusing_until = -math.inf

    def stats(self) -> ChaosStats:
        """Return a copy of the counters."""
        stats = attrs.evolve(self._stats, live=len(self._passages))
        for passage in self._passages:
            stats.bytes_there += passage.there.delivered
            stats.bytes_back += passage.back.delivered
        return stats

    @property
    def connections(self) -> int:
        """The number of connections so far."""
        return self._stats.connections

    @property
    def cuts(self) -> int:
        """The number of connections that were cut."""
        return self._stats.cuts

    def cut_all(self, how: Cut = Cut.RESET) -> None:
        """Cut every live connection now. `refuse` also prevents new ones."""
        for passage in [*self._passages]:
            passage.cut(how)

    def refuse(self, seconds: float = math.inf) -> None:
        """Refuse new connections for this many seconds, or until `admit`."""
        self._refusing_until = max(self._refusing_until, trio.current_time() + seconds)

    def admit(self) -> None:
        """Accept connections again."""
        self._refusing_until = -math.inf

    @property
    def is_refusing(self) -> bool:
        """True while new connections are refused."""
        return trio.current_time() < self._refusing_until

    def _next_fate(self) -> Fate:
        fate = self.plan.fate(self.seed, self._stats.connections)
        self._stats.connections += 1
        return fate

    async def _pass(
        self, client: trio.abc.Stream, target: trio.abc.Stream, fate: Fate, *, was_dialled: bool = False
    ) -> None:
        """Relay one connection until it ends."""
        passage = Passage(self, client, target, fate)
        if was_dialled:
            # TCP's handshake has three packets. The client may send after the second, which is now, since a relay can't
            # delay the first two. The server may send after the third, which would arrive after the delay.
            passage.back.arrived_at = trio.current_time() + 2 * self.plan.delay
        self._passages.add(passage)
        try:
            await passage.run()
        finally:
            self._passages.remove(passage)
            self._stats.bytes_there += passage.there.delivered
            self._stats.bytes_back += passage.back.delivered

    def was_cut(self, report: CutReport, fate: Fate) -> None:
        """Count a cut, refuse connections if the plan says so, and call `on_cut`."""
        self._stats.ends += report.how is Cut.END
        self._stats.resets += report.how is Cut.RESET
        self._stats.stalls += report.how is Cut.STALL
        if report.way is not None and fate.refuse_for:
            self.refuse(fate.refuse_for)
        if self._on_cut is not None:
            self._on_cut(report)


class ChaosDial(Chaos):
    """A dial whose connections fail as planned. Made by `chaos_dial`."""

    def __init__(self, dial: Dial, plan: ChaosPlan, seed: int, on_cut: OnCut | None, nursery: trio.Nursery) -> None:
        super().__init__(plan, seed, on_cut)
        self._dial = dial
        self._nursery = nursery

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        """Open one connection. As with a kernel, bytes that were sent are still delivered after it is closed.

        Raises:
            ConnectionRefusedError: while connections are refused.
            OSError: if the target can't be reached. Other errors of the original dial are raised too.
        """
        await trio.lowlevel.checkpoint()
        if self.is_refusing:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "chaos: no connection is let in now")
        fate = self._next_fate()
        pieces = random.Random(f"{self.seed}/{fate.number}/pieces").getrandbits(32)
        ours, theirs = weather_pair(pieces)
        ours.peer = await self._nursery.start(self._connect, theirs, fate)
        async with ours:
            yield ours

    async def _connect(self, theirs: WeatherStream, fate: Fate, task_status: trio.TaskStatus[str]) -> None:
        is_connected = False
        try:
            async with self._dial() as target:
                is_connected = True
                task_status.started(f"{peer_of(target) or 'chaos'} #{fate.number}")
                await self._pass(theirs, target, fate)
        except Exception as error:
            if not is_connected:
                self._stats.unreachable += 1
                raise
            if not isinstance(error, (OSError, *BROKEN)):
                raise


@asynccontextmanager
async def chaos_dial(
    dial: Dial, plan: ChaosPlan, seed: int = 0, *, on_cut: OnCut | None = None
) -> AsyncGenerator[ChaosDial, None]:
    """Wrap `dial`, so that its connections have the faults of `plan`. They end with the block.

    All times are Trio's, so this works on a virtual clock. Sent data arrives in pieces of random size.

    Args:
        dial: returns an async context manager that yields a connected stream.
        plan: the faults.
        seed: decides everything that the plan leaves to chance.
        on_cut: called with a report of each cut.

    Yields:
        An object whose `dial` method replaces the original dial.
    """
    async with background() as nursery:
        yield ChaosDial(dial, plan, seed, on_cut, nursery)


class ChaosURL(Chaos):
    """A URL that relays to another URL with faults. Made by `chaos_url`."""

    def __init__(self, url: str, plan: ChaosPlan, seed: int, on_cut: OnCut | None) -> None:
        super().__init__(plan, seed, on_cut)
        self._door = Door(url, {})
        self._name = f"chaos-{id(self):x}"
        _, _, rest = url.partition("://")
        self.url: str = f"{self._door.protocol_name}+mem://{rest.replace(self._door.address, self._name, 1)}"
        """The URL that the program under test connects to, in this Trio run."""

    async def run(self, task_status: trio.TaskStatus[list[str]]) -> None:
        """Serve the URL until cancelled."""
        near = load_transport("mem", self._door.protocol_name)
        await near.serve(self._connection, self._name, limits=Limits(), task_status=task_status)

    async def _connection(self, client: trio.abc.Stream) -> None:
        if self.is_refusing:
            await trio.aclose_forcefully(client)
            return
        fate = self._next_fate()
        try:
            async with self._door.dial() as target:
                await self._pass(client, cast("trio.abc.Stream", target), fate)
        except OSError:
            self._stats.unreachable += 1
            await trio.aclose_forcefully(client)


@asynccontextmanager
async def chaos_url(
    url: str, plan: ChaosPlan, seed: int = 0, *, on_cut: OnCut | None = None
) -> AsyncGenerator[ChaosURL, None]:
    """Serve a URL of this process that relays to `url` with the faults of `plan`, while the block runs.

    Use this for programs that take a URL. `chaos_dial` is for programs that take a dial. If `url` uses the `mem`
    transport, all times are Trio's, so this works on a virtual clock. The `mem` transport delivers an orderly end and
    a reset in the same way.

    Args:
        url: the URL of the server.
        plan: the faults.
        seed: decides everything that the plan leaves to chance.
        on_cut: called with a report of each cut.

    Yields:
        An object whose `url` replaces the original URL.
    """
    chaos = ChaosURL(url, plan, seed, on_cut)
    async with background() as nursery:
        await nursery.start(chaos.run)
        yield chaos
