"""The cost of Aqueduct over QUIC: bulk, beside the bare adapter in the same configuration and aioquic on asyncio.

    python -m tests.bench.aqueduct_quic [--size MIB] [--rounds N] [--packet BYTES] [--profile]

Each server is a process of its own, and all clients share one. In each round every client moves the same number of
MiB in blocks of 64 KiB, on a new connection, in an order that is shuffled. CPU is of both processes, user and system;
ratios are to the bare adapter of the same round, and more than 1 is better. `--profile` has both ends of Aqueduct and
then of the bare adapter in this process, and says where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

import attrs
import trio
import trustme

from muxkit import each_channel
from muxkit.protocols import aqueduct
from muxkit_adapters import quic
from tests.bench.quic_adapter import (
    ALPN,
    BLOCK,
    LIMITS,
    aioquic_client,
    aioquic_server,
    cpu,
    muxkit_client,
    muxkit_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.runtime import Channel

    Exchange = Callable[[list[bytes]], Awaitable[bytes]]

Name = Literal["bare", "aqueduct", "aioquic"]
NAMES: tuple[Name, ...] = get_args(Name)
MIB = 1024 * 1024


@attrs.frozen
class Pass:
    """What it took to move so much once."""

    seconds: float
    cpu: float


# --- Aqueduct


async def answer(channel: Channel) -> None:
    """To `cpu` the time of the processor, to anything else its length."""
    size, first = 0, b""
    try:
        while True:
            for message in await channel.receive_many():
                first = first or message
                size += len(message)
    except trio.EndOfChannel:
        await channel.send(repr(cpu()).encode() if first == b"cpu" else str(size).encode())


async def aqueduct_server(certificate: str, packet: int) -> None:
    handler = each_channel(answer)

    async def handle(link: quic.QuicLink) -> None:
        async with aqueduct.connection(link, role="server", limits=LIMITS) as server:
            await handler(server)

    serve = partial(quic.serve, handle, certificate=certificate, alpn=[ALPN], limits=LIMITS, packet_size=packet)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(partial(serve, retry=False))
        print(addresses[0], flush=True)


@asynccontextmanager
async def aqueduct_exchange(address: str, authority: str, packet: int) -> AsyncIterator[Exchange]:
    host, _, port = address.rpartition(":")
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(
            quic.connect(host, int(port), ca=authority, alpn=[ALPN], limits=LIMITS, packet_size=packet)
        )
        client = await stack.enter_async_context(aqueduct.connection(link, limits=LIMITS))

        async def exchange(blocks: list[bytes]) -> bytes:
            async with client.open() as channel:
                for block in blocks:
                    await channel.send(block)
                await channel.finish()
                return await channel.receive()

        yield exchange


async def aqueduct_client(address: str, authority: str, packet: int, play: Callable[..., Awaitable[None]]) -> None:
    async with aqueduct_exchange(address, authority, packet) as exchange:
        await play(exchange)


# --- a pass


async def bulk(exchange: Exchange, mib: int) -> Pass:
    async def both_cpus() -> float:
        return cpu() + float(await exchange([b"cpu"]))

    blocks = [bytes(BLOCK)] * (mib * MIB // BLOCK)
    await exchange(blocks[:16])
    used, began = await both_cpus(), perf_counter()
    assert await exchange(blocks) == str(mib * MIB).encode()
    took = perf_counter() - began
    return Pass(took, await both_cpus() - used)


def one_pass(name: Name, address: str, authority: str, packet: int, mib: int) -> Pass:
    found: list[Pass] = []

    async def play(exchange: Exchange) -> None:
        found.append(await bulk(exchange, mib))

    if name == "aioquic":
        asyncio.run(aioquic_client(address, packet, play))
    else:
        client = muxkit_client if name == "bare" else aqueduct_client
        trio.run(client, address, authority, packet, play)
    return found[0]


def serve(name: Name, certificate: str, packet: int) -> None:
    if name == "aioquic":
        asyncio.run(aioquic_server(certificate, packet))
    else:
        trio.run(muxkit_server if name == "bare" else aqueduct_server, certificate, packet)


# --- the whole


def play_all(options: argparse.Namespace, folder: Path) -> None:
    certificate, authority = certified(folder)
    servers: dict[Name, subprocess.Popen[str]] = {}
    passes: dict[Name, list[Pass]] = {name: [] for name in NAMES}
    dice = random.Random(1)
    try:
        addresses: dict[Name, str] = {}
        for name in NAMES:
            command = [sys.executable, "-m", "tests.bench.aqueduct_quic", "--serve", name, "--certificate", certificate]
            command += ["--packet", str(options.packet)]
            server = servers[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            addresses[name] = server.stdout.readline().strip()
        for _ in range(options.rounds):
            for name in dice.sample(NAMES, len(NAMES)):
                passes[name].append(one_pass(name, addresses[name], authority, options.packet, options.size))
    finally:
        for server in servers.values():
            server.terminate()
            server.wait()
    show(passes, options.size)


def show(passes: dict[Name, list[Pass]], mib: int) -> None:
    def ratios(name: Name, figure: Callable[[Pass], float]) -> str:
        found = [figure(base) / figure(one) for base, one in zip(passes["bare"], passes[name], strict=True)]
        return f"{median(found):5.2f} ({min(found):.2f}-{max(found):.2f})"

    print(f"{'':10}{'MiB/s':>8}{'ms CPU/MiB':>12}   {'x bare, by CPU':20}{'x bare, by the clock'}")
    for name in NAMES:
        rate = median(mib / one.seconds for one in passes[name])
        used = median(1e3 * one.cpu / mib for one in passes[name])
        by_cpu, by_clock = ratios(name, lambda one: one.cpu), ratios(name, lambda one: one.seconds)
        print(f"{name:10}{rate:8.1f}{used:12.1f}   {by_cpu:20}{by_clock}", flush=True)


def profile(options: argparse.Namespace, folder: Path) -> None:
    """Both ends in one process; the server tells its address on a pipe that is ours."""
    certificate, authority = certified(folder)
    for name in ("aqueduct", "bare"):
        profiler = cProfile.Profile()
        trio.run(in_one_process, name, certificate, authority, options, profiler)
        print(f"--- {name}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(options.lines)


async def in_one_process(
    name: Name, certificate: str, authority: str, options: argparse.Namespace, profiler: cProfile.Profile
) -> None:
    read, write = os.pipe()
    before, sys.stdout = sys.stdout, os.fdopen(write, "w")
    server, client = (muxkit_server, muxkit_client) if name == "bare" else (aqueduct_server, aqueduct_client)

    async def play(exchange: Exchange) -> None:
        await exchange([b"warm"])
        profiler.enable()
        found = await bulk(exchange, options.size)
        profiler.disable()
        print(f"{name}: {1e3 * found.cpu / 2 / options.size:.1f} ms CPU/MiB under the profiler")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server, certificate, options.packet)
        address = await trio.to_thread.run_sync(os.read, read, 100)
        sys.stdout = before
        await client(address.decode().strip(), authority, options.packet, play)
        nursery.cancel_scope.cancel()


def certified(folder: Path) -> tuple[str, str]:
    """A certificate with its key, and whom to trust for it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return os.fspath(folder / "server.pem"), os.fspath(folder / "ca.pem")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--packet", type=int, default=1200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--certificate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.certificate, options.packet)
        return
    with tempfile.TemporaryDirectory() as folder:
        (profile if options.profile else play_all)(options, Path(folder))


if __name__ == "__main__":
    main()
