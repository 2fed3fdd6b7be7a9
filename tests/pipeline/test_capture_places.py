"""Where captures lie: folders by date and connection, file systems in memory, and a store that speaks S3."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import fsspec
import pyarrow.fs as pafs
import pytest

from muxkit.pipeline import Capture, Raw, Rotation, Selection, analyse, report
from muxkit.pipeline.capture.files import DAY, MOST_OPEN, open_place
from muxkit.protocols import bpmux
from tests.pipeline._captures import files_of, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
CHUNK = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, b"12345"))


def record(folder: str | Path, *, filesystem: object = None, by_connection: bool = False, days: int = 3) -> list[str]:
    """Two connections with ten frames each on each day; the complete files."""
    now = [NOON]
    rotation = Rotation(by_connection=by_connection)
    with Capture(folder, name="c", raw=True, rotation=rotation, filesystem=filesystem, clock=lambda: now[0]) as capture:
        connections = [capture.connection(name) for name in ("to the bank", "a/b=c")]
        for _ in range(days):
            for connection in connections:
                for _ in range(10):
                    connection.frame("in", "channel 1", "payload", 7)
                    connection.transport("in", CHUNK)
            now[0] += DAY
    return capture.files


def seen(folder: str | Path, only: Selection | None = None) -> tuple[int, set[str]]:
    """How many frames there are, and of which connections."""
    found = analyse(folder, only=only)
    return found.count, {str(row["connection"]) for row in found.connections}


def test_files_lie_in_folders_of_their_dates_and_connections(tmp_path: Path) -> None:
    files = record(tmp_path, by_connection=True)
    names = sorted(path.removeprefix(f"{tmp_path}/").rpartition("/")[0] for path in files if "/frames/" in path)
    dates = [f"frames/date=2026-11-{day}" for day in (25, 26, 27)]
    assert names == [f"{date}/connection={name}" for date in dates for name in ("a%2Fb%3Dc", "to the bank")]
    assert seen(tmp_path) == (60, {"c/to the bank", "c/a/b=c"})


@pytest.mark.parametrize("by_connection", [False, True])
def test_a_selection_reads_its_rows_and_passes_over_other_folders(tmp_path: Path, *, by_connection: bool) -> None:
    record(tmp_path, by_connection=by_connection)
    second = Selection(since=datetime(2026, 11, 26), until=datetime(2026, 11, 26, 23, tzinfo=UTC))
    assert seen(tmp_path, second) == (20, {"c/to the bank", "c/a/b=c"})
    assert {path.split("/")[-3 if by_connection else -2] for path in second.open(tmp_path).files("frames", second)} == {
        "date=2026-11-26"
    }
    one = Selection(connection="a/b=c")
    assert seen(tmp_path, one) == (30, {"c/a/b=c"})
    assert len(one.open(tmp_path).files("frames", one)) == 3
    assert seen(tmp_path, Selection(since=datetime(2027, 1, 1))) == (0, set())
    assert analyse(tmp_path, raw=Raw(protocol="bpmux"), only=one).connections[0]["frames"] == 30


def test_captures_of_earlier_versions_are_read_from_where_they_lie(tmp_path: Path) -> None:
    for path in record(tmp_path, days=1):
        kind = "frames" if "/frames/" in path else "raw"
        os.rename(path, tmp_path / kind / "old.parquet")
    assert seen(tmp_path) == (20, {"c/to the bank", "c/a/b=c"})
    assert seen(tmp_path, Selection(since=datetime(2026, 11, 25, 11))) == (20, {"c/to the bank", "c/a/b=c"})


def test_not_more_files_are_open_at_once_than_there_may_be(tmp_path: Path) -> None:
    with Capture(tmp_path, rotation=Rotation(by_connection=True), batch_rows=1) as capture:
        for number in range(MOST_OPEN + 10):
            capture.connection(f"client {number}").frame("in", "channel 1", "payload", 1)
            capture.flush()
        assert len(files_of(writer_of(capture))._open) == MOST_OPEN
        assert len(capture.files) == 10
    assert len(capture.files) == MOST_OPEN + 10


def test_a_file_system_of_fsspec_takes_captures_and_gives_them() -> None:
    memory = fsspec.filesystem("memory")
    record("captures", filesystem=memory)
    try:
        assert seen("captures", Selection(filesystem=memory)) == (60, {"c/to the bank", "c/a/b=c"})
        assert seen("memory://captures") == (60, {"c/to the bank", "c/a/b=c"})
        assert not [path for path in memory.find("captures") if "/." in path]
    finally:
        memory.rm("captures", recursive=True)


def test_a_url_of_fsspec_is_enough(tmp_path: Path) -> None:
    record("memory://elsewhere", by_connection=True)
    assert seen("memory://elsewhere", Selection(connection="to the bank")) == (30, {"c/to the bank"})
    with pytest.raises(ValueError, match="say where the page goes"):
        report("memory://elsewhere")
    assert "to the bank" in report("memory://elsewhere", tmp_path / "page.html").read_text(encoding="utf-8")


@contextmanager
def object_store(folder: Path) -> Iterator[str]:
    """The address of a server that speaks S3, with a bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    log = folder / "store.log"
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, stdout=output) as process:
        try:
            while b"Running on http://" not in (said := log.read_bytes()):
                assert process.poll() is None, said.decode()
                time.sleep(0.05)
            address = said.partition(b"Running on http://")[2].split()[0].decode()
            urllib.request.urlopen(urllib.request.Request(f"http://{address}/captures", method="PUT")).close()
            yield address
        finally:
            process.kill()


def test_an_object_store_takes_captures_and_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with object_store(tmp_path) as address:
        url = f"s3://captures/host?endpoint_override={address}&scheme=http&region=us-east-1"
        files = record(url)
        assert all(path.startswith("captures/host/") for path in files)
        assert seen(url) == (60, {"c/to the bank", "c/a/b=c"})
        store = pafs.S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1")
        assert seen("captures/host", Selection(filesystem=store, connection="a/b=c")) == (30, {"c/a/b=c"})


def test_a_path_is_one_of_this_machine(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    assert (place.system.type_name, place.path) == ("local", str(tmp_path))
