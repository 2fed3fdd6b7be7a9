"""A file that is no whole file of a capture ends a report with its name, and never counts as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from muxkit.cli.pipeline.capture import capture
from muxkit.cli.terminal import CommandFailed
from muxkit.pipeline import CaptureError, report
from tests.pipeline._captures import record_sessions

if TYPE_CHECKING:
    from pathlib import Path


async def recorded(folder: Path) -> Path:
    """Record something, and return a file of it."""
    await record_sessions(folder, channels=1, messages=1)
    return next((folder / "frames").rglob("*.parquet"))


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
async def test_a_file_that_was_cut_off_is_named(tmp_path: Path, share: float) -> None:
    file = await recorded(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CaptureError, match=rf"{file.name}: expected a complete Parquet file") as failed:
        report(tmp_path)
    assert "\n" not in str(failed.value)


async def test_a_table_of_something_else_is_named_and_not_counted_as_rows(tmp_path: Path) -> None:
    file = (await recorded(tmp_path)).with_name("other.parquet")
    pq.write_table(pa.table({"price": [1, 2]}), file)
    with pytest.raises(CaptureError, match=r"other.parquet: expected rows of a capture.*without the column"):
        report(tmp_path)


async def test_the_command_names_the_file_in_one_line(tmp_path: Path) -> None:
    file = await recorded(tmp_path)
    file.write_bytes(b"")
    result = CliRunner().invoke(capture, ["report", str(tmp_path)], standalone_mode=False)
    assert isinstance(result.exception, CommandFailed)
    assert file.name in result.exception.sentence
    assert "\n" not in result.exception.sentence
