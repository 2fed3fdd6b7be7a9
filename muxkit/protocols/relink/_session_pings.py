"""How long does a round trip take? Pings of the application, each on the connection that there is."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from muxkit.protocols.relink._session_core import Core


class _Ping:
    """A ping on its way, or one that waits for a connection."""

    __slots__ = ("answer", "is_wanted", "sent_at", "took")

    def __init__(self) -> None:
        self.answer = trio.Event()
        self.is_wanted = True
        self.sent_at = 0.0
        self.took = 0.0


class Pings:
    """Those of one link, in the order in which they are answered."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: deque[_Ping] = deque()
        self.round_trip: float | None = None
        """Smoothed."""

    async def ping(self) -> float:
        """One round trip on the present connection; on the next one if this one is lost before."""
        await trio.lowlevel.checkpoint()
        core = self._core
        core.raise_if_over()
        if core.pump is None:
            self._forget_unwanted()
        ping = _Ping()
        self._waiting.append(ping)
        if core.pump is not None:
            self._send(ping)
        try:
            await ping.answer.wait()
        finally:
            ping.is_wanted = False
        core.raise_if_over()
        return ping.took

    def again(self) -> None:
        """There is a new connection, and whatever was sent on the old one is gone."""
        self._forget_unwanted()
        for ping in self._waiting:
            self._send(ping)

    def answered(self) -> None:
        if self._waiting:
            ping = self._waiting.popleft()
            ping.took = took = trio.current_time() - ping.sent_at
            self.round_trip = took if self.round_trip is None else 0.875 * self.round_trip + 0.125 * took
            ping.answer.set()

    def lost(self) -> None:
        """The link is over."""
        for ping in self._waiting:
            ping.answer.set()
        self._waiting.clear()

    def _send(self, ping: _Ping) -> None:
        ping.sent_at = trio.current_time()
        self._core.engine.ping()
        self._core.ring()

    def _forget_unwanted(self) -> None:
        self._waiting = deque(ping for ping in self._waiting if ping.is_wanted)
