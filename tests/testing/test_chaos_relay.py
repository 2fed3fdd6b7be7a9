"""The relay does between real sockets what its plan says, and the kernel sees it as it should."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit.runtime import Backoff, Ended, redial
from muxkit.testing import ChaosPlan, ChaosRelay, Cut, CutReport, Way, chaos_relay, check_link, parse_place
from muxkit_adapters import tcp, unix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

SIZE = 300_000
DATA = random.Random(0).randbytes(SIZE)
PATIENCE = 300.0  # s; reached only when something hangs

needs_unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="has no Unix sockets")


@attrs.define
class Server:
    """What each connection brought, and how it ended."""

    sends: bytes | None = b""  # and then the end; None if it sends neither
    got: list[bytearray] = attrs.field(factory=list)
    ends: list[str] = attrs.field(factory=list)
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def handle(self, stream: trio.abc.Stream) -> None:
        got = bytearray()
        self.got.append(got)
        async with trio.open_nursery() as nursery:
            if self.sends is not None:
                nursery.start_soon(send, stream, self.sends)
            try:
                while data := await stream.receive_some():
                    got += data
                self.ends.append("end")
            except trio.BrokenResourceError:
                self.ends.append("broken")
        self.ended.set()


async def send(stream: trio.abc.Stream, data: bytes) -> None:
    assert isinstance(stream, trio.abc.HalfCloseableStream)
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)
        await stream.send_eof()


async def receive(stream: trio.abc.Stream) -> tuple[bytes, str]:
    got = bytearray()
    try:
        while data := await stream.receive_some():
            got += data
    except trio.BrokenResourceError:
        return bytes(got), "broken"
    return bytes(got), "end"


@asynccontextmanager
async def relayed(server: Server, plan: ChaosPlan, seed: int = 1) -> AsyncIterator[tuple[ChaosRelay, list[CutReport]]]:
    reports: list[CutReport] = []
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(tcp.serve, server.handle)
            async with chaos_relay(address, plan, seed, on_cut=reports.append) as relay:
                yield relay, reports
            nursery.cancel_scope.cancel()


async def test_in_fine_weather_it_is_a_link() -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
        arrived: list[trio.abc.Stream] = []
        came, over = trio.Event(), trio.Event()

        async def handle(stream: trio.abc.Stream) -> None:
            arrived.append(stream)
            came.set()
            await over.wait()

        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(tcp.serve, handle)
            async with chaos_relay(address, ChaosPlan()) as relay:
                async with tcp.connect("127.0.0.1", relay.port) as stream:
                    await came.wait()
                    yield stream, arrived[0]
                over.set()
            nursery.cancel_scope.cancel()

    await check_link(pair, half_close=True)


@needs_unix
async def test_it_listens_and_connects_on_unix_sockets_as_well(tmp_path: Path) -> None:
    server, target, listen = Server(sends=b"there"), str(tmp_path / "target"), str(tmp_path / "relay")
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(unix.serve, server.handle, target)
            async with chaos_relay(f"unix://{target}", ChaosPlan(), listen=listen) as relay:
                assert relay.address == listen
                assert stat.S_IMODE(os.stat(listen).st_mode) == 0o600
                async with unix.connect(relay.address) as stream:
                    await send(stream, b"back")
                    assert await receive(stream) == (b"there", "end")
                relay.refuse()
                with pytest.raises(ConnectionRefusedError):
                    async with unix.connect(relay.address):
                        pass
                relay.admit()
                async with unix.connect(relay.address) as stream:
                    assert await receive(stream) == (b"there", "end")
            nursery.cancel_scope.cancel()
    assert "relay" not in os.listdir(tmp_path)
    assert server.got[0] == b"back"


@needs_unix
async def test_a_file_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        async with chaos_relay("127.0.0.1:1", ChaosPlan(), listen=str(path)):
            pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize("way", [Way.THERE, Way.BACK])
@pytest.mark.parametrize("byte", [0, 1, 65_536, SIZE - 1])
async def test_an_orderly_cut_comes_behind_just_that_byte(byte: int, way: Way) -> None:
    server = Server(sends=DATA)
    async with relayed(server, ChaosPlan(cut_after=(byte, byte), cut_ways=(way,))) as (relay, reports):
        async with tcp.connect("127.0.0.1", relay.port) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(send, stream, DATA)
            got, how = await receive(stream)
        await server.ended.wait()
    assert how == "end"
    delivered = {Way.THERE: bytes(server.got[0]), Way.BACK: got}
    assert delivered[way] == DATA[:byte]
    assert DATA.startswith(delivered[Way.BACK if way is Way.THERE else Way.THERE])
    assert [(report.number, report.how, report.way) for report in reports] == [(0, Cut.END, way)]
    assert (reports[0].bytes_there if way is Way.THERE else reports[0].bytes_back) == byte


async def test_a_reset_is_a_reset_for_the_kernels_of_both_sides() -> None:
    server = Server(sends=None)
    async with relayed(server, ChaosPlan(cut_after=(1000, 1000), cut_ways=(Way.THERE,), reset=1.0)) as (relay, _):
        with socket.create_connection(("127.0.0.1", relay.port)) as plain:
            await trio.to_thread.run_sync(plain.sendall, DATA[:1000])
            with pytest.raises(ConnectionResetError):
                await trio.to_thread.run_sync(plain.recv, 1)
        await server.ended.wait()
    assert server.ends == ["broken"]
    assert len(server.got[0]) <= 1000


async def test_a_stall_delivers_nothing_and_closes_nothing() -> None:
    server = Server(sends=DATA)
    async with relayed(server, ChaosPlan()) as (relay, reports):
        async with tcp.connect("127.0.0.1", relay.port) as stream:
            first = await stream.receive_some(1)
            relay.cut_all(Cut.STALL)
            with trio.move_on_after(0.3) as scope:
                await receive(stream)
            assert scope.cancelled_caught
            assert first == DATA[:1]
            assert (server.ends, reports[0].how, relay.stats().live) == ([], Cut.STALL, 1)


async def test_a_stalled_connection_is_reset_in_the_end() -> None:
    server = Server(sends=DATA)
    async with relayed(server, ChaosPlan(stall_for=0.1)) as (relay, _):
        async with tcp.connect("127.0.0.1", relay.port) as stream:
            await stream.receive_some(1)
            relay.cut_all(Cut.STALL)
            assert (await receive(stream))[1] == "broken"


async def test_a_reset_of_one_side_is_passed_on_to_the_other() -> None:
    server = Server(sends=None)
    async with relayed(server, ChaosPlan()) as (relay, reports):
        plain = socket.create_connection(("127.0.0.1", relay.port))
        await trio.to_thread.run_sync(plain.sendall, b"x")
        while not server.got or not server.got[0]:
            await trio.testing.wait_all_tasks_blocked(0.001)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        plain.close()
        await server.ended.wait()
    assert server.ends == ["broken"]
    assert reports == []  # nothing was cut


async def test_while_it_refuses_the_kernel_says_so_and_its_port_stays_its_own() -> None:
    server = Server(sends=b"hello")
    async with relayed(server, ChaosPlan()) as (relay, _):
        port = relay.port
        async with tcp.connect("127.0.0.1", port) as stream:
            await stream.receive_some(1)
            for _ in range(20):
                relay.refuse()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                relay.admit()
                async with tcp.connect("127.0.0.1", port) as another:
                    assert await receive(another) == (b"hello", "end")
            assert await receive(stream) == (b"ello", "end")  # those who are in stay in


async def test_after_a_cut_it_refuses_for_a_while_and_then_no_more(mock_clock: MockClock) -> None:
    server = Server(sends=bytes(100))
    plan = ChaosPlan(cut_after=(10, 10), cut_ways=(Way.BACK,), refuse=1.0, refuse_for=0.2)
    async with relayed(server, plan) as (relay, _):
        async with tcp.connect("127.0.0.1", relay.port) as stream:
            assert await receive(stream) == (bytes(10), "end")
        for pause in (0.0, 0.1, 0.09):
            mock_clock.jump(pause)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ConnectionRefusedError):
                async with tcp.connect("127.0.0.1", relay.port):
                    pass
        mock_clock.jump(0.02)
        await trio.testing.wait_all_tasks_blocked()
        async with tcp.connect("127.0.0.1", relay.port):
            pass


async def test_a_target_that_is_not_there_costs_the_client_its_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with chaos_relay(f"127.0.0.1:{taken.getsockname()[1]}", ChaosPlan()) as relay:
            async with tcp.connect("127.0.0.1", relay.port) as stream:
                assert await receive(stream) == (b"", "broken")
            assert relay.stats().unreachable == 1


async def test_the_same_seed_cuts_at_the_same_bytes_whatever_the_timing() -> None:
    async def story(seed: int, piece: int) -> list[tuple[int, Cut, Way | None, int]]:
        server = Server(sends=DATA)
        async with relayed(server, ChaosPlan(cut_after=(0, SIZE - 1), reset=0.3), seed) as (relay, reports):
            for number in range(10):
                async with tcp.connect("127.0.0.1", relay.port) as stream, trio.open_nursery() as nursery:
                    nursery.start_soon(send, stream, DATA)
                    with suppress(trio.BrokenResourceError):
                        while await stream.receive_some(piece):
                            await trio.lowlevel.checkpoint()
                while len(reports) <= number:
                    await trio.testing.wait_all_tasks_blocked(0.001)
        return [
            (each.number, each.how, each.way, each.bytes_there if each.way is Way.THERE else each.bytes_back)
            for each in reports
        ]

    first = await story(3, 1000)
    assert first == await story(3, 70_000)
    assert first != await story(4, 1000)


async def test_a_slow_reader_is_felt_by_the_sender(mock_clock: MockClock) -> None:
    server = Server()
    async with relayed(server, ChaosPlan(rate=1000.0, buffer=1000)) as (relay, _):
        async with tcp.connect("127.0.0.1", relay.port) as stream:
            sent = 0

            async def send_on() -> None:
                nonlocal sent
                while sent < 64 * 1024 * 1024:
                    await stream.send_all(bytes(65_536))
                    sent += 65_536

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_on)
                for seconds in range(5):
                    await trio.testing.wait_all_tasks_blocked(0.02)
                    assert sent < 64 * 1024 * 1024
                    assert 1000 * (seconds - 1) <= relay.stats().bytes_there <= 1000 * (seconds + 1)
                    mock_clock.jump(1.0)
                nursery.cancel_scope.cancel()


async def test_at_its_end_nothing_is_left_of_it() -> None:
    server = Server(sends=None)
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, server.handle)
        async with chaos_relay(address, ChaosPlan()) as relay:
            stream = await trio.open_tcp_stream("127.0.0.1", relay.port)
            await stream.send_all(b"x")
            while not server.got or not server.got[0]:
                await trio.testing.wait_all_tasks_blocked(0.001)
        async with stream:
            assert (await receive(stream))[1] == "broken"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relay.port)).close()
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform == "win32", reason="it is the usual way there")
def test_where_a_port_cannot_be_kept_it_is_bound_again() -> None:
    # In a process of its own: the way is chosen when the module is loaded.
    program = """
import socket, trio
from muxkit.testing import ChaosPlan, chaos_relay
from muxkit.testing import _relay
_relay.CAN_KEEP_A_PORT = False
async def main():
    async with chaos_relay("127.0.0.1:1", ChaosPlan()) as relay:
        for _ in range(5):
            relay.refuse()
            try:
                socket.create_connection(("127.0.0.1", relay.port))
            except ConnectionRefusedError:
                pass
            else:
                raise SystemExit("not refused")
            relay.admit()
            await trio.testing.wait_all_tasks_blocked()
            socket.create_connection(("127.0.0.1", relay.port)).close()
import trio.testing
trio.run(main)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("tcp://localhost:0", ("localhost", 0)),
        ("[::1]:7000", ("::1", 7000)),
        ("/run/app.sock", "/run/app.sock"),
        ("./app.sock", "./app.sock"),
        ("unix://app.sock", "app.sock"),
    ],
)
def test_an_address_is_a_host_and_a_port_or_a_path(address: str, place: object) -> None:
    assert parse_place(address) == place


@pytest.mark.parametrize("address", ["", "host", "host:", ":70", "host:70000", "::1:70", "http://host:70", "unix://"])
def test_any_other_address_is_refused_with_the_form_that_is_expected(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port or the path"):
        parse_place(address)


@pytest.mark.requirement("R-51")
@pytest.mark.seeds(1, soak=20)
async def test_a_stream_resumes_over_a_thousand_cuts_without_a_gap_or_a_repeat(seed: int) -> None:
    """The client says how many bytes it has, the server sends the rest; every connection is cut at a random byte."""
    data, got, cuts = random.Random(seed).randbytes(1_000_000), bytearray(), 1000

    async def serve(stream: trio.abc.Stream) -> None:
        asked = b""
        while not asked.endswith(b"\n"):
            part = await stream.receive_some()
            if not part:
                return
            asked += part
        await stream.send_all(data[int(asked) :])
        await stream.receive_some()

    async def run(stream: trio.abc.Stream) -> Ended:
        before = len(got)
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"%d\n" % before)
            while len(got) < len(data) and (part := await stream.receive_some()):
                got.extend(part)
        if len(got) == len(data):
            return Ended.DONE
        return Ended.WORKED if len(got) > before else Ended.LOST

    plan = ChaosPlan(cut_after=(0, 1900), cut_ways=(Way.BACK,), reset=0.3)
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(tcp.serve, serve)
            async with chaos_relay(address, plan, seed) as relay:
                backoff = Backoff(first=0.001, most=0.01, random=random.Random(seed))
                await redial(lambda: tcp.connect("127.0.0.1", relay.port), run, backoff=backoff)
                assert relay.cuts > cuts
            nursery.cancel_scope.cancel()
    assert got == data
