"""The compiled build of muxkit in a virtual environment of its own, to be measured beside the installed one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from muxkit.cli.terminal import CommandFailed, Exit

CHECKOUT = Path(__file__).parents[3]
HOOK = Path(".ci", "compile.py")  # of a checkout
BUILT_FROM = ("muxkit", "adapters", "pyproject.toml", HOOK)
STAMP = "muxkit-built-from"  # in the environment: a digest of the sources that it was built from
WHICH = "import muxkit.core._windows as part; print(part.__file__)"


def compiled_python(folder: Path) -> Path:
    """Return the interpreter of an environment with compiled muxkit; it is made and built where that is needed.

    In a checkout it is built again when a source has changed. An installed wheel has no sources: there the environment
    has to exist.
    """
    python = folder.absolute() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (CHECKOUT / HOOK).exists():
        _build(folder, python)
    elif not python.exists():
        raise CommandFailed(f"--compiled: there is no {python}, and no checkout of muxkit here to build it", Exit.USAGE)
    asked = subprocess.run([python, "-P", "-c", WHICH], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise CommandFailed(f"--compiled: {python} has no muxkit: {_last_line(asked.stderr)}", Exit.USAGE)
    if asked.stdout.strip().endswith(".py"):
        raise CommandFailed(f"--compiled: the muxkit of {python} is pure Python: {asked.stdout.strip()}", Exit.USAGE)
    return python


def _build(folder: Path, python: Path) -> None:
    stamp, sources = folder / STAMP, digest_of_sources()
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == sources:
        return
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(folder)])
    pins = ["--constraint", str(CHECKOUT / ".ci" / "constraints.txt")]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    # The pure build comes first, with what muxkit needs: pip installs a folder anew although the version is there.
    _call([*install, f"{CHECKOUT}[dtls,quic]"], MUXKIT_COMPILE="0")
    _call([*install, "--force-reinstall", "--no-deps", str(CHECKOUT)], MUXKIT_COMPILE="1")
    stamp.write_text(sources, encoding="utf-8")


def digest_of_sources() -> str:
    """Name the state of the sources that a build is made from."""
    digest = hashlib.sha256()
    for name in BUILT_FROM:
        place = CHECKOUT / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _call(command: list[str], **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**environment, **variables})
    if done.returncode:
        raise CommandFailed(f"--compiled: {' '.join(command)} failed: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
