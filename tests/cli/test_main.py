"""The command without its extra, with wrong arguments, and with a closed standard output."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import trio

import muxkit as library
import muxkit_adapters
from muxkit.cli.commands import build
from muxkit.cli.terminal import printable
from tests.cli._command import environment, muxkit
from tests.cli._forking import Muxkit

EXTRA = ("click", "rich")
FORM = build()


@pytest.fixture
def without_the_extra(tmp_path: Path) -> list[str]:
    """An interpreter that has everything that is installed here, apart from what only the extra brings."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix != ".pth" and not entry.name.startswith(EXTRA):
            (tmp_path / entry.name).symlink_to(entry)
    path = [str(tmp_path), *(str(Path(module.__path__[0]).parent) for module in (library, muxkit_adapters))]
    return [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:0] = {path!r}\n"]


def run_without(interpreter: list[str], program: str) -> subprocess.CompletedProcess[str]:
    command = [*interpreter[:-1], interpreter[-1] + program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_its_extra_it_says_which_one_it_wants(without_the_extra: list[str]) -> None:
    done = run_without(without_the_extra, "from muxkit.cli import main; sys.exit(main())")
    assert "pip install 'muxkit[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_its_extra_it_ends_with_the_exit_code_for_wrong_usage(without_the_extra: list[str]) -> None:
    assert run_without(without_the_extra, "from muxkit.cli import main; sys.exit(main())").returncode == 2


def test_the_library_works_without_the_extra(without_the_extra: list[str]) -> None:
    done = run_without(without_the_extra, "import muxkit; muxkit.connect; muxkit.serve")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_module_that_is_missing_is_not_blamed_on_the_extra() -> None:
    program = (
        "import sys; sys.argv[1:] = ['plugins']; sys.modules['msgspec'] = None; from muxkit.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert "muxkit[cli]" not in done.stderr
    assert "msgspec" in done.stderr


def test_importing_the_package_imports_nothing_of_the_extra() -> None:
    program = "import muxkit.cli, sys; print([name for name in ('click', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_is_installed_as_a_program() -> None:
    program = Path(sysconfig.get_path("scripts"), "muxkit")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.partition(" (")[0]) == (0, f"muxkit, version {library.__version__}, {FORM}")


def test_it_tells_its_version_its_form_and_what_it_runs_on() -> None:
    done = muxkit("--version")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    said = rf"muxkit, version {library.__version__}, {FORM} \({python}( without GIL)?, Trio {trio.__version__}\)\n"
    assert done.returncode == 0
    assert re.fullmatch(said, done.stdout)


def test_the_package_can_be_run_as_a_module() -> None:
    """F31: "No module named muxkit.__main__"."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "muxkit", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.partition(" (")[0]) == (0, f"muxkit, version {library.__version__}, {FORM}")


def test_the_help_names_every_command() -> None:
    done = muxkit("--help")
    assert done.returncode == 0
    assert {"demo", "plugins"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [["unheard-of"], ["demo", "--seconds", "no"], ["demo", "--seconds", "0"], ["demo", "--transport", "carrier"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_wrong_usage_has_its_own_exit_code(arguments: list[str]) -> None:
    done = muxkit(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: " in done.stderr


def test_it_ends_quietly_when_nobody_reads_its_output() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Muxkit("plugins", "--json", stdout=writing, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        os.close(writing)
        _, said = process.communicate()
    assert (process.returncode, said) == (1, "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, and größer", "plain text, and größer"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("two\nlines\r", r"two\nlines\r"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202egnitirw", r"\u202egnitirw"),
        ("\udcff", r"\udcff"),
    ],
)
def test_nothing_that_commands_a_terminal_is_printed_as_it_is(text: str, shown: str) -> None:
    assert printable(text) == shown
