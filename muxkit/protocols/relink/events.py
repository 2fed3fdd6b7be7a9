"""What only Relink reports: the handshake, the fate of messages, the lives of channels, and changes of the link.

Beside these the engine reports some events that all protocols have (`muxkit.core.events`): `Writable`, `Pong`,
`GoingAway` for the peer's shutdown, `HungUp`, `Silent` and `Failed`.

A channel appears in an event as the engine's half of it, whose `channel` is its number. Messages have the numbers that
`ChannelSender.send_parts` gave, and those of the peer are counted in the same way.
"""

from __future__ import annotations

import attrs

from muxkit.core.events import Failed, GoingAway, HungUp, Pong, Silent, Writable
from muxkit.protocols.relink.frames import Parts

# These two import this module in turn. That works because the package imports this module before all others, and it
# cannot be left to the type checkers: compiled classes of attrs need the types of their fields.
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender

# --- the handshake


@attrs.define
class Requested:
    """A connector asks a listener for an endpoint.

    The listener decides with `accept`, `resume`, `refuse` or `terminate`.
    """

    version: int
    endpoint: str
    connector_id_size: int
    listener_id_size: int
    connector_transactions: bool
    listener_transactions: bool
    require_link: bool
    epoch: int
    """0 if the connector knows none."""
    link_id: int
    """0 if the connector knows none."""


@attrs.define
class Agreed:
    """The handshake is done, so packets may follow. What `rest()` returns belongs to the link's engine."""

    version: int
    epoch: int
    link_id: int
    resumed: bool
    """True if the link that the connector asked for goes on. Otherwise the link is new, and the old one is lost."""


@attrs.define
class Refused:
    """The listener doesn't know the link that was required (link id zero). The connection is over."""

    epoch: int


# --- messages of the peer


@attrs.define(eq=False)
class ChannelOpened:
    """The peer opened a channel with its first message."""

    receiver: ChannelReceiver


@attrs.define(eq=False)
class Arrived:
    """Messages came for the application. They stay in the peer's window until they are consumed.

    Messages that were rolled back leave gaps in the numbers, so the messages behind a gap come in another event.
    """

    receiver: ChannelReceiver
    first: int
    """The number of the first message. The others follow without a gap."""
    messages: list[Parts]


@attrs.define(eq=False)
class Ended:
    """The peer closed its channel. The engine confirms that once all messages are consumed."""

    receiver: ChannelReceiver


@attrs.define(eq=False)
class RolledBack:
    """The peer took back messages through this number. The application never gets them."""

    receiver: ChannelReceiver
    through: int


# --- what became of our messages


@attrs.define(eq=False)
class Received:
    """The peer has all messages through this number, so they need not be sent again."""

    sender: ChannelSender
    through: int


@attrs.define(eq=False)
class Consumed:
    """The peer's application has taken all messages through this number."""

    sender: ChannelSender
    through: int


@attrs.define(eq=False)
class Committed:
    """The peer processed `first` to `through`, apart from those that were rolled back."""

    sender: ChannelSender
    first: int
    through: int


@attrs.define(eq=False)
class Uncommitted:
    """The peer couldn't process `first` to `through`, apart from those that were rolled back."""

    sender: ChannelSender
    first: int
    through: int


@attrs.define(eq=False)
class ChannelClosed:
    """The peer confirmed that our channel is closed. The next message on its number opens it anew."""

    sender: ChannelSender


# --- the connection and the link


@attrs.define(eq=False)
class Resumed:
    """The peer has said everything that it has of the old connection, so all channels go on."""


@attrs.define(eq=False)
class LinkReplaced:
    """The peer no longer has our link. A new one took its place, and everything about the old one is gone."""

    old_epoch: int
    old_link_id: int
    epoch: int
    link_id: int
    lost: int
    """Messages of ours that were not answered, whose fate is unknown."""


@attrs.define(eq=False)
class EpochChanged(LinkReplaced):
    """The link was replaced because the listener is another instance than before."""


@attrs.define(eq=False)
class Stalled:
    """A packet had begun, and too little of it came within `seconds`. Drop this connection; the link lives on."""

    seconds: float


@attrs.define(eq=False)
class LinkFinished:
    """Both sides have shut down and everything is answered. The link is over; end the connection in order."""


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
