"""`muxkit demo` works, prints its result, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli._command import (
    COLOUR,
    ESCAPE,
    children_of,
    is_there,
    kill,
    muxkit,
    needs_proc,
    running,
    wait_until_at_work,
)

if TYPE_CHECKING:
    import subprocess

if sys.platform != "win32":
    from tests.cli._terminal import CTRL_C, on_a_terminal

TRANSPORTS = ["tcp", "unix", "ws"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shows Unix sockets and terminals")


@pytest.fixture(scope="module")
def short_demo() -> subprocess.CompletedProcess[str]:
    return muxkit("demo", "--seconds", "0.5", "--json")


@pytest.fixture(scope="module")
def report(short_demo: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(short_demo.stdout)
    return parsed


@pytest.fixture(scope="module")
def runs(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["transport"]: run for run in report["runs"]}


# ---------------------------------------------------------------------------- what it finds


def test_a_run_without_a_fault_exits_with_zero_and_says_nothing_else(
    short_demo: subprocess.CompletedProcess[str],
) -> None:
    assert (short_demo.returncode, short_demo.stderr) == (0, "")


def test_it_runs_over_three_transports_in_turn(report: dict[str, Any]) -> None:
    assert [run["transport"] for run in report["runs"]] == TRANSPORTS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_payload_is_verified(runs: dict[str, dict[str, Any]], transport: str) -> None:
    run = runs[transport]
    assert run["verified"]
    assert run["messages_verified"] == run["messages"]
    assert run["bytes_verified"] == run["bytes"]
    assert run["problems"] == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_channels_take_part(runs: dict[str, dict[str, Any]], transport: str) -> None:
    # Each of 100 echoes at least once, in both directions, and the bulk channel sends 64 KiB at least once.
    assert runs[transport]["messages"] > 200
    assert runs[transport]["bytes"] > 65_536


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["ping_idle", "ping_load", "echo_load"])
def test_round_trips_are_measured_idle_and_loaded(runs: dict[str, dict[str, Any]], transport: str, when: str) -> None:
    measured = runs[transport][when]
    assert measured["samples"] > 0
    assert 0 < measured["p50"] <= measured["p99"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_memory_of_both_processes_is_told(runs: dict[str, dict[str, Any]], transport: str) -> None:
    assert runs[transport]["memory"]["client"] > 0
    assert runs[transport]["memory"]["server"] > 0


@pytest.mark.requirement("R-67")
@pytest.mark.parametrize("transport", ["tcp", "ws"])
def test_it_listens_on_loopback_only(runs: dict[str, dict[str, Any]], transport: str) -> None:
    assert runs[transport]["url"].startswith(f"bpmux+{transport}://127.0.0.1:")


def test_the_folder_of_the_unix_socket_is_gone_afterwards(runs: dict[str, dict[str, Any]]) -> None:
    assert not Path(runs["unix"]["url"].partition("://")[2]).parent.exists()


# ---------------------------------------------------------------------------- how it looks


def test_a_pipe_gets_lines_and_a_table_of_plain_text() -> None:
    done = muxkit("demo", "--seconds", "1.2", "--transport", "tcp")
    assert done.returncode == 0
    assert ESCAPE not in done.stdout
    assert re.search(r"^tcp: [1-9]\d* s, ", done.stdout, re.MULTILINE)
    assert "messages verified" in done.stdout
    assert "Every payload was verified at the end that received it." in done.stdout


def test_a_terminal_shows_colours_and_prints_over_its_progress() -> None:
    code, written = on_a_terminal("demo", "--seconds", "0.2", "--transport", "tcp")
    assert code == 0
    assert COLOUR.search(written)
    assert f"{ESCAPE}[2K" in written  # a line is erased to be drawn again


def test_no_color_is_respected_on_a_terminal() -> None:
    code, written = on_a_terminal("demo", "--seconds", "0.2", "--transport", "tcp", NO_COLOR="1")
    assert code == 0
    assert "Every payload was verified" in written
    assert COLOUR.search(written) is None


def test_a_dumb_terminal_gets_lines() -> None:
    code, written = on_a_terminal("demo", "--seconds", "0.2", "--transport", "tcp", TERM="dumb")
    assert code == 0
    assert ESCAPE not in written


# ---------------------------------------------------------------------------- how it ends


@needs_proc
def test_an_interrupt_exits_with_130_and_leaves_no_process() -> None:
    with running("demo", "--seconds", "60", "--transport", "unix") as demo:
        wait_until_at_work(demo)
        children = children_of(demo.pid)
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate()
    assert demo.returncode == 130
    assert said.strip() == "muxkit: interrupted"
    assert set(children) == {"server", "client"}
    assert [name for name, process in children.items() if is_there(process)] == []


def test_ctrl_c_on_a_terminal_exits_with_130_and_gives_the_cursor_back() -> None:
    code, written = on_a_terminal("demo", "--seconds", "60", when=lambda text: " messages, " in text, press=CTRL_C)
    assert code == 130
    assert "Traceback" not in written
    assert written.rindex(f"{ESCAPE}[?25h") > written.rindex(f"{ESCAPE}[?25l")


@needs_proc
@pytest.mark.parametrize("name", ["server", "client"])
def test_a_process_that_dies_in_the_middle_is_named(name: str) -> None:
    with running("demo", "--seconds", "60", "--transport", "tcp") as demo:
        wait_until_at_work(demo)
        kill(children_of(demo.pid)[name])
        _, said = demo.communicate()
    assert demo.returncode == 1
    assert said == f"muxkit: tcp: the {name} process was killed by SIGKILL\n"


@needs_proc
def test_json_tells_of_a_failure_as_well() -> None:
    with running("demo", "--seconds", "60", "--transport", "tcp", "--json") as demo:
        while "client" not in children_of(demo.pid):
            assert demo.poll() is None
        kill(children_of(demo.pid)["server"])
        written, _ = demo.communicate()
    report = json.loads(written)
    assert report["ok"] is False
    assert report["error"]["exit"] == demo.returncode


@needs_proc
def test_no_process_outlives_a_demo_that_was_killed() -> None:
    with running("demo", "--seconds", "60", "--transport", "tcp") as demo:
        wait_until_at_work(demo)
        ends = [os.pidfd_open(process) for process in children_of(demo.pid).values()]
        demo.kill()
        assert len(ends) == 2
        for end in ends:
            select.select([end], [], [])  # until it has ended; the time limit of the test sees to it that it does
            os.close(end)
