"""Errors and interrupts leave a session as they were raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.protocols import bpmux
from muxkit_adapters import memory

from ._pairs import sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    Call = Callable[[], Awaitable[object]]


@pytest.mark.requirement("R-36")
async def test_a_blocks_own_error_comes_out_bare_and_the_link_is_closed() -> None:
    here, there = memory.pair()
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with bpmux.session(here) as session, session.open():
            raise error
    assert caught.value is error
    with pytest.raises(trio.ClosedResourceError):
        await here.send_all(b"x")
    assert await there.receive_some() == b"" or await there.receive_some() == b""


@pytest.mark.requirement("R-36")
async def test_a_time_limit_around_the_block_is_just_that(autojump_clock: MockClock) -> None:
    with trio.move_on_after(3) as scope:
        async with sessions() as pair, pair.one.open() as channel:
            await channel.receive()
    assert scope.cancelled_caught


@pytest.mark.requirement("R-36")
async def test_an_interrupt_comes_out_bare_from_the_block_and_from_the_pump() -> None:
    async def interrupt_the_block() -> None:
        async with bpmux.session(memory.pair()[0]):
            await trio.lowlevel.checkpoint()
            raise KeyboardInterrupt

    class Interrupting(memory.MemoryStream):
        def receive_nowait(self, max_bytes: int) -> bytes | None:
            super().receive_nowait(max_bytes)
            raise KeyboardInterrupt

    async def interrupt_the_pump() -> None:
        here, there = memory.pair()
        here.__class__ = Interrupting
        await there.send_all(b"x")
        async with bpmux.session(here) as session:
            await session.receive()

    for interrupted in (interrupt_the_block, interrupt_the_pump):
        with pytest.raises(KeyboardInterrupt):
            await interrupted()
