"""The relay of packets: over real sockets, and what its lines do to each packet."""

from __future__ import annotations

import pytest
import trio

from muxkit.testing import ChaosPlan, chaos_packet_relay
from muxkit.testing._packet_relay import PacketStats, _Way


async def echo(sock: trio.socket.SocketType, clients: set[object]) -> None:
    while True:
        packet, client = await sock.recvfrom(65_535)
        clients.add(client)
        await sock.sendto(packet, client)


async def bound(port: int = 0) -> trio.socket.SocketType:
    sock = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", port))
    return sock


async def test_packets_pass_both_ways_and_each_client_is_another_one_to_the_target() -> None:
    clients = set[object]()
    with await bound() as target:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, target, clients)
            address = f"udp://127.0.0.1:{target.getsockname()[1]}"
            async with chaos_packet_relay(address, ChaosPlan(delay=0.001)) as relay:
                with await bound() as one, await bound() as other:
                    for client in (one, other):
                        for size in (0, 1, 1400):
                            await client.sendto(bytes(size), ("127.0.0.1", relay.port))
                            assert await client.recv(65_535) == bytes(size)
                stats = relay.stats()
            nursery.cancel_scope.cancel()
    assert len(clients) == stats.clients == 2
    assert (stats.packets_there, stats.packets_back, stats.bytes_back) == (6, 6, 2 * 1401)


async def test_a_target_that_comes_later_gets_what_is_sent_from_then_on() -> None:
    with await bound() as spare:
        port = spare.getsockname()[1]
    with await bound() as client:
        async with chaos_packet_relay(f"127.0.0.1:{port}", ChaosPlan()) as relay:
            for _ in range(10):
                await client.sendto(b"early", ("127.0.0.1", relay.port))
            with await bound(port) as target:
                for _ in range(2):  # the first may still meet the news that nobody was there
                    await client.sendto(b"late", ("127.0.0.1", relay.port))
                while await target.recv(100) != b"late":
                    pass


async def test_a_plan_that_cuts_connections_is_refused() -> None:
    with pytest.raises(ValueError, match="packets have no connection"):
        async with chaos_packet_relay("127.0.0.1:1", ChaosPlan(cut_after=(0, 1))):
            pass


@pytest.mark.parametrize("address", ["udp:///run/app.sock", "tcp:/x", "127.0.0.1"])
async def test_an_address_that_is_no_place_of_packets_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        async with chaos_packet_relay(address, ChaosPlan()):
            pass


# --- lines


def fates(plan: ChaosPlan, seed: str, *, count: int = 400) -> list[float | None]:
    way, stats = _Way(plan, seed), PacketStats()
    return [way.arrival(1000, 0.0, stats) for _ in range(count)]


def test_what_is_lost_depends_on_the_seed_alone() -> None:
    plan = ChaosPlan(loss=0.1, delay=0.04)
    assert fates(plan, "1") == fates(plan, "1") != fates(plan, "2")
    assert 20 <= fates(plan, "1").count(None) <= 60


def test_each_packet_leaves_at_the_rate_of_the_line_and_arrives_later() -> None:
    arrivals = fates(ChaosPlan(delay=0.04, rate=1e6), "1", count=3)
    assert arrivals == pytest.approx([0.041, 0.042, 0.043])


def test_packets_that_meet_a_full_queue_are_lost() -> None:
    way, stats = _Way(ChaosPlan(rate=1e6, buffer=5000), "1"), PacketStats()
    assert [way.arrival(1000, 0.0, stats) is None for _ in range(7)] == [False] * 5 + [True] * 2
    assert (stats.overflowed, stats.lost) == (2, 0)


def test_with_jitter_packets_overtake_each_other() -> None:
    arrivals = [arrival for arrival in fates(ChaosPlan(delay=0.04, jitter=0.02), "1") if arrival is not None]
    assert arrivals != sorted(arrivals)
    assert all(0.04 <= arrival <= 0.06 for arrival in arrivals)
