"""The state of a client's stream, and its form as JSON for another process."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.applications import NumbersVerifier, Verifier
from muxkit.protocols.restream.wire.integers import is_canonical
from muxkit.protocols.restream.wire.json import encode_line
from muxkit.protocols.restream.wire.messages import (
    U32_MAX,
    AskStatus,
    OpenStateful,
    OpenStateless,
    Request,
    ResumeStateful,
    ResumeStateless,
    read_uuid,
)

if TYPE_CHECKING:
    from muxkit.protocols.restream.wire import Json, JsonObject

SNAPSHOT_VERSION = 1


class Mode(Enum):
    """The kind of a client's request."""

    STATELESS = "stateless"
    STATEFUL = "stateful"
    STATUS = "status"


class StreamState(Enum):
    """The state of a client's stream."""

    DISCONNECTED = "disconnected"
    """There is no connection; `connection_made` begins one."""
    CONNECTED = "connected"
    """There is a connection."""
    FINISHED = "finished"
    """Everything came and is verified; only an acknowledgement may be left to write."""
    REFUSED = "refused"
    """The server sent an error."""
    FAILED = "failed"
    """The server broke a rule, or the data failed its check."""


@attrs.define
class Position:
    """The position of a stream: the last value, or the last id with the verifier's check after it."""

    value: str | None = None
    id: int = 0
    check: Json = None
    acknowledged: int = 0
    finished: bool = False


@attrs.frozen
class Saved:
    """A stream as read from a snapshot."""

    mode: Mode
    uuid: str
    params: JsonObject | None
    position: Position


def first_message(mode: Mode, uuid: str, params: JsonObject | None, id: int, value: str | None) -> Request:
    """Return the first message of a connection that continues after this position."""
    if mode is Mode.STATELESS:
        return OpenStateless() if value is None else ResumeStateless(value)
    if mode is Mode.STATUS:
        return AskStatus(uuid)
    return ResumeStateful(uuid, id) if id or params is None else OpenStateful(uuid, params)


def write_snapshot(mode: Mode, uuid: str, params: JsonObject | None, position: Position) -> dict[str, Json]:
    """Return a stream as JSON."""
    if mode is Mode.STATELESS:
        return {"version": SNAPSHOT_VERSION, "mode": mode.value, "value": position.value}
    if mode is Mode.STATUS:
        raise LocalProtocolError("a status request has no state to save")
    return {
        "version": SNAPSHOT_VERSION,
        "mode": mode.value,
        "uuid": uuid,
        "params": params,
        "id": position.id,
        "check": position.check,
        "acknowledged": position.acknowledged,
        "finished": position.finished,
    }


def read_snapshot(saved: JsonObject) -> Saved:
    """Return the stream of a snapshot; raises `LocalProtocolError` for anything else."""
    version, mode = saved.get("version"), saved.get("mode")
    if version != SNAPSHOT_VERSION:
        raise LocalProtocolError(f"the saved state has version {version!r}, this can read version {SNAPSHOT_VERSION}")
    if mode == Mode.STATELESS.value:
        value = saved.get("value")
        if value is not None and not isinstance(value, str):
            raise LocalProtocolError("the saved value of a stateless stream has to be text, or null")
        return Saved(Mode.STATELESS, "", None, position_of_value(value))
    if mode != Mode.STATEFUL.value:
        raise LocalProtocolError("the saved state is neither of a stateless nor of a stateful stream")
    uuid, params, finished = saved.get("uuid"), saved.get("params"), saved.get("finished")
    if not isinstance(uuid, str) or not isinstance(params, (dict, type(None))) or type(finished) is not bool:
        raise LocalProtocolError("the saved state of a session lacks its uuid, params or finished")
    id = _saved_id(saved, "id")
    acknowledged = _saved_id(saved, "acknowledged")
    if acknowledged > id:
        raise LocalProtocolError(f"the saved state has acknowledged {acknowledged} messages and taken {id}")
    position = Position(id=id, check=saved.get("check"), acknowledged=acknowledged, finished=finished)
    return Saved(Mode.STATEFUL, checked_uuid(uuid), params, position)


def position_of_value(value: str | None) -> Position:
    if value is not None and not is_canonical(value):
        raise LocalProtocolError("the state of a stateless stream has to be a decimal integer without leading zeros")
    return Position(value=value)


def checked_uuid(uuid: str) -> str:
    try:
        return read_uuid(uuid)
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.message) from None


def verifier_for(params: JsonObject | None) -> Verifier:
    """Return the verifier of the specification's application, with the requested count."""
    if params is not None:
        encode_line(params)  # so that params without a form in JSON are refused before there is a connection
    count = None if params is None else params.get("count")
    return NumbersVerifier(count if type(count) is int else None)


def _saved_id(saved: JsonObject, name: str) -> int:
    value = saved.get(name)
    if type(value) is not int or not 0 <= value <= U32_MAX:
        raise LocalProtocolError(f"the saved state of a session lacks its {name}, a number within 0 and {U32_MAX}")
    return value
