"""The proof that kills change nothing: servers and a Spark query as processes, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import trio

from muxkit.pipeline.errors import PipelineError
from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.protocols import restream
from muxkit_bench.proof.data import Verdict, files_of_batches, files_of_sink, judge, stream_names
from muxkit_bench.proof.driver import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

POLL_INTERVAL: Final = 0.02  # s between two checks of the files of other processes
TOLD_INTERVAL: Final = 0.5  # s between two counts of what is written
WAIT_TIMEOUT: Final = 600.0  # s without progress after which the proof fails


class ProofFailed(PipelineError):
    """Something did not happen in time, or a process failed."""


@attrs.frozen
class Kill:
    """What was killed, and where the query stood: the newest batch in its log of offsets and in that of commits."""

    what: str
    moment: str
    planned: int
    committed: int

    def __str__(self) -> str:
        where = "before its first batch" if self.planned < 0 else f"in batch {self.planned}"
        if 0 <= self.planned == self.committed:
            where = f"after batch {self.committed}"
        return f"{self.what} killed at {self.moment!r}, {where}"


@attrs.frozen(kw_only=True)
class Plan:
    """The size of the proof."""

    folder: Path
    streams: int = 4
    servers: int = 2
    count: int = 10_000
    """Messages of each stream."""
    pause: float = 0.02
    """s between two appends to a stream."""
    sink: str = "batches"
    batch: int = 4_000
    """Messages of one batch, at most."""


@attrs.frozen
class Standing:
    """How far a proof is: the newest batch that is planned, the newest that is committed (-1: none), rows in files."""

    planned: int
    committed: int
    written: int
    is_running: bool
    """The query was started, by the driver that runs now."""

    def __str__(self) -> str:
        if not self.is_running:
            return f"{self.written:,} rows written, Spark is starting"
        if self.planned < 0:
            return "the query looks for its streams"
        done = "none is committed" if self.committed < 0 else f"batch {self.committed} is committed"
        return f"{self.written:,} rows written, batch {self.planned} is being read and written, {done}"


class Proof:
    """One proof, a context manager that ends all processes."""

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None] = lambda line: None,
        told: Callable[[Standing], None] = lambda progress: None,
    ) -> None:
        """`say` is called with each line, `told` with the progress while something is waited for."""
        self.plan = plan
        self._told = told
        self._tell_at = 0.0
        self._log_begins = 0  # where the lines of the present driver begin
        self._rows: dict[Path, int] = {}  # by file
        self.kills: list[Kill] = []
        self.names = stream_names(plan.streams)
        self._say = say
        self._stack = ExitStack()
        self._listening: list[socket.socket] = []
        self._servers: list[subprocess.Popen[str]] = []
        self._driver: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._servers_log: IO[str] | None = None

    def __enter__(self) -> Proof:
        for name in ("hold", "held", "stores", "local"):
            (self.plan.folder / name).mkdir(parents=True, exist_ok=True)
        self._log = self._stack.enter_context((self.plan.folder / "driver.log").open("a", encoding="utf-8"))
        self._servers_log = self._stack.enter_context((self.plan.folder / "servers.log").open("a", encoding="utf-8"))
        for number in range(self.plan.servers):
            self._listening.append(self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200)))
            self._servers.append(self._start_server(number))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._driver is not None:
            self._end_driver()
        for process in self._servers:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._stack.close()

    # --- servers

    @property
    def urls(self) -> list[str]:
        return [f"restream+tcp://127.0.0.1:{listening.getsockname()[1]}" for listening in self._listening]

    def kill_server(self, number: int, moment: str) -> None:
        """Kill a server and start it again with the same store; connections wait for it meanwhile."""
        self._kill_server(number, moment)
        self._servers[number] = self._start_server(number)

    def close_server(self, number: int, moment: str) -> int:
        """Kill a server and close its port, so that connections are refused until `reopen_server`; return the port."""
        self._kill_server(number, moment)
        port: int = self._listening[number].getsockname()[1]
        self._listening[number].close()
        return port

    def reopen_server(self, number: int, port: int) -> None:
        """Start a server again on its port, with the same store."""
        self._listening[number] = self._stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=200))
        self._servers[number] = self._start_server(number)

    def _kill_server(self, number: int, moment: str) -> None:
        process = self._servers[number]
        if process.poll() is not None:
            raise ProofFailed(f"server {number} had ended by itself, with code {process.returncode}")
        self._note(f"server {number}", moment)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _start_server(self, number: int) -> subprocess.Popen[str]:
        plan, descriptor = self.plan, self._listening[number].fileno()
        command = [sys.executable, "-m", "muxkit_bench.proof.server", f"--descriptor={descriptor}"]
        command += [f"--store=sqlite:{plan.folder / 'stores' / f'{number}.db'}", f"--count={plan.count}"]
        command += [f"--pause={plan.pause}", *self.names[number :: plan.servers]]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._servers_log, text=True, pass_fds=[descriptor]
        )
        assert process.stdout is not None
        if process.stdout.readline() != "serving\n":
            process.kill()
            raise ProofFailed(f"server {number} did not begin, and ended with code {process.wait()}")
        return process

    # --- the driver

    def start_driver(self) -> None:
        """Start the query from its checkpoint."""
        options = {
            "reader": "proof",
            "servers": " ".join(self.urls),
            "streams": " ".join(
                f"{self.urls[index % self.plan.servers]}#{name}" for index, name in enumerate(self.names)
            ),
            "maxMessagesPerTrigger": str(self.plan.batch),
            "batchRows": "200",
        }
        self._log_begins = (self.plan.folder / "driver.log").stat().st_size
        command = [sys.executable, "-m", "muxkit_bench.proof.driver", f"--folder={self.plan.folder}"]
        command += [f"--sink={self.plan.sink}", f"--options={json.dumps(options)}"]
        self._driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, text=True, start_new_session=True
        )

    def kill_driver(self, moment: str) -> None:
        """Kill the driver and its JVM while it is held at this moment."""
        self.hold(moment)
        self.wait_held(moment)
        self._note("driver and JVM", moment)
        self._end_driver()
        self.release(moment)

    def hold(self, moment: str) -> None:
        if moment not in MOMENTS:
            raise ValueError(f"{moment!r} is none of {', '.join(MOMENTS)}")
        (self.plan.folder / "hold" / moment).touch()

    def wait_held(self, moment: str) -> None:
        self._until(lambda: bool(self._held(moment)), f"the query did not come to {moment!r}")

    def release(self, moment: str) -> None:
        """Release a moment, and wait until no process is held there, so that it can be held again."""
        (self.plan.folder / "hold" / moment).unlink(missing_ok=True)
        if self._driver is None:
            for held in self._held(moment):
                held.unlink(missing_ok=True)  # the process that was held is dead
        else:
            self._until(lambda: not self._held(moment), f"a process stayed at {moment!r}")

    def _held(self, moment: str) -> list[Path]:
        return [*(self.plan.folder / "held").glob(f"{moment}.*")]

    def _end_driver(self) -> None:
        driver = self._driver
        assert driver is not None
        assert driver.stdin is not None
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdin.close()
        self._driver = None

    # --- how far it is

    def batches(self) -> tuple[int, int]:
        """Return the newest batch in the log of offsets, and in that of commits; -1 before the first."""
        checkpoint = self.plan.folder / "checkpoint"
        return _newest(checkpoint / "offsets"), _newest(checkpoint / "commits")

    def acknowledged(self) -> int:
        """Count the acknowledged messages."""
        return sum(status.acknowledged for status in self._statuses())

    def progress(self) -> Standing:
        """Count what is written by now, from the files themselves."""
        planned, committed = self.batches()
        out = self.plan.folder / "out"
        for path in _tables(out):
            if path not in self._rows:
                # A file that is not complete is counted later, one that was replaced is gone.
                with suppress(OSError, pa.ArrowInvalid):
                    self._rows[path] = pq.read_metadata(path).num_rows
        written = sum(rows for path, rows in self._rows.items() if path.exists())
        with (self.plan.folder / "driver.log").open("rb") as log:
            log.seek(self._log_begins)
            return Standing(planned, committed, written, b'"event": "started"' in log.read())

    def finish(self) -> Verdict:
        """Let the query read to the end of all streams, and judge what it has written."""
        if self._driver is None:
            self.start_driver()

        def is_all() -> bool:
            statuses = self._statuses()
            return all(status.final and status.acknowledged == status.head for status in statuses)

        self._until(is_all, "the query did not come to the end of its streams", look=0.3, renewed_by=self.acknowledged)
        driver = self._driver
        assert driver is not None
        assert driver.stdin is not None
        driver.stdin.close()
        if driver.wait() != 0:
            raise ProofFailed(f"the query failed at its end; see {self.plan.folder / 'driver.log'}")
        self._driver = None
        out = self.plan.folder / "out"
        files = files_of_sink(out) if self.plan.sink == "file" else files_of_batches(out)
        return judge(files, self.names, self.plan.count)

    def _statuses(self) -> list[restream.Status]:
        clients = [SourceOptions.parse({"servers": url, "streams": self.names[0]}) for url in self.urls]

        async def ask() -> list[restream.Status]:
            found = []
            for index, name in enumerate(self.names):
                server = index % self.plan.servers
                answer = await Client(clients[server]).status(self.urls[server], name)
                if isinstance(answer, restream.Status):
                    found.append(answer)
            return found

        return trio.run(ask)

    # --- helpers

    def _note(self, what: str, moment: str) -> None:
        if self._driver is None or self._driver.poll() is not None:
            raise ProofFailed(f"the driver had ended by itself; see {self.plan.folder / 'driver.log'}")
        kill = Kill(what, moment, *self.batches())
        self.kills.append(kill)
        self._say(str(kill))

    def _until(
        self,
        holds: Callable[[], bool],
        complaint: str,
        *,
        look: float = POLL_INTERVAL,
        renewed_by: Callable[[], int] | None = None,
    ) -> None:
        ends, mark = time.monotonic() + WAIT_TIMEOUT, -1
        while not holds():
            if time.monotonic() >= self._tell_at:
                self._tell_at = time.monotonic() + TOLD_INTERVAL
                self._told(self.progress())
            if self._driver is None or self._driver.poll() is not None:
                raise ProofFailed(f"{complaint}: the driver has ended; see {self.plan.folder / 'driver.log'}")
            if renewed_by is not None and (now := renewed_by()) > mark:
                ends, mark = time.monotonic() + WAIT_TIMEOUT, now
            if time.monotonic() > ends:
                raise ProofFailed(f"{complaint} within {WAIT_TIMEOUT:g} s; see {self.plan.folder / 'driver.log'}")
            time.sleep(look)


def _tables(out: Path) -> Iterator[Path]:
    """Yield the files that a query has written, without those of unfinished tasks."""
    for folder, folders, names in os.walk(out):  # it passes over folders that Spark removes meanwhile
        folders[:] = [each for each in folders if each != "_temporary"]
        yield from (Path(folder, name) for name in names if name.endswith(".parquet"))


def _newest(folder: Path) -> int:
    if not folder.is_dir():
        return -1
    return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=-1)
