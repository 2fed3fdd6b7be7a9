"""Any call may be cancelled at any of its steps: what was cancelled did not happen, and the link goes on."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LinkLost
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, Link
from muxkit.runtime import background
from muxkit.testing import cancel_sweep
from tests.protocols.relink._session_world import QUIET, TRANSACTIONS, Both, at_rest, both, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    Operation = Callable[[], Awaitable[object]]

TINY = Config(keepalive=None, window=1)


async def canary(pair: Both) -> None:
    """Check that the link still carries messages in both directions."""
    for here, there in ((pair.one, pair.other), (pair.other, pair.one)):
        async with here.sender(99) as sender, there.receiver(99) as receiver:
            await sender.send(b"tweet")
            if sender.has_transactions:
                sender.commit()
            with await receiver.receive() as message:
                assert message.data == b"tweet"
        await sender.finish()


@pytest.mark.requirement("R-31", "R-32")
@pytest.mark.parametrize("room", [True, False])
async def test_a_cancelled_send_sent_nothing(room: bool, autojump_clock: MockClock) -> None:
    done: list[object] = []

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        done.clear()
        async with both(TINY) as pair, pair.one.sender(1) as sender, background() as nursery:
            if not room:
                await sender.send(b"first")
            received: list[bytes] = []

            async def receive() -> None:
                async with pair.other.receiver(1) as receiver:
                    async for message in receiver:
                        await trio.sleep(1)
                        received.append(message.data)

            async def send() -> None:
                done.append(await sender.send(b"x"))

            nursery.start_soon(receive)
            yield send
            await sender.finish()
            assert received == [b"first"] * (not room) + [b"x"] * len(done)
            await canary(pair)

    assert await cancel_sweep(scenario) >= 1


@pytest.mark.requirement("R-31", "R-33")
async def test_a_cancelled_receive_loses_nothing(autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        got.clear()
        async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:

            async def receive() -> None:
                with await receiver.receive() as message:
                    got.append(message.data)

            async def send_later() -> None:
                await trio.sleep(1)
                await sender.send(b"x")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_later)
                yield receive
            if not got:
                await receive()
            assert got == [b"x"]
            await canary(pair)

    assert await cancel_sweep(scenario) >= 2


@pytest.mark.requirement("R-31", "R-32")
async def test_a_cancelled_multicast_reached_nobody(autojump_clock: MockClock) -> None:
    done: list[object] = []

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        done.clear()
        async with both(TINY) as pair:
            senders = [pair.one.sender(1), pair.one.sender(2)]
            await senders[0].send(b"full")

            async def multicast() -> None:
                done.extend(await pair.one.multicast(senders, b"x"))

            got: list[bytes] = []

            async def receive(number: int) -> None:
                async with pair.other.receiver(number) as receiver:
                    got.extend([message.data async for message in receiver])

            async with background() as nursery:
                nursery.start_soon(receive, 1)
                nursery.start_soon(receive, 2)
                yield multicast
                for sender in senders:
                    await sender.finish()
            assert got.count(b"x") == len(done)
            assert len(done) in (0, 2)
            await canary(pair)

    assert await cancel_sweep(scenario) >= 2


WAITS: dict[str, Callable[[Both, relink.Sender, relink.Receipt], Awaitable[object]]] = {
    "received": lambda pair, sender, receipt: receipt.received(),
    "consumed": lambda pair, sender, receipt: receipt.consumed(),
    "committed": lambda pair, sender, receipt: receipt.committed(),
    "ping": lambda pair, sender, receipt: pair.one.ping(),
    "connected": lambda pair, sender, receipt: pair.one.connected(),
    "finish": lambda pair, sender, receipt: sender.finish(),
    "aclose": lambda pair, sender, receipt: sender.aclose(),
}


@pytest.mark.requirement("R-31", "R-34")
@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("cut", [False, True])
async def test_a_wait_may_be_cancelled_at_any_step(name: str, cut: bool, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with both(TRANSACTIONS) as pair, background() as nursery:
            sender = pair.one.sender(1)
            receipt = await sender.send(b"x")
            sender.commit()

            async def receive() -> None:
                await trio.sleep(1)
                async with pair.other.receiver(1) as receiver:
                    async for message in receiver:
                        assert message.data == b"x"

            nursery.start_soon(receive)
            if cut:
                await pair.world.cut()
            yield partial(WAITS[name], pair, sender, receipt)
            await sender.finish()
            await receipt.committed()
            await canary(pair)

    assert await cancel_sweep(scenario) >= 1


@pytest.mark.requirement("R-31")
async def test_opening_and_using_a_channel_may_be_cancelled_at_any_step(autojump_clock: MockClock) -> None:
    async def echo(link: Link) -> None:
        async def one(channel: trio.abc.Channel[bytes]) -> None:
            with suppress(trio.BrokenResourceError):
                async for message in channel:
                    await channel.send(message)
            await channel.aclose()

        async with trio.open_nursery() as nursery:
            async for channel in link.incoming():
                nursery.start_soon(one, channel)

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with world(endpoints={"": Endpoint(echo, QUIET)}) as made, made.link() as one:

            async def talk() -> None:
                async with one.open() as channel:
                    await channel.send(b"x")
                    assert await channel.receive() == b"x"
                    await channel.finish()

            yield talk
            await talk()
            await at_rest()
            assert one.stats().channels == 0

    assert await cancel_sweep(scenario) >= 3


@pytest.mark.requirement("R-31", "R-35", "R-38")
async def test_a_whole_link_may_be_cancelled_at_any_step(autojump_clock: MockClock) -> None:
    async def handle(link: Link) -> None:
        async for receiver in link.receivers():
            async for message in receiver:
                assert message.data == b"x"

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with world(endpoints={"": Endpoint(handle, QUIET)}, keep=relink.Keep(age=1), linger=1) as made:

            async def use() -> None:
                async with made.link(linger=1) as one, one.sender(1) as sender:
                    await sender.send(b"x")
                    await one.shutdown(grace=1)

            yield use
            await use()
            await trio.sleep(10)
            assert made.listener.links == 0

    assert await cancel_sweep(scenario) >= 5


@pytest.mark.requirement("R-31")
async def test_a_session_on_one_stream_may_be_cancelled_at_any_step(autojump_clock: MockClock) -> None:
    from muxkit_adapters import memory

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        here, there = memory.pair()

        async def listen() -> None:
            with suppress(LinkLost):
                async with relink.session(there, role="listener", config=QUIET, limits=Limits(handshake=2), linger=1):
                    pass

        async def use() -> None:
            async with relink.session(here, role="connector", config=QUIET, linger=1) as link:
                await link.ping()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            yield use
            with pytest.raises(trio.ClosedResourceError):
                await here.receive_some()
        with pytest.raises(trio.ClosedResourceError):
            await there.receive_some()

    assert await cancel_sweep(scenario) >= 3
