"""The memory of idle sessions on the server: resident bytes a session, with ten thousand waiting connections.

    python tests/bench/restream_idle.py [--sessions 10000] [--store memory:]

The server is a process of its own, on loopback; each client has sent its request and waits for what may be
appended one day. Stateless connections whose client does not read are shown beside them. The kernel's buffers are not
in the figures. When all are there one message is appended to some of them, to show that they are awake.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import time
from pathlib import Path

import trio

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store

AT_ONCE = 50  # connections that are being made
WOKEN = 100  # sessions that get a message at the end
REST = 3.0  # s
KIB = 1024


def uuid_of(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def resident() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def raise_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


async def serve(store_at: str, sessions: int) -> None:
    """Tells its memory whenever a line comes on standard input."""
    raise_descriptors(2 * sessions + 100)
    limits = Limits(connections=2 * sessions + 10, half_open=1000)
    async with open_store(store_at) as store, trio.open_nursery() as nursery:
        served = await nursery.start(
            lambda task_status: restream.serve(
                "restream+tcp://127.0.0.1:0", store, application=restream.Fed(), limits=limits, task_status=task_status
            )
        )
        gc.collect()
        print(served.url.rpartition(":")[2], resident(), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            if line.startswith("append"):
                for number in range(WOKEN):
                    await store.append(uuid_of(number * sessions // WOKEN), {"n": number})
            if line.startswith("collect"):
                gc.collect()
            print(resident(), served.connections, flush=True)
        nursery.cancel_scope.cancel()


async def connect_all(port: int, requests: list[bytes]) -> list[trio.SocketStream]:
    streams: dict[int, trio.SocketStream] = {}
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def one(number: int, request: bytes) -> None:
        async with limiter:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(request)
            streams[number] = stream

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            nursery.start_soon(one, number, request)
    return [streams[number] for number in range(len(requests))]


def ask(server: subprocess.Popen[str], line: str) -> list[int]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{line}\n")
    server.stdin.flush()
    return [int(word) for word in server.stdout.readline().split()]


async def settled(server: subprocess.Popen[str], connections: int) -> list[int]:
    """The memory and the connections, when all are there and the server has had time to come to rest."""
    while ask(server, "look")[1] < connections:  # noqa: ASYNC110 - it is another process that is waited for
        await trio.sleep(0.5)
    await trio.sleep(REST)
    return ask(server, "collect")


async def measure(server: subprocess.Popen[str], sessions: int) -> None:
    assert server.stdout is not None
    port, before = map(int, server.stdout.readline().split())
    print(f"server alone: {before / KIB / KIB:.1f} MiB")
    began = time.perf_counter()
    requests = [b'{"uuid":"%s","params":{}}\n' % uuid_of(number).encode() for number in range(sessions)]
    waiting = await connect_all(port, requests)
    idle, connections = await settled(server, sessions)
    took = time.perf_counter() - began
    each = (idle - before) / connections / KIB
    print(f"{connections:,} idle sessions: {idle / KIB / KIB:.1f} MiB, {each:.1f} KiB each")
    print(f"they connected at {sessions / took:,.0f} a second")
    began = time.perf_counter()
    ask(server, "append")
    with trio.fail_after(10):
        for number in range(WOKEN):
            assert await waiting[number * sessions // WOKEN].receive_some(1000)
    print(f"{WOKEN} of them were sent a message within {time.perf_counter() - began:.2f} s of the first append")
    unread = await connect_all(port, [b"{}\n"] * (sessions // 10))
    full, more = await settled(server, sessions + len(unread))
    each = (full - idle) / max(1, more - connections) / KIB
    print(f"{more - connections:,} stateless streams that no client reads: {each:.1f} KiB each")
    for stream in (*waiting, *unread):
        stream.socket.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--store", default="memory:")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve, options.store, options.sessions)
        return
    raise_descriptors(2 * options.sessions + 100)
    command = [sys.executable, __file__, "--serve", "--store", options.store, "--sessions", str(options.sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            trio.run(measure, server, options.sessions)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
