"""A program that feeds sessions needs no private name: limits, the errors of a store, and waiting for room."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from muxkit.protocols import restream

UUID = "11111111-0000-4000-8000-000000000001"


@pytest.mark.requirement("R-71")
async def test_the_bound_that_an_error_names_can_be_raised() -> None:
    """Was: Producers as documented ended with `StoreFull` behind a million messages that nobody had acknowledged, and
    the `StoreLimits` that the error names could not be imported.
    """
    async with restream.open_store("memory:", limits=restream.StoreLimits(messages=2)) as store:
        await store.register(UUID, {}, attached=False)
        await store.append_many(UUID, [1, 2])
        with pytest.raises(restream.StoreFull, match=r"StoreLimits\(messages=2\)"):
            await store.append(UUID, 3)


async def test_a_producer_that_waits_for_room_goes_on_when_something_is_acknowledged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with restream.open_store("memory:", limits=restream.StoreLimits(messages=2)) as store:
        await store.register(UUID, {}, attached=False)

        async def produce() -> None:
            for number in range(1, 11):
                await store.wait_room(UUID)
                await store.append(UUID, number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
            for number in range(1, 11):
                await trio.testing.wait_all_tasks_blocked()
                assert (await store.status(UUID)).waiting == min(2, 11 - number)
                await store.ack(UUID, number)
        assert (await store.status(UUID)).head == 10


async def test_a_program_that_is_started_again_finds_its_session() -> None:
    async with restream.open_store("memory:") as store:
        await store.register(UUID, {}, attached=False)
        with pytest.raises(restream.SessionExists) as refused:
            await store.register(UUID, {}, attached=False)
        assert refused.value.status.head == 0
        assert isinstance(refused.value, restream.StoreError)


def test_every_bound_of_a_store_has_a_finite_default() -> None:
    assert all(isinstance(field.default, int) for field in attrs.fields(restream.StoreLimits))
