"""The pump for streams side by side takes no more than the link has room for, and waits for no stream."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LinkLost, RemoteProtocolError
from muxkit.core import Consumed, Lent, Reset, Stop
from muxkit.runtime import CLOSED_HERE, Datagram, StreamData, StreamReset, StreamStopped

from ._pumps import RunningMultistream as Running
from ._pumps import running_multistream as running

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_what_is_queued_is_written_to_its_stream_with_its_end() -> None:
    async with running() as run:
        run.engine.queue(2, b"first")
        run.engine.queue(6, b"second", last=True)
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.written == [(2, b"first", False), (6, b"second", True)]
        assert run.link.opened == [2, 6]
        assert run.pump.bytes_sent == 11
        assert run.written == 1


async def test_a_stream_without_room_is_parked_and_keeps_nobody_waiting() -> None:
    async with running() as run:
        run.link.rooms[2] = 3
        run.engine.queue(2, b"too much")
        run.engine.queue(6, b"beside")
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.written == [(2, b"too", False), (6, b"beside", False)]
        assert run.engine.parked == {2}
        assert run.link.wanted == [2]
        run.link.to_receive.send_nowait([])
        run.link.to_grant.send_nowait([2])
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.written[2:] in ([], [(2, b" much", False)])


async def test_a_parked_stream_goes_on_when_it_has_room() -> None:
    async with running() as run:
        run.link.rooms[2] = 0
        run.engine.queue(2, b"later", last=True)
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert not run.link.written
        run.link.to_grant.send_nowait([2])
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.written == [(2, b"later", True)]
        assert not run.engine.parked


@pytest.mark.requirement("R-08")
async def test_no_more_leaves_the_engine_than_the_link_has_room_for() -> None:
    async with running() as run:
        run.link.rooms[2] = 100_000
        for _ in range(64):
            run.engine.queue(2, bytes(1024 * 1024))
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.engine.pulled == 100_000


@pytest.mark.requirement("R-28")
async def test_streams_take_turns_in_chunks() -> None:
    async with running() as run:
        run.engine.queue(2, bytes(300_000))
        run.engine.queue(6, bytes(70_000))
        run.engine.queue(10, b"small")
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert [stream for stream, _, _ in run.link.written[:5]] == [2, 6, 10, 2, 6]


async def test_control_is_run_before_anything_is_written() -> None:
    async with running() as run:
        run.engine.control = [Consumed(3, 5), Lent(3, 7), Reset(2), Stop(3)]
        run.engine.wanted = 7
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.done == [Consumed(3, 5), Lent(3, 7), Reset(2), Stop(3)]
        assert run.written == 1


@pytest.mark.parametrize(("credit", "lent"), [(0, [Lent(3, 7)]), (4, [Lent(3, 6)]), (10, []), (12, [])])
async def test_only_what_a_frame_lacks_beyond_its_credit_is_lent(credit: int, lent: list[Lent]) -> None:
    async with running() as run:
        run.engine.control = [Lent(3, 7)]
        run.engine.wanted = 10
        run.link.credits[3] = credit
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.done == lent


async def test_datagrams_stay_in_the_engine_while_the_link_has_no_room_for_them() -> None:
    async with running() as run:
        run.link.datagram_room = 2
        run.engine.datagrams += [b"1", b"2", b"3"]
        run.engine.queue(2, b"beside")
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.datagrams == [b"1", b"2"]
        assert run.engine.datagrams == deque([b"3"])
        assert run.link.written
        run.link.datagram_room = 10
        run.link.to_grant.send_nowait([])
        await trio.testing.wait_all_tasks_blocked()
        assert run.link.datagrams == [b"1", b"2", b"3"]


async def test_what_comes_is_fed_to_the_engine_and_its_events_handed_out() -> None:
    async with running() as run:
        run.link.to_receive.send_nowait(
            [StreamData(3, b"data", True), StreamReset(7), StreamStopped(2), Datagram(b"alone")]
        )
        await trio.testing.wait_all_tasks_blocked()
        assert run.got == [(3, b"data", True), ("reset", 7), ("stopped", 2), b"alone"]
        assert run.pump.bytes_received == 9
        assert run.engine.rtt == run.pump.round_trip == 0.25


async def test_a_stream_that_was_stopped_is_waited_for_no_more() -> None:
    async with running() as run:
        run.link.rooms[2] = 0
        run.link.delivered.set()
        run.engine.queue(2, b"never")
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        run.link.to_receive.send_nowait([StreamStopped(2)])
        await run.pump.flushed()


@pytest.mark.requirement("R-27")
async def test_a_flood_leaves_the_others_their_turn() -> None:
    async with running() as run:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while len(run.got) < 40:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            run.link.to_receive.send_nowait([StreamData(3, bytes(160_000), False)])
        assert turns > 20
        assert b"".join(data for _, data, _ in run.of_streams()) == bytes(160_000)


async def test_the_rest_of_a_frame_comes_in_one_slice_and_what_is_behind_it_in_small_ones() -> None:
    async with running() as run:
        run.engine.wanted = 50_000

        def take() -> None:
            run.engine.wanted = 0

        run.engine.on_receive = take
        run.link.to_receive.send_nowait([StreamData(3, bytes(60_000), True)])
        await trio.testing.wait_all_tasks_blocked()
        got = [(len(data), is_last) for _, data, is_last in run.of_streams()]
        assert got == [(50_000, False), (4096, False), (4096, False), (1808, True)]


async def test_only_the_last_slice_ends_a_stream() -> None:
    async with running() as run:
        run.link.to_receive.send_nowait([StreamData(3, bytes(10_000), True)])
        await trio.testing.wait_all_tasks_blocked()
        assert [is_last for _, _, is_last in run.of_streams()] == [False, False, True]


@pytest.mark.requirement("R-03")
async def test_the_reader_goes_on_while_nothing_can_be_written() -> None:
    async with running() as run:
        run.link.rooms[2] = 0
        run.engine.on_receive = lambda: run.engine.queue(2, b"answer")
        for _ in range(100):
            run.link.to_receive.send_nowait([StreamData(3, b"question", False)])
        await trio.testing.wait_all_tasks_blocked()
        assert len(run.got) == 100
        assert not run.link.written


async def test_deadlines_are_kept_also_those_that_come_later(autojump_clock: MockClock) -> None:
    async with running() as run:
        start = trio.current_time()
        run.engine.deadline = start + 5
        run.pump.rearm()
        await trio.sleep(10)
        assert run.got == [("time", start + 5)]


async def test_flushed_waits_for_parked_streams_and_for_the_peer() -> None:
    async with running() as run:
        run.link.rooms[2] = 0
        run.engine.queue(2, b"later")
        run.pump.request_write()
        async with trio.open_nursery() as nursery:
            is_flushed = trio.Event()

            async def flush() -> None:
                await run.pump.flushed()
                is_flushed.set()

            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            run.link.to_grant.send_nowait([2])
            await trio.testing.wait_all_tasks_blocked()
            assert run.link.written
            assert not is_flushed.is_set()
            run.link.delivered.set()
            await is_flushed.wait()


async def test_flushed_returns_when_the_link_is_lost() -> None:
    async with running() as run, trio.open_nursery() as nursery:
        run.link.rooms[2] = 0
        run.engine.queue(2, b"never")
        run.pump.request_write()
        nursery.start_soon(run.pump.flushed)
        await trio.testing.wait_all_tasks_blocked()
        run.pump.lose("cut", by="network")


async def test_an_orderly_end_is_told_to_the_engine_before_the_loss() -> None:
    async with running() as run:
        run.link.to_receive.send_nowait([])
        await run.pump.hung_up.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert run.got == ["closed"]
        assert run.losses == 1
        assert "the peer hung up" in str(run.pump.loss())
        assert run.link.was_closed


async def test_a_broken_link_is_a_loss_by_the_network_with_its_cause() -> None:
    async with running() as run:
        run.queued = 77
        run.link.to_receive.close()
        await run.pump.hung_up.wait()
        loss = run.pump.loss()
        assert isinstance(loss, LinkLost)
        assert (loss.by, loss.unsent, str(loss.__cause__)) == ("network", 77, "no answer")
        run.pump.lose("second", by="peer")
        assert run.losses == 1


async def test_a_peer_who_broke_a_rule_is_told_which() -> None:
    async with running() as run:
        run.pump.lose("bad", by="peer", cause=RemoteProtocolError("frame 9 is no frame"))
        assert run.link.closings == ["frame 9 is no frame"]


async def test_hanging_up_is_an_orderly_goodbye() -> None:
    async with running() as run:
        await run.pump.hang_up()
        assert run.link.closings == [""]
        assert run.link.was_closed
        loss = run.pump.loss()
        assert (loss.by, loss.reason) == ("local", CLOSED_HERE)
        await run.pump.hang_up()
        assert run.losses == 1


async def test_a_cancelled_pump_hangs_up_and_closes_its_link() -> None:
    async with trio.open_nursery() as nursery:
        run = Running()
        nursery.start_soon(run.pump.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert run.link.closings == ["the other side hung up"]
    assert run.link.was_closed
    assert run.pump.is_lost


async def test_ringing_after_the_end_does_nothing() -> None:
    async with running() as run:
        run.pump.lose("cut", by="network")
        run.engine.queue(2, b"never")
        run.pump.request_write()
        await trio.testing.wait_all_tasks_blocked()
        assert not run.link.written
