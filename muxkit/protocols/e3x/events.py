"""What an e3x engine reports beside the events that all protocols have in common (`muxkit.core.events`).

Of those it uses `Opened`, whose opening is the first message; `Received`, always with one message; `Finished`,
`Writable`, `Pong`, `Probed`, `Silent`, and `GoingAway`, when the peer leaves in order. No packet of a peer ends the
connection, so there is no `Failed`. The channel in an event is an `EngineChannel`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs

from muxkit.core import Reason
from muxkit.core.events import Finished, GoingAway, Opened, Pong, Probed, Received, Silent, Writable


class Fault(Enum):
    """The reason why a packet, or a part of it, was dropped. None ends anything, because an address can be forged."""

    MALFORMED = "malformed"
    """It is not a packet of a channel, or a field has an illegal value."""
    MISS = "miss"
    """Its `miss` is illegal; its other fields counted."""
    UNSENT = "unsent"
    """It confirms a seq that was not sent."""
    UNKNOWN = "unknown"
    """Its channel does not exist, and it does not open one."""
    MISPLACED = "misplaced"
    """It has a seq, a type or an end where its channel allows none, or lacks one."""
    FLOOD = "flood"
    """A limit on what one peer may hold was reached."""
    FULL = "full"
    """There was no memory for it; a reliable packet is sent again."""
    DUPLICATE = "duplicate"
    """It was received before. Harmless, and only counted."""


class Cause(Enum):
    """The reason why a channel is broken."""

    PEER = "peer"
    """The peer sent `err`."""
    TIMEOUT = "timeout"
    """Nothing was received while something was unconfirmed."""
    EXHAUSTED = "exhausted"
    """Every seq was used."""
    MESSAGE = "message"
    """The pieces of a message do not fit together, or exceed the limit on messages."""


@attrs.define(eq=False)
class Delivered:
    """The peer has processed the packets `first` to `last`; the number of a receipt is a message's last packet."""

    channel: Any
    first: int
    last: int


@attrs.define(eq=False)
class Closed:
    """The channel is gone: both sides have confirmed its end, or it was closed here and the peer has processed all."""

    channel: Any


@attrs.define(eq=False)
class Broken:
    """The channel is gone before its end. If the peer broke it, `text` is the peer's: escape it before showing it."""

    channel: Any
    cause: Cause
    text: str


@attrs.define(eq=False)
class Faulted:
    """A packet was dropped. `stats()` counts each; one of a kind is reported until `Engine.events` is called."""

    fault: Fault
    text: str
    limit: str | None = None
    """The field of `Limits` that the peer reached, if that is why."""


@attrs.define(eq=False)
class PingLost:
    """No answer to the ping about `key` can come any more: its channel is broken."""

    key: Any


@attrs.define(eq=False)
class GoodbyeHeard:
    """The peer has answered the goodbye of this side, or its channel is broken."""


@attrs.define(eq=False)
class GivenUp:
    """The peer has ended the session before everything was processed, with its reason."""

    reason: Reason


Event = (
    Opened
    | Received[bytes]
    | Finished
    | Delivered
    | Writable
    | Closed
    | Broken
    | Faulted
    | Pong
    | Probed
    | PingLost
    | Silent
    | GoingAway
    | GoodbyeHeard
    | GivenUp
)
