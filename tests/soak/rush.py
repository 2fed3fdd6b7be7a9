"""Many clients at the same moment: a rush, a herd of links that lose their connections, silent ones, and a restart.

    python -m tests.soak.rush rush [--clients 1000] [--only tls wss] [--websockets PYTHON]
    python -m tests.soak.rush herd [--clients 2000]
    python -m tests.soak.rush silent [--clients 1100] [--only bpmux+tcp]
    python -m tests.soak.rush restart [--clients 1000] [--only wss]

`rush` connects all clients at once over each transport. Each echoes one message and stays until the last one has its
answer. Beside each transport raw Trio, raw Trio with TLS, or the `websockets` library does the same in the same run;
PYTHON is an interpreter that has the library. `herd` resets the connections of all Relink links at the same moment,
through a relay, and waits until each link echoes again. `silent` fills a server with connections that say nothing and
come again when they are dropped, and then has honest clients echo. `restart` kills a server with all its
`muxkit.reconnecting` clients connected and starts it again on the same port. Servers run in processes of their own.

Ends with 1 if a client was not served, or a link was lost.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio
import trustme

import muxkit
from muxkit._door import Door
from muxkit.protocols import relink

MESSAGE: Final = b"echo"
WITHIN: Final = 120.0  # seconds for one client, after which it counts as failed
HONEST: Final = 8  # clients one after the other in `silent`
TRANSPORTS: Final = {
    "tcp": ("bpmux+tcp://127.0.0.1:0", "trio"),
    "unix": ("bpmux+unix://{folder}/rush.sock", "trio"),
    "tls": ("bpmux+tls://127.0.0.1:0", "trio+tls"),
    "ws": ("bpmux+ws://127.0.0.1:0", "ws"),
    "wss": ("bpmux+wss://127.0.0.1:0", "wss"),
    "quic": ("aqueduct+quic://127.0.0.1:0", "trio+tls"),
    "udp": ("e3x+udp://127.0.0.1:0", "trio"),
    "dtls": ("e3x+dtls://127.0.0.1:0", "trio+tls"),
}
SILENT: Final = ("bpmux+tcp", "aqueduct+tcp", "e3x+tcp", "relink+tcp", "bpmux+unix", "bpmux+tls", "bpmux+ws")


@attrs.frozen
class Place:
    """A folder with a certificate for 127.0.0.1 and its authority."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def chain(self) -> Path:
        return self.folder / "chain.pem"

    def url(self, kind: str) -> str:
        return TRANSPORTS[kind][0].format(folder=self.folder)

    def client_tls(self, url: str) -> dict[str, Any]:
        return {"tls": muxkit.TLS(ca=str(self.ca))} if is_encrypted(url) else {}


def is_encrypted(url: str) -> bool:
    return url.partition("+")[2].partition("://")[0] in {"tls", "wss", "quic", "dtls"}


@contextmanager
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        made = Place(Path(folder))
        authority = trustme.CA()
        authority.cert_pem.write_to_path(made.ca)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(made.chain)
        yield made


# --- the server


async def echo(channel: muxkit.Channel) -> None:
    with suppress(muxkit.ChannelCancelled, muxkit.ChannelStopped, muxkit.LinkLost):
        async for message in channel:
            await channel.send(message)


async def serve(url: str, chain: str, carried: int) -> None:
    logging.basicConfig(level=os.environ.get("RUSH_LOG", "ERROR"))
    options: dict[str, Any] = {"tls": muxkit.TLS(cert=chain, key=chain)} if is_encrypted(url) else {}
    if carried:
        options["limits"] = muxkit.Limits(connections=carried + 100)
        if url.startswith("relink"):
            options["keep"] = relink.Keep(links=carried + 100, bytes=(carried + 100) << 16)
    async with muxkit.open_server(echo, url, **options) as server:
        print(server.url, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


@contextmanager
def server(where: Place, url: str, *, carried: int = 0, port: int | None = None) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own; give its URL and process id, and kill it at the end."""
    if port is not None:
        url = url.replace(":0", f":{port}")
    command = [sys.executable, "-m", "tests.soak.rush", "serve", "--url", url, "--chain", str(where.chain)]
    with _process([*command, "--clients", str(carried)]) as (process, first):
        yield first, process.pid


@contextmanager
def _process(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


# --- the rush


@attrs.define
class Tally:
    """How many clients were served, and why the others were not."""

    count: int
    served: int = 0
    failures: list[str] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)

    @property
    def summary(self) -> str:
        times = sorted(self.seconds) or [0.0]
        told = f"{self.served:>5} of {self.count}, p50 {times[len(times) // 2]:6.2f} s, last {times[-1]:6.2f} s"
        common = max(set(self.failures), key=self.failures.count, default="")
        return f"{told}; {common[:90]}" if common else told


def cpu_of(process: int) -> float:
    """Return the processor seconds of another process, which do not depend on what else the machine does."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def rush(url: str, count: int, options: dict[str, Any]) -> Tally:
    """Connect all clients at once, have each echo one message, and keep all until the last has its answer."""
    tally, all_done = Tally(count), trio.Event()
    # One for all clients, since what `connect` does with a URL before it dials is not what a listener costs.
    door = Door(url, {"linger": 0.5, "tls": options.get("tls")})
    began = trio.current_time()

    async def visit() -> None:
        try:
            with trio.fail_after(WITHIN) as scope:
                async with door.session_to() as session, session.open() as channel:
                    await channel.send(MESSAGE)
                    assert await channel.receive() == MESSAGE
                    scope.deadline = float("inf")
                    tally.served += 1
                    tally.seconds.append(trio.current_time() - began)
                    if tally.served + len(tally.failures) == count:
                        all_done.set()
                    await all_done.wait()
        except (Exception, BaseExceptionGroup) as error:
            if not all_done.is_set():
                tally.failures.append(f"{type(error).__name__}: {error}")
                if tally.served + len(tally.failures) == count:
                    all_done.set()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(visit)
        await all_done.wait()
        nursery.cancel_scope.deadline = trio.current_time() + 5.0  # leaving is not measured
    return tally


def peer(kind: str, where: Place, count: int, python: str) -> str:
    """Run the same rush without muxkit."""
    module = str(Path(__file__).with_name("_rush_peers.py"))
    interpreter = python if kind in {"ws", "wss"} else sys.executable
    chain, ca = ([str(where.chain)], [str(where.ca)]) if kind in {"trio+tls", "wss"} else ([], [])
    with _process([interpreter, module, "serve", kind, *chain]) as (process, port):
        before, ours = cpu_of(process.pid), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [interpreter, module, "rush", kind, port, str(count), *ca]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        spent, now = cpu_of(process.pid) - before, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not run.stdout:
        return f"{kind}: did not run: {run.stderr.strip().rpartition(chr(10))[2]}"
    served, seconds, _ = run.stdout.split(" ", 2)
    client = now.ru_utime + now.ru_stime - ours.ru_utime - ours.ru_stime
    return f"{kind:>8}: {served:>5}, last {float(seconds):6.2f} s, CPU {spent:5.2f} s + {client:5.2f} s"


def show_rush(count: int, only: Sequence[str], python: str) -> int:
    failed = 0
    print("CPU: seconds of the server, and of all clients together")
    with place() as where:
        for kind, (_, beside) in TRANSPORTS.items():
            if only and kind not in only:
                continue
            there = peer(beside, where, count, python)
            with server(where, where.url(kind)) as (url, process):
                before, ours = cpu_of(process), time.process_time()
                tally = trio.run(rush, url, count, where.client_tls(url))
                spent, client = cpu_of(process) - before, time.process_time() - ours
            failed += count - tally.served
            cost = f"CPU {spent:5.2f} s + {client:5.2f} s"
            print(f"{kind:>5}: {tally.summary}, {cost}  | {there} | load {os.getloadavg()[0]:.1f}", flush=True)
    return failed


# --- the herd


async def herd(where: Place, url: str, count: int) -> int:
    """Cut the connections of all links at once; return how many links did not come back as they were."""
    dials = trio.CapacityLimiter(200)
    back, lost = list[float](), 0
    ready, cut = 0, trio.Event()
    all_ready, all_done = trio.Event(), trio.Event()
    host, port = "127.0.0.1", int(url.rpartition(":")[2].partition("/")[0].partition("?")[0])
    wires: set[trio.SocketStream] = set()

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        stream = await trio.open_tcp_stream(host, port)
        wires.add(stream)
        try:
            yield stream
        finally:
            wires.discard(stream)
            await trio.aclose_forcefully(stream)

    async def visit() -> None:
        nonlocal ready, lost
        try:
            async with relink.link(dial, linger=0.2) as link, link.open() as channel:
                async with dials:
                    await channel.send(MESSAGE)
                    await channel.receive()
                ready += 1
                if ready == count:
                    all_ready.set()
                await cut.wait()
                await channel.send(MESSAGE)
                await channel.receive()
                back.append(trio.current_time())
                if len(back) + lost == count:
                    all_done.set()
                await all_done.wait()
        except (Exception, BaseExceptionGroup):
            if not all_done.is_set():
                lost += 1
                if len(back) + lost == count:
                    all_done.set()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(visit)
        with trio.move_on_after(300):
            await all_ready.wait()
        began = trio.current_time()
        for wire in [*wires]:
            wire.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
            trio.lowlevel.notify_closing(wire.socket)
            wire.socket.close()
        cut.set()
        with trio.move_on_after(WITHIN):
            await all_done.wait()
        all_done.set()
        times = sorted(each - began for each in back) or [0.0]
        print(
            f"herd: {len(back)} of {count} links are back ({lost} lost, {ready} were ready), p50 "
            f"{times[len(times) // 2]:.2f} s, last {times[-1]:.2f} s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        nursery.cancel_scope.cancel()
    return count - len(back)


# --- the silent ones


async def silent(url: str, count: int, options: dict[str, Any]) -> Tally:
    tally, connected = Tally(HONEST), 0
    scheme, _, address = url.partition("://")
    place, _, _ = address.partition("/")

    async def stay_silent() -> None:
        nonlocal connected
        while True:
            with suppress(OSError, trio.BrokenResourceError):
                if scheme.endswith("unix"):
                    stream = await trio.open_unix_socket(address)
                else:
                    host, _, port = place.partition("?")[0].rpartition(":")
                    stream = await trio.open_tcp_stream(host, int(port))
                connected += 1
                async with stream:
                    while await stream.receive_some():
                        pass
            await trio.sleep(0.01)

    async def visit() -> None:
        async with muxkit.connect(url, **options) as session, session.open() as channel:
            await channel.send(MESSAGE)
            await channel.receive()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(stay_silent)
        await trio.sleep(3.0)  # they are all there, and the oldest have been silent for a while
        for _ in range(HONEST):
            began = trio.current_time()
            try:
                with trio.fail_after(12.0):
                    await visit()
                tally.served += 1
                tally.seconds.append(trio.current_time() - began)
            except (Exception, BaseExceptionGroup) as error:
                tally.failures.append(f"{type(error).__name__}: {error}")
        nursery.cancel_scope.cancel()
    return tally


def show_silent(count: int, only: Sequence[str]) -> int:
    failed = 0
    with place() as where:
        for kind in only or SILENT:
            unix = f"{kind}://{where.folder}/silent.sock"
            with server(where, unix if kind.endswith("unix") else f"{kind}://127.0.0.1:0") as (url, _):
                tally = trio.run(silent, url, count, where.client_tls(url))
            failed += HONEST - tally.served
            print(f"{kind:>12}: {tally.summary}, load {os.getloadavg()[0]:.1f}", flush=True)
    return failed


# --- the restart


async def restart(where: Place, kind: str, count: int) -> int:
    there, came, all_there = set[int](), list[float](), trio.Event()

    async def visit(number: int, url: str, options: dict[str, Any]) -> None:
        async with muxkit.reconnecting(url, linger=0.2, on_failed=lambda *_: None, **options) as sessions:
            async for session in sessions:
                try:
                    async with session.open() as channel:
                        await channel.send(MESSAGE)
                        await channel.receive()
                        there.add(number)
                        came.append(trio.current_time())
                        if len(there) == count:
                            all_there.set()
                        async for _ in session.incoming():
                            pass
                except muxkit.MuxError:
                    there.discard(number)

    async with trio.open_nursery() as nursery:
        with server(where, where.url(kind), carried=count) as (url, process):
            options = where.client_tls(url)
            for number in range(count):
                nursery.start_soon(visit, number, url, options)
            with trio.move_on_after(WITHIN):
                await all_there.wait()
            print(f"restart over {kind}: {len(there)} of {count} are there", flush=True)
            os.kill(process, signal.SIGKILL)
        all_there = trio.Event()
        while there:  # noqa: ASYNC110 - of a measurement
            await trio.sleep(0.01)
        came.clear()
        port = int(url.rpartition(":")[2].partition("/")[0])
        with server(where, where.url(kind), carried=count, port=port):
            started = trio.current_time()
            with trio.move_on_after(WITHIN):
                await all_there.wait()
            times = sorted(each - started for each in came) or [0.0]
            print(
                f"restart over {kind}: {len(there)} of {count} are back, p50 {times[len(times) // 2]:.2f} s, last "
                f"{times[-1]:.2f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            nursery.cancel_scope.cancel()
    return count - len(there)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rush", "herd", "silent", "restart", "serve"])
    parser.add_argument("--clients", type=int)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--websockets", default=sys.executable)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--chain", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = time.monotonic()
    match given.what:
        case "serve":
            trio.run(serve, given.url, given.chain, given.clients or 0)
            return 0
        case "rush":
            failed = show_rush(given.clients or 1000, given.only, given.websockets)
        case "silent":
            failed = show_silent(given.clients or 1100, given.only)
        case "herd":
            count = given.clients or 2000
            with place() as where, server(where, "relink+tcp://127.0.0.1:0", carried=count) as (url, _):
                failed = trio.run(herd, where, url, count)
        case _:
            failed = 0
            with place() as where:
                for kind in given.only or ["wss"]:
                    failed += trio.run(restart, where, kind, given.clients or 1000)
    print(f"{failed} were not served, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
