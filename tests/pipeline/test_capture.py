"""What a capture holds, what it leaves out, and what it costs the recorded program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import trio

from muxkit import LinkLost, RemoteProtocolError
from muxkit._observer import for_connection
from muxkit.pipeline import Capture, CaptureError, Raw, Rotation, analyse
from muxkit.pipeline.capture.recorder import FLUSH
from muxkit.protocols import bpmux
from muxkit_adapters import memory
from tests.pipeline._captures import buffered, files_of, record_sessions, rows_of, writer_of

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit._observer import Direction
    from muxkit.pipeline.capture.files import FileWriter, Kind


class Tally:
    """An observer that counts."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str, str, int]] = []
        self.credits: list[tuple[str, str, int]] = []
        self.raw: dict[str, bytes] = {"in": b"", "out": b""}

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.frames.append((direction, channel, name, size))

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self.credits.append((direction, channel, amount))

    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self.raw[direction] += bytes(data)


class Both:
    """Two observers of one connection."""

    def __init__(self, one: Tally, other: bpmux.Engine | object) -> None:
        self._all = (one, other)

    def __getattr__(self, name: str) -> object:
        if not all(hasattr(each, name) for each in self._all):
            raise AttributeError(name)  # what one of them does not take is told to neither

        def tell(*arguments: object) -> None:
            for each in self._all:
                getattr(each, name)(*arguments)

        return tell


async def test_a_capture_holds_what_an_observer_is_told(tmp_path: Path) -> None:
    here, there = memory.pair()
    tally = Tally()
    with Capture(tmp_path, raw=True) as capture:
        observer = Both(tally, capture.connection("here"))
        async with bpmux.session(here, observer=observer) as session, bpmux.session(there) as peer:  # type: ignore[arg-type]  # it has all six
            async with session.open() as channel:
                await channel.send(b"12345" * 500)  # fits the first credit, so it is one frame
                async for other in peer.incoming():
                    await other.receive()
                    break
    rows = rows_of(tmp_path)
    told = [(row["direction"], row["channel"], row["kind"], row["size"]) for row in rows if row["event"] == "frame"]
    assert told == tally.frames
    assert ("out", "out-sink 1", "payload", 2500) in told
    credits = [(row["direction"], row["channel"], row["credit"]) for row in rows if row["event"] == "credit"]
    assert credits == tally.credits
    raw = rows_of(tmp_path, "raw")
    for direction in ("in", "out"):
        pieces = [row for row in raw if row["direction"] == direction]
        assert b"".join(bytes(row["data"]) for row in pieces) == tally.raw[direction]
        offset = 0
        for row in pieces:
            assert row["offset"] == offset
            offset += len(bytes(row["data"]))


async def test_rows_of_a_connection_are_numbered_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    await record_sessions(tmp_path, channels=2, messages=3)
    both = rows_of(tmp_path) + rows_of(tmp_path, "raw")
    for connection in ("one", "other"):
        numbers = sorted(int(str(row["number"])) for row in both if row["connection"] == connection)
        assert numbers == list(range(len(numbers)))


async def test_the_connections_of_a_server_are_told_apart(tmp_path: Path) -> None:
    with Capture(tmp_path, name="server") as capture:
        for _ in range(3):
            observer = for_connection(capture, "peer")
            assert observer is not None
            observer.frame("in", "channel 1", "payload", 5)
    assert [row["connection"] for row in rows_of(tmp_path)] == ["peer", "peer #2", "peer #3"]


def test_an_observer_of_one_connection_is_asked_for_no_other() -> None:
    tally = Tally()
    assert for_connection(tally, "peer") is tally
    assert for_connection(None, "peer") is None


def test_a_capture_is_itself_the_observer_of_one_connection(tmp_path: Path) -> None:
    with Capture(tmp_path) as capture:
        capture.frame("in", "channel 1", "payload", 5)
        capture.state("channel 1", "gone")
        capture.timer("keepalive")
    assert [(row["event"], row["kind"]) for row in rows_of(tmp_path)] == [
        ("frame", "payload"), ("state", "gone"), ("timer", "keepalive"),
    ]  # fmt: skip


def test_a_violation_is_kept_with_its_clause_and_its_byte(tmp_path: Path) -> None:
    with Capture(tmp_path) as capture:
        capture.error(RemoteProtocolError("too much", rule="bpmux-R29", offset=77))
        capture.error(LinkLost("gone", by="network", peer="x", after=1.0, unsent=0))
    violation, loss = rows_of(tmp_path)
    assert (violation["event"], violation["rule"], violation["id"]) == ("error", "bpmux-R29", 77)
    assert "too much" in str(violation["text"])
    assert (loss["event"], loss["kind"], loss["rule"]) == ("lost", "LinkLost", None)


def test_what_comes_over_another_transport_is_another_segment(tmp_path: Path) -> None:
    with Capture(tmp_path, raw=True) as capture:
        link = capture.connection("link")
        link.transport("out", b"123")
        link.error(LinkLost("cut", by="network", peer="x", after=1.0, unsent=0))
        link.state("link", "connected")
        link.transport("out", b"45")
    found = [(row["segment"], row["offset"], row["data"]) for row in rows_of(tmp_path, "raw")]
    assert found == [(0, 0, b"123"), (1, 0, b"45")]


# ---------------------------------------------------------------------------- bounds


class Gate:
    """A disk that stops writing until it is let go on."""

    def __init__(self, writer: FileWriter, kind: Kind = "frames") -> None:
        self._write = files_of(writer, kind).write
        self.reached = threading.Event()
        self.opened = threading.Event()
        files_of(writer, kind).write = self.write

    def write(self, place: object, rows: object) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self._write(place, rows)


def test_a_slow_disk_bounds_what_is_kept_and_what_was_left_out_is_told(tmp_path: Path) -> None:
    capture = Capture(tmp_path, waiting=2, batch_rows=10)
    gate = Gate(writer_of(capture))
    for _ in range(10):
        capture.frame("in", "channel 1", "payload", 1)
    assert gate.reached.wait(60)
    for _ in range(1000):  # 20 of these wait
        capture.frame("in", "channel 1", "payload", 1)
    assert capture.dropped > 900
    gate.opened.set()
    capture.flush()
    for _ in range(5):
        capture.frame("in", "channel 1", "payload", 1)
    capture.close()
    rows = rows_of(tmp_path)
    told = sum(row["size"] for row in rows if row["event"] == "dropped")
    assert told == capture.dropped
    assert told + sum(row["event"] == "frame" for row in rows) == 1015


def test_what_was_left_out_at_the_end_is_told_as_well(tmp_path: Path) -> None:
    capture = Capture(tmp_path, waiting=1, batch_rows=10)
    gate = Gate(writer_of(capture))
    for _ in range(10):
        capture.frame("in", "channel 1", "payload", 1)
    assert gate.reached.wait(60)
    for _ in range(20):
        capture.frame("in", "channel 1", "payload", 1)
    gate.opened.set()
    capture.close()
    assert [row["size"] for row in rows_of(tmp_path) if row["event"] == "dropped"] == [10]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("goes_on", [True, False], ids=["in the middle", "at the end"])
def test_raw_bytes_that_were_left_out_are_a_gap_and_nobody_broke_a_rule(tmp_path: Path, *, goes_on: bool) -> None:
    # It was: "left out 0 rows", "broken rules 1".
    """Was: Raw bytes that a capture had left out were told as rules that the peer broke."""
    chunk = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, b"12345"))
    capture = Capture(tmp_path, frames=False, raw=True, waiting=1, batch_rows=10)
    gate = Gate(writer_of(capture), "raw")
    one = capture.connection("one")
    for _ in range(10):
        one.transport("in", chunk)
    assert gate.reached.wait(60)
    for _ in range(1001):  # ten of these wait, and the last one completes a batch that is left out
        one.transport("in", chunk)
    left_out = capture.dropped
    assert left_out == 991
    gate.opened.set()
    capture.flush()
    if goes_on:
        one.transport("in", chunk)
    capture.close()

    found = analyse(tmp_path, raw=Raw(protocol="bpmux"))
    assert (found.totals["gaps"], found.totals["missing"]) == (1, left_out * len(chunk))
    assert found.totals["broken"] == 0
    assert found.violations == []
    assert found.connections[0]["frames"] == 20


def test_a_batch_is_handed_over_in_time_though_it_is_not_full(tmp_path: Path) -> None:
    now = [1000.0]
    with Capture(tmp_path, clock=lambda: now[0]) as capture:
        capture.frame("in", "channel 1", "payload", 1)
        now[0] += FLUSH / 2
        capture.frame("in", "channel 1", "payload", 2)
        assert buffered(capture)[0] == 2
        now[0] += FLUSH / 2
        capture.frame("in", "channel 1", "payload", 3)
        assert buffered(capture)[0] == 0
    assert [row["size"] for row in rows_of(tmp_path)] == [1, 2, 3]


def test_large_raw_bytes_are_handed_over_long_before_there_are_many_rows(tmp_path: Path) -> None:
    with Capture(tmp_path, raw=True, frames=False) as capture:
        for _ in range(3):
            capture.transport("in", bytes(600_000))
            assert buffered(capture)[1] < 1_200_000
    assert sum(len(bytes(row["data"])) for row in rows_of(tmp_path, "raw")) == 1_800_000


def test_files_are_closed_when_they_are_large_and_the_oldest_go(tmp_path: Path) -> None:
    with Capture(tmp_path, name="c", batch_rows=10, rotation=Rotation(bytes=1, keep=3)) as capture:
        for number in range(100):
            capture.frame("in", f"channel {number}", "payload", number)
            if number % 10 == 9:
                capture.flush()
    files = sorted(path.name for path in (tmp_path / "frames").glob("date=*/*"))
    assert files == [f"c-{serial:06}.parquet" for serial in (7, 8, 9)]
    assert [row["size"] for row in rows_of(tmp_path)] == list(range(70, 100))


def test_a_file_is_closed_when_it_is_old(tmp_path: Path) -> None:
    with Capture(tmp_path, batch_rows=1, rotation=Rotation(seconds=1e-9)) as capture:
        for _ in range(3):
            capture.frame("in", "channel 1", "payload", 1)
        capture.flush()
        assert len(capture.files) == 3


def test_a_file_that_is_not_complete_is_hidden(tmp_path: Path) -> None:
    with Capture(tmp_path, name="c") as capture:
        capture.frame("in", "channel 1", "payload", 1)
        capture.flush()
        assert [path.name for path in (tmp_path / "frames").glob("date=*/*")] == [".c-000000.parquet"]
    assert [path.name for path in (tmp_path / "frames").glob("date=*/*")] == ["c-000000.parquet"]


@pytest.mark.parametrize("wrong", [{"bytes": 0}, {"seconds": -1.0}, {"keep": 0}], ids=str)
def test_a_rotation_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Rotation(**wrong)


# ---------------------------------------------------------------------------- trouble


def test_a_disk_that_cannot_be_written_is_told_at_the_end_and_not_to_the_program(tmp_path: Path) -> None:
    (tmp_path / "frames").write_text("in the way")
    capture = Capture(tmp_path, batch_rows=1)
    for _ in range(10):
        capture.frame("in", "channel 1", "payload", 1)
    with pytest.raises(CaptureError, match="rows are missing"):
        capture.close()
    capture.close()  # once is enough


def test_an_error_of_the_program_is_not_replaced_by_one_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "frames").write_text("in the way")

    def record() -> None:
        with Capture(tmp_path) as capture:
            capture.frame("in", "channel 1", "payload", 1)
            raise KeyError

    with pytest.raises(KeyError):
        record()


def test_what_comes_after_the_end_is_ignored(tmp_path: Path) -> None:
    capture = Capture(tmp_path)
    capture.frame("in", "channel 1", "payload", 1)
    capture.close()
    capture.frame("in", "channel 1", "payload", 2)
    assert [row["size"] for row in rows_of(tmp_path)] == [1]


PROGRAM = """
import sys
from muxkit.pipeline import Capture, Rotation
capture = Capture(sys.argv[1], name="killed", batch_rows=10, waiting=100, rotation=Rotation(bytes=1))
for number in range(1000):
    capture.frame("in", "channel 1", "payload", number)
    if number == 499:
        capture.flush()
        print("half", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills in another way")
def test_a_process_that_is_killed_leaves_only_whole_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    for path in (tmp_path / "frames").glob("date=*/[!.]*.parquet"):
        pq.read_table(path)
    assert [row["size"] for row in rows_of(tmp_path)] == list(range(500))


def test_what_records_needs_neither_spark_nor_trio() -> None:
    program = (
        "import sys, muxkit.pipeline.capture.recorder, muxkit.pipeline.capture.decoding\n"
        "import muxkit.pipeline.capture.report\n"
        "print([name for name in ('pyspark', 'trio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_recording_is_no_part_of_what_the_session_waits_for(tmp_path: Path) -> None:
    """The disk stands still, and the session goes on."""
    capture = Capture(tmp_path, waiting=1, batch_rows=1)
    gate = Gate(writer_of(capture))
    here, there = memory.pair()
    async with bpmux.session(here, observer=capture) as session, bpmux.session(there) as peer:
        async with session.open() as channel:
            for _ in range(100):
                await channel.send(b"x")
            async for other in peer.incoming():
                for _ in range(100):
                    await other.receive()
                break
    gate.opened.set()
    assert capture.dropped > 0
    await trio.to_thread.run_sync(capture.close)
