"""`.ci/run` reports a failure wherever it happens, and goes on with the other steps.

The script is the real one, in a copy of the tree; `make` and the programs of .venv do what a test tells them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """#!/bin/sh
# Stands for `make` and for each program of .venv; fails when what it is asked for is in the file `failing`.
asked="${0##*/} $*"
echo "$asked pages=${MUXKIT_PAGES_EXTRAS-unset}" >>"$WORLD/asked"
case "$asked" in
"muxkit demo") echo "pip install 'muxkit[cli]'"; exit 2 ;;
"python -m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/muxkit" ;;

esac
while read -r failing; do
    case "$asked" in *"$failing"*) echo "$asked fails"; exit 1 ;; esac
done <"$WORLD/failing"
exit 0
"""

PROGRAMS = (
    *("python", "basedpyright", "check-jsonschema", "codespell", "lint-imports", "mkdocs", "mypy", "pre-commit"),
    *("deptry", "ruff", "towncrier"),
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it is a shell script")


@attrs.frozen
class Tree:
    folder: Path
    variables: dict[str, str]

    def run(self, *steps: str, failing: str = "") -> subprocess.CompletedProcess[str]:
        (self.folder / "failing").write_text(f"{failing}\n" if failing else "")
        (self.folder / "asked").write_text("")
        return subprocess.run(
            [self.folder / "clone" / ".ci" / "run", *steps],
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / ".ci", clone / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / "tools"
    for folder, names in ((tools, ["make", "cc"]), (clone / ".venv" / "bin", PROGRAMS)):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(PROGRAM)
            (folder / name).chmod(0o755)
    return Tree(tmp_path, {"PATH": f"{tools}:/usr/bin:/bin", "WORLD": str(tmp_path)})


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    lines = done.stdout.partition("==== summary\n")[2].splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(
    ("step", "failing"),
    [
        ("tests", "make test"),
        ("lint", "vendor.github-workflows"),
        ("types", "mypy"),
        ("wheel", "python -m build"),
        ("wheel", "smoke.py"),
        ("pages", "users.py pages"),
    ],
)
def test_a_failure_of_any_part_of_a_step_is_one_of_the_whole(tree: Tree, step: str, failing: str) -> None:
    """Was: In `.ci/run` a failure inside a step counted only if it was the step's last command."""
    done = tree.run(failing=failing)
    assert done.returncode == 1
    assert [name for name, verdict in verdicts(done).items() if verdict != "ok"] == [step]
    assert f"{failing}" in done.stdout


def test_without_an_environment_nothing_else_is_tried(tree: Tree) -> None:
    done = tree.run(failing="make ready-test")
    assert done.returncode == 1
    assert tree.asked == ["make ready-test pages=unset"]
    assert verdicts(done)["tests"] == "FAILED"
    assert verdicts(done)["types"] == "not"


def test_a_step_that_does_not_exist_is_named_before_anything_is_run(tree: Tree) -> None:
    done = tree.run("lint", "typos")
    assert done.returncode == 2
    assert "no such step: typos" in done.stderr
    assert tree.asked == []


def test_steps_can_be_chosen(tree: Tree) -> None:
    done = tree.run("format", "lint")
    assert done.returncode == 0
    assert verdicts(done) == {"format": "ok", "lint": "ok"}


# ---------------------------------------------------------------------------- the workflows


def steps_of(array: str) -> set[str]:
    """The names in an array of the script."""
    found = re.search(rf"^{array}=\(([^)]*)\)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return {*found[1].split()}


def test_the_workflows_run_every_step_and_nothing_else() -> None:
    run: set[str] = set()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text(encoding="utf-8")
        commands = {*re.findall(r"^ +- run: (.+)$", text, re.MULTILINE)} - {"make ready-test"}
        assert [command for command in commands if not command.startswith(".ci/run ")] == []
        matrix = "".join(re.findall(r"^ +step: \[(.+)\]$", text, re.MULTILINE)).replace(",", " ")
        run |= {*" ".join(commands).replace("${{ matrix.step }}", matrix).split()} - {".ci/run"}
    assert steps_of("all") <= run <= steps_of("all") | steps_of("by_name")
