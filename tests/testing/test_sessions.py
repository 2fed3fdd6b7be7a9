"""`check_session` passes a session that keeps its promises, and names the promise that another breaks."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.protocols import bpmux
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import SessionPair, check_session, weather_pair
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit.testing._sessions import MakePair


@asynccontextmanager
async def over_memory() -> AsyncIterator[SessionPair]:
    here, there = memory.pair()

    def cut() -> None:
        for session in (one, other):
            connection_of(session).pump.lose("the test cut it", by="network")

    async with bpmux.session(here, linger=1) as one, bpmux.session(there, linger=1) as other:
        yield SessionPair(one, other, cut)


@asynccontextmanager
async def over_weather() -> AsyncIterator[SessionPair]:
    here, there = weather_pair(4, latency=0.01, jitter=0.01, bandwidth=1e8)
    async with bpmux.session(here, linger=1) as one, bpmux.session(there, linger=1) as other:
        yield SessionPair(one, other, here.reset)


@asynccontextmanager
async def small_windows() -> AsyncIterator[SessionPair]:
    limits = Limits(channel_bytes=1000, channel_floor=100, outbox=5000)
    here, there = memory.pair(capacity=500)
    async with (
        bpmux.session(here, linger=1, limits=limits) as one,
        bpmux.session(there, linger=1, limits=limits) as other,
    ):
        yield SessionPair(one, other, lambda: connection_of(one).pump.lose("cut", by="network"))


@pytest.mark.requirement("R-07", "R-33", "R-36", "R-39", "R-41", "R-42")
@pytest.mark.parametrize("make_pair", [over_memory, over_weather, small_windows])
async def test_bpmux_keeps_the_promises_of_a_session(make_pair: MakePair, autojump_clock: MockClock) -> None:
    await check_session(make_pair, largest=300_000)


async def test_a_send_that_is_not_atomic_is_found(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    atomic = SendHalf.send

    async def careless(self: SendHalf, message: bytes) -> None:
        await atomic(self, message)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(SendHalf, "send", careless)
    with pytest.raises(AssertionError, match="a cancelled send sends nothing: instead of message"):
        await check_session(over_memory)


async def test_a_receive_that_loses_messages_is_found(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    lossless = ReceiveHalf.receive

    async def careless(self: ReceiveHalf[bytes]) -> bytes:
        message = await lossless(self)
        await trio.lowlevel.checkpoint()
        return message

    monkeypatch.setattr(ReceiveHalf, "receive", careless)
    with pytest.raises(AssertionError, match="a cancelled receive loses nothing: instead of message"):
        await check_session(over_memory)


async def test_a_session_without_back_pressure_is_found(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    lossless = ReceiveHalf.deliver

    def deliver(self: ReceiveHalf[bytes], message: bytes) -> None:
        self.receiver.consumed((), len(message))  # on arrival, as a careless protocol would
        lossless(self, message)

    def deliver_all(self: ReceiveHalf[bytes], messages: list[bytes]) -> None:
        for message in messages:
            self.deliver(message)

    monkeypatch.setattr(ReceiveHalf, "deliver", deliver)
    monkeypatch.setattr(ReceiveHalf, "deliver_all", deliver_all)
    monkeypatch.setattr(ReceiveHalf, "_took", lambda self, messages, size: None)
    with pytest.raises(AssertionError, match=r"an unread channel stops its sender only: \d+ bytes were taken"):
        await check_session(over_memory, largest=1000)


async def test_a_session_that_does_not_notice_a_loss_is_found(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr("muxkit.runtime.Backlog.ended", lambda self, error=None: None)
    with pytest.raises(AssertionError, match="loss wakes all tasks: not over within"):
        await check_session(over_memory, largest=1000)


async def test_a_session_that_raises_groups_is_found(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def grouped() -> AsyncIterator[SessionPair]:
        async with trio.open_nursery(), over_memory() as pair:
            yield pair

    with pytest.raises(AssertionError, match="a block's own error came out in a group"):
        await check_session(grouped, largest=1000)


def test_the_kit_works_without_pytest_and_waits_with_trio_until_it_is_needed() -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['_pytest'] = None;"
        "import muxkit.testing as kit; assert 'trio' not in sys.modules;"
        "[getattr(kit, name) for name in dir(kit)]; assert 'trio' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
