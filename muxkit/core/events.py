"""The events that the engines of all protocols report.

An engine processes bytes and commands without I/O, and reports what the peer has done, or what has become possible, as
a list of these objects. The runtime's session handles them. A protocol may have further events, such as those for
Relink's transactions, which the session of that protocol handles.

Events about a channel:

- `Opened`: The peer has opened it.
- `Received`: Messages have arrived.
- `Finished`: The peer has sent its last message.
- `Cancelled`: The peer has stopped sending before its last message.
- `Stopped`: The peer doesn't want more of our messages.
- `Confirmed`: The peer knows that a half of this side has ended.
- `Writable`: There may be room for a message.
- `Refused`: The peer doesn't accept the channel that we have opened, because it accepts no more channels.
- `ChannelFailed`: The peer has broken a rule or a limit on this channel only.

Events about the connection:

- `MayOpen`: This side may open another channel.
- `LimitReached`: The engine has refused a channel of the peer because of a limit.
- `GoingAway`: The peer opens and accepts no more channels.
- `Pong`: The peer has answered a ping.
- `Probed`: The engine has sent a ping of its own.
- `HungUp`, `Silent` and `Failed`: The connection has ended. Each of them is the last event.

An event about a channel contains the engine's half of the channel, whose `owner` is the session's object.
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
    """The engine's halves of a channel. A channel in one direction has only one of them."""

    sender: Sender | None
    receiver: Receiver[Any] | None


@attrs.define(eq=False)
class Opened:
    """The peer has opened a channel, which the session accepts or refuses."""

    channel: Any
    """The engine's `Halves`, or another object of the protocol that contains them."""
    opening: bytes
    """The name, the headers and the payload of the opening, as `with_name` encodes them."""


@attrs.define(eq=False)
class Received(Generic[ItemT]):
    """Messages have arrived on a channel, in this order. The handler of the event may change the list."""

    receiver: Receiver[ItemT]
    items: list[ItemT]


@attrs.define(eq=False)
class Finished:
    """The peer sends no more on this channel, and all its messages have arrived."""

    receiver: Receiver[Any]


@attrs.define(eq=False)
class Cancelled:
    """The peer has stopped sending on this channel before it was done, so messages may be missing."""

    receiver: Receiver[Any]
    payload: bytes = b""
    """The peer's reason in encoded form."""
    breaks_off: bool = False
    """True if the peer has cancelled the whole channel before this side was done."""


@attrs.define(eq=False)
class Stopped:
    """The peer doesn't want more of our messages on this channel."""

    sender: Sender
    payload: bytes = b""
    """The peer's reason in encoded form."""
    breaks_off: bool = False
    """True if the peer has cancelled the whole channel before this side was done."""


@attrs.define(eq=False)
class Confirmed:
    """The peer knows that this side has ended the half."""

    half: Sender | Receiver[Any]


@attrs.define(eq=False)
class Refused:
    """The peer accepts no more channels, and so not the one with this half, which we have opened."""

    half: Sender | Receiver[Any]


@attrs.define(eq=False)
class ChannelFailed:
    """The peer has broken a rule or a limit on one channel. The engine has ended that channel only."""

    channel: Halves
    error: RemoteProtocolError


@attrs.define(eq=False)
class MayOpen:
    """This side may open one more channel, because the peer has acknowledged an earlier one."""


@attrs.define(eq=False)
class LimitReached:
    """The engine has refused a channel of the peer because of a limit. The session doesn't know the channel."""

    limit: str
    """The name of the field of `Limits`."""


@attrs.define(eq=False)
class Writable:
    """There may be room for a message of the size that `Sender.notify_when_room` was given."""

    sender: Sender


@attrs.define(eq=False)
class Pong:
    """The peer has answered the oldest ping with this key. The protocol defines which keys there are."""

    key: Any = None  # mypyc finds no `object` here


@attrs.define(eq=False)
class Probed:
    """The engine has sent a ping of its own, because the peer was silent. Its answer is also reported as `Pong`."""

    key: Any = None  # mypyc finds no `object` here


@attrs.define(eq=False)
class GoingAway:
    """The peer opens and accepts no more channels. Open channels continue, unless the peer has given a reason."""

    reason: Reason


@attrs.define(eq=False)
class HungUp:
    """The peer has ended its direction of the connection. `is_clean` is False if a channel or a frame was open."""

    is_clean: bool


@attrs.define(eq=False)
class Silent:
    """Nothing has arrived for `seconds`, although we have sent a ping, or a message is incomplete."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer has broken a rule of the protocol, or a limit."""

    error: RemoteProtocolError
