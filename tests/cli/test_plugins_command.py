"""`muxkit plugins` lists what is installed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from muxkit._plugins import OWN, PROTOCOLS, TRANSPORTS
from tests.cli._command import ESCAPE, install_transport, muxkit

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """The path to an installed package whose transport cannot be imported, with a name and an error that bite."""
    return install_transport(tmp_path, "broken-adapter", "foo", 'raise ImportError("\\x1b]0;owned\\x07 no libfoo")\n')


def test_every_protocol_and_transport_is_in_the_table() -> None:
    done = muxkit("plugins")
    assert done.returncode == 0
    names = {*OWN[PROTOCOLS], *OWN[TRANSPORTS]}
    rows = [line.split() for line in done.stdout.splitlines()]
    assert names <= {row[3] for row in rows if len(row) > 3}


def test_json_tells_the_package_of_each() -> None:
    done = muxkit("plugins", "--json")
    assert done.returncode == 0
    found = {(plugin["kind"], plugin["name"]): plugin for plugin in json.loads(done.stdout)}
    assert found["protocol", "bpmux"]["package"] == "muxkit"
    assert found["transport", "tcp"]["target"] == "muxkit_adapters.tcp:transport"
    assert found["transport", "tcp"]["problem"] is None


def test_what_is_broken_stands_beside_the_name(broken: str) -> None:
    done = muxkit("plugins", PYTHONPATH=broken)
    row = next(line for line in done.stdout.splitlines() if " foo " in line)
    assert "broken-adapter" in row
    assert "no libfoo" in row


def test_one_broken_plugin_does_not_hide_the_others(broken: str) -> None:
    found = {plugin["name"]: plugin for plugin in json.loads(muxkit("plugins", "--json", PYTHONPATH=broken).stdout)}
    assert "no libfoo" in found["foo"]["problem"]
    assert found["tcp"]["problem"] is None


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_a_package_says_cannot_command_the_terminal(broken: str, options: list[str]) -> None:
    said = muxkit("plugins", *options, PYTHONPATH=broken).stdout
    assert "owned" in said
    assert ESCAPE not in said
    assert "\x07" not in said
