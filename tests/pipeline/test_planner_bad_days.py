"""Planning with expired sessions, acknowledgements of other clients, and servers that went back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import DataLoss
from tests.pipeline._source_place import place, ranges, step
from tests.pipeline._source_servers import ONE, TWO

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_what_another_query_has_acknowledged_is_a_loss_with_its_ids(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 20)
        planner = there.planner(maxMessagesPerTrigger=5)
        end = await step(planner, planner.initial())
        await there.store.ack(ONE, 12)
        with pytest.raises(DataLoss, match=rf"stream {ONE}: message 6 is next, and everything up to 12"):
            await step(planner, end)


async def test_without_an_error_it_goes_on_with_the_oldest_that_is_left(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        await there.feed(ONE, 20)
        planner = there.planner(maxMessagesPerTrigger=5, failOnDataLoss="false")
        end = await step(planner, planner.initial())
        await there.store.ack(ONE, 12)
        after = await step(planner, end)
        assert await ranges(planner, end, after) == {ONE: (12, 17)}
        assert "message 6 is next, and everything up to 12" in caplog.text


async def test_an_expired_session_is_a_loss(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.store.register(ONE, {}, params={}, attached=False, keep=60.0)
        await there.store.append_many(ONE, [1, 2, 3])
        planner = there.planner()
        end = await step(planner, planner.initial())
        await trio.sleep(61)
        with pytest.raises(DataLoss, match=f"stream {ONE}: no server knows it .* messages up to 3 were read"):
            await step(there.planner(), end)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("count", [3, 5, 100])
async def test_a_session_that_was_made_anew_is_a_loss_however_long_it_is(autojump_clock: MockClock, count: int) -> None:
    """Was: A session that was wiped and made anew, and was longer by then than the position of a Spark query, was read
    from that position on: its first messages were skipped without a word.
    """
    async with place() as there:
        await there.feed(ONE, 5)
        end = await step(there.planner(), there.planner().initial())
    async with place() as there:
        await there.feed(ONE, count)
        with pytest.raises(DataLoss, match="another session of the same name, made anew since; message 5 of the old"):
            await step(there.planner(), end)
        again = there.planner(failOnDataLoss="false")
        assert await ranges(again, end, await step(again, end)) == {ONE: (0, count)}


async def test_takeovers_make_no_other_session(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 5)
        planner = there.planner()
        end = await step(planner, planner.initial())
        for _ in range(3):
            await there.store.attach(ONE)
        await there.feed(ONE, 1, first=6)
        assert await ranges(planner, end, await step(planner, end)) == {ONE: (5, 6)}


async def test_a_server_that_has_gone_back_is_a_loss(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if its store had been restored from a copy: the same session, and less of it.
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)
    async with place() as there:
        await there.feed(ONE, 50)
        end = await step(there.planner(), there.planner().initial())
    async with place() as there:
        await there.feed(ONE, 20)
        with pytest.raises(DataLoss, match="message 50 was known and 20 is the last one now"):
            await step(there.planner(), end)


async def test_finished_streams_leave_the_offset_once_they_are_acknowledged(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        await there.store.finish(ONE)
        planner = there.planner(f"{ONE} {TWO}", reader="store")
        first = await step(planner, planner.initial())
        await there.feed(TWO, 1)
        second = await step(planner, first)  # not acknowledged yet: it has to stay
        assert ONE in str(second)
        await planner.commit(first)
        await there.feed(TWO, 1)
        third = await step(planner, second)
        assert ONE not in str(third)
        await there.store.expire(trio.current_time() + 1e9)
        await there.feed(TWO, 1)
        fresh = there.planner(TWO)
        assert await ranges(fresh, second, third) == {TWO: (11, 12)}


async def test_a_finished_stream_whose_acknowledgement_was_lost_is_not_read_again(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        await there.store.finish(ONE)
        planner = there.planner(f"{ONE} {TWO}", ackMode="never")
        start = await step(planner, planner.initial())
        for count in range(11, 14):
            await there.feed(TWO, 1)
            end = await step(planner, start)
            assert await ranges(planner, start, end) == {TWO: (count - 1, count)}
            start = end


async def test_a_stream_that_is_not_named_any_more_keeps_its_place(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        both = there.planner(f"{ONE} {TWO}")
        first = await step(both, both.initial())
        await there.feed(ONE, 1)
        await there.feed(TWO, 1)
        only = there.planner(ONE)
        second = await step(only, first)
        assert await ranges(only, first, second) == {ONE: (10, 11)}
        again = there.planner(f"{ONE} {TWO}")
        assert await ranges(again, second, await step(again, second)) == {TWO: (10, 11)}
