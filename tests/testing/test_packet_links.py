"""The check of packet links finds what a bad one does."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.testing import PacketWeather, check_packet_link
from muxkit.testing import _packet_links as checks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

LIMIT = 1200


class Good(trio.abc.Channel[bytes]):
    """A link in memory with every promise; its subclasses break one each."""

    def __init__(self) -> None:
        self.other: Good
        self.inbox: deque[bytes] = deque()
        self.came = trio.lowlevel.ParkingLot()
        self.is_closed = False
        self.is_over = False

    @property
    def packet_limit(self) -> int:
        return LIMIT

    def check(self) -> None:
        if self.is_closed:
            raise trio.ClosedResourceError

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        self.check()
        if any(len(packet) > LIMIT for packet in packets):
            raise ValueError("too large")
        for packet in packets:
            self.put(packet)
        return len(packets)

    def put(self, packet: bytes) -> None:
        if len(self.other.inbox) < 500:
            self.other.inbox.append(packet)
            self.other.came.unpark_all()

    def receive_nowait(self, limit: int) -> list[bytes]:
        self.check()
        return [self.inbox.popleft() for _ in range(min(limit, len(self.inbox)))]

    async def send(self, value: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.send_nowait([value])

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            self.check()
            if self.inbox:
                return self.inbox.popleft()
            if self.is_over:
                raise trio.EndOfChannel
            await self.came.park()

    async def aclose(self) -> None:
        self.is_closed = True
        self.came.unpark_all()
        self.other.is_over = True
        self.other.came.unpark_all()
        await trio.lowlevel.checkpoint()


class Joins(Good):
    def put(self, packet: bytes) -> None:
        if self.other.inbox:
            packet = self.other.inbox.pop() + packet
        super().put(packet)


class Cuts(Good):
    def put(self, packet: bytes) -> None:
        super().put(packet[:1000])


class Hoards(Good):
    def put(self, packet: bytes) -> None:
        self.other.inbox.append(packet)
        self.other.came.unpark_all()


class WaitsForItsReader(Good):
    async def send(self, value: bytes) -> None:
        await super().send(value)
        if len(self.other.inbox) > 400:
            await trio.sleep_forever()


class SendsAlthoughCancelled(Good):
    async def send(self, value: bytes) -> None:
        self.send_nowait([value])
        await trio.lowlevel.checkpoint()


class LosesWhatWasCancelled(Good):
    async def receive(self) -> bytes:
        packet = await super().receive()
        await trio.lowlevel.checkpoint()
        return packet


class SendsWithoutYielding(Good):
    async def send(self, value: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.send_nowait([value])


class SendsTooMuch(Good):
    def send_nowait(self, packets: Sequence[bytes]) -> int:
        self.check()
        for packet in packets:
            self.put(packet[:LIMIT])
        return len(packets)


class SendsTheFirstOfABadBurst(Good):
    def send_nowait(self, packets: Sequence[bytes]) -> int:
        for packet in packets:
            super().send_nowait([packet])
        return len(packets)


class SwallowsEmptyPackets(Good):
    def put(self, packet: bytes) -> None:
        super().put(packet or b"?")


class SleepsThroughItsClose(Good):
    async def aclose(self) -> None:
        self.is_closed = True
        self.other.is_over = True
        self.other.came.unpark_all()
        await trio.lowlevel.checkpoint()


class WorksAfterItsClose(Good):
    def check(self) -> None:
        pass


class SaysNoGoodbye(Good):
    async def aclose(self) -> None:
        self.is_closed = True
        self.came.unpark_all()
        await trio.lowlevel.checkpoint()


class GivesMoreThanWasAskedFor(Good):
    def receive_nowait(self, limit: int) -> list[bytes]:
        return super().receive_nowait(limit + 1)


class OnABusyMachine(Good):
    """Keeps all its promises, but its reader gets no time until a flood counts as over, and has taken nothing of it."""

    has_paused = False

    async def receive(self) -> bytes:
        if len(self.inbox) == 500 and not self.has_paused:
            self.has_paused = True
            await trio.sleep(1)
        return await super().receive()


@asynccontextmanager
async def pair_of(kind: type[Good]) -> AsyncIterator[tuple[Good, Good]]:
    one, other = kind(), kind()
    one.other, other.other = other, one
    yield one, other


@pytest.fixture(autouse=True)
def a_small_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FLOOD", 2000)
    monkeypatch.setattr(checks, "KEPT_MOST", 1_500_000)


async def test_a_good_link_passes(autojump_clock: trio.testing.MockClock) -> None:
    await check_packet_link(lambda: pair_of(Good), goodbye=True)


@pytest.mark.requirement("R-71")
async def test_a_good_link_passes_on_a_machine_without_time_for_it(autojump_clock: trio.testing.MockClock) -> None:
    """Was: The packet that ends a flood could be dropped by the full link, and the check waited for it for ever."""
    await check_packet_link(lambda: pair_of(OnABusyMachine), goodbye=True)


async def test_the_simulated_packets_keep_the_same_promises(autojump_clock: trio.testing.MockClock) -> None:
    @asynccontextmanager
    async def simulated() -> AsyncIterator[tuple[trio.abc.Channel[bytes], trio.abc.Channel[bytes]]]:
        yield PacketWeather().pair(seed=1)

    await check_packet_link(simulated, goodbye=True)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Joins, "packets arrive whole and apart"),
        (Cuts, "packets arrive whole and apart"),
        (Hoards, "bytes were kept for a reader who did not come"),
        (WaitsForItsReader, "a sender never waits for a reader: not over within"),
        (SendsAlthoughCancelled, "a cancelled send sends nothing"),
        (LosesWhatWasCancelled, "a cancelled receive loses nothing"),
        (SendsWithoutYielding, "send and receive are checkpoints"),
        (SendsTooMuch, "send of a packet above packet_limit does not raise ValueError"),
        (SendsTheFirstOfABadBurst, "a packet above the limit is refused: a packet of 12 bytes came as another"),
        (SwallowsEmptyPackets, "an empty packet came as something else"),
        (SleepsThroughItsClose, "a close wakes who waits in receive: not over within"),
        (WorksAfterItsClose, "nothing works after a local close"),
        (SaysNoGoodbye, "a close is the end for the peer: not over within"),
        (GivesMoreThanWasAskedFor, r"receive_nowait\(7\) gave 8 packets"),
    ],
)
async def test_a_bad_link_is_found_out(
    kind: type[Good], complaint: str, autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        await check_packet_link(lambda: pair_of(kind), goodbye=True)
