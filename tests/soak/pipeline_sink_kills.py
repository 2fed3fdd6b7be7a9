"""Each row is committed once when driver, workers and server are killed or fail, in every moment of a batch.

    python tests/soak/pipeline_sink_kills.py [--rounds 24] [--seed 1]

A query writes numbers through the sink. In each round something is ordered to happen at a moment of the next batch
(while rows are written, when they are prepared, before and behind the commit): the driver with its JVM is killed, the
server is killed and started again, or the step fails. The query that goes on has another number of partitions. At the
end the stream must have each number once, batch by batch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import trio

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from muxkit.pipeline import Key, StagingClient, open_staging  # noqa: E402 - found by the line before
from tests.pipeline._staging_process import StagingProcess, staging_process  # noqa: E402
from tests.soak._pipeline_sink_query import APP, FAILED, MOMENTS, ROWS, STREAM, give_order  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY: Final = Key(STREAM, APP)
PATIENCE: Final = 300.0  # s for anything to happen
LOOK: Final = 0.02  # s
ACTIONS: Final = ("kill the driver", "kill the server", "fail")

Round = tuple[str, str]  # action and moment


@attrs.define
class Tally:
    """What was done, and what came of it."""

    kills: int = 0
    failures: int = 0
    starts: int = 0
    batches: int = 0
    rows: int = 0
    replayed: int = 0  # batches that the server had when the query went on with them
    errors: list[str] = attrs.field(factory=list)


class Driver:
    """The query with its JVM, in a group of processes of its own."""

    def __init__(self, folder: Path, url: str, dice: random.Random, tally: Tally) -> None:
        self._folder = folder
        self._url = url
        self._dice = dice
        self._tally = tally
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._tally.starts += 1
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.soak._pipeline_sink_query",
                    str(self._folder),
                    self._url,
                    str(self._dice.randint(1, 4)),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """It must have been alive."""
        assert self._process is not None
        assert self.is_alive, "the driver had ended by itself"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ended(self) -> int:
        """The exit code, when it has ended by itself."""
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        # What it leaves behind (its JVM) is not waited for, as no caller would wait for it elsewhere.
        os.killpg(self._process.pid, signal.SIGKILL) if _is_group(self._process.pid) else None
        return code

    def stop(self) -> None:
        if self.is_alive:
            self.kill()


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def batches_of(folder: Path) -> tuple[int, int]:
    """The last batch that was begun, and the last that Spark knows to be committed, by the checkpoint."""
    found = []
    for part in ("offsets", "commits"):
        names = (folder / "checkpoint" / part).glob("[0-9]*")
        found.append(max((int(path.name) for path in names), default=-1))
    return found[0], found[1]


def plan(dice: random.Random, rounds: int) -> list[Round]:
    """Each action at each moment, as often as it comes to, in an order that the seed decides."""
    every = [(action, moment) for action in ACTIONS for moment in MOMENTS]
    chosen = [every[number % len(every)] for number in range(rounds)]
    dice.shuffle(chosen)
    return chosen


def committed(url: str) -> int:
    """The last batch that the server has."""

    async def ask() -> int:
        standing = await StagingClient(url, patience=PATIENCE).standing(KEY)
        return -1 if standing.batch is None else standing.batch

    return trio.run(ask)


def run(folder: Path, seed: int, rounds: Sequence[Round], *, say: Callable[[str], None] = lambda line: None) -> Tally:
    dice, tally = random.Random(seed), Tally()
    where = f"sqlite:{folder / 'staged.db'}"
    with staging_process(where) as server:
        server.start()
        driver = Driver(folder, server.url, dice, tally)
        try:
            driver.start()
            for number, (action, moment) in enumerate(rounds):
                if number and dice.random() < 0.5:  # otherwise it may meet the batch that the last round has met
                    after = batches_of(folder)[1]
                    _wait(lambda after=after: batches_of(folder)[1] > after, driver, "another batch")  # type: ignore[misc]
                _round(folder, number, action, moment, server, driver, tally)
                begun, known = batches_of(folder)
                say(f"{number + 1:>3}: {action}, {moment}: batch {begun} was under way, {known} known to be committed")
            last = committed(server.url) + 1
            _wait(lambda: committed(server.url) >= last, driver, "one more batch")
        finally:
            driver.stop()
        server.stop()
    _look(where, tally)
    tally.replayed = sum(1 for _ in (folder / "aborts").open()) if (folder / "aborts").exists() else 0
    return tally


def _round(
    folder: Path, number: int, action: str, moment: str, server: StagingProcess, driver: Driver, tally: Tally
) -> None:
    give_order(folder, number, moment, "fail" if action == "fail" else "hang")
    _wait((folder / f"happened-{number}").exists, driver, f"{action}, {moment}")
    begun, known = batches_of(folder)
    assert begun == known + 1, f"batch {begun} was begun, and {known} was known to be committed"
    if action == "kill the driver":
        driver.kill()
        tally.kills += 1
        driver.start()
    elif action == "kill the server":
        server.kill()
        tally.kills += 1
        server.start()
        (folder / f"release-{number}").touch()
    else:
        tally.failures += 1
        if moment in ("committing", "committed"):
            code = driver.ended()
            assert code == FAILED, f"the driver ended with {code}"
            driver.start()
        # A task that failed is tried again by Spark.


def _wait(is_there: Callable[[], bool], driver: Driver, what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not is_there():
        assert driver.is_alive, f"the driver ended by itself, waiting for: {what}"
        assert time.monotonic() < until, f"not within {PATIENCE:g} s: {what}"
        time.sleep(LOOK)


def _look(where: str, tally: Tally) -> None:
    """Each number once, and each batch whole."""

    async def read() -> list[int]:
        async with open_staging(where) as store:
            standing = await store.progress(KEY)
            tally.batches = 1 + (-1 if standing.batch is None else standing.batch)
            at, found = 0, []
            while (published := await store.read(STREAM, at)) is not None:
                found += [int(row) for row in published.rows]
                at += len(published.rows)
            return found

    found = trio.run(read)
    tally.rows = len(found)
    for batch in range(tally.batches):
        span = range(ROWS * batch, ROWS * (batch + 1))
        if sorted(found[span.start : span.stop]) != [*span]:
            tally.errors.append(f"batch {batch} is not what was written")
    if len(found) != ROWS * tally.batches:
        tally.errors.append(f"{len(found)} rows in {tally.batches} batches of {ROWS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        rounds = plan(random.Random(options.seed), options.rounds)
        tally = run(Path(folder), options.seed, rounds, say=lambda line: print(line, flush=True))
    print(
        f"{tally.kills} kills and {tally.failures} failures in {time.perf_counter() - began:.0f} s: {tally.batches} "
        f"batches, {tally.rows:,} rows, {tally.starts} drivers, {tally.replayed} aborts; {len(tally.errors)} errors"
    )
    for error in tally.errors:
        print(error)
    sys.exit(bool(tally.errors))


if __name__ == "__main__":
    main()
