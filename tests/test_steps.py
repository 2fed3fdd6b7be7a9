"""What one message, ping, opening, timer and leave costs does not depend on how many other channels there are.

Steps are lines of muxkit's code, counted with `sys.settrace`. Time would depend on the machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit import Limits
from muxkit.protocols import aqueduct, bpmux, e3x, relink
from muxkit.protocols.e3x import Config, Engine, Writable
from muxkit.runtime import Channel, Session, background
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

    from trio.testing import MockClock

FEW, MANY = 10, 100
PROTOCOLS = {"bpmux": bpmux, "relink": relink, "aqueduct": aqueduct, "e3x": e3x}


class Steps:
    """Counts lines of the library that are run inside of `count` blocks."""

    def __init__(self) -> None:
        self.by_function: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_function.total()

    @contextmanager
    def count(self) -> Iterator[None]:
        before = sys.gettrace()

        def trace(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401 - as `sys.settrace` has it
            name = frame.f_code.co_filename
            if "/muxkit" not in name or "/tests/" in name:
                return None
            function = f"{name}:{frame.f_code.co_name}"

            def line(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401
                self.by_function[function] += 1
                return line

            return line

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


async def with_channels(name: str, count: int, use: Callable[[Session, list[Channel]], Awaitable[None]]) -> None:
    """Run `use` with a session whose peer echoes, and with so many idle channels on it; then leave the session."""
    settings: dict[str, Any] = {
        "address": "",
        "limits": Limits(channels=12 * MANY, backlog=12 * MANY),
        "observer": None,
        "linger": 60.0,
    }
    of = PROTOCOLS[name].protocol.session

    async def echo(channel: Channel) -> None:
        with suppress(trio.BrokenResourceError):  # a client that leaves wants no more of it
            async for message in channel:
                await channel.send(message)
            await channel.finish()

    async def serve(stream: trio.abc.Stream) -> None:
        async with of(stream, role="server", **settings) as session, trio.open_nursery() as nursery:
            async for channel in session.incoming():
                nursery.start_soon(echo, channel)
            nursery.cancel_scope.cancel()

    one, other = memory.pair()
    async with background() as nursery:
        nursery.start_soon(serve, other)
        async with of(one, role="client", **settings) as session:
            channels = []
            for _ in range(count):
                channels.append(await session.open())
                await channels[-1].send(b"x")
                await channels[-1].receive()
            await trio.sleep(30)
            await use(session, channels)


async def send_and_receive(session: Session, channels: list[Channel]) -> None:
    for _ in range(5):
        await channels[-2].send(b"y")
        await channels[-2].receive()


async def ping(session: Session, channels: list[Channel]) -> None:
    for _ in range(3):
        await session.ping()


async def open_and_finish(session: Session, channels: list[Channel]) -> None:
    for _ in range(3):
        channel = await session.open()
        await channel.send(b"y")
        await channel.receive()
        await channel.finish()
        with suppress(trio.BrokenResourceError):
            assert [message async for message in channel] == []
        await channel.aclose()


async def let_time_pass(session: Session, channels: list[Channel]) -> None:
    await trio.sleep(300)


@pytest.mark.parametrize("step", [send_and_receive, ping, open_and_finish, let_time_pass])
@pytest.mark.parametrize("name", [*PROTOCOLS])
async def test_a_step_costs_the_same_beside_many_idle_channels(
    name: str, step: Callable[[Session, list[Channel]], Awaitable[None]], autojump_clock: MockClock
) -> None:
    if (name, step) == ("aqueduct", ping):
        pytest.skip("Aqueduct has no ping")
    if (name, step) == ("e3x", let_time_pass):
        pytest.skip("the last message of each of these channels is in hand: tests/protocols/e3x/test_resting.py")
    totals = []
    for count in (FEW, MANY):
        steps = Steps()

        async def use(session: Session, channels: list[Channel], steps: Steps = steps) -> None:
            await send_and_receive(session, channels)  # what happens once
            with steps.count():
                await step(session, channels)

        await with_channels(name, count, use)
        totals.append(steps.total)
    few, many = totals
    assert many <= 1.3 * few + 100


@pytest.mark.parametrize("name", [*PROTOCOLS])
async def test_leaving_costs_each_channel_the_same(name: str, autojump_clock: MockClock) -> None:
    costs = []
    for count in (3 * FEW, 3 * MANY):
        steps = Steps()
        async with trio.open_nursery() as nursery:
            counting = steps.count()

            async def use(session: Session, channels: list[Channel], counting: Any = counting) -> None:  # noqa: ANN401
                counting.__enter__()

            await with_channels(name, count, use)
            counting.__exit__(None, None, None)
            nursery.cancel_scope.cancel()
        costs.append(steps.total / count)
    few, many = costs
    assert many <= 1.3 * few


def test_a_packet_of_e3x_does_not_look_at_channels_that_wait_for_room() -> None:
    """Their own queues are full: only their own packets make room."""
    costs = []
    for count in (FEW, MANY):
        limits = Limits(channels=2 * MANY, outbox=1 << 30, channel_first=4096)
        engine = Engine(True, Config(congestion=False, first_window=1), limits=limits)
        for _ in range(count):
            stuck = engine.open("stuck")
            stuck.sender.send(bytes(4000))
            stuck.sender.notify_when_room(1000)
        engine.open("lively", bytes(100))
        while engine.datagrams_to_send(0.0):  # each is looked at once, behind its own packet
            pass
        steps = Steps()
        with steps.count():
            for number in range(20):
                engine.open("lively", bytes(100))
                assert engine.datagrams_to_send(1.0 + number)
                assert not [event for event in engine.events() if isinstance(event, Writable)]
        costs.append(steps.total)
    few, many = costs
    assert many <= 1.3 * few
