"""A query that begins at a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline.errors import OptionError
from tests.pipeline._source_place import place, ranges, step
from tests.pipeline._source_servers import ONE, TWO, feed

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.pipeline._source_place import Place

BOTH = f"{ONE} {TWO}"


async def hourly(there: Place, uuid: str, count: int, *, first: int = 0) -> None:
    """Messages of which each is an hour, counted from 1970, after the one before."""
    for number in range(first, first + count):
        await feed(there.store, uuid, [number], time=3600.0 * number)


@pytest.mark.parametrize(
    ("moment", "begins"),
    [("0", (0, 0)), ("1970-01-01T00:00:01Z", (1, 0)), ("1970-01-01T05:00:00Z", (5, 0)), ("1970-01-02", (9, 4))],
)
async def test_a_query_begins_with_the_first_message_that_is_not_before_a_moment(
    autojump_clock: MockClock, moment: str, begins: tuple[int, int]
) -> None:
    async with place() as there:
        await hourly(there, ONE, 9)
        await hourly(there, TWO, 10, first=20)
        planner = there.planner(BOTH, startingTimestamp=moment)
        end = await step(planner, planner.initial())
        found = await ranges(planner, planner.initial(), end)
        whole = {ONE: (begins[0], 9), TWO: (begins[1], 10)}
        assert found == {uuid: (begin, end) for uuid, (begin, end) in whole.items() if begin < end}


async def test_a_moment_counts_once_and_streams_that_join_are_read_from_their_beginning(
    autojump_clock: MockClock,
) -> None:
    async with place() as there:
        await hourly(there, ONE, 9)
        planner = there.planner(BOTH, startingTimestamp="1970-01-01T05:00:00Z", failOnDataLoss=False)
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (5, 9)}
        await hourly(there, TWO, 4)
        later = await step(planner, end)
        assert await ranges(planner, end, later) == {TWO: (0, 4)}


async def test_a_batch_query_begins_at_a_moment_as_well(autojump_clock: MockClock) -> None:
    async with place() as there:
        await hourly(there, ONE, 9)
        [span] = await there.planner(startingTimestamp="1970-01-01T05:00:00Z").everything()
        assert (span.begin, span.end) == (5, 9)


@pytest.mark.parametrize("moment", ["1990-01-01", "2020-01-01"])
async def test_messages_without_a_time_are_an_error_and_not_an_empty_query(
    autojump_clock: MockClock, moment: str
) -> None:
    async with place() as there:
        await feed(there.store, ONE, [])
        await there.store.put_many(ONE, lambda state: (1, state), 9)
        planner = there.planner(startingTimestamp=moment)
        with pytest.raises(
            OptionError, match=rf"option startingTimestamp: stream {ONE}: expected messages with a time"
        ):
            await step(planner, planner.initial())
        with pytest.raises(OptionError, match="startingOffsets"):
            await there.planner(startingTimestamp=moment).everything()


async def test_a_stream_whose_later_messages_have_times_begins_among_them(autojump_clock: MockClock) -> None:
    async with place() as there:
        await feed(there.store, ONE, list(range(9)))
        await hourly(there, ONE, 3, first=10)
        [span] = await there.planner(startingTimestamp="1970-01-01T11:00:00Z").everything()
        assert (span.begin, span.end) == (10, 12)


async def test_what_a_moment_cannot_mean_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place(status=False) as plain:
        await hourly(plain, ONE, 3)
        with pytest.raises(OptionError, match=r"option startingTimestamp: .* answers no status requests"):
            await step(plain.planner(startingTimestamp="1"), {"streams": {}, "version": 2})
        with pytest.raises(OptionError, match="option startingTimestamp: startingOffsets is given as well"):
            plain.planner(startingTimestamp="1", startingOffsets="latest")
        with pytest.raises(OptionError, match=r"option startingTimestamp: expected a time such as .* got 'noon'"):
            plain.planner(startingTimestamp="noon")
