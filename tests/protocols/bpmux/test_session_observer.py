"""What an observer sees of a session, and that a session without one pays nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit import LinkLost, RemoteProtocolError
from muxkit.protocols import bpmux
from muxkit_adapters import memory

from ._pairs import at_rest, cut, next_duplex, rough_sessions, sessions

if TYPE_CHECKING:
    from muxkit._observer import Direction


@attrs.define
class Watcher:
    """An observer that records every call."""

    frames: list[tuple[str, str, str, int]] = attrs.Factory(list)
    credits: list[tuple[str, str, int]] = attrs.Factory(list)
    states: list[tuple[str, str]] = attrs.Factory(list)
    errors: list[BaseException] = attrs.Factory(list)
    raw: dict[str, int] = attrs.Factory(lambda: {"in": 0, "out": 0})

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.frames.append((direction, channel, name, size))

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self.credits.append((direction, channel, amount))

    def state(self, channel: str, state: str) -> None:
        self.states.append((channel, state))

    def timer(self, name: str) -> None: ...

    def error(self, error: BaseException) -> None:
        self.errors.append(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self.raw[direction] += len(data)


async def test_an_observer_sees_frames_credit_and_states() -> None:
    watcher = Watcher()
    async with sessions(observer=watcher) as pair:
        async with pair.one.open() as here:
            there = await next_duplex(pair.other)
            await there.send(b"12345")
            assert await here.receive() == b"12345"
            await there.aclose()
        stats = pair.one.stats()
    assert ("in", "out-stream 1", "payload", 5) in watcher.frames
    assert any(direction == "in" and channel == "out-sink 1" for direction, channel, _ in watcher.credits)
    assert any(channel.endswith(" 1") and state == "open" for channel, state in watcher.states)
    assert any(channel.endswith(" 1") and state == "gone" for channel, state in watcher.states)
    assert watcher.raw["in"] >= stats.bytes_received > 0
    assert watcher.raw["out"] >= stats.bytes_sent > 0
    assert not watcher.errors


async def test_an_observer_is_told_once_why_the_connection_failed() -> None:
    here, there = memory.pair()
    watcher = Watcher()

    async def use() -> None:
        async with bpmux.session(here, observer=watcher) as session:
            await there.send_all(bytes(100))
            await session.receive()

    with pytest.raises(LinkLost):
        await use()
    (error,) = watcher.errors
    assert isinstance(error, RemoteProtocolError)


@pytest.mark.requirement("R-71")
async def test_an_observer_is_told_of_a_broken_link() -> None:
    """Was: A sender who found the connection broken while he wrote, on his way to wait for credit, slept for ever."""
    watcher = Watcher()
    here, there = memory.pair()

    async def use() -> None:
        async with bpmux.session(here, observer=watcher) as session:
            await trio.aclose_forcefully(there)
            while True:
                await session.send(bytes(1000))

    with pytest.raises(LinkLost):
        await use()
    assert len(watcher.errors) <= 1


async def test_a_session_needs_no_observer() -> None:
    async with rough_sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await here.send(b"x")
        assert await there.receive() == b"x"
        cut(pair)


async def test_the_counters_of_a_session() -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await here.send_many([b"12345"] * 10)
        await there.receive()
        await at_rest()
        one, other = pair.one.stats(), pair.other.stats()
        assert (one.messages_sent, other.messages_received) == (10, 10)
        assert one.bytes_sent == other.bytes_received > 50
        assert one.channels == other.channels == 1
        assert one.queued == 0
        assert pair.one.info.protocol == "bpmux"
        assert pair.one.info.peer == "mem pair"
        assert repr(pair.one).endswith(": 1 channel>")
        assert "out-sink 1" in repr(here)
