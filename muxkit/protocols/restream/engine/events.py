"""What can an engine tell? What the client asks of a server, and what the server told a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.restream.wire.json import Json, JsonObject
    from muxkit.protocols.restream.wire.messages import Status

# ---------------------------------------------------------------------------- of a server


@attrs.define
class StatelessRequested:
    """The client wants a stateless stream: a new one, or from the value after `state` on.

    `state` is canonical decimal text; `parse_integer` makes a number of it. Answer with `send_value`.
    """

    state: str | None


@attrs.define
class Registered:
    """The client wants a new session; `uuid` is in lower case. Answer with `accept` or `fail`."""

    uuid: str
    params: JsonObject


@attrs.define
class Resumed:
    """The client wants to go on after message `state`, 0 for the beginning. Answer with `accept` or `fail`."""

    uuid: str
    state: int


@attrs.define
class Acknowledged:
    """The client has everything up to this id. It is higher than what was acknowledged before."""

    uuid: str
    id: int


@attrs.define
class StatusRequested:
    """The client wants to know how a session stands. Answer with `send_status` or `fail`."""

    uuid: str


# ---------------------------------------------------------------------------- of a client


@attrs.define
class ReceivedValue:
    """The next integer of a stateless stream, as canonical decimal text; `parse_integer` makes a number of it."""

    value: str


@attrs.define
class Received:
    """The next message of a session. `check` belongs to the engine."""

    id: int
    data: Json
    time: float | None
    final: bool
    check: Json


@attrs.define
class Finished:
    """The final message came before this, and everything was verified. Write what is left, then close."""


@attrs.define
class Refused:
    """The server said an error. Close, and do not resume. The text is the server's own: escape it when you show it."""

    text: str


@attrs.define
class StatusReceived:
    """How the session stands; there is nothing more to come. Close."""

    status: Status


# ---------------------------------------------------------------------------- of both


@attrs.define
class HungUp:
    """The peer will send nothing more. What it had begun to send is dropped."""


@attrs.define
class Silent:
    """Nothing came for so many seconds while a line was unfinished: the connection is dead, and nobody broke a rule.

    A server still has to write its error line: flush, then close.
    """

    seconds: float


@attrs.define
class Failed:
    """The peer broke the rules. A server still has to write its error line: flush, then close."""

    error: RemoteProtocolError


ServerEvent = StatelessRequested | Registered | Resumed | Acknowledged | StatusRequested | HungUp | Silent | Failed
ClientEvent = ReceivedValue | Received | Finished | Refused | StatusReceived | HungUp | Silent | Failed
