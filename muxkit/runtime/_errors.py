"""The errors of a live connection: subclasses of Trio's own, so that code written for sockets handles them."""

from __future__ import annotations

from typing import Literal

import trio

from muxkit._errors import MuxError, RemoteProtocolError

Side = Literal["peer", "local", "network"]


class LinkLost(MuxError, trio.BrokenResourceError):
    """The connection is gone; raised by every call that waits for it, each time as a new error.

    `by` says which side ended it, `after` how long the connection had lived in seconds, `unsent` how many
    bytes accepted by `send` never reached the transport. The cause, if there is one, is `__cause__`.
    """

    def __init__(self, reason: str, *, by: Side, peer: str = "", after: float | None = None, unsent: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by: Side = by
        self.peer = peer
        self.after = after
        self.unsent = unsent

    def __str__(self) -> str:
        who = f"{self.peer}: " if self.peer else ""
        when = "" if self.after is None else f", {self.after:.1f} s after it began"
        unsent = f"; {self.unsent:,} bytes were not sent" if self.unsent else ""
        return f"{who}{self.reason}{when}{unsent}"


class ChannelStopped(MuxError, trio.BrokenResourceError):
    """The peer does not want to receive on this channel any more; `payload` is what it said about that."""

    def __init__(self, reason: str, *, payload: bytes = b"") -> None:
        super().__init__(reason)
        self.payload = payload


class ChannelCancelled(MuxError, trio.BrokenResourceError):
    """The peer gave up sending on this channel before it was done; `payload` is what it said about that.

    A session keeps the first 4 KiB of it.
    """

    def __init__(self, reason: str, *, payload: bytes = b"") -> None:
        super().__init__(reason)
        self.payload = payload


class Unsupported(MuxError):
    """The protocol or the link has no such operation."""


class LossRecord:
    """Why a connection ended, from which each task that raises gets an error of its own; made when it begins."""

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
        """The connection ends now; `unsent` bytes were not taken by the transport."""
        self._after = trio.current_time() - self._began
        self._reason, self._by, self._cause, self._unsent = reason, by, cause, unsent

    @property
    def is_violation(self) -> bool:
        """True if it ended because the peer broke a rule."""
        return isinstance(self._cause, RemoteProtocolError)

    def error(self) -> LinkLost:
        error = LinkLost(self._reason, by=self._by, peer=self.peer, after=self._after, unsent=self._unsent)
        error.__cause__ = self._cause
        return error
