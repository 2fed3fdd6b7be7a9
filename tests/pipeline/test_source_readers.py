"""Several queries on one stream: looks, named readers, and what is kept for them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit.pipeline import DataLoss
from muxkit.pipeline.source.client import Client
from muxkit.protocols import restream
from muxkit.protocols.restream import Retention, StoreLimits
from tests.pipeline._source_place import ids, lines, place, ranges, scripted, step
from tests.pipeline._source_servers import KEEP, ONE, TWO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio.testing import MockClock

    from muxkit.pipeline.source.planner import Planner
    from muxkit.runtime import Dial
    from tests.pipeline._source_place import Place


async def batch(there: Place, planner: Planner, start: Mapping[str, object]) -> tuple[Mapping[str, object], list[int]]:
    """One batch as Spark makes it, read and committed; its end and ids."""
    end = await step(planner, start)
    got: list[int] = []
    for span in await planner.spans(start, end):
        got += await ids(there.client(), span)
    await planner.commit(end)
    return end, got


@pytest.mark.requirement("R-71")
async def test_a_look_deletes_nothing_and_the_query_that_stores_has_all(autojump_clock: MockClock) -> None:
    """Was: Each streaming query acknowledged, and so deleted, what it read: a look at a stream from a notebook took the
    messages away from the query that stores them.
    """
    async with place() as there:
        await there.feed(ONE, 10)
        look, store = there.planner(), there.planner(reader="store")
        at, got = await batch(there, look, look.initial())
        assert got == [*range(1, 11)]
        assert await step(look, at) == at
        assert await there.acknowledged(ONE) == 0
        _, got = await batch(there, store, store.initial())
        assert got == [*range(1, 11)]
        assert await there.acknowledged(ONE) == 10


async def test_messages_go_when_all_named_readers_have_them(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        quick, slow = there.planner(reader="quick"), there.planner(reader="slow", maxMessagesPerTrigger=3)
        slow_at = await step(slow, slow.initial())  # it is enrolled when it asks first
        quick_at, _ = await batch(there, quick, quick.initial())
        assert await there.acknowledged(ONE) == 0
        assert (await there.store.status(ONE)).readers == {"quick": 10, "slow": 0}
        await slow.commit(slow_at)
        assert await there.acknowledged(ONE) == 3
        for _ in range(200):
            await there.feed(ONE, 1, first=11)
            quick_at, got = await batch(there, quick, quick_at)
            assert len(got) == 1
            slow_at, got = await batch(there, slow, slow_at)
            assert got
        status = await there.store.status(ONE)
        assert status.readers == {"quick": 210, "slow": 210}
        assert status.acknowledged == status.head == 210


async def test_an_unnamed_acknowledgement_deletes_nothing_of_named_readers(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        named, unnamed = there.planner(reader="named"), there.planner(ackMode="commit")
        await step(named, named.initial())
        await batch(there, unnamed, unnamed.initial())
        assert await there.acknowledged(ONE) == 0
        await there.store.remove_reader(ONE, "named")
        await batch(there, unnamed, unnamed.initial())
        assert await there.acknowledged(ONE) == 10


async def test_reading_takes_nothing_over_and_two_may_read_at_once(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 5000)
        async with restream.stream(there.url, uuid=ONE) as owner:
            assert (await owner.receive()).id == 1
            span = (await there.planner().everything())[0]
            got: list[list[int]] = []

            async def read() -> None:
                got.append(await ids(there.client(), span))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                nursery.start_soon(read)
            assert got == [[*range(1, 5001)]] * 2
            assert (await there.store.status(ONE)).epoch == 1
            assert (await owner.receive()).id == 2


async def test_a_span_of_an_older_incarnation_is_a_loss(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 5)
        spans = await there.planner().everything()
    async with place() as there:
        await there.feed(ONE, 5)
        with pytest.raises(DataLoss, match="is not known here"):
            await ids(there.client(), spans[0])


@pytest.mark.requirement("R-71")
async def test_a_new_query_is_told_what_was_acknowledged_before_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: A Spark query on a deleted checkpoint found nothing and did not say that messages had been acknowledged
    before it.
    """
    async with place() as there:
        await there.feed(ONE, 20)
        await there.store.ack(ONE, 20)
        planner = there.planner()
        assert await ranges(planner, planner.initial(), await step(planner, planner.initial())) == {}
        assert "20 messages were acknowledged before this query began, and are not read" in caplog.text


async def test_a_session_that_is_only_looked_at_does_not_expire(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.store.register(ONE, {}, params={}, attached=False, keep=30.0)
        config = restream.ClientConfig(ack_every=None, reader="")
        looking = restream.stream(there.url, uuid=ONE, config=config)
        async with looking as reader:
            await trio.sleep(200)
            await there.store.append(ONE, "late")
            assert (await reader.receive()).data == "late"


async def test_a_thousand_streams_take_two_requests_to_plan_and_two_to_acknowledge(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(1000)]
    async with place() as there:
        for name in names:
            await there.store.register(name, {}, params={}, attached=False)
            await there.store.append(name, 1)
        dialled = 0
        real = Client._dial

        def dial(client: Client, server: str) -> Dial:
            nonlocal dialled
            dialled += 1
            return real(client, server)

        monkeypatch.setattr(Client, "_dial", dial)
        planner = there.planner(" ".join(names), reader="store")
        end = await step(planner, planner.initial())
        assert dialled == 2
        await planner.commit(end)
        assert dialled == 4
        assert {(await there.store.status(name)).acknowledged for name in names} == {1}
        assert await step(planner, end) == end
        assert dialled == 6  # and nothing is left to be acknowledged


async def test_the_driver_reads_no_data_where_all_that_waits_fits_into_the_limit_of_bytes(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place() as there:
        counted: list[int] = []
        real = Client.count

        async def count(client: Client, *where: Any, **limits: Any) -> int:
            counted.append(1)
            return await real(client, *where, **limits)

        monkeypatch.setattr(Client, "count", count)
        planner = there.planner(maxBytesPerTrigger=1000)
        at = planner.initial()
        for turn in range(5):
            await there.feed(ONE, 50, first=turn * 50 + 1)  # of some 8 to 9 bytes
            end = await step(planner, at)
            assert await ranges(planner, at, end) == {ONE: (turn * 50, turn * 50 + 50)}
            at = end
        assert not counted
        await there.feed(ONE, 500, first=251)
        end = await step(planner, at)
        (begin, until) = (await ranges(planner, at, end))[ONE]
        assert begin == 250
        assert until < 450
        assert counted


async def test_a_server_that_answers_for_one_stream_at_a_time_is_asked_so(autojump_clock: MockClock) -> None:
    asked: list[str] = []

    async def act(requests: list[dict[str, Any]], stream: trio.abc.Stream) -> None:
        asked.append(requests[-1]["uuid"])
        status = {"head": 5, "acknowledged": 2, "final": False, "epoch": 1}
        await stream.send_all(lines({"status": status}))  # a server that does not know `also`

    async with place() as there, scripted("earlier", act) as url:
        planner = there.planner(f"{ONE} {TWO}", servers=url)
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (2, 5), TWO: (2, 5)}
        assert sorted(asked) == [ONE, ONE, TWO]
        await step(planner, end)
        assert len(asked) == 5


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Any) -> str:  # noqa: ANN401 - a folder
    if request.param == "postgres":
        address: str = request.getfixturevalue("schema")
        return address
    return "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'store.db'}"


pytest_plugins = ["tests.protocols.restream._postgres"]


async def test_retention_bounds_what_is_kept_in_bytes(where: str) -> None:
    async with restream.open_store(where, keep=KEEP, retention=Retention(bytes=10_000)) as store:
        await store.register(ONE, {}, attached=False)
        await store.advance(ONE, "away")
        for _ in range(200):
            await store.append(ONE, "x" * 98)  # 100 bytes as JSON
        status = await store.status(ONE)
        assert 100 <= status.waiting <= 100 * 17 // 16 + 1
        assert status.readers == {"away": 0}
        await store.advance(ONE, "away", 200)
        assert (await store.status(ONE)).acknowledged == 200


async def test_retention_bounds_what_is_kept_in_time() -> None:
    now = 1000.0
    async with restream.open_store("memory:", keep=KEEP, retention=Retention(seconds=60), now=lambda: now) as store:
        await store.register(ONE, {}, attached=False)
        for _ in range(200):
            await store.append(ONE, "x")
            now += 1.0
        assert 60 <= (await store.status(ONE)).waiting <= 65


async def test_readers_of_a_session_are_bounded() -> None:
    async with restream.open_store("memory:", keep=KEEP, limits=StoreLimits(readers=2)) as store:
        await store.register(ONE, {}, attached=False)
        await store.advance(ONE, "a")
        await store.advance(ONE, "b")
        with pytest.raises(Exception, match=r"StoreLimits\(readers=2\)"):
            await store.advance(ONE, "c")


async def test_a_store_tells_the_progress_of_several_sessions_at_once(where: str) -> None:
    names = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(600)]
    async with restream.open_store(where, keep=KEEP) as store:
        for name in names[:3]:
            await store.register(name, {}, attached=False)
        await store.append(names[1], "x")
        await store.advance(names[1], "me", 1)
        found = await store.statuses(names)
        assert found == {name: await store.status(name) for name in names[:3]}
        assert found[names[1]].readers == {"me": 1}


STOPPED = """
import sys
from muxkit.pipeline.source.readers import StreamReader

reader = StreamReader.__new__(StreamReader)
try:
    try:
        raise {error}  # what Spark's runner reads when the JVM has closed its socket
    finally:
        reader.stop()
except BaseException:
    raise BrokenPipeError("what it says to that socket")
"""


@pytest.mark.parametrize(("error", "lines"), [("EOFError", 1), ("BrokenPipeError", 1), ("ValueError", None)])
def test_a_query_that_is_stopped_leaves_one_line_in_the_log_of_the_driver(error: str, lines: int | None) -> None:
    program = STOPPED.format(error=error)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    if lines is None:
        assert "Traceback" in done.stderr
    else:
        assert done.stderr.splitlines() == ["muxkit: the query was stopped, and its planner ends"]
