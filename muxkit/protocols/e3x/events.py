"""Events of an e3x engine, which the session's connection handles.

An e3x engine reports the events in this module and these events from `muxkit.core.events`, which all protocols share:

- `Opened`: the peer has opened a channel. Its `opening` is the first message of the channel.
- `Received`: a message has arrived. Each `Received` event of an e3x engine has exactly one message.
- `Finished`: the peer sends no more messages on a channel.
- `Writable`: a message that had no room in the queues has room now.
- `Pong`, `Probed` and `Silent`: the peer has answered a ping, the engine has sent a ping, and the peer is lost.
- `GoingAway`: the peer has said goodbye.

An e3x engine never reports `Failed`, because no packet of a peer ends the connection. The `channel` in an event is an
`EngineChannel`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import attrs

from muxkit.core import Reason
from muxkit.core.events import Finished, GoingAway, Opened, Pong, Probed, Received, Silent, Writable


class Fault(Enum):
    """The reason why the engine dropped a packet or ignored a field of it.

    A fault never closes a channel or the session, because somebody else may have sent the packet from a forged address.
    """

    MALFORMED = "malformed"
    """The packet can't be parsed, or one of its fields has an illegal value."""
    MISS = "miss"
    """The packet's `miss` is illegal. The engine ignored `miss` and applied the other fields."""
    UNSENT = "unsent"
    """The packet acknowledges a seq that this side has not sent."""
    UNKNOWN = "unknown"
    """The packet's channel doesn't exist, and the packet doesn't open a channel."""
    MISPLACED = "misplaced"
    """The packet has a seq, a type or an end that its channel doesn't allow here, or it lacks a required field."""
    FLOOD = "flood"
    """The packet opens a channel, but the peer has reached a limit on the number of its channels."""
    FULL = "full"
    """The receive buffer has no room for the packet, or the packet is beyond the window. The peer resends it later."""
    DUPLICATE = "duplicate"
    """The packet has arrived before. Duplicates are harmless, so the engine counts them and reports no event."""


class Cause(Enum):
    """The reason why a channel is broken."""

    PEER = "peer"
    """The peer sent `err`."""
    TIMEOUT = "timeout"
    """The peer has sent nothing for the timeout while packets waited for an ack, or has not sent its end in time."""
    EXHAUSTED = "exhausted"
    """The channel has used the highest sequence number, so it can't send another packet."""
    MESSAGE = "message"
    """The pieces of a message don't fit together, or the message exceeds a limit."""


@attrs.define(eq=False)
class Delivered:
    """The peer's application has processed the packets from `first` to `last`.

    A receipt has the seq of its message's last packet, so every receipt up to `last` is now delivered.
    """

    channel: Any
    first: int
    last: int


@attrs.define(eq=False)
class Closed:
    """The engine has removed a channel that ended in order.

    Either both sides have sent their end and every packet is acked, or this side closed the channel and the peer has
    processed every message that this side sent.
    """

    channel: Any


@attrs.define(eq=False)
class Broken:
    """The engine has removed a channel that did not end in order.

    If the cause is `Cause.PEER`, the peer chose `text`, so escape the text before you show it.
    """

    channel: Any
    cause: Cause
    text: str


@attrs.define(eq=False)
class Faulted:
    """The engine dropped a packet, or ignored a field of it.

    `Engine.stats` counts every fault. To keep a flood of bad packets cheap, the engine reports only the first fault of
    each kind until the next call of `Engine.events`.
    """

    fault: Fault
    text: str
    limit: str | None = None
    """The field of `Limits` that the peer has reached; None if the fault has another reason."""


@attrs.define(eq=False)
class PingLost:
    """The ping with this `key` will never be answered, because its channel is broken."""

    key: Any


@attrs.define(eq=False)
class GoodbyeHeard:
    """The peer has answered this side's goodbye, or the channel of the goodbye is broken, so no answer will arrive."""


@attrs.define(eq=False)
class GivenUp:
    """The peer has ended the session, and may not have processed every message. `reason` is the peer's reason."""

    reason: Reason


# The alias is a string because mypyc compiles these classes, and a compiled class can't be subscripted at run time.
Event: TypeAlias = """(
    Opened | Received[bytes] | Finished | Delivered | Writable | Closed | Broken | Faulted
    | Pong | Probed | PingLost | Silent | GoingAway | GoodbyeHeard | GivenUp
)"""
