"""`muxkit.connect` with a list of URLs: they race, and the first session on which a server answers wins."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit import rpc
from muxkit._racing import MAX_REMEMBERED, REMEMBERED_SECONDS, Winners
from muxkit.protocols import bpmux
from muxkit.runtime import can_heal
from muxkit.testing import SimNetwork, SimWeather

FAST, SLOW, GONE = "bpmux+sim://fast", "bpmux+sim://slow", "bpmux+sim://gone"
OVER_PACKETS = "e3x+sim://packets"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@asynccontextmanager
async def served(*urls: str) -> AsyncGenerator[SimNetwork, None]:
    """Serve at these URLs on a simulated network whose host `slow` is a second away."""
    with SimNetwork(17, weather=SimWeather(delay=0.01)) as network:
        network.set_weather(SimWeather(delay=1.0), target="slow")
        async with muxkit.open_server(echo, urls):
            yield network


async def transport_of(*urls: str) -> tuple[str, float]:
    """Connect to the list; return the peer that won and how long that took."""
    began = trio.current_time()
    async with muxkit.connect(urls) as session:
        took = trio.current_time() - began
        async with session.open() as channel:
            await channel.send(b"hello")
            assert await channel.receive() == b"hello"
        return f"{session.info.protocol} {session.info.peer}", took


async def test_a_single_url_in_a_list_is_connected_to_as_it_is(autojump_clock: MockClock) -> None:
    async with served(FAST):
        assert (await transport_of(FAST))[0] == "bpmux sim fast"


async def test_the_next_url_wins_when_packets_vanish(autojump_clock: MockClock) -> None:
    """The usual case: a network that lets TCP through and drops UDP without a word."""
    async with served(OVER_PACKETS, FAST) as network:
        network.partition("client", "packets")
        peer, took = await transport_of(OVER_PACKETS, FAST)
        assert peer == "bpmux sim fast"
        assert 0.25 < took < 0.5


async def test_the_preferred_carrier_wins_while_it_works(autojump_clock: MockClock) -> None:
    async with served(OVER_PACKETS, FAST):
        assert (await transport_of(OVER_PACKETS, FAST))[0].startswith("e3x ")


async def test_a_dead_host_costs_no_wait(autojump_clock: MockClock) -> None:
    async with served(FAST):
        peer, took = await transport_of(GONE, FAST)
        assert peer == "bpmux sim fast"
        assert took < 0.25


async def test_a_link_without_an_answering_server_does_not_win(autojump_clock: MockClock) -> None:
    """A server that accepts connections and never answers: the attempt isn't complete, so the next one wins."""
    async with served(FAST) as network:

        async def silent(session: muxkit.Session) -> None:
            await trio.sleep_forever()

        async with muxkit.open_server(silent, "yamux+sim://mute"):
            network.partition("mute", "client", one_way=True)
            assert (await transport_of("yamux+sim://mute", FAST))[0] == "bpmux sim fast"


async def test_losers_leave_no_connection(autojump_clock: MockClock) -> None:
    async with served(SLOW, FAST) as network:
        network.set_weather(SimWeather(delay=0.1), target="slow")  # it has a connection when it loses
        network.set_weather(SimWeather(delay=0.3), source="slow")
        async with muxkit.connect([SLOW, FAST]) as session:
            assert session.info.peer == "sim fast"
            await trio.sleep(5)
            assert network.connections == 2
            assert network.cut("client", "slow") == 0


async def test_an_error_names_each_attempt_when_all_are_dead(autojump_clock: MockClock) -> None:
    async with served(FAST) as network:
        network.partition("client", "packets")
        with pytest.raises(muxkit.AllAttemptsFailed) as caught:
            await transport_of(OVER_PACKETS, GONE, "relink+sim://also-gone")
    names = [name for name, _ in caught.value.attempts]
    assert sorted(names) == sorted([OVER_PACKETS, GONE, "relink+sim://also-gone"])
    for name in names:
        assert f"{name}: " in str(caught.value)
    assert "Check that one of them runs" in str(caught.value)


async def test_the_winner_is_tried_first_the_next_time(autojump_clock: MockClock) -> None:
    async with served(OVER_PACKETS, FAST) as network:
        network.partition("client", "packets")
        await transport_of(OVER_PACKETS, FAST)
        peer, took = await transport_of(OVER_PACKETS, FAST)
        assert peer == "bpmux sim fast"
        assert took < 0.25


async def test_a_winner_that_has_died_is_replaced(autojump_clock: MockClock) -> None:
    async with served(SLOW):
        async with muxkit.open_server(echo, FAST):
            assert (await transport_of(FAST, SLOW))[0] == "bpmux sim fast"
        assert (await transport_of(FAST, SLOW))[0] == "bpmux sim slow"


async def test_a_server_that_sends_clients_away_is_passed_over(autojump_clock: MockClock) -> None:
    async def full(session: muxkit.Session) -> None:
        raise muxkit.Refused("full", code=503)

    async with served(FAST), muxkit.open_server(full, GONE):
        assert (await transport_of(GONE, FAST))[0] == "bpmux sim fast"


async def test_a_winner_whose_session_was_lost_is_not_tried_first(autojump_clock: MockClock) -> None:
    async with served(OVER_PACKETS, FAST) as network:
        network.partition("client", "packets")
        with pytest.raises(muxkit.LinkLost):  # noqa: PT012 - where it is raised is not fixed
            async with muxkit.connect([OVER_PACKETS, FAST]) as session:
                network.cut("client", "fast")
                await session.ping()
        network.heal()
        assert (await transport_of(OVER_PACKETS, FAST))[0].startswith("e3x ")


def test_a_winner_is_remembered_for_ten_minutes_even_if_it_wins_again() -> None:
    known, urls = Winners(), ("a", "b")
    known.remember(urls, "b", 0.0)
    known.remember(urls, "b", REMEMBERED_SECONDS - 1)
    assert known.of(urls, REMEMBERED_SECONDS - 1) == "b"
    assert known.of(urls, REMEMBERED_SECONDS) is None


def test_the_oldest_list_is_forgotten_beyond_a_bound() -> None:
    known = Winners()
    for number in range(MAX_REMEMBERED + 1):
        known.remember((str(number), "x"), "x", 0.0)
    assert known.of(("0", "x"), 1.0) is None
    assert known.of(("1", "x"), 1.0) == "x"


async def test_relink_wins_only_with_a_connection(autojump_clock: MockClock) -> None:
    """A session of Relink exists before its connection, and would win every race."""
    async with served(FAST):
        assert (await transport_of("relink+sim://gone", FAST))[0] == "bpmux sim fast"


async def test_relink_reconnects_after_it_has_won(autojump_clock: MockClock) -> None:
    async with served("relink+sim://fast") as network:
        async with muxkit.connect(["relink+sim://fast", GONE]) as session:
            network.cut("client", "fast")
            await session.ping()


async def test_reconnecting_races_again_after_each_loss(autojump_clock: MockClock) -> None:
    async with served(SLOW) as network:
        async with muxkit.open_server(echo, FAST) as first:
            peers: list[str] = []
            async with muxkit.reconnecting([FAST, SLOW]) as sessions:
                async for session in sessions:
                    peers.append(session.info.peer)
                    if len(peers) == 2:
                        break
                    await first.shutdown(grace=0)
                    network.cut("client", "fast")
                    await trio.sleep(2)
        assert peers == ["sim fast", "sim slow"]


async def test_a_session_is_lost_by_the_error_of_its_block(autojump_clock: MockClock) -> None:
    told: list[str | None] = []

    async def listen(session: muxkit.Session) -> None:
        try:
            async for _ in session.incoming():
                pass
        except muxkit.LinkLost as error:
            told.append(error.peer_reason)

    with SimNetwork(1):
        async with muxkit.open_server(listen, FAST):
            with pytest.raises(muxkit.Refused):
                async with muxkit.connect([FAST, SLOW]):
                    raise muxkit.Refused("enough")
            await trio.sleep(1)
    assert told == ["enough"]


async def test_an_option_goes_to_the_urls_that_have_it(autojump_clock: MockClock) -> None:
    async with served(FAST):
        urls = ["bpmux+tcp://127.0.0.1:1", FAST]
        async with muxkit.connect(urls, unsent=1000, connect_timeout=5.0) as session:  # sim has no `unsent`
            assert session.info.transport == "sim"


async def test_an_option_that_no_url_has_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="unknown option 'unsend': did you mean 'unsent'"):
        async with muxkit.connect(["bpmux+tcp://127.0.0.1:1", FAST], unsend=1000):  # type: ignore[call-arg]  # the mistake
            pass


async def test_a_mistake_in_a_later_url_shows_although_the_first_one_works(autojump_clock: MockClock) -> None:
    async with served(FAST):
        with pytest.raises(ValueError, match="is plaintext"):
            async with muxkit.connect([FAST, "bpmux+tcp://192.0.2.1:1"]):
                pass


async def test_an_empty_list_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="expected a URL or a list of URLs, got an empty list"):
        async with muxkit.connect([]):
            pass


async def test_an_error_shows_no_password(autojump_clock: MockClock) -> None:
    with SimNetwork(1):
        with pytest.raises(muxkit.AllAttemptsFailed) as caught:
            await transport_of("bpmux+wss://127.0.0.1:1/a?token=hunter2", GONE)
    assert "hunter2" not in str(caught.value)


async def test_a_carrier_whose_extra_is_missing_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    from muxkit._plugins import load_transport
    from muxkit.runtime import ExtraNeeded, LinkKind

    def without_quic(name: str, protocol: str, links: frozenset[LinkKind]) -> object:
        if name == "quic":
            raise muxkit.PluginError("needs muxkit[quic]") from ExtraNeeded("quic", "quic", link="multistream")
        return load_transport(name, protocol, links)

    monkeypatch.setattr("muxkit._door.load_transport", without_quic)
    caplog.set_level(logging.INFO, "muxkit")
    async with served(FAST):
        assert (await transport_of("aqueduct+quic://127.0.0.1:1", FAST))[0] == "bpmux sim fast"
    assert "skipping aqueduct+quic://127.0.0.1:1: needs muxkit[quic]" in caplog.messages


def test_another_attempt_makes_sense_if_it_does_for_one_of_the_urls() -> None:
    down, bad = ConnectionRefusedError("down"), muxkit.HandshakeFailed("no such path", status=404)
    assert can_heal(muxkit.AllAttemptsFailed("all", [("a", bad), ("b", down)]))
    assert not can_heal(muxkit.AllAttemptsFailed("all", [("a", bad), ("b", bad)]))


async def test_the_typed_door_of_a_protocol_takes_a_list(autojump_clock: MockClock) -> None:
    async with served(FAST):
        async with bpmux.connect(["sim://gone", "bpmux+sim://fast"]) as session:
            assert isinstance(session, bpmux.Session)


class Adder:
    @rpc.method()
    async def add(self, one: int, other: int) -> int:
        return one + other


async def test_calls_take_a_list(autojump_clock: MockClock) -> None:
    with SimNetwork(1):
        async with muxkit.open_server(rpc.serve(Adder()), FAST), rpc.connect(Adder, [GONE, FAST]) as adder:
            assert await adder.add(1, 2) == 3
