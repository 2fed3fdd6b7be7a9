"""Illegal and forged packets on a session are dropped and counted, and cost bounded memory."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import Limits
from muxkit.protocols import e3x
from muxkit.protocols.e3x import Packet, encode_chunks, encode_packet, parse_packet
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import PacketWeather
from muxkit_adapters import memory
from tests.protocols.e3x._helpers import raw
from tests.protocols.e3x._sessions import at_rest, next_channel, over_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit.testing import PacketChannel

STILL = PacketWeather(queue=100_000)


@asynccontextmanager
async def attacked(
    *, config: e3x.Config | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[PacketChannel, e3x.Session]]:
    """Run a listening session; yield it with a raw link to it."""
    here, there = STILL.pair(1)
    async with e3x.session(there, role="listener", config=config, limits=limits, linger=1.0) as session:
        yield here, session


async def answers(link: PacketChannel) -> list[Packet]:
    """Return the packets that the session has sent."""
    got: list[Packet] = []
    with trio.move_on_after(0.05):
        while True:
            got.append(parse_packet(await link.receive()))
    return got


BAD = {
    "nothing": b"",
    "one byte": b"\x00",
    "a head that is longer than the packet": b"\xff\xff{}",
    "a binary head": b"\x00\x03abcbody",
    "no JSON": raw()[:2] + b"{{",
    "no object": b"\x00\x09[1,2,3,4]",
    "no channel": raw(seq=1, type="x"),
    "channel 0": raw(c=0, seq=1, type="x"),
    "channel true": raw(c=True, seq=1, type="x"),
    "a channel that is too large": raw(c=2**32 + 1, seq=1, type="x"),
    "seq 0": raw(c=1, seq=0, type="x"),
    "a negative seq": raw(c=1, seq=-1, type="x"),
    "a seq with a fraction": raw(c=1, seq=1.5, type="x"),
    "a type that is a number": raw(c=1, seq=1, type=5),
    "an end that is no bool": raw(c=1, seq=1, type="x", end="yes"),
    "a huge number": b'\x00\x70{"c":' + b"9" * 106 + b"}",
    "deep nesting": (lambda head: len(head).to_bytes(2, "big") + head)(
        b'{"c":1,"seq":1,"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    ),
    "a NaN": b'\x00\x13{"c":1,"seq":NaN   }',
    "a channel of ours that does not exist": raw(c=2, seq=5),
    "an ack for nothing": raw(c=1, seq=1, type="x", ack=7),
    "an err for nothing": raw(c=1, err="go away"),
    "no UTF-8": b"\x00\x09\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff",
}


@pytest.mark.clause("e3x-S02", "e3x-A13", "e3x-M03")
@pytest.mark.requirement("R-40")
@pytest.mark.parametrize("packet", BAD.values(), ids=BAD.keys())
async def test_a_bad_packet_is_dropped_and_counted_and_the_session_goes_on(
    packet: bytes, autojump_clock: MockClock
) -> None:
    async with attacked() as (link, session):
        await link.send(packet)
        assert not [answer for answer in await answers(link) if answer.err is None]
        assert sum(session.stats().faults.values()) == 1
        await link.send(raw(b"hello", c=3, seq=1, type="x"))
        channel = await next_channel(session)
        assert channel.opening == b"hello"
        channel.done()
        await trio.sleep(1)  # it did not ask for an ack at once
        assert [(packet.channel, packet.ack) for packet in await answers(link)] == [(3, 1)]


@pytest.mark.requirement("R-40")
@pytest.mark.seeds(20, soak=5000)
async def test_noise_and_bent_packets_neither_end_a_session_nor_reach_its_channels(
    seed: int, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)
    async with attacked(config=e3x.Config(timeout=1000.0)) as (link, session):
        await link.send(raw(c=1, seq=1, type="victim"))
        channel = await next_channel(session)
        seq = 2
        for _ in range(200):
            throw = dice.random()
            good = encode_packet(Packet(1, seq=seq, body=b"%d" % seq))
            if throw < 0.3:
                await link.send(dice.randbytes(dice.randrange(60)))
            elif throw < 0.7:
                place = dice.randrange(len(good) - len(b"%d" % seq))  # in the head
                bent = good[:place] + bytes([good[place] ^ (1 << dice.randrange(8))]) + good[place + 1 :]
                if _is_harmless(bent):
                    await link.send(bent)
            else:
                await link.send(good)
                assert await channel.receive() == b"%d" % seq
                seq += 1
        await at_rest()
        assert not connection_of(session).pump.is_lost


def _is_harmless(packet: bytes) -> bool:
    """Whether it is another legal packet of the channel, which has the effect of that packet."""
    try:
        parsed = parse_packet(packet)
    except muxkit.RemoteProtocolError:
        return True
    return parsed.channel != 1 or (parsed.seq is None and parsed.err is None)


@pytest.mark.requirement("R-01", "R-03")
async def test_a_flood_of_openings_is_bounded_and_those_that_came_first_work(autojump_clock: MockClock) -> None:
    limits = Limits(channels=50, backlog=20)
    async with attacked(limits=limits) as (link, session):
        for number in range(5000):
            await link.send(raw(b"x", c=2 * number + 1, seq=1, type="flood"))
        await answers(link)
        assert session.stats().channels == 20
        assert connection_of(session).engine.channels == 20
        taken = [await next_channel(session) for _ in range(20)]
        assert [channel.id for channel in taken] == list(range(1, 41, 2))
        await link.send(raw(b"late", c=10_001, seq=1, type="flood"))
        assert (await next_channel(session)).id == 10_001


@pytest.mark.requirement("R-01", "R-03")
async def test_channels_that_are_opened_and_broken_off_do_not_pile_up(autojump_clock: MockClock) -> None:
    async with attacked(limits=Limits(backlog=20)) as (link, session):
        for number in range(1000):
            await link.send(raw(b"x", c=2 * number + 1, seq=1, type="flood"))
            await link.send(raw(c=2 * number + 1, err="never mind"))
        await answers(link)
        assert session.stats().channels == 0
        assert len(connection_of(session).incoming) <= 20


@pytest.mark.requirement("R-01", "R-04")
async def test_a_channel_that_nobody_reads_holds_no_more_than_its_limit(autojump_clock: MockClock) -> None:
    limits = Limits(channel_bytes=100_000)
    async with attacked(limits=limits) as (link, session):
        await link.send(raw(c=1, seq=1, type="x"))
        await next_channel(session)
        for seq in range(2, 1000):
            await link.send(raw(bytes(1000), c=1, seq=seq))
        await at_rest()
        assert connection_of(session).engine.stats().held <= 100_000
        assert session.stats().faults["full"] > 800


@pytest.mark.requirement("R-01")
async def test_a_miss_of_very_many_entries_is_taken_without_much_ado(autojump_clock: MockClock) -> None:
    async with attacked() as (link, session), session.open() as channel:
        for _ in range(50):
            await channel.send(b"x")
        await answers(link)
        await link.send(raw(c=2, ack=1, miss=[1] * 20_000))
        resent = await answers(link)
        assert {packet.seq for packet in resent} <= set(range(2, 52))
        channel.abort()


@pytest.mark.requirement("R-01")
async def test_a_window_that_a_peer_inflates_is_not_believed(autojump_clock: MockClock) -> None:
    config = e3x.Config(congestion=False, most_window=200)
    async with attacked(config=config, limits=Limits(channel_first=10_000_000)) as (link, session):
        async with session.open() as channel:
            await answers(link)
            await link.send(raw(c=2, ack=1, miss=[2**32 - 1]))
            await at_rest()
            for _ in range(1000):
                await channel.send(b"x")
            assert len(await answers(link)) <= 200
            channel.abort()


@pytest.mark.requirement("R-01", "R-28")
async def test_a_flood_of_pings_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    async with attacked() as (link, session):
        for number in range(500):
            await link.send(raw(c=2 * number + 1, seq=1, type="muxkit.ping", end=True))
            if number % 10 == 9:
                for packet in await answers(link):
                    if packet.seq is not None:
                        assert (packet.seq, packet.end, packet.ack) == (1, True, 1)
                        await link.send(raw(c=packet.channel, ack=1))
        await answers(link)
        assert connection_of(session).engine.channels == 0
        assert session.stats().channels == 0


async def test_a_reserved_type_without_seq_is_nobodys(autojump_clock: MockClock) -> None:
    async with attacked() as (link, session):
        await link.send(raw(c=1, type="muxkit.bye", end=True))
        assert [packet.err for packet in await answers(link)] == ["reliable only"]
        assert not connection_of(session).pump.is_lost


@pytest.mark.requirement("R-01")
@pytest.mark.parametrize("cut", [1, 7, 100_000], ids=lambda cut: f"in reads of {cut}")
async def test_a_stream_of_tiny_chunks_is_taken_in_turns(cut: int, autojump_clock: MockClock) -> None:
    here, there = memory.pair(capacity=1_000_000)
    async with e3x.session(there, role="listener", linger=1.0) as session:
        packet = raw(b"hello" * 20, c=1, seq=1, type="x")
        data = bytes(1000) + b"".join(encode_chunks(bytes([0, 3]) + bytes(5), 2) for _ in range(200))
        data += encode_chunks(packet, 2)
        for start in range(0, len(data), cut):
            await here.send_all(data[start : start + cut])
        channel = await next_channel(session)
        assert channel.opening == b"hello" * 20
        assert session.stats().faults == {"malformed": 200}


async def test_a_server_survives_garbage_from_strangers_and_serves_others() -> None:
    async with over_url("e3x+udp://127.0.0.1:0") as pair:
        assert isinstance(pair.one, e3x.Session)
        address = pair.one.info.peer.rpartition(":")[2]
        stranger = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        await stranger.bind(("127.0.0.1", 0))
        dice = random.Random(1)
        for _ in range(200):
            await stranger.sendto(dice.randbytes(dice.randrange(100)), ("127.0.0.1", int(address)))
        stranger.close()
        for _ in range(3):
            assert await pair.one.ping() > 0


@pytest.mark.requirement("R-66")
async def test_no_payload_is_in_what_is_logged(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with attacked() as (link, session), background():
        await link.send(raw(b"a secret", c=1, seq=1, type=["a secret"]))
        await at_rest()
        assert session.stats().faults == {"malformed": 1}
    assert "dropped a packet: malformed" in caplog.text
    assert "secret" not in caplog.text
