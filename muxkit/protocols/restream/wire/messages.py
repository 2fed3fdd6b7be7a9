"""The messages of both sides as values: parsed from lines, and encoded as lines."""

from __future__ import annotations

import math
import re
import uuid as uuids
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.wire.integers import count_digits, format_integer, is_canonical
from muxkit.protocols.restream.wire.json import Json, JsonObject, encode_line, encode_number, parse_object
from muxkit.protocols.restream.wire.records import MAX_TAG, Record, json_of

DataT = TypeVar("DataT")

U32_MAX: Final = 0xFFFFFFFF
MAX_NUMBER_DIGITS: Final = 4000  # of a `state` that is a JSON number instead of a string
MAX_READER: Final = 255  # characters of the name of a reader
MAX_ERROR_TEXT: Final = 4000  # characters of an error that a server sends

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

ACK_FIELDS: Final = {"uuid", "ack"}

ALL_SESSIONS: Final = "00000000-0000-0000-0000-000000000000"
"""The UUID in a request for a listing. No session has it, so a server without listings answers that it is unknown."""

# ---------------------------------------------------------------------------- messages of a client


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
    """The client requests a session from the message after `state`; 0 for the first. Answer with `accept` or `fail`.

    With a `reader`, an extension, the client reads beside others and takes no connection over; its acknowledgements
    are those of the reader with this name, and are ignored if it is empty. `incarnation` is the one that it has to be;
    nothing after the message `until` is wanted. With `blocks`, the client understands blocks of messages.
    """

    uuid: str
    state: int
    reader: str | None = None
    incarnation: str | None = None
    until: int | None = None
    blocks: bool = False


@attrs.define
class StatusRequested:
    """The client requests the progress of a session, an extension. Answer with `send_status` or `fail`.

    A named `reader` is enrolled, if it is not known yet. With `also`, the progress of these sessions is told as well,
    and an unknown one is no error; `done` are messages up to which the reader is done, by session.
    """

    uuid: str
    reader: str = ""
    also: Sequence[str] | None = None
    done: Mapping[str, int] = attrs.field(factory=dict)


@attrs.define
class ListingRequested:
    """The client requests the sessions that have changed, an extension. Answer with `send_listing` or `fail`.

    Attributes:
        since: the `next` of an earlier listing, or an empty string to get all sessions.
        reader: the named reader whose position each status has, or an empty string. It isn't enrolled.
    """

    since: str = ""
    reader: str = ""


@attrs.define
class Acknowledged:
    """The client has all messages up to this id, which is higher than the last acknowledged one."""

    uuid: str
    id: int


Request = StatelessRequested | Registered | Resumed | StatusRequested | ListingRequested

# ---------------------------------------------------------------------------- messages of a server


@attrs.define
class Message(Generic[DataT]):
    """One message of a session. `time`, in seconds since 1970, is an extension: the source may give one."""

    id: int
    data: DataT
    time: float | None = None


class StoredMessage(NamedTuple):
    """One message as a store keeps it. Its data is compact JSON, or an encoded record."""

    id: int
    time: float | None
    data: bytes


@attrs.frozen
class Status:
    """The progress of a session: the last id, the last acknowledged id, and whether the last message is final.

    `epoch` counts the owners; None if the server does not count them. `incarnation` is drawn when a session is made, so
    another one means another session of the same uuid; None from a server that gives none. `written` are the bytes of
    all messages so far, `position` is the last message that the reader of the request is done with.
    """

    head: int
    acknowledged: int
    final: bool
    epoch: int | None = None
    incarnation: str | None = None
    written: int | None = None
    position: int | None = None


Statuses = dict[str, Status | None]
"""The progress of several sessions by uuid; None for one that is not known."""


@attrs.frozen
class ListedSession:
    """A session in a listing. `name` is the text `stream` of its params, or its UUID if they have none."""

    name: str
    status: Status


@attrs.frozen
class Listing:
    """The sessions of a server that have changed since an earlier listing.

    Attributes:
        sessions: the sessions by UUID. The value None means that the session was removed or has expired.
        next: the `since` of the next request.
        whole: True if the client has to forget all earlier listings, because this one starts from the beginning.
        more: True if more sessions have changed than fit into one listing, so that the next request is due immediately.
    """

    sessions: Mapping[str, ListedSession | None]
    next: str
    whole: bool = False
    more: bool = False


class ErrorCode(Enum):
    """What a program can do about an error of a server, an extension: the field `code` of an error line."""

    GONE = "gone"
    """The requested messages were acknowledged; those after the line's `acknowledged` are left."""
    BEYOND = "beyond"
    """The session has fewer messages than the client knows."""
    UNKNOWN = "unknown"
    """There is no such session, or it has expired."""
    BUSY = "busy"
    """Another connection has the session; it may be free later."""
    UNAVAILABLE = "unavailable"
    """The server is in trouble that passes; the same request may succeed later."""
    FAILED = "failed"
    """The application or the store of the server has failed, and only its operator can change that."""


_CODES: Final = {code.value: code for code in ErrorCode}


@attrs.define
class Refused:
    """The server sent an error. Close, and do not resume. The text is the server's own: escape it before showing it.

    `code` is None from a server that gives none, and `acknowledged` only comes with `GONE`.
    """

    text: str
    code: ErrorCode | None = None
    acknowledged: int | None = None


class RequestRefused(RemoteProtocolError):
    """A request that does not fit its session, with the code and number that the error line has."""

    def __init__(self, message: str, *, rule: str, code: ErrorCode, acknowledged: int | None = None) -> None:
        super().__init__(message, rule=rule)
        self.code = code
        self.acknowledged = acknowledged


def gone(state: int, acknowledged: int) -> RequestRefused:
    """Make the error for a request of messages that were acknowledged."""
    return RequestRefused(
        f"state {state} is before message {acknowledged}, which was acknowledged",
        rule="restream-S26",
        code=ErrorCode.GONE,
        acknowledged=acknowledged,
    )


def beyond(state: int, head: int) -> RequestRefused:
    """Make the error for a request of messages that do not exist."""
    return RequestRefused(
        f"state {state} is beyond the last message, {head}", rule="restream-S27", code=ErrorCode.BEYOND
    )


# ---------------------------------------------------------------------------- parsing a client's messages


def parse_request(line: bytes, *, digits: int, status: bool) -> Request:
    """Parse the first line of a connection. `digits` limits an integer in it, `status` allows status requests."""
    fields = parse_object(line)
    known = known_fields(fields, status=status)
    if "uuid" not in fields:
        if not known:
            return StatelessRequested(None)
        if known == ["state"]:
            return StatelessRequested(_value_of_state(fields["state"], digits))
        raise _unusable(known, first=True)
    uuid = read_uuid(fields["uuid"])
    if known == ["uuid", "params"]:
        params = fields["params"]
        if type(params) is not dict:
            raise RemoteProtocolError("params has to be an object", rule="restream-S01")
        return Registered(uuid, params)
    if known == ["uuid", "state"]:
        state = _id_of_state(fields["state"])
        if not status:
            return Resumed(uuid, state)
        incarnation, until = fields.get("incarnation"), fields.get("until")
        return Resumed(
            uuid,
            state,
            _reader_of(fields),
            incarnation if type(incarnation) is str else None,
            until if type(until) is int and until > state else None,
            fields.get("blocks") is True and "reader" in fields,
        )
    if known == ["uuid", "status"] and fields["status"] is True:
        since = fields.get("since")
        if uuid == ALL_SESSIONS and type(since) is str:
            return ListingRequested(since, _reader_of(fields) or "")
        also, done = fields.get("also"), fields.get("done", {})
        if not isinstance(also, list) or not isinstance(done, dict):
            return StatusRequested(uuid, _reader_of(fields) or "")
        ids = {read_uuid(each): _id_of_ack(id) for each, id in done.items()}
        return StatusRequested(uuid, _reader_of(fields) or "", [read_uuid(each) for each in also], ids)
    raise _unusable(known, first=True)


def parse_later(line: bytes, *, stateful: bool, status: bool) -> Acknowledged | None:
    """Parse a line after the first; None for one with unknown fields only."""
    fields = parse_object(line)
    if stateful and fields.keys() == ACK_FIELDS:
        return Acknowledged(read_uuid(fields["uuid"]), _id_of_ack(fields["ack"]))
    known = known_fields(fields, status=status)
    if stateful and known == ["uuid", "ack"]:
        return Acknowledged(read_uuid(fields["uuid"]), _id_of_ack(fields["ack"]))
    if fields and not known:
        return None
    raise _unusable(known, first=False, stateful=stateful)


def known_fields(fields: JsonObject, *, status: bool) -> list[str]:
    """Return the names of the known fields, in a fixed order."""
    known = [name for name in ("uuid", "params", "state", "ack") if name in fields]
    return [*known, "status"] if status and "status" in fields else known


def read_uuid(value: Json) -> str:
    """Return a UUID as text of five groups, in lower case."""
    if type(value) is str:
        text = value.lower()
        if _UUID.fullmatch(text):
            return text
    raise RemoteProtocolError("uuid has to be text of 8-4-4-4-12 hexadecimal digits", rule="restream-S02")


def new_uuid() -> str:
    """Return a UUID of 122 random bits, which cannot be guessed."""
    return str(uuids.uuid4())


def _reader_of(fields: JsonObject) -> str | None:
    reader = fields.get("reader")
    if reader is None:
        return None
    if type(reader) is not str or len(reader) > MAX_READER or not reader.isprintable():
        raise RemoteProtocolError(f"reader has to be text of up to {MAX_READER} printable characters")
    return reader


def _value_of_state(state: Json, digits: int) -> str:
    if type(state) is str:
        if not is_canonical(state):
            raise RemoteProtocolError("state has to be a decimal integer", rule="restream-L14")
        if count_digits(state) > digits:
            raise RemoteProtocolError(
                f"state of {count_digits(state)} digits; ServerConfig(digits={digits}) allows no more",
                rule="restream-L04",
            )
        return state
    if type(state) is int:
        text = format_integer(state)
        if count_digits(text) > min(digits, MAX_NUMBER_DIGITS):
            raise RemoteProtocolError(
                f"state is a number of {count_digits(text)} digits; more than {min(digits, MAX_NUMBER_DIGITS)} "
                "have to come as a string",
                rule="restream-L14",
            )
        return text
    raise RemoteProtocolError("state has to be a string of decimal digits", rule="restream-L14")


def _id_of_state(state: Json) -> int:
    if type(state) is not int:
        raise RemoteProtocolError("state of a session has to be an integer", rule="restream-S28")
    if not 0 <= state <= U32_MAX:
        raise RemoteProtocolError(f"state {shown(state)} is not within 0 and {U32_MAX}", rule="restream-S28")
    return state


def _id_of_ack(ack: Json) -> int:
    if type(ack) is not int:
        raise RemoteProtocolError("ack has to be an integer", rule="restream-S30")
    if not 1 <= ack <= U32_MAX:
        raise RemoteProtocolError(f"ack {shown(ack)} is not within 1 and {U32_MAX}", rule="restream-S38")
    return ack


def _unusable(known: list[str], *, first: bool, stateful: bool = False) -> RemoteProtocolError:
    names = ", ".join(known) or "no field at all"
    if first:
        rule = "restream-S32" if known == ["uuid", "ack"] else "restream-M03"
        return RemoteProtocolError(f"a first message cannot hold this: {names}", rule=rule)
    if stateful:
        rule = "restream-M03" if "ack" in known else "restream-S35"
        return RemoteProtocolError(f"only uuid and ack may come after the first message, not {names}", rule=rule)
    return RemoteProtocolError(f"nothing may come after the first message, and this did: {names}", rule="restream-L15")


# ---------------------------------------------------------------------------- parsing a server's messages


def parse_value(line: bytes, *, digits: int) -> str | Refused:
    """Parse a line of a stateless stream; the value is canonical decimal text."""
    fields = parse_object(line)
    value = fields.get("data")
    if "error" in fields:
        return _error_in(fields)
    if type(value) is not str or not is_canonical(value):
        raise RemoteProtocolError("data has to be a string of decimal digits", rule="restream-L03")
    if len(value) > digits and count_digits(value) > digits:
        raise RemoteProtocolError(
            f"a value of {count_digits(value)} digits; ClientConfig(digits={digits}) allows no more",
            rule="restream-L04",
        )
    return value


def parse_message(line: bytes) -> Message[Json] | Refused:
    """Parse a line of a session."""
    fields = parse_object(line)
    if "error" in fields:
        return _error_in(fields)
    id = fields.get("id")
    if type(id) is not int:
        raise RemoteProtocolError("id has to be an integer", rule="restream-S08")
    if not 0 <= id <= U32_MAX:
        raise RemoteProtocolError(f"id {shown(id)} is not within 0 and {U32_MAX}", rule="restream-S08")
    if "data" not in fields:
        raise RemoteProtocolError(f"message {id} has no data", rule="restream-S07")
    time = fields.get("time")
    return Message(id, fields["data"], None if time is None else _read_time(time))


def parse_status(line: bytes) -> Status | Statuses | Listing | Refused:
    """Parse the answer to a status request, for one session or for several, or to a request for a listing."""
    fields = parse_object(line)
    if "error" in fields:
        return _error_in(fields)
    if "listing" in fields:
        return _read_listing(fields["listing"])
    several = fields.get("statuses")
    if isinstance(several, dict):
        return {read_uuid(uuid): None if each is None else _read_status(each) for uuid, each in several.items()}
    return _read_status(fields.get("status"))


def _read_status(status: Json) -> Status:
    if type(status) is dict:
        head, acknowledged, final = status.get("head"), status.get("acknowledged"), status.get("final")
        epoch, incarnation, written = status.get("epoch"), status.get("incarnation"), status.get("written")
        position = status.get("position")
        if (
            type(head) is int
            and type(acknowledged) is int
            and 0 <= acknowledged <= head <= U32_MAX
            and type(final) is bool
            and (epoch is None or (type(epoch) is int and 0 <= epoch < 1 << 63))
        ):
            return Status(
                head,
                acknowledged,
                final,
                epoch,
                incarnation if type(incarnation) is str and incarnation else None,
                written if type(written) is int and written >= 0 else None,
                position if type(position) is int and acknowledged <= position <= head else None,
            )
    raise RemoteProtocolError("the answer to a status request holds no status")


def _read_listing(listing: Json) -> Listing:
    if type(listing) is dict:
        sessions, following = listing.get("sessions"), listing.get("next")
        if type(sessions) is dict and type(following) is str:
            return Listing(
                {
                    read_uuid(uuid): None if each is None else _read_listed(uuid, each)
                    for uuid, each in sessions.items()
                },
                following,
                whole=listing.get("whole") is True,
                more=listing.get("more") is True,
            )
    raise RemoteProtocolError("invalid listing: expected an object with sessions and next")


def _read_listed(uuid: str, each: Json) -> ListedSession:
    name = each.get("name") if type(each) is dict else None
    return ListedSession(name if type(name) is str else uuid, _read_status(each))


def _error_in(fields: JsonObject) -> Refused:
    text = fields["error"]
    if type(text) is not str:
        raise RemoteProtocolError("error has to be a string", rule="restream-F08")
    code, acknowledged = fields.get("code"), fields.get("acknowledged")
    known = _CODES.get(code) if isinstance(code, str) else None
    if known is not ErrorCode.GONE or type(acknowledged) is not int or not 0 <= acknowledged <= U32_MAX:
        return Refused(text, known)
    return Refused(text, known, acknowledged)


def _read_time(time: Json) -> float | None:
    """Return the time, or None for a value that is no number: the specification ignores unknown fields."""
    if type(time) is float and math.isfinite(time):
        return time
    if type(time) is int and abs(time) <= 1 << 53:
        return float(time)
    return None


# ---------------------------------------------------------------------------- writing


def encode_request(request: Request) -> bytes:
    """The first line of a connection."""
    match request:
        case StatelessRequested(state):
            return encode_line({} if state is None else {"state": state})
        case Registered(uuid, params):
            return encode_line({"uuid": uuid, "params": params})
        case Resumed(uuid, state, None):
            return encode_line({"uuid": uuid, "state": state})
        case Resumed(uuid, state, reader, incarnation, until, blocks):
            fields: dict[str, Json] = {"uuid": uuid, "state": state, "reader": reader}
            if incarnation is not None:
                fields["incarnation"] = incarnation
            if until is not None:
                fields["until"] = until
            if blocks:
                fields["blocks"] = True
            return encode_line(fields)
        case StatusRequested(uuid, reader, also, done):
            fields = {"uuid": uuid, "status": True}
            if reader:
                fields["reader"] = reader
            if also is not None:
                fields["also"] = list(also)
            if done:
                fields["done"] = dict(done)
            return encode_line(fields)
        case ListingRequested(since, reader):
            fields = {"uuid": ALL_SESSIONS, "status": True, "since": since}
            if reader:
                fields["reader"] = reader
            return encode_line(fields)


def encode_ack(ack: Acknowledged) -> bytes:
    return encode_line({"uuid": ack.uuid, "ack": ack.id})


def encode_value(value: str) -> bytes:
    """`value` is canonical decimal text."""
    return b'{"data":"%b"}\n' % value.encode("ascii")


def encode_message(id: int, data: Json | Record, time: float | None = None) -> bytes:
    if type(id) is not int or not 0 <= id <= U32_MAX:
        raise LocalProtocolError(f"id {id} is not within 0 and {U32_MAX}")
    if isinstance(data, Record):
        data = data.to_json()
    if time is None:
        return encode_line({"id": id, "data": data})
    return encode_line({"id": id, "data": data, "time": time})


def encode_stored(messages: Sequence[StoredMessage]) -> bytes:
    """Return the lines of stored messages. JSON data is embedded without being parsed, and records become JSON.

    A store only takes data that a line may hold. Data with a line feed would break the framing of all that follows, so
    that is checked here too, and raises `LocalProtocolError`.
    """
    lines: list[bytes] = []
    append = lines.append
    last_time, suffix = None, b"}\n"
    for id, time, data in messages:
        if data[0] <= MAX_TAG:
            data = json_of(data)
        elif b"\n" in data:
            raise LocalProtocolError(
                "stored data has a line feed: expected compact JSON; restore the store from a copy"
            )
        if time != last_time:  # messages that were appended together share their time
            last_time, suffix = time, b"}\n" if time is None else b',"time":%b}\n' % encode_number(time)
        append(b'{"id":%d,"data":%b%b' % (id, data, suffix))
    return b"".join(lines)


def encode_statuses(statuses: Statuses) -> bytes:
    """Return the answer to a status request for several sessions."""
    return encode_line(
        {"statuses": {uuid: None if each is None else _fields_of(each) for uuid, each in statuses.items()}}
    )


def encode_listing(listing: Listing) -> bytes:
    """Return the answer to a request for a listing."""
    fields: dict[str, Json] = {
        "sessions": {
            uuid: None if each is None else {"name": each.name, **_fields_of(each.status)}
            for uuid, each in listing.sessions.items()
        },
        "next": listing.next,
    }
    if listing.whole:
        fields["whole"] = True
    if listing.more:
        fields["more"] = True
    return encode_line({"listing": fields})


def encode_status(status: Status) -> bytes:
    return encode_line({"status": _fields_of(status)})


def _fields_of(status: Status) -> dict[str, Json]:
    fields: dict[str, Json] = {
        "head": status.head,
        "acknowledged": status.acknowledged,
        "final": status.final,
        "epoch": status.epoch,
    }
    if status.incarnation is not None:
        fields["incarnation"] = status.incarnation
    if status.written is not None:
        fields["written"] = status.written
    if status.position is not None:
        fields["position"] = status.position
    return fields


def encode_error(text: str, code: ErrorCode | None = None, acknowledged: int | None = None) -> bytes:
    """Return the error line for any text; an empty one gets a general reason."""
    told = text[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode("utf-8") or "the server gives no reason"
    line: dict[str, Json] = {"error": told}
    if code is not None:
        line["code"] = code.value
    if acknowledged is not None:
        line["acknowledged"] = acknowledged
    return encode_line(line)


def shown(number: int) -> str:
    """Return a number for an error text, or its size if it is long."""
    bits = number.bit_length()
    return str(number) if bits <= 64 else f"of {bits} bits"
