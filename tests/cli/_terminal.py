"""A terminal for a command: what it wrote there, and keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from typing import TYPE_CHECKING

from tests.cli._command import environment
from tests.cli._forking import Muxkit

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 40, 100
CTRL_C = b"\x03"


def on_a_terminal(
    *arguments: str, when: Callable[[str], bool] = lambda _: False, press: bytes = b"", **changes: str
) -> tuple[int, str]:
    """Run the command with a terminal of its own, which it is controlled by; gives its exit code and what it wrote.

    The keys are pressed once, as soon as `when` is true of the text so far.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = Muxkit(
        *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**changes), start_new_session=True
    )
    os.close(theirs)
    written = ""
    pressed = not press
    try:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not data:
                break
            written += data.decode(errors="replace")
            if not pressed and when(written):
                os.write(ours, press)
                pressed = True
        return process.wait(), written
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
            process.wait()
