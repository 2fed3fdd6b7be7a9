"""Events of a bpmux engine: actions of the peer, and the outcome of local commands."""

from __future__ import annotations

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.bpmux.engine.entities import Entity


@attrs.define(eq=False)
class Message:
    """A whole message arrived for an entity; call `Engine.consumed` when the application has taken it."""

    entity: Entity
    payload: bytes


@attrs.define(eq=False)
class Messages:
    """Whole messages that came one behind the other for an entity, if `Engine.joins_messages`; otherwise each is told.

    The list is the reader's from then on.
    """

    entity: Entity
    payloads: list[bytes]


@attrs.define(eq=False)
class Opened:
    """The peer opened an entity. A duplex has two halves: `entity` to send on, `source` to receive from.

    The payload used top-level credit: call `Engine.consumed_opening` when the application has taken it.
    """

    entity: Entity
    payload: bytes
    source: Entity | None = None


@attrs.define(eq=False)
class Responded:
    """The response to a local request arrived; the request is over."""

    entity: Entity
    payload: bytes


@attrs.define(eq=False)
class Ended:
    """The peer ended an entity: it sends, or it receives, no more. The entity is gone.

    `cancels` is True if with it the peer has cancelled the whole channel before this side was done.
    """

    entity: Entity
    payload: bytes
    cancels: bool = False


@attrs.define(eq=False)
class Confirmed:
    """The peer acknowledged our end. The entity is gone."""

    entity: Entity


@attrs.define(eq=False)
class Declined:
    """The peer accepts no new entities, and this one was not announced in full. `twin` is a duplex's other half."""

    entity: Entity
    twin: Entity | None = None


@attrs.define(eq=False)
class Writable:
    """A message of the size given to `Engine.watch` may fit now."""

    entity: Entity


@attrs.define(eq=False)
class Pinged:
    """The peer sent a ping."""

    entity: Entity


@attrs.define(eq=False)
class Ponged:
    """The peer sent a pong: a chunk without flags."""

    entity: Entity


@attrs.define(eq=False)
class Probed:
    """The engine sent a keepalive ping; a `Ponged` follows for it too."""

    entity: Entity


@attrs.define(eq=False)
class HalfClosed:
    """The peer closed its direction of the stream, and `Engine.owes` entities something. `HungUp` follows."""


@attrs.define(eq=False)
class HungUp:
    """The peer closed its direction of the stream, and is owed nothing.

    Clean if no entity except the top level was alive.
    """

    clean: bool


@attrs.define(eq=False)
class Silent:
    """Nothing arrived for `seconds` after a ping or inside a message. The connection is over."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer violated the protocol or a limit. The connection is over."""

    error: RemoteProtocolError


Event = (
    Message
    | Messages
    | Opened
    | Responded
    | Ended
    | Confirmed
    | Declined
    | Writable
    | Pinged
    | Ponged
    | Probed
    | HalfClosed
    | HungUp
    | Silent
    | Failed
)
