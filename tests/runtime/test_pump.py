"""The stream pump moves bytes in order, never blocks one direction on the other, writes all there is, and ends once."""

from __future__ import annotations

import math
import random
from itertools import accumulate, count
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.runtime import CLOSED_HERE, HEAD
from muxkit.runtime.pumps import stream as stream_pump
from muxkit.testing import weather_pair
from muxkit_adapters import memory

from ._halves import at_rest
from ._pumps import Letters, Lines, Running, Slow, Watcher, running

if TYPE_CHECKING:
    from muxkit.core import Buffer


Link = trio.abc.Stream


async def test_a_quiet_link_is_written_to_at_once() -> None:
    here, there = memory.pair()
    async with running(here) as run:
        await trio.testing.wait_all_tasks_blocked()
        run.send(b"now")
        assert await there.receive_some() == b"now"
        assert run.pump.bytes_sent == 3


async def test_what_the_link_does_not_take_at_once_is_written_later_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muxkit.runtime.pumps.stream.INLINE_PAUSE", 0.0)  # however soon after the last write
    here, there = memory.pair(capacity=100)
    async with running(here) as run:
        await trio.testing.wait_all_tasks_blocked()
        run.send(b"a" * 250)
        assert run.pump.unsent == 150
        run.send(b"b" * 50)
        got = b""
        while len(got) < 300:
            got += await there.receive_some()
        assert got == b"a" * 250 + b"b" * 50
        await run.pump.flushed()
        assert run.pump.unsent == 0


async def test_what_is_ready_while_a_write_is_under_way_goes_out_as_one() -> None:
    link = Slow()
    async with running(link) as run:
        run.send(b"1")
        await trio.testing.wait_all_tasks_blocked()
        for number in b"234":
            run.send(bytes([number]))
        link.let_through.release()
        link.let_through.release()
        await run.pump.flushed()
        assert link.writes == [b"1", b"234"]


async def test_a_write_under_way_is_finished_before_the_reason_of_the_end_is_written() -> None:
    """Cut somewhere, it would leave no way to say why the connection ends."""
    link = Slow()
    async with running(link) as run:
        run.send(b"half of something")
        await trio.testing.wait_all_tasks_blocked()
        run.pump.lose("an error ended the session's block", by="local", parting=[b"disk full"])
        await trio.testing.wait_all_tasks_blocked()
        assert link.writes == []
        link.let_through.release()
        link.let_through.release()
    assert link.writes == [b"half of something", b"disk full"]


async def test_a_write_that_does_not_end_takes_the_reason_with_it(autojump_clock: trio.testing.MockClock) -> None:
    link = Slow()
    async with running(link) as run:
        run.send(b"half of something")
        await trio.testing.wait_all_tasks_blocked()
        run.pump.lose("an error ended the session's block", by="local", parting=[b"disk full"])
    assert link.writes == []
    assert trio.current_time() < 5


@pytest.mark.requirement("R-71")
@pytest.mark.seeds(16, soak=2000)
async def test_nothing_is_lost_when_somebody_writes_while_the_writer_waits_for_a_pair(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: While the writer waited a turn for a second large message, what somebody else wrote in part was overwritten,
    and bytes were lost.
    """
    dice = random.Random(seed)
    # Now and then a long time has gone by between two looks at the clock, so who rings writes beside a woken writer.
    ticks = count(step=1e-6)
    late = accumulate(dice.choice((0.0, 0.0, 0.001)) for _ in count())
    monkeypatch.setattr("muxkit.runtime.pumps.stream.perf_counter", lambda: next(ticks) + next(late))
    here, there = memory.pair(capacity=dice.choice((1000, 60_000, 100_000)))
    expected = [dice.randbytes(dice.choice((100, 50_000, 60_000, 200_000))) for _ in range(40)]
    async with running(here) as run, trio.open_nursery() as nursery:
        waiting = iter(expected)

        async def send() -> None:
            for message in waiting:
                run.send(message)
                await trio.lowlevel.checkpoint()

        for _ in range(dice.choice((1, 2, 3))):
            nursery.start_soon(send)
        got = bytearray()
        while len(got) < sum(map(len, expected)):
            got += await there.receive_some(dice.choice((1000, 100_000)))
        assert got == b"".join(expected)


async def test_senders_hear_that_bytes_left_the_engine_while_the_link_still_writes() -> None:
    link = Slow()
    async with running(link) as run:
        run.send(b"1")
        await trio.testing.wait_all_tasks_blocked()
        assert run.written >= 1
        assert not link.writes


async def test_flushed_waits_for_the_writer_as_well() -> None:
    link = Slow()
    async with running(link) as run, trio.open_nursery() as nursery:
        run.send(b"1")
        await trio.testing.wait_all_tasks_blocked()
        assert not run.engine.out
        with trio.move_on_after(0.01) as scope:
            await run.pump.flushed()
        assert scope.cancelled_caught
        nursery.start_soon(run.pump.flushed)
        link.let_through.release()


async def test_flushed_returns_when_the_link_is_lost() -> None:
    link = Slow()
    async with running(link) as run, trio.open_nursery() as nursery:
        run.send(b"1")
        nursery.start_soon(run.pump.flushed)
        await trio.testing.wait_all_tasks_blocked()
        run.pump.lose("cut", by="network")


@pytest.mark.requirement("R-03")
async def test_the_reader_goes_on_while_the_writer_is_stuck() -> None:
    link = Slow()
    async with running(link, Lines(echo=True)) as run:
        for number in range(100):
            link.incoming_send.send_nowait(bytes([number]))
        await trio.testing.wait_all_tasks_blocked()
        assert len(run.got) == 100


async def test_what_handling_an_event_leads_to_is_told_as_well() -> None:
    here, there = memory.pair()
    async with running(here) as run:

        def react(event: bytes) -> None:
            if event == b"a":
                run.engine.pending.append(b"consequence")

        run.on_event = react
        await trio.testing.wait_all_tasks_blocked()
        await there.send_all(b"a")
        await trio.testing.wait_all_tasks_blocked()
        assert run.got == [b"a", b"consequence"]


async def test_the_end_of_the_stream_is_the_end_also_if_the_engine_says_nothing() -> None:
    here, there = memory.pair()
    async with running(here) as run:
        await there.send_eof()
        await run.pump.hung_up.wait()
        assert run.got == [b"eof"]
        assert run.pump.loss().by == "peer"
        assert run.losses == 1


@pytest.mark.parametrize(("after", "told"), [(0.0, ""), (0.99, ""), (1.0, ", 1.0 s after it began")])
def test_the_text_of_a_loss_says_how_long_the_connection_lived_from_one_second_on(after: float, told: str) -> None:
    loss = LinkLost("the peer hung up", by="peer", after=after)
    assert (str(loss), loss.after) == (f"the peer hung up{told}", after)


@pytest.mark.requirement("R-39")
async def test_the_first_reason_counts_and_is_told_once() -> None:
    here, _there = memory.pair(name="here")
    async with running(here) as run:
        await trio.testing.wait_all_tasks_blocked()
        run.engine.out.append(b"123")
        cause = OSError("cable")
        run.pump.lose("first", by="network", cause=cause)
        run.pump.lose("second", by="peer")
        loss = run.pump.loss()
        assert (loss.reason, loss.by, loss.peer, loss.unsent) == ("first", "network", "mem here", 3)
        assert loss.after is not None
        assert loss.__cause__ is cause
        assert str(loss) == "mem here: first; 3 bytes were not sent"
        assert run.pump.loss() is not loss
        assert run.losses == 1


async def test_a_lost_link_is_closed() -> None:
    link = Slow()
    async with trio.open_nursery() as nursery:
        run = Running(link, Lines())
        nursery.start_soon(run.pump.run)
        await trio.testing.wait_all_tasks_blocked()
        run.pump.lose("cut", by="network")
    assert link.was_closed


async def test_nothing_is_written_behind_our_end() -> None:
    here, there = memory.pair()
    async with running(here, Lines(echo=True)) as run, trio.open_nursery() as nursery:
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(run.pump.hang_up)
        await there.send_all(b"an answer, please")
        await trio.testing.wait_all_tasks_blocked()
        assert not run.pump.is_lost
        assert await there.receive_some() == b""
        await there.aclose()


async def test_hanging_up_a_link_without_half_close_closes_it() -> None:
    link = Slow()
    async with running(link) as run:
        await trio.testing.wait_all_tasks_blocked()
        await run.pump.hang_up()
        assert link.was_closed
        assert run.pump.loss().reason == CLOSED_HERE
        await run.pump.hang_up()


async def test_a_deadline_is_called_when_it_comes(autojump_clock: trio.testing.MockClock) -> None:
    here, _there = memory.pair()
    engine = Lines()
    engine.deadline = trio.current_time() + 7
    async with running(here, engine):
        await trio.sleep(100)
        assert engine.called_at == [pytest.approx(trio.current_time() - 93)]


@pytest.mark.requirement("R-71")
async def test_the_timers_of_an_engine_are_started_without_delay() -> None:
    """The clock took the start for the end of a long suspension, and waited for ten passes."""
    here, _there = memory.pair()
    engine = Lines()
    engine.deadline = -math.inf
    async with running(here, engine):
        for _ in range(5):  # until the tasks of the pump have started
            await trio.lowlevel.checkpoint()
        assert len(engine.called_at) == 1


async def test_a_deadline_may_come_nearer_because_of_what_arrived(autojump_clock: trio.testing.MockClock) -> None:
    here, there = memory.pair()
    engine = Lines()
    async with running(here, engine) as run:
        await trio.sleep(1)
        start = trio.current_time()

        def react(event: bytes) -> None:
            engine.deadline = start + {b"a": 50, b"b": 5}[event]

        run.on_event = react
        await there.send_all(b"a")
        await trio.sleep(1)
        await there.send_all(b"b")
        await trio.sleep(100)
        assert engine.called_at == [pytest.approx(start + 5)]


@pytest.mark.requirement("R-52")
async def test_a_clock_that_jumps_calls_each_deadline_once(mock_clock: trio.testing.MockClock) -> None:
    here, _there = memory.pair()
    engine = Lines()
    engine.deadline = trio.current_time() + 20
    async with running(here, engine):
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(3600)
        await trio.testing.wait_all_tasks_blocked()
        assert len(engine.called_at) == 1


@pytest.mark.requirement("R-27")
async def test_a_flood_of_frames_is_taken_in_turns_with_a_yield_between() -> None:
    here, there = memory.pair(capacity=1_000_000)
    engine = Letters()
    async with running(here, engine) as run:
        others = 0

        async def count() -> None:
            nonlocal others
            while True:
                others += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                await there.send_all(bytes(90_000))
            nursery.start_soon(count)
            while sum(engine.fed) < 900_000:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert b"".join(run.got) == bytes(900_000)
        assert max(engine.fed) <= 1024
        assert others >= 800


@pytest.mark.seeds(8, soak=500)
async def test_turns_of_any_size_give_every_byte_once(seed: int) -> None:
    dice = random.Random(seed)
    here, there = memory.pair(capacity=1_000_000)
    engine = Letters()
    async with running(here, engine) as run:
        sent = b""
        for _ in range(30):
            engine.frames_at_once = dice.choice((1, 100, 10**9))
            data = dice.randbytes(dice.choice((10, 500, 7_000, 300_000 if engine.frames_at_once > 100 else 3_000)))
            sent += data
            await there.send_all(data)
            await trio.testing.wait_all_tasks_blocked()
        assert b"".join(run.got) == sent


async def test_an_observer_sees_the_bytes_and_the_loss_of_the_link() -> None:
    here, there = weather_pair(1)
    watcher = Watcher()
    async with running(here, observer=watcher) as run:
        run.send(b"out")
        assert await there.receive_some(1)
        there.reset()
        await run.pump.hung_up.wait()
    assert watcher.bytes["out"] == b"out"
    (error,) = watcher.errors
    assert isinstance(error, LinkLost)


async def test_a_foreign_peer_is_recognised_however_its_first_bytes_are_cut() -> None:
    here, there = memory.pair()
    async with running(here) as run:
        for byte in b"HTTP/1.1 400 Bad Request\r\n\r\n":
            await there.send_all(bytes([byte]))
            await at_rest()
        assert run.pump.foreign == "; its bytes look like an HTTP response"


async def test_the_first_bytes_of_the_peer_end_the_phase_of_the_handshake() -> None:
    here, there = memory.pair()
    async with running(here) as run:
        phases = [run.pump.phase]
        await there.send_all(b"x")
        await at_rest()
        phases.append(run.pump.phase)
    assert phases == ["handshake", "open"]


async def test_later_bytes_leave_the_phase_alone_that_a_session_has_set() -> None:
    here, there = memory.pair()
    async with running(here) as run:
        await there.send_all(bytes(HEAD))
        await at_rest()
        run.pump.phase = "leave"
        await there.send_all(b"x")
        await at_rest()
        assert run.pump.phase == "leave"


async def test_both_sides_may_push_over_a_link_that_takes_nothing_until_it_is_read() -> None:
    one, other = trio.testing.lockstep_stream_pair()
    async with running(one) as here, running(other) as there:
        for _ in range(50):
            here.send(bytes(10_000))
            there.send(bytes(10_000))
            await trio.lowlevel.checkpoint()
        while sum(map(len, here.got)) < 500_000 or sum(map(len, there.got)) < 500_000:
            await trio.testing.wait_all_tasks_blocked()


ROOM = [65_536, 16]  # bytes that the link takes at once: everything, or a part


class Telling(Lines):
    """Says once that something has left it."""

    has_told = False

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        buffers = super().buffers_to_send(limit)
        if buffers and not self.has_told:
            self.has_told = True
            self.pending.append(b"left")
        return buffers


async def _received(link: memory.MemoryStream, size: int) -> bytes:
    got = b""
    with trio.move_on_after(60):
        while len(got) < size:
            got += await link.receive_some(8)
    return got


@pytest.mark.parametrize("room", ROOM)
async def test_an_answer_to_what_the_engine_says_of_a_write_goes_behind_it(
    room: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(stream_pump, "INLINE_PAUSE", -1.0)  # however soon a write is requested, it is done now
    here, there = memory.pair(capacity=room)
    async with running(here, Telling()) as run:
        run.on_event = lambda event: run.send(b"B" * 10)
        await at_rest()
        run.send(b"A" * 30)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10


@pytest.mark.parametrize("room", ROOM)
async def test_what_fails_behind_a_write_leaves_the_rest_of_it_to_the_writer(
    room: int, autojump_clock: trio.testing.MockClock
) -> None:
    here, there = memory.pair(capacity=room)
    async with running(here, Telling()) as run:

        def fail(event: bytes) -> None:
            raise ZeroDivisionError

        run.on_event = fail
        await at_rest()
        with pytest.raises(ZeroDivisionError):
            run.send(b"A" * 30)
        run.send(b"B" * 10)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10


class Eager(Lines):
    """Wants to be called while it has something to send, and 7 s after that has left; and at a time of its own."""

    timer: float | None = None

    def next_timer(self) -> float | None:
        return self.timer

    def next_deadline(self) -> float | None:
        return trio.current_time() if self.out else self.timer

    def handle_deadline(self, now: float) -> None:
        self.called_at.append(now)
        if self.timer is not None and self.timer <= now:
            self.timer = None

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        self.timer = trio.current_time() + 7
        return super().buffers_to_send(limit)


@pytest.mark.requirement("R-71")
async def test_an_engine_that_waits_to_send_is_left_alone_while_the_link_takes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Was: An e3x session over a byte stream that took nothing any more kept a core busy: what waits to be sent was due
    at once, without end.
    """
    here, there = memory.pair(capacity=16)
    engine = Eager()
    begun = trio.current_time()
    async with running(here, engine) as run:
        await at_rest()
        run.send(b"A" * 30)  # takes a part
        run.send(b"B" * 10)
        run.pump.rearm()
        await trio.sleep(5)
        await there.send_all(b"a sign of life")
        await trio.sleep(15)
        assert engine.called_at == [begun + 7]  # its own timer still counts
        await trio.sleep(10)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10
        await trio.sleep(100)
        assert engine.called_at[-1] == begun + 37
        assert len(engine.called_at) <= 3  # once more perhaps, when the link takes something again


async def test_nor_is_it_called_without_end_once_we_have_hung_up(autojump_clock: trio.testing.MockClock) -> None:
    here, there = memory.pair()
    engine = Eager()
    async with running(here, engine) as run, trio.open_nursery() as nursery:
        await at_rest()
        nursery.start_soon(run.pump.hang_up)
        await at_rest()
        run.send(b"too late")
        run.pump.rearm()
        await trio.sleep(10)
        assert engine.called_at == []
        await there.send_eof()


@pytest.mark.parametrize("room", ROOM)
async def test_the_timers_that_begin_with_a_write_are_kept(room: int, autojump_clock: trio.testing.MockClock) -> None:
    here, there = memory.pair(capacity=room)
    engine = Eager()
    begun = trio.current_time()
    async with running(here, engine) as run:
        await at_rest()
        run.send(b"A" * 30)
        assert await _received(there, 30) == b"A" * 30
        await trio.sleep(100)
        assert engine.called_at == [begun + 7]


class Empty(Telling):
    """Thinks that it has something to write, and finds when it is asked for it that it has not."""

    is_ready = False

    def has_output(self) -> bool:
        return self.is_ready or super().has_output()

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        if self.is_ready:
            self.is_ready = False
            self.pending.append(b"nothing")
            return []
        return super().buffers_to_send(limit)


@pytest.mark.parametrize("late", [-1.0, 1e9], ids=["rung late", "rung in time"])
async def test_what_follows_from_a_write_of_nothing_is_written(
    late: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(stream_pump, "LATE_SECONDS", late)
    monkeypatch.setattr(stream_pump, "INLINE_PAUSE", 1e9)  # it is the writer who is asked
    here, there = memory.pair(capacity=16)
    engine = Empty()
    engine.has_told = True
    async with running(here, engine) as run:
        run.on_event = lambda event: run.send(b"A" * 40)
        await at_rest()
        engine.is_ready = True
        run.pump.request_write()
        assert await _received(there, 40) == b"A" * 40
