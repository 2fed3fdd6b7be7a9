"""The events that an Aqueduct engine reports.

The engine implements the protocol without I/O. When it has processed bytes or a command, it reports what happened as a
list of the objects below, which `_connection` handles for the session.

An Aqueduct channel has one direction: one side has its *sender*, the other side its *receiver*. Both are called the
*halves* of the channel. One half is always on this side, and an event always contains that half.

Besides the events of this module, the engine reports these events of `muxkit.core.events`:

- `Received`: Messages have arrived at a receiver. The items of the event are `Arrived` objects.
- `Finished`: The peer has sent all messages for a receiver.
- `Cancelled`: The peer has stopped sending to a receiver before it had sent all messages.
- `Confirmed`: The peer knows that a sender on this side has finished or was cancelled.
- `Stopped`: The peer doesn't accept more messages from a sender on this side.
- `Writable`: A sender has room for the message that the session wants to send.
- `HungUp`: The peer has ended its direction of the connection.
- `Silent`: The peer hasn't sent anything for too long.
- `Failed`: The peer has broken a rule of the protocol.

In other protocols, `Opened` reports a new channel. In Aqueduct, the peer sends a new channel inside a message, so the
channel is in `Arrived.attachments` of that message. Streams may overtake each other. So the first messages of a new
channel may arrive before the message that contains the channel, and an event may refer to a half that the session
doesn't know yet. The session keeps such messages until the channel itself arrives.
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
    """A channel that the peer has sent inside a message."""

    half: EngineHalf
    """The half of the channel that belongs to this side."""
    headers: Headers
    """The headers that the peer has given to the channel."""


@attrs.define(eq=False)
class Arrived:
    """A message that has arrived.

    The session must pass this object to `EngineReceiver.consumed` once the application has taken the message. Otherwise
    the peer gets no new credit.
    """

    receiver: EngineReceiver
    """The half at which the message has arrived. It may be one that the session doesn't know yet."""
    number: int
    """The number of the message. Messages in streams and messages in datagrams are numbered separately, from 0."""
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    """The channels that the message contains, except those that have ended already."""
    cost: int
    """How many bytes of credit the message has used. `consumed` grants them to the peer again, and sets this to 0."""
    loan: int
    """How many bytes of this credit were lent in advance, because the message was larger than the window."""
    stream: StreamId | None
    """The stream on which the message has arrived, or None if it has arrived in a datagram."""

    @property
    def unreliable(self) -> bool:
        """True if the message has arrived in a datagram."""
        return self.stream is None


@attrs.define(eq=False)
class Lost:
    """A half has ended because the other side doesn't have the other half, or has it no more.

    `half.outcome` is LOST_IN_TRANSIT if the message that contained the channel didn't arrive at the peer. It is
    FORGOTTEN if the peer has created the channel and discarded it.
    """

    half: EngineHalf


@attrs.define(eq=False)
class Unclaimed:
    """A receiver has ended, and the message that should bring it to the session won't be waited for any more.

    So the application will never get the receiver. The session drops the messages that it has kept for it.
    """

    half: EngineReceiver


@attrs.define(eq=False)
class Acked:
    """The peer has received a message for which the session wanted a receipt."""

    receipt: Promise
    """The object that identifies the message."""


@attrs.define(eq=False)
class Nacked:
    """A message for which the session wanted a receipt hasn't arrived, or we can't find out whether it has."""

    receipt: Promise
    """The object that identifies the message."""


@attrs.define(eq=False)
class Connected:
    """The peer's connection headers have arrived, so the handshake is complete."""

    headers: Headers


@attrs.define(eq=False)
class Parted:
    """The peer has sent its reason for ending the connection. Another event then reports the end."""

    reason: Reason


# The alias is a string because mypyc compiles these classes, and a compiled class can't be subscripted at run time.
Event: TypeAlias = """(
    Received[Arrived] | Finished | Cancelled | Confirmed | Stopped | Lost | Unclaimed | Acked | Nacked | Writable
    | Connected | Parted | HungUp | Silent | Failed
)"""
