"""The cost of the QUIC adapter by itself: bulk and small exchanges, beside aioquic on asyncio.

    python tests/bench/quic_adapter.py [--size MIB] [--turns N] [--packet BYTES] [--only muxkit|aioquic]

Each side is a process of its own; both peers use the same certificate, packet size and streams in one direction.
CPU is of both processes, user and system, per MiB or per turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import trio
import trustme
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent, StreamDataReceived

from muxkit import Limits
from muxkit.runtime import StreamData
from muxkit_adapters import quic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BLOCK = 64 * 1024
ALPN = "bench"
WINDOW = 1024 * 1024
LIMITS = Limits(channel_first=WINDOW)
UNSENT_MOST = 1024 * 1024


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# A stream that ends with "?" wants itself as the answer, "cpu" the time of the processor, any other its length.


def answer_to(received: bytearray) -> bytes:
    if received == b"cpu":
        return repr(cpu()).encode()
    return bytes(received) if received[-1:] == b"?" else str(len(received)).encode()


# --- ours


async def muxkit_server(certificate: str, packet: int) -> None:
    async def handle(link: quic.QuicLink) -> None:
        streams: dict[int, bytearray] = {}
        while arrivals := await link.receive():
            for arrival in arrivals:
                if not isinstance(arrival, StreamData):
                    continue
                received = streams.setdefault(arrival.stream, bytearray())
                received += arrival.data
                link.consumed(arrival.stream, len(arrival.data))
                if arrival.is_last:
                    link.write(link.open(), answer_to(streams.pop(arrival.stream)), True)

    async with trio.open_nursery() as nursery:

        async def start(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await quic.serve(
                handle,
                certificate=certificate,
                alpn=[ALPN],
                limits=LIMITS,
                packet_size=packet,
                retry=False,
                task_status=task_status,
            )

        addresses = await nursery.start(start)
        print(addresses[0], flush=True)


class Ours:
    def __init__(self, link: quic.QuicLink) -> None:
        self._link = link
        self._answers: dict[int, bytearray] = {}

    async def exchange(self, blocks: list[bytes]) -> bytes:
        link = self._link
        while not link.may_open():
            await link.wait_writable()
        stream = link.open()
        for number, block in enumerate(blocks, 1):
            view, is_last = block, number == len(blocks)
            while True:
                room = link.room(stream)
                part, view = view[:room], view[room:]
                link.write(stream, part, is_last and not view)
                if not view:
                    break
                if not room:
                    await link.wait_writable()
            await trio.lowlevel.checkpoint()
        return await self._answer()

    async def _answer(self) -> bytes:
        while True:
            for arrival in await self._link.receive():
                if isinstance(arrival, StreamData):
                    received = self._answers.setdefault(arrival.stream, bytearray())
                    received += arrival.data
                    self._link.consumed(arrival.stream, len(arrival.data))
                    if arrival.is_last:
                        return bytes(self._answers.pop(arrival.stream))


async def muxkit_client(address: str, authority: str, packet: int, play: Callable[..., Awaitable[None]]) -> None:
    host, _, port = address.rpartition(":")
    async with quic.connect(host, int(port), ca=authority, alpn=[ALPN], limits=LIMITS, packet_size=packet) as link:
        await play(Ours(link).exchange)


# --- aioquic


def configuration(packet: int, *, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        max_data=64 * WINDOW,
        max_stream_data=WINDOW,
        max_datagram_size=packet,
        idle_timeout=600,
    )


class Theirs(QuicConnectionProtocol):
    """aioquic has no bound on what waits to be sent, so `exchange` looks at its buffer."""

    streams: dict[int, bytearray]
    answered: asyncio.Future[bytes] | None = None

    def quic_event_received(self, event: QuicEvent) -> None:
        if not isinstance(event, StreamDataReceived):
            return
        streams = self.__dict__.setdefault("streams", {})
        received = streams.setdefault(event.stream_id, bytearray())
        received += event.data
        if event.end_stream:
            del streams[event.stream_id]
            if self._quic.configuration.is_client:
                assert self.answered is not None
                self.answered.set_result(bytes(received))
            else:
                stream = self._quic.get_next_available_stream_id(is_unidirectional=True)
                self._quic.send_stream_data(stream, answer_to(received), end_stream=True)

    async def exchange(self, blocks: list[bytes]) -> bytes:
        self.answered = asyncio.get_running_loop().create_future()
        stream = self._quic.get_next_available_stream_id(is_unidirectional=True)
        for number, block in enumerate(blocks, 1):
            self._quic.send_stream_data(stream, block, end_stream=number == len(blocks))
            self.transmit()
            sender = self._quic._streams[stream].sender
            while len(sender._buffer) > UNSENT_MOST:  # noqa: ASYNC110 - aioquic has no event for it
                await asyncio.sleep(0.0005)
        return await self.answered


async def aioquic_server(certificate: str, packet: int) -> None:
    served = configuration(packet, is_client=False)
    served.load_cert_chain(certificate, certificate)
    server = await serve("127.0.0.1", 0, configuration=served, create_protocol=Theirs)
    transport = server._transport
    assert transport is not None
    print(f"127.0.0.1:{transport.get_extra_info('sockname')[1]}", flush=True)
    await asyncio.sleep(3600)


async def aioquic_client(address: str, packet: int, play: Callable[..., Awaitable[None]]) -> None:
    host, _, port = address.rpartition(":")
    used = configuration(packet, is_client=True)
    used.verify_mode = ssl.CERT_NONE
    async with connect(host, int(port), configuration=used, create_protocol=Theirs) as protocol:
        assert isinstance(protocol, Theirs)
        await play(protocol.exchange)


# --- the jobs


def jobs(name: str, mib: int, turns: int) -> Callable[[Callable[[list[bytes]], Awaitable[bytes]]], Awaitable[None]]:
    async def play(exchange: Callable[[list[bytes]], Awaitable[bytes]]) -> None:
        async def both_cpus() -> float:
            return cpu() + float(await exchange([b"cpu"]))

        await exchange([b"warm"])
        blocks = [bytes(BLOCK)] * (mib * 1024 * 1024 // BLOCK)
        used, began = await both_cpus(), perf_counter()
        assert await exchange(blocks) == str(mib * 1024 * 1024).encode()
        took, used = perf_counter() - began, await both_cpus() - used
        print(f"{name:10} bulk   {mib / took:8.1f} MiB/s   {1e3 * used / mib:8.1f} ms CPU/MiB", flush=True)
        used, began, times = await both_cpus(), perf_counter(), []
        for _ in range(turns):
            at = perf_counter()
            assert await exchange([b"ping?"]) == b"ping?"
            times.append(perf_counter() - at)
        took, used = perf_counter() - began, await both_cpus() - used
        median = sorted(times)[turns // 2]
        print(
            f"{name:10} small  {turns / took:8.0f} turns/s {1e6 * used / turns:8.0f} us CPU/turn "
            f"{1e6 * median:6.0f} us median",
            flush=True,
        )

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--packet", type=int, default=1200)
    parser.add_argument("--only", choices=["muxkit", "aioquic"])
    parser.add_argument("--serve", choices=["muxkit", "aioquic"], help=argparse.SUPPRESS)
    parser.add_argument("--certificate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "muxkit":
        trio.run(muxkit_server, options.certificate, options.packet)
    elif options.serve == "aioquic":
        asyncio.run(aioquic_server(options.certificate, options.packet))
    else:
        with tempfile.TemporaryDirectory() as folder:
            play_all(options, Path(folder))


def play_all(options: argparse.Namespace, folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = folder / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    for name in [options.only] if options.only else ["muxkit", "aioquic"]:
        command = [sys.executable, __file__, "--serve", name, "--certificate", os.fspath(certificate)]
        command += ["--packet", str(options.packet)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = server.stdout.readline().strip()
                play = jobs(name, options.size, options.turns)
                if name == "muxkit":
                    trio.run(muxkit_client, address, os.fspath(folder / "ca.pem"), options.packet, play)
                else:
                    asyncio.run(aioquic_client(address, options.packet, play))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
