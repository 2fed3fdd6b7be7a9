"""Packets go by every available path: other ports, trains that the kernel cuts, traces, and IPv6."""

from __future__ import annotations

import json
import random
import socket
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit_adapters import quic
from muxkit_adapters.packets import kernel
from muxkit_adapters.packets.options import PacketOptions
from muxkit_adapters.packets.sockets import PacketSocket, open_socket
from muxkit_adapters.quic.link import send_now
from muxkit_adapters.quic.options import QuicOptions

from ._links import IPV6
from ._quic import CLIENT, FILES, SERVER, Collected, on_a_line, real_pair, serving, write_all

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit_adapters.packets.options import Address


# --- another address


async def test_a_client_goes_on_from_another_port() -> None:
    async with real_pair() as (here, there):
        here.write(here.open(), b"before", True)
        got = Collected(there)
        await got.until(lambda: got.ended)
        before = here.wire
        port = before.address[1]
        quic.rebind(here)
        assert here.wire.address[1] != port
        assert before.socket.fileno() == -1
        await write_all(here, here.open(), b"after" * 10_000)
        await got.until(lambda: len(got.ended) == 2)
        assert got.streams[6] == b"after" * 10_000
        there.write(there.open(), b"answer", True)
        told = Collected(here)
        await told.until(lambda: told.ended)
        assert told.streams == {3: b"answer"}


async def test_a_server_cannot_move() -> None:
    async with real_pair() as (_, there):
        with pytest.raises(ValueError, match="only a client"):
            quic.rebind(there)


async def test_a_client_whose_address_changes_on_the_way_is_followed(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.client.write(pair.client.open(), b"before", True)
        got = Collected(pair.server)
        await got.until(lambda: got.ended)
        moved = ("198.51.100.9", 4000)
        pair.line.move(CLIENT, moved)
        pair.client.write(pair.client.open(), b"after", True)
        await got.until(lambda: len(got.ended) == 2)
        await trio.sleep(1)
        assert pair.server_quic.get_peer_address() == moved
        pair.server.write(pair.server.open(), b"found you", True)
        told = Collected(pair.client)
        await told.until(lambda: told.ended)


@pytest.mark.requirement("R-30")
async def test_somebody_who_repeats_a_packet_from_elsewhere_gets_little_and_takes_nothing_over(
    autojump_clock: MockClock,
) -> None:
    async with on_a_line() as pair:
        caught: list[bytes] = []

        def fate(data: bytes) -> list[float]:
            caught.append(data)
            return [0.01]

        pair.line.fate = fate
        pair.client.write(pair.client.open(), b"x" * 1000, True)
        got = Collected(pair.server)
        await got.until(lambda: got.ended)
        for data in caught:
            pair.server.feed((data, ("203.0.113.66", 6)))
            pair.server.finish_feeding()
        await trio.sleep(10)
        assert pair.server_quic.get_peer_address() == CLIENT


# --- sockets


def a_socket(*, peer: Address | None = None) -> PacketSocket:
    sock = open_socket(socket.AF_INET, bind=("127.0.0.1", 0), connect=peer)
    return PacketSocket(sock, PacketOptions(), refused=lambda *_: None, peer=peer)


async def received(wire: PacketSocket, count: int, *, by: PacketSocket) -> list[bytes]:
    """So many packets of one sender, in as many reads as they take."""
    got: list[bytes] = []
    while len(got) < count:
        await wire.wait_readable()
        for address, packets in wire.receive():
            assert address == by.address
            got += packets
    return got


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("receives", [True, False])
async def test_packets_of_all_sizes_arrive_as_they_were(
    sends: bool, receives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_batch = kernel.LINUX
    monkeypatch.setattr(kernel, "LINUX", receives and can_batch)
    to = a_socket()
    for peer in (None, to.address):
        monkeypatch.setattr(kernel, "LINUX", sends and can_batch)
        by = a_socket(peer=peer)
        monkeypatch.setattr(kernel, "LINUX", can_batch)
        dice = random.Random(5)
        sizes = [1200] * 100 + [dice.choice((1, 700, 1200, 1200, 1350)) for _ in range(60)] + [9000, 9000]
        packets = [dice.randbytes(size) for size in sizes]
        got: list[bytes] = []
        # More than one train each time, and no more than the kernel keeps wherever it was told nothing else.
        for start in range(0, len(packets), 60):
            part = packets[start : start + 60]
            assert send_now(by, [(data, to.address) for data in part]) == []
            got += await received(to, len(part), by=by)
        assert got == packets
        assert by.lost == 0
        by.close()
    to.close()


async def test_a_packet_that_the_kernel_refuses_counts_as_lost() -> None:
    to, by = a_socket(), a_socket()
    packets = [(b"first", to.address), (bytes(70_000), to.address), (b"last", to.address)]
    assert send_now(by, packets) == []
    assert by.lost == 1
    assert await received(to, 2, by=by) == [b"first", b"last"]
    to.close()
    by.close()


async def test_a_kernel_without_trains_gets_single_packets() -> None:
    class Old(socket.socket):
        def sendmsg(self, *args: object) -> int:
            raise OSError(5, "no trains here")

    to = a_socket()
    sock = Old(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    by = PacketSocket(sock, PacketOptions(), refused=lambda *_: None)
    assert send_now(by, [(bytes(100), to.address)] * 20) == []
    assert by.lost == 0
    assert await received(to, 20, by=by) == [bytes(100)] * 20
    to.close()
    by.close()


async def test_a_closed_socket_says_so() -> None:
    wire = a_socket()
    async with trio.open_nursery() as nursery:

        async def expect_closed() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await wire.wait_readable()

        nursery.start_soon(expect_closed)
        await trio.testing.wait_all_tasks_blocked()
        wire.close()
    wire.close()
    with pytest.raises(trio.ClosedResourceError):
        send_now(wire, [(b"x", ("127.0.0.1", 1))])
    with pytest.raises(trio.ClosedResourceError):
        await wire.wait_writable()


async def test_an_address_that_is_taken_is_named() -> None:
    wire = a_socket()
    host, port = wire.address[:2]
    with pytest.raises(OSError, match=f"quic 127.0.0.1:{port}: address already in use"):
        await quic.serve(_nothing, port, host=host, certificate=FILES.certificate, key=FILES.key)
    wire.close()


async def _nothing(link: quic.QuicLink) -> None: ...


@IPV6
async def test_ipv6() -> None:
    async with serving(host="::1") as (host, port):
        assert host == "::1"
        async with quic.connect(host, port, ca=FILES.ca) as link:
            assert link.peer == f"quic [::1]:{port}"
            quic.rebind(link)
            link.write(link.open(), b"x", True)
            await link.wait_delivered()


@pytest.mark.skipif(not kernel.LINUX, reason="the system does not tell where a packet came to")
async def test_a_server_on_all_addresses_answers_from_the_one_that_was_called() -> None:
    async with serving(host="0.0.0.0") as (_, port):
        async with quic.connect(
            "127.0.0.2", port, ca=FILES.ca, server_hostname="server.test", handshake_timeout=2
        ) as link:
            assert link.alpn is not None


async def test_larger_packets_where_the_path_takes_them() -> None:
    async with real_pair(server={"packet_size": 1400}, packet_size=1400) as (here, there):
        assert here.datagram_limit == there.datagram_limit == 1370
        here.write(here.open(), bytes(30_000), True)
        got = Collected(there)
        await got.until(lambda: got.ended)


def test_packets_below_what_quic_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="1200"):
        QuicOptions(packet_size=1199)


# --- traces


def written(folder: Path) -> dict[str, str]:
    """The traces by the names of their files."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.requirement("R-66")
async def test_each_side_writes_what_happened_and_nothing_of_what_was_said(tmp_path: Path) -> None:
    canary = b"canary" * 100
    async with real_pair(server={"qlog": tmp_path}, qlog=tmp_path) as (here, there):
        here.write(here.open(), canary, True)
        got = Collected(there)
        await got.until(lambda: got.ended)
        await here.wait_delivered()
    traces = written(tmp_path)
    assert [name.partition("_")[2] for name in traces] == ["client.sqlog", "server.sqlog"]
    assert len({name.partition("_")[0] for name in traces}) == 1
    for trace in traces.values():
        head, *events = [json.loads(line.removeprefix("\x1e")) for line in trace.rstrip("\n").split("\n")]
        assert head["qlog_format"] == "JSON-SEQ"
        names = {event["name"] for event in events}
        assert {"transport:packet_sent", "transport:packet_received", "recovery:metrics_updated"} <= names
        packets = [event["data"] for event in events if event["name"] == "transport:packet_received"]
        assert all(packet["frames"] for packet in packets if packet["header"]["packet_type"] != "retry")
        assert "canary" not in trace
        assert canary.hex() not in trace


async def test_the_environment_can_ask_for_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUXKIT_QLOGDIR", str(tmp_path))
    async with real_pair():
        pass
    assert len(written(tmp_path)) == 2


async def test_traces_need_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        async with quic.connect(*SERVER, qlog=tmp_path / "nowhere"):
            pass
