"""Openers that wait under the limit on channels: they open in order, or fail when nothing can be opened any more."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit import ChannelStopped, Limits, LinkLost
from muxkit.runtime.mux_session import connection_of

from ._pairs import TINY, Pair, at_rest, cut, echo_each, rough_sessions, sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAITING = 60


class Steps(trio.abc.Instrument):
    """Counts the steps of each task."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.of[task.name] += 1


@asynccontextmanager
async def full(pair: Pair, *, places: int = 2) -> AsyncIterator[trio.Event]:
    """Keep all channels under the limit open, until the event is set or the block is left."""
    leave = trio.Event()

    async def hold() -> None:
        async with pair.one.open():
            await leave.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        for _ in range(places):
            nursery.start_soon(hold)
        await at_rest()
        yield leave
        leave.set()
        await at_rest()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("payload", [b"", b"with a word"])
async def test_waiting_openers_have_their_turns_in_order_and_are_not_woken_in_vain(payload: bytes) -> None:
    order: list[int] = []
    steps = Steps()

    async def visit(number: int) -> None:
        async with pair.one.open_duplex(payload) as channel:
            order.append(number)
            await channel.send(b"x")
            assert await channel.receive() == b"x"

    async with sessions(limits=Limits(channels=2)) as pair, full(pair) as leave:
        async with trio.open_nursery() as nursery:
            for number in range(WAITING):
                nursery.start_soon(visit, number, name=f"visitor {number}")
                await at_rest()
            trio.lowlevel.add_instrument(steps)
            leave.set()
        trio.lowlevel.remove_instrument(steps)
    assert sum(abs(place - number) for place, number in enumerate(order)) <= WAITING  # two at a time, in any order
    assert max(steps.of[f"visitor {number}"] for number in range(WAITING)) < 20


async def test_who_waits_for_credit_at_the_top_level_does_not_keep_those_behind_him_waiting() -> None:
    opened = trio.Event()

    async def open_with_payload() -> None:
        async with pair.one.open_sink(bytes(500)):
            pass

    async def open_without() -> None:
        async with pair.one.open_sink():
            opened.set()

    async with rough_sessions(limits=attrs.evolve(TINY, channels=2)) as pair, full(pair) as leave:
        with trio.move_on_after(0):
            while True:
                await pair.one.send(bytes(100))  # they are not received, so no credit is left
        async with trio.open_nursery() as nursery:
            for task in (open_with_payload, open_without):
                nursery.start_soon(task)
                await at_rest()
            assert not opened.is_set()
            leave.set()
            await opened.wait()
            nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-31")
async def test_who_gives_up_waiting_leaves_his_turn_to_the_next() -> None:
    async with sessions(limits=Limits(channels=2)) as pair, full(pair) as leave, trio.open_nursery() as nursery:
        scopes = [trio.CancelScope() for _ in range(3)]
        opened = [False] * 3

        async def visit(number: int) -> None:
            with scopes[number]:
                async with pair.one.open():
                    opened[number] = True

        for number in range(3):
            nursery.start_soon(visit, number)
            await at_rest()
        scopes[0].cancel()
        leave.set()
        scopes[1].cancel()
        await at_rest()
        assert opened[2]
        assert not opened[0]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(
    ("how", "error"), [("cut", LinkLost), ("peer leaves", ChannelStopped), ("we close", trio.ClosedResourceError)]
)
async def test_all_who_wait_hear_that_nothing_can_be_opened_any_more(how: str, error: type[Exception]) -> None:
    """Was: Who waited to open a channel beyond the peer's limit was not told that we ourselves had closed the
    connection's own channel.
    """
    heard = 0

    async def visit() -> None:
        nonlocal heard
        with pytest.raises(error):
            async with pair.one.open():
                pass
        heard += 1

    async with rough_sessions(limits=Limits(channels=2)) as pair, full(pair):
        async with trio.open_nursery() as nursery:
            for _ in range(WAITING):
                nursery.start_soon(visit)
            await at_rest()
            assert heard == 0
            if how == "cut":
                cut(pair)
            elif how == "peer leaves":
                nursery.start_soon(connection_of(pair.other).leave, 5.0)
            else:
                connection_of(pair.one).top.close()
                await visit()  # a later opener fails, too
                heard -= 1
    assert heard == WAITING
