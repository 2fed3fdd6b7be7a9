"""e3x fulfils the contract of muxkit sessions on every kind of link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import LinkLost, LocalProtocolError, PluginError
from muxkit.protocols import e3x
from muxkit.runtime import DatagramPump, background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import PacketWeather, SessionPair, check_session
from muxkit_adapters import memory
from tests.adapters._packets import LINUX, Authority, lose, socket_of
from tests.protocols.e3x._sessions import (
    BENT,
    CALM,
    ROUGH,
    at_rest,
    channels,
    next_channel,
    on_packets,
    on_streams,
    over_url,
    sessions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit.testing import PacketChannel

    MakePair = Callable[[], AbstractAsyncContextManager[SessionPair]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.requirement("R-07", "R-33", "R-36", "R-39", "R-41", "R-42")
@pytest.mark.parametrize(
    "make_pair",
    [on_streams, on_packets, lambda: on_packets(ROUGH, 1)],
    ids=["byte stream", "packets", "packets that are lost, doubled and late"],
)
async def test_a_session_keeps_the_promises_of_all_sessions(make_pair: MakePair, autojump_clock: MockClock) -> None:
    await check_session(make_pair)


@pytest.mark.requirement("R-39", "R-41", "R-42")
@pytest.mark.parametrize("transport", ["tcp", "ws", "udp", "dtls"])
async def test_it_does_so_over_real_sockets(transport: str, authority: Authority) -> None:
    url = f"e3x+{transport}://127.0.0.1:0"
    if transport == "dtls":
        secrets = {"on_server": {"ssl_context": authority.server()}, "on_client": {"ssl_context": authority.client()}}
        await check_session(lambda: over_url(url, linger=1.0, **secrets), largest=100_000)
    else:
        await check_session(lambda: over_url(url, linger=1.0), largest=100_000)


@pytest.mark.clause("e3x-R02", "e3x-S08")
@pytest.mark.requirement("R-48", "R-50")
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.2], ids=lambda loss: f"{loss:.0%}")
@pytest.mark.seeds(3, soak=200)
async def test_everything_arrives_once_and_in_order_whatever_the_weather(
    seed: int, loss: float, autojump_clock: MockClock
) -> None:
    weather = PacketWeather(delay=0.02, jitter=0.01, loss=loss, duplication=0.1, reordering=0.1)
    config = e3x.Config(timeout=60.0)  # at 20 % of loss ten seconds without an answer can occur by chance
    messages = [b"%d " % number * (number * 7 % 1000) for number in range(100)]

    async def echo(session: muxkit.Session) -> None:
        async for channel in session:
            async for message in channel:
                await channel.send(message)
            await channel.finish()

    async def talk(session: muxkit.Session) -> None:
        async with session.open() as channel, trio.open_nursery() as nursery:

            async def send() -> None:
                for message in messages:
                    await channel.send(message)
                await channel.finish()

            nursery.start_soon(send)
            assert [message async for message in channel] == messages

    async with on_packets(weather, seed, config=config, linger=60.0) as pair, background() as nursery:
        for session in (pair.one, pair.other):
            nursery.start_soon(echo, session)
        async with trio.open_nursery() as work:
            for session in (pair.one, pair.other):
                work.start_soon(talk, session)
        # Acknowledgements are lost as well, and who leaves first waits a second for them.
        while any(session.stats().channels for session in (pair.one, pair.other)):  # noqa: ASYNC110 - nothing tells it
            await trio.sleep(0.1)


@LINUX
@pytest.mark.requirement("R-48")
@pytest.mark.parametrize("share", [0.01, 0.1], ids=lambda share: f"{share:.0%}")
async def test_what_a_real_kernel_loses_is_repaired(share: float) -> None:
    messages = [b"%4d" % number * 250 for number in range(1000)]
    async with over_url("e3x+udp://127.0.0.1:0", linger=20.0) as pair:
        for session in (pair.one, pair.other):
            assert isinstance(session, e3x.Session)
            pump = connection_of(session).pump
            assert isinstance(pump, DatagramPump)
            lose(socket_of(pump._link), share)
        async with channels(pair) as (here, there), trio.open_nursery() as nursery:

            async def send() -> None:
                await here.send_many(messages)
                await here.finish()

            nursery.start_soon(send)
            assert [message async for message in there] == messages
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.stats().resent > 0 or share < 0.1


@pytest.mark.requirement("R-40")
async def test_a_path_that_becomes_narrower_is_followed(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    narrow = Narrow(here)
    async with sessions(narrow, there) as pair:
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.packet_limit == 1400
        narrow.packet_limit = 800
        async with channels(pair, reliable=False) as (samples, _):
            await samples.send(bytes(1000))  # it was split for the wider path
        assert pair.one.packet_limit == 800
        assert pair.one.stats().too_large == 1
        async with channels(pair) as (one, other):
            await one.send(bytes(10_000))
            assert await other.receive() == bytes(10_000)


class Narrow(trio.abc.Channel[bytes]):
    """A link that tells its packet limit."""

    def __init__(self, link: PacketChannel) -> None:
        self._link = link
        self.packet_limit = 1400

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        if any(len(packet) > self.packet_limit for packet in packets):
            raise ValueError("too large")
        for packet in packets:
            self._link._outgoing.put(packet)
        return len(packets)

    def receive_nowait(self, limit: int) -> list[bytes]:
        return []

    async def send(self, value: bytes) -> None:
        await self._link.send(value)

    async def receive(self) -> bytes:
        return await self._link.receive()

    async def aclose(self) -> None:
        await self._link.aclose()


async def test_the_roles_have_different_ids(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        async with channels(pair) as (here, there), pair.other.open() as back:
            assert isinstance(back, e3x.Channel)
            assert here.id == there.id == 1
            assert back.id == 2


async def test_a_role_that_does_not_exist_is_refused() -> None:
    here, _ = CALM.pair(1)
    with pytest.raises(ValueError, match="connector"):
        async with e3x.session(here, role="client"):  # type: ignore[arg-type]
            pass


async def test_a_link_whose_packets_are_too_small_is_refused() -> None:
    async with over_url("e3x+udp://127.0.0.1:0") as pair:
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.packet_limit == 1232
    with pytest.raises(LocalProtocolError, match="invalid packet size 200"):
        async with muxkit.connect("e3x+udp://127.0.0.1:9", largest=200):
            pass


async def test_the_packet_size_is_what_was_configured_or_what_the_link_takes() -> None:
    async with over_url("e3x+udp://127.0.0.1:0", config=e3x.Config(packet=500)) as pair:
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.packet_limit == 500
    async with over_url("e3x+udp://127.0.0.1:0", config=e3x.Config(packet=9000), largest=4000) as pair:
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.packet_limit == 4000
        async with channels(pair) as (here, there):
            await here.send(bytes(100_000))
            assert await there.receive() == bytes(100_000)


async def test_a_protocol_that_needs_a_stream_is_not_run_on_packets() -> None:
    with pytest.raises(PluginError, match="packets that may be lost"):
        async with muxkit.connect("bpmux+udp://127.0.0.1:9"):
            pass


async def test_a_session_tells_its_figures(autojump_clock: MockClock) -> None:
    async with on_packets(BENT, linger=20.0) as pair:
        assert isinstance(pair.one, e3x.Session)
        async with channels(pair) as (here, there):
            for number in range(200):
                await here.send(b"%4d" % number * 200)
                assert await there.receive() == b"%4d" % number * 200
            stats = pair.one.stats()
            assert stats.messages_sent == 200
            assert stats.round_trip is not None
            assert 0.03 < stats.round_trip < 0.2
            assert stats.least_round_trip is not None
            assert stats.rate > 0
            assert stats.resent > 0
            assert stats.packets_sent > 200
            assert pair.other.stats().messages_received == 200
        assert pair.one.info.protocol == "e3x"
        assert "e3x session" in repr(pair.one)


async def test_a_ping_is_answered_by_the_other_session_and_nobody_hears_of_it(autojump_clock: MockClock) -> None:
    async with on_packets(PacketWeather(delay=0.1)) as pair:
        assert await pair.one.ping() == pytest.approx(0.2, abs=0.01)
        await trio.sleep(1)
        assert pair.one.stats().channels == pair.other.stats().channels == 0
        assert isinstance(pair.one, e3x.Session)
        assert connection_of(pair.one).engine.channels == 0
        async with channels(pair) as (_, there):
            assert there.type == "muxkit"


@pytest.mark.requirement("R-39")
async def test_a_ping_without_an_answer_ends_with_an_error(autojump_clock: MockClock) -> None:
    here, _ = PacketWeather(loss=1.0).pair(1)
    with pytest.raises(LinkLost, match="no data from the peer for 10 s"):
        async with e3x.session(here, role="connector") as session:
            await session.ping()


async def test_types_that_sessions_keep_for_themselves_cannot_be_opened(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        assert isinstance(pair.one, e3x.Session)
        for type in ("muxkit.ping", "muxkit.bye"):
            with pytest.raises(LocalProtocolError, match="the session itself uses it"):
                async with pair.one.open(type):
                    pass


@pytest.mark.requirement("R-08")
async def test_opening_waits_while_all_channels_are_in_use(autojump_clock: MockClock) -> None:
    limits = muxkit.Limits(channels=2)
    async with on_packets(limits=limits) as pair, background() as nursery:
        first = pair.one.open()
        one = await first.__aenter__()
        async with pair.one.open():
            opened = trio.Event()

            async def open_one_more() -> None:
                async with pair.one.open():
                    opened.set()
                    await trio.sleep_forever()

            nursery.start_soon(open_one_more)
            await trio.sleep(1)
            assert not opened.is_set()
            one.abort()
            await trio.sleep(1)
            assert opened.is_set()


async def test_a_block_is_entered_once(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        block = pair.one.open()
        async with block:
            pass
        with pytest.raises(RuntimeError, match="open another"):
            async with block:
                pass


async def test_two_sessions_over_a_stream_need_no_clock_of_their_own(autojump_clock: MockClock) -> None:
    """Over a byte stream there is no limit on the rate, and nothing is sent twice."""
    here, there = memory.pair()
    async with sessions(here, there) as pair:
        async with channels(pair) as (one, other):
            for number in range(300):
                await one.send(bytes(1000))
                assert await other.receive() == bytes(1000), number
            await at_rest()
            assert isinstance(pair.one, e3x.Session)
            stats = pair.one.stats()
            assert (stats.resent, stats.lost, stats.faults) == (0, 0, {})
            assert trio.current_time() < 1


async def test_the_payload_of_an_opening_is_no_message_and_is_processed_once_the_channel_is_taken(
    autojump_clock: MockClock,
) -> None:
    async with on_packets() as pair:
        assert isinstance(pair.one, e3x.Session)
        assert isinstance(pair.other, e3x.Session)
        async with pair.one.open("greeting", payload=b"hello" * 1000) as here:
            await trio.sleep(2)
            assert here.sending.is_unheard
            there = await next_channel(pair.other)
            assert (there.type, there.is_reliable) == ("greeting", True)
            await here.delivered()
            await here.send(b"first")
            assert await there.receive() == b"first"
            for channel in (here, there):
                assert (channel.name, channel.opening) == ("greeting", b"hello" * 1000)
            assert (here.session, there.session) == (pair.one, pair.other)
            assert ([*pair.one.channels()], [*pair.other.channels()]) == ([here], [there])
