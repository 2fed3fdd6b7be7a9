"""Killing either process at any moment leaves no hang: every waiting task is told, the server goes on."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = Path(__file__).with_name("peer.py")
WAITERS = 14  # ten echoes, a sender, a receiver, incoming, ping
PIPE = 4096  # bytes; small, so that news are never old
UNHEARD = 1000  # rounds; the pipe and what reads from it hold the news of fewer than that


class Peer:
    """A process of `peer.py`. Its output is read all the time, since it would block on a full pipe."""

    def __init__(self, role: str, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), role, url], stdout=subprocess.PIPE, text=True, pipesize=PIPE
        )
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def next_line(self) -> dict[str, object]:
        line = self._said.get()
        assert line, "the process ended without a word"
        said: dict[str, object] = json.loads(line)
        return said

    def after_rounds(self, rounds: int) -> None:
        while self.next_line().get("rounds") != rounds:
            pass

    def reached(self) -> int:
        """The last round that was heard of."""
        rounds = 0
        while not rounds or not self._said.empty():
            said = self.next_line()["rounds"]
            assert isinstance(said, int)
            rounds = said
        return rounds

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def peer(role: str, url: str) -> Iterator[Peer]:
    it = Peer(role, url)
    try:
        yield it
    finally:
        it.close()


def url_for(transport: str, folder: Path) -> str:
    return {"tcp": "bpmux+tcp://127.0.0.1:0", "unix": f"bpmux+unix://{folder}/socket", "ws": "bpmux+ws://127.0.0.1:0"}[
        transport
    ]


@pytest.mark.requirement("R-39")
@pytest.mark.seeds(2, soak=30)
@pytest.mark.parametrize("transport", ["tcp", "unix", "ws"])
def test_every_waiter_of_a_client_is_told_when_the_server_is_killed(transport: str, tmp_path: Path, seed: int) -> None:
    with peer("serve", url_for(transport, tmp_path)) as server:
        with peer("client", str(server.next_line()["url"])) as client:
            client.after_rounds(random.Random(seed).randrange(1, 3000))
            server.kill()
            said = client.next_line()
            while "told" not in said:
                said = client.next_line()
            told = said["told"]
            assert isinstance(told, dict)
            reasons = {name: reason for name, reason in told.items() if name != "session"}
            assert len(reasons) == WAITERS
            assert all(reason.startswith("LinkLost") for reason in reasons.values()), told
            assert client.process.wait() == 0


@pytest.mark.requirement("R-39")
@pytest.mark.seeds(2, soak=30)
@pytest.mark.parametrize("transport", ["tcp", "unix", "ws"])
def test_a_server_goes_on_when_a_client_is_killed(transport: str, tmp_path: Path, seed: int) -> None:
    with peer("serve", url_for(transport, tmp_path)) as server:
        url = str(server.next_line()["url"])
        with peer("client", url) as other, peer("client", url) as victim:
            victim.after_rounds(random.Random(seed).randrange(1, 3000))
            victim.kill()
            assert server.next_line()["lost"] in ("peer", "network")
            other.after_rounds(other.reached() + UNHEARD)
