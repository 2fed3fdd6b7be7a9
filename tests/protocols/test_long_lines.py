"""Long lines on virtual time: a channel that is read fills the line, and nothing else suffers from that.

The line holds `PRODUCT` bytes, several times the window that a channel gets on a short one.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit import Channel, LinkLost, Session
from muxkit.protocols import aqueduct, bpmux, relink, yamux
from muxkit.runtime import background
from muxkit.testing import weather_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

MIB = 1024 * 1024
SIZE = 64 * 1024  # bytes of a bulk message
ROUND_TRIP = 0.2  # s
RATE = 20 * MIB  # bytes a second
PRODUCT = 4 * MIB

Pair = tuple[Session, Session]


def with_roles(session: Callable[..., Any], one: str, other: str) -> tuple[Any, Any]:
    return partial(session, role=one), partial(session, role=other)


ENDS = {
    "aqueduct": with_roles(aqueduct.connection, "client", "server"),
    "bpmux": (bpmux.session, bpmux.session),
    "relink": with_roles(relink.session, "connector", "listener"),
    "yamux": with_roles(yamux.session, "client", "server"),
}


@asynccontextmanager
async def on_a_long_line(protocol: str, *, round_trip: float = ROUND_TRIP, rate: float = RATE) -> AsyncIterator[Pair]:
    ours, theirs = ENDS[protocol]
    here, there = weather_pair(7, latency=round_trip / 2, bandwidth=rate, buffer=64 * MIB, splits=False)
    over, ready = trio.Event(), trio.Event()
    others: list[Session] = []

    async def listen() -> None:
        with suppress(LinkLost):  # the tests leave in the middle of a transfer
            async with theirs(there, linger=0) as other:
                others.append(other)
                ready.set()
                await over.wait()

    async with background() as nursery:
        nursery.start_soon(listen)
        with suppress(LinkLost):
            async with ours(here, linger=0) as one:
                await ready.wait()
                yield one, others[0]
                over.set()


async def opened(one: Session, other: Session) -> tuple[Channel, Channel]:
    there: list[Channel] = []

    async def take() -> None:
        there.append(await anext(aiter(other)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        here = await one.open("bulk")
    return here, there[0]


async def send_all(channel: Channel, size: int, *, each: int = SIZE) -> None:
    for _ in range(size // each):
        await channel.send(bytes(each))


async def receive_all(channel: Channel, size: int) -> float:
    """Receive so many bytes; return the seconds that took."""
    began, left = trio.current_time(), size
    while left > 0:
        left -= len(await channel.receive())
    return trio.current_time() - began


@pytest.mark.parametrize("protocol", ENDS)
async def test_one_channel_that_is_read_fills_a_long_line(protocol: str, autojump_clock: MockClock) -> None:
    async with on_a_long_line(protocol) as (one, other):
        here, there = await opened(one, other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, here, 96 * MIB)
            await receive_all(there, 32 * MIB)  # meanwhile the window grows
            took = await receive_all(there, 60 * MIB)
            nursery.cancel_scope.cancel()
    assert 60 * MIB / took >= 0.95 * RATE


@pytest.mark.parametrize("protocol", ENDS)
async def test_short_messages_fill_a_long_line_as_well(protocol: str, autojump_clock: MockClock) -> None:
    async with on_a_long_line(protocol, rate=4 * MIB) as (one, other):
        here, there = await opened(one, other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(send_all, here, 8 * MIB, each=512))
            await receive_all(there, 4 * MIB)
            took = await receive_all(there, 2 * MIB)
            nursery.cancel_scope.cancel()
    assert 2 * MIB / took >= 0.9 * 4 * MIB


@pytest.mark.parametrize("protocol", ENDS)
async def test_a_reader_that_stalls_costs_its_own_window_while_another_channel_fills_the_line(
    protocol: str, autojump_clock: MockClock
) -> None:
    async with on_a_long_line(protocol) as (one, other):
        stalled, stalled_there = await opened(one, other)
        here, there = await opened(one, other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, stalled, 96 * MIB)
            await receive_all(stalled_there, MIB)  # and then nothing more
            nursery.start_soon(send_all, here, 96 * MIB)
            await receive_all(there, 32 * MIB)
            took = await receive_all(there, 60 * MIB)
            unread = stalled_there.stats().unread
            nursery.cancel_scope.cancel()
    assert 60 * MIB / took >= 0.95 * RATE
    assert unread <= 2 * MIB


@pytest.mark.parametrize("protocol", ENDS)
async def test_a_channel_that_is_read_slowly_gets_no_large_window_on_a_long_line(
    protocol: str, autojump_clock: MockClock
) -> None:
    async with on_a_long_line(protocol) as (one, other):
        here, there = await opened(one, other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, here, 96 * MIB)
            most = 0
            for _ in range(200):
                await there.receive()
                await trio.sleep(0.1)
                most = max(most, there.stats().unread)
            nursery.cancel_scope.cancel()
    assert most <= MIB
