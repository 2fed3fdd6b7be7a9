"""The verdict of the proof finds missing, repeated and changed rows, without a JVM."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import trio

from muxkit.protocols import restream
from muxkit_bench.proof.data import files_of_batches, files_of_sink, judge, message, stream_names
from muxkit_bench.proof.driver import MOMENTS, pass_by
from muxkit_bench.proof.run import Plan, Proof
from muxkit_bench.proof.server import feed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NAMES = stream_names(2)
Row = tuple[str, int, bytes]


def row(stream: str, number: int) -> Row:
    return stream, number, msgspec.json.encode(message(stream, number))


def written(folder: Path, rows: Iterable[Row]) -> list[Path]:
    columns = [*zip(*rows, strict=True)]
    path = folder / f"{len([*folder.iterdir()])}.parquet"
    pq.write_table(pa.table({"stream": columns[0], "id": columns[1], "value": columns[2]}), path)
    return [path]


def everything() -> list[Row]:
    return [row(stream, number) for stream in NAMES for number in range(1, 11)]


def test_everything_once_is_right(tmp_path: Path) -> None:
    verdict = judge(written(tmp_path, everything()), NAMES, 10)
    assert verdict.is_right
    assert str(verdict) == "20 rows of 20: 0 missing, 0 repeated, 0 with a wrong CRC or of another stream"


def test_a_row_that_is_missing_is_named(tmp_path: Path) -> None:
    verdict = judge(written(tmp_path, [each for each in everything() if each[:2] != (NAMES[1], 7)]), NAMES, 10)
    assert (verdict.is_right, verdict.missing, verdict.repeated) == (False, 1, 0)
    assert f"stream {NAMES[1]}: messages 7 … 7 are missing, 1 in all" in str(verdict)


def test_a_stream_that_is_missing_altogether_is_noticed(tmp_path: Path) -> None:
    verdict = judge(written(tmp_path, everything()[:10]), NAMES, 10)
    assert (verdict.is_right, verdict.missing) == (False, 10)


def test_a_row_that_came_twice_is_named_also_over_files(tmp_path: Path) -> None:
    files = written(tmp_path, everything()) + written(tmp_path, [row(NAMES[0], 3)])
    verdict = judge(files, NAMES, 10)
    assert (verdict.is_right, verdict.repeated) == (False, 1)
    assert f"stream {NAMES[0]}: message 3 came twice" in str(verdict)


def test_a_row_with_other_bytes_or_of_another_stream_is_wrong(tmp_path: Path) -> None:
    rows = everything()
    changed = message(NAMES[0], 1)
    changed["body"] = str(changed["body"])[:-1] + "!"
    rows[0] = (NAMES[0], 1, msgspec.json.encode(changed))
    rows[1] = (NAMES[0], 2, row(NAMES[1], 2)[2])
    verdict = judge(written(tmp_path, rows), NAMES, 10)
    assert (verdict.is_right, verdict.wrong, verdict.missing) == (False, 2, 0)


def test_only_what_the_log_of_a_sink_names_counts(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()

    def entry(name: str) -> str:
        return json.dumps({"path": f"file:{tmp_path}/{name}", "action": "add"})

    (log / "0").write_text(f"v1\n{entry('a')}")
    (log / "9.compact").write_text(f"v1\n{entry('a')}\n{entry('b')}")
    (log / "10").write_text(f"v1\n{entry('c')}")
    (log / "11").write_text("v1\n")
    (log / ".12.tmp").write_text("half")
    (tmp_path / "orphan").touch()
    assert [path.name for path in files_of_sink(tmp_path)] == ["a", "b", "c"]


def test_what_an_attempt_has_left_in_a_batch_does_not_count(tmp_path: Path) -> None:
    for name in ("batch=0/part-0.parquet", "batch=0/_temporary/0/part-1.parquet", "batch=1/part-0.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.parent.name for path in files_of_batches(tmp_path)] == ["batch=0", "batch=1"]


def test_a_moment_that_nobody_wants_is_passed_by_and_one_that_is_wanted_is_told(tmp_path: Path) -> None:
    for name in ("hold", "held"):
        (tmp_path / name).mkdir()
    pass_by(tmp_path, MOMENTS[0])
    assert [*(tmp_path / "held").iterdir()] == []


async def test_a_server_goes_on_feeding_where_its_store_stands() -> None:
    async with restream.open_store("memory:") as store:
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed, store, NAMES[0], 1000, 3600.0)
                while not (await store.sessions()) or (await store.status(NAMES[0])).head < 250:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        await feed(store, NAMES[0], 1000, 0.0)
        messages = await store.replay(NAMES[0], 0, 2000)
        assert [each.data for each in messages] == [message(NAMES[0], number) for number in range(1, 1001)]
        assert (await store.status(NAMES[0])).final


def test_whoever_is_held_says_so_until_he_goes_on(tmp_path: Path) -> None:
    for name in ("hold", "held"):
        (tmp_path / name).mkdir()
    (tmp_path / "hold" / "planned").touch()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(pass_by, tmp_path, "planned")
        while not [*(tmp_path / "held").iterdir()]:
            assert not held.done()
        (tmp_path / "hold" / "planned").unlink()
        held.result()
    assert [*(tmp_path / "held").iterdir()] == []


def test_the_progress_counts_rows_in_files_and_says_whether_spark_is_up(tmp_path: Path) -> None:
    proof = Proof(Plan(folder=tmp_path))
    log = tmp_path / "driver.log"
    log.write_text('{"event": "started"}\n', encoding="utf-8")
    proof._log_begins = log.stat().st_size  # that was an earlier driver
    assert str(proof.progress()) == "0 rows written, Spark is starting"
    pq.write_table(pa.table({"n": [1, 2, 3]}), _made(tmp_path / "out" / "batch=0" / "one.parquet"))
    pq.write_table(pa.table({"n": [1]}), _made(tmp_path / "out" / "batch=1" / "_temporary" / "two.parquet"))
    _made(tmp_path / "out" / "batch=1" / "half.parquet").write_bytes(b"PAR1")
    for name in ("offsets/0", "offsets/1", "commits/0"):
        _made(tmp_path / "checkpoint" / name).touch()
    with log.open("a", encoding="utf-8") as file:
        file.write('{"event": "started"}\n')
    assert str(proof.progress()) == "3 rows written, batch 1 is being read and written, batch 0 is committed"


def test_the_progress_is_told_while_spark_makes_and_removes_folders(tmp_path: Path) -> None:
    proof = Proof(Plan(folder=tmp_path))
    (tmp_path / "driver.log").touch()
    tells = threading.Event()

    def write() -> None:
        for number in itertools.count():
            batch = tmp_path / "out" / f"batch={number % 3}"
            _made(batch / "_temporary" / "0" / "task" / "part.parquet").touch()
            shutil.rmtree(batch)
            if tells.is_set():
                return

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(write)
        try:
            told = {str(proof.progress()) for _ in range(1000)}
        finally:
            tells.set()
        writer.result()
    assert told == {"0 rows written, Spark is starting"}


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
