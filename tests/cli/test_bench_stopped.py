"""A stopped benchmark shows what it has, and leaves neither processes nor folders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cli._command import environment, is_there, needs_proc
from tests.cli._forking import Muxkit
from tests.cli.test_bench import children_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="stops processes by signals"),
    pytest.mark.timeout(600),
]


@contextmanager
def at_work(folder: Path, *arguments: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A bench that would take hours, as soon as it has said this; its temporary files are in `folder`."""
    command = ["bench", "--no-peers", "--rounds", "10000", *arguments]
    with Muxkit(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(folder))
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith(until) for line in process.stdout)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "muxkit: interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_run_that_is_cut_short_shows_and_writes_its_complete_rounds(
    tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    stored, page = tmp_path / "run.json", tmp_path / "run.html"
    files = ("--json", str(stored), "--html", str(page))
    with at_work(tmp_path, "--jobs", "rtt,receive_many", "--seconds", "0.01", *files, until="round 2 ") as bench:
        bench.send_signal(number)
        shown, complained = bench.communicate()
    assert (bench.returncode, complained) == (code, said)
    report = json.loads(stored.read_text(encoding="utf-8"))
    assert report["rounds"] >= 1
    cells = [cell["key"] for cell in report["cells"]]
    assert sorted((one["round"], one["cell"], one["peer"]) for one in report["passes"]) == sorted(
        (at, cell, peer) for at in range(1, report["rounds"] + 1) for cell in cells for peer in ("bpmux+tcp", "raw tcp")
    )
    left_out = f"the rounds from {report['rounds'] + 1} to 10000: the run was cut short"
    assert report["left_out"] == [left_out]
    assert f"median of {report['rounds']} rounds" in shown
    assert f"left out: {left_out}" in shown
    assert left_out in page.read_text(encoding="utf-8")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_neither_a_process_nor_a_folder_nor_a_complaint_of_one_stays_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    transports = ("--transport", "tcp", "--transport", "unix")
    with at_work(tmp_path, "--jobs", "small", "--seconds", "30", *transports, until="round 1 ") as bench:
        while len(children := children_of(bench.pid)) < 8:  # both ends of two of ours and of two raw ones
            assert bench.poll() is None
        assert [path.name[:7] for path in tmp_path.iterdir()] == ["muxkit-"]
        bench.send_signal(number)
        shown, complained = bench.communicate()
    assert bench.returncode == 128 + number
    assert complained.replace("muxkit: interrupted\n", "") == ""
    assert shown == ""  # no round was complete
    assert [process for process in children if is_there(process)] == []
    assert [*tmp_path.iterdir()] == []
