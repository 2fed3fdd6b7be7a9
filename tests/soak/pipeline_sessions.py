"""What a Spark query of many sessions costs: processor time of driver and server, for each trigger and when idle.

    python -m tests.soak.pipeline_sessions [--sessions 1000 10000] [--transport tcp tls] [--idle 20]

The planner is called as Spark calls it, without a JVM: plan, take the spans apart, commit. Beside it in the same run is
the way of earlier versions, one status request and one acknowledgement for each session. Ends with 1 if a position is
wrong, or an idle query of 1,000 sessions uses more than 0.02 cores.
"""

from __future__ import annotations

import argparse
import logging
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio
import trustme

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from muxkit.pipeline.options import SourceOptions  # noqa: E402 - found by now
from muxkit.pipeline.source.planner import Planner  # noqa: E402
from muxkit.protocols import restream  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

IDLE_CORES: Final = 0.02  # that an idle query of 1,000 sessions may use
KEEP: Final = 24 * 3600.0  # s


def uuid_of(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


# ---------------------------------------------------------------------------- the server, a process of its own


async def serve(sessions: int, transport: str, folder: Path) -> None:
    """Serve sessions; on each line of standard input, `feed` or `cpu`, act and print the processor time so far."""
    options: dict[str, Any] = {}
    if transport == "tls":
        options["ssl_context"] = context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "server.pem")
    async with restream.open_store("memory:", keep=KEEP) as store, trio.open_nursery() as nursery:
        names = [uuid_of(number) for number in range(sessions)]
        for name in names:
            await store.register(name, {}, params={}, attached=False)
            await store.append_many(name, [1, 2, 3])
        start = partial(
            restream.serve,
            f"restream+{transport}://127.0.0.1:0",
            store,
            application=restream.Fed(),
            config=restream.ServerConfig(status=True, line=4 << 20),
            **options,
        )
        served: restream.Served = await nursery.start(start)
        print(served.url, flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            if line == "feed\n":
                for name in names:
                    await store.append(name, 4)
            if line == "positions\n":
                print(sum([(await store.status(name)).acknowledged for name in names]), flush=True)
            else:
                print(time.process_time(), flush=True)
        nursery.cancel_scope.cancel()


class Server:
    """The process that serves, and its processor time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.url: str = process.stdout.readline().strip()

    def ask(self, line: str) -> float:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return float(process.stdout.readline())


@contextmanager
def serving(sessions: int, transport: str) -> Iterator[tuple[Server, dict[str, str]]]:
    """Start the server; also the options of a source that reaches it."""
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(f"{folder}/server.pem")
        command = [sys.executable, "-m", "tests.soak.pipeline_sessions", "--serve", str(sessions), transport, folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                yield Server(process), {"tlsCaFile": f"{folder}/ca.pem"} if transport == "tls" else {}
            finally:
                process.kill()


# ---------------------------------------------------------------------------- the driver


@attrs.frozen
class Cost:
    """Processor time in s, of the driver and of the server."""

    driver: float
    server: float

    def __str__(self) -> str:
        return f"driver {1000 * self.driver:,.0f} ms, server {1000 * self.server:,.0f} ms"


def cost(server: Server, act: Callable[[], None]) -> Cost:
    before, own = server.ask("cpu"), time.process_time()
    act()
    own = time.process_time() - own
    return Cost(own, server.ask("cpu") - before)


class Query:
    """A query that is called as Spark calls one: each call runs a loop of its own."""

    def __init__(self, server: Server, sessions: int, options: Mapping[str, str], *, one_by_one: bool) -> None:
        names = " ".join(uuid_of(number) for number in range(sessions))
        given = {"servers": server.url, "streams": names, "reader": "soak", **options}
        given |= {"failOnMissingServer": "true", "statusTimeout": "30m", "ackTimeout": "30m"}  # no load ends it
        self._planner = Planner(SourceOptions.parse(given))
        self._at = self._planner.initial()
        self._server = server
        if one_by_one:
            self._planner._streams._single.add(server.url)

    def trigger(self) -> None:
        """Plan one batch and commit it."""
        end = trio.run(self._planner.latest, self._at)
        assert end != self._at
        trio.run(self._planner.spans, self._at, end)
        trio.run(self._planner.commit, end)
        self._at = end

    def idle(self, seconds: float) -> float:
        """Look for new messages for some time, as Spark does between two triggers; return the looks a second."""
        began, looks = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            assert trio.run(self._planner.latest, self._at) == self._at
            looks += 1
        return looks / (time.monotonic() - began)


def measure(sessions: int, transport: str, *, rounds: int, idle: float) -> tuple[Cost, Cost, float, int]:
    """Return the cost of a trigger, of one as it was, the cores of an idle query, and what is acknowledged in all."""
    with serving(sessions, transport) as (server, options):
        before = _triggers(server, Query(server, sessions, options, one_by_one=True), rounds)
        query = Query(server, sessions, options, one_by_one=False)
        now = _triggers(server, query, rounds)
        query.idle(0.01)
        began = time.monotonic()
        spent = cost(server, partial(_idle, query, idle))
        cores = (spent.driver + spent.server) / (time.monotonic() - began)
        return now, before, cores, int(server.ask("positions"))


def _triggers(server: Server, query: Query, rounds: int) -> Cost:
    """Return the median of the rounds, each with one new message in each session."""
    costs = []
    for _ in range(1 + rounds):
        server.ask("feed")
        costs.append(cost(server, query.trigger))
    del costs[0]  # it finds the streams
    return Cost(*(statistics.median(each) for each in zip(*map(attrs.astuple, costs), strict=True)))


def _idle(query: Query, seconds: float) -> None:
    query.idle(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--transport", choices=["tcp", "tls"], nargs="+", default=["tcp", "tls"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=20.0, help="s")
    options = parser.parse_args()
    logging.getLogger("muxkit").setLevel(logging.ERROR)  # each session tells what was acknowledged before
    failed = False
    for sessions in options.sessions:
        for transport in options.transport:
            now, before, cores, acknowledged = measure(sessions, transport, rounds=options.rounds, idle=options.idle)
            expected = sessions * (3 + 2 * (1 + options.rounds))
            saved = (before.driver + before.server) / (now.driver + now.server)
            print(f"{sessions:,} sessions over {transport}: a trigger costs {now}", flush=True)
            print(f"    one request for each session: {before}, {saved:.0f} times as much")
            print(f"    idle: {cores:.4f} cores of driver and server; {acknowledged:,} of {expected:,} acknowledged")
            failed |= acknowledged != expected or (sessions <= 1000 and cores > IDLE_CORES)
    return int(failed)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        count, kind, where = sys.argv[-3:]
        trio.run(serve, int(count), kind, Path(where))
    else:
        sys.exit(main())
