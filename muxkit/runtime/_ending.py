"""Why is a connection over? The first reason counts, and each waiter gets an error of his own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.runtime._errors import LinkLost

if TYPE_CHECKING:
    from muxkit.runtime._errors import Side


class LossRecord:
    """What is told about the end of a connection that began when this was made."""

    __slots__ = ("_after", "_began", "_by", "_cause", "_reason", "_unsent", "peer")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._began = trio.current_time()
        self._after: float | None = None
        self._reason = "the connection is over"
        self._by: Side = "local"
        self._cause: BaseException | None = None
        self._unsent = 0

    def record(self, reason: str, *, by: Side, cause: BaseException | None, unsent: int) -> None:
        """It is over now; `unsent` bytes were not taken by the transport."""
        self._after = trio.current_time() - self._began
        self._reason, self._by, self._cause, self._unsent = reason, by, cause, unsent

    @property
    def is_violation(self) -> bool:
        """Did it end because the peer broke a rule?"""
        return isinstance(self._cause, RemoteProtocolError)

    def error(self) -> LinkLost:
        error = LinkLost(self._reason, by=self._by, peer=self.peer, after=self._after, unsent=self._unsent)
        error.__cause__ = self._cause
        return error
