"""Streams that are subscribed by a pattern of their names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from muxkit.pipeline import DataLoss, OptionError
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Wanted
from muxkit.pipeline.source.planner import Planner
from muxkit.protocols import restream
from tests.pipeline._source_place import Place, place, ranges, step
from tests.pipeline._source_servers import KEEP, ONE, THREE, TWO, feed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio.testing import MockClock

    from muxkit.pipeline.source.client import Answer


async def name_and_feed(there: Place, uuid: str, name: str, count: int = 5) -> None:
    await feed(there.store, uuid, [{"n": n} for n in range(count)], name=name)


def subscribed(there: Place, pattern: str = "orders-.*", **options: object) -> Planner:
    return there.planner(streams=None, subscribePattern=pattern, **options)


async def test_streams_whose_whole_name_matches_are_read_and_new_ones_join(autojump_clock: MockClock) -> None:
    async with place() as there:
        await name_and_feed(there, ONE, "orders-eu")
        await name_and_feed(there, TWO, "old-orders-eu")
        planner = subscribed(there)
        first = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), first) == {ONE: (0, 5)}
        await name_and_feed(there, THREE, "orders-us", 7)
        second = await step(planner, first)
        assert await ranges(planner, first, second) == {THREE: (0, 7)}


async def test_a_stream_without_a_name_is_matched_by_its_uuid(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 5)
        await name_and_feed(there, TWO, "orders-eu")
        planner = subscribed(there, "1000.*")
        assert await ranges(planner, planner.initial(), await step(planner, planner.initial())) == {ONE: (0, 5)}


async def test_a_query_that_is_restarted_goes_on_where_each_stream_ended(autojump_clock: MockClock) -> None:
    async with place() as there:
        for uuid, name in ((ONE, "orders-eu"), (TWO, "orders-us")):
            await name_and_feed(there, uuid, name)
        before = subscribed(there)
        first = await step(before, before.initial())
        await there.feed(TWO, 3)
        await name_and_feed(there, THREE, "orders-asia", 2)
        planned = await step(before, first)
        # Spark stores the end of a batch before it reads the batch. After a crash, it asks for the same ranges again.
        after = subscribed(there)
        assert await ranges(after, first, planned) == {TWO: (5, 8), THREE: (0, 2)}
        assert await step(after, planned) == planned


async def test_a_query_of_what_is_available_now_reads_streams_in_which_its_reader_is_not_enrolled(
    autojump_clock: MockClock,
) -> None:
    async with place() as there:
        await name_and_feed(there, ONE, "orders-eu")
        planner = subscribed(there, reader="table")
        await planner.prepare_available_now()
        assert await ranges(planner, planner.initial(), await step(planner, planner.initial())) == {ONE: (0, 5)}


class CountingClient(Client):
    """Notes the kind of each request."""

    def __init__(self, there: Place, **options: object) -> None:
        super().__init__(there.options(streams=None, subscribePattern=".*", **options))
        self.requests: list[str] = []

    async def listing(self, server: str, since: str, *, within: float | None = None) -> restream.Listing:
        self.requests.append("listing")
        return await super().listing(server, since, within=within)

    async def statuses(self, server: str, uuids: Any, **options: Any) -> dict[str, Answer] | None:  # noqa: ANN401
        self.requests.append("statuses")
        return await super().statuses(server, uuids, **options)


@pytest.mark.parametrize("reader", ["", "table"])
async def test_a_look_at_a_thousand_idle_streams_is_one_request(autojump_clock: MockClock, reader: str) -> None:
    async with place() as there:
        for number in range(1000):
            await name_and_feed(there, f"10000000-0000-4000-8000-{number:012}", f"s{number}", 1)
        client = CountingClient(there, reader=reader)
        planner = Planner(there.options(streams=None, subscribePattern=".*", reader=reader), client)
        end = await step(planner, planner.initial())
        while client.requests != ["listing"]:  # until the last batch is acknowledged and nothing is new
            client.requests.clear()
            assert await step(planner, end) == end
        for _ in range(10):
            client.requests.clear()
            assert await step(planner, end) == end
            assert client.requests == ["listing"]
        await name_and_feed(there, THREE, "late", 1)
        assert await ranges(planner, end, await step(planner, end)) == {THREE: (0, 1)}


async def test_an_idle_look_decodes_no_offset(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place() as there:
        await name_and_feed(there, ONE, "orders-eu")
        planner = subscribed(there)
        end = await step(planner, planner.initial())
        assert await step(planner, end) == end
        monkeypatch.delattr("muxkit.pipeline.source.planner.Offset.from_json")
        assert await step(planner, end) == end


async def test_a_reader_is_enrolled_in_the_streams_that_match_and_in_no_others(autojump_clock: MockClock) -> None:
    async with place() as there:
        await name_and_feed(there, ONE, "orders-eu")
        await name_and_feed(there, TWO, "other")
        planner = subscribed(there, reader="table")
        end = await step(planner, planner.initial())
        await planner.commit(end)
        assert (await there.store.status(ONE)).readers == {"table": 5}
        assert (await there.store.status(TWO)).readers == {}
        assert await there.acknowledged(ONE) == 5


async def test_a_stream_that_is_removed_after_it_was_read_leaves_the_query_and_its_offset(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muxkit")
    async with place() as there:
        for uuid, name in ((ONE, "orders-eu"), (TWO, "orders-us")):
            await name_and_feed(there, uuid, name)
        planner = subscribed(there)
        first = await step(planner, planner.initial())
        await there.store.remove(ONE)
        assert await step(planner, first) == first
        await there.feed(TWO, 1)
        second = await step(planner, first)
        assert await ranges(planner, first, second) == {TWO: (5, 6)}
        assert caplog.text.count(f"stream {ONE}: it was removed after message 5") == 1
        assert list(_streams(second)) == [TWO]
        assert list(_streams(planner.report() or {})) == [TWO]


def _streams(offset: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = offset["streams"]
    return found


async def test_a_stream_that_is_removed_while_the_query_is_stopped_does_not_stop_its_restart(
    autojump_clock: MockClock,
) -> None:
    async with place() as there:
        for uuid, name in ((ONE, "orders-eu"), (TWO, "orders-us")):
            await name_and_feed(there, uuid, name)
        before = subscribed(there)
        first = await step(before, before.initial())
        await there.store.remove(ONE)
        await there.feed(TWO, 1)
        after = subscribed(there)
        assert await ranges(after, first, await step(after, first)) == {TWO: (5, 6)}


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_is_removed_with_messages_that_were_not_read_is_a_loss(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    async with place() as there:
        await name_and_feed(there, ONE, "orders-eu")
        planner = subscribed(there, maxMessagesPerTrigger=3, failOnDataLoss=fails)
        first = await step(planner, planner.initial())
        await there.store.remove(ONE)
        if fails:
            with pytest.raises(DataLoss, match=f"stream {ONE}: it was removed, and messages 4 to 5 were not read"):
                await step(planner, first)
        else:
            assert await step(planner, first) == first
            assert "messages 4 to 5 were not read; going on with what is left" in caplog.text


async def test_a_stream_that_does_not_match_another_pattern_keeps_its_place_in_the_offset(
    autojump_clock: MockClock,
) -> None:
    async with place() as there:
        for uuid, name in ((ONE, "orders-eu"), (TWO, "orders-us")):
            await name_and_feed(there, uuid, name)
        both = subscribed(there)
        first = await step(both, both.initial())
        await there.feed(TWO, 1)
        one = subscribed(there, "orders-us")
        second = await step(one, first)
        assert await ranges(one, first, second) == {TWO: (5, 6)}
        assert _streams(second).keys() == {ONE, TWO}


async def test_a_server_that_lists_nothing_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place(listing=False) as there:
        planner = subscribed(there)
        with pytest.raises(
            OptionError, match=r"subscribePattern: restream\+mem://source: expected a server that lists"
        ):
            await step(planner, planner.initial())


async def test_a_server_without_the_extension_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        planner = subscribed(there)
        with pytest.raises(OptionError, match=r"subscribePattern: .* listing=True"):
            await step(planner, planner.initial())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribePattern": "["}, r"option subscribePattern: expected a regular expression, got '\['"),
        ({"subscribePattern": ".*", "servers": ""}, "option servers: it is missing"),
        ({"subscribePattern": ".*", "planning": "prefetch"}, "option planning: subscribePattern needs status requests"),
    ],
)
async def test_what_a_subscription_cannot_use_is_an_error_of_the_option(
    autojump_clock: MockClock, options: dict[str, Any], problem: str
) -> None:
    async with place() as there:
        with pytest.raises(OptionError, match=problem):
            there.options(**{"streams": None} | options)


async def test_streams_of_a_server_that_does_not_answer_are_left_out_and_come_back(autojump_clock: MockClock) -> None:
    async with restream.open_store("memory:", keep=KEEP) as store:
        await feed(store, ONE, [1, 2], name="orders-eu")
        async with place(store=store) as there:
            planner = subscribed(there)
            first = await step(planner, planner.initial())
        assert await step(planner, first) == first
        await feed(store, ONE, [3])
        async with place(store=store) as there:
            second = first
            while second == first:
                second = await step(planner, first)
            assert await ranges(planner, first, second) == {ONE: (2, 3)}


async def test_a_batch_query_reads_the_wanted_streams_and_ids_only(autojump_clock: MockClock) -> None:
    async with place() as there:
        for uuid, name in ((ONE, "orders-eu"), (TWO, "orders-us")):
            await name_and_feed(there, uuid, name)
        planner = subscribed(there)
        [span] = await planner.everything(Wanted(frozenset({TWO}), 1, 3))
        assert (span.uuid, span.begin, span.end) == (TWO, 1, 3)
        assert len(await planner.everything()) == 2
