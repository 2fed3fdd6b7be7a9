"""What the two halves of a channel have in common inside the engine.

A half exists from the moment at which this side makes it, or at which the first frame about it comes. It gets to the
application on its own way: our own half immediately, and a half that the peer made with the message that carries it,
which may come before or after the messages of the half. So a half is complete without the other one and without an
owner, and `taken` says whether the application has it.

To tell the two kinds apart, code asks for `type(half) is EngineSender`. Both are implementations of a
`typing.Protocol`, for which an `isinstance` that fails is a call in Python, and each channel needs dozens of these.
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
    """How a half ended."""

    FINISHED = "finished"
    """Everything was sent and came."""
    CANCELLED = "cancelled"
    """The sender gave up."""
    NO_RECEIVER = "no receiver"
    """The receiver was closed before everything had come. Reported at the sender's side only."""
    LOST_IN_TRANSIT = "lost in transit"
    """The message that carried the channel did not arrive, so the channel never reached the other side."""
    FORGOTTEN = "forgotten"
    """The side that made the channel has discarded it, most often because it was lost in transit."""


class EngineHalf:
    """One half of a channel. Its `id` is None until the other half was handed over to a message."""

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
        """The application has the session's half."""
        self.is_spent: bool = False
        """The other half was handed over, or can't be handed over any more."""
        self.attached: bool = False
        """The message that brings the half to the other side was sent, or has come from there."""
        self.has_news: bool = False
        """An event reports the end of the half, and the session hasn't handled it yet."""
        self.flush: bool = False
        """Acks or counts of datagrams may be written now."""
        self.main: OutStream | None = None
        """The stream for everything but unordered messages, once there is one."""

    @property
    def label(self) -> str:
        return "channel that was not sent yet" if self.id is None else frames.label(self.id)

    @property
    def gone(self) -> bool:
        """True once the half has ended."""
        return self.outcome is not None

    @property
    def is_live(self) -> bool:
        """True while the peer may know of the half and it hasn't ended."""
        return not (self.id is None or self.state.over or self.outcome is not None)

    def route(self) -> bytes:
        """Return the frame with which a stream of this channel begins."""
        assert self.id is not None  # nothing is written before the other half is handed over
        return frames.encode_frame(frames.RouteTo(self.id))

    def stream(self) -> OutStream:
        """Return the stream for everything but unordered messages; it is made when it is first needed."""
        raise NotImplementedError

    def check_handed_over(self) -> None:
        """Raise `LocalProtocolError` if the other half wasn't sent, so the peer knows nothing of the channel."""
        if self.id is None:
            raise LocalProtocolError("the other half of this channel has not been sent yet; attach its ticket first")
