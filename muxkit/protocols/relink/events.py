"""The events of Relink's engine: the handshake, messages, channels, and changes of the link.

In addition the engine reports some events that all protocols share (`muxkit.core.events`): `Writable`, `Pong`,
`GoingAway` for the peer's shutdown, `HungUp`, `Silent` and `Failed`.

An event refers to a channel by the engine's half of the channel. The half's attribute `channel` is the channel's
number. `ChannelSender.send_parts` returns the numbers of our messages, and the peer's messages are numbered in the same
way.
"""

from __future__ import annotations

import attrs

from muxkit.core.events import Failed, GoingAway, HungUp, Pong, Silent, Writable
from muxkit.protocols.relink.frames import Parts

# `receive` and `send` import this module in turn. That works because the package imports this module before all others.
# Importing them only for type checkers isn't enough, because compiled attrs classes need the types of their fields.
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender

# --- the handshake


@attrs.define
class Requested:
    """A connector has asked the listener for an endpoint.

    The listener decides with `ListenerHandshake.accept`, `resume`, `refuse` or `terminate`.
    """

    version: int
    endpoint: str
    connector_id_size: int
    listener_id_size: int
    connector_transactions: bool
    listener_transactions: bool
    require_link: bool
    epoch: int
    """The epoch of the listener that created the connector's link; 0 if the connector has no link."""
    link_id: int
    """The id of the link that the connector wants to continue; 0 if the connector has no link."""


@attrs.define
class Agreed:
    """The handshake has succeeded. Packets follow, and the bytes from `rest()` are the first of them."""

    version: int
    epoch: int
    link_id: int
    resumed: bool
    """True if the connection continues the link that the connector asked for. Otherwise the link is new."""


@attrs.define
class Refused:
    """The listener doesn't know the link that the connector requires. No packets follow on this connection."""

    epoch: int


# --- channels that we receive from


@attrs.define(eq=False)
class ChannelOpened:
    """The peer has opened a channel with its first message."""

    receiver: ChannelReceiver


@attrs.define(eq=False)
class Arrived:
    """Messages have arrived for the application. They occupy the peer's window until the application consumes them.

    Messages that were rolled back leave gaps in the numbers. The messages after a gap are reported by another event.
    """

    receiver: ChannelReceiver
    first: int
    """The number of the first message. The other messages have the following numbers, without a gap."""
    messages: list[Parts]


@attrs.define(eq=False)
class Ended:
    """The peer has closed its channel. The engine confirms the close when all messages are consumed."""

    receiver: ChannelReceiver


@attrs.define(eq=False)
class RolledBack:
    """The peer has rolled back messages up to number `through`. The application never receives these messages."""

    receiver: ChannelReceiver
    through: int


# --- channels that we send on


@attrs.define(eq=False)
class Received:
    """The peer has received all messages up to number `through`, so they won't be repeated."""

    sender: ChannelSender
    through: int


@attrs.define(eq=False)
class Consumed:
    """The peer's application has consumed all messages up to number `through`."""

    sender: ChannelSender
    through: int


@attrs.define(eq=False)
class Committed:
    """The peer's application has processed the messages from `first` to `through`, except those rolled back."""

    sender: ChannelSender
    first: int
    through: int


@attrs.define(eq=False)
class Uncommitted:
    """The peer's application couldn't process the messages from `first` to `through`, except those rolled back."""

    sender: ChannelSender
    first: int
    through: int


@attrs.define(eq=False)
class ChannelClosed:
    """The peer has confirmed the close of our channel. The channel's number may be used again."""

    sender: ChannelSender


# --- the connection and the link


@attrs.define(eq=False)
class Resumed:
    """The peer's resume is complete, so messages flow again on all channels."""


@attrs.define(eq=False)
class LinkReplaced:
    """The listener no longer has our link, so all channels of the link are lost.

    A new link takes its place, unless `link_id` is 0.
    """

    old_epoch: int
    old_link_id: int
    epoch: int
    link_id: int
    lost: int
    """How many of our messages the peer hadn't consumed or answered. Nothing is known about what became of them."""


@attrs.define(eq=False)
class EpochChanged(LinkReplaced):
    """The link was replaced because the listener was restarted, so that it has another epoch."""


@attrs.define(eq=False)
class Stalled:
    """A packet is incomplete, and too few of its bytes have arrived within `seconds`.

    The connection should be dropped. The link continues on another connection.
    """

    seconds: float


@attrs.define(eq=False)
class LinkFinished:
    """The link has ended cleanly: both sides have shut down, and all messages are consumed or answered.

    The connection should be closed after all output was written.
    """


HandshakeEvent = Requested | Agreed | Refused | HungUp | Failed

Acknowledged = Received | Consumed | Committed | Uncommitted

Event = (
    ChannelOpened
    | Arrived
    | Ended
    | RolledBack
    | Acknowledged
    | ChannelClosed
    | Writable
    | Pong
    | Resumed
    | LinkReplaced
    | EpochChanged
    | HungUp
    | Silent
    | Stalled
    | GoingAway
    | LinkFinished
    | Failed
)
