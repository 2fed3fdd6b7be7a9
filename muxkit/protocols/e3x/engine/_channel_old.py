"""What is one channel? Its name, its two sides if it is reliable, its queue if it is not."""

from __future__ import annotations

from collections import deque  # noqa: TC003  # the compiled class looks its annotations up
from typing import TYPE_CHECKING

import attrs

from muxkit.core import NO_QUEUE

if TYPE_CHECKING:
    from muxkit.protocols.e3x.engine.channel import Outgoing
    from muxkit.protocols.e3x.engine.receiving import Incoming
    from muxkit.protocols.e3x.fragments import Assembly


@attrs.define(eq=False)
class EngineChannel:
    """A channel of an engine; to look at, and to hand to the engine's commands."""

    id: int
    type: str = ""
    ours: bool = True
    """Did we open it?"""
    outgoing: Outgoing | None = None
    """Its sending side, on a reliable channel."""
    incoming: Incoming | None = None
    assembly: Assembly | None = None
    datagrams: deque[tuple[bytes, bool]] = NO_QUEUE
    """What waits to be sent on an unreliable channel: bodies, and whether each is the last."""
    queued: int = 0
    """Bytes in `datagrams`."""
    announced: bool = False
    """The other side of a channel knows it: the application of the peer's, or the peer of ours."""
    taken: bool = True
    """The application took the opening."""
    ended: bool = False
    """We said that we send nothing more."""
    peer_ended: bool = False
    closing: bool = False
    """The application takes nothing more that comes on it."""
    gone: bool = False
    heard_at: float = 0.0
    """When the peer was heard on it last."""
    dies_at: float | None = None
    """When it goes whatever happens: it waits for its opening, or for an end that may be lost."""
    timer_at: float = float("inf")
    """The engine looks at it then."""
    in_line: bool = False
    """It waits for its turn to send."""

    @property
    def is_reliable(self) -> bool:
        return self.outgoing is not None

    def due(self, timeout: float) -> float | None:
        """When something must be done about it."""
        moments = []
        if self.dies_at is not None:
            moments.append(self.dies_at)
        if self.incoming is not None and self.incoming.ack_at is not None:
            moments.append(self.incoming.ack_at)
        if self.outgoing is not None and self.outgoing.probe_at is not None:
            moments += (self.outgoing.probe_at, self.silent_at(timeout))
        return min(moments, default=None)

    def silent_at(self, timeout: float) -> float:
        """When it has heard nothing for too long, given that something is unacked."""
        since = self.heard_at if self.outgoing is None else max(self.heard_at, self.outgoing.waiting_since)
        return since + timeout


@attrs.define(eq=False)
class Tombstone:
    """What is left of a channel, to answer what comes late."""

    until: float
    ack: int | None = None
    """The last seq that we processed, if it ended well: what the peer is told again."""
    processed: int = 0
    """The same, however it ended."""
    err: str | None = None
    """What we broke it with."""
    repeats: int = 0
    """How often the err will be said again unasked: it may be lost, and nobody acks it."""
