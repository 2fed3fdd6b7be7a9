"""The contestants that are not muxkit: programs in a folder, listed in its `peers.toml` with what they need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import msgspec

from muxkit.cli.terminal import CommandFailed, Exit
from muxkit_bench.contestants.contestant import Contestant

LIST = "peers.toml"
WORK = Path(__file__).parents[1]  # where the programs find the package `bench_work`
GO_SOURCES = Path("/usr/share/gocode")  # where Debian's packages put the sources of Go libraries


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the list."""

    name: str
    title: str
    program: str
    """A Python file, or the folder of a program in Go."""
    arguments: list[str] = []
    """These precede the arguments that each program is started with."""
    needs: list[str] = []
    """Python packages, importable under these names."""
    go: dict[str, str] = {}
    """The libraries that a program in Go imports, each with the Debian package that has its sources."""
    most: int = 1000
    """Channels at the same time."""
    idle: int = 1000
    baseline: str = "raw tcp"


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: list[Described]


@attrs.frozen
class Found:
    """The contestants that can take part, and why others cannot."""

    contestants: list[Contestant]
    left_out: list[str]


def peers_of_checkout() -> Path | None:
    """Return the folder of a checkout of muxkit; an installed wheel has none."""
    folder = Path(__file__).parents[3] / "tests" / "bench"
    return folder if (folder / LIST).exists() else None


def find_peers(folder: Path | None, side_env: Path | None, scratch: Path) -> Found:
    """Find the programs of a folder.

    Missing Python packages are installed into the side environment, if one is given. Programs in Go are built in
    `scratch`, from libraries that are installed already.
    """
    if folder is None:
        return Found([], ["other multiplexers: no checkout of muxkit here; name their folder with --peers"])
    described = _read(folder / LIST)
    lacking = sorted({need for one in described for need in one.needs if importlib.util.find_spec(need) is None})
    python = sys.executable
    if lacking and side_env is not None:
        python = _python_of(side_env, sorted({need for one in described for need in one.needs}))
        lacking = []
    contestants, left_out = [], []
    for one in described:
        if missing := [need for need in one.needs if need in lacking]:
            left_out.append(f"{one.name}: needs {', '.join(missing)}, which --side-env DIR installs there")
        elif missing := _missing_for_go(one):
            left_out.append(f"{one.name}: needs {' and '.join(missing)} (packages of Debian and Ubuntu)")
        elif one.go:
            contestants.append(_contestant(one, [_built(folder / one.program, scratch)]))
        else:
            contestants.append(_contestant(one, [python, "-P", str(folder / one.program)]))
    return Found(contestants, left_out)


def _missing_for_go(one: Described) -> list[str]:
    """Return the packages that a program in Go still needs."""
    libraries = {package for name, package in one.go.items() if not (GO_SOURCES / "src" / name).is_dir()}
    compiler = {"golang-go"} if one.go and shutil.which("go") is None else set()
    return sorted(compiler | libraries)


def _built(source: Path, scratch: Path) -> str:
    """Build a program in Go, once for all contestants that it plays, and return its path."""
    program = scratch / source.name
    if not program.exists():
        go = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": str(GO_SOURCES)}
        command = ["go", "build", "-o", str(program), "."]
        done = subprocess.run(command, cwd=source, env=os.environ | go, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandFailed(f"{source}: `go build` failed: {done.stderr.strip()}")
    return str(program)


def _read(path: Path) -> list[Described]:
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _List).peer
    except OSError as error:
        raise CommandFailed(f"--peers: {error}", Exit.USAGE) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CommandFailed(f"{path}: {error}", Exit.USAGE) from error


def _contestant(one: Described, command: list[str]) -> Contestant:
    return Contestant(
        name=one.name,
        title=one.title,
        command=[*command, *one.arguments],
        address="tcp",
        baseline=one.baseline,
        extra={"PYTHONPATH": str(WORK)},
        most=one.most,
        idle=one.idle,
    )


def _python_of(side_env: Path, packages: list[str]) -> str:
    """Make the side environment if it does not exist, install packages, and return its interpreter."""
    python = side_env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(side_env)])
    if _lacks(python, packages):
        _call([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    if still := _lacks(python, packages):
        raise CommandFailed(f"--side-env: {python} cannot import {still}")
    return str(python)


def _lacks(python: Path, packages: list[str]) -> str:
    """Return the packages that an interpreter cannot find."""
    program = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if not u.find_spec(name)])"
    asked = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else asked.stderr.strip()


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise CommandFailed(f"--side-env: {' '.join(command)} failed: {last}")
