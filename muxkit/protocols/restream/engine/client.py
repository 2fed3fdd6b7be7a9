"""The engine of a client: one stream over any number of connections, lines in and messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.restream.applications import NumbersVerifier, Verifier
from muxkit.protocols.restream.engine.config import ClientConfig
from muxkit.protocols.restream.engine.events import (
    ClientEvent,
    Failed,
    Finished,
    HungUp,
    Received,
    ReceivedValue,
    Refused,
    Silent,
    StatusReceived,
)
from muxkit.protocols.restream.engine.snapshot import (
    Mode,
    Position,
    StreamState,
    checked_uuid,
    first_message,
    position_of_value,
    read_snapshot,
    verifier_for,
    write_snapshot,
)
from muxkit.protocols.restream.engine.timers import LineEngine, LineTimers
from muxkit.protocols.restream.wire.lines import Lines
from muxkit.protocols.restream.wire.messages import (
    U32_MAX,
    Ack,
    Error,
    Message,
    encode_ack,
    encode_request,
    parse_message,
    parse_status,
    parse_value,
)

if TYPE_CHECKING:
    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.restream.wire import Json, JsonObject

WRITE_BYTES = 64 * 1024
NEVER: Final = U32_MAX + 1  # above every id


class ClientEngine(LineEngine[ClientEvent]):
    """A client's end of one stream, which outlives its connections; a `StreamEngine` on each of them.

    Made by `stateless`, `stateful`, `status` or `restore`. For each connection call `connection_made`, then pass bytes,
    then call `connection_lost`; while `may_resume` is true there may be another one. `taken` reports the position of
    the application, which is acknowledged and saved, and to which `rewind` goes back.
    """

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
        self.mode = mode
        self.uuid = uuid
        """The uuid of the session, in lower case; empty for a stateless stream."""
        self.params = params
        self.config = config or ClientConfig()
        self.limits = limits or Limits()
        self.state = StreamState.FINISHED if position.finished else StreamState.DISCONNECTED
        self.acknowledged = position.acknowledged
        """The highest id that was acknowledged."""
        self._verifier = verifier or NumbersVerifier()
        self._observer = observer
        self._taken = position
        # The last received message, after which another connection continues.
        self._last_id = position.id
        self._last_check = position.check
        self._last_value = position.value
        self._events: list[ClientEvent] = []
        self._request: bytes | None = None  # not written yet
        # The highest id to acknowledge; it is written only on a connection that allows it.
        self._owed = position.acknowledged
        self._least_ack = NEVER  # the lowest id that an ack on this connection may have
        self._ack_at = NEVER  # the id that is acknowledged automatically once it is taken
        limit, name = self.config.line, f"ClientConfig(line={self.config.line})"
        if mode is Mode.STATELESS:
            limit, name = self.config.value_line, f"ClientConfig(digits={self.config.digits})"
        self._lines = Lines(limit, name)
        self._take = {Mode.STATELESS: self._take_value, Mode.STATEFUL: self._take_message}.get(mode, self._take_status)
        self._timers = LineTimers(self._lines, self.limits, observer)

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
        position = position_of_value(state)
        return cls(Mode.STATELESS, position, config=config, limits=limits, observer=observer)

    @classmethod
    def stateful(
        cls,
        uuid: str,
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
        verifier = verifier or verifier_for(params)
        position = Position(id=0, check=verifier.begin())
        return cls(
            Mode.STATEFUL,
            position,
            uuid=checked_uuid(uuid),
            params=params,
            verifier=verifier,
            config=config,
            limits=limits,
            observer=observer,
        )

    @classmethod
    def status(
        cls,
        uuid: str,
        *,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """Make a request for the progress of a session; a server without the extension refuses it."""
        uuid = checked_uuid(uuid)
        return cls(Mode.STATUS, Position(), uuid=uuid, config=config, limits=limits, observer=observer)

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
        saved = read_snapshot(snapshot)
        verifier = verifier or verifier_for(saved.params)
        position = saved.position
        if saved.mode is Mode.STATEFUL:
            position.check = verifier.resume(position.check) if position.id else verifier.begin()
        return cls(
            saved.mode,
            position,
            uuid=saved.uuid,
            params=saved.params,
            verifier=verifier,
            config=config,
            limits=limits,
            observer=observer,
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

    @property
    def last_id(self) -> int:
        """The highest received id; 0 before the first."""
        return self._last_id

    @property
    def last_value(self) -> str | None:
        """The last received value of a stateless stream."""
        return self._last_value

    def snapshot(self) -> dict[str, Json]:
        """Return all that `restore` needs, as JSON. It continues after the last message that was `taken`.

        A server deletes what was acknowledged: to be able to restore, use `ClientConfig(ack_every=None)` and
        acknowledge after saving.
        """
        return write_snapshot(self.mode, self.uuid, self.params, self._taken)

    # --- commands

    def connection_made(self, now: float) -> None:
        """Start a new connection: its first line is queued."""
        if self.over:
            raise LocalProtocolError(f"this stream is {self.state.value}, there is nothing to connect for")
        if self.state is StreamState.CONNECTED:
            raise LocalProtocolError("this stream has a connection already")
        self._request = encode_request(
            first_message(self.mode, self.uuid, self.params, self._last_id, self._last_value)
        )
        self._start_acknowledging()
        self._lines.restart()
        self.state = StreamState.CONNECTED

    def connection_lost(self, now: float) -> None:
        """End the connection; an unfinished line and queued bytes are dropped. Harmless without a connection."""
        if self.state is StreamState.CONNECTED:
            self.state = StreamState.DISCONNECTED
        self._drop_output()
        self._lines.stop()
        self._timers.stop()

    def taken(self, event: Received | ReceivedValue) -> None:
        """Record that the application has this and all before it; `ClientConfig(ack_every=)` says when it is acked."""
        taken = self._taken
        if isinstance(event, ReceivedValue):
            taken.value = event.value
            return
        if event.id <= taken.id:
            return
        if event.id > self._last_id:
            raise LocalProtocolError(f"message {event.id} was not received, the last one is {self._last_id}")
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
        self._last_id, self._last_check, self._last_value = taken.id, taken.check, taken.value
        self._events = [event for event in self._events if not isinstance(event, (Received, ReceivedValue))]

    # --- the stream engine

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse received bytes; never raises."""
        if self._lines.stopped or self.state is not StreamState.CONNECTED:
            return
        if self._observer is not None and data:
            self._observer.transport("in", data)
        error = self._lines.feed(data, self._take)
        if error is not None:
            self._fail(error)
        else:
            self._timers.received(now)

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
            buffers.append(encode_ack(Ack(self.uuid, self._owed)))
            self.acknowledged = self._taken.acknowledged = self._owed
            self._least_ack = self._owed + 1
        if self._observer is not None:
            for buffer in buffers:
                self._observer.frame("out", "restream", self.mode.value, len(buffer) - 1)
        return buffers

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def handle_deadline(self, now: float) -> None:
        found = self._timers.handle(now)
        if isinstance(found, Silent):
            self._events.append(found)
            self.connection_lost(now)
        elif found is not None:
            self._fail(found)

    # --- the lines of the server

    def _take_message(self, line: bytes) -> None:
        message = parse_message(line)
        if isinstance(message, Error):
            self._refuse(message)
            return
        self._check_id(message)
        id, data = message.id, message.data
        verifier = self._verifier
        check = verifier.follow(self._last_check, data)
        final = verifier.is_final(data)
        self._last_id, self._last_check = id, check
        self._events.append(Received(id, data, message.time, final, check))
        if self._observer is not None:
            self._observer.frame("in", "restream", "message", len(line))
        if final:
            self._end(StreamState.FINISHED)
            self._events.append(Finished())

    def _take_value(self, line: bytes) -> None:
        value = parse_value(line, digits=self.config.digits)
        if isinstance(value, Error):
            self._refuse(value)
            return
        self._last_value = value
        self._events.append(ReceivedValue(value))
        if self._observer is not None:
            self._observer.frame("in", "restream", "value", len(line))

    def _take_status(self, line: bytes) -> None:
        status = parse_status(line)
        if isinstance(status, Error):
            self._refuse(status)
            return
        self._end(StreamState.FINISHED)
        self._events.append(StatusReceived(status))

    def _check_id(self, message: Message) -> None:
        id, last = message.id, self._last_id
        if id <= last:
            raise RemoteProtocolError(f"message {id} after message {last}: ids have to ascend", rule="restream-S08")
        if id != last + 1 and self.config.consecutive:
            raise RemoteProtocolError(
                f"message {id} after message {last}: {id - last - 1} are missing", rule="restream-S08"
            )

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
        state = self._last_id
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

    def _refuse(self, error: Error) -> None:
        self._end(StreamState.REFUSED)
        self._drop_output()
        self._events.append(Refused(error.text))

    def _fail(self, error: RemoteProtocolError) -> None:
        self._end(StreamState.FAILED)
        self._drop_output()
        self._events.append(Failed(error))

    def _end(self, state: StreamState) -> None:
        self.state = state
        self._lines.stop()
        self._timers.stop()
