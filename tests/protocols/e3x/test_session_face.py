"""What channels and sessions say to each other beside messages: names, openings, reasons; and storms of cancels."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import ChannelCancelled, ChannelStopped, Limits, LinkLost, Unsupported
from muxkit.protocols import e3x
from muxkit.protocols.e3x.state import ERRS_AT_ONCE, ERRS_PER_SECOND
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.e3x._sessions import CALM, channels, next_channel, on_packets, on_streams, over_url

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    from muxkit.testing import SessionPair

LINKS = {"packets": on_packets, "stream": on_streams}
URLS = ("e3x+udp://127.0.0.1:0", "e3x+tcp://127.0.0.1:0", "e3x+mem://storm")


def session_of(pair: SessionPair, side: str) -> e3x.Session:
    session = pair.one if side == "one" else pair.other
    assert isinstance(session, e3x.Session)
    return session


# ---------------------------------------------------------------- names and openings


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
async def test_both_sides_know_the_name_the_opening_and_the_session(
    link: type[AbstractAsyncContextManager[SessionPair]], autojump_clock: MockClock
) -> None:
    async with link() as pair:
        for name, payload in (("chat", b"tea"), ("", b""), ("", b"only payload"), ("größe", b"")):
            here = await pair.one.open(name, payload=payload)
            there = await next_channel(session_of(pair, "other"))
            for channel, session in ((here, pair.one), (there, pair.other)):
                assert (channel.name, channel.opening, channel.session) == (name, payload, session)
                assert channel in session.channels()
            await here.send(b"a message")
            assert await there.receive() == b"a message"
            await here.aclose()
            await there.aclose()


async def test_a_channel_that_was_not_taken_is_not_among_the_channels(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, pair.one.open():
        await trio.sleep(1)
        assert (len(pair.one.channels()), len(pair.other.channels())) == (1, 0)
        await next_channel(session_of(pair, "other"))
        assert len(pair.other.channels()) == 1


async def test_the_payload_of_an_unreliable_opening_is_its_first_message(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, session_of(pair, "one").open("x", payload=b"1", reliable=False) as here:
        there = await next_channel(session_of(pair, "other"))
        assert await there.receive() == b"1"
        assert (here.opening, there.opening, there.name) == (b"", b"", "x")


async def test_a_name_is_shown_without_control_characters(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair, name="a\x1b[2J") as (here, there):
        assert here.name == there.name == r"a\x1b[2J"
        assert there.type == "a\x1b[2J"


async def test_a_name_that_is_too_long_is_refused_at_once(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        with pytest.raises(ValueError, match="at most 255 bytes"):
            pair.one.open("x" * 256)


# ---------------------------------------------------------------- streams, gauges, information


async def test_a_reliable_channel_can_be_used_as_a_stream(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        near, far = here.as_stream(), there.as_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send_all, b"x" * 300_000)
            got = 0
            while got < 300_000:
                got += len(await far.receive_some())
        await near.send_eof()
        assert await far.receive_some() == b""
        await far.send_all(b"back")
        assert await near.receive_some(2) == b"ba"
        assert await near.receive_some() == b"ck"
        await far.aclose()
        await near.aclose()
        await trio.sleep(1)
        assert pair.one.stats().channels == pair.other.stats().channels == 0


async def test_an_unreliable_channel_is_no_stream(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, session_of(pair, "one").open(reliable=False) as here:
        with pytest.raises(Unsupported, match="may be lost"):
            here.as_stream()


async def test_a_channel_tells_what_waits(autojump_clock: MockClock) -> None:
    async with on_packets(config=e3x.Config(window=10), limits=Limits(channel_first=20_000)) as pair:
        async with channels(pair) as (here, there), background() as nursery:

            async def fill() -> None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    while True:
                        await here.send(bytes(1000))

            nursery.start_soon(fill)
            await trio.sleep(3)
            near, far = here.stats(), there.stats()
            assert (near.credit_out, far.credit_in) == (0, 0)  # packets
            assert near.waiting_since is not None
            assert near.queued > 15_000
            assert far.unread == 10_000
            here.abort()
            there.abort()


async def test_a_session_says_what_carries_it() -> None:
    async with over_url("e3x+udp://127.0.0.1:0") as pair:
        for session in (pair.one, pair.other):
            info = session.info
            assert (info.protocol, info.transport) == ("e3x", "udp")
            assert info.peer.startswith("udp 127.0.0.1:")


# ---------------------------------------------------------------- reasons of channels


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
@pytest.mark.parametrize("side", ["opener", "accepter"])
@pytest.mark.parametrize("reliable", [True, False])
async def test_the_reason_and_the_code_of_an_abort_reach_the_other_side(
    reliable: bool, side: str, link: type[AbstractAsyncContextManager[SessionPair]], autojump_clock: MockClock
) -> None:
    async with link() as pair, channels(pair, reliable=reliable) as (here, there):
        ours, theirs = (here, there) if side == "opener" else (there, here)
        ours.abort('disk "full"\n', code=7)
        with pytest.raises(ChannelCancelled, match="code 7") as cancelled:
            await theirs.receive()
        with pytest.raises(ChannelStopped) as stopped:
            await theirs.send(b"1")
        for error in (cancelled.value, stopped.value):
            assert (error.reason, error.code) == (r'disk "full"\n', 7)


async def test_an_abort_without_a_reason_gives_none(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        here.abort()
        with pytest.raises(ChannelCancelled) as caught:
            await there.receive()
        assert (caught.value.reason, caught.value.code, caught.value.payload) == ("", 0, b"given up")


async def test_a_very_long_reason_is_cut(autojump_clock: MockClock) -> None:
    for packet in (256, 1400):
        async with on_packets(config=e3x.Config(packet=packet)) as pair, channels(pair) as (here, there):
            here.abort("ä\n" * 10_000, code=2**32 - 1)
            with pytest.raises(ChannelCancelled) as caught:
                await there.receive()
            assert caught.value.reason.startswith("ä\\nä")
            assert len(caught.value.reason) <= 512
            assert caught.value.code == 2**32 - 1


async def test_an_abort_after_the_own_end_was_processed_stops_the_peer(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.finish()
        with pytest.raises(trio.EndOfChannel):
            await there.receive()
        await here.delivered()
        here.abort("enough", code=3)
        await trio.sleep(1)
        with pytest.raises(ChannelStopped) as caught:
            await there.send(b"1")
        assert (caught.value.reason, caught.value.code) == ("enough", 3)


# ---------------------------------------------------------------- reasons of sessions


@pytest.mark.parametrize("link", ["packets", "stream"])
async def test_a_session_that_is_left_by_an_error_tells_the_peer_why(link: str, autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1) if link == "packets" else memory.pair()

    async def use() -> None:
        async with e3x.session(here, role="connector") as one:
            await one.ping()
            raise KeyError

    async with e3x.session(there, role="listener") as other:
        with pytest.raises(KeyError):
            await use()
        with pytest.raises(LinkLost) as caught:
            await next_channel(other)
        error = caught.value
        assert (error.peer_reason, error.code) == ("the other side left the session by an error", 500)
        assert (error.by, error.phase) == ("peer", "open")


@pytest.mark.parametrize("link", ["packets", "stream"])
async def test_a_session_that_is_cancelled_gives_no_reason(link: str, autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1) if link == "packets" else memory.pair()
    async with e3x.session(there, role="listener") as other, other.open() as channel:
        with trio.move_on_after(5):
            async with e3x.session(here, role="connector") as one:
                await one.ping()
                await trio.sleep_forever()
        with pytest.raises(LinkLost) as caught:
            await channel.receive()
        assert (caught.value.peer_reason, caught.value.code) == (None, None)
        assert trio.current_time() < 6


async def test_a_peer_that_does_not_process_is_told_that_nobody_waited_longer(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    async with e3x.session(there, role="listener") as other:

        async def use() -> None:
            async with e3x.session(here, role="connector", linger=3.0) as session, session.open() as channel:
                await channel.send(b"unread")
                await next_channel(other)

        with pytest.raises(LinkLost) as left:
            await use()
        assert left.value.phase == "leave"
        with pytest.raises(LinkLost, match="ended the session: the other side left without") as caught:
            await next_channel(other)
        assert caught.value.peer_reason is not None


async def test_a_reason_that_a_stranger_made_is_shown_escaped_and_short(autojump_clock: MockClock) -> None:
    here, there = CALM.pair(1)
    body = b"9 \x1b[31mred\n" + b"x" * 1000
    async with e3x.session(there, role="listener") as other:
        await here.send(e3x.encode_packet(e3x.Packet(1, "muxkit.bye", seq=1, end=True, body=body)))
        with pytest.raises(LinkLost) as caught:
            await next_channel(other)
        assert caught.value.peer_reason is not None
        assert caught.value.peer_reason.startswith(r"\x1b[31mred\nxxx")
        assert (len(caught.value.peer_reason) <= 512, caught.value.code) == (True, 9)


async def test_before_anything_was_heard_the_phase_is_the_handshake(autojump_clock: MockClock) -> None:
    here, _ = CALM.pair(1)
    async with e3x.session(here, role="connector") as session:
        with pytest.raises(LinkLost) as caught:
            await session.ping()
        assert caught.value.phase == "handshake"


@pytest.mark.parametrize("url", URLS)
async def test_a_handler_that_fails_is_told_to_the_client(url: str) -> None:
    async def handle(session: muxkit.Session) -> None:
        async for _ in session:
            raise KeyError("the handler is broken")

    async with background() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, handle, url)
        with trio.fail_after(30), pytest.raises(LinkLost) as caught:
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await channel.receive()
        assert (caught.value.peer_reason, caught.value.code) == ("the other side left the session by an error", 500)


# ---------------------------------------------------------------- storms


async def _storm(pair: SessionPair, count: int) -> None:
    """Cancel many channels at once; every other one still answers, old and new."""
    heard: list[str] = []

    async def serve() -> None:
        async for channel in pair.other.incoming():
            nursery.start_soon(answer, channel)

    async def answer(channel: muxkit.Channel) -> None:
        try:
            async with channel:
                async for message in channel:
                    await channel.send(message)
        except (ChannelCancelled, ChannelStopped) as error:
            heard.append(error.reason)

    async def echo(channel: muxkit.Channel) -> None:
        await channel.send(b"1")
        assert await channel.receive() == b"1"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        bystander = await pair.one.open("bystander")
        await echo(bystander)
        victims = [await pair.one.open("victim") for _ in range(count)]
        for victim in victims:  # each has its handler
            await echo(victim)
        for victim in victims:
            victim.abort("timed out", code=408)
        await echo(bystander)
        with trio.fail_after(60):
            async with pair.one.open("after") as after:
                await echo(after)
            while len(heard) < count:  # noqa: ASYNC110 - a lost err is sent again after a second
                await trio.sleep(0.05)
        assert set(heard) == {"timed out"}
        await echo(bystander)
        await bystander.aclose()
        await pair.one.ping()
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-01")
@pytest.mark.parametrize("url", [URLS[0], URLS[2]], ids=["packets", "a byte stream"])
async def test_two_thousand_cancels_at_once_reach_the_peer_and_end_nothing_else(url: str) -> None:
    async with over_url(url) as pair:
        await _storm(pair, 2000)


async def test_errs_over_packets_are_paced_and_none_is_dropped_for_newer_ones(autojump_clock: MockClock) -> None:
    limits = Limits(tombstones=100)
    async with on_packets(limits=limits) as pair:
        ours = [await pair.one.open() for _ in range(500)]
        incoming = pair.other.incoming()
        theirs = [await anext(incoming) for _ in ours]
        began = trio.current_time()
        for channel in ours:
            channel.abort()
        for taken in theirs:
            with pytest.raises(ChannelCancelled):
                await taken.receive()
        assert trio.current_time() - began >= (500 - ERRS_AT_ONCE) / ERRS_PER_SECOND


async def test_a_peer_that_opens_and_cancels_waits_for_its_allowance(autojump_clock: MockClock) -> None:
    async with on_packets(limits=Limits(resets_per_second=10, resets_burst=20)) as pair:
        other = session_of(pair, "other")
        began = trio.current_time()
        for _ in range(70):
            async with pair.one.open() as channel:
                await next_channel(other)
                channel.abort()
        assert trio.current_time() - began >= 4.5
        async with pair.one.open():
            await next_channel(other)


async def test_what_the_peer_cancelled_before_it_was_taken_is_not_handed_out(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        cancelled = [await session_of(pair, "one").open(payload=b"x", reliable=reliable) for reliable in (True, False)]
        await trio.sleep(1)
        assert len(connection_of(session_of(pair, "other")).incoming) == 2
        for channel in cancelled:
            channel.abort()
        await trio.sleep(1)
        async with pair.one.open("kept"):
            await trio.sleep(1)
            assert (await next_channel(session_of(pair, "other"))).name == "kept"
        other = session_of(pair, "other")
        assert (len(connection_of(other).incoming), connection_of(other).engine.state.unread) == (0, 0)


async def test_failures_of_handlers_pace_the_peer_and_end_nothing(autojump_clock: MockClock) -> None:
    async with on_packets(limits=Limits(resets_per_second=10, resets_burst=20)) as pair:
        began = trio.current_time()
        for _ in range(70):
            async with pair.one.open():
                (await next_channel(session_of(pair, "other"))).abort("failed")
        assert trio.current_time() - began >= 4.5
        await pair.one.ping()
