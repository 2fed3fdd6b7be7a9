"""Calls and streams of `muxkit.rpc` next to grpcio, and to bare bpmux channels: the same jobs, in turn.

    python tests/bench/calls_speed.py [--rounds 3] [--seconds 3] [--python ENVIRONMENT/bin/python]

Client and server are two processes on TCP over loopback. All three send and check the same values as JSON by msgspec.
grpcio is its C core with asyncio, and its server has room for all calls, as that of muxkit has. Without the package
grpcio it is left out. A bare channel has its request as the payload of the opening, and one message as the answer.
`--python` names further interpreters whose muxkit takes part, for example that of a compiled build:

    MUXKIT_COMPILE=1 ENVIRONMENT/bin/python -m pip install . msgspec

The table has the median of the rounds, for 1, 100 and 10,000 calls at the same time and for a stream of the server:
calls or items per second, the median and the 99th percentile of the time of a call, and the processor time of both
processes for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import msgspec
import trio

import muxkit
from muxkit import rpc

CONCURRENT: Final = (1, 100, 10_000)
ITEMS: Final = 1 << 30  # of a stream, which the client leaves when the time is over
CONTENDERS: Final = ("muxkit.rpc", "grpc.aio", "bpmux channel")
MANY: Final = muxkit.Limits(channels=12_000, backlog=12_000, channel_memory=1 << 30)
# By default, a server of gRPC resets calls at random while more than 1,000 calls wait for it, and all from 3,000 on.
GRPC_OPTIONS: Final = (
    ("grpc.server.max_pending_requests", 12_000),
    ("grpc.server.max_pending_requests_hard_limit", 12_000),
)


class Order(msgspec.Struct):
    id: int
    item: str = "tea"


class Ask(msgspec.Struct):
    id: int


class Orders(rpc.Service):
    async def get(self, id: int) -> Order: ...
    def watch(self, since: int) -> rpc.Stream[Order]: ...


class OrdersService(Orders):
    async def get(self, id: int) -> Order:
        return Order(id)

    @rpc.stream
    async def watch(self, since: int) -> AsyncIterator[Order]:
        for id in range(since, since + ITEMS):
            yield Order(id)


ASK, ORDER = muxkit.Json(Ask), muxkit.Json(Order)


# --- servers


async def serve_muxkit(handler: Callable[[muxkit.Channel], Awaitable[object]]) -> None:
    async with muxkit.open_server(handler, "bpmux+tcp://127.0.0.1:0", limits=MANY) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()


async def answer(channel: muxkit.Channel) -> None:
    """Answer a bare channel: with one order, or with many if the name says so."""
    id = ASK.decode(channel.opening).id
    if channel.name == "get":
        await channel.send(ORDER.encode(Order(id)))
        return
    for number in range(id, id + ITEMS):
        await channel.send(ORDER.encode(Order(number)))


async def serve_grpc() -> None:
    grpc: Any = import_module("grpc")

    async def get(request: Ask, context: object) -> Order:
        return Order(request.id)

    async def watch(request: Ask, context: object) -> AsyncIterator[Order]:
        for number in range(request.id, request.id + ITEMS):
            yield Order(number)

    codec: dict[str, Any] = {"request_deserializer": ASK.decode, "response_serializer": ORDER.encode}
    handlers = {
        "get": grpc.unary_unary_rpc_method_handler(get, **codec),
        "watch": grpc.unary_stream_rpc_method_handler(watch, **codec),
    }
    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Orders", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


# --- clients: a job is a number of calls at the same time, or 0 for a stream

Result = dict[str, float]


def result(took: list[float], seconds: float) -> Result:
    """Return what a job gave: how many a second, and how long one took in milliseconds."""
    ordered = sorted(took)
    most = len(ordered) - 1
    return {
        "rate": len(took) / seconds,
        "p50": 1000 * ordered[most // 2],
        "p99": 1000 * ordered[most * 99 // 100],
        "count": len(took),
    }


async def run_trio(
    get: Callable[[int], Awaitable[Order]], watch: Callable[[], Any], concurrent: int, seconds: float
) -> Result:
    took: list[float] = []
    began = time.perf_counter()
    ends = began + seconds
    if not concurrent:
        count = 0
        async with watch() as items:
            async for _ in items:
                count += 1
                if time.perf_counter() > ends:
                    break
        now = time.perf_counter()
        return result([(now - began) / count] * count, now - began)

    async def caller(id: int) -> None:
        while (start := time.perf_counter()) < ends:
            order = await get(id)
            assert order.id == id
            took.append(time.perf_counter() - start)

    async with trio.open_nursery() as nursery:
        for id in range(concurrent):
            nursery.start_soon(caller, id)
    return result(took, time.perf_counter() - began)


async def call_muxkit(url: str, concurrent: int, seconds: float) -> Result:
    async with muxkit.connect(url, limits=MANY) as session:
        orders = rpc.client(Orders, session)
        return await run_trio(orders.get, lambda: orders.watch(0), concurrent, seconds)


async def call_bare(url: str, concurrent: int, seconds: float) -> Result:
    async with muxkit.connect(url, limits=MANY) as session:

        async def get(id: int) -> Order:
            async with session.open("get", payload=ASK.encode(Ask(id))) as channel:
                return ORDER.decode(await channel.receive())

        def watch() -> Any:  # noqa: ANN401 - a block whose value can be iterated over
            return session.open("watch", payload=ASK.encode(Ask(0)), codec=ORDER)

        return await run_trio(get, watch, concurrent, seconds)


async def call_grpc(address: str, concurrent: int, seconds: float) -> Result:
    grpc: Any = import_module("grpc")

    took: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        codec: dict[str, Any] = {"request_serializer": ASK.encode, "response_deserializer": ORDER.decode}
        get, watch = channel.unary_unary("/Orders/get", **codec), channel.unary_stream("/Orders/watch", **codec)
        began = time.perf_counter()
        ends = began + seconds
        if not concurrent:
            count = 0
            stream = watch(Ask(0))
            async for _ in stream:
                count += 1
                if time.perf_counter() > ends:
                    break
            stream.cancel()
            now = time.perf_counter()
            return result([(now - began) / count] * count, now - began)

        async def caller(id: int) -> None:
            while (start := time.perf_counter()) < ends:
                order = await get(Ask(id))
                assert order.id == id
                took.append(time.perf_counter() - start)

        await asyncio.gather(*(caller(id) for id in range(concurrent)))
        return result(took, time.perf_counter() - began)


# --- processes


def play(part: str, contender: str, address: str, concurrent: int, seconds: float) -> None:
    """Be the server or the client of a contender in this process."""
    if part == "server":
        if contender == "grpc.aio":
            asyncio.run(serve_grpc())
        trio.run(serve_muxkit, rpc.serve(OrdersService()) if contender == "muxkit.rpc" else answer)
    before = time.process_time()  # what the start of the interpreter took doesn't count
    if contender == "grpc.aio":
        found = asyncio.run(call_grpc(address, concurrent, seconds))
    else:
        call = call_muxkit if contender == "muxkit.rpc" else call_bare
        found = trio.run(call, address, concurrent, seconds)
    print(json.dumps({**found, "cpu": time.process_time() - before}))


def cpu_of(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(python: str, contender: str, concurrent: int, seconds: float) -> Result | None:
    """Run one job of one contender. Returns None if it failed."""
    command = [python, __file__, "--contender", contender, "--seconds", str(seconds)]
    with subprocess.Popen([*command, "--part", "server"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None  # it is a pipe
            address = server.stdout.readline().strip()
            before = cpu_of(server.pid)
            client = [*command, "--part", "client", "--address", address, "--concurrent", str(concurrent)]
            ran = subprocess.run(client, capture_output=True, text=True, check=False)
            used = cpu_of(server.pid) - before
        finally:
            server.terminate()
    if ran.returncode:
        return None
    found: Result = json.loads(ran.stdout)
    found["cpu"] = 1e6 * (found["cpu"] + used) / found["count"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each job")
    parser.add_argument("--concurrent", type=int, action="append", help="calls at the same time, or 0 for the stream")
    parser.add_argument("--python", action="append", default=[], help="a further interpreter whose muxkit takes part")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("server", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        play(options.part, options.contender, options.address, (options.concurrent or [1])[0], options.seconds)
        return
    runs = [(name, sys.executable, name) for name in CONTENDERS if name != "grpc.aio" or find_spec("grpc")]
    for number, python in enumerate(options.python, 1):
        runs += [(f"{name} [{number}]", python, name) for name in CONTENDERS if name != "grpc.aio"]
    for concurrent in options.concurrent or (*CONCURRENT, 0):
        results: dict[str, list[Result | None]] = {}
        for _ in range(options.rounds):
            for title, python, contender in runs:
                results.setdefault(title, []).append(measure(python, contender, concurrent, options.seconds))
        print(f"\n{f'{concurrent:,} calls at the same time' if concurrent else 'items of a stream'}", flush=True)
        for title, found in results.items():
            fine = [each for each in found if each is not None]
            if len(fine) < len(found):
                print(f"  {title:22} {len(found) - len(fine)} of {len(found)} rounds failed")
                continue
            keys = ("rate", "p50", "p99", "cpu")
            rate, p50, p99, cpu = (statistics.median(each[key] for each in fine) for key in keys)
            print(f"  {title:22} {rate:10,.0f}/s   p50 {p50:9.2f} ms   p99 {p99:9.2f} ms   {cpu:8.1f} µs of processor")


if __name__ == "__main__":
    main()
