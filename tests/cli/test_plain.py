"""What a pipe gets from any command: text without escape sequences, and with `--json` one JSON object a line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
import click
import pytest

from muxkit.cli.commands import commands
from tests.cli._command import ESCAPE, PATIENCE, environment, line_of
from tests.cli._forking import Muxkit
from tests.soak.forward_peers import free_port

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]

COLOURS = {"COLORTERM": "truecolor", "CLICOLOR": "1"}  # they ask for colours; `environment` has no FORCE_COLOR


@attrs.frozen
class Place:
    """Where a command is run."""

    folder: Path
    echo: str
    """The URL of a server that answers each message with itself."""
    files: str
    """The URL of a server that takes and gives files."""
    numbers: str
    """The URL of a restream server."""
    port: int
    """A port that nothing listens on."""


@attrs.frozen
class Run:
    """A real use of a command."""

    arguments: Callable[[Place], list[str]]
    given: str = ""
    """Its standard input."""
    lasts: bool = False
    """True if it works until it is interrupted, once it has printed a line."""
    code: int = 0
    carries: bool = False
    """True if its output is what came over a channel, and its own words go to standard error only."""


def _with(*arguments: str) -> Callable[[Place], list[str]]:
    return lambda place: [word.format(**attrs.asdict(place)) for word in arguments]


RUNS: Mapping[str, Run] = {
    "bench": Run(_with("--quick", "--no-peers", "--jobs", "rtt")),
    "chaos": Run(_with("127.0.0.1:0", "127.0.0.1:{port}"), lasts=True, code=130),
    "demo": Run(_with("--seconds", "0.1", "--transport", "tcp")),
    "doctor": Run(_with("{echo}")),
    "fleet list": Run(_with()),
    "forward": Run(_with("{echo}", "-L", "0:{port}"), lasts=True, code=130),
    "open": Run(_with("{echo}"), given="hello\n:stats\n:no-such-command\n", code=1),
    "pipe": Run(_with("{echo}"), given="hello\n", carries=True),
    "plugins": Run(_with()),
    "recv": Run(_with("{files}", "{folder}/got", "offered.txt")),
    "restream read": Run(_with("{numbers}", "--count", "5")),
    "restream serve": Run(
        _with("restream+tcp://127.0.0.1:0", "--store", "sqlite:{folder}/other.db"), lasts=True, code=130
    ),
    "send": Run(_with("{files}", "{folder}/sent.txt")),
    "serve": Run(_with("bpmux+tcp://127.0.0.1:0", "--echo"), lasts=True),
    "stage serve": Run(_with("bpmux+tcp://127.0.0.1:0", "--store", "sqlite:{folder}/stage.db"), lasts=True, code=130),
}
"""Commands that do not stand here print their help."""

ERRORS: Mapping[str, Run] = {
    "doctor": Run(_with("bpmux+tcp://127.0.0.1:{port}"), code=3),
    "open": Run(_with("bpmux+tcp://127.0.0.1:{port}"), code=3),
    "pipe": Run(_with("bpmux+tcp://127.0.0.1:{port}"), code=3, carries=True),
    "send": Run(_with("bpmux+tcp://127.0.0.1:{port}", "{folder}/sent.txt"), code=3),
    "recv": Run(_with("bpmux+tcp://127.0.0.1:{port}", "{folder}/got", "offered.txt"), code=3),
}


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _leaves(below, (*path, name))
    else:
        yield " ".join(path), command


LEAVES = dict(_leaves(commands))
JSON = [
    name
    for name, command in LEAVES.items()
    if name in RUNS and any("--json" in each.opts and getattr(each, "is_flag", False) for each in command.params)
]
DOCUMENTS = {"demo", "plugins"}  # print one JSON document, not lines


@contextmanager
def _server(*arguments: str) -> Iterator[str]:
    with Muxkit(*arguments, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield line_of(process).split()[-1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "offers").mkdir()
    (folder / "offers" / "offered.txt").write_text("offered")
    (folder / "sent.txt").write_text("sent")
    with (
        _server("serve", "bpmux+tcp://127.0.0.1:0", "--echo") as echo,
        _server("serve", "bpmux+tcp://127.0.0.1:0", "--files", str(folder / "offers"), "--upload") as files,
        _server("restream", "serve", "restream+tcp://127.0.0.1:0", "--store", "memory:") as numbers,
    ):
        yield Place(folder, echo, files, numbers, free_port())


def _run(name: str, run: Run, place: Place, *options: str, **changes: str) -> tuple[str, str]:
    """Run a command to its end, or until it has printed a line and was interrupted; return what it printed."""
    variables = environment(**changes)
    with Muxkit(
        *name.split(),
        *run.arguments(place),
        *options,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=place.folder,
    ) as process:
        try:
            first = ""
            if run.lasts:
                first = line_of(process)
                process.send_signal(signal.SIGINT)
            out, errors = process.communicate(run.given, timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == run.code, (first + out, errors)
    return first + out, errors


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_prints_no_escape_sequence_into_a_pipe(name: str, place: Place) -> None:
    run = RUNS.get(name, Run(_with("--help")))
    out, errors = _run(name, run, place, **COLOURS)
    assert out or errors
    assert ESCAPE not in out + errors


@pytest.mark.parametrize("name", ERRORS)
def test_nor_does_a_command_that_fails(name: str, place: Place) -> None:
    out, errors = _run(name, ERRORS[name], place)
    assert out or errors
    assert ESCAPE not in out + errors


@pytest.mark.parametrize("name", JSON)
def test_with_json_a_command_prints_nothing_else(name: str, place: Place) -> None:
    out, errors = _run(name, RUNS[name], place, "--json")
    assert ESCAPE not in out + errors
    if RUNS[name].carries:
        assert out == RUNS[name].given
        return
    assert out
    for text in [out] if name in DOCUMENTS else out.splitlines():
        assert isinstance(json.loads(text), list if name == "plugins" else dict), text


def test_these_are_the_commands() -> None:
    assert set(RUNS) <= set(LEAVES), "a command of this test is no longer there"
