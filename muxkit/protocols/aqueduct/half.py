"""The base class of the two kinds of halves in an Aqueduct engine.

An Aqueduct channel has one direction. One side has its sender (`EngineSender`), the other its receiver
(`EngineReceiver`), and this module calls both *halves*. The side that creates a channel keeps one half. It sends the
other half to the peer inside a message, as an *attachment*.

If the peer has created the channel, we create our half when its first frame arrives. That may be before the message
with the attachment arrives, because Aqueduct's streams may overtake each other. So a half can exist, and receive
messages, although the application doesn't have it yet. `taken` is True once the application has it.

To distinguish the classes, we use `type(half) is EngineSender` instead of `isinstance`. Both classes derive from a
`typing.Protocol`, so that an `isinstance` whose result is False is slow, and each channel needs dozens of these tests.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.streams import OutStream
from muxkit.protocols.aqueduct.transit import Transit

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.state import State


class Outcome(Enum):
    """How a half has ended."""

    FINISHED = "finished"
    """The sender has finished, and all its messages were received or reported as missing."""
    CANCELLED = "cancelled"
    """The sender has cancelled the channel, so messages may be missing."""
    NO_RECEIVER = "no receiver"
    """The receiver was closed before all messages had arrived. Only the sender's side reports this."""
    LOST_IN_TRANSIT = "lost in transit"
    """The channel has never reached the other side, because the message with the attachment didn't arrive."""
    FORGOTTEN = "forgotten"
    """The side that created the channel has discarded it, usually because it was lost in transit."""


class EngineHalf:
    """One half of a channel. Its `id` is None until the other half was attached to a message."""

    __slots__ = (
        "attached",
        "flush",
        "has_news",
        "id",
        "is_spent",
        "main",
        "oneshot",
        "outcome",
        "owner",
        "state",
        "taken",
        "transit",
    )

    def __init__(self, state: State, id: int | None, transit: Transit, *, oneshot: bool) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.id: int | None = id
        self.oneshot: bool = oneshot
        self.transit: Transit = transit
        self.outcome: Outcome | None = None
        self.taken: bool = False
        """True once the application has this half."""
        self.is_spent: bool = False
        """True if the other half was attached to a message, or can't be attached any more."""
        self.attached: bool = False
        """True if the message with the attachment was sent by this side, or has arrived from the peer."""
        self.has_news: bool = False
        """True while the session hasn't handled the event that reports the end of this half."""
        self.flush: bool = False
        """True if acks, or counts of datagrams, may be written now."""
        self.main: OutStream | None = None
        """The stream for everything except unordered messages, or None if it isn't needed yet."""

    @property
    def label(self) -> str:
        return "channel that was not sent yet" if self.id is None else frames.label(self.id)

    @property
    def gone(self) -> bool:
        """True once the half has ended."""
        return self.outcome is not None

    @property
    def is_live(self) -> bool:
        """True if the peer may know the channel, and neither this half nor the connection has ended."""
        return not (self.id is None or self.state.over or self.outcome is not None)

    def route(self) -> bytes:
        """Return the frame with which a stream of this channel begins."""
        assert self.id is not None  # nothing is written before the other half is attached to a message
        return frames.encode_frame(frames.RouteTo(self.id))

    def stream(self) -> OutStream:
        """Return the stream for everything except unordered messages, and create it if necessary."""
        raise NotImplementedError

    def check_handed_over(self) -> None:
        """Raise `LocalProtocolError` if the other half wasn't attached to a message, so the peer doesn't know it."""
        if self.id is None:
            raise LocalProtocolError("the other half of this channel has not been sent yet; attach its ticket first")
