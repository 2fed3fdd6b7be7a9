"""What can an engine tell? Everything that the peer did, and what became of what we did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.bpmux._engine.entities import Entity


@attrs.define(eq=False)
class Message:
    """A whole message came for an entity; tell the engine with `consumed` when the application has it."""

    entity: Entity
    payload: bytes


@attrs.define(eq=False)
class Opened:
    """The peer made an entity. A duplex has two halves: `entity` to send on, `source` to receive from.

    The payload is paid from the top-level credit: tell the engine with `consumed_opening`.
    """

    entity: Entity
    payload: bytes
    source: Entity | None = None


@attrs.define(eq=False)
class Responded:
    """The answer to our request; the request is over."""

    entity: Entity
    payload: bytes


@attrs.define(eq=False)
class Ended:
    """The peer is done with an entity: no more comes, or it wants no more. The entity is gone."""

    entity: Entity
    payload: bytes


@attrs.define(eq=False)
class Confirmed:
    """The peer heard that we are done. The entity is gone."""

    entity: Entity


@attrs.define(eq=False)
class Declined:
    """The peer takes no new entities; this one was never announced to it. `twin` is a duplex's other half."""

    entity: Entity
    twin: Entity | None = None


@attrs.define(eq=False)
class Writable:
    """There is room for more on an entity that somebody watched."""

    entity: Entity


@attrs.define(eq=False)
class Pinged:
    """The peer asked for a sign of life."""

    entity: Entity


@attrs.define(eq=False)
class Ponged:
    """A sign of life: a chunk without flags."""

    entity: Entity


@attrs.define(eq=False)
class Probed:
    """The engine asked for a sign of life by itself; a `Ponged` will come for it too."""

    entity: Entity


@attrs.define(eq=False)
class HungUp:
    """The peer will send nothing more. Clean if no entity beside the top level was alive."""

    clean: bool


@attrs.define(eq=False)
class Silent:
    """Nothing came for too long: a ping was not answered, or a message stayed unfinished. The connection is over."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer broke the rules. The connection is over."""

    error: RemoteProtocolError


Event = (
    Message
    | Opened
    | Responded
    | Ended
    | Confirmed
    | Declined
    | Writable
    | Pinged
    | Ponged
    | Probed
    | HungUp
    | Silent
    | Failed
)
