"""muxkit's yamux next to bpmux, to hashicorp's yamux in Go, and to that of py-libp2p: the same jobs, in turn.

    python tests/bench/yamux_speed.py [--rounds 3] [--libp2p ENVIRONMENT/bin/python]

Client and server are two processes on TCP over loopback, and both ends are of the same implementation. The table has
the median of the rounds: work per second, and the processor time of both ends for one unit of work. Go is left out if
the packages golang-go and golang-github-hashicorp-yamux-dev aren't installed, py-libp2p if there is no environment.

    small   64 bytes in one call, one way on one stream
    bulk    64 KiB in one call, the same
    trip    64 bytes there and back on one stream, one after the other
    open    a stream for each 64 bytes there and back, one after the other
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

SMALL: Final = 64
LARGE: Final = 64 * 1024
JOBS: Final = {"small": 100_000, "bulk": 3000, "trip": 5000, "open": 1500}
GO_SOURCES: Final = Path("/usr/share/gocode")  # where Debian puts the sources of Go packages
HERE: Final = Path(__file__).resolve().parent


Open = Callable[[], Awaitable[Any]]


async def serve_stream(stream: Any) -> None:  # noqa: ANN401 - of any implementation
    """Do what the first line of a stream says."""
    head = b""
    while b"\n" not in head:
        head += await stream.receive_some()
    line, _, rest = head.partition(b"\n")
    verb, *size = line.split()
    if verb == b"echo":
        if rest:
            await stream.send_all(rest)
        while data := await stream.receive_some():
            await stream.send_all(data)
    else:
        left = int(size[0]) - len(rest)
        while left:
            left -= len(await stream.receive_some())
        await stream.send_all(int(size[0]).to_bytes(8, "big"))
    await stream.aclose()


async def read(stream: Any, size: int) -> bytes:  # noqa: ANN401 - of any implementation
    data = b""
    while len(data) < size:
        piece = await stream.receive_some()
        assert piece, "the stream ended early"
        data += piece
    return data


async def push(open_stream: Open, size: int, count: int) -> None:
    stream, data = await open_stream(), bytes(size)
    await stream.send_all(b"sink %d\n" % (size * count))  # Go can't read from a stream that it has closed
    for _ in range(count):
        await stream.send_all(data)
    assert int.from_bytes(await read(stream, 8), "big") == size * count
    await stream.aclose()


async def echo(stream: Any) -> None:  # noqa: ANN401 - of any implementation
    await stream.send_all(bytes(SMALL))
    await read(stream, SMALL)


async def do(open_stream: Open, job: str, count: int) -> float:
    """Do a job, and return its seconds."""
    warm = await open_stream()
    await warm.send_all(b"echo\n")
    await echo(warm)
    began = time.perf_counter()
    if job in ("small", "bulk"):
        await push(open_stream, SMALL if job == "small" else LARGE, count)
    elif job == "trip":
        stream = await open_stream()
        await stream.send_all(b"echo\n")
        for _ in range(count):
            await echo(stream)
    else:
        for _ in range(count):
            stream = await open_stream()
            await stream.send_all(b"echo\n")
            await echo(stream)
            await stream.aclose()
    return time.perf_counter() - began


# --- muxkit


async def muxkit_end(protocol: str, port: int | None, job: str, count: int) -> None:
    import muxkit
    from muxkit.protocols import yamux

    async def serve_session(session: muxkit.Session) -> None:
        async with trio.open_nursery() as nursery:
            if isinstance(session, yamux.Session):
                async for stream in session.streams():
                    nursery.start_soon(serve_stream, stream)
            else:
                async for channel in session:
                    nursery.start_soon(serve_stream, channel.as_stream())

    if port is None:
        async with muxkit.open_server(serve_session, f"{protocol}+tcp://127.0.0.1:0") as server:
            print(server.url.rpartition(":")[2], flush=True)
            await trio.sleep_forever()
    async with muxkit.connect(f"{protocol}+tcp://127.0.0.1:{port}") as session:

        async def open_stream() -> object:
            return (
                await session.open_stream()
                if isinstance(session, yamux.Session)
                else (await session.open()).as_stream()
            )

        print(await do(open_stream, job, count), flush=True)
        os._exit(0)  # the streams of the jobs are still open


# --- py-libp2p


async def libp2p_end(port: int | None, job: str, count: int) -> None:
    from libp2p.io.trio import TrioTCPStream  # type: ignore[import-not-found]
    from libp2p.network.connection.raw_connection import RawConnection  # type: ignore[import-not-found]
    from libp2p.peer.id import ID  # type: ignore[import-not-found]
    from libp2p.stream_muxer.exceptions import MuxedStreamError  # type: ignore[import-not-found]
    from libp2p.stream_muxer.yamux.yamux import Yamux  # type: ignore[import-not-found]

    class Libp2pStream:
        def __init__(self, stream: Any) -> None:  # noqa: ANN401 - of a package without types
            self._stream = stream

        async def send_all(self, data: bytes) -> None:
            await self._stream.write(data)

        async def receive_some(self) -> bytes:
            try:
                data: bytes = await self._stream.read(LARGE)
            except MuxedStreamError:
                return b""
            return data

        async def aclose(self) -> None:
            await self._stream.close()

    @asynccontextmanager
    async def muxer_on(stream: trio.SocketStream, *, is_client: bool) -> AsyncIterator[Any]:
        raw = RawConnection(TrioTCPStream(stream), is_client)
        muxer = Yamux(raw, ID(b"x" * 32), is_initiator=is_client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
            yield muxer
            nursery.cancel_scope.cancel()

    if port is None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        print(listener.socket.getsockname()[1], flush=True)
        async with muxer_on(await listener.accept(), is_client=False) as muxer, trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(serve_stream, Libp2pStream(await muxer.accept_stream()))
    async with muxer_on(await trio.open_tcp_stream("127.0.0.1", port), is_client=True) as muxer:

        async def open_stream() -> object:
            return Libp2pStream(await muxer.open_stream())

        print(await do(open_stream, job, count), flush=True)
        os._exit(0)


# --- the comparison


def run(server: Sequence[str], client: Callable[[str, str, int], Sequence[str]], job: str) -> tuple[float, float]:
    """Run both ends once; return the work per second, and the processor time of a unit of work in microseconds."""
    count = JOBS[job]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    serving = subprocess.Popen(server, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None  # as it is a pipe
    try:
        port = serving.stdout.readline().strip()
        done = subprocess.run(client(port, job, count), stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    finally:
        serving.terminate()
        serving.wait()
        serving.stdout.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return count / float(done.stdout), used / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--libp2p", metavar="PYTHON", help="the interpreter of an environment with libp2p")
    parser.add_argument("end", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.end:
        kind, port, job, count = [*asked.end, "", "", "0"][:4]
        end = libp2p_end if kind == "libp2p" else None
        arguments = (int(port) if port else None, job, int(count))
        if end is not None:
            trio.run(end, *arguments)
        else:
            trio.run(muxkit_end, kind, *arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), asked.rounds, asked.libp2p)


def compare(folder: Path, rounds: int, libp2p: str | None) -> None:
    def python(interpreter: str, kind: str) -> tuple[list[str], Callable[[str, str, int], list[str]]]:
        command = [interpreter, __file__]
        return [*command, kind], lambda port, job, count: [*command, kind, port, job, str(count)]

    ends = {"bpmux": python(sys.executable, "bpmux"), "yamux": python(sys.executable, "yamux")}
    if shutil.which("go") and (GO_SOURCES / "src/github.com/hashicorp/yamux").is_dir():
        settings = {"GO111MODULE": "off", "GOPATH": str(GO_SOURCES), "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
        program = str(folder / "speed")
        subprocess.run(
            ["go", "build", "-o", program, "."], cwd=HERE / "yamux_go", env=os.environ | settings, check=True
        )
        ends["Go's yamux"] = ([program, "serve"], lambda port, job, count: [program, "call", port, job, str(count)])
    if libp2p is not None:
        ends["py-libp2p's yamux"] = python(libp2p, "libp2p")
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for job in JOBS:
            for name, (server, client) in ends.items():
                measured.setdefault((job, name), []).append(run(server, client, job))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; medians of {rounds} rounds")
    for job in JOBS:
        for name in ends:
            rates, costs = zip(*measured[job, name], strict=True)
            print(f"{job:6} {name:18} {statistics.median(rates):12,.0f} /s {statistics.median(costs):10.1f} µs of CPU")


if __name__ == "__main__":
    main()
