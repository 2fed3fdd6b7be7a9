"""Child processes of a command: each prints lines on its standard output, and ends when its standard input is closed.

So none is left when the command ends, however it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

GRACE = 5.0  # s for a child to end by itself


class Child:
    """A child process."""

    def __init__(self, name: str, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._rest = b""
        self._was_killed = False  # by this command

    async def next_line(self) -> bytes | None:
        """Read its next line, without the line feed; None if it has ended."""
        while b"\n" not in self._rest:
            data = await self._stdout.receive_some()
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def release(self) -> None:
        """Close its standard input; its last lines can still be read."""
        await self._stdin.aclose()

    async def end(self) -> None:
        """Release it, and kill it if it does not end in time."""
        with trio.CancelScope(shield=True):
            await self.release()
            with trio.move_on_after(GRACE):
                await self._process.wait()
            if self._process.returncode is None:
                self._was_killed = True
                self._process.kill()
                await self._process.wait()
            await self._stdout.aclose()

    @property
    def has_died(self) -> bool:
        """True if it failed by itself."""
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
    """Run `python -m module arguments...`; it ends with the block."""
    process = await trio.lowlevel.open_process(
        # -P: do not import modules from the current folder.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C goes to the command, which ends its children
    )
    one = Child(name, process)
    try:
        yield one
    finally:
        await one.end()
