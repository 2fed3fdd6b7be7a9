"""A staging server in a process of its own, for tests that kill it: `URL STORE [METHOD NUMBER before|after]`.

With a method it kills itself at the so-manieth call of it, before the store has done it or before anybody hears of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from muxkit.pipeline import Staging, open_staging, serve_staging

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]


class StagingProcess:
    """The server, and the address that it keeps when it is started again."""

    def __init__(self, store: str, url: str = "bpmux+tcp://127.0.0.1:0") -> None:
        self.url = url
        self._store = store
        self._process: subprocess.Popen[str] | None = None

    def start(self, *dies: str) -> None:
        """Returns when it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline._staging_process", self.url, self._store, *dies],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the server ended before it listened"

    def kill(self) -> None:
        """It must have been alive."""
        assert self._process is not None
        assert self._process.poll() is None
        self._process.kill()
        assert self.ended() == -signal.SIGKILL

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        assert self._process.stdout is not None
        code = self._process.wait()
        self._process.stdout.close()
        return code

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self.ended()


@contextmanager
def staging_process(store: str, url: str = "bpmux+tcp://127.0.0.1:0") -> Iterator[StagingProcess]:
    server = StagingProcess(store, url)
    try:
        yield server
    finally:
        server.stop()


# ---------------------------------------------------------------------------- the process


def deadly(store: Staging, method: str, number: int, when: str) -> Staging:
    calls = 0
    act: Callable[..., Awaitable[object]] = getattr(store, method)

    async def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = await act(*arguments, **options)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(store, method, counted)
    return store


async def main(*arguments: str) -> None:
    url, where, *dies = arguments
    async with open_staging(where) as store, trio.open_nursery() as nursery:
        if dies:
            method, number, when = dies
            store = deadly(store, method, int(number), when)
        served = await nursery.start(partial(serve_staging, url, store))
        print(served.url, flush=True)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await anext(signals)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
