"""A receiver that reads for the whole session is cancelled, closed or cut off at any moment."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import LinkLost
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import replay, weather_pair
from muxkit_adapters import memory

from ._pairs import rough_sessions, sessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from muxkit.protocols import bpmux

    from ._pairs import Pair

OVER = (trio.ClosedResourceError, trio.EndOfChannel, muxkit.ChannelCancelled, LinkLost)
NEVER = 1e9
PATIENCE = 300.0  # s of real time; reached only when something hangs


async def echo(channel: muxkit.Channel) -> None:
    """Answer a number with so many messages, and anything else with itself."""
    with suppress(*OVER, muxkit.ChannelStopped):
        async with channel:
            async for message in channel:
                if message.isdigit():
                    for number in range(int(message)):
                        await channel.send(b"%d" % number)
                else:
                    await channel.send(message)


async def serve(session: bpmux.Session, nursery: trio.Nursery) -> None:
    with suppress(*OVER):
        async for channel in session:
            nursery.start_soon(echo, channel)


class Canceller:
    """Receive under cancel scopes of every kind, which are cancelled while other tasks run."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._live: list[trio.CancelScope] = []

    async def run(self) -> None:
        while True:
            for scope in [*self._live]:
                if self._dice.random() < 0.3:
                    scope.cancel()
            if self._dice.random() < 0.2:
                await trio.sleep(1e-5)
            else:
                await trio.lowlevel.checkpoint()

    async def receive(self, channel: muxkit.Channel) -> list[bytes]:
        """Receive with some likelihood of a cancellation."""
        how = self._dice.randrange(5)
        outer = trio.CancelScope(deadline=self._moment() if how == 1 else NEVER)
        inner = trio.CancelScope(deadline=self._moment() if how in (2, 3) else NEVER, shield=how == 3)
        self._live += [outer] * (how >= 2)
        got: list[bytes] = []
        try:
            with outer, inner:
                if self._dice.random() < 0.2:
                    got = await channel.receive_many(self._dice.choice([None, 1, 3]))
                else:
                    got = [await channel.receive()]
        finally:
            if how >= 2:
                self._live.remove(outer)
        return got

    def _moment(self) -> float:
        return trio.current_time() + self._dice.choice([0, 1e-6, 1e-5, 1e-4])


async def talk(session: bpmux.Session, canceller: Canceller, count: int) -> None:
    """Send a message and receive its echo, `count` times."""
    async with session.open() as channel:
        for number in range(count):
            message = b"m%d" % number
            await channel.send(message)
            got: list[bytes] = []
            while not got:
                got = await canceller.receive(channel)
            assert got == [message]


async def take(session: bpmux.Session, canceller: Canceller, count: int, takers: int) -> None:
    """Receive `count` messages in several tasks."""
    got: list[list[int]] = [[] for _ in range(takers)]
    async with session.open() as channel:
        await channel.send(b"%d" % count)

        async def receive(mine: list[int]) -> None:
            while sum(map(len, got)) < count:
                with trio.move_on_after(0.01):  # another task may have the last message
                    mine += map(int, await canceller.receive(channel))

        async with trio.open_nursery() as nursery:
            for mine in got:
                nursery.start_soon(receive, mine)
    assert sorted(chain(*got)) == list(range(count))
    if takers == 1:
        assert got[0] == sorted(got[0])


async def all_at_once(pair: Pair, dice: random.Random) -> None:
    canceller = Canceller(dice)
    async with trio.open_nursery() as beside:
        beside.start_soon(serve, pair.other, beside)
        beside.start_soon(canceller.run)
        async with trio.open_nursery() as nursery:
            for _ in range(dice.randint(1, 12)):
                nursery.start_soon(talk, pair.one, canceller, dice.randint(1, 30))
            for _ in range(dice.randint(0, 3)):
                nursery.start_soon(take, pair.one, canceller, dice.randint(1, 100), dice.randint(1, 3))
        beside.cancel_scope.cancel()


@pytest.mark.requirement("R-33")
@pytest.mark.seeds(10, soak=3000)
async def test_every_message_comes_once_however_receivers_are_cancelled(seed: int) -> None:
    dice = random.Random(seed)
    with replay(seed), trio.fail_after(PATIENCE):
        async with rough_sessions(memory.pair(capacity=dice.choice([1, 10, 1000, 65_536]))) as pair:
            await all_at_once(pair, dice)


@pytest.mark.requirement("R-33")
@pytest.mark.seeds(2, soak=200)
async def test_every_message_comes_once_over_a_slow_link_too(seed: int, autojump_clock: MockClock) -> None:
    with replay(seed):
        async with rough_sessions(weather_pair(seed, latency=0.001, jitter=0.0005)) as pair:
            await all_at_once(pair, random.Random(seed))


def close(pair: Pair, channel: bpmux.Duplex) -> None:
    channel.source.close()


def abort(pair: Pair, channel: bpmux.Duplex) -> None:
    channel.abort()


def abort_all_of_the_peers(pair: Pair, channel: bpmux.Duplex) -> None:
    connection_of(pair.other).abort_all()


def lose(pair: Pair, channel: bpmux.Duplex) -> None:
    connection_of(pair.one).pump.lose("by the test", by="local")


def lose_the_peer(pair: Pair, channel: bpmux.Duplex) -> None:
    connection_of(pair.other).pump.lose("by the test", by="local")


def say_goodbye(pair: Pair, channel: bpmux.Duplex) -> None:
    connection_of(pair.one).close_all()


ENDS = (close, abort, abort_all_of_the_peers, lose, lose_the_peer, say_goodbye)


@pytest.mark.seeds(13, soak=2000)
@pytest.mark.parametrize("end", ENDS)
async def test_whatever_ends_it_a_guest_is_told(seed: int, end: Callable[[Pair, bpmux.Duplex], None]) -> None:
    dice = random.Random(seed)

    async def talk_on(channel: bpmux.Duplex, told: trio.Event) -> None:
        with suppress(*OVER, muxkit.ChannelStopped):
            while True:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
        told.set()

    with replay(seed), trio.fail_after(PATIENCE):
        async with rough_sessions() as pair, trio.open_nursery() as nursery:
            nursery.start_soon(serve, pair.other, nursery)
            async with pair.one.open() as channel, pair.one.open() as bystander:
                told = trio.Event()
                nursery.start_soon(talk_on, channel, told)
                for _ in range(dice.randint(5, 60)):
                    await trio.lowlevel.checkpoint()
                end(pair, channel)
                await told.wait()
                if end in (close, abort):
                    await bystander.send(b"x")
                    assert await bystander.receive() == b"x"
            nursery.cancel_scope.cancel()


async def test_a_guest_is_told_of_a_peer_that_fell_silent(autojump_clock: MockClock) -> None:
    here, there = weather_pair(3, latency=0.01)
    async with rough_sessions((here, there)) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(serve, pair.other, nursery)
        async with pair.one.open() as channel:
            for _ in range(10):
                await channel.send(b"x")
                await channel.receive()
            here.vanish()
            with pytest.raises(LinkLost, match="no data from the peer"):
                await channel.receive()
        nursery.cancel_scope.cancel()


def test_a_guest_who_survives_an_interrupt_leaves_the_session_whole() -> None:
    @trio.lowlevel.enable_ki_protection
    async def interrupt_when_all_wait() -> None:
        """The main task is the receiver that reads for the session, because only the main task is interrupted."""
        await trio.testing.wait_all_tasks_blocked()
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        with trio.fail_after(PATIENCE):
            async with sessions() as pair, trio.open_nursery() as nursery:
                nursery.start_soon(serve, pair.other, nursery)
                async with pair.one.open() as channel:
                    for _ in range(10):
                        await channel.send(b"x")
                        await channel.receive()
                    nursery.start_soon(interrupt_when_all_wait)
                    with pytest.raises(KeyboardInterrupt):
                        await channel.receive()
                    await channel.send(b"y")
                    assert await channel.receive() == b"y"
                nursery.cancel_scope.cancel()

    trio.run(main)
