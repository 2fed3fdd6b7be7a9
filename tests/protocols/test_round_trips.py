"""Round trips until an answer comes, counted on a simulated network and a virtual clock, for each protocol."""

from __future__ import annotations

import re
import ssl
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

import muxkit
from muxkit.cli.doctor import make_certificate
from muxkit.protocols import restream
from muxkit.testing import ChaosPlan, SimNetwork, SimWeather, chaos_packet_relay, chaos_relay
from muxkit_bench.contestants.certified import options
from muxkit_bench.contestants.contestant import CERTIFICATE, KEY
from muxkit_bench.lines.trips import OVER_STREAM, RoundTrips, count_round_trips, echo, round_trip, simulate

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

# TCP's handshake is one of the first number. A new channel and leaving may not cost more than these.
COUNTS = {
    "bpmux": RoundTrips(session=3, small=1, large=2, leaving=1),
    "yamux": RoundTrips(session=2, small=1, large=1, leaving=2),
    "relink": RoundTrips(session=3, small=1, large=1, leaving=1),
    "aqueduct": RoundTrips(session=2, small=1, large=1, leaving=1),
    OVER_STREAM: RoundTrips(session=2, small=1, large=2, leaving=2),
    "e3x": RoundTrips(session=1, small=1, large=7.5, leaving=2),
}


@pytest.mark.parametrize("protocol", COUNTS)
def test_calls_and_sessions_cost_this_many_round_trips(protocol: str) -> None:
    counted = simulate(protocol)
    for name, most in attrs.asdict(COUNTS[protocol]).items():
        assert getattr(counted, name) <= most + 1e-6, name


# ---------------------------------------------------------------------------- what comes back

ROUND_TRIP = 0.1  # s
WEATHER = SimWeather(delay=ROUND_TRIP / 2)


async def test_a_relink_link_that_returns_costs_two_round_trips(autojump_clock: MockClock) -> None:
    url = "relink+sim://server"
    with SimNetwork(weather=WEATHER) as network:
        async with muxkit.open_server(muxkit.each_channel(echo), url), muxkit.connect(url) as session:
            async with session.open("echo") as channel:
                await round_trip(channel, b"x")
                await trio.sleep(5)
                cut_at = trio.current_time()
                network.cut()
                await round_trip(channel, b"y")  # one more round trip, after TCP's handshake and that of the link
                assert trio.current_time() - cut_at == pytest.approx(3 * ROUND_TRIP)


@pytest.mark.parametrize("protocol", ["bpmux", "yamux", "aqueduct"])
async def test_the_next_session_of_a_loop_has_its_answer_after_two_round_trips(
    protocol: str, autojump_clock: MockClock
) -> None:
    url = f"{protocol}+sim://server"
    cut_at: float | None = None
    answered_at = 0.0
    with SimNetwork(weather=WEATHER) as network:
        async with muxkit.open_server(muxkit.each_channel(echo), url):
            async with muxkit.reconnecting(url) as sessions:
                async for session in sessions:
                    with suppress(muxkit.LinkLost):
                        async with session.open("echo") as channel:
                            await round_trip(channel, b"x")
                            if cut_at is not None:
                                answered_at = trio.current_time()
                                break
                            await trio.sleep(5)
                            cut_at = trio.current_time()
                            network.cut()
                            await channel.receive()
            assert cut_at is not None
            assert answered_at - cut_at == pytest.approx(2 * ROUND_TRIP)


async def test_a_stream_of_restream_goes_on_two_round_trips_after_a_cut(autojump_clock: MockClock) -> None:
    with SimNetwork(weather=WEATHER) as network:
        async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
            served = await nursery.start(restream.serve, "restream+sim://server", store)
            async with restream.numbers(served.url, count=1000) as numbers:
                await numbers.receive()
                before = trio.current_time()
                network.cut()
                while trio.current_time() == before:  # those that had come
                    await numbers.receive()
                assert trio.current_time() - before == pytest.approx(2 * ROUND_TRIP)
            nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------------- real sockets

# Without the handshake of TCP, which ends at the relay. QUIC and e3x start slowly, with ten packets per round trip.
MEASURED = {
    "bpmux+tcp": RoundTrips(session=2, small=1, large=2, leaving=1),
    "bpmux+tls": RoundTrips(session=2, small=1, large=2, leaving=1),
    "bpmux+ws": RoundTrips(session=2, small=1, large=2, leaving=1),
    "bpmux+wss": RoundTrips(session=3, small=1, large=2, leaving=1),
    "yamux+tcp": RoundTrips(session=1, small=1, large=1, leaving=1.5),
    "relink+tcp": RoundTrips(session=2, small=1, large=1, leaving=1),
    "relink+tls": RoundTrips(session=3, small=1, large=1, leaving=1),
    "aqueduct+tcp": RoundTrips(session=1, small=1, large=1, leaving=1),
    "aqueduct+tls": RoundTrips(session=2, small=1, large=1, leaving=1),
    "aqueduct+quic": RoundTrips(session=3, small=1, large=7.5, leaving=1),
    "e3x+tcp": RoundTrips(session=1, small=1, large=2, leaving=2),
    "e3x+udp": RoundTrips(session=1, small=1, large=7.5, leaving=2),
    "e3x+dtls": RoundTrips(session=4, small=1, large=7.5, leaving=2),
}
LONG = 0.2  # s, so that computing counts little


@pytest.mark.soak
@pytest.mark.parametrize("scheme", MEASURED)
async def test_on_real_sockets_calls_and_sessions_cost_this_many_round_trips(scheme: str, tmp_path: Path) -> None:
    make_certificate(tmp_path / CERTIFICATE, tmp_path / KEY)
    url, over_packets = f"{scheme}://127.0.0.1:0", scheme.endswith(("udp", "dtls", "quic"))
    ours, theirs = (
        options(url, purpose, str(tmp_path)) for purpose in (ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH)
    )
    async with muxkit.open_server(muxkit.each_channel(echo), url, **theirs) as server:
        found = re.search(r"127\.0\.0\.1:\d+", server.url)
        assert found is not None
        relay = chaos_packet_relay if over_packets else chaos_relay
        async with relay(found[0], ChaosPlan(delay=LONG / 2)) as between:
            connect = partial(muxkit.connect, server.url.replace(found[0], between.address, 1), **ours)
            tries = [attrs.astuple((await count_round_trips(connect)).per(LONG)) for _ in range(3)]
    for counted, most in zip(map(min, zip(*tries, strict=True)), attrs.astuple(MEASURED[scheme]), strict=True):
        assert counted <= most + 0.4
