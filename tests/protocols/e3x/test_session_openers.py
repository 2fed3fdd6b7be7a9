"""Openers that wait under the limit on channels: they open in order, or fail when nothing can be opened any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LinkLost

from ._sessions import on_packets

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.runtime import Channel


async def test_waiting_openers_have_their_turns_in_order(autojump_clock: MockClock) -> None:
    order: list[int] = []

    async def visit(number: int) -> None:
        async with pair.one.open():
            order.append(number)

    async def take() -> None:
        async for channel in pair.other.incoming():
            nursery.start_soon(_leave, channel)

    async with on_packets(limits=Limits(channels=1)) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(take)
        async with trio.open_nursery() as visitors:
            async with pair.one.open():
                for number in range(20):
                    visitors.start_soon(visit, number)
                    await trio.testing.wait_all_tasks_blocked()
                assert order == []
        nursery.cancel_scope.cancel()
    assert order == list(range(20))


async def _leave(channel: Channel) -> None:
    async with channel:
        async for _ in channel:
            pass


async def test_all_who_wait_hear_that_the_connection_is_lost(autojump_clock: MockClock) -> None:
    heard = 0

    async def visit() -> None:
        nonlocal heard
        with pytest.raises(LinkLost):
            async with pair.one.open():
                pass
        heard += 1

    async with on_packets(limits=Limits(channels=1)) as pair, pair.one.open():
        async with trio.open_nursery() as visitors:
            for _ in range(20):
                visitors.start_soon(visit)
            await trio.testing.wait_all_tasks_blocked()
            assert heard == 0
            pair.cut()
    assert heard == 20
