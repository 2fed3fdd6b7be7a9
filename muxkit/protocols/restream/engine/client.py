"""The rules of a restream client as one object, for one stream over many connections: lines in, messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.restream.engine import snapshot as _saved
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
from muxkit.protocols.restream.engine.snapshot import Mode, Position, Standing
from muxkit.protocols.restream.engine.timers import Patience
from muxkit.protocols.restream.verifiers import NumbersVerifier, Verifier
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
    from collections.abc import Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.restream.wire.json import Json, JsonObject

PULL = 64 * 1024  # bytes
NEVER: Final = U32_MAX + 1  # above every id


class ClientEngine:
    """A client's end of one stream, which may outlive any number of connections; a `StreamEngine` on each of them.

    Made by `stateless`, `stateful`, `status` or `restore`. For each connection: `connection_made`, then bytes, then
    `connection_lost`; as long as `may_resume` is true there may be another one. `taken` says how far the application
    is: this is what is acknowledged and saved, and what `rewind` goes back to.
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
        """Of the session, in lower case; empty for a stateless stream."""
        self.params = params
        self.config = config or ClientConfig()
        self.limits = limits or Limits()
        self.standing = Standing.FINISHED if position.finished else Standing.APART
        self.acknowledged = position.acknowledged
        """The highest id that we have acknowledged."""
        self._verifier = verifier or NumbersVerifier()
        self._observer = observer
        self._taken = position
        # What was received, and where another connection would go on.
        self._last_id = position.id
        self._last_check = position.check
        self._last_value = position.value
        self._events: list[ClientEvent] = []
        self._request: bytes | None = None  # not written yet
        # What is to be acknowledged: merged, the last one counts. It goes only on a connection that may carry it.
        self._owed = position.acknowledged
        self._least_ack = NEVER  # the lowest id that an ack may still name on this connection
        self._ack_at = NEVER  # the id that is acknowledged by itself once it is taken
        limit, name = self.config.line, f"ClientConfig(line={self.config.line})"
        if mode is Mode.STATELESS:
            limit, name = self.config.value_line, f"ClientConfig(digits={self.config.digits})"
        self._lines = Lines(limit, name)
        self._take = {Mode.STATELESS: self._take_value, Mode.STATEFUL: self._take_message}.get(mode, self._take_status)
        self._patience = Patience(self._lines, self.limits, observer)

    # --- how one is made

    @classmethod
    def stateless(
        cls,
        *,
        state: str | None = None,
        config: ClientConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> ClientEngine:
        """A stream of integers: a new one, or from the value after `state`, which is canonical decimal text."""
        position = _saved.position_of_value(state)
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
        """A session under this UUID; `new_uuid` makes one. Without `params` it has to exist, and begins with message 1.

        The verifier is that of the document's application if nothing else is said, and knows how many numbers were
        asked for.
        """
        verifier = verifier or _saved.verifier_for(params)
        position = Position(id=0, check=verifier.begin())
        return cls(
            Mode.STATEFUL,
            position,
            uuid=_saved.checked_uuid(uuid),
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
        """Only ask how a session stands; a server that does not know the question refuses it."""
        uuid = _saved.checked_uuid(uuid)
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
        """Go on with a stream that `snapshot` has saved, in another process perhaps.

        Raises `LocalProtocolError` for what no `snapshot` has made. The verifier has to be the same as before.
        """
        saved = _saved.read(snapshot)
        verifier = verifier or _saved.verifier_for(saved.params)
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

    # --- what is known

    @property
    def over(self) -> bool:
        """Nothing more will be told: everything came, or an error did."""
        return self.standing not in (Standing.APART, Standing.JOINED)

    @property
    def may_resume(self) -> bool:
        """May there be another connection after this one?"""
        return not self.over

    @property
    def last_id(self) -> int:
        """The highest id that was received; 0 before the first."""
        return self._last_id

    @property
    def last_value(self) -> str | None:
        """The last value of a stateless stream that was received."""
        return self._last_value

    @property
    def unparsed(self) -> int:
        """Bytes of lines beyond `frames_at_once`; `receive_bytes(b"", now)` goes on with them."""
        return self._lines.unparsed

    @property
    def frames_at_once(self) -> int:
        """Lines that one call of `receive_bytes` looks at."""
        return self._lines.at_once

    @frames_at_once.setter
    def frames_at_once(self, count: int) -> None:
        self._lines.at_once = count

    def snapshot(self) -> dict[str, Json]:
        """All that a later `restore` needs, as JSON. It goes on after what was `taken`.

        A server does not go back behind what was acknowledged: whoever wants to restore what he has saved takes
        `ClientConfig(ack_every=None)` and acknowledges after saving.
        """
        return _saved.write(self.mode, self.uuid, self.params, self._taken)

    # --- commands

    def connection_made(self, now: float) -> None:
        """A new connection: the first line that it needs is queued."""
        if self.over:
            raise LocalProtocolError(f"this stream is {self.standing.value}, there is nothing to connect for")
        if self.standing is Standing.JOINED:
            raise LocalProtocolError("this stream has a connection already")
        self._request = encode_request(
            _saved.request(self.mode, self.uuid, self.params, self._last_id, self._last_value)
        )
        self._begin_to_acknowledge()
        self._lines.restart()
        self.standing = Standing.JOINED

    def connection_lost(self, now: float) -> None:
        """The connection is gone, and with it what was half received or not written. Harmless without one."""
        if self.standing is Standing.JOINED:
            self.standing = Standing.APART
        self._say_nothing()
        self._lines.stop()
        self._patience.stop()

    def taken(self, event: Received | ReceivedValue) -> None:
        """The application has this and all before it. It is acknowledged as `ClientConfig(ack_every=)` says."""
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
        """Acknowledge by hand everything up to this id, which has to be taken by now. Once is enough.

        After a reconnect an ack below what the first line said (the last id received, which may be ahead of what was
        taken) would break the order. It is held back, and a later one for that id or a higher one covers it.
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
        """Between connections: forget what was received and not taken. The next connection asks for it again."""
        if self.standing is not Standing.APART:
            raise LocalProtocolError(f"this stream is {self.standing.value}, only one that is apart can be rewound")
        taken = self._taken
        self._last_id, self._last_check, self._last_value = taken.id, taken.check, taken.value
        self._events = [event for event in self._events if not isinstance(event, (Received, ReceivedValue))]

    # --- the stream engine

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Take in what the transport brought; never raises."""
        if self._lines.stopped or self.standing is not Standing.JOINED:
            return
        if self._observer is not None and data:
            self._observer.transport("in", data)
        error = self._lines.feed(data, self._take)
        if error is not None:
            self._fail(error)
        else:
            self._patience.heard(now)

    def receive_eof(self, now: float) -> None:
        """The server will send nothing more. An unfinished line is no message."""
        if self.standing is Standing.JOINED:
            self._events.append(HungUp())
        self.connection_lost(now)

    def has_output(self) -> bool:
        return self._request is not None or self._owed >= self._least_ack

    def buffers_to_send(self, limit: int = PULL) -> list[Buffer]:
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

    def events(self) -> Sequence[ClientEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        return self._patience.next()

    def handle_deadline(self, now: float) -> None:
        found = self._patience.handle(now)
        if isinstance(found, Silent):
            self._events.append(found)
            self.connection_lost(now)
        elif found is not None:
            self._fail(found)

    # --- what the server says

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
            self._end(Standing.FINISHED)
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
        self._end(Standing.FINISHED)
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
        """The next id to acknowledge by itself now that `id` is owed; one that is held back goes as soon as it may."""
        every = self.config.ack_every
        if every is None:
            return NEVER
        return id + every if id >= self._least_ack else self._least_ack

    def _begin_to_acknowledge(self) -> None:
        """Decide anew for a new connection: no ack that was owed on an earlier one is taken over below its `state`.

        The document forbids an ack below an earlier one, and a server may take a `state` for an ack. An ack of an
        earlier connection may be lost: the server could wait for it with its store full. So one is owed again as soon
        as the application has taken all that this connection's `state` names.
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

    def _say_nothing(self) -> None:
        """What was queued was for a connection that is gone or useless."""
        self._request = None
        self._least_ack = NEVER

    def _refuse(self, error: Error) -> None:
        self._end(Standing.REFUSED)
        self._say_nothing()
        self._events.append(Refused(error.text))

    def _fail(self, error: RemoteProtocolError) -> None:
        self._end(Standing.FAILED)
        self._say_nothing()
        self._events.append(Failed(error))

    def _end(self, standing: Standing) -> None:
        self.standing = standing
        self._lines.stop()
        self._patience.stop()
