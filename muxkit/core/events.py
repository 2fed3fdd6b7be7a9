"""What an engine reports: the events that all protocols have in common.

An event says what the peer has done, or what has become possible. `Received`, `Finished` and so on name a half of a
channel as the engine keeps it; its `owner` is the session's object. A protocol that knows more (the attachments of
Aqueduct, the commits of Relink) adds event classes of its own and handles them in its session.

    Opened       the peer opened a channel                        GoingAway   the peer opens no more channels
    Received     messages came                                    Pong        the answer to a ping came
    Finished     the peer sends no more, in order                 Probed      the engine sent a ping by itself
    Cancelled    the peer gave up sending                         HungUp      the peer ended its direction
    Stopped      the peer wants no more of what we send           Silent      the peer says nothing any more
    Confirmed    the peer knows that our half has ended           Failed      the peer broke a rule or a limit
    Writable     there may be room on a half
    Refused      the peer takes no new channels, so not this one
    MayOpen      one more channel may be opened                 LimitReached  a limit refused a channel

    ChannelFailed   the peer broke a rule or a limit on one channel; the engine has given the channel up

`HungUp`, `Silent` and `Failed` end the connection.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core._channels import Reason
from muxkit.core.halves import Receiver, Sender

ItemT = TypeVar("ItemT")


@attrs.frozen
class Halves:
    """A channel inside an engine: a half to send on, a half to receive on, or both."""

    sender: Sender | None
    receiver: Receiver[Any] | None


@attrs.define(eq=False)
class Opened:
    """The peer opened a channel, with a name and a payload. The session accepts or refuses it."""

    channel: Any
    """The channel inside the engine: its `Halves`, or an object of the protocol's own if these share more."""
    opening: bytes


@attrs.define(eq=False)
class Received(Generic[ItemT]):
    """Messages came on a channel, in this order; the list belongs to whoever handles the event."""

    receiver: Receiver[ItemT]
    items: list[ItemT]


@attrs.define(eq=False)
class Finished:
    """The peer sends no more on this channel, and everything that it sent has come."""

    receiver: Receiver[Any]


@attrs.define(eq=False)
class Cancelled:
    """The peer gave up sending on this channel: messages may be missing. `payload` is its reason, as it came."""

    receiver: Receiver[Any]
    payload: bytes = b""
    breaks_off: bool = False
    """True if with it the peer has given up the whole channel before this side was done."""


@attrs.define(eq=False)
class Stopped:
    """The peer wants no more of what we send on this channel. `payload` is its reason, as it came."""

    sender: Sender
    payload: bytes = b""
    breaks_off: bool = False
    """True if with it the peer has given up the whole channel before this side was done."""


@attrs.define(eq=False)
class Confirmed:
    """The peer has heard that we are done with this half."""

    half: Sender | Receiver[Any]


@attrs.define(eq=False)
class Refused:
    """The peer takes no new channels, and will never see this half, which we opened."""

    half: Sender | Receiver[Any]


@attrs.define(eq=False)
class ChannelFailed:
    """The peer violated a rule or a limit on one channel. The engine gives it up, and the connection goes on."""

    channel: Halves
    error: RemoteProtocolError


@attrs.define(eq=False)
class MayOpen:
    """This side may open one more channel, because the peer has acknowledged an earlier one."""


@attrs.define(eq=False)
class LimitReached:
    """The engine refused a channel of the peer because of a field of `Limits`, before the session knew of it."""

    limit: str


@attrs.define(eq=False)
class Writable:
    """There may be room for a message of the size that `Sender.notify_when_room` was given."""

    sender: Sender


@attrs.define(eq=False)
class Pong:
    """The answer to the oldest ping about `key` came; what a key is, the protocol says."""

    key: Any = None  # mypyc finds no `object` here


@attrs.define(eq=False)
class Probed:
    """The engine sent a ping by itself, to see whether the peer still lives; a `Pong` follows for it, too."""

    key: Any = None  # mypyc finds no `object` here


@attrs.define(eq=False)
class GoingAway:
    """The peer opens no more channels and takes none. Those that are open go on, unless it gave a reason."""

    reason: Reason


@attrs.define(eq=False)
class HungUp:
    """The peer ended its direction of the connection. `is_clean` is False if channels were open, or a frame was."""

    is_clean: bool


@attrs.define(eq=False)
class Silent:
    """Nothing came for `seconds` after a ping, or inside a message."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer violated the protocol or a limit."""

    error: RemoteProtocolError
