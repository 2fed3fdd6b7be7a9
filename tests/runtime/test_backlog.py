"""Does everything that was opened reach somebody?"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.runtime import Backlog

from ._halves import at_rest, lost


def backlog() -> tuple[Backlog[int], list[int]]:
    taken: list[int] = []
    return Backlog(taken.append), taken


async def test_items_come_in_order_and_are_reported_when_taken() -> None:
    items, taken = backlog()
    items.put(1)
    items.put(2)
    assert len(items) == 2
    assert await anext(items) == 1
    assert taken == [1]
    items.ended()
    assert [item async for item in items] == [2]


async def test_iteration_ends_behind_the_last_item() -> None:
    items, _ = backlog()
    items.put(1)
    items.ended()
    assert [item async for item in items] == [1]
    assert [item async for item in items] == []


async def test_an_end_with_an_error_raises_it_behind_the_last_item() -> None:
    items, _ = backlog()
    items.put(1)
    items.ended(lost)
    assert await anext(items) == 1
    for _ in range(2):
        with pytest.raises(LinkLost):
            await anext(items)


async def test_the_first_end_counts() -> None:
    items, _ = backlog()
    items.ended()
    items.ended(lost)
    assert [item async for item in items] == []


@pytest.mark.seeds(20, soak=500)
async def test_several_iterators_share_everything_also_when_some_are_cancelled(seed: int) -> None:
    items, _ = backlog()
    got: list[int] = []
    scopes: list[trio.CancelScope] = []

    async def iterate() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            async for item in items:
                got.append(item)
                if item % 3 == seed % 3:
                    await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(iterate)
        await at_rest()
        for item in range(100):
            items.put(item)
            if item % 10 == 0 and item < 70:
                scopes[item // 10].cancel()
            if item % 7 == 0:
                await trio.lowlevel.checkpoint()
            if item % 50 == 0:
                await at_rest()
        items.ended()
    assert sorted(got) == list(range(100))


async def test_the_end_wakes_every_iterator() -> None:
    items, _ = backlog()
    over = 0

    async def iterate() -> None:
        nonlocal over
        async for _ in items:
            pass
        over += 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(iterate)
        await at_rest()
        items.ended()
    assert over == 5


@pytest.mark.requirement("R-34")
async def test_taking_is_a_checkpoint() -> None:
    items, _ = backlog()
    items.put(1)
    with trio.testing.assert_checkpoints():
        await anext(items)
    items.ended()
    with trio.testing.assert_checkpoints(), pytest.raises(StopAsyncIteration):
        await anext(items)
