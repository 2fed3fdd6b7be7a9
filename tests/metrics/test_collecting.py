"""The core of metrics: what is counted, for every protocol, and that nothing is done for it in engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import muxkit
from muxkit._observer import facts_of, frames_of
from muxkit.metrics import Family, Histogram, Metrics
from muxkit.protocols import bpmux, restream
from muxkit.testing import SimNetwork
from muxkit.trace import FOLDER

Handler = Callable[[Any], Awaitable[None]]  # of sessions or of channels
PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]


@pytest.fixture
async def network() -> AsyncIterator[SimNetwork]:  # async, since a network belongs to one run of Trio
    with SimNetwork(seed=21) as network:
        yield network


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def value(metrics: Metrics, name: str, *labels: str) -> float:
    """The sum over all samples of a metric whose labels hold these."""
    [family] = [family for family in metrics.collect() if family.metric.name == f"muxkit_{name}"]
    found = [value for key, value in family.values.items() if set(labels) <= set(key)]
    return sum(sum(each.counts) if isinstance(each, Histogram) else each for each in found)


@asynccontextmanager
async def watched(
    protocol: str, handler: Handler = echo, **options: Any
) -> AsyncIterator[tuple[muxkit.Session, Metrics, Metrics]]:
    """A session over a simulated network, with the metrics of its client and of its server."""
    ours, theirs = Metrics(), Metrics()
    async with muxkit.open_server(handler, f"{protocol}+sim://server", observer=theirs, **options) as server:
        async with muxkit.connect(server.url, observer=ours) as session:
            yield session, ours, theirs


@asynccontextmanager
async def lost() -> AsyncIterator[None]:
    with pytest.raises(muxkit.LinkLost):
        yield


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_both_ends_count_the_same_messages(protocol: str, network: SimNetwork, autojump_clock: MockClock) -> None:
    async with watched(protocol) as (session, ours, theirs), session.open() as channel:
        await channel.send(b"first")  # some protocols open a channel by a message
        await channel.receive()
        sent, received = value(ours, "messages", "out"), value(theirs, "messages", "in")
        for _ in range(10):
            await channel.send(b"tea")
            await channel.receive()
        assert value(ours, "messages", protocol, "sim", "out") == sent + 10
        assert value(theirs, "messages", protocol, "sim", "in") == received + 10
        assert value(ours, "sessions") == value(theirs, "sessions") == 1
        assert value(ours, "channels") >= 1
        assert value(theirs, "transport_bytes", "in") >= 30


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_counters_do_not_fall_when_a_session_ends(
    protocol: str, network: SimNetwork, autojump_clock: MockClock
) -> None:
    async with watched(protocol) as (session, ours, theirs):
        async with session.open() as channel:
            await channel.send(b"tea")
            await channel.receive()
        before = [value(ours, name) for name in ("messages", "transport_bytes", "sessions_opened")]
    after = [value(ours, name) for name in ("messages", "transport_bytes", "sessions_opened")]
    assert all(late >= early > 0 for early, late in zip(before, after, strict=True))
    assert value(ours, "sessions") == value(theirs, "sessions") == 0
    assert value(ours, "sessions_ended", "in_order") == value(theirs, "sessions_ended", "in_order") == 1


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "e3x", "yamux"])
async def test_pings_are_a_histogram(protocol: str, network: SimNetwork, autojump_clock: MockClock) -> None:
    network.delay(0.1)
    async with watched(protocol) as (session, ours, _):
        for _ in range(3):
            await session.ping()
        [family] = [each for each in ours.collect() if each.metric.name == "muxkit_round_trip_seconds"]
        [histogram] = family.values.values()
        assert isinstance(histogram, Histogram)
        classes = dict(zip(histogram.bounds, histogram.counts, strict=False))
        assert classes[0.25] >= 3
        assert sum(histogram.counts) == classes[0.25]


async def test_a_wait_for_credit_counts_while_it_lasts(network: SimNetwork, autojump_clock: MockClock) -> None:
    async def reads_nothing(channel: muxkit.Channel) -> None:
        await trio.sleep_forever()

    async with watched("bpmux", reads_nothing) as (session, ours, _), session.open() as channel:
        async with trio.open_nursery() as nursery:

            async def fill() -> None:
                while True:
                    await channel.send(bytes(16 * 1024))

            nursery.start_soon(fill)
            await trio.sleep(10)
            first = value(ours, "send_blocked_seconds", "credit")
            assert value(ours, "senders_waiting", "credit") == 1
            await trio.sleep(5)
            assert value(ours, "send_blocked_seconds", "credit") == pytest.approx(first + 5)
            nursery.cancel_scope.cancel()
        assert value(ours, "senders_waiting") == 0
        assert value(ours, "send_blocked_seconds", "credit") == pytest.approx(first + 5)
        assert value(ours, "send_waits", "transport") == 0
        channel.abort()


class _SlowSending(trio.abc.SendStream):
    """Takes a second for each write."""

    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.sleep(1)
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def test_a_wait_for_the_transport_is_told_from_one_for_credit(autojump_clock: MockClock) -> None:
    ours = Metrics()
    left, right = trio.testing.memory_stream_pair()
    slow = trio.StapledStream(_SlowSending(left.send_stream), left.receive_stream)
    async with bpmux.session(slow, observer=ours, limits=muxkit.Limits(outbox=1024)) as session:
        async with bpmux.session(right) as other, trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_channel(echo), other)
            async with session.open() as channel:
                await channel.send(b"first")  # waits until the peer has given credit
                await channel.receive()
                credit = value(ours, "send_waits", "credit")
                for _ in range(4):
                    await channel.send(bytes(1000))
            nursery.cancel_scope.cancel()
    assert value(ours, "send_blocked_seconds", "transport") >= 1
    assert value(ours, "send_waits", "credit") == credit


async def test_the_limit_that_a_peer_reached_is_counted_by_its_name(
    network: SimNetwork, autojump_clock: MockClock
) -> None:
    theirs = Metrics()
    limits = muxkit.Limits(message=1024, reassembly=4096)
    async with muxkit.open_server(echo, "bpmux+sim://server", observer=theirs, limits=limits) as server:
        async with lost():
            async with muxkit.connect(server.url) as session, session.open() as channel:
                await channel.send(bytes(2048))
                await channel.receive()
    assert value(theirs, "limits_reached", "message", "bpmux", "sim") == 1


@pytest.mark.parametrize("protocol", ["bpmux", "e3x"])
async def test_a_refused_channel_counts_as_a_limit(
    protocol: str, network: SimNetwork, autojump_clock: MockClock
) -> None:
    async def takes_nothing(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    limits = muxkit.Limits(backlog=2)
    with suppress(muxkit.LinkLost):  # where the peer has to take what was sent
        async with watched(protocol, takes_nothing, limits=limits) as (session, _, theirs):
            for _ in range(3):
                channel = await session.open()
                with suppress(muxkit.ChannelStopped):
                    await channel.send(b"tea")
            await trio.sleep(1)
            assert value(theirs, "limits_reached", "backlog") >= 1  # e3x sends an opening again
            for each in session.channels():
                each.abort()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_channels_that_are_refused_for_their_headers_are_counted(
    protocol: str, network: SimNetwork, autojump_clock: MockClock
) -> None:
    async with watched(protocol, limits=muxkit.Limits(headers=100)) as (session, _, theirs):
        channel = await session.open("prices", headers={"key": "x" * 200})
        with pytest.raises((muxkit.ChannelCancelled, muxkit.ChannelStopped)):
            await channel.receive()
        assert value(theirs, "limits_reached", "headers") >= 1  # e3x sends an opening again


async def test_a_connection_that_a_listener_let_go_counts() -> None:
    class Waited(Metrics):
        def turned_away(self, limit: str, protocol: str, transport: str) -> None:
            super().turned_away(limit, protocol, transport)
            if value(self, "limits_reached", "half_open", "relink", "tcp") == 2:
                enough.set()

    theirs, enough = Waited(), trio.Event()
    limits = muxkit.Limits(half_open=1)
    async with muxkit.open_server(echo, "relink+tcp://127.0.0.1:0/jobs", observer=theirs, limits=limits) as server:
        place = server.url.partition("://")[2].partition("/")[0]
        streams = [await trio.open_tcp_stream("127.0.0.1", int(place.rpartition(":")[2])) for _ in range(3)]
        await enough.wait()
        for stream in streams:
            await stream.aclose()


async def test_cuts_of_a_link_are_outages_and_resumptions(network: SimNetwork, autojump_clock: MockClock) -> None:
    network.delay(0.1)
    async with watched("relink") as (session, ours, _), session.open() as channel:
        for number in range(3):
            await channel.send(b"%d" % number)
            assert await channel.receive() == b"%d" % number
            network.cut()
        await channel.send(b"last")
        assert await channel.receive() == b"last"
        assert value(ours, "outages", "relink", "sim") == 3
        assert value(ours, "resumptions", "relink", "sim") == 3
        assert value(ours, "outage_seconds") > 0
    assert value(ours, "sessions_ended", "in_order") == 1


async def test_a_session_whose_network_broke_ends_as_lost(network: SimNetwork, autojump_clock: MockClock) -> None:
    async with lost():
        async with watched("bpmux") as (session, ours, theirs), session.open() as channel:
            await channel.send(b"tea")
            await channel.receive()
            network.cut()
            await channel.receive()
    assert value(ours, "sessions_ended", "lost") == value(theirs, "sessions_ended", "lost") == 1


async def test_sessions_that_are_opened_again_are_counted(network: SimNetwork, autojump_clock: MockClock) -> None:
    ours = Metrics()
    async with muxkit.open_server(echo, "bpmux+sim://server") as server:
        left = 3
        async with muxkit.reconnecting(server.url, observer=ours) as sessions:
            async for session in sessions:
                try:
                    async with session.open() as channel:
                        await channel.send(b"tea")
                        await channel.receive()
                        left -= 1
                        if not left:
                            break
                        await trio.sleep(10)
                        network.cut()
                        await channel.receive()
                except muxkit.LinkLost:
                    continue
    assert value(ours, "reconnections", "bpmux", "sim") == 2
    assert value(ours, "sessions_opened") == 3


async def test_restream_counts_its_connections(network: SimNetwork, autojump_clock: MockClock) -> None:
    ours, theirs = Metrics(), Metrics()
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(
            partial(restream.serve, "restream+sim://server", store, pace=100.0, observer=theirs)
        )
        async with restream.numbers(served.url, count=50, observer=ours) as reader:
            count = 0
            async for _ in reader:
                count += 1
                if count == 20:
                    network.cut()
        assert value(ours, "messages", "restream", "sim", "in") == 50
        assert value(ours, "outages") == value(ours, "resumptions") == 1
        await trio.sleep(10)
        assert value(theirs, "sessions_opened", "restream", "sim") == 2
        assert value(theirs, "messages", "out") >= 50
        nursery.cancel_scope.cancel()


async def test_peers_are_labels_only_when_asked_for_and_then_so_many() -> None:
    family: Family | None = None
    for label_peers, expected in ((0, 1), (2, 3)):
        metrics = Metrics(label_peers=label_peers)
        for number in range(5):
            meter = metrics.connection()
            session = _Fixed(peer=f"tcp 10.0.0.{number}:{7000 + number}")
            meter.session_began(session)
            meter.session_ended(session, None)
        [family] = [each for each in metrics.collect() if each.metric.name == "muxkit_sessions_opened"]
        assert len(family.values) == expected
        assert sum(each for each in family.values.values() if not isinstance(each, Histogram)) == 5
    assert family is not None
    assert ("bpmux", "tcp", "other") in family.values


class _Fixed:
    """A session with the counters of one that did nothing."""

    def __init__(self, peer: str) -> None:
        self.info = muxkit.SessionInfo(protocol="bpmux", transport="tcp", peer=peer)

    def stats(self) -> muxkit.SessionStats:
        return muxkit.SessionStats(
            bytes_received=0, bytes_sent=0, messages_received=0, messages_sent=0, channels=0, queued=0, round_trip=None
        )


def test_engines_are_not_told_of_an_observer_that_wants_no_frames() -> None:
    assert frames_of(Metrics()) is None
    assert frames_of(muxkit.BaseObserver()) is not None
    assert facts_of(None) is None


async def test_one_object_counts_several_sessions_that_were_opened_without_a_url() -> None:
    metrics = Metrics()
    left, right = trio.testing.memory_stream_pair()
    async with bpmux.session(left, observer=metrics), bpmux.session(right, observer=metrics) as session:
        async with session.open() as channel:
            await channel.send(b"tea")
        await wait_all_tasks_blocked()
        assert value(metrics, "sessions_opened", "bpmux") == 2


async def test_a_trace_beside_metrics_takes_nothing_from_them(
    network: SimNetwork, autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with watched("bpmux") as (session, ours, theirs), session.open() as channel:
        await channel.send(b"tea")
        await channel.receive()
        await session.ping()
        assert value(ours, "messages", "out") == value(theirs, "messages", "in") == 1
        assert value(ours, "round_trip_seconds") >= 1
    assert len([*await trio.Path(tmp_path).iterdir()]) == 2


async def test_metrics_can_be_collected_by_another_thread(network: SimNetwork, autojump_clock: MockClock) -> None:
    async with watched("bpmux") as (session, ours, _), session.open() as channel:
        await channel.send(b"tea")
        await channel.receive()
        families = await trio.to_thread.run_sync(ours.collect)
        assert {family.metric.name: family for family in families}["muxkit_sessions"].values == {("bpmux", "sim"): 1}


@pytest.mark.parametrize("bounds", [(), (1.0, 0.5), (1.0, 1.0)])
def test_bounds_that_do_not_ascend_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Metrics(round_trips=bounds)
