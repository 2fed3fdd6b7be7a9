"""One call as interceptors and handlers see it, and the marks and headers that calls have on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Final, Literal

import attrs
import trio

from muxkit import _spans
from muxkit.rpc._errors import Code, Error
from muxkit.runtime import Session

ITEM: Final = b"\0"
"""In front of a result, or of an item of a stream."""
ERROR: Final = b"\1"
"""In front of the error that ends a call."""
END: Final = b"\2"
"""The message after the last item of a stream."""

TIMEOUT_HEADER: Final = "timeout"
"""Seconds until the deadline of the caller, when the call left it."""
DEADLINE_PASSED: Final = 504  # the code of a channel that was aborted because the deadline of the caller has passed


@attrs.define(eq=False, kw_only=True)
class Call:
    """One call, on the side of the client or of the server."""

    method: str
    """The full name, such as "Orders.get"."""
    side: Literal["client", "server"]
    session: Session
    headers: MutableMapping[str, str]
    """The headers of the call. An interceptor of a client may add some; a handler reads them."""
    deadline: float = math.inf
    """When the call ends, by `trio.current_time()`."""
    is_streaming: bool = False
    """True if items are sent in at least one direction."""

    @property
    def user(self) -> str | None:
        """The name that `authorize=` returned for the peer."""
        return self.session.info.user


Interceptor = Callable[[Call], AbstractAsyncContextManager[None]]
"""Something that runs around each call: a function that takes the `Call` and returns an async context manager.

Write it with `contextlib.asynccontextmanager`. It may raise `Error` before the `yield` to refuse the call, and sees the
error of a failed call come out of the `yield`.
"""


def around_call(own: tuple[Interceptor, ...]) -> tuple[Interceptor, ...]:
    """Return what runs around a call: its span if spans are on, then the interceptors of the server or the client."""
    return own if _spans.maker is None else (_spans.maker.around_call, *own)


_current: ContextVar[Call] = ContextVar("muxkit.rpc.call")


def current_call() -> Call:
    """Return the call that the handler of this task answers. Raises `LookupError` outside of a handler."""
    return _current.get()


def set_current(call: Call) -> None:
    """Note that this task answers a call."""
    _current.set(call)


def timeout_text() -> str | None:
    """Return the seconds until the deadline of this task as they travel; None if it has none."""
    deadline = trio.current_effective_deadline()
    return None if deadline == math.inf else f"{max(0.0, deadline - trio.current_time()):.6f}"


def deadline_of(text: str) -> float:
    """Return the deadline of a caller that gave this many seconds. Raises `Error` for anything but such a number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise Error(Code.INVALID_ARGUMENT, "invalid header 'timeout': expected seconds of at least 0")
    return trio.current_time() + seconds
