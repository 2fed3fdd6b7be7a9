"""Rows get from a client to the stream over real channels, each once, whatever happens to the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest
import trio
import trio.testing

import muxkit
from muxkit.pipeline import Encoding, Key, Staging, StagingClient, StagingLimits, open_staging, tokens
from muxkit.pipeline.errors import (
    NotCommitted,
    StagingError,
    StagingFull,
    StagingRefused,
    StagingRequestInvalid,
    StagingUnavailable,
)
from muxkit.pipeline.staging.records import Ask, BatchProgress, answer, encode
from muxkit.runtime import Backoff
from muxkit.storage import StoreError, StoreFailed, StoreFull
from muxkit.testing import ChaosPlan, Way, chaos_relay
from tests.pipeline._staging_world import KEY, Given, backend_of, everything, on_backend, rows, serving, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muxkit.pipeline import Claim
    from muxkit.pipeline.staging.records import Block
    from muxkit.pipeline.staging.rows import Rows
    from muxkit.pipeline.staging.store import Backend

T = TypeVar("T")

QUICK = Backoff(first=0.001, most=0.01)


@pytest.fixture
async def store() -> AsyncIterator[Staging]:
    async with open_staging("memory:") as opened:
        yield opened


# ---------------------------------------------------------------------------- the way there


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scheme", ["bpmux+tcp", "relink+tcp", "bpmux+ws"])
async def test_partitions_are_written_and_committed(store: Staging, scheme: str, channels: int) -> None:
    async with serving(store, f"{scheme}://127.0.0.1:0") as served:
        client = StagingClient(served.url, channels=channels, window=4096)
        parts = {**await write(client, "a", 0, rows(0, 1000)), **await write(client, "b", 0, rows(1000, 1))}
        done = await client.commit(KEY, 0, parts)
        assert (done.duplicate, done.rows, done.head) == (False, 1001, 1001)
        assert await everything(store) == rows(0, 1001)
        assert (await client.commit(KEY, 0, parts)).duplicate
        standing = await client.standing(KEY)
        assert (standing.batch, standing.rows, standing.staged, standing.head) == (0, 1001, 0, 1001)


async def test_a_replay_of_a_committed_batch_sends_nothing_and_takes_everything(store: Staging) -> None:
    async with serving(store) as served:
        client = StagingClient(served.url, window=1024)
        await client.commit(KEY, 0, await write(client, "a", 0, rows(0, 10)))
        given = Given(rows(0, 5000))
        written = await client.write("b", KEY, 0, given, encoding=Encoding.BINARY)
        assert (written.wanted, written.rows, given.taken) == (False, 5000, 5000)
        assert (await client.commit(KEY, 0, {"b": 5000})).duplicate
        assert await everything(store) == rows(0, 10)


async def test_a_batch_that_is_committed_while_a_zombie_writes_ends_the_zombie_in_peace(store: Staging) -> None:
    async with serving(store) as served:
        client = StagingClient(served.url, window=1024)
        real = await write(client, "real", 0, rows(0, 10))
        reached, go_on = trio.Event(), trio.Event()

        async def zombie() -> None:
            written = await client.write("zombie", KEY, 0, Halting(), encoding=Encoding.BINARY)
            assert not written.wanted

        class Halting(Given):
            def __init__(self) -> None:
                super().__init__(rows(0, 1000))

            async def __anext__(self) -> Block:
                if self.taken == 500:
                    reached.set()
                    await go_on.wait()
                return await super().__anext__()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(zombie)
            await reached.wait()
            assert not (await StagingClient(served.url).commit(KEY, 0, real)).duplicate
            go_on.set()
        assert await everything(store) == rows(0, 10)
        assert (await store.progress(KEY)).transactions == 0


async def test_an_abort_goes_over_the_wire(store: Staging) -> None:
    async with serving(store) as served:
        client = StagingClient(served.url)
        parts = await write(client, "a", 0, rows(0, 10))
        assert await client.abort(KEY, 0, ["a", "b"]) == 1
        with pytest.raises(NotCommitted, match=r"stream 'orders', application 'query', batch 0: transaction a"):
            await client.commit(KEY, 0, parts)


# ---------------------------------------------------------------------------- connections that break


@pytest.mark.requirement("R-50", "R-51")
@pytest.mark.seeds(5, soak=300)
@pytest.mark.parametrize("protocol", ["bpmux", "relink"])
async def test_a_connection_that_is_cut_again_and_again_loses_and_repeats_nothing(
    store: Staging, protocol: str, seed: int
) -> None:
    bad = ChaosPlan(cut_after=(2_000, 60_000), reset=0.5)
    async with serving(store, f"{protocol}+tcp://127.0.0.1:0") as served:
        async with chaos_relay(served.url.removeprefix(f"{protocol}+"), bad, seed) as relay:
            client = StagingClient(
                f"{protocol}+tcp://{relay.address}", channels=2, window=8192, backoff=QUICK, answer_within=5.0
            )
            for batch in range(2):
                parts: dict[str, int] = {}
                for part in range(2):
                    first = 4000 * batch + 2000 * part
                    parts |= await write(client, f"{batch} {part}", batch, rows(first, 2000, size=50), at_once=50)
                await client.commit(KEY, batch, parts)
            # The server answers with few bytes, so a connection whose cut is counted there may live to the end.
            assert relay.cuts or bad.fate(seed, 0).way is Way.BACK
        assert await everything(store) == rows(0, 8000, size=50)


async def test_a_server_that_never_comes_is_given_up_with_a_sentence(autojump_clock: trio.testing.MockClock) -> None:
    client = StagingClient("bpmux+mem://nowhere", patience=30.0)
    began = trio.current_time()
    with pytest.raises(StagingUnavailable) as caught:
        await client.commit(KEY, 7, {"a": 1})
    assert 30.0 <= trio.current_time() - began < 31.0
    told = str(caught.value)
    assert told.startswith(
        "stream 'orders', application 'query', batch 7: bpmux+mem://nowhere could not be used for 30 s"
    )
    assert "The option patience says how long to try" in told


async def test_a_server_that_does_not_answer_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async def silent(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, silent, "bpmux+mem://silent")
        client = StagingClient(served.url, patience=60.0, answer_within=10.0)
        with pytest.raises(StagingUnavailable, match=r"transaction a: bpmux\+mem://silent could not be used"):
            await client.write("a", KEY, 0, Given(rows(0, 10)), encoding=Encoding.BINARY)
        nursery.cancel_scope.cancel()


class Troubled:
    """A backend whose disk fails for a while."""

    def __init__(self, store: Staging, times: int, error: type[StoreError] = StoreFailed) -> None:
        self._backend: Backend = backend_of(store)
        self.times = times
        self._error = error

    async def work(self, key: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        if self.times:
            self.times -= 1
            raise self._error("/secret/path: the disk failed")
        return await self._backend.work(key, act)


@pytest.mark.requirement("R-57")
@pytest.mark.parametrize("error", [StoreFailed, StoreFull])
async def test_a_store_that_is_in_trouble_for_a_while_is_waited_for(store: Staging, error: type[StoreError]) -> None:
    backend = Troubled(store, 7, error)
    troubled = on_backend(Staging, store, backend)
    async with serving(troubled) as served:
        client = StagingClient(served.url, backoff=QUICK)
        await client.commit(KEY, 0, await write(client, "a", 0, rows(0, 100)))
        assert backend.times == 0
        assert client.connections > 7
    assert await everything(store) == rows(0, 100)


@pytest.mark.requirement("R-66")
async def test_a_client_is_not_told_where_the_store_of_a_server_is(store: Staging) -> None:
    async with serving(on_backend(Staging, store, Troubled(store, 10**6))) as served:
        client = StagingClient(served.url, backoff=QUICK, patience=0.05)
        with pytest.raises(StagingUnavailable, match=r"cannot use its session store at the moment") as caught:
            await client.standing(KEY)
        assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------- what fails for good


class Failing(Given):
    async def __anext__(self) -> Block:
        if self.taken == 500:
            raise ArithmeticError("the rows cannot be made")
        return await super().__anext__()


async def test_rows_that_cannot_be_made_are_the_error_and_nothing_is_prepared(store: Staging) -> None:
    async with serving(store) as served:
        client = StagingClient(served.url, window=1024)
        with pytest.raises(ArithmeticError, match="cannot be made"):
            await client.write("a", KEY, 0, Failing(rows(0, 1000)), encoding=Encoding.BINARY)
        with pytest.raises(NotCommitted, match=r"is not prepared"):
            await client.commit(KEY, 0, {"a": 500})


async def test_rows_that_cannot_be_made_are_the_error_though_nobody_answers() -> None:
    client = StagingClient("bpmux+mem://nowhere", patience=1e6)
    with pytest.raises(ArithmeticError, match="cannot be made"):
        await client.write("a", KEY, 0, Failing(rows(0, 500), at_once=500), encoding=Encoding.BINARY)


async def test_a_bound_of_the_server_is_an_error_at_once_and_names_it() -> None:
    async with open_staging("memory:", limits=StagingLimits(staged=5000)) as small, serving(small) as served:
        client = StagingClient(served.url, window=1024)
        with pytest.raises(StagingFull, match=r"'query', batch 0: transaction a: .*StagingLimits\(staged=5000\)"):
            await client.write("a", KEY, 0, Given(rows(0, 100_000)), encoding=Encoding.BINARY)
        assert client.connections == 1


async def test_a_row_that_is_too_large_is_an_error_and_names_the_row() -> None:
    async with open_staging("memory:", limits=StagingLimits(row=100)) as small, serving(small) as served:
        content = [*rows(0, 55), b"x" * 101, *rows(56, 10_000)]
        with pytest.raises(StagingRequestInvalid, match=r"row 55 has 101 bytes, more than StagingLimits\(row=100\)"):
            await StagingClient(served.url, window=1024).write("a", KEY, 0, Given(content), encoding=Encoding.BINARY)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("bpmux+tcp://192.0.2.1:7000", "is not a loopback address"),
        ("nothing+tcp://127.0.0.1:7000", "there is no protocol 'nothing'"),
        ("tcp://127.0.0.1:7000", "invalid URL"),
    ],
)
async def test_an_address_that_cannot_be_meant_is_an_error_at_once(url: str, told: str) -> None:
    with pytest.raises(StagingError, match=rf"batch 3: this cannot be an address \(option url\): .*{told}"):
        await StagingClient(url).commit(KEY, 3, {"a": 1})


@pytest.mark.requirement("R-21")
@pytest.mark.parametrize("garbage", [b"", b"x", b"J", b"J{}", b"B", b'J{"ask":"begin"}', b"\xff" * 1000])
async def test_garbage_ends_its_channel_and_no_other(store: Staging, garbage: bytes) -> None:
    async with serving(store) as served, muxkit.connect(served.url) as session:
        async with session.open() as good:
            async with session.open() as bad:
                await bad.send(garbage)
                with pytest.raises(StagingRequestInvalid):
                    answer(await bad.receive())
                with pytest.raises(trio.EndOfChannel):
                    await bad.receive()
            await good.send(encode(Ask(stream="s", app="a")))
            assert isinstance(answer(await good.receive()), BatchProgress)


# ---------------------------------------------------------------------------- who may


@pytest.mark.requirement("R-64")
async def test_only_who_has_a_token_may_ask(store: Staging) -> None:
    async with serving(store, authorize=tokens("first", "second")) as served:
        for token in ("first", "second"):
            await StagingClient(served.url, token=token).standing(KEY)
        for token in ("", "third", "firs", "ü"):
            client = StagingClient(served.url, token=token)
            with pytest.raises(StagingRefused, match=r"application 'query': this server does not allow 'begin' here"):
                await write(client, "a", 0, rows(0, 10))
            with pytest.raises(StagingRefused, match=r"does not allow 'commit'"):
                await client.commit(KEY, 0, {"a": 1})
    assert (await store.progress(KEY)).transactions == 0


def test_no_token_at_all_is_no_way_to_ask_for_tokens() -> None:
    with pytest.raises(ValueError, match="at least one"):
        tokens("")


async def test_a_server_may_decide_by_stream_and_by_what_is_asked(store: Staging) -> None:
    claims: list[Claim] = []

    async def authorize(claim: Claim) -> bool:
        claims.append(claim)
        return claim.stream == KEY.stream

    async with serving(store, authorize=authorize) as served:
        client = StagingClient(served.url, token="t")
        await client.commit(KEY, 0, await write(client, "a", 0, rows(0, 10)))
        with pytest.raises(StagingRefused):
            await client.abort(Key("others", "query"), 0, ["a"])
    assert [claim.asks for claim in claims] == ["begin", "prepare", "commit", "abort"]
    assert {(claim.app, claim.token) for claim in claims} == {("query", "t")}
    assert all("127.0.0.1" in claim.peer for claim in claims)


# ---------------------------------------------------------------------------- back-pressure


class Slow:
    """A backend that stores nothing until it is told to."""

    def __init__(self, store: Staging) -> None:
        self._backend: Backend = backend_of(store)
        self.go_on = trio.Event()
        self.asked = 0

    async def work(self, key: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        self.asked += 1
        if self.asked > 1:  # `begin` goes through
            await self.go_on.wait()
        return await self._backend.work(key, act)


@pytest.mark.requirement("R-08")
async def test_a_client_is_never_further_ahead_of_the_store_than_its_window(store: Staging) -> None:
    backend = Slow(store)
    async with serving(on_backend(Staging, store, backend), "bpmux+mem://slow") as served:
        client = StagingClient(served.url, window=8192)
        given = Given(rows(0, 5_000))
        async with trio.open_nursery() as nursery:

            async def write_all() -> None:
                await client.write("a", KEY, 0, given, encoding=Encoding.BINARY)

            nursery.start_soon(write_all)
            await trio.testing.wait_all_tasks_blocked()
            assert backend.asked == 2
            assert 8192 - 2 * 120 <= given.taken * (8 + 4) <= 8192 + 120
            backend.go_on.set()
        assert given.taken == 5_000
    assert (await store.progress(KEY)).staged == 5_000 * (8 + 4)


@pytest.mark.requirement("R-59")
async def test_a_server_sweeps_what_is_left_staged(autojump_clock: trio.testing.MockClock) -> None:
    async with open_staging("memory:", now=trio.current_time) as store, serving(store, "bpmux+mem://swept") as served:
        client = StagingClient(served.url)
        await client.write("a", KEY, 0, Given(rows(0, 10)), encoding=Encoding.BINARY, ttl=10.0)
        await trio.sleep(9.0)
        assert (await store.progress(KEY)).transactions == 1
        await trio.sleep(7.0)
        assert (await store.progress(KEY)).transactions == 0
