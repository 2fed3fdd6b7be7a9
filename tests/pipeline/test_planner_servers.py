"""Planning with servers without status requests, with many streams, and with many servers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import OptionError
from muxkit.protocols import restream
from tests.pipeline._source_place import ids, place, ranges, step
from tests.pipeline._source_servers import ONE, TWO

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_a_plain_server_is_read_ahead_of_workers(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 25)
        planner = there.planner(reader="store", maxMessagesPerTrigger=10)
        start, got = planner.initial(), []
        for _ in range(3):
            end = await step(planner, start)
            await planner.commit(start)
            for span in await planner.spans(start, end):
                got += await ids(there.client(), span)
            start = end
        assert got == list(range(1, 26))
        assert await step(planner, start) == start
        assert await there.acknowledged(ONE) == 25


async def test_a_plain_server_says_itself_where_the_rest_begins(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 25)
        await there.store.ack(ONE, 20)
        planner = there.planner()
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (20, 25)}


async def test_on_a_plain_server_latest_and_available_now_hold_as_well(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 25)
        planner = there.planner(startingOffsets="latest")
        fixed = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), fixed) == {}
        await there.feed(ONE, 5)
        now = there.planner(startingOffsets="latest", maxMessagesPerTrigger=3)
        await now.prepare_available_now()
        some = await step(now, fixed)
        assert await ranges(now, fixed, some) == {ONE: (25, 28)}
        await there.feed(ONE, 5)
        rest = await step(now, some)
        assert await ranges(now, some, rest) == {ONE: (28, 30)}
        assert await step(now, rest) == rest


async def test_who_insists_on_status_is_told_which_server_has_none(autojump_clock: MockClock) -> None:
    async with place("plain", status=False) as there:
        await there.feed(ONE, 1)
        planner = there.planner(planning="status")
        with pytest.raises(OptionError, match=r"option planning: restream\+mem://plain answers no status requests"):
            await step(planner, planner.initial())


async def test_numbers_that_are_made_on_demand_are_made_by_prefetch(autojump_clock: MockClock) -> None:
    async with place(application=restream.Numbers()) as there:
        async with restream.numbers(there.url, count=50, uuid=ONE, config=restream.ClientConfig(ack_every=None)) as n:
            await n.receive()
        planner = there.planner(planning="prefetch", verify="numbers")
        end = await step(planner, planner.initial())
        (span,) = await planner.spans(planner.initial(), end)
        assert await ids(there.client(verify="numbers"), span) == list(range(1, 51))


async def test_a_thousand_streams_have_an_offset_of_some_sixty_bytes_each(autojump_clock: MockClock) -> None:
    names = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(1000)]
    async with place() as there:
        for name in names:
            await there.store.register(name, {}, params={}, attached=False)
            await there.store.append_many(name, [1, 2, 3])
        planner = there.planner(" ".join(names))
        end = await step(planner, planner.initial())
        assert len(await planner.spans(planner.initial(), end)) == 1000
        assert len(json.dumps(await step(planner, end))) == len(json.dumps(end))
        later = dict(end) | {"begins": {}}
        assert len(json.dumps(later)) < 65_000


async def test_not_more_connections_are_open_at_once_than_the_option_allows(autojump_clock: MockClock) -> None:
    names = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(40)]
    most = 0

    async with place() as there:
        for name in names:
            await there.store.register(name, {}, params={}, attached=False)
        real = there.store.status

        open_now = 0

        class Counting:
            def __getattr__(self, name: str) -> object:
                return getattr(there.store, name)

            async def status(self, uuid: str) -> object:
                nonlocal open_now, most
                open_now += 1
                most = max(most, open_now)
                await trio.sleep(1)
                open_now -= 1
                return await real(uuid)

        async with place("counting", store=Counting()) as counted:
            planner = counted.planner(" ".join(names), connections=7)
            planner._streams._single.add(counted.url)  # a server that answers for one stream at a time
            await step(planner, planner.initial())
    assert most == 7


async def test_it_is_found_out_which_server_has_a_stream(autojump_clock: MockClock) -> None:
    async with place("left") as left, place("right") as right:
        await left.feed(ONE, 3)
        await right.feed(TWO, 4)
        planner = left.planner(f"{ONE} {TWO}", servers=f"{left.url} {right.url}")
        start = planner.initial()
        end = await step(planner, start)
        places = {span.uuid: span.server for span in await planner.spans(start, end)}
        assert places == {ONE: left.url, TWO: right.url}
        again = left.planner(f"{ONE} {TWO}", servers=f"{left.url} {right.url}")
        assert {span.uuid: span.server for span in await again.spans(start, end)} == places


async def test_a_batch_query_reads_what_is_kept_up_to_where_it_is_told(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.feed(TWO, 10)
        await there.store.ack(TWO, 6)
        planner = there.planner(f"{ONE} {TWO}", endingOffsets=json.dumps({ONE: 4}))
        assert [(span.uuid, span.begin, span.end) for span in await planner.everything()] == [(ONE, 0, 4), (TWO, 6, 10)]
        beyond = there.planner(endingOffsets=json.dumps({ONE: 11}))
        with pytest.raises(OptionError, match=f"option endingOffsets: stream {ONE} has 10 messages, not 11"):
            await beyond.everything()
        with pytest.raises(OptionError, match="option startingOffsets: latest is for streaming queries"):
            await there.planner(startingOffsets="latest").everything()
