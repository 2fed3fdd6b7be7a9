"""What can an engine tell? What the peer sent, what it confirmed, and what went wrong."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit.protocols.e3x.engine._channel_old import EngineChannel


class Fault(Enum):
    """Why was a packet, or a part of it, dropped? None of these ends anything: an address can be forged."""

    MALFORMED = "malformed"
    """It is no packet of a channel, or a field has a wrong value."""
    MISS = "miss"
    """Its `miss` has no meaning; the rest of it counted."""
    UNSENT = "unsent"
    """It confirms what was never sent."""
    UNKNOWN = "unknown"
    """Its channel does not exist, and it does not open one."""
    MISPLACED = "misplaced"
    """It has a seq, a type or an end where its channel allows none, or lacks one."""
    FLOOD = "flood"
    """A limit on what one peer may hold was reached."""
    FULL = "full"
    """There was no room for it; a reliable packet comes again."""
    DUPLICATE = "duplicate"
    """It came before. Harmless, and only counted."""


class Cause(Enum):
    """Why is a channel broken?"""

    PEER = "peer"
    """The peer sent `err`."""
    TIMEOUT = "timeout"
    """Nothing came while something was unconfirmed."""
    EXHAUSTED = "exhausted"
    """Every seq was used."""
    MESSAGE = "message"
    """The pieces of a message do not fit together, or come to more than is allowed."""


@attrs.define(eq=False)
class Opened:
    """The peer opened a channel. `body` is what its first packet carried; tell the engine `done` when it is taken."""

    channel: EngineChannel
    body: bytes


@attrs.define(eq=False)
class Message:
    """A message came; tell the engine `done` when it is processed: only then it is confirmed, and the next one comes.

    On an unreliable channel nothing waits for `done`.
    """

    channel: EngineChannel
    body: bytes


@attrs.define(eq=False)
class Ended:
    """The peer sends nothing more on the channel; told after all that it sent was processed."""

    channel: EngineChannel


@attrs.define(eq=False)
class Delivered:
    """The peer has processed our packets `first` to `last`; a message is delivered with its receipt's number."""

    channel: EngineChannel
    first: int
    last: int


@attrs.define(eq=False)
class Writable:
    """There is room for more on a channel that somebody watched."""

    channel: EngineChannel


@attrs.define(eq=False)
class Closed:
    """Both sides have ended the channel and know it, or we had closed it and all of ours is processed; it is gone."""

    channel: EngineChannel


@attrs.define(eq=False)
class Broken:
    """The channel is gone before its end. `text` is the peer's own if the peer did it: escape it before showing it."""

    channel: EngineChannel
    cause: Cause
    text: str


@attrs.define(eq=False)
class Faulted:
    """Something that came was dropped. Repetitions are counted in `stats()`, and told once until events are taken."""

    fault: Fault
    text: str


Event = Opened | Message | Ended | Delivered | Writable | Closed | Broken | Faulted
