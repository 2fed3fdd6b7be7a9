"""Source, sink, captures and fleet on a standalone cluster whose executors do not see the driver's Python."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import Staging
from tests.pipeline._captures import record_sessions
from tests.pipeline._cluster import COMMANDS, PAGE, Cluster, ancestors, cluster, until
from tests.pipeline._source_servers import ONE, TWO, hall
from tests.pipeline._staging_thread import staging_thread

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.pipeline._staging_thread import StagingThread

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(1800),
    pytest.mark.extras("spark"),
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc and hides a folder from processes"),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def test_source_sink_captures_and_fleet_run_where_the_driver_s_python_is_not(machines: Cluster, tmp_path: Path) -> None:
    assert PAGE == "docs/how-to/clusters.md"
    assert len(COMMANDS) == 3
    trio.run(record_sessions, tmp_path / "captures")
    with hall() as there, staging_thread() as staging:
        for uuid in (ONE, TWO):
            there.feed(uuid, [{"n": n} for n in range(3000)])
        task = {
            "do": "everything",
            "source": {"servers": there.url, "streams": f"{ONE} {TWO}"},
            "sink": {"url": staging.url, "stream": "orders"},
            "checkpoint": str(tmp_path / "checkpoint"),
            "captures": str(tmp_path / "captures"),
            "simulation": "relink",
        }
        with machines.submitted(task) as job:
            found = job.result()
        heads = [staging.ask(partial(Staging.head, stream=name)) for name in ("orders", "batch")]
    assert found["rows"] == sum(each["rows"] for each in found["tasks"]) == 6000
    assert heads == [6000, 1000]
    assert found["frames"] > 100
    assert found["seeds"] == [True] * 20
    for each in found["tasks"]:
        assert each["cwd"].startswith(str(machines.folder / "worker-")), "it did not run on an executor"
        assert each["muxkit"].startswith(each["cwd"]), "this muxkit did not come with the archive"
        assert not each["sees"] or not machines.hides


@pytest.mark.soak  # a minute and more: kills in one JVM are in the suite
def test_no_row_is_lost_or_repeated_when_an_executor_and_a_worker_are_killed(machines: Cluster, tmp_path: Path) -> None:
    carry(machines, tmp_path, count=2000, kills=1)


@pytest.mark.soak
def test_no_row_is_lost_or_repeated_under_many_kills(machines: Cluster, tmp_path: Path) -> None:
    carry(machines, tmp_path, count=20_000, kills=10)


def carry(machines: Cluster, folder: Path, *, count: int, kills: int) -> None:
    """Carry rows from source to sink; in each of the first batches kill an executor in its task, then a worker."""
    gate = Gate(folder / "gate")
    each = count // (2 * kills)  # of both streams together: there are four batches for each kill
    with hall() as there, staging_thread() as staging:
        for uuid in (ONE, TWO):
            there.feed(uuid, [{"n": n} for n in range(count)])
        task = {
            "do": "carry",
            "source": {"servers": there.url, "streams": f"{ONE} {TWO}", "maxMessagesPerTrigger": str(each)},
            "sink": {"url": staging.url, "stream": "carried"},
            "checkpoint": str(folder / "checkpoint"),
            "gate": str(gate.folder),
        }
        with machines.submitted(task, **{"spark.task.maxFailures": "20"}) as job:
            for number in range(kills):
                worker, executor = gate.held(number, machines, job.process)
                os.kill(executor, signal.SIGKILL)
                worker, again = gate.held(number, machines, job.process, without=executor)
                assert again != executor
                machines.kill_worker(worker)
                gate.held(number, machines, job.process, without=again)
                machines.start_worker()
                gate.open_to(number)
            gate.open_to(4 * count)
            found = job.result()
        rows = [row for page in pages(staging, "carried") for row in page]
    assert found["batches"] >= 4 * kills
    assert sorted(rows) == sorted(2 * [b'{"n":%d}' % n for n in range(count)])


def pages(staging: StagingThread, stream: str) -> Iterator[Sequence[bytes]]:
    """All rows of a stream, as the store gives them."""
    after = 0
    while published := staging.ask(partial(Staging.read, stream=stream, after=after)):
        yield published.rows
        after += len(published.rows)


class Gate:
    """Holds the tasks of a batch until it is opened to that batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.open_to(-1)

    def open_to(self, batch: int) -> None:
        fresh = self.folder / "fresh"
        fresh.write_text(str(batch + 1), encoding="utf-8")
        fresh.replace(self.folder / "open")

    def held(
        self, batch: int, machines: Cluster, driver: subprocess.Popen[bytes], *, without: int = 0
    ) -> tuple[int, int]:
        """Wait until a task of the batch is held; the processes of its worker and its executor, not `without`."""
        found: list[tuple[int, int]] = []

        def look() -> bool:
            for path in self.folder.glob(f"held-{batch}-*"):
                above = ancestors(int(path.name.rpartition("-")[2]))
                for executor, worker in pairwise(above):
                    if executor != without and machines.has_worker(worker):
                        found.append((worker, executor))
            return bool(found)

        until(look, f"a task of batch {batch} that is held", driver)
        return found[0]
