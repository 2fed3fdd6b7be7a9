"""Packet channels in memory that lose, duplicate, delay and reorder packets, from a seed."""

from __future__ import annotations

import heapq
import random

import attrs
import trio


@attrs.frozen(kw_only=True)
class PacketWeather:
    """How packets fare: chances from 0 to 1, times in seconds.

    `reordering` is the chance that a packet takes `late` seconds more than the others, so that those behind
    overtake it. `queue` packets may be under way in one direction, more are lost; sending never waits.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    late: float = 0.05
    queue: int = 1024

    def pair(self, seed: int) -> tuple[PacketChannel, PacketChannel]:
        """Two connected channels; the same seed and the same packets give the same weather."""
        there, back = _Path(self, f"{seed}/there"), _Path(self, f"{seed}/back")
        return PacketChannel(there, back), PacketChannel(back, there)


class _Path:
    """One direction: packets under way, by the moment of their arrival."""

    def __init__(self, weather: PacketWeather, seed: str) -> None:
        self._weather = weather
        self._random = random.Random(seed)
        self._count = 0
        self._heap: list[tuple[float, int, bytes]] = []
        self.is_over = False
        self.changed = trio.lowlevel.ParkingLot()

    def put(self, packet: bytes) -> None:
        weather, chance = self._weather, self._random.random
        # Every packet throws the same dice, so that a change of one chance leaves the others as they were.
        is_lost, is_doubled = chance() < weather.loss, chance() < weather.duplication
        for copy in (1, 2):
            delay = weather.delay + chance() * weather.jitter + (chance() < weather.reordering) * weather.late
            if not is_lost and (copy == 1 or is_doubled) and len(self._heap) < weather.queue:
                self._count += 1
                heapq.heappush(self._heap, (trio.current_time() + delay, self._count, packet))
        self.changed.unpark_all()

    def next_arrival(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def take(self) -> bytes:
        return heapq.heappop(self._heap)[2]


class PacketChannel(trio.abc.Channel[bytes]):
    """One end: what arrives is whole or does not arrive at all."""

    def __init__(self, outgoing: _Path, incoming: _Path) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def send(self, value: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")
        if self._outgoing.is_over:
            raise trio.BrokenResourceError("the other end was closed")
        self._outgoing.put(bytes(value))

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        path = self._incoming
        while True:
            if self._closed:
                raise trio.ClosedResourceError("this channel was closed")
            arrival = path.next_arrival()
            if arrival is not None and arrival <= trio.current_time():
                return path.take()
            if arrival is None and path.is_over:
                raise trio.EndOfChannel
            with trio.move_on_at(float("inf") if arrival is None else arrival):
                await path.changed.park()

    async def aclose(self) -> None:
        self._closed = True
        for path in (self._incoming, self._outgoing):
            path.is_over = True
            path.changed.unpark_all()
        await trio.lowlevel.checkpoint()
