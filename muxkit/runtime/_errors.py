"""What can go wrong with a live connection? Subclasses of Trio's own errors, so that code written for sockets works."""

from __future__ import annotations

from typing import Literal

import trio

from muxkit._errors import MuxError

Side = Literal["peer", "local", "network"]


class LinkLost(MuxError, trio.BrokenResourceError):
    """The connection is gone; raised where each waiter waits.

    `by` says whose doing it was, `after` how long the connection had lived in seconds, `unsent` how many
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
