"""The rules of a restream server as one object, for one connection: lines in, requests out, lines out again."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.restream.engine.config import ServerConfig
from muxkit.protocols.restream.engine.events import (
    Acknowledged,
    Failed,
    HungUp,
    Registered,
    Resumed,
    ServerEvent,
    Silent,
    StatelessRequested,
    StatusRequested,
)
from muxkit.protocols.restream.engine.timers import Patience
from muxkit.protocols.restream.wire.integers import count_digits, format_integer, is_canonical
from muxkit.protocols.restream.wire.lines import Lines
from muxkit.protocols.restream.wire.messages import (
    Ack,
    AskStatus,
    OpenStateful,
    OpenStateless,
    ResumeStateful,
    ResumeStateless,
    Status,
    encode_error,
    encode_message,
    encode_status,
    encode_value,
    parse_later,
    parse_request,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.restream.wire.json import Json

PULL = 64 * 1024  # bytes


class Phase(Enum):
    """How far a connection is."""

    ASKING = "asking"
    """The client has not said what it wants."""
    VALUES = "values"
    """A stateless stream."""
    JUDGING = "judging"
    """A session was asked for; `accept` or `fail` has to follow."""
    MESSAGES = "messages"
    """The stream of a session."""
    STATUS = "status"
    """The status of a session was asked for; `send_status` or `fail` has to follow."""
    CLOSING = "closing"
    """The last line is queued or written: flush, then close."""
    OVER = "over"
    """The client hung up, or the connection is gone."""


class ServerEngine:
    """A server's end of one connection; a `StreamEngine`.

    It tells what the client asks for and the application answers with commands. A command either does all of its
    work or raises `LocalProtocolError` and changes nothing. After any violation there is one `Failed`, the error line
    is queued, and nothing more is told: as soon as `closing` is true, flush and close.
    """

    def __init__(
        self, config: ServerConfig | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.config = config or ServerConfig()
        self.limits = limits or Limits()
        self.phase = Phase.ASKING
        self.uuid = ""
        """Of the session that this connection is about, in lower case; empty for a stateless stream."""
        self.acknowledged = 0
        """The highest id that this session's client has acknowledged."""
        self.sent = 0
        """The highest id that left the engine, on this connection or, as far as `accept` knew, on one before."""
        self.outbox = 0
        """Bytes that are queued and wait only for the transport."""
        self._observer = observer
        self._events: list[ServerEvent] = []
        self._queue: deque[tuple[int, bytes]] = deque()  # (id of the message, its line); 0 for other lines
        self._lines = Lines(self.config.first_line, f"ServerConfig(digits={self.config.digits})")
        self._patience = Patience(self._lines, self.limits, observer)
        self._started = False
        self._failed = False
        self._queued = 0  # the highest id that was queued or skipped
        self._state = 0  # the id that the first line named
        self._early = 0  # the last ack that came before `accept`

    # --- what is known

    @property
    def closing(self) -> bool:
        """The last line is queued: flush, then close the connection."""
        return self.phase is Phase.CLOSING

    @property
    def over(self) -> bool:
        """The client hung up, or `connection_lost` was called."""
        return self.phase is Phase.OVER

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

    # --- commands

    def accept(self, *, acknowledged: int = 0, head: int = 0) -> bool:
        """A session that was asked for exists: stream it, beginning after the id that the client named.

        `head` is the last id that there is, `acknowledged` the last that was acknowledged on any connection. False
        if the request cannot be met with them: then a `Failed` tells why, and the connection is closing. Also False if
        the end was decided meanwhile.
        """
        if self.closing or self.over:
            return False
        if self.phase is not Phase.JUDGING:
            raise LocalProtocolError(f"there is no session to accept, the connection is {self.phase.value}")
        if not 0 <= acknowledged <= head:
            raise LocalProtocolError(f"acknowledged={acknowledged} is not within 0 and head={head}")
        error = self._judge(acknowledged, head)
        if error is not None:
            self._refuse(error)
            return False
        self.phase = Phase.MESSAGES
        self.acknowledged, self.sent = acknowledged, head
        if self._early > acknowledged:
            self._acknowledge(self._early)
        return True

    def send_value(self, value: int | str) -> None:
        """Queue the next value of a stateless stream; text has to be canonical."""
        self._check(Phase.VALUES, "a value")
        text = value if isinstance(value, str) else format_integer(value)
        if not is_canonical(text):
            raise LocalProtocolError("a value has to be a decimal integer without leading zeros")
        if len(text) > self.config.digits and count_digits(text) > self.config.digits:
            raise LocalProtocolError(
                f"a value of {count_digits(text)} digits; ServerConfig(digits={self.config.digits}) allows no more"
            )
        self._push(0, encode_value(text))

    def send_message(self, id: int, data: Json, time: float | None = None, *, final: bool = False) -> None:
        """Queue a message of the session. It must be durable by now. After the final one the connection is closing."""
        self._check(Phase.MESSAGES, "a message")
        if id <= self._queued:
            raise LocalProtocolError(f"message {id} after message {self._queued}: ids have to ascend")
        line = encode_message(id, data, time)
        self._queued = id
        self._push(id, line)
        if final:
            self.finish()

    def send_status(self, status: Status) -> None:
        """Answer a status request; the connection is closing then."""
        self._check(Phase.STATUS, "a status")
        self._push(0, encode_status(status))
        self.finish()

    def fail(self, text: str) -> None:
        """Tell the client an error and close. What is queued goes out first. Harmless if the end is decided already."""
        if self.phase is not Phase.CLOSING and self.phase is not Phase.OVER:
            self._push(0, encode_error(text))
            self.phase = Phase.CLOSING
            self._deafen()

    def finish(self) -> None:
        """Close when everything queued is out. Harmless if the end is decided already.

        After a stream, acknowledgements are still taken until the client hangs up.
        """
        if self.phase is Phase.CLOSING or self.phase is Phase.OVER:
            return
        if self.phase is not Phase.MESSAGES:
            self._deafen()
        self.phase = Phase.CLOSING

    def connection_lost(self, now: float) -> None:
        """The transport is gone: nothing more is told or written. What was told before can still be fetched."""
        self._end()

    # --- the stream engine

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Take in what the transport brought; never raises."""
        self._start(now)
        if self._lines.stopped:
            return
        if self._observer is not None and data:
            self._observer.transport("in", data)
        error = self._lines.feed(data, self._take)
        if error is not None:
            self._refuse(error)
        else:
            self._patience.heard(now)

    def receive_eof(self, now: float) -> None:
        """The client will send nothing more: it has enough, or is gone. An unfinished line is no message."""
        if self.phase is not Phase.OVER:
            self._end()
            if not self._failed:
                self._events.append(HungUp())

    def has_output(self) -> bool:
        return bool(self._queue)

    def buffers_to_send(self, limit: int = PULL) -> list[Buffer]:
        """Take out lines of about `limit` bytes; from here on they count as sent."""
        queue, size, last = self._queue, 0, 0
        lines: list[Buffer] = []
        while queue and size < limit:
            id, line = queue.popleft()
            last = id or last
            size += len(line)
            lines.append(line)
        self.outbox -= size
        if last > self.sent:
            self.sent = last
        return lines

    def events(self) -> Sequence[ServerEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        """At once, as long as nobody has said what time it is."""
        return self._patience.next() if self._started else float("-inf")

    def handle_deadline(self, now: float) -> None:
        self._start(now)
        found = self._patience.handle(now)
        if isinstance(found, Silent):
            self._give_up(f"nothing came for {found.seconds:g} s while a line is unfinished", found)
        elif found is not None:
            self._refuse(found)

    # --- what the client says

    def _take(self, line: bytes) -> None:
        if self._observer is not None:
            self._observer.frame("in", "restream", self.phase.value, len(line))
        if self.phase is Phase.ASKING:
            self._take_request(line)
            return
        ack = parse_later(line, stateful=bool(self.uuid), status=self.config.status)
        if ack is not None:
            self._take_ack(ack)

    def _take_request(self, line: bytes) -> None:
        request = parse_request(line, digits=self.config.digits, status=self.config.status)
        self._lines.limit = self.config.line
        self._lines.limit_name = f"ServerConfig(line={self.config.line})"
        self._patience.first_line_came()
        if type(request) is OpenStateful and len(line) > self.config.opening:  # its params are kept with the session
            raise RemoteProtocolError(
                f"a request of {len(line)} bytes for a session against {self.config.opening} allowed",
                rule="restream-S01",
            )
        match request:
            case OpenStateless():
                self.phase = Phase.VALUES
                self._events.append(StatelessRequested(None))
            case ResumeStateless(state):
                self.phase = Phase.VALUES
                self._events.append(StatelessRequested(state))
            case OpenStateful(uuid, params):
                self.phase, self.uuid = Phase.JUDGING, uuid
                self._events.append(Registered(uuid, params))
            case ResumeStateful(uuid, state):
                self.phase, self.uuid, self._queued, self._state = Phase.JUDGING, uuid, state, state
                self._events.append(Resumed(uuid, state))
            case AskStatus(uuid):
                self.phase, self.uuid = Phase.STATUS, uuid
                self._events.append(StatusRequested(uuid))

    def _take_ack(self, ack: Ack) -> None:
        if ack.uuid != self.uuid:
            raise RemoteProtocolError("an ack for another session than this connection's", rule="restream-S40")
        if self.phase is Phase.JUDGING:  # nobody has said yet what was sent and acknowledged before
            self._check_order(ack.id, self._early)
            self._early = ack.id
            return
        self._check_order(ack.id, self.acknowledged)
        if ack.id > self.sent:
            raise _not_sent(ack.id, self.sent)
        if ack.id > self.acknowledged:
            self._acknowledge(ack.id)

    def _judge(self, acknowledged: int, head: int) -> RemoteProtocolError | None:
        """Can the client have what it asks for?"""
        state = self._queued
        if state < acknowledged:
            return RemoteProtocolError(
                f"state {state} is before message {acknowledged}, which was acknowledged", rule="restream-S26"
            )
        if state > head:
            return RemoteProtocolError(f"state {state} is beyond the last message, {head}", rule="restream-S27")
        if self._early > head:
            return _not_sent(self._early, head)
        return None  # no early ack is below its connection's state, and that is not below what was acknowledged

    def _check_order(self, id: int, before: int) -> None:
        """Not below the ack before it, nor below what the first line of this connection has acknowledged."""
        if id < before:
            raise _out_of_order(id, f"ack {before}")
        if id < self._state:
            raise _out_of_order(id, f"state {self._state}")

    def _acknowledge(self, id: int) -> None:
        self.acknowledged = id
        self._events.append(Acknowledged(self.uuid, id))

    # --- inside

    def _start(self, now: float) -> None:
        if not self._started:
            self._started = True
            if self.phase is Phase.ASKING:
                self._patience.expect_first_line(now)

    def _check(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"{what} cannot be sent, the connection is {self.phase.value}")

    def _push(self, id: int, line: bytes) -> None:
        self._queue.append((id, line))
        self.outbox += len(line)
        if self._observer is not None:
            self._observer.frame("out", "restream", self.phase.value, len(line) - 1)

    def _refuse(self, error: RemoteProtocolError) -> None:
        self._give_up(error.message, Failed(error))

    def _give_up(self, why: str, last: Failed | Silent) -> None:
        """The last event; the error line, unless the last line is out already and the transport perhaps shut."""
        if self.phase is not Phase.CLOSING or self._queue:
            self._push(0, encode_error(why))
        self.phase = Phase.CLOSING
        self._failed = True
        self._deafen()
        self._events.append(last)

    def _deafen(self) -> None:
        """Nothing that the client may still say matters."""
        self._lines.stop()
        self._patience.stop()
        self._started = True

    def _end(self) -> None:
        self.phase = Phase.OVER
        self._deafen()
        self._queue.clear()
        self.outbox = 0


def _out_of_order(id: int, before: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"ack {id} after {before}: acknowledgements have to ascend", rule="restream-S37")


def _not_sent(id: int, sent: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"ack {id} for a message that was not sent, the last one is {sent}", rule="restream-S36")
