"""The packet pump moves bursts, never waits without need, and survives what may happen to one packet."""

from __future__ import annotations

import errno
import math
from collections import deque
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.runtime import DatagramPump, NowaitPackets, PumpOwner
from muxkit.testing import PacketWeather

from ._pumps import Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from trio.testing import MockClock

Link = trio.abc.Channel[bytes]


class Parcels:
    """An engine that gives what came as events and sends what it is told; `echo` sends it back."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.out: list[bytes] = []
        self.pending: list[bytes] = []
        self.deadline: float | None = None
        self.called_at: list[float] = []

    def receive_datagram(self, data: bytes, now: float) -> None:
        self.pending.append(data)
        if self.echo:
            self.out.append(data)

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        packets, self.out = self.out, []
        return packets

    def events(self) -> Sequence[bytes]:
        events, self.pending = self.pending, []
        return events

    def next_deadline(self) -> float | None:
        return self.deadline

    def handle_deadline(self, now: float) -> None:
        self.called_at.append(now)
        self.deadline = None


class Scripted(Link):
    """A link whose every step a test can see. A send waits until it is let through, an error in `trouble` comes
    instead of taking a packet, or of giving one.
    """

    peer = "somebody"

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.let_through = trio.Semaphore(0)
        self.trouble: deque[Exception] = deque()
        self.arrivals, self._incoming = trio.open_memory_channel[bytes | Exception](math.inf)
        self.was_closed = False

    async def send(self, value: bytes) -> None:
        await self.let_through.acquire()
        if self.trouble:
            raise self.trouble.popleft()
        self.sent.append(value)

    async def receive(self) -> bytes:
        return self._opened(await self._incoming.receive())

    async def aclose(self) -> None:
        self.was_closed = True
        await trio.lowlevel.checkpoint()

    @staticmethod
    def _opened(arrival: bytes | Exception) -> bytes:
        if isinstance(arrival, Exception):
            raise arrival
        return arrival


class Bursty(Scripted):
    """The same with the calls that do not wait: `room` packets are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 1_000_000
        self.packet_limit = 100
        self.asked: list[int] = []
        self.runs: list[int] = []

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        if self.trouble:
            raise self.trouble.popleft()
        if any(len(packet) > self.packet_limit for packet in packets):
            raise ValueError("too large")
        taken = min(self.room, len(packets))
        self.room -= taken
        self.sent += packets[:taken]
        self.runs.append(taken)
        return taken

    def receive_nowait(self, limit: int) -> list[bytes]:
        self.asked.append(limit)
        got: list[bytes] = []
        while len(got) < limit:
            try:
                got.append(self._opened(self._incoming.receive_nowait()))
            except trio.WouldBlock:
                break
        return got


class Running(PumpOwner[bytes]):
    """A pump at work on one end, and what it told."""

    def __init__(self, link: Link, engine: Parcels, fatal: Iterable[int], observer: Watcher | None) -> None:
        self.engine = engine
        self.got: list[bytes] = []
        self.losses = 0
        self.limits: list[int] = []
        self.on_event: Callable[[bytes], None] = lambda event: None
        self.observer = observer
        self.pump: DatagramPump[bytes] = DatagramPump(link, engine, self, fatal=fatal)

    def queued_bytes(self) -> int:
        return sum(map(len, self.engine.out))

    def handle_packet_limit(self, limit: int) -> None:
        self.limits.append(limit)

    def handle_events(self, events: Sequence[bytes]) -> None:
        for event in events:
            self.got.append(event)
            self.on_event(event)

    def handle_lost(self) -> None:
        self.losses += 1

    def send(self, *packets: bytes) -> None:
        self.engine.out += packets
        self.pump.request_write()


@asynccontextmanager
async def running(
    link: Link, engine: Parcels | None = None, *, fatal: Iterable[int] = (), observer: Watcher | None = None
) -> AsyncIterator[Running]:
    async with trio.open_nursery() as nursery:
        run = Running(link, engine or Parcels(), fatal, observer)
        nursery.start_soon(run.pump.run)
        await at_rest()
        yield run
        nursery.cancel_scope.cancel()


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked()


# --- moving


async def test_packets_go_both_ways_over_any_channel(autojump_clock: MockClock) -> None:
    here, there = PacketWeather(delay=0.01).pair(1)
    async with running(here) as one, running(there, Parcels(echo=True)):
        one.send(b"1", b"2")
        await trio.sleep(1)
        one.send(b"3")
        await trio.sleep(1)
        assert one.got == [b"1", b"2", b"3"]
        assert one.pump.bytes_sent == 3


async def test_a_link_that_need_not_wait_is_written_to_at_once() -> None:
    link = Bursty()
    assert isinstance(link, NowaitPackets)
    async with running(link) as run:
        run.send(b"1", b"2", b"3")
        assert link.runs == [3]
        assert link.sent == [b"1", b"2", b"3"]


async def test_what_the_link_does_not_take_at_once_goes_later_and_in_order() -> None:
    link = Bursty()
    link.room = 2
    async with running(link) as run:
        run.send(b"1", b"2", b"3", b"4")
        assert (link.sent, run.pump.unsent) == ([b"1", b"2"], 2)
        run.send(b"5")
        link.room = 10
        link.let_through.release()
        await run.pump.flushed()
        assert link.sent == [b"1", b"2", b"3", b"4", b"5"]
        assert run.pump.unsent == 0


async def test_a_burst_is_taken_in_at_once_but_no_more_than_a_turns_worth() -> None:
    link = Bursty()
    turns: list[int] = []
    async with running(link, Parcels(echo=True)) as run:
        for number in range(200):
            link.arrivals.send_nowait(b"%d" % number)
        while len(run.got) < 200:
            await trio.lowlevel.checkpoint()
            turns.append(len(run.got))
        await run.pump.flushed()
        assert run.got == link.sent == [b"%d" % number for number in range(200)]
        # Between two of our steps the reader has at most two: Trio shuffles who goes first.
        assert max(after - before for before, after in pairwise([0, *turns])) <= 2 * 64
        assert max(link.asked) == 63


@pytest.mark.requirement("R-28")
async def test_the_reader_does_not_wait_for_the_writer() -> None:
    link = Scripted()
    async with running(link, Parcels(echo=True)) as run:
        for number in range(10):
            link.arrivals.send_nowait(b"%d" % number)
        await at_rest()
        assert len(run.got) == 10
        assert not link.sent


async def test_flushed_waits_for_the_writer() -> None:
    link = Scripted()
    async with running(link) as run, trio.open_nursery() as nursery:
        run.send(b"1")
        flushed = trio.Event()

        async def flush() -> None:
            await run.pump.flushed()
            flushed.set()

        nursery.start_soon(flush)
        await at_rest()
        assert not flushed.is_set()
        link.let_through.release()
        await flushed.wait()
        assert link.sent == [b"1"]


async def test_an_observer_sees_the_packets_of_both_directions() -> None:
    link, watcher = Bursty(), Watcher()
    async with running(link, observer=watcher) as run:
        run.send(b"there")
        link.arrivals.send_nowait(b"back")
        await at_rest()
        assert watcher.bytes == {"in": b"back", "out": b"there"}


# --- what one packet may run into


@pytest.mark.requirement("R-40")
@pytest.mark.parametrize("make", [Scripted, Bursty])
@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ENOBUFS, errno.EHOSTUNREACH])
async def test_a_refusal_costs_one_packet_and_the_link_goes_on(make: type[Scripted], number: int) -> None:
    link = make()
    for _ in range(3):
        link.let_through.release()
    async with running(link) as run:
        link.trouble.append(OSError(number, "refused"))
        run.send(b"1", b"2", b"3")
        link.arrivals.send_nowait(OSError(number, "refused"))
        link.arrivals.send_nowait(b"in")
        await at_rest()
        assert link.sent == [b"2", b"3"]
        assert run.got == [b"in"]
        assert run.pump.refused == 2
        assert not run.pump.is_lost


@pytest.mark.parametrize("where", ["sending", "receiving"])
async def test_a_refusal_ends_the_link_if_it_is_to(where: str) -> None:
    link = Bursty()
    async with running(link, fatal=[errno.ECONNREFUSED]) as run:
        error = OSError(errno.ECONNREFUSED, "Connection refused")
        if where == "sending":
            link.trouble.append(error)
            run.send(b"1")
        else:
            link.arrivals.send_nowait(error)
        await at_rest()
        loss = run.pump.loss()
        assert (loss.by, loss.__cause__, loss.peer) == ("network", error, "somebody")


async def test_a_link_that_only_refuses_is_given_up_in_the_end() -> None:
    link = Scripted()
    async with running(link) as run:
        for _ in range(1001):
            link.arrivals.send_nowait(OSError(errno.ECONNREFUSED, "refused"))
        await run.pump.hung_up.wait()
        assert "1001 times" in str(run.pump.loss())


async def test_a_packet_above_the_limit_is_dropped_and_the_limit_is_told() -> None:
    link = Bursty()
    async with running(link) as run:
        run.send(b"1", bytes(101), b"2")
        assert link.sent == [b"1", b"2"]
        assert (run.pump.too_large, run.limits) == (1, [100])
        assert not run.pump.is_lost


async def test_a_packet_that_a_plain_channel_does_not_take_is_dropped() -> None:
    link = Scripted()
    link.let_through.release()
    link.let_through.release()
    async with running(link) as run:
        link.trouble.append(ValueError("too large"))
        run.send(b"1", b"2")
        await at_rest()
        assert (link.sent, run.pump.too_large, run.limits) == ([b"2"], 1, [])


# --- time


async def test_deadlines_are_met_and_may_be_moved_forward(autojump_clock: MockClock) -> None:
    async with running(Scripted()) as run:
        run.engine.deadline = 100.0
        run.pump.rearm()
        run.engine.deadline = 5.0
        run.pump.rearm()
        await trio.sleep(200)
        assert run.engine.called_at == [5.0]


async def test_a_timer_that_begins_when_a_packet_leaves_at_once_is_met(autojump_clock: MockClock) -> None:
    """Was: a lone packet over UDP that got lost was sent again only when something else happened."""

    class Resending(Parcels):
        def datagrams_to_send(self, now: float) -> Sequence[bytes]:
            if self.out:
                self.deadline = now + 1.0
            return super().datagrams_to_send(now)

    async with running(Bursty(), Resending()) as run:
        await trio.sleep(10)
        run.send(b"1")
        sent_at = trio.current_time()
        await trio.sleep(20)
        assert run.engine.called_at == [sent_at + 1.0]


async def test_something_that_is_due_while_the_writer_is_busy_does_not_spin(autojump_clock: MockClock) -> None:
    class Eager(Parcels):
        def handle_deadline(self, now: float) -> None:
            self.called_at.append(now)

        def datagrams_to_send(self, now: float) -> Sequence[bytes]:
            if self.deadline is not None and self.deadline <= now:
                self.deadline = None
            return super().datagrams_to_send(now)

    link = Scripted()
    async with running(link, Eager()) as run:
        run.send(b"1")
        await at_rest()
        run.engine.out.append(b"2")
        run.engine.deadline = trio.current_time()
        run.pump.rearm()
        await trio.sleep(10)
        assert len(run.engine.called_at) <= 2
        for _ in range(2):
            link.let_through.release()
        await trio.sleep(10)
        assert link.sent == [b"1", b"2"]


async def test_timers_go_on_while_the_writer_is_busy(autojump_clock: MockClock) -> None:
    async with running(Scripted()) as run:
        run.send(b"1")
        run.engine.deadline = 7.0
        run.pump.rearm()
        await trio.sleep(10)
        assert run.engine.called_at == [7.0]


async def test_a_timer_is_met_although_the_writer_always_has_a_packet(mock_clock: MockClock) -> None:
    """A session whose rate allows the next packet in each pass of Trio's loop must still find out that its peer is
    silent.
    """

    class Endless(Parcels):
        def datagrams_to_send(self, now: float) -> Sequence[bytes]:
            if self.deadline is None and not self.called_at:
                self.deadline = now + 5.0
            return [b"next"]

        def next_deadline(self) -> float:
            return trio.current_time()  # there is always a packet to send

        def next_timer(self) -> float | None:
            return self.deadline

    link, engine = Bursty(), Endless()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Running(link, engine, (), None).pump.run)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
            mock_clock.jump(0.1)
        assert engine.called_at
        nursery.cancel_scope.cancel()


# --- the end


@pytest.mark.requirement("R-39")
@pytest.mark.parametrize(
    ("error", "by"),
    [(trio.EndOfChannel(), "peer"), (trio.BrokenResourceError(), "network"), (trio.ClosedResourceError(), "network")],
    ids=["end", "broken", "closed"],
)
async def test_a_link_that_is_over_is_told_once_and_closed(error: Exception, by: str) -> None:
    link = Scripted()
    async with running(link) as run:
        run.send(b"unsent")
        link.arrivals.send_nowait(error)
        await run.pump.hung_up.wait()
        await at_rest()
        assert (run.losses, link.was_closed) == (1, True)
        loss = run.pump.loss()
        assert (loss.by, loss.unsent) == (by, 6)
        with pytest.raises(LinkLost):
            raise loss


@pytest.mark.parametrize("make", [Scripted, Bursty])
async def test_a_link_that_breaks_while_sending_is_lost(make: type[Scripted]) -> None:
    link = make()
    link.let_through.release()
    async with running(link) as run:
        link.trouble.append(trio.BrokenResourceError())
        run.send(b"1")
        await at_rest()
        assert (run.losses, run.pump.loss().by) == (1, "network")


async def test_last_words_are_said_before_the_link_is_closed() -> None:
    link = Scripted()
    link.let_through.release()
    async with running(link) as run:
        run.pump.lose("enough", by="local", parting=[b"bye"])
        run.pump.lose("too late", by="peer")
        await at_rest()
        assert (link.sent, link.was_closed) == ([b"bye"], True)
        assert run.pump.loss().reason == "enough"


async def test_last_words_that_nobody_takes_delay_the_end_by_a_second_at_most(autojump_clock: MockClock) -> None:
    link = Scripted()
    async with trio.open_nursery() as nursery:
        run = Running(link, Parcels(), (), None)
        nursery.start_soon(run.pump.run)
        await at_rest()
        run.pump.lose("enough", by="local", parting=[b"bye"])
    assert trio.current_time() <= 1.0


async def test_hanging_up_sends_what_there_is_first() -> None:
    link = Scripted()
    async with running(link) as run, trio.open_nursery() as nursery:
        run.send(b"1")
        nursery.start_soon(run.pump.hang_up)
        await at_rest()
        assert not run.pump.is_lost
        link.let_through.release()
        await run.pump.hung_up.wait()
        assert link.sent == [b"1"]


@pytest.mark.requirement("R-36")
async def test_a_cancelled_pump_closes_its_link() -> None:
    link = Scripted()
    async with running(link) as run:
        pass
    assert link.was_closed
    assert run.pump.loss().by == "local"
