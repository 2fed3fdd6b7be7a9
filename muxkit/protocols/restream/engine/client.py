"""The engine of a client: one stream over any number of connections, lines in and messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar, Final
from uuid import UUID

import attrs
import msgspec

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer
from muxkit.protocols.restream.applications import NumbersVerifier, Verifier
from muxkit.protocols.restream.engine.line_engine import (
    FIRST_LINE_EXTRA,
    KIB,
    WRITE_BYTES,
    Failed,
    HungUp,
    LineEngine,
    Silent,
    check_sizes,
)
from muxkit.protocols.restream.wire import Block, Json, JsonObject, messages
from muxkit.protocols.restream.wire.integers import is_canonical
from muxkit.protocols.restream.wire.json import encode_line

NEVER: Final = messages.U32_MAX + 1  # above every id
SNAPSHOT_VERSION: Final = 1

# ---------------------------------------------------------------------------- settings, events and states


@attrs.frozen(kw_only=True)
class ClientConfig:
    """The settings of a `ClientEngine`; sizes in bytes, without the line feed."""

    ack_every: int | None = 16
    """Acknowledge after this many messages, and the final one; None: only by `acknowledge`."""
    consecutive: bool = True
    """Each id must be the one after the last; otherwise it only has to be higher, as in the specification."""
    digits: int = 100_000
    """The longest integer of a stateless stream, in decimal digits."""
    reader: str | None = None
    """Read an existing session beside others, without taking its connection over, an extension: acknowledgements are
    those of the reader with this name, or are ignored if it is empty. A server without it takes over as usual."""
    incarnation: str | None = None
    """With a reader: refuse a session that was made anew since it had this incarnation."""
    until: int | None = None
    """With a reader: the last message that is wanted. A server that does not know this sends more."""
    line: int = 64 * KIB
    """The longest line; in a stateless stream at least what the longest integer needs."""

    def __attrs_post_init__(self) -> None:
        check_sizes("ClientConfig", digits=self.digits, line=self.line)
        if self.ack_every is not None and self.ack_every < 1:
            raise ValueError(f"ClientConfig(ack_every={self.ack_every}): must be at least 1, or None")

    @property
    def value_line(self) -> int:
        """The longest line of a stateless stream."""
        return max(self.line, self.digits + FIRST_LINE_EXTRA)


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
class StatusReceived:
    """The progress of the session. Nothing follows: close.

    `statuses` are those of all sessions of the request, if it was for several and the server answers such requests.
    """

    status: messages.Status | None
    statuses: messages.Statuses | None = None


@attrs.define
class ListingReceived:
    """The sessions of the server that have changed. Nothing follows: close."""

    listing: messages.Listing


class EncodedMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One message of a session whose data is JSON, as the server sent it."""

    id: int
    data: msgspec.Raw
    time: float | None = None


@attrs.define
class ReceivedBlock:
    """The next messages of a session. Only a `BlockEngine` reports it."""

    block: Block


ClientEvent = (
    ReceivedValue
    | Received
    | ReceivedBlock
    | Finished
    | messages.Refused
    | StatusReceived
    | ListingReceived
    | HungUp
    | Silent
    | Failed
)


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
    """The server sent an error that is final, which every error is whose code isn't `ErrorCode.UNAVAILABLE`."""
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


# ---------------------------------------------------------------------------- the engine


class ClientEngine(LineEngine[ClientEvent]):
    """A client's end of one stream, which outlives its connections; a `StreamEngine` on each of them.

    Made by `stateless`, `stateful`, `status` or `restore`. For each connection call `connection_made`, then pass bytes,
    then call `connection_lost`; while `may_resume` is true there may be another one. `taken` reports the position of
    the application, which is acknowledged and saved, and to which `rewind` goes back.
    """

    wants_blocks: ClassVar[bool] = False
    """True if the engine understands blocks of messages, and requests them."""

    def __init__(
        self,
        mode: Mode,
        position: Position,
        *,
        uuid: str = "",
        params: JsonObject | None = None,
        verifier: Verifier | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.messages_received: int = 0
        """Messages of a session or values of another stream, since the engine was made."""
        self.mode = mode
        self.uuid = uuid
        """The uuid of the session, in lower case; empty for a stateless stream."""
        self.params = params
        self.config: ClientConfig = config or ClientConfig()
        limit, name = self.config.line, f"ClientConfig(line={self.config.line})"
        if mode is Mode.STATELESS:
            limit, name = self.config.value_line, f"ClientConfig(digits={self.config.digits})"
        super().__init__(limit, name, limits, observer)
        self._lines.stop()  # until there is a connection
        self._take = {Mode.STATELESS: self._take_value, Mode.STATEFUL: self._take_message}.get(mode, self._take_status)
        self.state = StreamState.FINISHED if position.finished else StreamState.DISCONNECTED
        self.acknowledged: int = position.acknowledged
        """The highest id that was acknowledged."""
        self._verifier = verifier or NumbersVerifier()
        self._taken = position
        # The last received message, after which another connection continues.
        self.last_id: int = position.id
        """The highest received id; 0 before the first."""
        self._last_check = position.check
        self.last_value = position.value
        """The last received value of a stateless stream."""
        self._request: bytes | None = None  # not written yet
        self._status_request: messages.StatusRequested | messages.ListingRequested = messages.StatusRequested(uuid)
        # The highest id to acknowledge; it is written only on a connection that allows it.
        self._owed = position.acknowledged
        self._least_ack = NEVER  # the lowest id that an ack on this connection may have
        self._ack_at = NEVER  # the id that is acknowledged automatically once it is taken

    # --- making one

    @classmethod
    def stateless(
        cls,
        *,
        state: str | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Make a stream of integers: a new one, or from the value after `state`, which is canonical decimal text."""
        position = _position_of_value(state)
        return cls(Mode.STATELESS, position, config=config, limits=limits, observer=observer)

    @classmethod
    def stateful(
        cls,
        uuid: str | UUID,
        params: JsonObject | None,
        *,
        verifier: Verifier | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Make a session with this UUID, from `new_uuid`. Without `params` it has to exist, and begins with message 1.

        The default verifier is that of the specification's application, with the requested count of numbers.
        """
        verifier = verifier or _verifier_for(params)
        position = Position(id=0, check=verifier.begin())
        return cls(
            Mode.STATEFUL,
            position,
            uuid=_checked_uuid(uuid),
            params=params,
            verifier=verifier,
            config=config,
            limits=limits,
            observer=observer,
        )

    @classmethod
    def status(
        cls,
        uuid: str | UUID,
        *,
        also: Sequence[str] | None = None,
        done: Mapping[str, int] | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Make a request for the progress of a session; a server without the extension refuses it.

        With `also` it is for several sessions; `done` are ids up to which the reader of the config is done with some.
        """
        text = _checked_uuid(uuid)
        engine = cls(Mode.STATUS, Position(), uuid=text, config=config, limits=limits, observer=observer)
        engine._status_request = messages.StatusRequested(text, engine.config.reader or "", also, dict(done or {}))
        return engine

    @classmethod
    def listing(
        cls,
        since: str = "",
        *,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Make a request for the sessions that have changed since an earlier listing, or for all of them.

        `since` is the `next` of that listing. A server without `ServerConfig(listing=True)` refuses the request.
        """
        engine = cls(
            Mode.STATUS, Position(), uuid=messages.ALL_SESSIONS, config=config, limits=limits, observer=observer
        )
        engine._status_request = messages.ListingRequested(since, engine.config.reader or "")
        return engine

    @classmethod
    def restore(
        cls,
        snapshot: JsonObject,
        *,
        verifier: Verifier | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Continue a stream after a `snapshot`, perhaps of another process.

        Raises `LocalProtocolError` for an invalid snapshot. The verifier has to be the same as before.
        """
        mode, uuid, params, position = _read_snapshot(snapshot)
        verifier = verifier or _verifier_for(params)
        if mode is Mode.STATEFUL:
            position.check = verifier.resume(position.check) if position.id else verifier.begin()
        return cls(
            mode, position, uuid=uuid, params=params, verifier=verifier, config=config, limits=limits, observer=observer
        )

    # --- state

    @property
    def over(self) -> bool:
        """True if no event follows: the stream is finished, refused or failed."""
        return self.state not in (StreamState.DISCONNECTED, StreamState.CONNECTED)

    @property
    def may_resume(self) -> bool:
        """True if there may be another connection after this one."""
        return not self.over

    def snapshot(self) -> dict[str, Json]:
        """Return all that `restore` needs, as JSON. It continues after the last message that was `taken`.

        A server deletes what was acknowledged: to be able to restore, use `ClientConfig(ack_every=None)` and
        acknowledge after saving.
        """
        if self.mode is Mode.STATUS:
            raise LocalProtocolError("a status request has no state to save")
        saved: dict[str, Json] = {"version": SNAPSHOT_VERSION, "mode": self.mode.value}
        taken = self._taken
        if self.mode is Mode.STATELESS:
            return {**saved, "value": taken.value}
        return {
            **saved,
            "uuid": self.uuid,
            "params": self.params,
            "id": taken.id,
            "check": taken.check,
            "acknowledged": taken.acknowledged,
            "finished": taken.finished,
        }

    # --- commands

    def connection_made(self, now: float) -> None:
        """Start a new connection: its first line is queued."""
        if self.over:
            raise LocalProtocolError(f"this stream is {self.state.value}, there is nothing to connect for")
        if self.state is StreamState.CONNECTED:
            raise LocalProtocolError("this stream has a connection already")
        self._request = messages.encode_request(self._first_message())
        self._start_acknowledging()
        self._lines.restart()
        self.state = StreamState.CONNECTED

    def connection_lost(self, now: float) -> None:
        """End the connection; an unfinished line and queued bytes are dropped. Harmless without a connection."""
        if self.state is StreamState.CONNECTED:
            self.state = StreamState.DISCONNECTED
        self._drop_output()
        self._stop_reading()

    def taken(self, event: Received | ReceivedValue | ReceivedBlock) -> None:
        """Record that the application has this and all before it; `ClientConfig(ack_every=)` says when it is acked."""
        taken = self._taken
        if isinstance(event, ReceivedValue):
            taken.value = event.value
            return
        assert isinstance(event, Received)  # a `BlockEngine` handles its own event
        if event.id <= taken.id:
            return
        if event.id > self.last_id:
            raise LocalProtocolError(f"message {event.id} was not received, the last one is {self.last_id}")
        taken.id, taken.check, taken.finished = event.id, event.check, event.final
        if event.id >= self._ack_at or (event.final and self.config.ack_every is not None):
            self._owed, self._ack_at = event.id, self._following(event.id)

    def acknowledge(self, id: int) -> None:
        """Acknowledge all messages up to this id, which have to be taken. One call is enough.

        After a reconnect an ack below the id of the first line (the last received one, which may be ahead of what was
        taken) would break the order. It is held back, and a later ack for that id or a higher one covers it.
        """
        if self.mode is not Mode.STATEFUL:
            raise LocalProtocolError("only the messages of a session are acknowledged")
        if not 1 <= id <= self._taken.id:
            raise LocalProtocolError(f"message {id} cannot be acknowledged, {self._taken.id} is the last one taken")
        if id < self._owed:
            raise LocalProtocolError(f"ack {id} after ack {self._owed}: acknowledgements have to ascend")
        if id > self._owed:
            self._owed, self._ack_at = id, self._following(id)

    def rewind(self) -> None:
        """Between connections, drop what was received and not taken; the next connection requests it."""
        if self.state is not StreamState.DISCONNECTED:
            raise LocalProtocolError(f"this stream is {self.state.value}, only a disconnected one can be rewound")
        taken = self._taken
        self.last_id, self._last_check, self.last_value = taken.id, taken.check, taken.value
        self._events = [event for event in self._events if not isinstance(event, (Received, ReceivedValue))]

    # --- the stream engine

    def receive_eof(self, now: float) -> None:
        """Handle the end of the server's bytes. An unfinished line is no message."""
        if self.state is StreamState.CONNECTED:
            self._events.append(HungUp())
        self.connection_lost(now)

    def has_output(self) -> bool:
        return self._request is not None or self._owed >= self._least_ack

    def buffers_to_send(self, limit: int = WRITE_BYTES) -> list[Buffer]:
        buffers: list[Buffer] = []
        if self._request is not None:
            buffers.append(self._request)
            self._request = None
        if self._owed >= self._least_ack:
            buffers.append(messages.encode_ack(messages.Acknowledged(self.uuid, self._owed)))
            self.acknowledged = self._taken.acknowledged = self._owed
            self._least_ack = self._owed + 1
        if self._observer is not None:
            for buffer in buffers:
                self._observer.frame("out", "restream", self.mode.value, len(buffer) - 1)
        return buffers

    # --- the lines of the server

    def _take_message(self, line: bytes) -> None:
        message = messages.parse_message(line)
        if isinstance(message, messages.Refused):
            self._refuse(message)
            return
        id, data = message.id, message.data
        self._check_id(id)
        verifier = self._verifier
        check = verifier.follow(self._last_check, data)
        final = verifier.is_final(data)
        self.last_id, self._last_check = id, check
        self.messages_received += 1
        self._events.append(Received(id, data, message.time, final, check))
        if self._observer is not None:
            self._observer.frame("in", "restream", "message", len(line))
        if final:
            self._end(StreamState.FINISHED)
            self._events.append(Finished())

    def _check_id(self, id: int) -> None:
        """Raise `RemoteProtocolError` unless this is the id of a next message."""
        last = self.last_id
        if id <= last:
            raise RemoteProtocolError(f"message {id} after message {last}: ids have to ascend", rule="restream-S08")
        if id != last + 1 and self.config.consecutive:
            raise RemoteProtocolError(
                f"message {id} after message {last}: {id - last - 1} are missing", rule="restream-S08"
            )

    def _take_value(self, line: bytes) -> None:
        value = messages.parse_value(line, digits=self.config.digits)
        if isinstance(value, messages.Refused):
            self._refuse(value)
            return
        self.last_value = value
        self.messages_received += 1
        self._events.append(ReceivedValue(value))
        if self._observer is not None:
            self._observer.frame("in", "restream", "value", len(line))

    def _take_status(self, line: bytes) -> None:
        status = messages.parse_status(line)
        if isinstance(status, messages.Refused):
            self._refuse(status)
            return
        self._end(StreamState.FINISHED)
        if isinstance(status, messages.Listing):
            self._events.append(ListingReceived(status))
        elif isinstance(status, messages.Status):
            self._events.append(StatusReceived(status))
        else:
            self._events.append(StatusReceived(status.get(self.uuid), status))

    # --- inside

    def _following(self, id: int) -> int:
        """Return the next id to acknowledge automatically after `id`; one that is held back goes as soon as it may."""
        every = self.config.ack_every
        if every is None:
            return NEVER
        return id + every if id >= self._least_ack else self._least_ack

    def _start_acknowledging(self) -> None:
        """Decide what to acknowledge on a new connection.

        The specification forbids an ack below an earlier one, and a server may count a `state` as an ack, so no ack
        below this connection's `state` is written. An ack of an earlier connection may be lost, and the server could
        wait for it with its store full, so one is owed again as soon as the application has taken all up to `state`.
        """
        state = self.last_id
        self._least_ack = max(state, 1)
        if self.config.ack_every is None:
            return
        if not self._owed:
            self._ack_at = max(self.config.ack_every, state)
        elif self._taken.id < state:
            self._ack_at = state
        else:
            self._owed, self._ack_at = state, state + self.config.ack_every

    def _drop_output(self) -> None:
        """Drop what is queued for the connection."""
        self._request = None
        self._least_ack = NEVER

    def _refuse(self, refused: messages.Refused) -> None:
        if refused.code is messages.ErrorCode.UNAVAILABLE:
            # Our extension: the stream may be resumed, on another connection and after a pause.
            self._stop_reading()
        else:
            self._end(StreamState.REFUSED)
        self._drop_output()
        self._events.append(refused)

    def _fail(self, error: RemoteProtocolError) -> None:
        self._end(StreamState.FAILED)
        self._drop_output()
        self._events.append(Failed(error))

    def _fall_silent(self, silent: Silent, now: float) -> None:
        self._events.append(silent)
        self.connection_lost(now)

    def _end(self, state: StreamState) -> None:
        self.state = state
        self._stop_reading()

    def _first_message(self) -> messages.Request:
        """Return the first message of a connection that continues after what was received."""
        if self.mode is Mode.STATELESS:
            return messages.StatelessRequested(self.last_value)
        if self.mode is Mode.STATUS:
            return self._status_request
        if self.last_id or self.params is None:
            config = self.config
            blocks = self.wants_blocks and config.reader is not None
            return messages.Resumed(self.uuid, self.last_id, config.reader, config.incarnation, config.until, blocks)
        return messages.Registered(self.uuid, self.params)


# ---------------------------------------------------------------------------- checks of what the application gives


def _read_snapshot(saved: JsonObject) -> tuple[Mode, str, JsonObject | None, Position]:
    """Return the mode, uuid, params and position of a snapshot; raises `LocalProtocolError` for anything else."""
    version, mode = saved.get("version"), saved.get("mode")
    if version != SNAPSHOT_VERSION:
        raise LocalProtocolError(f"the saved state has version {version!r}, this can read version {SNAPSHOT_VERSION}")
    if mode == Mode.STATELESS.value:
        value = saved.get("value")
        if value is not None and not isinstance(value, str):
            raise LocalProtocolError("the saved value of a stateless stream has to be text, or null")
        return Mode.STATELESS, "", None, _position_of_value(value)
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
    return Mode.STATEFUL, _checked_uuid(uuid), params, position


def _position_of_value(value: str | None) -> Position:
    if value is not None and not is_canonical(value):
        raise LocalProtocolError("the state of a stateless stream has to be a decimal integer without leading zeros")
    return Position(value=value)


def _checked_uuid(uuid: str | UUID) -> str:
    try:
        return messages.read_uuid(str(uuid) if isinstance(uuid, UUID) else uuid)
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.message) from None


def _verifier_for(params: JsonObject | None) -> Verifier:
    """Return the verifier of the specification's application, with the requested count."""
    if params is not None:
        encode_line(params)  # so that params without a form in JSON are refused before there is a connection
    count = None if params is None else params.get("count")
    return NumbersVerifier(count if type(count) is int else None)


def _saved_id(saved: JsonObject, name: str) -> int:
    value = saved.get(name)
    if type(value) is not int or not 0 <= value <= messages.U32_MAX:
        raise LocalProtocolError(
            f"the saved state of a session lacks its {name}, a number within 0 and {messages.U32_MAX}"
        )
    return value
