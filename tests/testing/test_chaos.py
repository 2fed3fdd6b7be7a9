"""A connection in memory meets the fate that its plan draws, on virtual time."""

from __future__ import annotations

import itertools
import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit.runtime import Backoff, Ended, redial
from muxkit.testing import ChaosDial, ChaosPlan, Cut, CutReport, Way, chaos_dial, check_link
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

SIZE = 50_000
DATA = random.Random(0).randbytes(SIZE)


@attrs.define
class Server:
    """The other end of each connection through the weather: what it got, and how that ended."""

    sends: bytes = b""
    got: list[bytearray] = attrs.field(factory=list)
    ends: list[str] = attrs.field(factory=list)

    async def handle(self, stream: trio.abc.Stream) -> None:
        got = bytearray()
        self.got.append(got)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            try:
                while data := await stream.receive_some():
                    got += data
                self.ends.append("end")
            except trio.BrokenResourceError:
                self.ends.append("broken")
            except trio.Cancelled:
                self.ends.append("nothing")
                raise

    async def _send(self, stream: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(self.sends)
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()


@asynccontextmanager
async def weather(server: Server, plan: ChaosPlan, seed: int = 1) -> AsyncIterator[tuple[ChaosDial, list[CutReport]]]:
    reports: list[CutReport] = []
    async with trio.open_nursery() as nursery:
        [name] = await nursery.start(memory.serve, server.handle, "weather")
        async with chaos_dial(lambda: memory.connect(name), plan, seed, on_cut=reports.append) as chaos:
            yield chaos, reports
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def receive(stream: trio.abc.Stream) -> tuple[bytes, str]:
    """Everything, and how it ended."""
    got = bytearray()
    try:
        while data := await stream.receive_some():
            got += data
    except trio.BrokenResourceError:
        return bytes(got), "broken"
    return bytes(got), "end"


async def test_in_fine_weather_it_is_a_link(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
        ours, theirs = memory.pair()

        @asynccontextmanager
        async def dial() -> AsyncIterator[trio.abc.Stream]:
            async with ours:
                yield ours

        async with chaos_dial(dial, ChaosPlan()) as chaos, chaos.dial() as stream:
            yield stream, theirs

    await check_link(pair, half_close=True)


async def test_delay_and_rate_take_their_time(autojump_clock: MockClock) -> None:
    server = Server(sends=bytes(500))
    async with weather(server, ChaosPlan(delay=2.0, rate=1000.0)) as (chaos, _):
        start = trio.current_time()
        async with chaos.dial() as stream:
            assert await receive(stream) == (bytes(500), "end")
    assert trio.current_time() - start == pytest.approx(2.5, abs=0.05)


async def test_a_delay_holds_back_no_more_than_the_buffer(autojump_clock: MockClock) -> None:
    server = Server()
    async with weather(server, ChaosPlan(delay=10.0, buffer=1000)) as (chaos, _), chaos.dial() as stream:
        with trio.move_on_after(5) as scope:
            await stream.send_all(bytes(10**6))
        assert scope.cancelled_caught


async def test_jitter_changes_neither_bytes_nor_order(autojump_clock: MockClock) -> None:
    server = Server(sends=DATA)
    start = trio.current_time()
    async with weather(server, ChaosPlan(delay=0.1, jitter=1.0)) as (chaos, _), chaos.dial() as stream:
        assert await receive(stream) == (DATA, "end")
    assert 0.5 < trio.current_time() - start < 10


@pytest.mark.parametrize("way", [Way.THERE, Way.BACK])
@pytest.mark.parametrize("byte", [0, 1, 777, SIZE - 1])
async def test_an_orderly_cut_comes_behind_just_that_byte(byte: int, way: Way, autojump_clock: MockClock) -> None:
    server = Server(sends=DATA)
    async with weather(server, ChaosPlan(cut_after=(byte, byte), cut_ways=(way,))) as (chaos, reports):
        async with chaos.dial() as stream, trio.open_nursery() as nursery:
            nursery.start_soon(suppressed, stream.send_all, DATA)
            got, how = await receive(stream)
            assert how == "end"
        await trio.sleep(2)
    delivered = {Way.THERE: bytes(server.got[0]), Way.BACK: got}
    assert delivered[way] == DATA[:byte]
    assert DATA.startswith(delivered[Way.BACK if way is Way.THERE else Way.THERE])
    assert [(report.number, report.how, report.way) for report in reports] == [(0, Cut.END, way)]


async def suppressed(send: object, data: bytes) -> None:
    assert callable(send)
    with suppress(trio.BrokenResourceError):
        await send(data)


async def test_a_reset_breaks_both_sides(autojump_clock: MockClock) -> None:
    server = Server()
    async with weather(server, ChaosPlan(cut_after=(1000, 1000), cut_ways=(Way.THERE,), reset=1.0)) as (chaos, reports):
        async with chaos.dial() as stream:
            await stream.send_all(DATA)
            assert (await receive(stream))[1] == "broken"
    assert len(server.got[0]) == 1000
    assert reports[0].how is Cut.RESET
    assert chaos.stats().resets == 1


@pytest.mark.parametrize("stalled", [(Way.THERE,), (Way.BACK,), (Way.THERE, Way.BACK)])
async def test_a_stall_tells_nobody_until_its_time_is_over(stalled: tuple[Way, ...], autojump_clock: MockClock) -> None:
    server, heard = Server(sends=DATA), list[tuple[bytes, str]]()
    plan = ChaosPlan(cut_after=(1000, 1000), cut_ways=(Way.THERE,), stall=1.0, stall_for=500.0)
    seed = next(seed for seed in itertools.count() if plan.fate(seed, 0).stalled == stalled)

    async def listen(stream: trio.abc.Stream) -> None:
        heard.append(await receive(stream))

    async with weather(server, plan, seed) as (chaos, reports), chaos.dial() as stream, trio.open_nursery() as nursery:
        assert isinstance(stream, trio.abc.HalfCloseableStream)
        nursery.start_soon(listen, stream)
        with trio.move_on_after(400):
            await suppressed(stream.send_all, DATA)
            await stream.send_eof()
            await trio.sleep_forever()
        assert [(report.how, report.way, report.bytes_there) for report in reports] == [(Cut.STALL, Way.THERE, 1000)]
        assert bytes(server.got[0]) == (DATA[:1000] if Way.THERE in stalled else DATA)
        assert server.ends == ([] if Way.THERE in stalled else ["end"])
        assert heard == ([] if Way.BACK in stalled else [(DATA, "end")])
        await trio.sleep(101)
        assert chaos.stats().live == 0
        assert len(server.ends) == len(heard) == 1


async def test_who_leaves_a_stalled_connection_is_not_waited_for(autojump_clock: MockClock) -> None:
    server = Server()
    async with weather(server, ChaosPlan()) as (chaos, _):
        async with chaos.dial():
            chaos.cut_all(Cut.STALL)
            start = trio.current_time()
        assert trio.current_time() == start
        await trio.sleep(59)
        assert (server.ends, chaos.stats().live) == ([], 1)
        await trio.sleep(2)
        assert (server.ends, chaos.stats().live) == (["end"], 0)


async def test_news_does_not_go_through_a_stall(autojump_clock: MockClock) -> None:
    server = Server(sends=DATA * 10)
    plan = ChaosPlan(cut_after=(10, 10), cut_ways=(Way.THERE,), stall=1.0)
    seed = next(seed for seed in itertools.count() if plan.fate(seed, 0).stalled == (Way.THERE,))
    async with weather(server, plan, seed) as (chaos, _):
        async with chaos.dial() as stream:
            await stream.send_all(bytes(20))
            await trio.sleep(1)
        await trio.sleep(50)  # bytes for the client come back to a client that is gone
        assert server.ends == []
        await trio.sleep(10)
        assert server.ends != []


async def test_after_a_cut_connections_are_refused_for_a_while(autojump_clock: MockClock) -> None:
    server = Server()
    plan = ChaosPlan(cut_after=(10, 10), cut_ways=(Way.THERE,), refuse=1.0, refuse_for=5.0)
    async with weather(server, plan) as (chaos, _):
        async with chaos.dial() as stream:
            await stream.send_all(bytes(10))
            await receive(stream)
        start = trio.current_time()
        with pytest.raises(ConnectionRefusedError):
            async with chaos.dial():
                pass
        await trio.sleep(4.9)
        with pytest.raises(ConnectionRefusedError):
            async with chaos.dial():
                pass
        await trio.sleep(0.2)
        async with chaos.dial():
            pass
        assert trio.current_time() - start == pytest.approx(5.1, abs=0.1)
        assert chaos.connections == 2


async def test_a_hand_may_cut_refuse_and_admit(autojump_clock: MockClock) -> None:
    server = Server()
    async with weather(server, ChaosPlan()) as (chaos, reports):
        async with chaos.dial() as one, chaos.dial() as other:
            chaos.cut_all()
            assert [await receive(stream) for stream in (one, other)] == [(b"", "broken")] * 2
        chaos.refuse()
        await trio.sleep(10**6)
        with pytest.raises(ConnectionRefusedError):
            async with chaos.dial():
                pass
        chaos.admit()
        async with chaos.dial() as stream:
            chaos.cut_all(Cut.END)
            assert await receive(stream) == (b"", "end")
    assert [(report.number, report.how, report.way) for report in reports[-1:]] == [(2, Cut.END, None)]
    assert chaos.cuts == 3


async def test_what_was_sent_before_closing_still_arrives(autojump_clock: MockClock) -> None:
    server = Server()
    async with weather(server, ChaosPlan(delay=3.0)) as (chaos, _):
        async with chaos.dial() as stream:
            await stream.send_all(b"last words")
        await trio.sleep(4)
        assert (bytes(server.got[0]), server.ends) == (b"last words", ["end"])
        assert chaos.stats().live == 0


async def test_a_target_that_is_not_there_says_so_itself(autojump_clock: MockClock) -> None:
    async with chaos_dial(lambda: memory.connect("nobody"), ChaosPlan()) as chaos:
        with pytest.raises(ConnectionRefusedError, match="no listener of this process"):
            async with chaos.dial():
                pass
    assert chaos.stats().unreachable == 1


async def test_a_dial_can_be_given_up(autojump_clock: MockClock) -> None:
    left = trio.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[trio.abc.Stream]:
        try:
            await trio.sleep_forever()
            yield memory.pair()[0]
        finally:
            left.set()

    async with chaos_dial(never, ChaosPlan()) as chaos:
        with trio.move_on_after(1) as scope:
            async with chaos.dial():
                pass
        assert scope.cancelled_caught
        with trio.fail_after(1):
            await left.wait()


async def test_the_counters_say_what_got_through(autojump_clock: MockClock) -> None:
    server = Server(sends=bytes(300))
    async with weather(server, ChaosPlan()) as (chaos, _):
        async with chaos.dial() as stream:
            await stream.send_all(bytes(200))
            assert isinstance(stream, trio.abc.HalfCloseableStream)
            await stream.send_eof()
            await receive(stream)
            await trio.sleep(2)
        stats = chaos.stats()
    assert (stats.connections, stats.live, stats.bytes_there, stats.bytes_back) == (1, 0, 200, 300)


@pytest.mark.requirement("R-51")
@pytest.mark.seeds(5, soak=300)
async def test_numbers_come_without_a_gap_or_a_repeat_over_many_cuts(seed: int, autojump_clock: MockClock) -> None:
    """The smallest protocol that resumes: the client says how many numbers it has, the server sends the rest."""
    count, numbers = 1000, list[int]()

    async def serve(stream: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError):
            asked = b""
            while not asked.endswith(b"\n"):
                data = await stream.receive_some()
                if not data:
                    return
                asked += data
            for number in range(int(asked), count):
                await stream.send_all(b"%d\n" % number)

    async def run(stream: trio.abc.Stream) -> Ended:
        before, rest = len(numbers), b""
        with suppress(trio.BrokenResourceError), trio.move_on_after(20):
            await stream.send_all(b"%d\n" % len(numbers))
            while data := await stream.receive_some():
                *lines, rest = (rest + data).split(b"\n")
                numbers.extend(map(int, lines))
        if len(numbers) == count:
            return Ended.DONE
        return Ended.WORKED if len(numbers) > before else Ended.LOST

    plan = ChaosPlan(
        cut_after=(0, 150),
        cut_ways=(Way.BACK,),
        reset=0.3,
        stall=0.02,
        delay=0.01,
        jitter=0.05,
        refuse=0.05,
        refuse_for=3.0,
    )
    async with trio.open_nursery() as nursery:
        [name] = await nursery.start(memory.serve, serve, "numbers")
        async with chaos_dial(lambda: memory.connect(name), plan, seed) as chaos:
            await redial(chaos.dial, run, backoff=Backoff(random=random.Random(seed)))
            assert chaos.cuts > 0  # few, if one way was stalled and the other carried all the rest
        nursery.cancel_scope.cancel()
    assert numbers == list(range(count))
