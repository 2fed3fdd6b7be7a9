"""What an Aqueduct engine reports in addition to the events that all protocols have (`muxkit.core.events`).

Of those it uses `Received`, with `Arrived` messages as its items; `Finished` and `Cancelled` for receivers; `Confirmed`
for a sender that finished or was cancelled, `Stopped` for one whose receiver was closed; `Writable`, `HungUp`, `Silent`
and `Failed`. There is no `Opened`, because a channel comes with a message: its half is among `Arrived.attachments`. No
half is reported as opened, so events may name a half that the session doesn't know yet.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from muxkit.core import Reason, StreamId
from muxkit.core.events import Cancelled, Confirmed, Failed, Finished, HungUp, Received, Silent, Stopped, Writable
from muxkit.protocols.aqueduct.frames import Headers

# They are imported also when this runs: compiled, a class made by attrs needs the classes of its fields.
from muxkit.protocols.aqueduct.half import EngineHalf
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import Promise


@attrs.define(eq=False)
class Attachment:
    """A half that came with a message."""

    half: EngineHalf
    headers: Headers


@attrs.define(eq=False)
class Arrived:
    """A message that came; `EngineReceiver.consumed` has to be called with it once the application has taken it.

    A channel that has ended in the meantime isn't among the attachments. The receiver may be one that the application
    doesn't know yet: then it comes as an attachment later.
    """

    receiver: EngineReceiver
    number: int
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    cost: int
    """Bytes of credit that `consumed` gives back; 0 after that."""
    loan: int
    """Bytes that `consumed` repays."""
    stream: StreamId | None
    """None if the message came in a datagram."""

    @property
    def unreliable(self) -> bool:
        return self.stream is None


@attrs.define(eq=False)
class Lost:
    """A half has ended without its other half: its `outcome` is LOST_IN_TRANSIT or FORGOTTEN."""

    half: EngineHalf


@attrs.define(eq=False)
class Unclaimed:
    """The message that carries this receiver isn't waited for any more, so its messages may be consumed."""

    half: EngineReceiver


@attrs.define(eq=False)
class Acked:
    """A message that was sent with a receipt has arrived."""

    receipt: Promise


@attrs.define(eq=False)
class Nacked:
    """A message that was sent with a receipt did not arrive, or what became of it will never be known."""

    receipt: Promise


@attrs.define(eq=False)
class Connected:
    """The connection headers of the peer have come."""

    headers: Headers


@attrs.define(eq=False)
class Parted:
    """The peer has said why it ends the connection, which follows."""

    reason: Reason


# A text, since a compiled class takes no subscript when it runs.
Event: TypeAlias = """(
    Received[Arrived] | Finished | Cancelled | Confirmed | Stopped | Lost | Unclaimed | Acked | Nacked | Writable
    | Connected | Parted | HungUp | Silent | Failed
)"""
