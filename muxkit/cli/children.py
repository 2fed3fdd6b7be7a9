"""How do processes of ours work for a command? Each tells lines on its standard output, and ends with its input.

So none is left behind, however we end: whoever is gone has closed his side of the pipe.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

GRACE = 5.0  # s, to end by itself


class Child:
    """A process of ours."""

    def __init__(self, name: str, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._rest = b""
        self._was_killed = False  # by us

    async def next_line(self) -> bytes | None:
        """What it tells next, without the line feed; None if it has ended instead."""
        while b"\n" not in self._rest:
            data = await self._stdout.receive_some()
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def let_go(self) -> None:
        """It is not needed any more; it may have something left to tell."""
        await self._stdin.aclose()

    async def end(self) -> None:
        """Let it go, and see to it that it ends."""
        with trio.CancelScope(shield=True):
            await self.let_go()
            with trio.move_on_after(GRACE):
                await self._process.wait()
            if self._process.returncode is None:
                self._was_killed = True
                self._process.kill()
                await self._process.wait()
            await self._stdout.aclose()

    @property
    def has_died(self) -> bool:
        """Did it end before its time?"""
        return self._process.returncode not in (None, 0) and not self._was_killed

    @property
    def end_in_words(self) -> str:
        code = self._process.returncode
        if code is None:
            return "is still at work"
        if self._was_killed:
            return f"did not end within {GRACE:g} s and was killed"
        if code >= 0:
            return f"ended too early, with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


@asynccontextmanager
async def child(name: str, module: str, *arguments: str) -> AsyncGenerator[Child, None]:
    """Run `python -m module arguments...`; it ends with the block at the latest."""
    process = await trio.lowlevel.open_process(
        # -P: what lies in the current folder is none of its modules.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for us, and we end it
    )
    one = Child(name, process)
    try:
        yield one
    finally:
        await one.end()
