"""The events of both engines: requests and acknowledgements of a client, messages and ends of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.restream.wire import Json, JsonObject, Status

# ---------------------------------------------------------------------------- events of a server engine


@attrs.define
class StatelessRequested:
    """The client requests a stateless stream: a new one, or from the value after `state`.

    `state` is canonical decimal text, for `parse_integer`. Answer with `send_value`.
    """

    state: str | None


@attrs.define
class Registered:
    """The client requests a new session; `uuid` is in lower case. Answer with `accept` or `fail`."""

    uuid: str
    params: JsonObject


@attrs.define
class Resumed:
    """The client requests a session from the message after `state`; 0 for the first. Answer with `accept` or `fail`."""

    uuid: str
    state: int


@attrs.define
class Acknowledged:
    """The client has all messages up to this id, which is higher than the last acknowledged one."""

    uuid: str
    id: int


@attrs.define
class StatusRequested:
    """The client requests the progress of a session. Answer with `send_status` or `fail`."""

    uuid: str


# ---------------------------------------------------------------------------- events of a client engine


@attrs.define
class ReceivedValue:
    """The next integer of a stateless stream, as canonical decimal text, for `parse_integer`."""

    value: str


@attrs.define
class Received:
    """The next message of a session. `check` is the verifier's check after it, for the engine only."""

    id: int
    data: Json
    time: float | None
    final: bool
    check: Json


@attrs.define
class Finished:
    """The final message came before this event, and everything is verified. Write what is queued, then close."""


@attrs.define
class Refused:
    """The server sent an error. Close, and do not resume. The text is the server's own: escape it before showing it."""

    text: str


@attrs.define
class StatusReceived:
    """The progress of the session. Nothing follows: close."""

    status: Status


# ---------------------------------------------------------------------------- events of both


@attrs.define
class HungUp:
    """The peer will send nothing more. An unfinished line is dropped."""


@attrs.define
class Silent:
    """Nothing came for `seconds` while a line was unfinished: the connection is dead, and no rule was broken.

    A server still has its error line to write: flush, then close.
    """

    seconds: float


@attrs.define
class Failed:
    """The peer broke a rule. A server still has its error line to write: flush, then close."""

    error: RemoteProtocolError


ServerEvent = StatelessRequested | Registered | Resumed | Acknowledged | StatusRequested | HungUp | Silent | Failed
ClientEvent = ReceivedValue | Received | Finished | Refused | StatusReceived | HungUp | Silent | Failed
