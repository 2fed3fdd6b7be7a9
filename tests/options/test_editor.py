"""What a language server shows where options are given: completions, and misspelt options as errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import muxkit
from muxkit.protocols import aqueduct, bpmux, e3x, relink, yamux
from tests.options._language_server import LanguageServer

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM: Final = Path(__file__).with_name("entry_points.py").read_text(encoding="utf-8")
CALL: Final = re.compile(r"    (?:await )?(?P<name>[\w.]+)\(.*(?P<mistake>insecrue=True)\)  # type: ignore\[.*\]$")
LINES: Final = {
    found["name"]: number for number, line in enumerate(PROGRAM.splitlines()) if (found := CALL.match(line))
}

OPTIONS: Final[dict[str, Any]] = {
    "connect": muxkit.ConnectOptions,
    "reconnecting": muxkit.ReconnectOptions,
    "open_server": muxkit.ServeOptions,
    "serve": muxkit.ServeOptions,
    "run_server": muxkit.ServeOptions,
    "rpc.connect": muxkit.ReconnectOptions,
    "asyncio.rpc.connect": muxkit.ReconnectOptions,
    "forward.line": muxkit.ReconnectOptions,
    "relink.link": muxkit.DialOptions,
    "relink.listen": muxkit.ListenOptions,
    "restream.numbers": muxkit.DialOptions,
    "restream.stream": muxkit.DialOptions,
    "restream.integers": muxkit.DialOptions,
    "restream.status": muxkit.DialOptions,
    "restream.serve": muxkit.ListenOptions,
}
for module in (aqueduct, bpmux, e3x, relink, yamux):
    protocol = module.__name__.rpartition(".")[2]
    OPTIONS[f"{protocol}.connect"] = module.ConnectOptions
    OPTIONS[f"{protocol}.reconnecting"] = module.ReconnectOptions
    OPTIONS[f"{protocol}.open_server"] = module.ServeOptions


def options_of(name: str) -> set[str]:
    """Return the options that a call takes."""
    own = name.removeprefix("muxkit.")
    return set((OPTIONS.get(own) or OPTIONS[own.removeprefix("asyncio.")]).__annotations__)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    """A language server that every test of this module asks."""
    with LanguageServer(tmp_path_factory.mktemp("editor")) as started:
        yield started


def test_every_call_is_in_the_program() -> None:
    own = {name.removeprefix("muxkit.").removeprefix("asyncio.") for name in LINES}
    assert own | {"asyncio.rpc.connect"} == {*OPTIONS}


def test_a_misspelt_option_is_an_error_at_every_call(server: LanguageServer) -> None:
    program = re.sub("  # type: ignore.*", "", PROGRAM)
    found = server.diagnostics(server.open("misspelt.py", program))
    errors = [each for each in found if each["severity"] == 1]
    lines = PROGRAM.splitlines()
    wrong = {number for number, line in enumerate(lines) if "# type: ignore" in line}
    assert {each["range"]["start"]["line"] for each in errors} == wrong


def test_every_call_completes_its_options(server: LanguageServer) -> None:
    program = re.sub("insecrue=True|  # type: ignore.*", "", PROGRAM)
    uri = server.open("complete.py", program)
    missing: set[tuple[str, str]] = set()
    for name, number in LINES.items():
        place = PROGRAM.splitlines()[number].index("insecrue")
        shown = {label.removesuffix("=") for label in server.completions(uri, number, place)}
        missing |= {(name, option) for option in options_of(name) - shown}
    assert missing == set()
