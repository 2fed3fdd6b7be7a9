"""Each message is in one batch, in the order of calls that Spark makes: the driver's side, without a JVM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit.pipeline import OffsetError, OptionError
from muxkit.pipeline.source.planner import Planner
from muxkit.protocols import restream
from tests.pipeline._source_place import ids, place, ranges, step
from tests.pipeline._source_servers import KEEP, ONE, TWO, feed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trio.testing import MockClock


async def test_batches_follow_each_other_and_the_server_forgets_what_is_committed(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 100)
        planner = there.planner(reader="store", maxMessagesPerTrigger=40)
        start = planner.initial()
        got: list[int] = []
        for expected in (40, 80, 100):
            end = await step(planner, start)
            await planner.commit(start)  # Spark does this once the end is written down
            for span in await planner.spans(start, end):
                got += await ids(there.client(), span)
            assert got == list(range(1, expected + 1))
            start = end
        assert await there.acknowledged(ONE) == 80


async def test_nothing_new_is_the_same_offset_to_the_letter(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        planner = there.planner(f"{TWO} {ONE}")
        end = await step(planner, planner.initial())
        text = json.dumps(end)
        assert json.dumps(await planner.latest(json.loads(text))) == text
        # and in another process, which knows nothing
        assert json.dumps(await there.planner(f"{ONE} {TWO}").latest(json.loads(text))) == text


async def test_the_last_batch_is_acknowledged_when_nothing_comes_behind_it(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        planner = there.planner(reader="store")
        end = await step(planner, planner.initial())
        assert await there.acknowledged(ONE) == 0
        assert await step(planner, end) == end
        assert await there.acknowledged(ONE) == 10


@pytest.mark.parametrize(("mode", "committed", "idle"), [("idle", 10, 20), ("commit", 10, 10), ("never", 0, 0)])
async def test_when_it_is_acknowledged_can_be_chosen(
    autojump_clock: MockClock, mode: str, committed: int, idle: int
) -> None:
    async with place() as there:
        await there.feed(ONE, 20)
        planner = there.planner(ackMode=mode, maxMessagesPerTrigger=10)
        first = await step(planner, planner.initial())
        second = await step(planner, first)
        await planner.commit(first)
        assert await there.acknowledged(ONE) == committed
        await step(planner, second)
        assert await there.acknowledged(ONE) == idle


async def test_an_acknowledgement_that_fails_hurts_nobody_and_is_made_up_for(autojump_clock: MockClock) -> None:
    async with restream.open_store("memory:", keep=KEEP, now=trio.current_time) as store:
        async with place("first", store=store) as there:
            await there.feed(ONE, 10)
            planner = there.planner(reader="store")
            end = await step(planner, planner.initial())
        began = trio.current_time()
        await planner.commit(end)  # no server is there
        assert trio.current_time() - began <= 10.0
        await store.append_many(ONE, [11])
        await recovers(store, end)


async def recovers(store: Any, end: Mapping[str, object]) -> None:  # noqa: ANN401 - any kind of store
    async with place("first", store=store) as there:
        assert await step(there.planner(reader="store"), end) != end
        planner = there.planner(reader="store")
        after = await step(planner, end)
        assert await step(planner, after) == after
        assert await there.acknowledged(ONE) == 11


async def test_a_session_that_is_gone_when_it_is_acknowledged_is_only_told_of(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        await there.store.register(ONE, {}, params={}, attached=False, keep=60.0)
        await there.store.append_many(ONE, [1, 2, 3])
        planner = there.planner(reader="store")
        end = await step(planner, planner.initial())
        await trio.sleep(61)
        await planner.commit(end)
        assert f"stream {ONE}: message 3 is not acknowledged, the next will cover it" in caplog.text


async def test_a_batch_that_is_made_again_in_another_process_has_the_same_ranges(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        await there.store.ack(TWO, 4)
        planner = there.planner(f"{ONE} {TWO}")
        start = planner.initial()
        end = await step(planner, start)
        expected = {ONE: (0, 10), TWO: (4, 10)}
        assert await ranges(planner, start, end) == expected
        await there.feed(ONE, 5)
        assert await ranges(there.planner(f"{ONE} {TWO}"), start, end) == expected


async def test_a_stream_that_is_registered_later_joins_from_its_first_message(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        planner = there.planner(f"{ONE} {TWO}", failOnDataLoss="false")
        first = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), first) == {ONE: (0, 10)}
        await there.feed(TWO, 3)
        second = await step(planner, first)
        assert await ranges(planner, first, second) == {TWO: (0, 3)}
        assert await ranges(there.planner(f"{ONE} {TWO}"), first, second) == {TWO: (0, 3)}


async def test_a_named_stream_that_nobody_knows_at_first_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place() as there:
        planner = there.planner()
        with pytest.raises(OptionError, match=f"option streams: no server knows stream {ONE}"):
            await step(planner, planner.initial())


# ---------------------------------------------------------------------------- where it begins


async def test_a_query_that_is_about_to_be_stopped_plans_no_batch_and_says_so(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    file = tmp_path / "stop"
    async with place() as there:
        await there.feed(ONE, 5)
        planner = there.planner(stopFile=file, reader="table")
        end = await step(planner, planner.initial())
        await there.feed(ONE, 5)
        file.touch()
        assert await step(planner, end) == end
        assert file.read_text() == "between two batches\n"
        assert await there.acknowledged(ONE) == 5
        assert await step(planner, end) == end
        file.unlink()
        assert await ranges(planner, end, await step(planner, end)) == {ONE: (5, 10)}


async def test_latest_means_the_first_look_also_after_a_crash_in_the_first_batch(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 100)
        planner = there.planner(startingOffsets="latest")
        start = planner.initial()
        fixed = await step(planner, start)
        assert await ranges(planner, start, fixed) == {}
        await there.feed(ONE, 5)
        again = there.planner(startingOffsets="latest")
        assert await ranges(again, start, fixed) == {}
        end = await step(again, fixed)
        assert await ranges(again, fixed, end) == {ONE: (100, 105)}


async def test_offsets_to_begin_with_are_of_the_streams_they_name(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        planner = there.planner(f"{ONE} {TWO}", startingOffsets=json.dumps({ONE: 8}))
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (8, 10), TWO: (0, 10)}


async def test_a_beginning_behind_the_end_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        planner = there.planner(startingOffsets=json.dumps({ONE: 11}))
        with pytest.raises(OptionError, match=rf"option startingOffsets: stream {ONE} has 10 messages and .* 11"):
            await step(planner, planner.initial())


async def test_an_offset_of_a_newer_version_is_refused_wherever_it_comes(autojump_clock: MockClock) -> None:
    async with place("nobody") as there:
        planner = there.planner()
    newer = {"version": 3, "streams": {}, "begins": {}}
    for call in (planner.latest(newer), planner.commit(newer), planner.spans(newer, newer)):
        with pytest.raises(OffsetError, match="version 3 and this muxkit reads version 2"):
            await call


# ---------------------------------------------------------------------------- limits


async def test_a_limit_of_messages_is_split_by_what_waits(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 900)
        await there.feed(TWO, 100)
        planner = there.planner(f"{ONE} {TWO}", maxMessagesPerTrigger=100)
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (0, 89), TWO: (0, 11)}


async def test_spark_may_ask_for_everything_whatever_the_options_say(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 900)
        planner = there.planner(maxMessagesPerTrigger=100, minMessagesPerTrigger=50)
        end = await step(planner, planner.initial(), limited=False)
        assert await ranges(planner, planner.initial(), end) == {ONE: (0, 900)}


async def test_a_limit_of_bytes_counts_bytes(autojump_clock: MockClock) -> None:
    async with place() as there:
        await feed(there.store, ONE, ["x" * 998] * 100)
        planner = there.planner(maxBytesPerTrigger="10000")
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (0, 10)}


async def test_a_message_that_is_larger_than_the_limit_comes_alone(autojump_clock: MockClock) -> None:
    async with place() as there:
        await feed(there.store, ONE, ["x" * 998] * 3)
        planner = there.planner(maxBytesPerTrigger="10")
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (0, 1)}


async def test_too_few_messages_wait_for_more_or_for_the_time(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        now = 0.0
        options = there.options(minMessagesPerTrigger=50, maxTriggerDelay="5m")
        planner = Planner(options, now=lambda: now)
        start = planner.initial()
        assert await step(planner, start) == start
        now = 299.0
        assert await step(planner, start) == start
        now = 300.0
        end = await step(planner, start)
        assert await ranges(planner, start, end) == {ONE: (0, 10)}
        await there.feed(ONE, 50)
        assert await ranges(planner, end, await step(planner, end)) == {ONE: (10, 60)}


async def test_what_is_available_now_has_an_end(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 100)
        planner = there.planner(
            f"{ONE} {TWO}", reader="store", maxMessagesPerTrigger=60, minMessagesPerTrigger=50, failOnDataLoss="false"
        )
        await planner.prepare_available_now()
        await there.feed(ONE, 100)
        await there.feed(TWO, 100)
        first = await step(planner, planner.initial())
        second = await step(planner, first)
        assert await ranges(planner, first, second) == {ONE: (60, 100)}
        assert await step(planner, second) == second
        assert await there.acknowledged(ONE) == 100


async def test_a_query_that_goes_on_with_what_is_available_now_minds_no_option_of_its_beginning(
    autojump_clock: MockClock,
) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        options = {"startingOffsets": json.dumps({ONE: 2})}
        planner = there.planner(**options)
        end = await step(planner, planner.initial())
        await planner.commit(end)
        again = there.planner(**options)
        await again.prepare_available_now()
        assert await step(again, end) == end
