"""The events of the engine: what the peer did, the fate of our messages, and changes of the link."""

from __future__ import annotations

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.relink.frames import Parts

# --- the handshake


@attrs.define
class Requested:
    """A connector asks a listener for an endpoint. Decide: `accept`, `resume`, `refuse` or `terminate`."""

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
    """The handshake is done: packets may follow. Take `rest()` and hand it to the link's engine."""

    version: int
    epoch: int
    link_id: int
    resumed: bool
    """The link that the connector asked for goes on; otherwise it is new, and the old one is lost."""


@attrs.define
class Refused:
    """The listener does not know the link that was required (link id zero). The connection is over."""

    epoch: int


# --- messages of the peer


@attrs.define
class Opened:
    """The peer opened a channel with its first message."""

    channel: int


@attrs.define
class Arrived:
    """Messages came, and are the application's; they stay in the peer's window until they are consumed.

    What was rolled back leaves gaps in the numbers: behind one comes another event.
    """

    channel: int
    first: int
    """The number of the first message; the others follow without a gap."""
    messages: list[Parts]


@attrs.define
class Ended:
    """The peer closed its channel. The close is confirmed when all messages are consumed."""

    channel: int


@attrs.define
class RolledBack:
    """The peer took back messages through this number; none of them was or will be given to the application."""

    channel: int
    through: int


# --- what became of our messages; numbers are those that `send` gave


@attrs.define
class Received:
    """The peer has all messages through this number; they need not be sent again."""

    channel: int
    through: int


@attrs.define
class Consumed:
    """The peer's application has taken all messages through this number."""

    channel: int
    through: int


@attrs.define
class Committed:
    """The peer processed `first` to `through`, apart from those that were rolled back."""

    channel: int
    first: int
    through: int


@attrs.define
class Uncommitted:
    """The peer could not process `first` to `through`, apart from those that were rolled back."""

    channel: int
    first: int
    through: int


@attrs.define
class ChannelClosed:
    """The peer confirmed that our channel is closed; sending on it opens it anew."""

    channel: int


@attrs.define
class Writable:
    """The channel has room for the size given to `watch`."""

    channel: int


# --- the connection and the link


@attrs.define
class Ponged:
    """The answer to a `ping()`, or a pong without a ping."""


@attrs.define
class Resumed:
    """The peer told everything that it has of the old connection; all channels go on."""


@attrs.define
class LinkReplaced:
    """The peer no longer has our link; a new one took its place and everything about the old one is gone."""

    old_epoch: int
    old_link_id: int
    epoch: int
    link_id: int
    lost: int
    """Messages of ours that were not answered, whose fate is unknown."""


@attrs.define
class EpochChanged(LinkReplaced):
    """The link was replaced because the listener is another instance than before."""


@attrs.define
class HungUp:
    """The peer will send nothing more on this connection. The link lives on unless it is finished."""

    clean: bool
    """Not within a packet."""


@attrs.define
class Silent:
    """Nothing came for too long: drop this connection. The link lives on."""

    seconds: float
    stalled: bool = False
    """A packet had begun and did not get on."""


@attrs.define
class PeerShutDown:
    """The peer opens no more channels."""


@attrs.define
class Finished:
    """Both sides have shut down and everything is answered. The link is over; end the connection in order."""


@attrs.define
class Failed:
    """The peer broke the rules. The link is over."""

    error: RemoteProtocolError


HandshakeEvent = Requested | Agreed | Refused | HungUp | Failed

Acknowledged = Received | Consumed | Committed | Uncommitted

Event = (
    Opened
    | Arrived
    | Ended
    | RolledBack
    | Acknowledged
    | ChannelClosed
    | Writable
    | Ponged
    | Resumed
    | LinkReplaced
    | EpochChanged
    | HungUp
    | Silent
    | PeerShutDown
    | Finished
    | Failed
)
