"""Simulated networks: every protocol over `sim://`, through delay, loss, throttling, partitions and cuts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit.protocols import restream
from muxkit.testing import (
    Cut,
    SimNetwork,
    SimPackets,
    SimStream,
    SimWeather,
    check_link,
    check_packet_link,
    determined,
    sim_transport,
)

SESSIONS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]
FAR = SimWeather(delay=0.5)
BAD = SimWeather(delay=0.05, jitter=0.05, loss=0.05, duplication=0.1, reordering=0.2, rate=50_000.0)


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@asynccontextmanager
async def connected(protocol: str) -> AsyncIterator[muxkit.Channel]:
    async with muxkit.open_server(echo, f"{protocol}+sim://server") as server:
        async with muxkit.connect(server.url) as session, session.open() as channel:
            yield channel


@asynccontextmanager
async def lost(match: str | None = None) -> AsyncIterator[None]:
    with pytest.raises(muxkit.LinkLost, match=match):
        yield


async def there_and_back(channel: muxkit.Channel, message: bytes = b"tea") -> float:
    began = trio.current_time()
    await channel.send(message)
    assert await channel.receive() == message
    return trio.current_time() - began


# ---------------------------------------------------------------------------- weather


@pytest.mark.parametrize("protocol", SESSIONS)
async def test_a_message_takes_as_long_as_the_weather_says(protocol: str, autojump_clock: MockClock) -> None:
    with SimNetwork(weather=FAR) as network:
        async with connected(protocol) as channel:
            await there_and_back(channel)
            assert await there_and_back(channel) == pytest.approx(1.0, abs=0.3)
            network.set_weather(SimWeather(delay=3.0), "server", "client")
            assert await there_and_back(channel) >= 3.5


@pytest.mark.parametrize("protocol", SESSIONS)
@pytest.mark.seeds(5, soak=200)
async def test_all_arrives_in_order_through_bad_weather(protocol: str, seed: int, autojump_clock: MockClock) -> None:
    messages = [b"%d" % number * (1 + number % 700) for number in range(100)]
    with SimNetwork(seed, weather=BAD):
        async with connected(protocol) as channel, trio.open_nursery() as nursery:

            async def send() -> None:
                for message in messages:
                    await channel.send(message)

            nursery.start_soon(send)
            assert [await channel.receive() for _ in messages] == messages


@pytest.mark.seeds(3, soak=100)
async def test_a_durable_stream_arrives_whole_although_it_is_cut(seed: int, autojump_clock: MockClock) -> None:
    with SimNetwork(seed, weather=SimWeather(delay=0.05, loss=0.05)) as network:
        async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
            served = await nursery.start(restream.serve, "restream+sim://server", store)
            got = []
            async with restream.numbers(served.url, count=200) as numbers:
                async for number in numbers:
                    got.append(number)
                    if len(got) in (50, 120):
                        network.cut("client", "server")
                assert numbers.connections >= 2
            assert len(got) == 200
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("protocol", SESSIONS)
async def test_a_partition_stops_everything_until_it_is_healed(protocol: str, autojump_clock: MockClock) -> None:
    with SimNetwork(weather=SimWeather(delay=0.01)) as network:
        async with connected(protocol) as channel, trio.open_nursery() as nursery:
            await there_and_back(channel)
            network.partition("client", "server")

            async def heal() -> None:
                await trio.sleep(7)
                network.heal("client", "server")

            nursery.start_soon(heal)
            assert await there_and_back(channel) >= 7.0


async def test_a_partition_that_lasts_is_noticed_by_the_silence(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with lost(match="sim server"), connected("bpmux") as channel:
            network.partition()
            await channel.receive()
        assert 30 <= network.now() <= 60


async def test_a_partition_may_be_of_one_direction(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with connected("bpmux") as channel:
            await there_and_back(channel)
            network.partition("server", "client", one_way=True)
            await channel.send(b"arrives")
            with trio.move_on_after(3) as scope:
                await channel.receive()
            assert scope.cancelled_caught
            network.heal("client", "server", one_way=True)  # not the one that is partitioned
            with trio.move_on_after(3) as scope:
                await channel.receive()
            assert scope.cancelled_caught
            network.heal()
            assert await channel.receive() == b"arrives"


@pytest.mark.parametrize("protocol", SESSIONS)
async def test_a_throttled_line_is_slow_until_it_is_let_go(protocol: str, autojump_clock: MockClock) -> None:
    with SimNetwork(weather=SimWeather(delay=0.01)) as network:
        async with connected(protocol) as channel:
            assert await there_and_back(channel, bytes(20_000)) < 3.0
            network.throttle(10_000, "client", "server")
            assert await there_and_back(channel, bytes(20_000)) >= 1.9
            network.throttle(None)
            assert await there_and_back(channel, bytes(20_000)) < 3.0


async def test_what_waits_for_a_throttled_line_leaves_when_it_is_let_go(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with connected("bpmux") as channel, trio.open_nursery() as nursery:
            network.throttle(10, "client", "server")

            async def let_go() -> None:
                await trio.sleep(5)
                network.throttle(None)

            nursery.start_soon(let_go)
            assert 5.0 <= await there_and_back(channel, bytes(10_000)) < 6.0  # and not the 1000 s that it would take


@pytest.mark.parametrize("how", [Cut.RESET, Cut.END])
@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct"])
async def test_a_cut_line_is_lost_at_once(protocol: str, how: Cut, autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with lost(), connected(protocol) as channel:
            assert network.cut("server", "client", how=how) == 1
            await channel.receive()
        assert network.now() < 6.0


async def test_a_stalled_line_is_lost_after_a_silence(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with lost(), connected("bpmux") as channel:
            network.cut(how=Cut.STALL)
            await channel.receive()
        assert network.now() >= 30.0


async def test_relink_goes_on_over_another_line(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with connected("relink") as channel:
            await there_and_back(channel)
            network.cut()
            await there_and_back(channel)
        assert network.connections == 2


async def test_packets_are_lost_in_a_partition_and_sent_again_by_the_protocol(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        async with connected("e3x") as channel:
            (path,) = network.route("client", "server").packet_ways
            network.partition()
            await channel.send(b"tea")
            await trio.sleep(1)
            assert not path.under_way
            network.heal()
            assert await channel.receive() == b"tea"


# ---------------------------------------------------------------------------- hosts and names


async def test_hosts_are_named_in_the_url_or_by_the_block_or_are_those_of_the_server(autojump_clock: MockClock) -> None:
    async def relay(channel: muxkit.Channel) -> None:
        async with muxkit.connect("bpmux+sim://back") as session, session.open() as other:
            await other.send(await channel.receive())
            await channel.send(await other.receive())

    with SimNetwork() as network:
        async with muxkit.open_server(relay, "bpmux+sim://front"), muxkit.open_server(echo, "bpmux+sim://back"):
            async with muxkit.connect("bpmux+sim://alice@front") as session, session.open() as channel:
                await there_and_back(channel)
            with network.host("bob"):
                async with muxkit.connect("bpmux+sim://front") as session, session.open() as channel:
                    await there_and_back(channel)
        came = [(event.source, event.target) for event in network.log if event.what == "connected"]
    assert came == [("alice", "front"), ("front", "back"), ("bob", "front"), ("front", "back")]


async def test_without_a_network_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"sim://server: there is no simulated network .*SimNetwork"):
        async with muxkit.connect("bpmux+sim://server"):
            pass
    with pytest.raises(RuntimeError, match="fixture `weather`"):
        async with muxkit.open_server(echo, "bpmux+sim://server"):
            pass


async def test_a_name_that_no_program_serves_refuses_after_a_round_trip(autojump_clock: MockClock) -> None:
    with SimNetwork(weather=FAR) as network:
        async with muxkit.open_server(echo, "bpmux+sim://tea"):
            with pytest.raises(ConnectionRefusedError, match=r"sim coffee: connection refused .*served are: tea"):
                async with muxkit.connect("bpmux+sim://coffee"):
                    pass
        assert network.now() == pytest.approx(1.0)


async def test_a_dial_into_a_partition_gives_up(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        network.partition("client", "server")
        async with muxkit.open_server(echo, "bpmux+sim://server"):
            with pytest.raises(TimeoutError, match="no answer within 30 s"):
                async with muxkit.connect("bpmux+sim://server"):
                    pass


async def test_a_name_is_served_once_and_free_afterwards(autojump_clock: MockClock) -> None:
    with SimNetwork():
        for _ in range(2):
            async with muxkit.open_server(echo, "bpmux+sim://server"):
                with pytest.raises(OSError, match="sim server: this name is served already"):
                    async with muxkit.open_server(echo, "bpmux+sim://server"):
                        pass


async def test_there_is_one_network_at_a_time(autojump_clock: MockClock) -> None:
    with SimNetwork():
        with pytest.raises(RuntimeError, match="one at a time"), SimNetwork():
            pass
    with SimNetwork():
        pass


@pytest.mark.parametrize("address", ["", "a b", "*", "alice@", "@server", "a@b@c"])
async def test_a_name_that_is_none_is_refused(address: str, autojump_clock: MockClock) -> None:
    with SimNetwork(), pytest.raises(ValueError, match="expected the name of a host"):
        async with muxkit.connect(f"bpmux+sim://{address}"):
            pass


async def test_an_option_that_there_is_not_is_refused(autojump_clock: MockClock) -> None:
    with SimNetwork(), pytest.raises(TypeError, match="unknown option 'connect_timeut': did you mean"):
        async with muxkit.connect("bpmux+sim://server", connect_timeut=3):  # type: ignore[call-arg]  # the mistake
            pass


# ---------------------------------------------------------------------------- links


def test_a_protocol_gets_the_kind_of_link_that_it_needs() -> None:
    packets = sim_transport.for_links(frozenset({"stream", "packets"}))
    assert packets.link == "packets"
    assert sim_transport.for_links(frozenset({"stream", "multistream"})).link == "stream"


async def test_the_stream_keeps_every_promise_of_a_link(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
        arrived, served = trio.open_memory_channel[SimStream](1)

        async def handler(stream: SimStream) -> None:
            await arrived.send(stream)
            await trio.sleep_forever()

        with SimNetwork(weather=SimWeather(delay=0.001)):
            async with trio.open_nursery() as nursery:
                await nursery.start(sim_transport.serve, handler, "server")
                async with sim_transport.connect("server") as here:
                    there = await served.receive()
                    assert isinstance(here, SimStream)
                    async with there:
                        yield here, there
                nursery.cancel_scope.cancel()

    await check_link(pair, half_close=True)


async def test_the_packets_keep_every_promise_of_a_packet_link(autojump_clock: MockClock) -> None:
    transport = sim_transport.for_links(frozenset({"packets"}))

    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[SimPackets, SimPackets]]:
        arrived, served = trio.open_memory_channel[SimPackets](1)

        async def handler(link: SimPackets) -> None:
            await arrived.send(link)
            await trio.sleep_forever()

        with SimNetwork():
            async with trio.open_nursery() as nursery:
                await nursery.start(transport.serve, handler, "server")
                async with transport.connect("server") as here:
                    there = await served.receive()
                    assert isinstance(here, SimPackets)
                    async with there:
                        yield here, there
                nursery.cancel_scope.cancel()

    await check_packet_link(pair, goodbye=False)


async def test_nothing_is_kept_of_connections_that_are_over(autojump_clock: MockClock) -> None:
    with SimNetwork() as network:
        for protocol in ("bpmux", "e3x"):
            async with muxkit.open_server(echo, f"{protocol}+sim://server") as server:
                for _ in range(3):
                    async with muxkit.connect(server.url) as session, session.open() as channel:
                        await there_and_back(channel)
        for route in network.routes.values():
            assert (route.ways, route.packet_ways) == ([], [])
        assert network.cut() == 0
        assert network.connections == 6


# ---------------------------------------------------------------------------- the same seed, the same run


def story(protocol: str, seed: int) -> str:
    """Everything that happened in a run with this seed, and when."""

    async def main() -> str:
        with SimNetwork(seed, weather=BAD) as network:
            if protocol == "restream":
                async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
                    served = await nursery.start(restream.serve, "restream+sim://server", store)
                    async with restream.numbers(served.url, count=50) as numbers:
                        assert len([number async for number in numbers]) == 50
                    nursery.cancel_scope.cancel()
            else:
                async with (
                    muxkit.open_server(echo, f"{protocol}+sim://server") as server,
                    trio.open_nursery() as nursery,
                ):

                    async def talk(host: str) -> None:
                        with network.host(host):
                            async with muxkit.connect(server.url) as session, session.open() as channel:
                                for number in range(20):
                                    await there_and_back(channel, b"%d" % number * 200)

                    nursery.start_soon(talk, "alice")
                    nursery.start_soon(talk, "bob")
                    await trio.sleep(2)
                    network.partition("alice", "server")
                    await trio.sleep(2)
                    network.heal()
        return "\n".join([*map(str, network.log), network.fingerprint()])

    with determined(seed, shuffled=True):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("protocol", [*SESSIONS, "restream"])
def test_the_same_seed_gives_the_same_run_here_and_in_another_process(protocol: str) -> None:
    first = story(protocol, 5)
    assert story(protocol, 5) == first
    assert story(protocol, 6) != first
    code = f"from tests.testing.test_sim import story; print(story({protocol!r}, 5))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.rstrip("\n"), done.stderr) == (first, "")


def test_every_end_of_a_run_is_told_in_its_log() -> None:
    log = story("bpmux", 1)
    for text in ("connected  alice > server", "partition  alice > server", "heal", "closed     bob > server"):
        assert text in log
