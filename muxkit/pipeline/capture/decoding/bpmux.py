"""Decoding of bpmux: chunk by chunk, or with a real engine that repeats the recording and finds violations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs

from muxkit import Limits, LocalProtocolError, RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore, encode_varu64
from muxkit.core.events import Failed, Opened, Received
from muxkit.pipeline.capture.decoding.decoder import LARGEST, SEARCHED, Decoder
from muxkit.pipeline.capture.files import Found, row
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux.frames import ANNOUNCEMENT_MOST, find_announcement

# The recorder's name for an entity that the peer names from its own side: the peer's sink is a stream here.
OURS: Final = {
    bpmux.Type.OUT_REQUEST: bpmux.Type.IN_REQUEST.label,
    bpmux.Type.IN_REQUEST: bpmux.Type.OUT_REQUEST.label,
    bpmux.Type.OUT_SINK: bpmux.Type.IN_STREAM.label,
    bpmux.Type.IN_SINK: bpmux.Type.OUT_STREAM.label,
    bpmux.Type.OUT_STREAM: bpmux.Type.IN_SINK.label,
    bpmux.Type.IN_STREAM: bpmux.Type.OUT_SINK.label,
    bpmux.Type.DUPLEX: bpmux.Type.IN_SINK.label,
}
TOP: Final = {
    ("in", bpmux.Type.IN_SINK): f"top-level {bpmux.Type.IN_STREAM.label}",
    ("in", bpmux.Type.IN_STREAM): f"top-level {bpmux.Type.IN_SINK.label}",
    ("out", bpmux.Type.IN_SINK): f"top-level {bpmux.Type.IN_SINK.label}",
    ("out", bpmux.Type.IN_STREAM): f"top-level {bpmux.Type.IN_STREAM.label}",
}


ENOUGH: Final = 4  # consecutive chunks of known channels that can't be a coincidence
LONGEST_HEAD: Final = 10  # bytes of a tag and an id
MOST_SEEN: Final = 4096  # channels to remember, so that they can be recognized after a gap


@attrs.define
class BpmuxDecoder(Decoder):
    """Decodes both directions of one connection. The only violations that it finds are chunks that can't be parsed.

    After a gap, it continues where it finds four consecutive chunks of channels that it saw before the gap.
    """

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, found)
        elif self.halves[direction].gap_end is not None:
            seen = self.halves[direction].seen
            self.search(direction, data, found, what="chunks", find=partial(_find_chunks, seen=seen))
        return found

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        half = self.halves[direction]
        chunk = bpmux.parse_chunk(cursor)
        if isinstance(chunk, bpmux.Partial):
            half.announced = chunk.total_size
        else:
            total, half.announced = half.announced, 0
            if len(half.seen) < MOST_SEEN:
                half.seen.add(8 * chunk.id + chunk.type)
            self.on_chunk(chunk, total, direction, found)

    def on_chunk(self, chunk: bpmux.Chunk, total: int, direction: Direction, found: list[Found]) -> None:
        """Add a row for each part of a chunk. `total` is the size of the message that starts with it, or 0."""
        if chunk.id == 0 and chunk.type in (bpmux.Type.IN_SINK, bpmux.Type.IN_STREAM):
            channel = TOP[direction, chunk.type]
        else:
            channel = f"{OURS[chunk.type] if direction == 'in' else chunk.type.label} {chunk.id}"
        frame = partial(row, "frame", direction, channel)
        if total:
            found.append(frame("partial", 0))
        if chunk.payload is not None:
            found.append(frame("payload", len(chunk.payload)))
        if chunk.credit is not None:
            found.append(frame("credit", 0))
            if chunk.credit:
                found.append(row("credit", direction, channel, credit=chunk.credit))
        if chunk.ping:
            found.append(frame("ping", 0))
        if chunk.end is not None:
            found.append(frame("end", len(chunk.end)))
        if chunk.ack_end:
            found.append(frame("ack-end", 0))
        elif chunk.payload is None and chunk.credit is None and not chunk.ping and chunk.end is None:
            found.append(frame("pong", 0))


def _find_chunks(data: bytes, seen: set[int]) -> tuple[int, bool]:
    """Find chunks of known channels.

    Return their position and True, or the position where they may start once there are more bytes, and False.
    """
    if not seen:
        return len(data), False
    heads = [
        b"[\\x%02x-\\x%02x]" % (type << 5, type << 5 | 0x1F) + re.escape(encode_varu64(id))
        for id, type in (divmod(each, 8) for each in sorted(seen))
    ]
    for match in re.finditer(b"(?=" + b"|".join(heads) + b")", data, re.DOTALL):
        cursor, start = Cursor(data, match.start()), match.start()
        try:
            for _ in range(ENOUGH):
                chunk = bpmux.parse_chunk(cursor)
                if isinstance(chunk, bpmux.Chunk) and 8 * chunk.id + chunk.type not in seen:
                    break
            else:
                return start, True
        except NeedMore as need:
            if need.missing + len(data) - start <= SEARCHED:
                return start, False
        except RemoteProtocolError:
            pass
    # The head of a chunk may be cut off at the end.
    return max(0, len(data) - LONGEST_HEAD), False


# The recorder's limits aren't known, so the engine must not report violations of limits.
GENEROUS = Limits(
    message=LARGEST, reassembly=LARGEST, channels=2**30, channel_memory=2**50, backlog=2**30, pongs=2**30,
    tombstones=2**30, resets_per_second=2**30, resets_burst=2**30, connection_bytes=LARGEST,
)  # fmt: skip


class EngineDecoder(BpmuxDecoder):
    """Decodes one connection with a real engine. The recording must start with the first byte of the connection."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Found] = []
        # Grants and pongs are in the recording, so the engine must not send its own.
        self._engine = bpmux.Engine(
            bpmux.Config(grants=False, pongs=False, keepalive=None), limits=GENEROUS, observer=self
        )
        self._parts: dict[tuple[bpmux.Type, int], int] = {}  # remaining bytes of messages that were sent in parts
        self._follows = True  # until the engine can't repeat what was recorded
        self._first_sent: bytes | None = b""  # sent bytes that may announce a first credit, until that is known

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        if not self._follows:
            return super().feed(direction, data, segment=segment, offset=offset)
        found = self._found = []
        if self.begin(direction, data, segment, offset, found):
            if direction == "out":
                self._look_for_announcement(data)
                self.cut(direction, data, found)
                self._settle(())
            else:
                self._settle(self._engine.receive_bytes(data, 0.0))
        return found

    def dump(self) -> bytes:
        """Raise TypeError, because an engine can't be serialized."""
        raise TypeError("an engine cannot be kept as bytes: decode streams without one")

    # --- received

    def _settle(self, events: Sequence[bpmux.Event]) -> None:
        """Consume all received data immediately, and handle the events that this causes."""
        engine = self._engine
        while events := [*events, *engine.events()]:
            for event in events:
                match event:
                    case Received(receiver, payloads):
                        receiver.consumed(payloads, sum(map(len, payloads)))
                    case bpmux.Responded(request, payload):
                        request.consumed((), len(payload))
                    case Opened(opening=payload) | bpmux.Requested(payload=payload):
                        engine.consumed_opening(len(payload))
                    case Failed():
                        self.halves["in"].lost = True
                    case _:
                        pass
            events = ()
        self._drain()

    def _drain(self) -> None:
        while self._engine.has_output() and self._engine.buffers_to_send():
            pass

    # --- sent

    def _look_for_announcement(self, data: bytes) -> None:
        """Have the engine count on a first credit if the recorder announced one in its first bytes."""
        if self._first_sent is None:
            return
        self._first_sent += data[:ANNOUNCEMENT_MOST]
        credit = find_announcement(self._first_sent)
        if credit is not None:
            self._first_sent = None
            if credit:
                self._engine.repeat_announcement(credit)

    def on_chunk(self, chunk: bpmux.Chunk, total: int, direction: Direction, found: list[Found]) -> None:
        """Report a chunk that the recorder sent, and make the engine send the same."""
        super().on_chunk(chunk, total, direction, found)
        if self._engine.over or not self._follows:
            return
        try:
            self._settle(())
            self._do(chunk, total)
        except LocalProtocolError as error:
            self._give_up(error)

    def _do(self, chunk: bpmux.Chunk, total: int) -> None:
        key = (chunk.type, chunk.id)
        size = len(chunk.payload if chunk.payload is not None else chunk.end or b"")
        entity = self._entity(chunk)
        if entity is not None and chunk.credit and not (chunk.ack_end or entity.gone):
            entity.give_credit(chunk.credit)
            self._drain()
        if key in self._parts:  # part of a message that the engine has already sent as a whole, or credit in between
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
            if isinstance(entity, bpmux.Sender) and chunk.payload is not None and (total == 0 or chunk.end is None):
                entity.send(bytes(whole))
            if chunk.end is not None:
                entity.end(bytes(whole if chunk.payload is None else len(chunk.end)))
        self._drain()

    def _entity(self, chunk: bpmux.Chunk) -> bpmux.Entity | None:
        engine = self._engine
        if chunk.id == 0 and chunk.type is bpmux.Type.IN_SINK:
            return engine.top_sink
        if chunk.id == 0 and chunk.type is bpmux.Type.IN_STREAM:
            return engine.top_stream
        if chunk.type is bpmux.Type.DUPLEX:
            return None
        return engine.entities(bpmux.Kind(chunk.type)).get(chunk.id)

    def _open(self, chunk: bpmux.Chunk, size: int) -> None:
        engine, payload, id, credit = self._engine, bytes(size), chunk.id, chunk.credit or 0
        match chunk.type:
            case bpmux.Type.OUT_SINK:
                engine.open_sink(payload, id=id)
            case bpmux.Type.OUT_STREAM:
                engine.open_stream(payload, id=id, credit=credit)
            case bpmux.Type.DUPLEX:
                engine.open_duplex(payload, id=id, credit=credit)
            case bpmux.Type.OUT_REQUEST:
                engine.open_request(payload, id=id, credit=credit)
            case _:
                raise LocalProtocolError(f"{chunk.type.label} {id} is not open")

    def _give_up(self, error: LocalProtocolError) -> None:
        """Continue without the engine, because the recording starts too late or its own side broke the rules.

        Only the engine knows where the peer's next chunk starts, so only the sent bytes are decoded from here on.
        """
        half = self.halves["out"]
        self.halves["in"].lost = True
        text = f"decode without an engine: what was written does not follow from what is recorded before: {error}"
        self._found.append(row("unverified", "out", id=half.offset, text=text))
        self._follows = False

    # --- notifications of the engine to its observer

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        if direction == "in":
            self._found.append(row("frame", direction, channel, name, size))

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        if direction == "in":
            self._found.append(row("credit", direction, channel, credit=amount))

    def state(self, channel: str, state: str) -> None:
        self._found.append(row("state", None, channel, state))

    def timer(self, name: str) -> None: ...

    def error(self, error: BaseException) -> None:
        rule, offset = getattr(error, "rule", None), getattr(error, "offset", None)
        told = row("error", "in", None, type(error).__name__, id=offset, rule=rule, text=str(error))
        self._found.append(told)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None: ...
