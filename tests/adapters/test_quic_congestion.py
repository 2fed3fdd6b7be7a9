"""QUIC's congestion control fills a path, keeps its queue short, and tells random losses from congestion."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.testing import Bottleneck
from muxkit_adapters.quic.congestion import LatePacer, QueueAwareReno

from ._quic import Collected, Pair, on_a_line
from .test_quic_credit import fill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

ONE_WAY = 0.04  # s
RATE = 2 * 1024 * 1024  # bytes per second
KEYSTROKE = 64  # bytes


class Path:
    """A path with a bottleneck, a buffer in front of it, random losses, and other people's packets in its buffer."""

    def __init__(self, buffer: float, loss: float = 0.0) -> None:
        self._line = Bottleneck(RATE, queue=int(buffer * RATE), keep=False)
        self._loss = loss
        self._dice = random.Random(1)
        self.delay = ONE_WAY
        self.packets = self.lost = 0

    def fate(self, data: bytes) -> list[float]:
        now = trio.current_time()
        leaves = self._line.enter(len(data), now)
        self.packets += 1
        if leaves is None or self._dice.random() < self._loss:
            self.lost += 1
            return []
        return [leaves - now + self.delay]


class Upload:
    """Bulk data from the client to the server of a pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._bulk, self._short = pair.client.open(), pair.client.open()
        self._got = Collected(pair.server)
        self._keystrokes = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._got.until, lambda: False)
            while True:
                fill(self._pair, self._bulk)
                await self._pair.client.wait_writable()

    async def rate(self, seconds: float) -> float:
        """Return the bytes per second that arrive from now on."""
        before = len(self._got.streams.get(self._bulk, b""))
        await trio.sleep(seconds)
        return (len(self._got.streams[self._bulk]) - before) / seconds

    async def keystroke(self) -> float:
        """Return how long a short message needs to the server."""
        began = trio.current_time()
        self._pair.client.write(self._short, bytes(KEYSTROKE), False)
        self._keystrokes += 1
        wanted = KEYSTROKE * self._keystrokes
        while len(self._got.streams.get(self._short, b"")) < wanted:  # noqa: ASYNC110 - time is virtual
            await trio.sleep(0.0005)
        return trio.current_time() - began


@asynccontextmanager
async def uploading(path: Path) -> AsyncIterator[Upload]:
    async with on_a_line(established=False) as pair:
        pair.line.fate = path.fate
        await pair.client.established.wait()
        await pair.server.established.wait()
        async with trio.open_nursery() as nursery:
            upload = Upload(pair)
            nursery.start_soon(upload.run)
            yield upload
            nursery.cancel_scope.cancel()


async def test_bulk_data_delays_a_short_message_by_less_than_a_tenth_of_the_round_trip(
    autojump_clock: MockClock,
) -> None:
    async with uploading(Path(buffer=1)) as upload:
        await trio.sleep(1.5)
        times: list[float] = []
        for _ in range(15):
            times.append(await upload.keystroke())
            await trio.sleep(0.03)
        assert median(times) <= ONE_WAY + 0.1 * 2 * ONE_WAY
        assert max(times) <= ONE_WAY + 0.2 * 2 * ONE_WAY


async def test_a_short_queue_is_enough_to_fill_the_path(autojump_clock: MockClock) -> None:
    async with uploading(Path(buffer=1)) as upload:
        await trio.sleep(1.5)
        assert await upload.rate(1.0) > 0.9 * RATE  # the heads of the packets and the acknowledgements take the rest


async def test_random_losses_cost_a_part_of_the_rate_only(autojump_clock: MockClock) -> None:
    async with uploading(Path(buffer=1, loss=0.01)) as upload:
        await trio.sleep(1.0)
        assert await upload.rate(2.0) > 0.2 * RATE  # Reno reaches less than a tenth


async def test_a_buffer_that_is_too_short_to_show_a_queue_loses_few_packets(autojump_clock: MockClock) -> None:
    path = Path(buffer=0.003)
    async with uploading(path) as upload:
        await trio.sleep(1.0)
        path.packets = path.lost = 0
        assert await upload.rate(3.0) > 0.2 * RATE
        assert path.lost < 0.03 * path.packets


async def test_a_path_that_becomes_longer_is_used_again(autojump_clock: MockClock) -> None:
    path = Path(buffer=0.05)
    async with uploading(path) as upload:
        await trio.sleep(1.0)
        path.delay = 2.5 * ONE_WAY
        await trio.sleep(4.5)
        assert await upload.rate(1.0) > 0.6 * RATE


async def test_a_window_that_is_not_used_stays_small(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        got = Collected(pair.server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(got.until, lambda: len(got.streams.get(stream, b"")) == 200 * 1000)
            for _ in range(200):
                pair.client.write(stream, bytes(1000), False)
                await trio.sleep(0.01)
        assert pair.client_quic._loss.congestion_window < 20_000


def bulk_pacer() -> LatePacer:
    """Return the pacer of a connection in congestion avoidance, which sends 50 MB/s."""
    congestion = QueueAwareReno(max_datagram_size=1200)
    congestion.ssthresh = 4_000_000
    pacer = LatePacer(congestion, max_datagram_size=1200)
    pacer.update_rate(congestion_window=4_000_000, smoothed_rtt=0.08)
    return pacer


def sent_with(pacer: LatePacer, pause: float, seconds: float) -> int:
    """Return the packets that leave if the sender looks at its pacer once in every `pause` seconds."""
    now, sent = 0.0, 0
    while now < seconds:
        now += pause
        while pacer.next_send_time(now) is None:
            pacer.update_after_send(now)
            sent += 1
    return sent


@pytest.mark.parametrize("pause", [0.001, 0.002, 0.004])
def test_a_timer_that_fires_late_does_not_reduce_the_rate(pause: float) -> None:
    pacer = bulk_pacer()
    assert 1200 * sent_with(pacer, pause, 1.0) > 50_000_000


def test_a_pause_is_not_made_up_for() -> None:
    pacer = bulk_pacer()
    assert 1200 * sent_with(pacer, 1.0, 1.0) < 0.005 * 62_500_000


async def test_acknowledgements_do_not_delay_a_short_message_of_the_receiver(autojump_clock: MockClock) -> None:
    async with on_a_line(established=False) as pair:
        pair.line.fate = lambda data: [ONE_WAY]
        await pair.server.established.wait()
        stream, answer = pair.client.open(), pair.server.open()
        nothing = Collected(pair.client)
        for _ in range(250):  # the server acknowledges each of these packets
            pair.client.write(stream, bytes(100), False)
            await trio.sleep(0.002)
        await trio.sleep(2 * ONE_WAY)
        pair.server.write(answer, bytes(KEYSTROKE), True)
        began = trio.current_time()
        await nothing.until(lambda: answer in nothing.ended)
        assert trio.current_time() - began == pytest.approx(ONE_WAY)
