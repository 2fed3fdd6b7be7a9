"""A plain restream server and client, written from the document; imports nothing of muxkit.

The server refuses as the Node original does: one error line, and the connection stays.
"""

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.foreign.wire import Cutting, LineCut, Plan, Refusal, Violation, Wire, listeners, uncut

U32 = 0xFFFFFFFF


def line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Read one line; raises Violation for what is no JSON object in UTF-8."""
    try:
        message = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise Violation("restream-F05", f"{line!r} is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise Violation("restream-F05", f"{line!r} is no object")
    return message


def uint(message: dict[str, Any], key: str, most: int, clause: str) -> int:
    value = message.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise Violation(clause, f"{key} is {value!r}")
    return value


def crc_of(values: list[int]) -> int:
    return zlib.crc32(struct.pack(f">{len(values)}I", *values))


@dataclass
class Lines:
    """The lines of a connection, in both directions."""

    wire: Wire
    buffer: bytes = b""

    async def next(self) -> dict[str, Any] | None:
        """Give the next message; None at the end of the connection."""
        while b"\n" not in self.buffer:
            data = await self.wire.take()
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return parse(line)


@dataclass
class Session:
    """What the server knows of one uuid."""

    params: dict[str, Any]
    values: list[int]
    sent: int = 0
    acked: int = 0
    resumed: int = 0
    wire: Wire | None = None
    is_feed: bool = False  # it grows, and has no last message
    grown: trio.Event = field(default_factory=trio.Event)

    def append(self, value: int) -> None:
        """Let a feed grow."""
        self.values.append(value)
        self.grown.set()
        self.grown = trio.Event()

    def message(self, number: int) -> bytes:
        data = {"value": self.values[number - 1]}
        if number == len(self.values) and not self.is_feed:
            data["crc"] = crc_of(self.values)
        return line_of({"id": number, "data": data})


@dataclass
class Server:
    """A server of stateful streams and of the doubling stateless one; it answers each refusal with an error line."""

    plan: Plan = uncut
    pause: float = 0  # s, between two messages
    refusals: list[Refusal] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    unwelcome: bool = False  # an error line was sent, so the client should not come again
    doubled: int = 0  # the last stateless value that was sent

    async def serve(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        bound, port = await listeners()
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self.handle, bound)
            task_status.started(port)

    async def handle(self, stream: trio.SocketStream) -> None:
        wire = Wire(stream, self.plan(len(self.wires)))
        self.wires.append(wire)
        try:
            if self.unwelcome:
                self.refusals.append(Refusal("restream-F10", "a connection after an error message"))
            await self._converse(wire)
        except* LineCut:
            pass
        finally:
            await wire.cut()

    async def _converse(self, wire: Wire) -> None:
        lines = Lines(wire)
        session: Session | None = None
        uuid = ""
        async with trio.open_nursery() as nursery:
            first = True
            while True:
                try:
                    message = await lines.next()
                    if message is None:
                        break
                    if not first:
                        self._ack(message, uuid, session)
                    elif "uuid" in message:
                        uuid, session, behind = self._open(message, wire)
                        nursery.start_soon(self._stream, wire, uuid, session, behind)
                    else:
                        nursery.start_soon(self._double, wire, self._behind(message))
                    first = False
                except Violation as violation:
                    self.refusals.append(violation.refusal)
                    self.unwelcome = True
                    await wire.send(line_of({"error": str(violation)}))
            nursery.cancel_scope.cancel()

    def _open(self, message: dict[str, Any], wire: Wire) -> tuple[str, Session, int]:
        uuid = message["uuid"]
        if type(uuid) is not str:
            raise Violation("restream-S02", f"uuid is {uuid!r}")
        if "ack" in message:
            raise Violation("restream-S32", "Cannot send ACK as the first message")
        known = self.sessions.get(uuid)
        if known is not None and known.wire is not None and not known.wire.gone:
            raise Violation("restream-T02", f"a second connection of {uuid} beside the first")
        behind = 0
        if "params" in message:
            params = message["params"]
            if type(params) is not dict or "state" in message:
                raise Violation("restream-M03", f"params in {message!r}")
            count = uint(params, "count", 0xFFFF, "restream-S03")
            if not count:
                raise Violation("restream-S03", "count is 0")
            if known is None:
                known = Session(params, [(n * 2654435761 + 12345) & U32 for n in range(count)])
                self.sessions[uuid] = known
            elif known.params != params or known.acked or known.resumed:
                raise Violation("restream-S29", f"params for {uuid}, acked {known.acked}, resumed {known.resumed}")
        else:
            behind = uint(message, "state", U32, "restream-S28")
            if known is None:
                raise Violation("restream-S24", f"state for {uuid}, never seen")
            if behind > known.sent:
                raise Violation("restream-S27", f"state {behind}, sent {known.sent}")
            if behind < max(known.acked, known.resumed):
                raise Violation("restream-S26", f"state {behind}, acked {known.acked}, resumed {known.resumed}")
            known.resumed = behind
        known.wire = wire
        return uuid, known, behind

    def _ack(self, message: dict[str, Any], uuid: str, session: Session | None) -> None:
        if session is None or "ack" not in message or "state" in message or "params" in message:
            raise Violation("restream-M01", f"{message!r} behind the first message")
        if message.get("uuid") != uuid:
            raise Violation("restream-S40", f"an ack for {message.get('uuid')!r} on the connection of {uuid}")
        ack = uint(message, "ack", U32, "restream-S30")
        if not 0 < ack <= session.sent:
            raise Violation("restream-S36", f"Unknown message ID {ack}, sent {session.sent}")
        if ack < max(session.acked, session.resumed):
            raise Violation("restream-S37", f"Out-of-order ACK {ack} after {max(session.acked, session.resumed)}")
        session.acked = ack
        if ack == len(session.values):
            self.finished.add(uuid)

    async def _stream(self, wire: Wire, uuid: str, session: Session, behind: int) -> None:
        number = behind
        try:
            while session.is_feed or number < len(session.values):
                if number == len(session.values):
                    await session.grown.wait()
                    continue
                number += 1
                session.sent = max(session.sent, number)  # before, since a cut may come behind the line feed
                await wire.send(session.message(number))
                await trio.sleep(self.pause)
            await wire.end()
        except LineCut:
            pass

    def _behind(self, message: dict[str, Any]) -> int:
        if "state" not in message:
            if "ack" in message or "params" in message:
                raise Violation("restream-M03", f"{message!r} without a uuid")
            return 0
        state = message["state"]
        if type(state) is not str or not state.isdecimal():
            raise Violation("restream-L14", f"state is {state!r}")
        value = int(state)
        if value & (value - 1) or value > self.doubled:
            raise Violation("restream-L08", f"state {state}, the last value sent is {self.doubled}")
        return value

    async def _double(self, wire: Wire, value: int) -> None:
        try:
            while True:
                value = value * 2 or 1
                self.doubled = max(self.doubled, value)
                await wire.send(line_of({"data": str(value)}))
        except LineCut:
            pass


@dataclass
class Client:
    """A client of one stateful stream, which comes back until it has everything."""

    port: int
    uuid: str
    count: int
    plan: Plan = uncut
    ack_every: int | None = 1
    is_feed: bool = False  # of a session that exists and has no last message; the client leaves behind `count`
    came: trio.Event = field(default_factory=trio.Event)
    refusals: list[Refusal] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: int = 0
    done: bool = False

    async def run(self) -> list[int]:
        """Give the numbers; stops at the first refusal."""
        while not self.done and not self.refusals:
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            wire = Wire(stream, self.plan(len(self.wires)))
            self.wires.append(wire)
            try:
                await self._converse(wire)
            except Violation as violation:
                self.refusals.append(violation.refusal)
            except LineCut:
                self.done = self.is_feed and self.last == self.count  # nothing more would come
            finally:
                await wire.cut()
        return [self.lines[number]["value"] for number in sorted(self.lines)]

    async def _converse(self, wire: Wire) -> None:
        first = {"state": self.last} if self.last or self.is_feed else {"params": {"count": self.count}}
        await wire.send(line_of({"uuid": self.uuid, **first}))
        lines = Lines(wire)
        expected = self.last + 1
        while (message := await lines.next()) is not None:
            if "error" in message:
                raise Violation("restream-F08", f"the server refused: {message['error']!r}")
            self._check(message, expected)
            expected += 1
            self.last = max(self.last, message["id"])
            self.came.set()
            self.came = trio.Event()
            if self.ack_every and self.last % self.ack_every == 0:
                await wire.send(line_of({"uuid": self.uuid, "ack": self.last}))
            if self.is_feed and self.last == self.count:
                break
        if self.last == self.count:
            self.done = True
        elif wire.cutting == Cutting():
            raise Violation("restream-S06", f"the stream ended behind message {self.last} of {self.count}")

    def _check(self, message: dict[str, Any], expected: int) -> None:
        number = uint(message, "id", U32, "restream-S08")
        if number != expected:
            raise Violation("restream-S19", f"message {number}, {expected} is due")
        data = message.get("data")
        if type(data) is not dict:
            raise Violation("restream-S07", f"data is {data!r}")
        uint(data, "value", U32, "restream-S07")
        if ("crc" in data) != (number == self.count and not self.is_feed):
            raise Violation("restream-S10", f"message {number} of {self.count} is {message!r}")
        if self.lines.setdefault(number, data) != data:
            raise Violation("restream-S20", f"message {number} was {self.lines[number]!r} and is {data!r}")
        if "crc" in data and data["crc"] != crc_of([self.lines[n]["value"] for n in range(1, number + 1)]):
            raise Violation("restream-S12", f"crc {data['crc']} is wrong")
