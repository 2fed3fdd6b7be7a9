"""The commands of the page about traces, as they stand there, with a free port."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests._pages import command, free_ports, ports, run, running, until

PAGE = "docs/how-to/traces.md"

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes"),
    pytest.mark.extras("cli"),
]


def said(words: str | list[str], folder: Path) -> str:
    done = run(words, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sessions_are_traced_and_their_traces_are_read(tmp_path: Path) -> None:
    with ports(7000) as free:
        serve = free_ports(command(PAGE, "muxkit serve"), free)
        pipe = free_ports(command(PAGE, "echo tea"), free)
    with running(serve, tmp_path, "serve") as server:
        until(lambda: "listening on" in (tmp_path / "serve").read_text(), server)
        said(["bash", "-c", pipe], tmp_path)
        until(lambda: len([*tmp_path.glob("traces/*.sqlog")]) == 2, server)
        server.send_signal(signal.SIGINT)
        server.wait()
    for side in ("client", "server"):
        [trace] = tmp_path.glob(f"traces/*-{side}-*.sqlog")
        trace.rename(tmp_path / f"{side}.sqlog")
    for number in range(2):
        said(command(PAGE, "muxkit trace view", number), tmp_path)
    for page in ("page.html", "both.html"):
        assert "Content-Security-Policy" in (tmp_path / page).read_text(encoding="utf-8")
    assert "sent payload" in said(command(PAGE, "muxkit trace stats"), tmp_path)
    assert "frames sent" in said(command(PAGE, "muxkit trace diff"), tmp_path)
    assert "session_closed" in said(command(PAGE, "muxkit trace tail"), tmp_path)
    as_json = said(f"{command(PAGE, 'muxkit trace stats')} --json", tmp_path)
    assert json.loads(as_json)["errors"] == []
