"""How far is a client's stream, how does it stand, and how is that saved for another process to go on with?"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.verifiers import NumbersVerifier, Verifier
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
    from muxkit.protocols.restream.wire.json import Json, JsonObject

VERSION = 1  # of what is saved


class Mode(Enum):
    """What a client wants."""

    STATELESS = "stateless"
    STATEFUL = "stateful"
    STATUS = "status"


class Standing(Enum):
    """How a stream stands."""

    APART = "apart"
    """There is no connection; `connection_made` begins one."""
    JOINED = "joined"
    """There is a connection."""
    FINISHED = "finished"
    """Everything has come and was verified; only an acknowledgement may be left to write."""
    REFUSED = "refused"
    """The server said an error."""
    FAILED = "failed"
    """The server broke the rules, or what came cannot be what was sent."""


@attrs.define
class Position:
    """How far a stream is: the last value, or the last id with the verifier's check up to it."""

    value: str | None = None
    id: int = 0
    check: Json = None
    acknowledged: int = 0
    finished: bool = False


@attrs.frozen
class Saved:
    """A stream as it was saved."""

    mode: Mode
    uuid: str
    params: JsonObject | None
    position: Position


def request(mode: Mode, uuid: str, params: JsonObject | None, id: int, value: str | None) -> Request:
    """What a connection has to begin with, when this was the last that came."""
    if mode is Mode.STATELESS:
        return OpenStateless() if value is None else ResumeStateless(value)
    if mode is Mode.STATUS:
        return AskStatus(uuid)
    return ResumeStateful(uuid, id) if id or params is None else OpenStateful(uuid, params)


def write(mode: Mode, uuid: str, params: JsonObject | None, position: Position) -> dict[str, Json]:
    """A stream as JSON."""
    if mode is Mode.STATELESS:
        return {"version": VERSION, "mode": mode.value, "value": position.value}
    if mode is Mode.STATUS:
        raise LocalProtocolError("a status request has no state to save")
    return {
        "version": VERSION,
        "mode": mode.value,
        "uuid": uuid,
        "params": params,
        "id": position.id,
        "check": position.check,
        "acknowledged": position.acknowledged,
        "finished": position.finished,
    }


def read(saved: JsonObject) -> Saved:
    """The stream that was saved; raises `LocalProtocolError` for anything else."""
    version, mode = saved.get("version"), saved.get("mode")
    if version != VERSION:
        raise LocalProtocolError(f"the saved state has version {version!r}, this can read version {VERSION}")
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
    """That of the document's application, which knows how many numbers were asked for."""
    if params is not None:
        encode_line(params)  # what has no form in JSON is refused here, and not when a connection is there
    count = None if params is None else params.get("count")
    return NumbersVerifier(count if type(count) is int else None)


def _saved_id(saved: JsonObject, name: str) -> int:
    value = saved.get(name)
    if type(value) is not int or not 0 <= value <= U32_MAX:
        raise LocalProtocolError(f"the saved state of a session lacks its {name}, a number within 0 and {U32_MAX}")
    return value
