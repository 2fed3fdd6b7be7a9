"""A trace or a capture whose disk is full stops with one line, says how much is missing, and harms nothing."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline.capture.recorder import Capture
from muxkit.pipeline.errors import CaptureError
from muxkit.trace import Trace
from muxkit.trace import writing as trace_writing
from tests.protocols.restream._small_disk import small_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 1 << 20


@pytest.fixture(params=["disk", "file size"])
def full_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MiB, and one whose files may not be longer: no user may exceed his own limit."""
    if request.param == "disk":
        with small_disk(SIZE) as directory:
            yield directory
        return
    if sys.platform == "win32":
        pytest.skip("this system has no limit of the size of a file")
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, before[1]))
    try:
        yield tmp_path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_trace_on_a_full_disk_ends_with_one_line_that_says_where(
    full_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Trace(full_folder, payloads=True).connection("client")
    for _ in range(40):
        session.transport("out", bytes(50_000))
    session.close()
    (told,) = warnings_in(caplog)
    assert "and the later events are lost" in told


def test_sessions_that_begin_while_the_disk_is_full_make_no_files_and_no_lines(
    full_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("muxkit.trace.writing.time.monotonic", lambda: now)
    trace = Trace(full_folder, payloads=True)

    def run_session(size: int) -> None:
        session = trace.connection("server")
        session.transport("in", bytes(size))
        session.close()

    run_session(2 * SIZE)
    for _ in range(500):
        run_session(2 * SIZE)
    assert len(warnings_in(caplog)) == 1
    assert len([*full_folder.iterdir()]) == 1
    for path in full_folder.iterdir():
        path.unlink()
    now += trace_writing.RETRY_SECONDS
    run_session(100)
    assert "500 sessions have no trace" in warnings_in(caplog)[1]
    (path,) = full_folder.iterdir()
    assert "bytes_received" in path.read_text()


@pytest.mark.parametrize("raw", [False, True])
def test_a_capture_on_a_full_disk_ends_with_one_line_and_counts_what_is_missing(
    full_folder: Path, raw: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import random

    random_bytes = random.Random(1).randbytes
    capture = Capture(full_folder, raw=raw, batch_rows=100, waiting=1000)
    count = 6000 if raw else 60_000
    recorder = capture.connection("one")
    for number in range(count):
        if raw:
            recorder.transport("out", random_bytes(1000))
        else:
            recorder.frame("out", random_bytes(20).hex(), f"frame {number}", number)
    with pytest.raises(CaptureError, match="rows are missing"):
        capture.close()
    assert len(warnings_in(caplog)) == 1
    assert "is not recorded" in warnings_in(caplog)[0]
    assert capture.files == []
    assert capture.dropped == count
    assert not [path for path in full_folder.rglob("*") if path.is_file()]


def test_a_capture_that_has_ended_keeps_nothing_of_later_connections(full_folder: Path) -> None:
    capture = Capture(full_folder, raw=True, batch_rows=10)
    capture._writer._fail(OSError(28, "No space left on device"))
    for number in range(1000):
        recorder = capture.connection(f"connection {number}")
        for _ in range(10):
            recorder.transport("in", b"x")
    assert capture.dropped >= 9990  # fewer than 10 of the 10000 rows are still kept
    with pytest.raises(CaptureError, match="10000 rows are missing"):
        capture.close()
