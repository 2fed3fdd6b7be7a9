"""A strict restream server for tests, written from the specification: plain JSON and bytes, nothing of muxkit."""

from __future__ import annotations

import json
import zlib
from typing import Any

import attrs


class BrokenRule(AssertionError):
    """The client wrote a line that the specification, or the server that it describes, calls an error."""


def value_of(id: int) -> int:
    """Return the number of message `id`, the same on each connection."""
    return id * 2654435761 & 0xFFFFFFFF


def next_value(value: int) -> int:
    """Return the value after another in a stateless stream."""
    return 3 * value + 1


@attrs.define
class PlainSession:
    """The state of one session."""

    params: dict[str, Any]
    head: int = 0
    """The last id that was sent on any connection."""
    acknowledged: int = 0
    stated: int = 0
    """The highest state of any connection."""
    acks: list[int] = attrs.field(factory=list)


@attrs.define
class PlainServer:
    """All sessions; `room` is the most unacknowledged messages that one may have.

    With `state_acknowledges` a state counts as an ack of the same id for the rest of the session, as it does in the
    server that the specification describes; otherwise only for its own connection.
    """

    room: int = 2**32
    state_acknowledges: bool = True
    sessions: dict[str, PlainSession] = attrs.field(factory=dict)
    sent_values: set[int] = attrs.field(factory=set)
    first_lines: list[dict[str, Any]] = attrs.field(factory=list)
    current: dict[str, PlainConnection] = attrs.field(factory=dict)

    def connect(self) -> PlainConnection:
        return PlainConnection(self)


@attrs.define(eq=False)
class PlainConnection:
    """One connection: `feed` takes the client's bytes, `next_line` returns the server's next line."""

    server: PlainServer
    session: PlainSession | None = None
    uuid: str = ""
    lines: int = 0
    closes: bool = False
    """The final message was sent: the server closes."""
    _text: bytes = b""
    _value: int | None = None
    _at: int = 0
    _floor: int = 0
    """What an ack on this connection must not be below."""

    def feed(self, data: bytes) -> None:
        """Check every whole line."""
        *whole, self._text = (self._text + data).split(b"\n")
        if self.uuid and self.server.current.get(self.uuid) is not self:
            return  # a newer connection has the session: this one is not read
        for line in whole:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise BrokenRule(f"not an object: {line!r}")
            self.lines += 1
            if self.lines == 1:
                self._open(message)
            else:
                self._acknowledge(message)

    def next_line(self) -> bytes | None:
        """Return the next message; None if there is none for now."""
        if self._value is not None:
            self._value = next_value(self._value)
            self.server.sent_values.add(self._value)
            return json.dumps({"data": str(self._value)}).encode() + b"\n"
        session = self.session
        if session is None or self.closes:
            return None
        count = session.params["count"]
        if self._at == session.head and session.head - session.acknowledged >= self.server.room:
            return None
        self._at += 1
        session.head = max(session.head, self._at)
        data = {"value": value_of(self._at)}
        if self._at == count:
            crc = 0
            for id in range(1, count + 1):
                crc = zlib.crc32(value_of(id).to_bytes(4, "big"), crc)
            data["crc"] = crc
            self.closes = True
        return json.dumps({"id": self._at, "data": data}).encode() + b"\n"

    def _open(self, message: dict[str, Any]) -> None:
        self.server.first_lines.append(message)
        names = sorted(message)
        if not names:
            self._value = 7
        elif names == ["state"]:
            self._value = int(message["state"])
            if message["state"] != str(self._value) or self._value not in self.server.sent_values:
                raise BrokenRule(f"state {message['state']!r} is no value that was sent")
        elif names == ["params", "uuid"]:
            self._register(message["uuid"], message["params"])
        elif names == ["state", "uuid"]:
            self._resume(message["uuid"], message["state"])
        else:
            raise BrokenRule(f"a first message cannot hold {names}")

    def _register(self, uuid: str, params: dict[str, Any]) -> None:
        session = self.server.sessions.setdefault(uuid, PlainSession(params))
        if session.params != params or session.acknowledged:
            raise BrokenRule(f"params for a session that is known: {session}")
        self._begin(uuid, session, 0)

    def _resume(self, uuid: str, state: int) -> None:
        session = self.server.sessions.get(uuid)
        if session is None:
            raise BrokenRule("state for a uuid that was never seen")
        least = max(session.acknowledged, session.stated) if self.server.state_acknowledges else session.acknowledged
        if not least <= state <= session.head:
            raise BrokenRule(f"state {state} is not within {least} and {session.head}")
        session.stated = max(session.stated, state)
        self._begin(uuid, session, state)

    def _begin(self, uuid: str, session: PlainSession, state: int) -> None:
        self.uuid, self.session, self._at = uuid, session, state
        self._floor = max(session.acknowledged, state)
        self.server.current[uuid] = self

    def _acknowledge(self, message: dict[str, Any]) -> None:
        session = self.session
        if session is None or sorted(message) != ["ack", "uuid"]:
            raise BrokenRule(f"only an ack may follow, and only in a session: {message}")
        id = message["ack"]
        if message["uuid"] != self.uuid:
            raise BrokenRule(f"an ack for session {message['uuid']} on a connection of {self.uuid}")
        if not 1 <= id <= self._at:
            raise BrokenRule(f"ack {id}, and {self._at} is the last message of this connection")
        if id < self._floor:
            raise BrokenRule(f"ack {id} behind {self._floor}")
        self._floor = session.acknowledged = id
        session.acks.append(id)
