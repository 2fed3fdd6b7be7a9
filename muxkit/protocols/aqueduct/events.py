"""Events of an Aqueduct engine, which the session's connection handles.

An Aqueduct engine reports the events in this module and these events from `muxkit.core.events`, which all protocols
share:

- `Received`: messages have arrived. The items are `Arrived` objects.
- `Finished` and `Cancelled`: the peer has finished or cancelled sending to one of our receivers.
- `Confirmed`: the peer has confirmed the end of one of our senders, which had finished or was cancelled.
- `Stopped`: the peer has closed the receiver of one of our senders.
- `Writable`: a message that had no room in the queues has room now.
- `HungUp`, `Silent` and `Failed`: the peer has ended its direction of the connection, is lost, or has broken a rule.

An Aqueduct engine never reports `Opened`, because a channel arrives inside a message: the message's
`Arrived.attachments` contain the half. The messages of a half can overtake the message that contains the half. So an
event may refer to a half that the session doesn't know yet.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from muxkit.core import Reason, StreamId
from muxkit.core.events import Cancelled, Confirmed, Failed, Finished, HungUp, Received, Silent, Stopped, Writable
from muxkit.protocols.aqueduct.frames import Headers

# These imports are needed at run time, because mypyc compiles this module, and a compiled attrs class needs the classes
# of its fields.
from muxkit.protocols.aqueduct.half import EngineHalf
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import Promise


@attrs.define(eq=False)
class Attachment:
    """A half that the peer has sent to us inside a message."""

    half: EngineHalf
    headers: Headers


@attrs.define(eq=False)
class Arrived:
    """A message that has arrived.

    The session must call `EngineReceiver.consumed` with this object once the application has taken the message.

    The attachments don't include halves that have ended in the meantime. The application may not know the receiver yet.
    In that case, the receiver arrives later as an attachment of another message.
    """

    receiver: EngineReceiver
    number: int
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    cost: int
    """Bytes of credit that `consumed` returns to the peer. `consumed` sets this to 0."""
    loan: int
    """Bytes of a loan that `consumed` repays."""
    stream: StreamId | None
    """The stream on which the message has arrived, or None if it has arrived in a datagram."""

    @property
    def unreliable(self) -> bool:
        return self.stream is None


@attrs.define(eq=False)
class Lost:
    """A half has ended because its counterpart doesn't exist. Its `outcome` is LOST_IN_TRANSIT or FORGOTTEN."""

    half: EngineHalf


@attrs.define(eq=False)
class Unclaimed:
    """The engine no longer expects the message that contains this receiver.

    No application will ever take the receiver's messages, so the session may consume and drop them.
    """

    half: EngineReceiver


@attrs.define(eq=False)
class Acked:
    """A message that this side has sent with a receipt has arrived at the peer."""

    receipt: Promise


@attrs.define(eq=False)
class Nacked:
    """A message that this side has sent with a receipt hasn't arrived, or nobody can find out whether it has."""

    receipt: Promise


@attrs.define(eq=False)
class Connected:
    """The peer's connection headers have arrived."""

    headers: Headers


@attrs.define(eq=False)
class Parted:
    """The peer has sent its reason for ending the connection. The end of the connection follows."""

    reason: Reason


# The alias is a string because mypyc compiles these classes, and a compiled class can't be subscripted at run time.
Event: TypeAlias = """(
    Received[Arrived] | Finished | Cancelled | Confirmed | Stopped | Lost | Unclaimed | Acked | Nacked | Writable
    | Connected | Parted | HungUp | Silent | Failed
)"""
