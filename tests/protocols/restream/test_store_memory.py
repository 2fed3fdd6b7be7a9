"""The limit of bytes of the store in memory, and the addresses of stores."""

from __future__ import annotations

import pytest
import trio

from muxkit.protocols.restream.store import StoreLimits, open_store
from muxkit.storage import StoreFull
from tests.protocols.restream.stores import U1, U2, Clock


@pytest.mark.requirement("R-59")
async def test_memory_is_bounded_and_acks_and_expiry_make_room() -> None:
    clock = Clock()
    async with open_store("memory:", limits=StoreLimits(bytes=100_000), now=clock) as store:
        await store.register(U1, None)

        async def append_for_ever() -> None:
            while True:
                await store.append(U1, "x" * 1000)

        with pytest.raises(StoreFull, match=r"would pass StoreLimits\(bytes=100000\)"):
            await append_for_ever()
        head = (await store.status(U1)).head
        assert 70 < head < 100
        with pytest.raises(StoreFull):
            await store.append_many(U1, ["x" * 1000] * 5)
        assert len(await store.replay(U1, 0)) == head
        await store.ack(U1, head)
        await store.append_many(U1, ["x" * 1000] * head)
        with pytest.raises(StoreFull):
            await store.register(U2, "x" * 5000)
        await store.disconnect(U1)
        clock.now += 31
        assert await store.expire() == 1
        await store.register(U2, "x" * 90_000)


@pytest.mark.parametrize(("count", "passes"), [(50, True), (200, False)])
async def test_only_what_would_fit_into_an_empty_store_is_worth_waiting_for(count: int, passes: bool) -> None:
    async with open_store("memory:", limits=StoreLimits(bytes=100_000)) as store:
        await store.register(U1, None)
        await store.append_many(U1, ["x" * 1000] * 80)
        with pytest.raises(StoreFull) as full:
            await store.append_many(U1, ["x" * 1000] * count)
        assert full.value.passes is passes


async def test_sessions_are_bounded() -> None:
    async with open_store("memory:", limits=StoreLimits(sessions=2)) as store:
        await store.register("a", None)
        await store.register("b", None)
        with pytest.raises(StoreFull, match=r"2 sessions are all that StoreLimits\(sessions=2\) allows") as refused:
            await store.register("c", None)
        assert "2" not in refused.value.for_client


async def test_calls_are_checkpoints() -> None:
    async with open_store("memory:") as store:
        await store.register(U1, 0)
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.put(U1, lambda state: (state, state))
        assert scope.cancelled_caught
        assert (await store.status(U1)).head == 0


@pytest.mark.parametrize("keep", [-1, float("nan")])
async def test_a_time_that_is_none_is_refused(keep: float) -> None:
    with pytest.raises(ValueError, match="is not a number of seconds"):
        async with open_store("memory:", keep=keep):
            pytest.fail("it was opened")
