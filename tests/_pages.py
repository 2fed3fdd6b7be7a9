"""The programs and commands on the pages, and an environment in which a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = {DOCS / "conformance.md", *(DOCS / "changes").glob("*.md")}
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")} - GENERATED)

# The interpreter that runs them: the suite's own, or that of an environment with nothing but what a page says.
PYTHON = os.environ.get("MUXKIT_PAGES_PYTHON") or sys.executable
PATIENCE = 300.0  # s that something else may take on a busy machine; nothing is decided by it
COMMANDS = ("muxkit ", "make ", "pip ", "python ", ".ci/", "MUXKIT_COMPILE=1 ")

_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`(?P<text>[^`\n]+)`(?!`)")

Kind = Literal["program", "command"]


@attrs.frozen
class Item:
    """A Python program, named by its number on the page, or a command, named by its own text."""

    page: str
    line: int
    kind: Kind
    name: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.page, self.name


@attrs.frozen
class Entry:
    """What `tests/data/pages.toml` says of an item: where it is run, or why it is not."""

    page: str
    name: str
    by: str | None = None
    why: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.page, self.name


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def items(page: Path) -> Iterator[Item]:
    """Everything on a page that a reader may run, in order."""
    text, name = page.read_text(encoding="utf-8"), page_name(page)
    programs = 0
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        match found["language"]:
            case "python":
                programs += 1
                yield Item(name, line, "program", f"program {programs}", found["text"])
            case "console":
                for command in commands(found["text"]):
                    yield Item(name, line, "command", command, command)
    if not name.startswith(("README.md", "docs/tutorial/", "docs/how-to/", "examples/")):
        return  # elsewhere a command in a sentence is named, not given to be run
    for found in _INLINE.finditer(_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)):
        command = found["text"]
        if command.startswith(COMMANDS):
            yield Item(name, text.count("\n", 0, found.start()) + 1, "command", command, command)


def commands(console: str) -> Iterator[str]:
    """The commands of a console block, each in one line and without its comment."""
    for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)$", console, re.MULTILINE):
        yield re.sub(r"\s+#\s.*$", "", re.sub(r"\s*\\\n\s*", " ", found[1])).strip()


def everything() -> list[Item]:
    return [item for page in PAGES for item in items(page)]


def entries() -> list[Entry]:
    data = tomllib.loads((ROOT / "tests" / "data" / "pages.toml").read_text(encoding="utf-8"))
    return [Entry(**each) for each in data["item"]]


def program(page: str, number: int) -> str:
    """A program as it stands on its page."""
    return _named(page, f"program {number}").text


def command(page: str, begins: str, number: int = 0) -> str:
    """A command as it stands on its page: the one that is this, else the so-manieth that begins like this."""
    shown = [item.text for item in items(ROOT / page) if item.kind == "command"]
    if begins in shown:
        return begins
    return [text for text in shown if text.startswith(begins)][number]


def _named(page: str, name: str) -> Item:
    return next(item for item in items(ROOT / page) if item.name == name)


# ---------------------------------------------------------------------------- running


def free_ports(text: str, ports: Mapping[int, int]) -> str:
    """The same text with other ports, since those of the pages may be in use where it runs; nothing else is changed."""
    for named, free in ports.items():
        text = re.sub(rf"\b{named}\b", str(free), text)
    return text


@contextmanager
def ports(*named: int) -> Iterator[dict[int, int]]:
    """A free port for each that the pages name."""
    sockets = {port: socket.create_server(("127.0.0.1", 0)) for port in named}
    free = {port: each.getsockname()[1] for port, each in sockets.items()}
    for each in sockets.values():
        each.close()
    yield free


def environment(path: str = "") -> dict[str, str]:
    """A shell's, in which `python` and `muxkit` are those of the environment; modules are found at `path` as well."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NO_COLOR", "FORCE_COLOR")}
    if path:
        plain["PYTHONPATH"] = path
    return {**plain, "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONUTF8": "1"}


def python(code: str) -> list[str]:
    return [PYTHON, "-W", "error", "-c", code]


def run(
    arguments: str | Sequence[str], folder: Path, *, timeout: float = PATIENCE, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """To its end; a text is a command of a shell."""
    return subprocess.run(
        _words(arguments),
        cwd=folder,
        env=environment(path),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


def _words(arguments: str | Sequence[str]) -> list[str]:
    """With the program by its path: a new process is looked up in this one's PATH."""
    words = shlex.split(arguments) if isinstance(arguments, str) else [*arguments]
    beside = Path(PYTHON).parent / words[0]
    return [str(beside) if beside.exists() else words[0], *words[1:]]


@contextmanager
def running(arguments: str | Sequence[str], folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """While the block runs, in a group of its own that is killed with it; what it prints is in the file `log`."""
    words = shlex.split(arguments) if isinstance(arguments, str) else [*arguments]
    with (folder / log).open("ab") as out:
        process = subprocess.Popen(words, cwd=folder, env=environment(), stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        kill(process)


def until(holds: Callable[[], bool], *alive: subprocess.Popen[bytes]) -> None:
    """Poll, while these processes live: a change of another process's files wakes no task."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert [process.poll() for process in alive] == [None] * len(alive)
        assert time.monotonic() < ends
        time.sleep(0.05)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Like `kill -9`, with everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.wait()
