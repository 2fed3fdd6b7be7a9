"""Many active sessions: each sends 64 bytes, waits for the echo and sends again. Clients in one process, server in one.

    python tests/bench/active_sessions.py [--sessions 200,900] [--rounds 5] [--seconds 3] [--only raw,bpmux+tcp,...]
    python tests/bench/active_sessions.py --uploads 100 [--mib 20]

This is the commonest load of a server, and it isn't the one that a multiplexer is made for: no session has two messages
at the same time that could share a system call. The program measures raw Trio streams, the `websockets` library on
asyncio if it is installed, and muxkit's protocols, in turn, in an order that changes from round to round.

It prints medians over the rounds. `server` and `client` are the processor time that each process needs per round trip.
Other programs on the machine disturb these less than they disturb the rate. `p50` and `p99` are the times that the
sessions wait for their echoes. The columns `of raw` divide by the figure of raw Trio in the same round.

With `--uploads`, each session sends 20 MiB in messages of 64 KiB, and the server answers once it has received them all.

The client starts its server as a child process, and asks it for its processor time through a pipe. With two or more
cores, client and server each have their own. `--tree` adds the same programs with muxkit from another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import attrs
import trio

import muxkit
from muxkit_bench.run.machine import this_machine

HERE: Final = Path(__file__).resolve().parents[2]
MESSAGE: Final = bytes(64)
CHUNK: Final = bytes(64 * 1024)
ACKNOWLEDGED: Final = b"."
MIB: Final = 1024 * 1024
SETTLE: Final = 0.5  # s between the first round trips and the measurement
MUXKIT: Final = ("bpmux+tcp", "bpmux+ws", "relink+tcp", "aqueduct+tcp", "e3x+tcp")
CONTESTANTS: Final = ("raw", "websockets", *MUXKIT)
PATIENCE: Final = 300.0  # s, after which a measurement hangs
DIALS_TOGETHER: Final = 20  # connections that the client opens at the same time


# ---------------------------------------------------------------------------- the server


def report_time() -> None:
    """Answer each line of standard input with this process's processor time, and end at its end."""
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    os._exit(0)


async def serve_raw(upload: int) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        received = 0
        async with stream:
            async for data in stream:
                received += len(data)
                if not upload:
                    await stream.send_all(data)
                elif received == upload:
                    await stream.send_all(ACKNOWLEDGED)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    print(listener.socket.getsockname()[1], flush=True)
    await trio.serve_listeners(serve, [listener])


async def serve_muxkit(kind: str, upload: int) -> None:
    async def serve(channel: muxkit.Channel) -> None:
        received = 0
        async for message in channel:
            received += len(message)
            if not upload:
                await channel.send(message)
            elif received == upload:
                await channel.send(ACKNOWLEDGED)

    async with muxkit.open_server(
        serve, f"{kind}://127.0.0.1:0", limits=muxkit.Limits(connections=16_384, half_open=16_384)
    ) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()


async def serve_websockets(upload: int) -> None:
    from websockets.asyncio.server import ServerConnection, serve

    async def handle(connection: ServerConnection) -> None:
        received = 0
        async for message in connection:
            received += len(message)
            if not upload:
                await connection.send(message)
            elif received == upload:
                await connection.send(ACKNOWLEDGED)

    async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().create_future()


# ---------------------------------------------------------------------------- the clients


class Client(ABC):
    """One session of the client's process."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send one message."""

    @abstractmethod
    async def receive(self, size: int) -> None:
        """Wait for an answer of this size."""


@attrs.frozen
class RawClient(Client):
    """A Trio stream."""

    stream: trio.SocketStream

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self, size: int) -> None:
        while size:
            size -= len(await self.stream.receive_some())


@attrs.frozen
class MuxkitClient(Client):
    """A session of muxkit with one channel."""

    channel: muxkit.Channel

    async def send(self, data: bytes) -> None:
        await self.channel.send(data)

    async def receive(self, size: int) -> None:
        await self.channel.receive()


@attrs.frozen
class WebSocketClient(Client):
    """A Trio stream with frames of WebSocket, which costs as little as possible, since the server is measured."""

    stream: trio.SocketStream

    async def send(self, data: bytes) -> None:
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + len(data).to_bytes(8, "big")
        await self.stream.send_all(b"\x82" + size + bytes(4) + data)  # masked with zeros

    async def receive(self, size: int) -> None:
        size += 2
        while size:
            size -= len(await self.stream.receive_some())


@asynccontextmanager
async def raw_client(address: str) -> AsyncIterator[Client]:
    async with await trio.open_tcp_stream("127.0.0.1", int(address)) as stream:
        yield RawClient(stream)


@asynccontextmanager
async def muxkit_client(address: str) -> AsyncIterator[Client]:
    async with muxkit.connect(address) as session, session.open() as channel:
        yield MuxkitClient(channel)


@asynccontextmanager
async def websockets_client(address: str) -> AsyncIterator[Client]:
    from websockets.client import ClientProtocol
    from websockets.uri import parse_uri

    async with await trio.open_tcp_stream("127.0.0.1", int(address)) as stream:
        handshake = ClientProtocol(parse_uri(f"ws://127.0.0.1:{address}"))
        handshake.send_request(handshake.connect())
        await stream.send_all(b"".join(handshake.data_to_send()))
        while handshake.state is handshake.state.CONNECTING:
            handshake.receive_data(await stream.receive_some())
        yield WebSocketClient(stream)


@attrs.define
class Work:
    """The work of all sessions, and its measurement."""

    server: subprocess.Popen[str]
    sessions: int
    seconds: float
    upload: int
    is_counting: bool = False
    is_done: bool = False
    waits: list[float] = attrs.field(factory=list)
    begun: tuple[float, float, float] = (0.0, 0.0, 0.0)

    async def measure(self, clients: Sequence[Client]) -> dict[str, float]:
        """Let all sessions work, and return the figures."""
        if self.upload:
            self.begin()
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(self.send_all, client)
            return self.figures(self.sessions * self.upload / MIB)
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(self.go_round, client)
            await trio.sleep(SETTLE)
            gc.collect()
            self.begin()
            await trio.sleep(self.seconds)
            waits = sorted(self.waits)
            figures = self.figures(len(waits))
            self.is_done = True
        figures["p50"], figures["p99"] = (1e3 * waits[len(waits) * part // 100] for part in (50, 99))
        return figures

    async def send_all(self, client: Client) -> None:
        """Upload one session's share, and wait until the server has received it."""
        for _ in range(self.upload // len(CHUNK)):
            await client.send(CHUNK)
        await client.receive(len(ACKNOWLEDGED))

    async def go_round(self, client: Client) -> None:
        """Send a message and wait for its echo, again and again."""
        while not self.is_done:
            began = time.perf_counter()
            await client.send(MESSAGE)
            await client.receive(len(MESSAGE))
            if self.is_counting:
                self.waits.append(time.perf_counter() - began)

    def begin(self) -> None:
        """Begin to count."""
        self.is_counting = True
        self.begun = self.times()

    def figures(self, count: float) -> dict[str, float]:
        """Return the rate since `begin`, and the processor time in µs for each of `count` units of work."""
        server, client, clock = (now - then for now, then in zip(self.times(), self.begun, strict=True))
        return {"rate": count / clock, "server": 1e6 * server / count, "client": 1e6 * client / count}

    def times(self) -> tuple[float, float, float]:
        """Return the processor time of the server and of this process, and the time on the clock."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write("\n")
        self.server.stdin.flush()
        return float(self.server.stdout.readline()), time.process_time(), time.perf_counter()


CLIENTS: Final = {"raw": raw_client, "websockets": websockets_client}


async def connect_and_work(work: Work, kind: str, address: str) -> dict[str, float]:
    """Connect all sessions, and let them work."""
    connect = CLIENTS.get(kind, muxkit_client)
    clients: list[Client] = []
    are_connected = trio.Event()
    dialing = trio.Semaphore(DIALS_TOGETHER)

    async def hold() -> None:
        await dialing.acquire()
        async with connect(address) as client:
            dialing.release()
            clients.append(client)
            if len(clients) == work.sessions:
                are_connected.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(work.sessions):
            nursery.start_soon(hold)
        await are_connected.wait()
        print(json.dumps(await work.measure(clients)), flush=True)
        work.server.kill()
        os._exit(0)  # closing all sessions in order would take a while, and isn't measured here


# ---------------------------------------------------------------------------- both ends, in turn


def pin(core: int) -> None:
    """Run this process on one core, if the system can do that and has several."""
    if sys.platform == "linux" and len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, {cores[core]})


def allow_many_files() -> None:
    """Raise the limit on open files, of which each session needs one."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_server(kind: str, upload: int) -> None:
    pin(0)
    allow_many_files()
    threading.Thread(target=report_time, daemon=True).start()
    match kind:
        case "raw":
            trio.run(serve_raw, upload)
        case "websockets":
            asyncio.run(serve_websockets(upload))
        case _:
            trio.run(serve_muxkit, kind, upload)


def run_client(kind: str, sessions: int, seconds: float, upload: int) -> None:
    command = [sys.executable, "-P", __file__, "--serve", kind, str(upload)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if len(os.sched_getaffinity(0)) > 1:
        pin(1)
    allow_many_files()
    assert server.stdout is not None
    try:
        trio.run(connect_and_work, Work(server, sessions, seconds, upload), kind, server.stdout.readline().strip())
    finally:
        server.kill()


def measured(tree: Path, kind: str, sessions: int, seconds: float, upload: int) -> dict[str, float]:
    """Measure once, with muxkit from the checkout `tree`."""
    path = [str(tree), str(tree / "adapters")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-P", __file__, "--work", kind, str(sessions), str(seconds), str(upload)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def wake_up() -> float:
    """Return the median time in µs that a byte takes to another process and back over TCP, with blocking sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = (
            "import socket, sys\n"
            "peer = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
            "while peer.send(peer.recv(1)): pass"
        )
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", echo, str(port)], stderr=subprocess.DEVNULL) as peer:
            stream, _ = listener.accept()
            with stream:
                times = []
                for _ in range(4000):
                    began = time.perf_counter()
                    stream.send(b".")
                    stream.recv(1)
                    times.append(time.perf_counter() - began)
            peer.kill()
    return 1e6 * statistics.median(times)


def copying() -> float:
    """Return how many GiB of memory one core copies per second."""
    source, target = bytes(64 * MIB), bytearray(64 * MIB)
    best = 1e9
    for _ in range(8):
        began = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - began)
    return len(source) / best / 1024 / MIB


def describe_machine() -> str:
    machine = this_machine([], awake=False)
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    loads = ", ".join(map(str, machine.load_before))
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.system}, load {loads}\n"
        f"{machine.python}, {packages}\n"
        f"a byte to another process and back over TCP: {wake_up():.0f} µs; copying memory: {copying():.1f} GiB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a server with many active sessions.")
    parser.add_argument("--sessions", default="200,900", help="numbers of sessions, separated by commas")
    parser.add_argument("--uploads", type=int, help="instead, let this number of sessions upload")
    parser.add_argument("--mib", type=int, default=20, help="size of an upload in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a measurement")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help=f"some of {', '.join(CONTESTANTS)}")
    parser.add_argument("--tree", type=Path, help="also measure muxkit from this checkout")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    asked = parser.parse_args()
    kinds = [kind for kind in asked.only.split(",") if kind != "websockets" or find_spec("websockets")]
    contestants = [(kind, HERE) for kind in kinds]
    if asked.tree is not None:
        contestants += [(kind, asked.tree.resolve()) for kind in kinds if kind in MUXKIT]
    counts = [asked.uploads] if asked.uploads else [int(each) for each in asked.sessions.split(",")]
    upload = asked.mib * MIB if asked.uploads else 0
    print(describe_machine(), flush=True)
    rounds: dict[str, list[dict[str, float]]] = {}
    for number in range(asked.rounds):
        for count in counts:
            turn = number % len(contestants)
            for kind, tree in contestants[turn:] + contestants[:turn]:
                name = f"{count} {kind}{'' if tree == HERE else f' of {tree.name}'}"
                rounds.setdefault(name, []).append(measured(tree, kind, count, asked.seconds, upload))
                print(f"round {number + 1}: {name}", rounds[name][-1], file=sys.stderr)
    if asked.json:
        asked.json.write_text(json.dumps(rounds, indent=1))
    unit = "MiB" if upload else "trip"
    print(f"\n{'':32} {unit + 's/s':>10} {'of raw':>7} {'server, µs':>11} {'of raw':>7} {'client, µs':>11}", end="")
    print(f" {'p50, ms':>9} {'p99, ms':>9} {'of raw':>7}")
    for count in counts:
        raw = rounds.get(f"{count} raw")
        for name in (name for name in rounds if name.startswith(f"{count} ")):
            print(row(name, rounds[name], raw))


def row(name: str, figures: list[dict[str, float]], raw: list[dict[str, float]] | None) -> str:
    """Return one line of the table: medians, and ratios to raw Trio in the same round."""

    def median(figure: str) -> str:
        return f"{statistics.median(each[figure] for each in figures):,.1f}" if figure in figures[0] else ""

    def ratio(figure: str) -> str:
        if raw is None or figure not in figures[0]:
            return ""
        pairs = zip(figures, raw, strict=True)
        return f"{statistics.median(mine[figure] / theirs[figure] for mine, theirs in pairs):.2f}"

    return (
        f"{name:32} {median('rate'):>10} {ratio('rate'):>7} {median('server'):>11} {ratio('server'):>7}"
        f" {median('client'):>11} {median('p50'):>9} {median('p99'):>9} {ratio('p99'):>7}"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", kind, upload]:
            run_server(kind, int(upload))
        case ["--work", kind, sessions, seconds, upload]:
            run_client(kind, int(sessions), float(seconds), int(upload))
        case _:
            main()
