"""Unreliable channels: messages that arrive are complete, and the newest are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LocalProtocolError, Unsupported
from muxkit.protocols import e3x
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import PacketWeather
from tests.protocols.e3x._sessions import Cable, next_channel, on_packets

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_samples_arrive_unless_they_are_lost(autojump_clock: MockClock) -> None:
    async with on_packets(PacketWeather(delay=0.01, loss=0.2)) as pair:
        assert isinstance(pair.one, e3x.Session)
        async with pair.one.open("samples", reliable=False) as here:
            for number in range(1000):
                await here.send(b"%d" % number)
                await trio.sleep(0.001)
            there = await next_channel(pair.other)  # type: ignore[arg-type]
            assert (there.type, there.is_reliable) == ("samples", False)
            await trio.sleep(1)
            got = [int(message) for message in await there.receive_many()]
    assert got == sorted(got)
    assert 750 < len(got) < 850


async def test_a_sample_must_fit_into_a_packet(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        assert isinstance(pair.one, e3x.Session)
        async with pair.one.open("samples", reliable=False) as here:
            quota = here.quota
            await here.send(bytes(quota))
            with pytest.raises(LocalProtocolError, match=f"has room for {quota}"):
                await here.send(bytes(quota + 1))


async def test_receipts_belong_to_reliable_channels(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        assert isinstance(pair.one, e3x.Session)
        async with pair.one.open("samples", reliable=False) as here:
            with pytest.raises(Unsupported):
                await here.post(b"1")
            with pytest.raises(Unsupported):
                await here.delivered()
            await here.send(b"1")
            here.done()


@pytest.mark.requirement("R-07", "R-08")
async def test_samples_that_nobody_takes_make_way_for_newer_ones(autojump_clock: MockClock) -> None:
    limits = Limits(channel_first=10_000)
    async with on_packets(limits=limits) as pair:
        assert isinstance(pair.one, e3x.Session)
        assert isinstance(pair.other, e3x.Session)
        async with pair.one.open("samples", reliable=False) as here:
            there = await next_channel(pair.other)
            for number in range(1000):
                await here.send(b"%1000d" % number)
                await trio.sleep(0.02)
            got = [int(message) for message in await there.receive_many()]
            assert got == list(range(991, 1000))
            assert there.dropped == pair.other.stats().dropped == 991
            assert connection_of(pair.other).engine.state.unread == 0


@pytest.mark.requirement("R-01", "R-07")
async def test_all_unread_samples_together_are_bounded_too(autojump_clock: MockClock) -> None:
    limits = Limits(connection_bytes=20_000)
    async with on_packets(limits=limits) as pair:
        assert isinstance(pair.one, e3x.Session)
        assert isinstance(pair.other, e3x.Session)
        async with trio.open_nursery() as nursery:

            async def feed() -> None:
                async with pair.one.open("samples", reliable=False) as here:  # type: ignore[call-overload]
                    for _ in range(30):
                        await here.send(bytes(1000))
                        await trio.sleep(0.05)
                    await trio.sleep(5)

            for _ in range(10):
                nursery.start_soon(feed)
            kept = [await next_channel(pair.other) for _ in range(10)]
            await trio.sleep(3)
            assert 0 < connection_of(pair.other).engine.state.unread <= 20_000
            assert sum(channel.dropped for channel in kept) > 200


async def test_an_unreliable_channel_ends_on_both_sides(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        assert isinstance(pair.one, e3x.Session)
        assert isinstance(pair.other, e3x.Session)
        async with pair.one.open("samples", reliable=False) as here:
            await here.send(b"1")
            await here.finish()
            there = await next_channel(pair.other)
            assert [message async for message in there] == [b"1"]
            await there.aclose()
        await trio.sleep(1)
        assert pair.one.stats().channels == pair.other.stats().channels == 0


async def test_samples_whose_end_is_lost_end_when_the_peer_leaves(autojump_clock: MockClock) -> None:
    here, there = PacketWeather(delay=0.01).pair(1)
    cable = Cable(here)
    async with e3x.session(there, role="listener") as other:
        async with e3x.session(cable, role="connector") as one:
            async with one.open("samples", reliable=False) as samples:
                await samples.send(b"1")
                channel = await next_channel(other)
                await trio.sleep(1)
                cable.is_cut = True
            await trio.sleep(1)
            cable.is_cut = False
        assert [message async for message in channel] == [b"1"]
    assert trio.current_time() < 5


async def test_types_that_are_known_to_be_unreliable_cannot_be_opened_otherwise(autojump_clock: MockClock) -> None:
    config = e3x.Config(unreliable_types={"samples"})
    async with on_packets(config=config) as pair:
        assert isinstance(pair.one, e3x.Session)
        with pytest.raises(LocalProtocolError, match="unreliable"):
            async with pair.one.open("samples"):
                pass
