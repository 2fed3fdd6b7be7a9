"""What can an engine tell? Everything that the peer did, and what became of what we did."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.aqueduct._incoming import Incoming
    from muxkit.protocols.aqueduct._receiving import Receiver
    from muxkit.protocols.aqueduct._sending import Receipt, Sender
    from muxkit.protocols.aqueduct._varint import Headers


class Outcome(Enum):
    """How a half ended."""

    FINISHED = "finished"
    """Everything was sent and came."""
    CANCELLED = "cancelled"
    """The sender gave up."""
    NO_RECEIVER = "no receiver"
    """The receiver was closed before everything had come."""
    LOST_IN_TRANSIT = "lost in transit"
    """The message that carried the channel did not arrive; the channel never reached the other side."""
    FORGOTTEN = "forgotten"
    """The side that made the channel has let go of it; most often because it was lost in transit."""


@attrs.define(eq=False)
class Attachment:
    """A half that came with a message."""

    half: Sender | Receiver
    headers: Headers


@attrs.define(eq=False)
class Message:
    """A message came; tell the engine with `consumed` when the application has it.

    A half that the application has from an earlier message is not among the attachments again. The receiver may
    be one that the application does not know yet: then it comes as an attachment later.
    """

    receiver: Receiver
    number: int
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    unreliable: bool
    cost: int  # what `consumed` gives back
    loan: int = 0
    incoming: Incoming | None = None


@attrs.define(eq=False)
class Finished:
    """All is sent and has come. The half is gone."""

    half: Sender | Receiver


@attrs.define(eq=False)
class Cancelled:
    """The sender gave up; at the sender: and the receiver has heard. The half is gone."""

    half: Sender | Receiver


@attrs.define(eq=False)
class NoReceiver:
    """The peer closed the receiver. The half is gone."""

    half: Sender


@attrs.define(eq=False)
class LostInTransit:
    """The channel that we made did not reach the peer. The half is gone."""

    half: Sender | Receiver


@attrs.define(eq=False)
class Forgotten:
    """The peer, who made the channel, has let go of it. The half is gone."""

    half: Sender | Receiver


@attrs.define(eq=False)
class Acked:
    """A message that somebody wanted to hear of has arrived."""

    receipt: Receipt


@attrs.define(eq=False)
class Nacked:
    """A message that somebody wanted to hear of did not arrive, or nobody will ever say that it did."""

    receipt: Receipt


@attrs.define(eq=False)
class Writable:
    """There is room for more on a sender that somebody watched."""

    sender: Sender


@attrs.define(eq=False)
class Connected:
    """The connection headers of the peer have come."""

    headers: Headers


@attrs.define(eq=False)
class HungUp:
    """The link is gone. Clean if no channel beside the entrypoint was alive."""

    clean: bool


@attrs.define(eq=False)
class Failed:
    """The peer broke the rules. The connection is over."""

    error: RemoteProtocolError


Event = (
    Message
    | Finished
    | Cancelled
    | NoReceiver
    | LostInTransit
    | Forgotten
    | Acked
    | Nacked
    | Writable
    | Connected
    | HungUp
    | Failed
)
