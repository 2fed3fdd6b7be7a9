"""Any call of a client may be cancelled at any of its steps: nothing is lost, repeated or left behind."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.protocols import restream
from muxkit.protocols.restream import ClientConfig, Status
from muxkit.testing import cancel_sweep
from tests._tasks import living_tasks
from tests.protocols.restream._helpers import EXAMPLE, UUID
from tests.protocols.restream.test_client import BY_HAND, HOLD, REFUSED, Play, Script, messages, whole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    Operation = Callable[[], Awaitable[object]]

pytestmark = pytest.mark.requirement("R-31", "R-33")

STORIES: dict[str, list[Play]] = {
    "at once": [whole()],
    "later": [[1.0, *whole()]],
    "in pieces": [[b'{"id":1,', 1.0, b'"data":{"value":1522805012}}\n', 1.0, *whole()[1:]]],
    "after a drop": [[1.0], [1.0, *whole()[:1]], [1.0, *whole()[1:]]],
    "after failures": [REFUSED, REFUSED, whole()],
}


@pytest.mark.parametrize("story", STORIES)
async def test_a_cancelled_receive_has_taken_nothing(story: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script, got = Script(nursery, STORIES[story]), list[int]()
            async with restream.numbers(script.dial, count=5, config=ClientConfig(ack_every=1)) as numbers:

                async def receive_two() -> None:
                    got.append(await numbers.receive())
                    got.append(await numbers.receive())

                yield receive_two
                got.extend([number async for number in numbers])
                assert got == EXAMPLE
            nursery.cancel_scope.cancel()

    assert await cancel_sweep(scenario) >= 2


@pytest.mark.parametrize("story", STORIES)
async def test_a_cancelled_receive_is_not_in_what_is_saved(story: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script, got = Script(nursery, STORIES[story]), list[int]()
            async with restream.numbers(script.dial, count=5, config=BY_HAND) as numbers:

                async def receive_one() -> None:
                    got.append(await numbers.receive())

                yield receive_one
                assert numbers.snapshot()["id"] == numbers.last_id == len(got)
            nursery.cancel_scope.cancel()

    await cancel_sweep(scenario)


async def test_a_cancelled_receive_takes_no_message_from_another_task(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script, got = Script(nursery, [[1.0, *whole()]]), list[int]()
            async with restream.numbers(script.dial, count=5) as numbers:

                async def receive_one() -> None:
                    got.append(await numbers.receive())

                async with trio.open_nursery() as beside:
                    beside.start_soon(receive_one)
                    yield receive_one
                got.extend([number async for number in numbers])
                assert sorted(got) == sorted(EXAMPLE)
            nursery.cancel_scope.cancel()

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("taken", [0, 3, 5])
async def test_closing_may_be_cancelled(taken: int, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script = Script(nursery, [[*whole(), HOLD]])
            async with restream.numbers(script.dial, count=5) as numbers:
                for _ in range(taken):
                    await numbers.receive()
                yield numbers.aclose
                with pytest.raises(trio.ClosedResourceError):
                    await numbers.receive()
                await numbers.aclose()
                await trio.testing.wait_all_tasks_blocked()
                assert not nursery.child_tasks
            nursery.cancel_scope.cancel()

    assert await cancel_sweep(scenario) >= 1


@pytest.mark.requirement("R-36", "R-43")
@pytest.mark.parametrize(
    ("play", "count"),
    [([*whole(), HOLD], 5), ([*messages(1, 30), HOLD], 99), (REFUSED, 9), ([], 9)],
    ids=["to its end", "left early", "no server", "no answer"],
)
async def test_a_block_may_be_cancelled_anywhere_and_leaves_nothing_behind(
    play: Play, count: int, autojump_clock: MockClock
) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script = Script(nursery, [play])
            before = living_tasks()

            async def read() -> None:
                async with restream.numbers(script.dial, count=count) as numbers:
                    with trio.move_on_after(12):
                        for _ in range(5):
                            await numbers.receive()

            yield read
            await trio.testing.wait_all_tasks_blocked()
            assert living_tasks() == before
            nursery.cancel_scope.cancel()

    await cancel_sweep(scenario)


async def test_asking_for_a_status_may_be_cancelled(autojump_clock: MockClock) -> None:
    standing = {"head": 7, "acknowledged": 3, "final": False, "epoch": None}

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with trio.open_nursery() as nursery:
            script = Script(nursery, [[1.0, {"status": standing}, HOLD]])
            yield lambda: restream.status(script.dial, UUID)
            assert await restream.status(script.dial, UUID) == Status(7, 3, False, None)
            nursery.cancel_scope.cancel()

    await cancel_sweep(scenario)


async def test_an_error_of_the_block_comes_out_as_it_is(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*messages(1, 3), HOLD]])
    began = trio.current_time()

    async def fail() -> None:
        async with restream.numbers(script.dial, count=30) as numbers:
            await numbers.receive()
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()
    assert trio.current_time() == began


async def test_a_receive_is_a_checkpoint_whether_there_is_something_or_not(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [whole()])
    async with restream.numbers(script.dial, count=5) as numbers:
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            with trio.testing.assert_checkpoints():
                await numbers.receive()
        for error in (trio.EndOfChannel, trio.ClosedResourceError):
            with pytest.raises(error), trio.testing.assert_checkpoints():
                await numbers.receive()
            with trio.testing.assert_checkpoints():
                await numbers.aclose()
