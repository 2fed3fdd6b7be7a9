"""Sessions end in order, at once, by silence, and on a network that loses the last packets."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import ChannelStopped, LinkLost
from muxkit.protocols import e3x
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import PacketWeather
from muxkit_adapters import memory, udp
from tests.protocols.e3x._sessions import BENT, CALM, Cable, at_rest, channels, next_channel, on_packets

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.runtime import PacketLink

DEAD = PacketWeather(loss=1.0)


class Heard:
    """A listener that reads everything on every channel, and the end of its session."""

    def __init__(self, link: PacketLink | trio.abc.Stream, *, config: e3x.Config | None = None) -> None:
        self._link = link
        self._config = config
        self.messages: list[bytes] = []
        self.incoming_ended = False
        self.error: Exception | None = None
        self.over = trio.Event()

    async def run(self) -> None:
        try:
            async with e3x.session(self._link, role="listener", config=self._config) as session:
                async with trio.open_nursery() as nursery:
                    async for channel in session:
                        nursery.start_soon(self._read, channel)
                    self.incoming_ended = True
        except* LinkLost as group:
            self.error = group.exceptions[0]
        finally:
            self.over.set()

    async def _read(self, channel: muxkit.Channel) -> None:
        with suppress(trio.BrokenResourceError):
            async for message in channel:
                self.messages.append(message)
            await channel.aclose()


@pytest.mark.requirement("R-42")
@pytest.mark.parametrize("kind", ["packets", "stream"])
async def test_leaving_waits_until_everything_is_processed_and_the_other_side_hears_a_clean_end(
    kind: str, autojump_clock: MockClock
) -> None:
    here, there = CALM.pair(1) if kind == "packets" else memory.pair()
    heard = Heard(there)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heard.run)
        async with e3x.session(here, role="connector") as session:
            async with session.open() as channel:
                await channel.send_many([b"%d" % number for number in range(1000)])
        assert len(heard.messages) == 1000
        await heard.over.wait()
    assert (heard.incoming_ended, heard.error) == (True, None)
    assert trio.current_time() < 2


@pytest.mark.requirement("R-42")
async def test_acks_that_were_lost_come_with_the_goodbye(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    mute = Mute(there)
    async with e3x.session(here, role="connector") as one, one.open() as channel:
        async with e3x.session(mute, role="listener") as other:
            await channel.send(b"1")
            receipt = await channel.post(b"2")
            received = await next_channel(other)
            assert [await received.receive(), await received.receive()] == [b"1", b"2"]
            received.done()
            await trio.sleep(1)
            assert not receipt.is_delivered
        await receipt.delivered()  # and `one` can be left without an error


class Mute(Cable):
    """A link that sends only openings, and receives everything."""

    async def send(self, value: bytes) -> None:
        if b'"type"' in value:
            await super().send(value)
        else:
            await trio.lowlevel.checkpoint()


@pytest.mark.requirement("R-42", "R-48")
@pytest.mark.seeds(10, soak=3000)
async def test_nothing_is_lost_by_leaving_in_bad_weather(seed: int, autojump_clock: MockClock) -> None:
    here, there = PacketWeather(delay=0.02, loss=0.2, duplication=0.1, reordering=0.1).pair(seed)
    config = e3x.Config(timeout=60.0)
    heard = Heard(there, config=config)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heard.run)
        async with e3x.session(here, role="connector", config=config, linger=60.0) as session:
            async with session.open() as channel:
                await channel.send_many([b"%d" % number for number in range(50)])
        assert heard.messages == [b"%d" % number for number in range(50)]
        with trio.fail_after(120):  # if every goodbye was lost, the session ends by silence
            await heard.over.wait()


async def test_both_may_leave_at_once(autojump_clock: MockClock) -> None:
    for seed in range(10):
        async with on_packets(BENT, seed, linger=30.0) as pair:
            async with channels(pair) as (here, there):
                await here.send(b"1")
                assert await there.receive() == b"1"
    assert trio.current_time() < 60


@pytest.mark.requirement("R-38", "R-42")
async def test_a_peer_that_processes_nothing_is_waited_for_as_long_as_linger_says(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other:

        async def use() -> None:
            async with e3x.session(here, role="connector", linger=3.0) as session, session.open() as channel:
                await channel.send(b"unread")
                await next_channel(other)

        with pytest.raises(LinkLost, match="didn't close the session within 3"):
            await use()
        assert trio.current_time() == pytest.approx(3.0, abs=0.1)
        with pytest.raises(LinkLost, match="ended the session"):
            async for _ in other:
                pass


async def test_leaving_a_session_that_never_heard_of_anybody_takes_no_time(autojump_clock: MockClock) -> None:
    here, _ = DEAD.pair(1)
    async with e3x.session(here, role="connector"):
        pass
    assert trio.current_time() == 0
    with pytest.raises(LinkLost):
        async with e3x.session(here, role="connector") as session, session.open() as channel:
            await channel.send(b"1")


@pytest.mark.requirement("R-36", "R-39")
async def test_a_session_that_is_left_by_an_error_tells_the_peer_so_at_once(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other:
        received: list[e3x.Channel] = []

        async def use() -> None:
            async with e3x.session(here, role="connector") as session, session.open() as channel:
                await channel.send(b"1")
                received.append(await next_channel(other))
                raise KeyError

        with pytest.raises(KeyError):
            await use()
        with pytest.raises(LinkLost, match="ended the session"):
            async for _ in other:
                pass
        assert await received[0].receive() == b"1"
        with pytest.raises(LinkLost, match="ended the session"):
            await received[0].receive()
    assert trio.current_time() < 1


@pytest.mark.requirement("R-39")
async def test_after_the_peer_has_left_nothing_can_be_opened(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other:
        async with e3x.session(here, role="connector") as session:
            await session.ping()
        with pytest.raises((ChannelStopped, LinkLost)):
            async with other.open():
                pass
        with pytest.raises(LinkLost, match="hung up"):
            await other.ping()


async def test_channels_that_are_still_open_when_the_peer_leaves_are_broken_off(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other, other.open() as channel:
        async with e3x.session(here, role="connector") as session:
            await channel.send(b"1")
            assert await (await next_channel(session)).receive() == b"1"
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"2")
        with pytest.raises(trio.EndOfChannel):  # this direction had ended in order before
            await channel.receive()


@pytest.mark.requirement("R-42")
async def test_a_channel_that_nobody_took_is_refused_when_the_session_is_left(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(here, role="connector") as session, session.open() as channel:
        async with e3x.session(there, role="listener"):
            await trio.sleep(1)
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"1")


@pytest.mark.requirement("R-42")
async def test_during_a_shutdown_new_channels_are_refused_and_old_ones_go_on(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there), background() as nursery:
        nursery.start_soon(lambda: pair.other.shutdown(grace=60))
        await at_rest()
        async with pair.one.open() as late:
            with pytest.raises(trio.BrokenResourceError) as caught:
                await late.receive()
        assert getattr(caught.value, "payload", b"") == b"closing"
        await here.send(b"still here")
        assert await there.receive() == b"still here"
        with pytest.raises(trio.ClosedResourceError):
            async with pair.other.open():
                pass


# --- silence


@pytest.mark.requirement("R-39")
async def test_a_peer_that_vanishes_is_noticed_by_silence(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    cable = Cable(here)
    async with e3x.session(cable, role="connector") as session, e3x.session(there, role="listener"):
        await session.ping()
        began = trio.current_time()
        await trio.sleep(1)
        cable.is_cut = True
        with pytest.raises(LinkLost, match="no data from the peer for 30 s") as caught:
            async for _ in session:
                pass
        assert caught.value.by == "network"
        assert trio.current_time() - began == pytest.approx(30.0, abs=0.5)


@pytest.mark.requirement("R-39")
async def test_a_peer_that_vanishes_in_mid_talk_is_noticed_after_ten_seconds(autojump_clock: MockClock) -> None:
    here, _ = DEAD.pair(1)
    async with e3x.session(here, role="connector") as session, session.open() as channel:
        await session.open().__aenter__()
        began = trio.current_time()
        with pytest.raises(LinkLost, match="no data from the peer for 10 s"):
            await channel.receive()
        assert trio.current_time() - began == pytest.approx(10.0, abs=0.5)
        with pytest.raises(LinkLost, match="no data from the peer for 10 s"):
            await channel.send(b"1")


async def test_a_lost_session_sleeps_while_its_block_goes_on(autojump_clock: MockClock) -> None:
    """It pinged without a pause, and the clock of this test would not jump any more."""
    here, _ = DEAD.pair(1)
    async with e3x.session(here, role="connector") as session:
        await session.open().__aenter__()
        with trio.fail_after(3600):
            await trio.sleep(1000)
        with pytest.raises(LinkLost, match="no data from the peer for 10 s"):
            await session.ping()


async def test_a_session_where_nothing_happens_lives_on_and_asks_now_and_then(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        await trio.sleep(3600)
        assert isinstance(pair.one, e3x.Session)
        assert isinstance(pair.other, e3x.Session)
        sent = pair.one.stats().packets_sent + pair.other.stats().packets_sent
        assert 2 * 3600 / 20 <= sent <= 3 * 3600 / 20
        async with channels(pair) as (here, there):
            await here.send(b"1")
            assert await there.receive() == b"1"


async def test_a_session_that_is_not_to_ask_does_not(autojump_clock: MockClock) -> None:
    async with on_packets(config=e3x.Config(keepalive=None)) as pair:
        await trio.sleep(3600)
        assert isinstance(pair.one, e3x.Session)
        assert pair.one.stats().packets_sent == 0


async def test_an_unread_channel_does_not_look_like_silence(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send(b"1")
        await trio.sleep(600)
        assert await there.receive() == b"1"
        there.done()
        await here.delivered()


async def test_a_stream_that_ends_with_channels_open_says_how_many(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with e3x.session(there, role="listener") as other:
        async with background() as nursery:
            session = e3x.session(here, role="connector")
            one = await session.__aenter__()
            async with one.open():
                channel = await next_channel(other)
                nursery.start_soon(here.aclose)
                with pytest.raises(LinkLost):
                    await channel.receive()
            with suppress(LinkLost):
                await session.__aexit__(None, None, None)


async def test_a_peer_that_left_is_told_apart_from_a_link_that_is_lost(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other, other.open() as channel:
        async with e3x.session(here, role="connector") as one:
            await one.ping()
        assert connection_of(other).engine.peer_takes_no_channels
        for call in (other.ping, other.open().__aenter__, channel.receive):
            with pytest.raises(trio.BrokenResourceError):
                await call()


async def test_a_ping_waits_for_room_as_a_channel_does(autojump_clock: MockClock) -> None:
    async with on_packets(limits=muxkit.Limits(channels=1)) as pair, background() as nursery:
        answered = trio.Event()

        async def ping() -> None:
            await pair.one.ping()
            answered.set()

        async with pair.one.open() as channel:
            nursery.start_soon(ping)
            await trio.sleep(1)
            assert not answered.is_set()
            channel.abort()
        with trio.fail_after(1):
            await answered.wait()


async def test_a_link_that_is_lost_during_a_shutdown_ends_it(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: pair.one.shutdown(grace=1000))
        await at_rest()
        pair.cut()
    assert trio.current_time() < 100


# --- over real sockets


async def test_a_server_hears_each_client_leave() -> None:
    ended: list[str] = []
    all_have = trio.Event()

    async def handle(session: muxkit.Session) -> None:
        try:
            async for channel in session:
                await channel.send(await channel.receive())
                await channel.aclose()
            ended.append("in order")
        except LinkLost as error:
            ended.append(str(error))
            raise
        finally:
            if len(ended) == 3:
                all_have.set()

    async with background() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, handle, "e3x+udp://127.0.0.1:0")
        for _ in range(3):
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await channel.send(b"1")
                assert await channel.receive() == b"1"
        await all_have.wait()
    assert ended == ["in order"] * 3


async def test_nobody_at_the_other_end_of_udp_is_noticed_at_once() -> None:
    config = e3x.Config(timeout=1000.0)  # s; an earlier end was reported by the link
    async with udp.connect("127.0.0.1", 9) as link, e3x.session(link, role="connector", config=config) as session:
        with trio.fail_after(60), pytest.raises(LinkLost):
            await session.ping()
