"""A byte stream takes nothing more while the peer goes on sending: what waits stays where it is counted."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import LinkLost
from muxkit.protocols import e3x
from muxkit_adapters import memory
from tests.protocols.e3x._sessions import at_rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

TAKEN = 2000  # bytes, and then nothing
SIGN_OF_LIFE = b"\0"  # a chunk of nothing


@asynccontextmanager
async def stuck() -> AsyncIterator[tuple[e3x.Session, memory.MemoryStream]]:
    """Run a session whose stream is about to block for ever; yield it with the stream's other end."""
    here, there = memory.pair(capacity=TAKEN)
    with pytest.RaisesGroup(LinkLost, allow_unwrapped=True, flatten_subgroups=True):
        async with e3x.session(here, role="connector", linger=0.1) as session:
            yield session, there


async def test_what_a_stuck_stream_did_not_take_is_unsent_whatever_the_peer_says(autojump_clock: MockClock) -> None:
    async with stuck() as (session, there), session.open() as channel:
        for _ in range(10):
            await channel.send(bytes(4000))
        for _ in range(3):
            await at_rest()
            await there.send_all(SIGN_OF_LIFE)
        await at_rest()
        await there.aclose()
        with pytest.raises(LinkLost) as caught:
            await channel.receive()
        assert caught.value.unsent is not None
        assert caught.value.unsent >= 40_000 - TAKEN


async def test_an_end_that_cannot_leave_has_not_left_whatever_the_peer_says(autojump_clock: MockClock) -> None:
    async with stuck() as (session, there), session.open() as full, session.open() as other:
        await at_rest()
        await full.send(bytes(8000))
        await at_rest()
        for _ in range(2):
            with trio.move_on_after(1) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(other.finish)
                    await at_rest()
                    await there.send_all(SIGN_OF_LIFE)
            assert scope.cancelled_caught


@pytest.mark.requirement("R-71")
async def test_on_a_stream_that_takes_everything_a_silent_peer_is_given_up_in_time(autojump_clock: MockClock) -> None:
    """Was: After a message on a quiet e3x session over a byte stream nobody looked at the clock: nothing was sent
    again, and a silent peer was given up by the keepalive only, or never.
    """
    here, _there = memory.pair()
    config = e3x.Config(keepalive=None, timeout=10)
    async with e3x.session(here, role="connector", linger=0.1, config=config) as session:
        await at_rest()
        begun = trio.current_time()
        async with session.open() as channel:
            await channel.send(b"is anybody there?")
            with pytest.raises(LinkLost):
                await channel.receive()
            assert trio.current_time() == pytest.approx(begun + 10)
