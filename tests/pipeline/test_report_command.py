"""`muxkit capture report` writes the page, and names what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from muxkit.cli.pipeline.capture import RAW_PROTOCOLS, capture
from muxkit.cli.terminal import CommandFailed, Exit
from muxkit.pipeline.capture.decoding.captures import DECODERS
from tests.pipeline._captures import record_sessions

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(capture, list(arguments), standalone_mode=False)


async def test_a_page_is_made_of_frames(tmp_path: Path) -> None:
    await record_sessions(tmp_path, channels=1, messages=2)
    done = run("report", str(tmp_path))
    assert done.exception is None
    assert done.stdout == f"{tmp_path / 'report.html'}\n"
    assert ">one<" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_option_has_each_protocol_whose_bytes_can_be_decoded() -> None:
    """The command line does without what decoding needs, so the names stand there once more."""
    assert sorted(RAW_PROTOCOLS) == sorted(DECODERS)


@pytest.mark.parametrize("engine", [(), ("--engine",)], ids=["cut", "engine"])
async def test_a_page_is_made_of_raw_bytes(tmp_path: Path, engine: tuple[str, ...]) -> None:
    await record_sessions(tmp_path, channels=1, messages=2)
    page = tmp_path / "page.html"
    assert run("report", str(tmp_path), "--raw", "bpmux", *engine, "--out", str(page)).exception is None
    assert ">other<" in page.read_text(encoding="utf-8")


async def test_a_page_is_made_of_one_connection_and_of_some_time(tmp_path: Path) -> None:
    await record_sessions(tmp_path)
    done = run("report", str(tmp_path), "--connection", "other", "--since", "2026-01-01")
    assert done.exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">other<" in page
    assert ">one<" not in page
    done = run("report", str(tmp_path), "--until", "2026-01-01T00:00:00")
    assert isinstance(done.exception, CommandFailed)


def test_a_folder_without_captures_is_told(tmp_path: Path) -> None:
    done = run("report", str(tmp_path))
    assert isinstance(done.exception, CommandFailed)
    assert done.exception.exit is Exit.USAGE
    assert str(tmp_path / "frames") in done.exception.sentence


@pytest.mark.parametrize(
    "arguments", [["--engine"], ["--raw", "relink", "--engine"], ["--listener"], ["--raw", "restream"]], ids=" ".join
)
def test_options_that_do_not_go_together_are_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(capture, ["report", str(tmp_path), *arguments])
    assert done.exit_code == 2


def test_what_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import muxkit.pipeline

    def absent(*arguments: object, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "a.parquet").touch()
    monkeypatch.setattr(muxkit.pipeline, "report", absent, raising=False)
    done = run("report", str(tmp_path))
    assert isinstance(done.exception, CommandFailed)
    assert "muxkit[duckdb]" in done.exception.sentence
