"""The errors of a live connection: subclasses of Trio's own, so that code written for sockets handles them."""

from __future__ import annotations

from functools import partial
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

    __slots__ = ("_began", "_cause", "_make", "_peer")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._began = trio.current_time()
        self._cause: BaseException | None = None
        self._make = partial(LinkLost, "the connection is over", by="local", peer=peer)

    def record(self, reason: str, *, by: Side, cause: BaseException | None, unsent: int) -> None:
        """The connection ends now; `unsent` bytes were not taken by the transport."""
        after = trio.current_time() - self._began
        self._cause = cause
        self._make = partial(LinkLost, reason, by=by, peer=self._peer, after=after, unsent=unsent)

    @property
    def is_violation(self) -> bool:
        """True if it ended because the peer broke a rule."""
        return isinstance(self._cause, RemoteProtocolError)

    def error(self) -> LinkLost:
        error = self._make()
        error.__cause__ = self._cause
        return error
