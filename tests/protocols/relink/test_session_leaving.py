"""What leaving a link waits for, when it raises, and what shutting it down lets through."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, LinkLost, LocalProtocolError
from muxkit.protocols.relink import Channel, Config, Link, LinkChanged
from muxkit.protocols.relink._connection import CLOSED_A_TURN
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender
from muxkit.runtime import turns
from tests.protocols.relink._session_world import Packets, at_rest, both, world

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.protocols.relink._session_world import Both, World


@pytest.mark.clause("relink-S01", "relink-S02", "relink-S03")
@pytest.mark.requirement("R-42")
async def test_leaving_waits_until_the_peer_has_consumed_everything(autojump_clock: MockClock) -> None:
    seen: list[bytes] = []

    async def handle(link: Link) -> None:
        async for receiver in link.receivers():
            async for message in receiver:
                await trio.sleep(0.01)
                seen.append(message.data)

    async with world(handler=handle) as made:
        async with made.link() as one:
            for number in range(100):
                async with one.sender(number % 3 + number // 3) as sender:
                    await sender.send(b"%d" % number)
        assert sorted(map(int, seen)) == [*range(100)]
        await at_rest()
        assert made.listener.links == 0


async def test_leaving_goes_on_over_another_connection(autojump_clock: MockClock) -> None:
    seen: list[bytes] = []

    async def handle(link: Link) -> None:
        async for receiver in link.receivers():
            async for message in receiver:
                await trio.sleep(0.1)
                seen.append(message.data)

    async with world(handler=handle) as made:

        async def cut_now_and_then() -> None:
            for _ in range(5):
                await trio.sleep(0.3)
                await made.cut()

        made.nursery.start_soon(cut_now_and_then)
        async with made.link(linger=60) as one, one.sender(1) as sender:
            for number in range(20):
                await sender.send(b"%d" % number)
        assert [*map(int, seen)] == [*range(20)]
        assert one.connections > 3


@pytest.mark.requirement("R-38")
async def test_leaving_ends_in_time_whatever_the_peer_does(autojump_clock: MockClock) -> None:
    async def send(made: World) -> None:
        async with made.link(linger=3) as one, one.sender(1) as sender:
            await sender.send(b"nobody reads this")
            await made.other()

    async with world() as made:
        began = trio.current_time()
        with pytest.raises(LinkLost, match="didn't close the session within 3 s"):
            await send(made)
        assert trio.current_time() - began < 3.5
        async with made.link(linger=3):  # nothing was said, so nothing can be lost
            await made.other(1)


async def test_leaving_by_an_error_is_quick_and_bare(autojump_clock: MockClock) -> None:
    async def fail(made: World) -> None:
        async with made.link() as one:
            await one.sender(1).send(b"x")
            raise KeyError

    async with world() as made:
        began = trio.current_time()
        with pytest.raises(KeyError):
            await fail(made)
        assert trio.current_time() - began < 0.1


@pytest.mark.requirement("R-42")
async def test_shutdown_lets_open_senders_finish_and_opens_no_more(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender:
        await sender.send(b"before")
        async with trio.open_nursery() as nursery:

            async def shut_down() -> None:
                await pair.one.shutdown(grace=60)

            nursery.start_soon(shut_down)
            await at_rest()
            await sender.send(b"after")
            with pytest.raises(LocalProtocolError, match="after the shutdown"):
                await pair.one.sender(2).send(b"x")
            sender.close()
            async with pair.other.receiver(1) as receiver:
                assert [message.data async for message in receiver] == [b"before", b"after"]
        assert trio.current_time() < 1


@pytest.mark.requirement("R-36")
async def test_a_handler_that_fails_ends_its_own_link_only(autojump_clock: MockClock) -> None:
    async def handle(link: Link) -> None:
        async for receiver in link.receivers():
            async for message in receiver:
                if message.data == b"fail":
                    raise ValueError("secret")

    async with world(handler=handle) as made:
        async with made.link() as fine, fine.sender(1) as sender:
            async with made.link(config=Config(keepalive=None, require_link=True)) as bad:
                receipt = await bad.sender(1).send(b"fail")
                with pytest.raises(LinkChanged):
                    await receipt.consumed()
            await sender.send(b"ok")
            await sender.finish()


@pytest.mark.clause("relink-S01", "relink-S03")
@pytest.mark.requirement("R-42")
async def test_leaving_says_so_with_the_ends_and_waits_until_everything_is_acknowledged(
    autojump_clock: MockClock,
) -> None:
    packets = Packets()

    async def handle(link: Link) -> None:
        async for receiver in link.receivers():
            async for _ in receiver:
                await trio.sleep(1)

    async with world(handler=handle) as made:
        async with made.link(observer=packets) as one, one.sender(1) as sender:
            for _ in range(3):
                await sender.send(b"x")
    acks = [number for number, seen in enumerate(packets.seen) if seen[:2] == ("in", "out 1")]
    assert packets.seen[acks[-1]][2] == "closed"
    assert packets.seen.index(("out", "link", "shutdown")) < acks[0]  # waiting for them would cost a round trip
    assert trio.current_time() >= 3


async def test_channels_that_are_over_are_freed_without_a_garbage_collection(autojump_clock: MockClock) -> None:
    async def live_and_end(pair: Both) -> None:
        async with pair.one.open() as channel:
            await channel.send(b"x")
            async for other in pair.other.incoming():
                assert await other.receive() == b"x"
                await other.aclose()
                break
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()

    async with both() as pair:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await live_and_end(pair)
            await trio.sleep(1)
            kinds = (Channel, ChannelReceiver, ChannelSender)
            assert [one for one in gc.get_objects() if isinstance(one, kinds)] == []
        finally:
            gc.enable()


async def test_many_channels_are_cut_in_turns_of_processor_time(autojump_clock: MockClock) -> None:
    async with both() as pair, trio.open_nursery() as nursery:
        for _ in range(200):
            manager = pair.one.open()
            channel = await manager.__aenter__()
            await channel.send(b"x")
        before = turns().given
        nursery.start_soon(partial(pair.one.shutdown, grace=0))
        await trio.sleep(1)
        assert turns().given >= before + 200 // CLOSED_A_TURN
        async for other in pair.other.incoming():
            assert await other.receive() == b"x"
            with pytest.raises(ChannelCancelled):
                await other.receive()
            await other.aclose()
