"""Two streams joined by copying, until their fate ends the connection."""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.runtime import background
from muxkit.testing._chaos.plan import BOTH_WAYS, ChaosPlan, Cut, CutReport, Fate, Way
from muxkit.testing._weather import WeatherStream

if TYPE_CHECKING:
    from collections.abc import Callable

READ = 16 * 1024  # bytes to ask for at once
TICK = 0.02  # s; with a rate, no piece takes longer on the wire
GOODBYE = 1.0  # s, to read on after an orderly end: to close with bytes unread would be a reset
LINGER_ZERO = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


@attrs.define(eq=False)
class _Direction:
    """From one stream to the other; what is under way, each piece with the moment when it may go on."""

    way: Way
    source: trio.abc.Stream
    target: trio.abc.Stream
    pieces: deque[tuple[float, bytes]] = attrs.field(factory=deque)
    read: int = 0  # bytes that came from the source
    delivered: int = 0  # bytes that the target has got
    free_at: float = -math.inf  # when the wire has sent what it took so far
    due: float = -math.inf  # of the last piece; pieces do not overtake each other
    has_ended: bool = False  # the source will send no more
    is_broken: bool = False  # nor receive any more
    is_over: bool = False  # and the target was told
    is_stalled: bool = False
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)


class Passage:
    """One connection through the weather; `run` ends with it, and closes both streams."""

    def __init__(
        self,
        client: trio.abc.Stream,
        target: trio.abc.Stream,
        *,
        plan: ChaosPlan,
        fate: Fate,
        on_cut: Callable[[CutReport, bool], None],
    ) -> None:
        self._plan = plan
        self._fate = fate
        self._on_cut = on_cut
        self._there = _Direction(Way.THERE, client, target)
        self._back = _Direction(Way.BACK, target, client)
        self._directions = {Way.THERE: self._there, Way.BACK: self._back}
        self._read_most = READ if plan.rate is None else max(1, min(READ, int(plan.rate * TICK)))
        self._began = trio.current_time()
        self._life = trio.CancelScope()
        self._was_cut = False
        self._is_orderly = False

    @property
    def bytes_there(self) -> int:
        return self._there.delivered

    @property
    def bytes_back(self) -> int:
        return self._back.delivered

    async def run(self) -> None:
        client, target = self._there.source, self._there.target
        try:
            with self._life:
                async with background() as nursery:
                    if self._fate.cut_at == 0:
                        self._cut(self._fate.how, self._fate.way)
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
                # Shielded, though it does not wait: a cancellation from outside would leave the second one open.
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    # --- its end

    def cut(self, how: Cut) -> None:
        """Lose the connection now; only the first cut counts."""
        self._cut(how, None)

    def _cut(self, how: Cut, way: Way | None) -> None:
        if self._was_cut or self._life.cancel_called:
            return
        self._was_cut = True
        if how is Cut.STALL:
            for each in BOTH_WAYS if way is None else self._fate.stalled:
                self._directions[each].is_stalled = True
            self._life.deadline = trio.current_time() + self._plan.stall_for
        else:
            self._finish(orderly=how is Cut.END)
        report = CutReport(
            number=self._fate.number,
            how=how,
            way=way,
            bytes_there=self.bytes_there,
            bytes_back=self.bytes_back,
            after=trio.current_time() - self._began,
        )
        self._on_cut(report, way is not None)

    def _finish(self, *, orderly: bool) -> None:
        if not self._life.cancel_called:
            self._is_orderly = orderly
            self._life.cancel()

    # --- reading

    async def _read(self, direction: _Direction) -> None:
        try:
            while data := await direction.source.receive_some(self._read_most):
                self._take(direction, bytes(data))
                while direction.read - direction.delivered >= self._plan.buffer:
                    await direction.changed.park()
        except BROKEN:
            direction.is_broken = True
            if not direction.is_stalled:
                self._finish(orderly=False)
        direction.has_ended = True
        direction.changed.unpark_all()
        self._look_for_the_end()

    def _take(self, direction: _Direction, data: bytes) -> None:
        plan, now = self._plan, trio.current_time()
        on_wire = len(data) / plan.rate if plan.rate else 0.0
        direction.free_at = max(direction.free_at, now) + on_wire
        late = plan.jitter * self._fate.lateness(direction.way, direction.read) if plan.jitter else 0.0
        direction.due = max(direction.due, direction.free_at + plan.delay + late)
        direction.pieces.append((direction.due, data))
        direction.read += len(data)
        direction.changed.unpark_all()

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
            other = self._back if direction is self._there else self._there
            if other.is_stalled:
                direction.is_stalled = True  # the news would have to go through a stall, so there is none
            else:
                self._finish(orderly=False)
        self._look_for_the_end()

    async def _pass_on(self, direction: _Direction) -> None:
        due, data = direction.pieces[0]
        if due > trio.current_time():
            await trio.sleep_until(due)
            if direction.is_stalled:
                return
        fated = self._fate.cut_at if self._fate.way is direction.way and not self._was_cut else None
        rest = b""
        if fated is not None and fated - direction.delivered < len(data):
            size = fated - direction.delivered
            data, rest = data[:size], data[size:]
        await direction.target.send_all(data)
        direction.delivered += len(data)
        direction.pieces.popleft()
        if rest:
            direction.pieces.appendleft((due, rest))
        direction.changed.unpark_all()
        if direction.delivered == fated:
            self._cut(self._fate.how, self._fate.way)

    async def _pass_the_end_on(self, direction: _Direction) -> None:
        if direction.due > trio.current_time():
            await trio.sleep_until(direction.due)
        if isinstance(direction.target, trio.abc.HalfCloseableStream):
            await direction.target.send_eof()
            direction.is_over = True
        else:
            self._finish(orderly=True)

    def _look_for_the_end(self) -> None:
        if self._there.is_over and self._back.is_over:
            self._finish(orderly=True)
        if self._there.is_broken and self._back.is_broken:  # behind a stall, where each side has to find out alone
            self._finish(orderly=False)


def make_abrupt(stream: trio.abc.Stream) -> None:
    """What closes it next shall be a reset, as far as this kind of stream has one."""
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
