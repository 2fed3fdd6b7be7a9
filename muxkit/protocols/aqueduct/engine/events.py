"""What can an engine tell? Everything that the peer did, and what became of what we did."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.aqueduct._incoming import Incoming
    from muxkit.protocols.aqueduct._receiving import ReceiverMachine
    from muxkit.protocols.aqueduct._sending import Promise, SenderMachine
    from muxkit.protocols.aqueduct._varint import Headers


class Outcome(Enum):
    """How a half ended."""

    FINISHED = "finished"
    """Everything was sent and came."""
    CANCELLED = "cancelled"
    """The sender gave up."""
    NO_RECEIVER = "no receiver"
    """The receiver was closed before everything had come. Told at the sender's side only."""
    LOST_IN_TRANSIT = "lost in transit"
    """The message that carried the channel did not arrive; the channel never reached the other side."""
    FORGOTTEN = "forgotten"
    """The side that made the channel has let go of it; most often because it was lost in transit."""


@attrs.define(eq=False)
class Attachment:
    """A half that came with a message."""

    half: SenderMachine | ReceiverMachine
    headers: Headers


@attrs.define(eq=False)
class Arrived:
    """A message came; tell the engine with `consumed` when the application has it.

    A half that the application has from an earlier message is not among the attachments again. The receiver may
    be one that the application does not know yet: then it comes as an attachment later.
    """

    receiver: ReceiverMachine
    number: int
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    unreliable: bool
    cost: int  # what `consumed` gives back
    loan: int = 0
    incoming: Incoming | None = None


@attrs.define(eq=False)
class Ended:
    """A half is gone, or will be as soon as the peer has heard: to the application it is over."""

    half: SenderMachine | ReceiverMachine
    outcome: Outcome


@attrs.define(eq=False)
class Unclaimed:
    """A receiver that nobody was given is not waited for any more: what came for it may be consumed."""

    half: ReceiverMachine


@attrs.define(eq=False)
class Acked:
    """A message that somebody wanted to hear of has arrived."""

    receipt: Promise


@attrs.define(eq=False)
class Nacked:
    """A message that somebody wanted to hear of did not arrive, or nobody will ever say that it did."""

    receipt: Promise


@attrs.define(eq=False)
class Writable:
    """There is room for more on a sender that somebody watched."""

    sender: SenderMachine


@attrs.define(eq=False)
class Connected:
    """The connection headers of the peer have come."""

    headers: Headers


@attrs.define(eq=False)
class HungUp:
    """The link is gone. Clean if no channel beside the entrypoint was alive."""

    clean: bool


@attrs.define
class Silent:
    """Nothing came for too long while a frame was unfinished. The connection is over."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer broke the rules. The connection is over."""

    error: RemoteProtocolError


Event = Arrived | Ended | Unclaimed | Acked | Nacked | Writable | Connected | HungUp | Silent | Failed
