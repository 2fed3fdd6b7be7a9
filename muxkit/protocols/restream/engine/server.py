"""The engine of a server: one connection, requests and acknowledgements in, messages out.

A connection serves one request, so its phase follows from the request in the first line, and `NEXT` has all steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer
from muxkit.protocols.restream.engine.line_engine import (
    FIRST_LINE_EXTRA,
    KIB,
    WRITE_BYTES,
    Failed,
    HungUp,
    LineEngine,
    Silent,
    Timer,
    check_sizes,
)
from muxkit.protocols.restream.wire import Json, Record, messages
from muxkit.protocols.restream.wire.blocks import encode_block
from muxkit.protocols.restream.wire.integers import count_digits, format_integer, is_canonical

ServerEvent = (
    messages.StatelessRequested
    | messages.Registered
    | messages.Resumed
    | messages.Acknowledged
    | messages.StatusRequested
    | messages.ListingRequested
    | HungUp
    | Silent
    | Failed
)


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The settings of a `ServerEngine`; sizes in bytes, without the line feed."""

    status: bool = False
    """Answer status requests, an extension; without it they are errors, as in the specification."""
    listing: bool = False
    """Answer requests for a listing of all sessions, an extension. Needs `status`.

    Whoever knows a UUID may read its session. So enable this only if everyone who can connect may read every session.
    """
    digits: int = 100_000
    """The longest integer of a stateless stream, in decimal digits."""
    line: int = 64 * KIB
    """The longest line after the first."""
    opening: int = 8 * KIB
    """The longest line that opens a session: its `params` are stored as long as the session."""

    def __attrs_post_init__(self) -> None:
        if self.listing and not self.status:
            raise ValueError("ServerConfig(listing=True) needs status=True: a listing contains the status of sessions")
        check_sizes("ServerConfig", digits=self.digits, line=self.line, opening=self.opening)

    @property
    def first_line(self) -> int:
        """The longest first line, which may hold the longest integer."""
        return max(self.line, self.digits + FIRST_LINE_EXTRA)


class Phase(Enum):
    """The phase of a connection."""

    ASKING = "asking"
    """The first line has not come."""
    VALUES = "values"
    """A stateless stream."""
    OPENING = "opening"
    """A session was requested; `accept` or `fail` has to follow."""
    MESSAGES = "messages"
    """The stream of a session."""
    STATUS = "status"
    """The progress of a session was requested; `send_status` or `fail` has to follow."""
    CLOSING = "closing"
    """The last line is queued or written: flush, then close."""
    OVER = "over"
    """The client hung up, or the connection is lost."""


NEXT: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.ASKING: frozenset({Phase.VALUES, Phase.OPENING, Phase.STATUS, Phase.CLOSING, Phase.OVER}),
    Phase.VALUES: frozenset({Phase.CLOSING, Phase.OVER}),
    Phase.OPENING: frozenset({Phase.MESSAGES, Phase.CLOSING, Phase.OVER}),
    Phase.MESSAGES: frozenset({Phase.CLOSING, Phase.OVER}),
    Phase.STATUS: frozenset({Phase.CLOSING, Phase.OVER}),
    Phase.CLOSING: frozenset({Phase.CLOSING, Phase.OVER}),
    Phase.OVER: frozenset({Phase.OVER}),
}
"""The phases that may follow each phase. A line that a closing connection still has to write keeps it closing."""


class ServerEngine(LineEngine[ServerEvent]):
    """A server's end of one connection; a `StreamEngine`.

    An event says what the client requests, and commands answer it. A command either does all of its work or raises
    `LocalProtocolError` and changes nothing. After a violation there is one `Failed`, the error line is queued, and no
    event follows: as soon as `closing` is true, flush and close.
    """

    def __init__(
        self, config: ServerConfig | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.config: ServerConfig = config or ServerConfig()
        super().__init__(self.config.first_line, f"ServerConfig(digits={self.config.digits})", limits, observer)
        self._take = self._take_line
        self._started = False
        self.phase: Phase = Phase.ASKING
        self.uuid: str = ""
        """The uuid of the session, in lower case; empty for a stateless stream."""
        self.acknowledged: int = 0
        """The highest id that the client has acknowledged."""
        self.sent: int = 0
        """The highest id that left the engine, on this connection or, as `accept` was told, on an earlier one."""
        self.outbox: int = 0
        """Bytes that are queued for the transport."""
        self._queue: deque[tuple[int, bytes]] = deque()  # (id, line); id 0 for lines that are no messages
        self._failed = False
        self.messages_sent: int = 0
        """Messages of a session or values of another stream."""
        self._queued = 0  # the highest id that was queued or skipped
        self._state = 0  # the id of the first line
        self._early = 0  # the last ack before `accept`
        self._sends_blocks = False  # the client understands them

    # --- state

    @property
    def closing(self) -> bool:
        """True when the last line is queued: flush, then close the connection."""
        return self.phase is Phase.CLOSING

    @property
    def over(self) -> bool:
        """True when the client hung up, or after `connection_lost`."""
        return self.phase is Phase.OVER

    # --- commands

    def accept(self, *, acknowledged: int = 0, head: int = 0) -> bool:
        """Stream the requested session, from the message after the id of the request.

        `head` is its last id, `acknowledged` the last acknowledged one on any connection. Returns False if the request
        does not fit them: then a `Failed` has the reason, and the connection is closing. Also returns False if the
        connection is ending already.
        """
        if self.closing or self.over:
            return False
        if self.phase is not Phase.OPENING:
            raise LocalProtocolError(f"there is no session to accept, the connection is {self.phase.value}")
        if not 0 <= acknowledged <= head:
            raise LocalProtocolError(f"acknowledged={acknowledged} is not within 0 and head={head}")
        error = self._violation_of(acknowledged, head)
        if error is not None:
            self._fail(error)
            return False
        self._enter(Phase.MESSAGES)
        self.acknowledged, self.sent = acknowledged, head
        if self._early > acknowledged:
            self.acknowledged = self._early
            self._events.append(messages.Acknowledged(self.uuid, self._early))
        return True

    def send_value(self, value: int | str) -> None:
        """Queue the next value of a stateless stream; text has to be canonical."""
        if self.phase is not Phase.VALUES:
            raise self._wrong_phase("a value")
        text = value if isinstance(value, str) else format_integer(value)
        if not is_canonical(text):
            raise LocalProtocolError("a value has to be a decimal integer without leading zeros")
        if len(text) > self.config.digits and count_digits(text) > self.config.digits:
            raise LocalProtocolError(
                f"a value of {count_digits(text)} digits; ServerConfig(digits={self.config.digits}) allows no more"
            )
        self.messages_sent += 1
        self._push(messages.encode_value(text))

    def send_message(self, id: int, data: Json | Record, time: float | None = None, *, final: bool = False) -> None:
        """Queue a message of the session, which must be durable. After the final one the connection is closing."""
        if self.phase is not Phase.MESSAGES:
            raise self._wrong_phase("a message")
        if id <= self._queued:
            raise LocalProtocolError(f"message {id} after message {self._queued}: ids have to ascend")
        line = messages.encode_message(id, data, time)
        self._queued = id
        self._queue.append((id, line))
        self.messages_sent += 1
        self.outbox += len(line)
        if self._observer is not None:
            self._observer.frame("out", "restream", self.phase.value, len(line) - 1)
        if final:
            self.finish()

    def send_stored(self, stored: Sequence[messages.StoredMessage]) -> None:
        """Queue several messages of the session with their data as it is stored. They leave the engine together.

        A client that asked for blocks gets them as one block, and any other client as lines.
        """
        if self.phase is not Phase.MESSAGES:
            raise self._wrong_phase("a message")
        last = self._queued
        for message in stored:
            if message.id <= last:
                raise LocalProtocolError(f"message {message.id} after message {last}: ids have to ascend")
            last = message.id
        block = encode_block(stored) if self._sends_blocks else messages.encode_stored(stored)
        self._queued = last
        self._queue.append((last, block))
        self.messages_sent += len(stored)
        self.outbox += len(block)
        if self._observer is not None:
            for size in [len(block)] if self._sends_blocks else map(len, block.splitlines()):
                self._observer.frame("out", "restream", self.phase.value, size)

    def send_status(self, status: messages.Status) -> None:
        """Answer a status request; the connection is closing then."""
        if self.phase is not Phase.STATUS:
            raise self._wrong_phase("a status")
        self._push(messages.encode_status(status))
        self.finish()

    def send_statuses(self, statuses: messages.Statuses) -> None:
        """Answer a status request for several sessions; the connection is closing then."""
        if self.phase is not Phase.STATUS:
            raise self._wrong_phase("a status")
        self._push(messages.encode_statuses(statuses))
        self.finish()

    def send_listing(self, listing: messages.Listing) -> None:
        """Answer a request for a listing; the connection is closing then."""
        if self.phase is not Phase.STATUS:
            raise self._wrong_phase("a listing")
        self._push(messages.encode_listing(listing))
        self.finish()

    def fail(self, text: str, code: messages.ErrorCode | None = None, acknowledged: int | None = None) -> None:
        """Queue an error line and close. Harmless if the connection is ending already."""
        if self.phase is not Phase.CLOSING and self.phase is not Phase.OVER:
            self._push(messages.encode_error(text, code, acknowledged))
            self._enter(Phase.CLOSING)
            self._stop_reading()

    def finish(self) -> None:
        """Close when everything queued is written. Harmless if the connection is ending already.

        Acknowledgements of a session are still handled until the client hangs up.
        """
        if self.phase is Phase.CLOSING or self.phase is Phase.OVER:
            return
        if self.phase is not Phase.MESSAGES:
            self._stop_reading()
        self._enter(Phase.CLOSING)

    def connection_lost(self, now: float) -> None:
        """End the connection: no event follows, and nothing is written. Earlier events can still be fetched."""
        self._end()

    # --- the stream engine

    def receive_eof(self, now: float) -> None:
        """Handle the end of the client's bytes. An unfinished line is no message."""
        if self.phase is not Phase.OVER:
            self._end()
            if not self._failed:
                self._events.append(HungUp())

    def has_output(self) -> bool:
        return bool(self._queue)

    def buffers_to_send(self, limit: int = WRITE_BYTES) -> list[Buffer]:
        """Remove queued lines of about `limit` bytes; they count as sent."""
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

    # --- the lines of the client

    def _take_line(self, line: bytes) -> None:
        if self.phase is Phase.ASKING:
            self._take_request(line)
            return
        if self._observer is not None:
            self._observer.frame("in", "restream", self.phase.value, len(line))
        ack = messages.parse_later(line, stateful=bool(self.uuid), status=self.config.status)
        if ack is None:
            return
        id = ack.id
        is_early = self.phase is Phase.OPENING  # `accept` says later what was sent and acknowledged before
        before = self._early if is_early else self.acknowledged
        if ack.uuid != self.uuid:
            raise RemoteProtocolError("an ack for another session than this connection's", rule="restream-S40")
        if id < before:
            raise _out_of_order(id, f"ack {before}")
        if id < self._state:
            raise _out_of_order(id, f"state {self._state}")
        if is_early:
            self._early = id
        elif id > self.sent:
            raise _not_sent(id, self.sent)
        elif id > before:
            self.acknowledged = id
            self._events.append(ack)

    def _take_request(self, line: bytes) -> None:
        if self._observer is not None:
            self._observer.frame("in", "restream", self.phase.value, len(line))
        request = messages.parse_request(line, digits=self.config.digits, status=self.config.status)
        self._lines.limit = self.config.line
        self._lines.limit_name = f"ServerConfig(line={self.config.line})"
        self._deadlines.stop(Timer.FIRST_LINE)
        if (
            type(request) is messages.Registered and len(line) > self.config.opening
        ):  # its params are stored with the session
            raise RemoteProtocolError(
                f"a request of {len(line)} bytes for a session against {self.config.opening} allowed",
                rule="restream-S01",
            )
        match request:
            case messages.StatelessRequested():
                self._enter(Phase.VALUES)
            case messages.Registered(uuid):
                self._enter(Phase.OPENING)
                self.uuid = uuid
            case messages.Resumed(uuid=uuid, state=state, blocks=blocks):
                self._enter(Phase.OPENING)
                self._sends_blocks = blocks
                self.uuid, self._queued, self._state = uuid, state, state
            case messages.StatusRequested(uuid=uuid):
                self._enter(Phase.STATUS)
                self.uuid = uuid
            case messages.ListingRequested():
                self._enter(Phase.STATUS)
                self.uuid = messages.ALL_SESSIONS
        self._events.append(request)

    def _violation_of(self, acknowledged: int, head: int) -> RemoteProtocolError | None:
        """Return the violation of a request that does not fit the session."""
        state = self._queued
        if state < acknowledged:
            return messages.gone(state, acknowledged)
        if state > head:
            return messages.beyond(state, head)
        if self._early > head:
            return _not_sent(self._early, head)
        return None  # an early ack is not below the state, which is not below what was acknowledged

    # --- inside

    def _enter(self, phase: Phase) -> None:
        if phase not in NEXT[self.phase]:
            raise AssertionError(f"there is no step from {self.phase.value} to {phase.value}")
        self.phase = phase

    def _wrong_phase(self, what: str) -> LocalProtocolError:
        return LocalProtocolError(f"{what} cannot be sent, the connection is {self.phase.value}")

    def _push(self, line: bytes) -> None:
        self._queue.append((0, line))
        self.outbox += len(line)
        if self._observer is not None:
            self._observer.frame("out", "restream", self.phase.value, len(line) - 1)

    def _fail(self, error: RemoteProtocolError) -> None:
        if isinstance(error, messages.RequestRefused):
            line = messages.encode_error(error.message, error.code, error.acknowledged)
        else:
            line = messages.encode_error(error.message)
        self._fail_with(line, Failed(error))

    def _fall_silent(self, silent: Silent, now: float) -> None:
        why = f"nothing came for {silent.seconds:g} s while a line is unfinished"
        self._fail_with(messages.encode_error(why, messages.ErrorCode.UNAVAILABLE), silent)

    def _fail_with(self, line: bytes, last: Failed | Silent) -> None:
        """Queue the last event, and the error line unless the last line is written and the transport perhaps closed."""
        if self.phase is not Phase.CLOSING or self._queue:
            self._push(line)
        self._enter(Phase.CLOSING)
        self._failed = True
        self._stop_reading()
        self._events.append(last)

    def _end(self) -> None:
        self._enter(Phase.OVER)
        self._stop_reading()
        self._queue.clear()
        self.outbox = 0


def _out_of_order(id: int, before: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"ack {id} after {before}: acknowledgements have to ascend", rule="restream-S37")


def _not_sent(id: int, sent: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"ack {id} for a message that was not sent, the last one is {sent}", rule="restream-S36")
