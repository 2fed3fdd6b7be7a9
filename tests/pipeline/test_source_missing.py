"""One server away is not the query away; acknowledgements that the time does not suffice for have their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import StreamUnavailable
from muxkit.pipeline.source.offsets import Offset
from muxkit.pipeline.source.planner import Planner
from muxkit.protocols import restream
from tests.pipeline._source_place import place, ranges, step
from tests.pipeline._source_servers import KEEP, ONE, TWO

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.pipeline.source.client import Client


@pytest.mark.requirement("R-71")
async def test_the_rows_of_the_others_go_on_while_a_server_is_away_and_it_joins_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: One unreachable server ended the whole Spark query, and until then nothing was read from the others."""
    async with restream.open_store("memory:", keep=KEEP, now=trio.current_time) as left, place("right") as right:
        streams = f"restream+mem://left#{ONE} {right.url}#{TWO}"
        planner = Planner(right.options(streams, reader="store"), now=trio.current_time)
        async with place("left", store=left) as there:
            await there.feed(ONE, 3)
            await right.feed(TWO, 3)
            at = await step(planner, planner.initial())
            assert await ranges(planner, planner.initial(), at) == {ONE: (0, 3), TWO: (0, 3)}
            await there.feed(ONE, 4, first=4)
            await planner.latest(at)
        for n in range(60):  # it is away for a minute
            await right.feed(TWO, 1, first=4 + n)
            began = trio.current_time()
            end = await step(planner, at)
            assert await ranges(planner, at, end) == {TWO: (3 + n, 4 + n)}
            assert trio.current_time() - began <= (10.0 if n == 0 else 1.0)
            at = end
            report = Offset.from_json(planner.report() or {})
            assert report.streams[ONE].id - Offset.from_json(at).streams[ONE].id == 4  # its lag is told
            await trio.sleep(1)
        assert caplog.text.count("left is away, its streams are left out until it answers") == 1
        async with place("left", store=left):
            await trio.sleep(5)
            end = await step(planner, at)
            assert await ranges(planner, at, end) == {ONE: (3, 7)}
        assert "left answers again" in caplog.text


async def test_a_missing_server_is_an_error_for_those_who_want_it(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(TWO, 3)
        streams = f"restream+mem://nowhere#{ONE} {there.url}#{TWO}"
        strict = there.planner(streams, failOnMissingServer="true", statusTimeout="30s")
        with pytest.raises(StreamUnavailable, match="statusTimeout=30 s"):
            await step(strict, strict.initial())
        with pytest.raises(StreamUnavailable, match="statusTimeout=30 s"):  # half of a table is no table
            await there.planner(streams, statusTimeout="30s").everything()


async def test_where_a_stream_begins_is_not_decided_without_its_server(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(TWO, 3)
        streams = f"restream+mem://nowhere#{ONE} {there.url}#{TWO}"
        latest = there.planner(streams, startingOffsets="latest", statusTimeout="30s")
        with pytest.raises(StreamUnavailable):
            await step(latest, latest.initial())


@pytest.mark.requirement("R-71")
async def test_every_stream_has_its_turn_when_the_time_suffices_for_a_few_acknowledgements(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: Acknowledgements of a Spark query went by name and were cut off by time: with streams that keep moving,
    those with the last names were never acknowledged.
    """
    names = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(40)]
    async with place() as there:
        planner = there.planner(" ".join(names), ackMode="commit", ackTimeout="3500ms", connections=5)
        client: Client = planner._client
        real, done = client.acknowledge, set[str]()

        async def slowly(server: str, uuid: str, id: int) -> None:
            await trio.sleep(1)
            await real(server, uuid, id)
            done.add(uuid)

        client.acknowledge = slowly  # type: ignore[method-assign]
        at = planner.initial()
        for turn in range(4):
            for name in names:  # all of them keep moving
                await there.feed(name, 1, first=turn + 1)
            at = await step(planner, at)
            await planner.commit(at)
        assert len(done) == 40
        assert "25 of 40 streams were not acknowledged within ackTimeout=3.5 s" in caplog.text
