"""Killing either process at any moment leaves no hang: everybody who waits is told, the server goes on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = Path(__file__).with_name("peer.py")
WAITERS = 14  # ten echoes, a sender, a receiver, incoming, ping


@contextmanager
def peer(role: str, url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, str(PEER), role, url], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process ended without a word"
    said: dict[str, object] = json.loads(line)
    return said


def after_rounds(process: subprocess.Popen[str], rounds: int) -> None:
    while next_line(process).get("rounds") != rounds:
        pass


def url_for(transport: str, folder: Path) -> str:
    return {
        "tcp": "bpmux+tcp://127.0.0.1:0",
        "unix": f"bpmux+unix://{folder}/socket",
        "ws": "bpmux+ws://127.0.0.1:0",
    }[transport]


@pytest.mark.requirement("R-39")
@pytest.mark.seeds(2, soak=30)
@pytest.mark.parametrize("transport", ["tcp", "unix", "ws"])
def test_every_waiter_of_a_client_is_told_when_the_server_is_killed(transport: str, tmp_path: Path, seed: int) -> None:
    with peer("serve", url_for(transport, tmp_path)) as server:
        with peer("client", str(next_line(server)["url"])) as client:
            after_rounds(client, random.Random(seed).randrange(1, 3000))
            server.kill()
            said = next_line(client)
            while "told" not in said:
                said = next_line(client)
            told = said["told"]
            assert isinstance(told, dict)
            reasons = {name: reason for name, reason in told.items() if name != "session"}
            assert len(reasons) == WAITERS
            assert all(reason.startswith("LinkLost") for reason in reasons.values()), told
            assert client.wait() == 0


@pytest.mark.requirement("R-39")
@pytest.mark.seeds(2, soak=30)
@pytest.mark.parametrize("transport", ["tcp", "unix", "ws"])
def test_a_server_goes_on_when_a_client_is_killed(transport: str, tmp_path: Path, seed: int) -> None:
    with peer("serve", url_for(transport, tmp_path)) as server:
        url = str(next_line(server)["url"])
        with peer("client", url) as other, peer("client", url) as victim:
            after_rounds(victim, random.Random(seed).randrange(1, 3000))
            victim.kill()
            assert next_line(server)["lost"] in ("peer", "network")
            reached = next_line(other).get("rounds")
            assert isinstance(reached, int)
            after_rounds(other, reached + 2000)
