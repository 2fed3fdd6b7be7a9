"""Decoders for bpmux: one that only parses chunks, and one that checks the rules with a real engine.

Channels are named as the recording end names them. For the check, each chunk that the recording end wrote becomes the
command that leads to it, and each byte that it received goes into the engine's own reader. So a violation is found by
the code that would have found it live, and carries its clause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from muxkit import Limits, LocalProtocolError
from muxkit.pipeline.capture.decoder import BOTH, Cutting, Half
from muxkit.protocols.bpmux import (
    Chunk,
    Config,
    Engine,
    Entity,
    Failed,
    Kind,
    Message,
    Opened,
    Partial,
    Responded,
    Type,
    parse_chunk,
)

if TYPE_CHECKING:
    from muxkit._observer import Direction
    from muxkit.core import Cursor
    from muxkit.pipeline.capture.decoder import Found

# The recorder's name for what the peer names: the peer's sink is a stream here.
OURS: Final = {
    Type.OUT_REQUEST: Type.IN_REQUEST.label,
    Type.IN_REQUEST: Type.OUT_REQUEST.label,
    Type.OUT_SINK: Type.IN_STREAM.label,
    Type.IN_SINK: Type.OUT_STREAM.label,
    Type.OUT_STREAM: Type.IN_SINK.label,
    Type.IN_STREAM: Type.OUT_SINK.label,
    Type.DUPLEX: Type.IN_SINK.label,
}
TOP: Final = {
    ("in", Type.IN_SINK): f"top-level {Type.IN_STREAM.label}",
    ("in", Type.IN_STREAM): f"top-level {Type.IN_SINK.label}",
    ("out", Type.IN_SINK): f"top-level {Type.IN_SINK.label}",
    ("out", Type.IN_STREAM): f"top-level {Type.IN_STREAM.label}",
}


@attrs.define
class BpmuxDecoder(Cutting):
    """Decodes both directions of one connection; it finds only chunks that cannot be parsed."""

    halves: dict[str, Half] = attrs.field(factory=lambda: {direction: Half() for direction in BOTH})
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            half = self.halves[direction]

            def parse(cursor: Cursor) -> None:
                chunk = parse_chunk(cursor)
                if isinstance(chunk, Partial):
                    half.announced = chunk.total_size
                else:
                    tell(chunk, direction, half.announced > 0, found)
                    half.announced = 0

            self.cut(direction, data, parse, found)
        return found

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self)


def name_of(direction: Direction, type: Type, id: int) -> str:
    """Return the recording end's name of a chunk's channel."""
    if id == 0 and type in (Type.IN_SINK, Type.IN_STREAM):
        return TOP[direction, type]
    return f"{OURS[type] if direction == 'in' else type.label} {id}"


def tell(chunk: Chunk, direction: Direction, in_parts: bool, found: list[Found]) -> None:
    """Make a row for each part of a chunk."""
    channel = name_of(direction, chunk.type, chunk.id)

    def say(kind: str, size: int) -> None:
        found.append(("frame", direction, channel, kind, size, None, None, None, None))

    if in_parts:
        say("partial", 0)
    if chunk.payload is not None:
        say("payload", len(chunk.payload))
    if chunk.credit is not None:
        say("credit", 0)
        if chunk.credit:
            found.append(("credit", direction, channel, None, None, chunk.credit, None, None, None))
    if chunk.ping:
        say("ping", 0)
    if chunk.end is not None:
        say("end", len(chunk.end))
    if chunk.ack_end:
        say("ack-end", 0)
    elif chunk.payload is None and chunk.credit is None and not chunk.ping and chunk.end is None:
        say("pong", 0)


LARGEST = 2**40
# The recorder's limits are not known, so nothing is a violation of them.
GENEROUS = Limits(
    message=LARGEST, reassembly=LARGEST, channels=2**30, channel_memory=2**50, backlog=2**30, pongs=2**30,
    tombstones=2**30, resets_per_second=2**30, resets_burst=2**30, connection_bytes=LARGEST,
)  # fmt: skip


class EngineDecoder(Cutting):
    """Decodes one connection with a real engine; it must have been recorded from its first byte on."""

    def __init__(self) -> None:
        self.halves = {direction: Half() for direction in BOTH}
        self.segment = 0
        self._found: list[Found] = []
        # Grants and pongs follow the recording, so the engine sends none by itself.
        self._engine = Engine(Config(grants=False, pongs=False, keepalive=None), limits=GENEROUS, observer=_Told(self))
        self._parts: dict[tuple[Type, int], int] = {}  # bytes that are left of messages written in parts
        self._plain: BpmuxDecoder | None = None  # used once the engine cannot follow

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        if self._plain is not None:
            return self._plain.feed(direction, data, segment=segment, offset=offset)
        found = self._found = []
        if not self.begin(direction, data, segment, offset, found):
            return found
        if direction == "out":
            self.cut(direction, data, self._follow, found)
        else:
            self._engine.receive_bytes(data, 0.0)
        self._settle()
        return self._found

    def dump(self) -> bytes:
        raise TypeError("an engine cannot be kept as bytes: decode streams without one")

    # --- received

    def _settle(self) -> None:
        """Consume everything at once."""
        engine = self._engine
        while events := engine.events():
            for event in events:
                match event:
                    case Message(entity, payload) | Responded(entity, payload):
                        engine.consumed(entity, len(payload))
                    case Opened(payload=payload):
                        engine.consumed_opening(len(payload))
                    case Failed():
                        self.halves["in"].lost = True
                    case _:
                        pass
        self._drain()

    def _drain(self) -> None:
        while self._engine.has_output() and self._engine.buffers_to_send():
            pass

    # --- sent

    def _follow(self, cursor: Cursor) -> None:
        """Report a chunk of the recorder, and make the engine do the same."""
        half = self.halves["out"]
        chunk = parse_chunk(cursor)
        if isinstance(chunk, Partial):
            half.announced = chunk.total_size
            return
        total, half.announced = half.announced, 0
        tell(chunk, "out", total > 0, self._found)
        if self._engine.over:
            return
        try:
            self._settle()
            self._do(chunk, total)
        except LocalProtocolError as error:
            self._give_up(error)

    def _do(self, chunk: Chunk, total: int) -> None:
        key = (chunk.type, chunk.id)
        size = len(chunk.payload if chunk.payload is not None else chunk.end or b"")
        entity = self._entity(chunk)
        if entity is not None and chunk.credit and not (chunk.ack_end or entity.gone):
            self._engine.give_credit(entity, chunk.credit)
            self._drain()
        if key in self._parts:  # the rest of a message that the engine has sent as a whole, or something in between
            self._parts[key] -= size
            if self._parts[key] <= 0:
                del self._parts[key]
            return
        if total > size:
            self._parts[key] = total - size
        whole = max(total, size)
        if entity is None:
            if chunk.payload is not None:
                self._open(chunk, whole)
        elif chunk.ack_end or entity.gone:
            return
        else:
            if chunk.payload is not None and (total == 0 or chunk.end is None):
                self._engine.send(entity, bytes(whole))
            if chunk.end is not None:
                self._engine.end(entity, bytes(whole if chunk.payload is None else len(chunk.end)))
        self._drain()

    def _entity(self, chunk: Chunk) -> Entity | None:
        engine = self._engine
        if chunk.id == 0 and chunk.type is Type.IN_SINK:
            return engine.top_sink
        if chunk.id == 0 and chunk.type is Type.IN_STREAM:
            return engine.top_stream
        if chunk.type is Type.DUPLEX:
            return None
        return engine.entities(Kind(chunk.type)).get(chunk.id)

    def _open(self, chunk: Chunk, size: int) -> None:
        engine, payload, id, credit = self._engine, bytes(size), chunk.id, chunk.credit or 0
        match chunk.type:
            case Type.OUT_SINK:
                engine.open_sink(payload, id=id)
            case Type.OUT_STREAM:
                engine.open_stream(payload, id=id, credit=credit)
            case Type.DUPLEX:
                engine.open_duplex(payload, id=id, credit=credit)
            case Type.OUT_REQUEST:
                engine.open_request(payload, id=id, credit=credit)
            case _:
                raise LocalProtocolError(f"{chunk.type.label} {id} is not open")

    def _give_up(self, error: LocalProtocolError) -> None:
        """The recording does not begin with the connection, or its end broke the rules itself.

        Where the next chunk of the peer begins is known to the engine alone, so only our side is cut from here on.
        """
        half = self.halves["out"]
        self.halves["in"].lost = True
        text = f"decode without an engine: what was written does not follow from what is recorded before: {error}"
        self._found.append(("unverified", "out", None, None, None, None, half.offset, None, text))
        self._plain = BpmuxDecoder(halves=self.halves, segment=self.segment)


class _Told:
    """The observer of the engine; it turns events into rows."""

    def __init__(self, owner: EngineDecoder) -> None:
        self._owner = owner

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        if direction == "in":
            self._owner._found.append(("frame", "in", channel, name, size, None, None, None, None))

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        if direction == "in":
            self._owner._found.append(("credit", "in", channel, None, None, amount, None, None, None))

    def state(self, channel: str, state: str) -> None:
        self._owner._found.append(("state", None, channel, state, None, None, None, None, None))

    def timer(self, name: str) -> None: ...

    def error(self, error: BaseException) -> None:
        rule, offset = getattr(error, "rule", None), getattr(error, "offset", None)
        self._owner._found.append(("error", "in", None, type(error).__name__, None, None, offset, rule, str(error)))

    def transport(self, direction: Direction, data: bytes | memoryview) -> None: ...
