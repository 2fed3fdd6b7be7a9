"""Events of an e3x engine: what the peer sent and confirmed, and what failed."""

from __future__ import annotations

from enum import Enum

import attrs

from muxkit.protocols.e3x.engine.channel import EngineChannel


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
class Opened:
    """The peer opened a channel. `body` is its first message; call `Engine.done` when it is processed."""

    channel: EngineChannel
    body: bytes


@attrs.define(eq=False)
class Message:
    """A message arrived. It is confirmed, and the next one reported, after a call of `Engine.done`.

    On an unreliable channel nothing waits for `done`.
    """

    channel: EngineChannel
    body: bytes


@attrs.define(eq=False)
class Ended:
    """The peer sends nothing more on the channel; reported after all its messages were processed."""

    channel: EngineChannel


@attrs.define(eq=False)
class Delivered:
    """The peer has processed the packets `first` to `last`; the number of a receipt is a message's last packet."""

    channel: EngineChannel
    first: int
    last: int


@attrs.define(eq=False)
class Writable:
    """A message of the size given to `Engine.watch` may fit now."""

    channel: EngineChannel


@attrs.define(eq=False)
class Closed:
    """The channel is gone: both sides have confirmed its end, or it was closed here and the peer has processed all."""

    channel: EngineChannel


@attrs.define(eq=False)
class Broken:
    """The channel is gone before its end. If the peer broke it, `text` is the peer's: escape it before showing it."""

    channel: EngineChannel
    cause: Cause
    text: str


@attrs.define(eq=False)
class Faulted:
    """A packet was dropped. `stats()` counts each; one of a kind is reported until the events are taken."""

    fault: Fault
    text: str
    limit: str | None = None
    """The field of `Limits` that the peer reached, if that is why."""


Event = Opened | Message | Ended | Delivered | Writable | Closed | Broken | Faulted
