"""A standalone Spark cluster of real processes, and jobs whose driver has a Python that executors cannot see."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sysconfig
import tarfile
import time
import venv
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from muxkit.pipeline import java_home
from tests._jvm import QUICK
from tests._pages import everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("_cluster_job.py")
HOST = "127.0.0.1"
PAGE = "docs/how-to/clusters.md"
COMMANDS = [item.name for item in everything() if (item.page, item.kind) == (PAGE, "command")][-3:]
"""Unpack the environment, name its Python, submit; the two before are for one path on all machines."""
START_TIMEOUT = 240.0  # s that a process of the cluster may take until it says what is waited for
OURS = ("muxkit", "pyspark_muxkit", "muxkit_adapters", "muxkit_bench")
SMALL = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": QUICK,
    "spark.ui.enabled": "false",
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


def until(answer: Callable[[], object], what: str, *processes: subprocess.Popen[Any]) -> None:
    """Wait until `answer()` is true; fails when one of the processes has ended, or after `START_TIMEOUT`."""
    deadline = time.monotonic() + START_TIMEOUT
    while not answer():
        for process in processes:
            assert process.poll() is None, f"{process.args!r} ended with {process.returncode} before {what}"
        assert time.monotonic() < deadline, f"{what}: not within {START_TIMEOUT} s"
        time.sleep(0.05)


# ---------------------------------------------------------------------------- a packed environment


def pack_environment(folder: Path) -> Path:
    """Make `env.tar.gz`: an environment with muxkit, and without pyspark, which the cluster has."""
    installed = Path(sysconfig.get_paths()["purelib"])
    needed = folder / "needed"  # on all machines alike; an archive of 117 MB would show nothing more
    needed.mkdir()
    for path in installed.iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("muxkit", "pyspark", "py4j", "__")):
            (needed / path.name).symlink_to(path)
    made = folder / "packed"
    venv.create(made, with_pip=False, symlinks=True)
    packages = next(made.glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text(f"{needed}\n", encoding="utf-8")
    for name in OURS:
        found = next(path for path in (ROOT / name, ROOT / "adapters" / name) if path.is_dir())
        shutil.copytree(found, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
        # As pip does: otherwise each of the many Python processes of a query compiles all of it.
        compileall.compile_dir(
            packages / name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
    for path in installed.glob("muxkit-*.dist-info"):  # the metadata of the package
        shutil.copytree(path, packages / path.name)
    archive = folder / "env.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        for path in made.iterdir():
            packed.add(path, path.name)
    return archive


# ---------------------------------------------------------------------------- processes of the cluster


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def ancestors(pid: int) -> list[int]:
    """Return the processes above one, from its parent up."""
    found: list[int] = []
    while (pid := parent(pid)) > 1:
        found.append(pid)
    return found


def can_hide() -> bool:
    """Tell whether processes can be given a view of the file system in which a folder is empty."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@attrs.define
class Cluster:
    """A master and its workers, each a process, and the folder in which drivers run, which workers see empty."""

    folder: Path
    driver: Path
    archive: Path
    hides: bool
    url: str = ""
    master: subprocess.Popen[bytes] | None = None
    workers: list[subprocess.Popen[bytes]] = attrs.Factory(list)

    @property
    def home(self) -> Path:
        import pyspark

        return Path(pyspark.__file__).parent

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables in which nothing names the Python of the tests."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYSPARK", "SPARK", "PYTHON", "VIRTUAL_ENV"))
        }
        return kept | {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK,
            "SPARK_SUBMIT_OPTS": QUICK,
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def start_master(self) -> None:
        log = self.folder / "master.log"
        command = [f"{self.home}/bin/spark-class", "org.apache.spark.deploy.master.Master"]
        self.master = self._start([*command, "--host", HOST, "--port", "0", "--webui-port", "0"], log)
        until(lambda: re.search(r"Starting Spark master at spark://\S+", log.read_text()), "a master", self.master)
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found is not None
        self.url = found[1]

    def start_worker(self) -> None:
        """Start one of one core; returns when the master has it."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        command = [f"{self.home}/bin/spark-class", "org.apache.spark.deploy.worker.Worker", "--host", HOST]
        command += [
            "--webui-port",
            "0",
            "--cores",
            "1",
            "--memory",
            "600m",
            "-d",
            str(self.folder / log.stem),
            self.url,
        ]
        if self.hides:
            hide = f'mount -t tmpfs none "{self.driver}" && exec "$@"'
            command = ["unshare", "-rm", "sh", "-c", hide, "worker", *command]
        worker = self._start(command, log)
        until(lambda: "Successfully registered with master" in log.read_text(), "a worker", worker)
        self.workers.append(worker)

    def _start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self.environment(), cwd=self.folder
            )

    def has_worker(self, pid: int) -> bool:
        return any(worker.pid == pid and worker.poll() is None for worker in self.workers)

    def kill_worker(self, pid: int) -> None:
        """Kill one by its process; its executors end when they miss it."""
        worker = next(worker for worker in self.workers if worker.pid == pid)
        worker.kill()
        assert worker.wait() == -signal.SIGKILL

    def stop(self) -> None:
        for process in (*self.workers, *([self.master] if self.master else [])):
            if process.poll() is None:
                process.terminate()
        for process in (*self.workers, *([self.master] if self.master else [])):
            process.wait()

    @contextmanager
    def submitted(self, task: Mapping[str, object], **config: str) -> Iterator[Submitted]:
        """Run a job by the commands of the page, its driver in a process of its own, ended with the block."""
        place = self.driver / f"job-{len(list(self.driver.iterdir()))}"
        place.mkdir()
        shutil.copy(JOB, place / "job.py")
        shutil.copy(self.archive, place)
        (place / "task.json").write_text(json.dumps(task), encoding="utf-8")
        settings = "".join(f"{name} {value}\n" for name, value in (SMALL | config).items())
        (place / "spark-defaults.conf").write_text(settings, encoding="utf-8")
        text = "\n".join(["set -e", *COMMANDS]).replace("spark://master:7077", self.url)
        with (place / "log").open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", text],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(SPARK_CONF_DIR=str(place), PATH=f"{self.home}/bin:{os.environ['PATH']}"),
                cwd=place,
                start_new_session=True,
            )
        try:
            yield Submitted(place, process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@attrs.frozen
class Submitted:
    """A job that runs."""

    folder: Path
    process: subprocess.Popen[bytes]

    def result(self) -> dict[str, Any]:
        """Wait for the end of the job; what it found."""
        code = self.process.wait()
        assert code == 0, (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-6000:]
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return found


@contextmanager
def cluster(folder: Path, *, workers: int = 2) -> Iterator[Cluster]:
    """A master and so many workers, until the block ends."""
    driver = folder / "driver"
    driver.mkdir()
    made = Cluster(folder, driver, pack_environment(folder), can_hide())
    with ExitStack() as stack:
        stack.callback(made.stop)
        made.start_master()
        for _ in range(workers):
            made.start_worker()
        yield made
