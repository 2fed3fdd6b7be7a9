"""`muxkit forward` beside `ssh -L` and asyncssh: bulk, many connections, and a thousand at once.

All run on this machine over loopback, one after the other and in several rounds, each with a server and a client
process of its own, the same target and the same callers. `sshd` runs as a process of this program, with keys and a
configuration that it makes in a temporary folder; a peer that is not installed is left out, and said to be.

    apt-get install openssh-server; pip install asyncssh
    python -m tests.soak.forward_peers [--rounds 3] [--bulk 1024] [--calls 2000] [--held 1000] [--large 10240]

Sizes are MiB. `calls` connect for one message each, which is what a storm of connections meets; `talks` are messages
over connections that stay open, which is what keep-alive does. In the first round so many connections are held beside
one that stalls, and are measured alone and then beside one of --large. The figures decide nothing, since they depend
on the machine; it ends with 1 if a byte was lost or wrong, if a caller was not served, or if a process of muxkit
kept more than `MEMORY` bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import attrs
import trustme

MIB = 1 << 20
PIECE = bytes(range(256)) * 256  # 64 KiB
STARTS = 30.0  # s until a process listens
PAUSE = 0.02  # s between two looks at whether it does
MEMORY = 256 * MIB  # of a process of muxkit, at most
PACE = 1.0  # s between two messages of each held connection
CALLERS = 16  # that connect at the same time
ROOT = Path(__file__).resolve().parent.parent.parent


# ---------------------------------------------------------------------------- the target


def serve() -> None:
    """Run the target: the first byte of a connection says what to do with the others."""
    allow_files()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        match connection.recv(1):
            case b"e":
                while data := connection.recv(65_536):
                    connection.sendall(data)
            case b"g":
                size = int.from_bytes(_exactly(connection, 8), "big")
                for begin in range(0, size, len(PIECE)):
                    connection.sendall(PIECE[: size - begin])
            case b"p":
                crc = size = 0
                while data := connection.recv(65_536):
                    crc, size = zlib.crc32(data, crc), size + len(data)
                connection.sendall(size.to_bytes(8, "big") + crc.to_bytes(4, "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it ended early")
        data += more
    return data


def _crc(size: int) -> int:
    """Return the checksum of what the target sends."""
    crc = 0
    for begin in range(0, size, len(PIECE)):
        crc = zlib.crc32(PIECE[: size - begin], crc)
    return crc


def allow_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))


# ---------------------------------------------------------------------------- the callers, each a process


def get(port: int, size: int) -> dict[str, float]:
    """Fetch so many bytes over one connection."""
    expected = _crc(size)
    began = time.perf_counter()
    crc = count = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"g" + size.to_bytes(8, "big"))
        while data := connection.recv(262_144):
            crc, count = zlib.crc32(data, crc), count + len(data)
    took = time.perf_counter() - began
    return {"took": took, "wrong": float((crc, count) != (expected, size))}


def put(port: int, size: int) -> dict[str, float]:
    """Send so many bytes over one connection, and their end."""
    expected = size.to_bytes(8, "big") + _crc(size).to_bytes(4, "big")
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"p")
        for begin in range(0, size, len(PIECE)):
            connection.sendall(PIECE[: size - begin])
        connection.shutdown(socket.SHUT_WR)
        said = _exactly(connection, 12)
    return {"took": time.perf_counter() - began, "wrong": float(said != expected)}


def calls(port: int, count: int, callers: int) -> dict[str, float]:
    """Connect so often, each time for one small message and its answer, with so many callers at once."""
    numbers = iter(range(count))
    lock = threading.Lock()
    times: list[float] = []
    wrong = 0

    def work() -> None:
        nonlocal wrong
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            said = b"message %d" % number
            began = time.perf_counter()
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"e" + said)
                    connection.shutdown(socket.SHUT_WR)
                    heard = connection.recv(100)
                    while more := connection.recv(100):
                        heard += more
            except OSError:
                heard = b""
            times.append(time.perf_counter() - began)
            wrong += heard != said

    threads = [threading.Thread(target=work) for _ in range(callers)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {"took": time.perf_counter() - began, "wrong": float(wrong), **_spread(times)}


def talk(port: int, count: int, callers: int) -> dict[str, float]:
    """Send so many small messages over so many connections that stay open, each after the answer to the last."""
    times: list[float] = []
    wrong = 0

    def work() -> None:
        nonlocal wrong
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"e")
            for number in range(count // callers):
                said = b"%64d" % number
                began = time.perf_counter()
                connection.sendall(said)
                wrong += _exactly(connection, 64) != said
                times.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work) for _ in range(callers)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    wrong += len(times) != count // callers * callers
    return {"took": time.perf_counter() - began, "wrong": float(wrong), **_spread(times)}


def hold(port: int, held: int) -> dict[str, float]:
    """Keep so many connections, each with a message once in `PACE`, until standard input ends; one more is stalled."""
    allow_files()
    over = threading.Event()
    times: list[float] = []
    wrong = 0
    opened: list[socket.socket] = []
    stalled = socket.create_connection(("127.0.0.1", port))
    stalled.sendall(b"g" + (1 << 40).to_bytes(8, "big"))
    for _ in range(held):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"e")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.append(connection)
    for number, connection in enumerate(opened):  # each is carried before the clock starts
        said = b"%8d" % number
        connection.sendall(said)
        wrong += _exactly(connection, 8) != said

    def talk(mine: Sequence[socket.socket], phase: float) -> None:
        nonlocal wrong
        turn = time.perf_counter() + phase
        number = 0
        while True:
            for connection in mine:
                if over.wait(max(0.0, turn - time.perf_counter())):
                    return
                number += 1
                said = b"%8d" % number
                began = time.perf_counter()
                connection.sendall(said)
                wrong += _exactly(connection, 8) != said
                times.append(time.perf_counter() - began)
                turn = max(turn + PACE / len(mine), time.perf_counter() - PACE)

    threads = [
        threading.Thread(target=talk, args=(opened[first::CALLERS], PACE * first / held)) for first in range(CALLERS)
    ]
    for each in threads:
        each.start()
    print("held", flush=True)
    for word in sys.stdin:
        if word.strip() == "mark":
            print(json.dumps({"wrong": float(wrong), **_spread(times)}), flush=True)
            times.clear()
    over.set()
    for each in threads:
        each.join()
    for connection in (*opened, stalled):
        connection.close()
    return {"wrong": float(wrong), **_spread(times)}


def _spread(times: list[float]) -> dict[str, float]:
    if not times:
        return {"p50": 0.0, "p99": 0.0, "count": 0.0}
    ordered = sorted(times)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "count": float(len(ordered))}


ROLES: dict[str, Callable[..., dict[str, float]]] = {"get": get, "put": put, "calls": calls, "talk": talk, "hold": hold}


# ---------------------------------------------------------------------------- the peers


@attrs.frozen
class Forwarding:
    """A forward at work."""

    port: int
    processes: tuple[int, ...]
    """Those that carry, of which the memory is measured."""


@attrs.frozen
class Peer:
    """One way to forward a port."""

    name: str
    start: Callable[[int, Path, ExitStack, float], Forwarding]
    """Starts to forward a port. The number is the delay of the line between both sides, in seconds."""
    is_ours: bool = False


def _direct(target: int, folder: Path, stack: ExitStack, delay: float) -> Forwarding:
    return Forwarding(_relayed(target, delay, folder, stack), ())


def _muxkit(scheme: str, target: int, folder: Path, stack: ExitStack, delay: float) -> Forwarding:
    server, local = free_port(), free_port()
    theirs: list[str] = []
    mine: list[str] = []
    if scheme.endswith(("tls", "wss")):
        if not (folder / "ca.pem").exists():
            authority = trustme.CA()
            authority.cert_pem.write_to_path(folder / "ca.pem")
            authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(
                folder / "server.pem"
            )
        theirs, mine = ["--cert", str(folder / "server.pem")], ["--ca", str(folder / "ca.pem")]
    command = [sys.executable, "-P", "-m", "muxkit", "forward"]
    first = _process([*command, _url(scheme, server), "--serve", "--allow", str(target), *theirs], folder, stack)
    _until_listening(server, first)
    url = _url(scheme, _relayed(server, delay, folder, stack))
    second = _process([*command, url, "-L", f"{local}:{target}", *mine], folder, stack)
    _until_listening(local, second)
    return Forwarding(local, (first.pid, second.pid))


def _url(scheme: str, port: int) -> str:
    return f"{scheme}://localhost:{port}/forward" if "ws" in scheme else f"{scheme}://127.0.0.1:{port}"


def _openssh(target: int, folder: Path, stack: ExitStack, delay: float) -> Forwarding:
    key, host = folder / "openssh_key", folder / "openssh_host"
    for each in (key, host):
        if not each.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(each)], check=True)
    keys = folder / "authorized_keys"
    keys.write_text(key.with_suffix(".pub").read_text())
    server, local = free_port(), free_port()
    settings = {
        "Port": server,
        "ListenAddress": "127.0.0.1",
        "HostKey": host,
        "AuthorizedKeysFile": keys,
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "AllowTcpForwarding": "local",
        "MaxStartups": 100,
    }
    config = folder / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it wants to be confined, and systemd would have made it
    sshd = _process([_found("sshd"), "-D", "-e", "-f", str(config)], folder, stack)
    _until_listening(server, sshd)
    port = _relayed(server, delay, folder, stack)
    quiet = [
        "-F",
        "none",
        "-N",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "BatchMode=yes",
    ]
    ssh = _process(
        ["ssh", *quiet, "-i", str(key), "-L", f"{local}:127.0.0.1:{target}", "-p", str(port), "127.0.0.1"],
        folder,
        stack,
    )
    _until_listening(local, ssh)
    return Forwarding(local, (ssh.pid, *_below(sshd.pid)))


def _asyncssh(target: int, folder: Path, stack: ExitStack, delay: float) -> Forwarding:
    if find_spec("asyncssh") is None:
        raise FileNotFoundError("asyncssh")
    key, server, local = str(folder / "asyncssh_key"), free_port(), free_port()
    if not Path(key).exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    serving = _process([sys.executable, "-P", "-c", ASYNCSSH_SERVER, key, str(server)], folder, stack)
    _until_listening(server, serving)
    arguments = map(str, (key, _relayed(server, delay, folder, stack), local, target))
    calling = _process([sys.executable, "-P", "-c", ASYNCSSH_CLIENT, *arguments], folder, stack)
    _until_listening(local, calling)
    return Forwarding(local, (calling.pid, serving.pid))


ASYNCSSH_SERVER = """
import asyncio, sys, asyncssh
key, server = sys.argv[1], int(sys.argv[2])
class Server(asyncssh.SSHServer):
    def connection_requested(self, *place):
        return True
async def main():
    known = asyncssh.import_authorized_keys(open(key + ".pub").read())
    keys = {"server_host_keys": [key], "authorized_client_keys": known}
    await asyncssh.listen("127.0.0.1", server, server_factory=Server, **keys)
    await asyncio.Event().wait()
asyncio.run(main())
"""
ASYNCSSH_CLIENT = """
import asyncio, sys, asyncssh
key, server, local, target = sys.argv[1], *map(int, sys.argv[2:])
async def main():
    async with asyncssh.connect("127.0.0.1", server, known_hosts=None, client_keys=[key]) as connection:
        await connection.forward_local_port("127.0.0.1", local, "127.0.0.1", target)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def _found(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise FileNotFoundError(program)
    return path


def _process(arguments: Sequence[str], folder: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
    log = stack.enter_context((folder / "log").open("ab"))
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_end, process)
    return process


def _relayed(port: int, delay: float, folder: Path, stack: ExitStack) -> int:
    """Return a port from which a relay leads to `port`, or `port` itself without a delay."""
    if not delay:
        return port
    relayed = free_port()
    chaos = [sys.executable, "-P", "-m", "muxkit", "chaos", f"127.0.0.1:{relayed}", f"127.0.0.1:{port}"]
    _until_listening(relayed, _process([*chaos, "--delay", str(delay)], folder, stack))
    return relayed


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """Poll: another process's listening wakes nothing here."""
    ends = time.monotonic() + STARTS
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"{process.args!r} does not listen on {port}: exit code {process.poll()}")
        time.sleep(PAUSE)


def _below(process: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield process
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _below(int(child))


PEERS = (
    Peer("no forward", _direct),
    Peer("OpenSSH -L", _openssh),
    Peer("asyncssh", _asyncssh),
    Peer("bpmux+tcp", partial(_muxkit, "bpmux+tcp"), is_ours=True),
    Peer("bpmux+tls", partial(_muxkit, "bpmux+tls"), is_ours=True),
    Peer("bpmux+ws", partial(_muxkit, "bpmux+ws"), is_ours=True),
    Peer("bpmux+wss", partial(_muxkit, "bpmux+wss"), is_ours=True),
    Peer("relink+tcp", partial(_muxkit, "relink+tcp"), is_ours=True),
    Peer("aqueduct+tcp", partial(_muxkit, "aqueduct+tcp"), is_ours=True),
    Peer("e3x+tcp", partial(_muxkit, "e3x+tcp"), is_ours=True),
)


# ---------------------------------------------------------------------------- measuring


@attrs.define
class Figures:
    """What one peer reached, over all rounds."""

    down: list[float] = attrs.field(factory=list)
    """MiB a second."""
    up: list[float] = attrs.field(factory=list)
    calls: list[float] = attrs.field(factory=list)
    """Connections a second."""
    talks: list[float] = attrs.field(factory=list)
    """Messages and their answers a second, over connections that stay open."""
    talk_cost: list[float] = attrs.field(factory=list)
    """Seconds of processor time of both sides for one of them."""
    alone: list[float] = attrs.field(factory=list)
    """Seconds, the p99 of messages on held connections."""
    beside: list[float] = attrs.field(factory=list)
    """The same beside a stalled connection and a large one."""
    large: list[float] = attrs.field(factory=list)
    """MiB a second of that large one."""
    cost: list[float] = attrs.field(factory=list)
    """Seconds of processor time of both sides for a GiB."""
    call_cost: list[float] = attrs.field(factory=list)
    """The same for a connection."""
    crowded: list[float] = attrs.field(factory=list)
    """Connections a second beside those that are held."""
    memory: int = 0
    """Bytes, the most that one process had resident."""
    wrong: int = 0


def caller(*arguments: object) -> subprocess.Popen[str]:
    """Start a caller of one of the roles."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.soak.forward_peers", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def called(*arguments: object) -> dict[str, float]:
    """Run a caller to its end; return what it measured."""
    with caller(*arguments) as process:
        said, _ = process.communicate()
    return _read(said)


def _read(said: str) -> dict[str, float]:
    if not said.strip():
        return {"took": float("inf"), "wrong": 1.0}
    measured: dict[str, float] = json.loads(said.splitlines()[-1])
    return measured


@contextmanager
def target() -> Iterator[int]:
    """Run the target in a process of its own; yield its port."""
    with caller("serve") as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def measure(peer: Peer, port: int, figures: Figures, arguments: Sizes) -> None:
    """Measure a peer once."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forwarding = peer.start(port, Path(folder), stack, 0.0)
        called("calls", forwarding.port, 20, 2)  # warm-up
        spent = _processor_time(forwarding)
        for role, into in (("get", figures.down), ("put", figures.up)):
            found = called(role, forwarding.port, arguments.bulk * MIB)
            into.append(arguments.bulk / found["took"])
            figures.wrong += int(found["wrong"])
        figures.cost.append((_processor_time(forwarding) - spent) / (2 * arguments.bulk / 1024))
        spent = _processor_time(forwarding)
        found = called("calls", forwarding.port, arguments.calls, CALLERS)
        figures.calls.append(arguments.calls / found["took"])
        figures.call_cost.append((_processor_time(forwarding) - spent) / arguments.calls)
        figures.wrong += int(found["wrong"])
        spent = _processor_time(forwarding)
        found = called("talk", forwarding.port, arguments.talks, CALLERS)
        figures.talks.append(arguments.talks / found["took"])
        figures.talk_cost.append((_processor_time(forwarding) - spent) / arguments.talks)
        figures.wrong += int(found["wrong"])
        if arguments.held:
            _hold(forwarding, figures, arguments)
        for process in forwarding.processes:
            figures.memory = max(figures.memory, _resident(process))


def _hold(forwarding: Forwarding, figures: Figures, arguments: Sizes) -> None:
    with caller("hold", forwarding.port, arguments.held) as holding:
        assert holding.stdin is not None
        assert holding.stdout is not None
        if holding.stdout.readline() != "held\n":
            figures.wrong += 1
            return

        def mark() -> dict[str, float]:
            assert holding.stdin is not None
            assert holding.stdout is not None
            holding.stdin.write("mark\n")
            holding.stdin.flush()
            return _read(holding.stdout.readline())

        if arguments.seconds:
            mark()
            time.sleep(arguments.seconds)  # the span of the measurement
        figures.alone.append(mark()["p99"])
        crowded = called("calls", forwarding.port, arguments.calls, CALLERS)
        figures.crowded.append(arguments.calls / crowded["took"])
        mark()
        found = called("get", forwarding.port, arguments.large * MIB)
        figures.large.append(arguments.large / found["took"])
        figures.beside.append(mark()["p99"])
        said, _ = holding.communicate()
        figures.wrong += int(found["wrong"]) + int(crowded["wrong"]) + int(_read(said)["wrong"])


def _processor_time(forwarding: Forwarding) -> float:
    """Return the seconds that both sides have worked."""
    spent = 0.0
    for process in forwarding.processes:
        with suppress(OSError):  # sshd has short-lived helpers
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _resident(process: int) -> int:
    """Return the most bytes that a process has had resident."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
    return 0


@attrs.frozen(kw_only=True)
class Sizes:
    """How much is measured."""

    rounds: int = 3
    bulk: int = 1024
    calls: int = 2000
    """Connections for one message each, one after the other."""
    talks: int = 16_000
    """Messages over connections that stay open."""
    held: int = 998
    large: int = 10_240
    seconds: float = 10.0
    """How long messages are measured without the large connection."""


def run(sizes: Sizes, names: Sequence[str] = ()) -> dict[str, Figures]:
    """Measure all peers, or those that are named, in turn; return their figures."""
    found = {peer.name: Figures() for peer in PEERS if not names or peer.name in names}
    with target() as port:
        for number in range(sizes.rounds):
            each = sizes if number == 0 else attrs.evolve(sizes, held=0)  # what takes long is measured once
            for peer in PEERS:
                if peer.name not in found:
                    continue
                try:
                    measure(peer, port, found[peer.name], each)
                except FileNotFoundError as missing:
                    del found[peer.name]
                    print(f"{peer.name}: left out, there is no {missing.filename or missing}", flush=True)
                else:
                    print(f"round {number + 1}:\n{table({peer.name: found[peer.name]})}", flush=True)
    return found


def is_right(peers: dict[str, Figures]) -> bool:
    """Return True if no byte was lost or wrong, and muxkit kept little."""
    ours = {peer.name for peer in PEERS if peer.is_ours}
    return not any(figures.wrong or (name in ours and figures.memory > MEMORY) for name, figures in peers.items())


def table(peers: dict[str, Figures]) -> str:
    """Write the medians as a table."""
    rows = [
        (
            "forward",
            "down",
            "up",
            "cost",
            "calls",
            "cost",
            "talk",
            "cost",
            "held",
            "beside",
            "large",
            "calls",
            "memory",
            "wrong",
        ),
        ("", "MiB/s", "MiB/s", "s/GiB", "1/s", "ms", "1/s", "ms", "p99 ms", "p99 ms", "MiB/s", "1/s", "MiB", ""),
    ]
    for name, each in peers.items():
        lists = (
            *(each.down, each.up, each.cost, each.calls, each.call_cost),
            *(each.talks, each.talk_cost, each.alone, each.beside, each.large, each.crowded),
        )
        down, up, cost, rate, call, talks, talk_cost, alone, beside, large, crowded = (
            statistics.median(values) if values else 0.0 for values in lists
        )
        rows.append(
            (
                *(name, f"{down:.0f}", f"{up:.0f}", f"{cost:.2f}", f"{rate:.0f}", f"{call * 1e3:.2f}"),
                *(f"{talks:.0f}", f"{talk_cost * 1e3:.3f}"),
                *(f"{alone * 1e3:.1f}", f"{beside * 1e3:.1f}", f"{large:.0f}", f"{crowded:.0f}"),
                *(f"{each.memory / MIB:.0f}", f"{each.wrong}"),
            )
        )
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve()
    if len(sys.argv) > 1 and sys.argv[1] in ROLES:
        print(json.dumps(ROLES[sys.argv[1]](*map(int, sys.argv[2:]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = Sizes()
    parser.add_argument("--rounds", type=int, default=plain.rounds)
    parser.add_argument("--bulk", type=int, default=plain.bulk)
    parser.add_argument("--calls", type=int, default=plain.calls)
    parser.add_argument("--talks", type=int, default=plain.talks)
    parser.add_argument("--held", type=int, default=plain.held)
    parser.add_argument("--large", type=int, default=plain.large)
    parser.add_argument("--seconds", type=float, default=plain.seconds)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(peer.name for peer in PEERS)}")
    given = vars(parser.parse_args())
    names = given.pop("names")
    found = run(Sizes(**given), names)
    print(table(found))
    sys.exit(0 if is_right(found) else 1)


if __name__ == "__main__":
    main()
