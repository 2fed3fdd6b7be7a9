"""QUIC over a long line: one upload and a keystroke through Aqueduct, and through aioquic alone, over the same relay.

    python -m tests.bench.quic_line [--rtt 0.08] [--rate 1gbit] [--loss 0] [--seconds 5] [--rounds 3]

The server of each side is a process of its own, and so is each client. `muxkit chaos` relays the packets between them.
Aqueduct uses its default options. aioquic uses its asyncio API, its own congestion control, the same certificate and
packet size, and windows that are never full. Each round runs both sides in turn, in an order that is shuffled.

The client sends blocks of 64 KiB on one stream for the given time. The server counts the bytes that arrive in the
second half of that time. Beside the upload the client sends 64 bytes on another stream again and again, and waits for
their echo. Processor time is that of the client and of the server together, user and system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, get_args

import trio
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent, StreamDataReceived

import muxkit
from tests.bench.aqueduct_quic import certified

if TYPE_CHECKING:
    from collections.abc import Sequence

Name = Literal["aqueduct", "aioquic"]
NAMES: Final[tuple[Name, ...]] = get_args(Name)
MIB: Final = 1024 * 1024
BLOCK: Final = 64 * 1024  # bytes
KEYSTROKE: Final = 64  # bytes
PAUSE: Final = 0.05  # s between two keystrokes
IDLE: Final = 5  # keystrokes before the upload
WINDOW: Final = 256 * MIB  # of aioquic's streams and connection, so that it never limits the upload
UNSENT: Final = 16 * MIB  # bytes that aioquic's client keeps in its buffer; a 1 Gbit/s line holds 10 MiB in 80 ms
LOOK: Final = 0.001  # s between two looks at that buffer, since aioquic has no event for it
ALPN: Final = "line"


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Counter:
    """Counts the bytes that arrive in the second half of an upload."""

    def __init__(self, seconds: float, now: float) -> None:
        self._from = self._last = now + seconds / 2
        self._counted = 0

    def add(self, size: int, now: float) -> None:
        if now >= self._from:
            self._counted += size
            self._last = now

    def receipt(self) -> bytes:
        """Return what the client wants to know, as JSON: bytes per second, and processor time."""
        took = self._last - self._from
        return json.dumps([self._counted / took if took > 0 else 0.0, processor_time()]).encode()


# --- Aqueduct


async def _handle(channel: muxkit.Channel) -> None:
    if channel.name == "echo":
        async for message in channel:
            await channel.send(message)
        return
    counter = Counter(float(await channel.receive()), trio.current_time())
    async for message in channel:
        counter.add(len(message), trio.current_time())
    await channel.send(counter.receipt())


async def aqueduct_server(certificate: str) -> None:
    url = "aqueduct+quic://127.0.0.1:0"
    async with muxkit.open_server(muxkit.each_channel(_handle), url, certificate=certificate) as server:
        print(server.url.rpartition("/")[2], flush=True)
        await trio.sleep_forever()


async def aqueduct_client(address: str, authority: str, seconds: float) -> dict[str, float]:
    idle: list[float] = []
    beside: list[float] = []

    async def type_on(session: muxkit.Session, times: list[float], count: float) -> None:
        async with session.open("echo") as channel:
            while len(times) < count:
                began = trio.current_time()
                await channel.send(bytes(KEYSTROKE))
                await channel.receive()
                times.append(trio.current_time() - began)
                await trio.sleep(PAUSE)

    async with muxkit.connect(f"aqueduct+quic://{address}", ca=authority) as session:
        await type_on(session, idle, IDLE)
        used = processor_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(type_on, session, beside, 1e9)
            block = bytes(BLOCK)
            async with session.open("bulk") as channel:
                await channel.send(str(seconds).encode())
                until = trio.current_time() + seconds
                while trio.current_time() < until:
                    await channel.send(block)
                await channel.finish()
                receipt = await channel.receive()
            nursery.cancel_scope.cancel()
        return _found(receipt, processor_time() - used, idle, beside)


# --- aioquic


def _configuration(*, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client, alpn_protocols=[ALPN], max_data=WINDOW, max_stream_data=WINDOW, idle_timeout=60
    )


class _Serving(QuicConnectionProtocol):
    """Answers each stream that begins with a number with what it counted, and sends everything else back."""

    def quic_event_received(self, event: QuicEvent) -> None:
        if not isinstance(event, StreamDataReceived):
            return
        counters: dict[int, Counter] = self.__dict__.setdefault("counters", {})
        counter, now = counters.get(event.stream_id), self._loop.time()
        if counter is not None:
            counter.add(len(event.data), now)
            if event.end_stream:
                self._quic.send_stream_data(event.stream_id, counter.receipt(), end_stream=True)
        elif event.data[:1].isdigit():
            counters[event.stream_id] = Counter(float(event.data.partition(b"\n")[0]), now)
        else:
            self._quic.send_stream_data(event.stream_id, event.data)


async def aioquic_server(certificate: str) -> None:
    served = _configuration(is_client=False)
    served.load_cert_chain(certificate, certificate)
    server = await serve("127.0.0.1", 0, configuration=served, create_protocol=_Serving, retry=True)
    transport = server._transport
    assert transport is not None
    print(f"127.0.0.1:{transport.get_extra_info('sockname')[1]}", flush=True)
    await asyncio.sleep(3600)


class _Calling(QuicConnectionProtocol):
    """Completes a future for what comes back on each stream."""

    def expect(self, stream: int) -> asyncio.Future[bytes]:
        waiting: dict[int, asyncio.Future[bytes]] = self.__dict__.setdefault("waiting", {})
        waiting[stream] = asyncio.get_running_loop().create_future()
        return waiting[stream]

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived) and event.data:
            self.__dict__["waiting"].pop(event.stream_id).set_result(event.data)


async def aioquic_client(address: str, seconds: float) -> dict[str, float]:
    host, _, port = address.rpartition(":")
    used_configuration = _configuration(is_client=True)
    used_configuration.verify_mode = ssl.CERT_NONE
    idle: list[float] = []
    beside: list[float] = []
    loop = asyncio.get_running_loop()
    async with connect(host, int(port), configuration=used_configuration, create_protocol=_Calling) as protocol:
        assert isinstance(protocol, _Calling)
        quic = protocol._quic

        async def type_on(times: list[float], count: float) -> None:
            stream = quic.get_next_available_stream_id()
            while len(times) < count:
                began = loop.time()
                answer = protocol.expect(stream)
                quic.send_stream_data(stream, bytes(KEYSTROKE))
                protocol.transmit()
                await answer
                times.append(loop.time() - began)
                await asyncio.sleep(PAUSE)

        await type_on(idle, IDLE)
        used = processor_time()
        typing = asyncio.create_task(type_on(beside, 1e9))
        block = bytes(BLOCK)
        stream = quic.get_next_available_stream_id()
        answer = protocol.expect(stream)
        quic.send_stream_data(stream, f"{seconds}\n".encode())
        protocol.transmit()
        until = loop.time() + seconds
        while loop.time() < until:
            quic.send_stream_data(stream, block)
            protocol.transmit()
            await asyncio.sleep(0)
            while len(quic._streams[stream].sender._buffer) > UNSENT:  # noqa: ASYNC110 - aioquic has no event for it
                await asyncio.sleep(LOOK)
        quic.send_stream_data(stream, b"", end_stream=True)
        protocol.transmit()
        receipt = await answer
        typing.cancel()
        return _found(receipt, processor_time() - used, idle, beside)


# --- the processes


def _found(receipt: bytes, used: float, idle: Sequence[float], beside: Sequence[float]) -> dict[str, float]:
    rate, used_there = json.loads(receipt)
    return {"rate": rate, "client": used, "server": used_there, "idle": median(idle), "beside": median(beside)}


def play(name: Name, address: str, authority: str, seconds: float) -> None:
    if name == "aqueduct":
        found = trio.run(aqueduct_client, address, authority, seconds)
    else:
        found = asyncio.run(aioquic_client(address, seconds))
    print(json.dumps(found), flush=True)


def started(stack: ExitStack, *arguments: str) -> str:
    """Start a process that ends with `stack`, and return the first line that it prints."""
    process = stack.enter_context(subprocess.Popen([sys.executable, "-m", *arguments], stdout=-1, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def one_pass(name: Name, options: argparse.Namespace, certificate: str, authority: str) -> dict[str, float]:
    this = "tests.bench.quic_line"
    with ExitStack() as stack:
        server = started(stack, this, "--serve", name, "--certificate", certificate)
        weather = ["--delay", str(options.rtt / 2), "--loss", str(options.loss), "--seed", "1"]
        if options.rate:
            weather += ["--rate", options.rate]
        listening = started(stack, "muxkit", "chaos", "udp://127.0.0.1:0", f"udp://{server}", *weather)
        relay = listening.split()[2]
        assert "127.0.0.1:" in relay, listening
        found = started(
            stack, this, "--play", name, "--address", relay, "--authority", authority, "--seconds", str(options.seconds)
        )
        result: dict[str, float] = json.loads(found)
        return result


def play_all(options: argparse.Namespace, folder: Path) -> None:
    certificate, authority = certified(folder)
    passes: dict[Name, list[dict[str, float]]] = {name: [] for name in NAMES}
    names: tuple[Name, ...] = (options.only,) if options.only else NAMES
    dice = random.Random(1)
    print(f"load {os.getloadavg()[0]:.1f}, {time.strftime('%H:%M:%S')}", flush=True)
    print(f"{'':10}{'MiB/s':>8}{'ms CPU/MiB, client':>20}{'server':>8}{'keystroke ms, idle':>20}{'beside':>8}")
    for _ in range(options.rounds):
        for name in dice.sample(names, len(names)):
            passes[name].append(one_pass(name, options, certificate, authority))
            show(name, [passes[name][-1]], options.seconds)
    print("medians", flush=True)
    for name in names:
        show(name, passes[name], options.seconds)
    if len(names) > 1:
        ratios = [
            ours["rate"] / theirs["rate"] for ours, theirs in zip(passes["aqueduct"], passes["aioquic"], strict=True)
        ]
        print(f"aqueduct carries {median(ratios):.2f} of aioquic ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"load {os.getloadavg()[0]:.1f}")


def show(name: Name, passes: Sequence[dict[str, float]], seconds: float) -> None:
    def of(field: str) -> float:
        return median(one[field] for one in passes)

    carried = of("rate") * seconds / MIB  # about, since the first half of the time is slower
    print(
        f"{name:10}{of('rate') / MIB:8.1f}{1e3 * of('client') / carried:20.1f}{1e3 * of('server') / carried:8.1f}"
        f"{1e3 * of('idle'):20.1f}{1e3 * of('beside'):8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt", type=float, default=0.08)
    parser.add_argument("--rate", default="1gbit", help="bytes per second of the line; empty for no limit")
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--certificate", help=argparse.SUPPRESS)
    parser.add_argument("--play", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--authority", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "aqueduct":
        trio.run(aqueduct_server, options.certificate)
    elif options.serve == "aioquic":
        asyncio.run(aioquic_server(options.certificate))
    elif options.play:
        play(options.play, options.address, options.authority, options.seconds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            play_all(options, Path(folder))


if __name__ == "__main__":
    main()
