"""Usage errors come before anything is measured, and no result is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import attrs
import pytest

import muxkit as library
from muxkit.cli.commands import build
from muxkit_bench.contestants.compiled import STAMP, digest_of_sources
from tests.cli._command import install_transport, muxkit

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="uses devices of Unix"),
    pytest.mark.timeout(600),  # dozens of processes start here one after the other
]

FULL = Path("/dev/full")
QUICK = ("bench", "--quick", "--no-peers", "--jobs", "rtt")


def measured_in(stored: Path) -> set[tuple[str, str]]:
    return {(one["cell"], one["peer"]) for one in json.loads(stored.read_text(encoding="utf-8"))["passes"]}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with bpmux, and restream, which cannot take part."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    done = muxkit(*QUICK, "--protocol", "restream", "--protocol", "bpmux", "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    return path


# ---------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--protocol", "nope"], "there is no protocol 'nope'; there are: "),
        (["--transport", "nope"], "there is no transport 'nope'; there are: "),
        (["--protocol", "restream"], "nothing of muxkit can be measured: restream: restream has no channels"),
        (["--transport", "udp"], "nothing of muxkit can be measured: bpmux+udp: bpmux does not speak over what"),
        (["--jobs", ""], "'' is no job: there are bulk, small, "),
        (["--jobs", "rtt,,nope"], "'', 'nope' is no job: there are bulk, small, "),
        (["--json", "nowhere/run.json"], "--json nowhere/run.json cannot be written: No such file"),
        (["--html", f"{__file__}/run.html"], "cannot be written: Not a directory"),
    ],
    ids=lambda part: "-".join(part).strip("-") if isinstance(part, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = muxkit("bench", "--quick", "--no-peers", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--json", "y.json"], ["--jobs", "rtt"], ["--transport", "tcp"], ["--quick"]], ids=lambda a: a[0]
)
def test_an_option_that_measures_is_refused_beside_a_stored_run(stored: Path, arguments: list[str]) -> None:
    done = muxkit("bench", "--from", str(stored), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--from measures nothing: {arguments[0]} cannot be given beside it" in done.stderr


def test_finding_out_whether_files_can_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("older", encoding="utf-8")
    done = muxkit(*QUICK, "--json", str(there), "--html", str(tmp_path / "no" / "page.html"))
    assert done.returncode == 2
    assert there.read_text(encoding="utf-8") == "older"
    done = muxkit(*QUICK, "--html", str(tmp_path / "page.html"), "--protocol", "nope")
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


@pytest.mark.skipif(build() == "compiled", reason="this muxkit is compiled")
def test_an_environment_whose_muxkit_is_not_compiled_is_refused(tmp_path: Path) -> None:
    """With the stamp of these sources it is taken for built."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (tmp_path / STAMP).write_text(digest_of_sources(), encoding="utf-8")
    done = muxkit(*QUICK, "--compiled", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "python has no muxkit: ModuleNotFoundError" in done.stderr
    for package in Path(sysconfig.get_path("purelib"), library.__path__[0]).parent, Path(attrs.__path__[0]).parent:
        paths = next(tmp_path.glob("lib/python*/site-packages"))
        (paths / f"{package.name}.pth").write_text(str(package), encoding="utf-8")
    done = muxkit(*QUICK, "--compiled", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is pure Python: " in done.stderr


# ---------------------------------------------------------------------------- kept


@pytest.mark.skipif(not FULL.exists(), reason="needs a file that takes nothing")
def test_a_file_that_takes_nothing_costs_neither_the_table_nor_the_other_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = muxkit(*QUICK, "--json", str(FULL), "--html", str(page))
    assert done.returncode == 1
    assert "bpmux+tcp" in done.stdout
    assert done.stderr == "muxkit: /dev/full could not be written: No space left on device\n"
    assert "<svg" in page.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------- who takes part


def test_a_protocol_without_channels_is_left_out_of_a_run_with_others(stored: Path) -> None:
    assert measured_in(stored) == {("rtt/1", "bpmux+tcp"), ("rtt/1", "raw tcp")}
    (sentence,) = json.loads(stored.read_text(encoding="utf-8"))["left_out"]
    assert sentence.startswith("restream: restream has no channels")


def test_e3x_is_measured_over_dtls_with_a_certificate(tmp_path: Path) -> None:
    pytest.importorskip("OpenSSL")
    path = tmp_path / "run.json"
    done = muxkit(
        *("bench", "--quick", "--no-peers", "--jobs", "rtt,idle", "--json", str(path)),
        *("--protocol", "e3x", "--transport", "dtls"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {cell for cell, peer in measured_in(path) if peer == "e3x+dtls"} == {"rtt/1", "idle/500"}


def test_a_transport_of_another_package_is_measured(tmp_path: Path) -> None:
    install_transport(tmp_path, "strange", "wire", "from muxkit_adapters.tcp import transport\n")
    path = tmp_path / "run.json"
    done = muxkit(*QUICK, "--transport", "wire", "--json", str(path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert measured_in(path) == {("rtt/1", "bpmux+wire"), ("rtt/1", "raw tcp")}
