"""The thread that a session belongs to, and the error for calls from another one.

Sessions, channels and servers are not thread-safe: they belong to the Trio run that opened them. A call from another
thread, or from a Trio run there, would change the engine while its own thread works on it, and wake tasks of a run that
it cannot reach: the peer reads a corrupt stream, or a task sleeps for ever. So each public method compares the thread
first. `send` and `receive` compare `get_ident()` in place, which costs 0.1 µs or about 1 % of a small message; the
others call `check`. A `receive` that takes the next message of a portion, which the engine has counted as a whole
before, changes nothing but a list and isn't checked.

The thread stands for the run: a thread has one Trio run at a time, and what the run opened is closed when it ends.
"""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Final, NoReturn


class HomeThread:
    """A thread that sessions belong to. `home_thread` makes one for each thread."""

    __slots__ = ("ident",)

    def __init__(self) -> None:
        self.ident: Final = get_ident()

    def check(self) -> None:
        """Raise RuntimeError in any other thread."""
        if get_ident() != self.ident:
            refuse_thread()


def refuse_thread() -> NoReturn:
    """Raise the error for a call from another thread."""
    raise RuntimeError(
        "this session belongs to another thread: expected a call from the one that opened it, got one from "
        f"{threading.current_thread().name!r}. Use trio.from_thread.run with the Trio token of that thread, or "
        "asyncio.run_coroutine_threadsafe if its loop is asyncio's. See 'Call from threads': docs/how-to/threads.md"
    )


class _Local(threading.local):
    def __init__(self) -> None:
        self.home = HomeThread()


_LOCAL: Final = _Local()


def home_thread() -> HomeThread:
    """Return the calling thread as the home of what it opens. All objects of a thread share one `HomeThread`."""
    return _LOCAL.home
