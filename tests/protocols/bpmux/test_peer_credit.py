"""A first credit that is used before the peer has announced it, because it is known from before."""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trustme

import muxkit
from muxkit import Limits
from muxkit.core.events import Failed
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Config, Engine
from muxkit.protocols.bpmux.frames import encode_announcement
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import Cut, SimNetwork, SimWeather
from muxkit.testing._pair import EnginePair, drain, feed
from muxkit_bench.lines.trips import echo, round_trip

from ._helpers import fed, written
from ._world import TIGHT, World

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit.protocols.bpmux import Event

CREDIT = 50
KNOWN = Config(keepalive=None, initial_credit=CREDIT, peer_credit=CREDIT)
USUAL = Config(keepalive=None, initial_credit=CREDIT)
LESS = Config(keepalive=None, initial_credit=CREDIT, peer_credit=CREDIT - 20)
URL = "bpmux+sim://server"


def test_the_first_flight_has_an_opening_and_its_first_message() -> None:
    engine = Engine(KNOWN)
    sink, _ = engine.open_duplex(b"name", id=1)
    sink.send(b"first")
    assert written(engine).startswith("a80000 a80032 a80000")
    peer = Engine(USUAL)
    pair: EnginePair[Engine, Event] = EnginePair(Engine(KNOWN), peer)
    sink, _ = pair.engines[0].open_duplex(b"name", id=1)
    sink.send(b"first")
    reported = peer.receive_bytes(b"".join(pair.engines[0].buffers_to_send()), 0.0)
    assert [type(event).__name__ for event in reported] == ["Opened", "Received"]


def test_the_first_grants_of_the_top_level_repay_what_was_used_in_advance() -> None:
    engine = Engine(KNOWN)
    engine.open_sink(b"twenty bytes of name")
    drain(engine)
    announcement = encode_announcement(CREDIT)
    for at in range(len(announcement)):
        feed(engine, [announcement[at : at + 1]])
        assert engine.top_sink.credit_out <= CREDIT - 20
    fed(engine, "a80064")
    assert engine.top_sink.credit_out == CREDIT - 20 + 100


@pytest.mark.seeds(10, soak=2500)
@pytest.mark.parametrize("other", [USUAL, LESS, KNOWN], ids=["as known", "both know, more is announced", "both know"])
def test_a_random_life_with_a_known_credit_keeps_the_books(seed: int, other: Config) -> None:
    world = World(seed, TIGHT, config=KNOWN, other=other)
    for _ in range(200):
        world.act()
        world.check()
    world.close()
    assert world.done > 0


@pytest.mark.parametrize("first", [encode_announcement(CREDIT - 1).hex(), "a80032", "500100", "62 00 00"])
def test_a_peer_that_announces_less_than_was_counted_on_ends_the_connection(first: str) -> None:
    engine = Engine(KNOWN)
    drain(engine)
    (*_, failed) = feed(engine, [bytes.fromhex(first)])
    assert isinstance(failed, Failed)
    assert "expected at least Config(peer_credit=50)" in str(failed.error)


@pytest.mark.parametrize("other", [{"letter": True}, {"grants": False}, {"initial_credit": 0}])
def test_it_needs_a_first_credit_of_this_side(other: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="expected this side to announce an initial_credit"):
        Config(peer_credit=1, **other)


# ---------------------------------------------------------------------------- agreed by ALPN


AUTHORITY = trustme.CA()


@pytest.fixture
def served(tmp_path: Path) -> dict[str, muxkit.TLS]:
    """Return the settings of both sides of TLS."""
    path, ca = tmp_path / "server.pem", tmp_path / "ca.pem"
    AUTHORITY.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    AUTHORITY.cert_pem.write_to_path(str(ca))
    return {"server": muxkit.TLS(cert=path, key=path), "client": muxkit.TLS(ca=ca)}


async def counted_on(served: dict[str, muxkit.TLS], ours: Config, theirs: Config) -> int:
    """Return the first credit that a client over TLS knows before a byte of bpmux has come."""
    url = "bpmux+tls://127.0.0.1:0"
    async with (
        muxkit.open_server(muxkit.each_channel(echo), url, tls=served["server"], config=theirs) as server,
        bpmux.connect(server.url, tls=served["client"], config=ours) as session,
        session.open("echo") as channel,
    ):
        await round_trip(channel, b"x")
        return int(connection_of(session).engine.config.peer_credit)


async def test_both_sides_of_tls_agree_on_a_first_credit_by_alpn(served: dict[str, muxkit.TLS]) -> None:
    assert await counted_on(served, Config(), Config()) == 4096


@pytest.mark.parametrize("plain", [Config(initial_credit=0), Config(initial_credit=100)], ids=["none", "less"])
async def test_a_side_of_tls_that_gives_less_agrees_on_nothing(served: dict[str, muxkit.TLS], plain: Config) -> None:
    assert await counted_on(served, Config(), plain) == 0
    assert await counted_on(served, plain, Config()) == 0


async def test_a_context_of_ones_own_is_offered_nothing(served: dict[str, muxkit.TLS]) -> None:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    url = "bpmux+tls://127.0.0.1:0"
    async with (
        muxkit.open_server(muxkit.each_channel(echo), url, tls=served["server"]) as server,
        bpmux.connect(server.url, ssl_context=context) as session,
        session.open("echo") as channel,
    ):
        await round_trip(channel, b"x")
        assert connection_of(session).engine.config.peer_credit == 0


# ---------------------------------------------------------------------------- sessions


async def answers(network: SimNetwork, calls: int) -> list[float]:
    """Make a call in each session, and cut its connection; return the seconds from the cut to the next answer."""
    took: list[float] = []
    lost_at = trio.current_time()
    async with muxkit.reconnecting(URL) as sessions:
        async for session in sessions:
            try:
                async with session.open("echo") as channel:
                    await round_trip(channel, b"x")
                    took.append(trio.current_time() - lost_at)
                    if len(took) == calls:
                        return took
                    await trio.sleep(5)
                    lost_at = trio.current_time()
                    network.cut(how=Cut.RESET)
                    await channel.receive()
            except muxkit.LinkLost:
                continue
    raise AssertionError("the loop ended")


async def test_a_session_that_comes_back_costs_two_round_trips_to_the_first_answer(autojump_clock: MockClock) -> None:
    with SimNetwork(weather=SimWeather(delay=0.05)) as network:
        async with muxkit.open_server(muxkit.each_channel(echo), URL):
            assert await answers(network, 3) == pytest.approx([0.3, 0.2, 0.2])


async def test_a_server_that_announces_nothing_any_more_costs_one_more_attempt(autojump_clock: MockClock) -> None:
    with SimNetwork(weather=SimWeather(delay=0.05)) as network:
        took: list[float] = []
        async with trio.open_nursery() as nursery:
            serve = partial(muxkit.serve, muxkit.each_channel(echo), URL)
            first = trio.CancelScope()

            async def serve_first(task_status: trio.TaskStatus[None]) -> None:
                with first:
                    await serve(task_status=task_status)  # type: ignore[arg-type]  # the server isn't needed

            await nursery.start(serve_first)
            async with muxkit.reconnecting(URL, limits=Limits()) as sessions:
                async for session in sessions:
                    try:
                        async with session.open("echo") as channel:
                            await round_trip(channel, b"x")
                            took.append(trio.current_time())
                            if len(took) == 2:
                                break
                            first.cancel()
                            await trio.sleep(5)
                            await nursery.start(partial(serve, config=Config(initial_credit=0)))
                            await channel.receive()
                    except (muxkit.LinkLost, muxkit.ChannelCancelled):
                        continue
            nursery.cancel_scope.cancel()
        assert len(took) == 2
        assert network.connections == 3
