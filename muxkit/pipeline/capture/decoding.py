"""Decoding of raw captures: by hand, as Arrow batches without Spark, or on Spark, a connection to a task.

A decoder (of bpmux, of bpmux with the rules checked by a real engine, of Relink) is fed with what one connection sent
and received, in that order. It gives the rows that an observer would have been told, with more in them: the numbers of
messages, and those that acknowledgements name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypedDict, Unpack, assert_never

import attrs
import msgspec
import pyarrow as pa

from muxkit import Limits, LocalProtocolError, RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore, encode_varu64
from muxkit.pipeline.capture.database import database
from muxkit.pipeline.capture.files import FRAMES, FRAMES_DDL, Found, FramesRow, Selection, row, to_batch
from muxkit.protocols import bpmux, relink
from muxkit.protocols.relink import Ack, AckPacket, General, MessagePacket, OperationPacket

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

KEYS: Final = ("capture", "connection")
ROWS: Final = 10_000  # of a batch that goes out
LARGEST: Final = 2**40  # bytes of a message; the recorder's own limits already held


@attrs.define
class Half:
    """The state of one direction. All of it is plain data, so that it can be stored and another process can go on."""

    held: list[bytes] = attrs.field(factory=list)
    """The beginning of a frame whose rest has not come."""
    size: int = 0
    """Bytes that are held."""
    wanted: int = 0
    """Parsing waits until so many bytes are held."""
    offset: int = 0
    """Of the next byte that comes."""
    announced: int = 0
    """Bytes of a message in parts whose first part comes next."""
    lost: bool = False
    """A frame could not be parsed or was not recorded, so nothing after it can be parsed, unless it is found again."""
    gap_end: int | None = None
    """Where the bytes after a gap begin, in which frames are looked for; None: there was none, or they were found."""
    found_again: bool = False
    """Frames were found behind a gap: what cannot be parsed is then a wrong find, and no fault of a peer."""
    seen: set[int] = attrs.field(factory=set)
    """Channels of this direction (bpmux): eight times the id, and the type."""


def _both_halves() -> dict[str, Half]:
    return {"in": Half(), "out": Half()}


@attrs.define
class Decoder(ABC):
    """Turns the bytes of one connection into rows: holds back incomplete frames, and reports gaps and violations."""

    halves: dict[str, Half] = attrs.field(factory=_both_halves)
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        """Decode the next bytes; `offset` shows whether any are missing before them. Never raises for their content."""
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, found)
        return found

    @abstractmethod
    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        """Parse one frame and add its rows. Raises `NeedMore` and `RemoteProtocolError`."""

    def dump(self) -> bytes:
        """Serialise the state for `restore`."""
        return msgspec.msgpack.encode(self)

    def begin(self, direction: Direction, data: bytes, segment: int, offset: int | None, found: list[Found]) -> bool:
        """Note the position of the next bytes; return False if they cannot be parsed."""
        if segment != self.segment:
            self.segment = segment
            self.restart()
        half = self.halves[direction]
        if offset is not None and offset != half.offset and (not half.lost or half.gap_end is not None):
            missing = offset - half.offset
            text = f"{missing} bytes before byte {offset} of segment {segment} were not recorded"
            found.append(row("gap", direction, size=missing, id=offset, text=text))
            half.lost, half.gap_end, half.offset = True, offset, offset
            half.held, half.size, half.wanted, half.announced = [], 0, 0, 0
        half.offset += len(data)
        return not half.lost

    def restart(self) -> None:
        """Begin a new transport: unfinished frames of the old one are dropped."""
        self.halves = _both_halves()

    def cut(self, direction: Direction, data: bytes, found: list[Found]) -> None:
        """Parse each complete frame in the held bytes and `data`."""
        half = self.halves[direction]
        if half.size:
            half.held.append(data)
            half.size += len(data)
            if half.size < half.wanted:
                return
            data = b"".join(half.held)
            half.held, half.size = [], 0
        cursor, end = Cursor(data), len(data)
        start = 0
        try:
            while start < end:
                self.parse(direction, found, cursor)
                start = cursor.position
        except NeedMore as need:
            half.held, half.size = [data[start:]], end - start
            half.wanted = half.size + need.missing
        except RemoteProtocolError as error:
            half.lost = True
            if half.found_again:
                half.gap_end = half.offset
                text = f"what was found behind a gap could not be parsed at byte {half.offset - (end - start)}"
                found.append(row("gap", direction, size=0, id=half.offset, text=text))
                return
            error.offset = half.offset - (end - start)
            kind = type(error).__name__
            found.append(row("error", direction, None, kind, id=error.offset, rule=error.rule, text=str(error)))


# ---------------------------------------------------------------------------- bpmux

# The recorder's name for what the peer names: the peer's sink is a stream here.
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


ENOUGH: Final = 4  # chunks of known channels, one after the other, that are no coincidence
SEARCHED: Final = 1 << 20  # bytes in which they have to be
LONGEST_HEAD: Final = 10  # bytes of a tag and an id
MOST_SEEN: Final = 4096  # channels that are known again


@attrs.define
class BpmuxDecoder(Decoder):
    """Decodes both directions of one connection; it finds only chunks that cannot be parsed.

    Behind a gap it goes on where it finds four chunks, one after the other, of channels that it saw before the gap.
    """

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            self.cut(direction, data, found)
        elif self.halves[direction].gap_end is not None:
            self._search(direction, data, found)
        return found

    def _search(self, direction: Direction, data: bytes, found: list[Found]) -> None:
        """Look for chunks behind a gap, and go on with them."""
        half = self.halves[direction]
        half.held.append(data)
        half.size += len(data)
        if half.size < half.wanted or not half.seen:
            return
        held = b"".join(half.held)
        start, is_sure = _find_chunks(held, half.seen)
        begins = half.offset - len(held) + start
        half.held, half.size, half.wanted = [held[start:]], len(held) - start, len(held) - start + 1
        if not is_sure:
            return
        skipped = begins - (half.gap_end or 0)
        text = f"{skipped} bytes behind a gap were passed over, and chunks were found again at byte {begins}"
        found.append(row("found", direction, size=skipped, id=begins, text=text))
        half.lost, half.gap_end, half.found_again = False, None, True
        half.held, half.size, half.wanted = [], 0, 0
        self.cut(direction, held[start:], found)

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
        """Add a row for each part of a chunk; `total` is the size of the message whose first part it is, or 0."""
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
    """Return where chunks of known channels begin, and True; or where they may once there are more bytes, and False."""
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
    # The head of a chunk may have been cut at the end.
    return max(0, len(data) - LONGEST_HEAD), False


# The recorder's limits are not known, so nothing is a violation of them.
GENEROUS = Limits(
    message=LARGEST, reassembly=LARGEST, channels=2**30, channel_memory=2**50, backlog=2**30, pongs=2**30,
    tombstones=2**30, resets_per_second=2**30, resets_burst=2**30, connection_bytes=LARGEST,
)  # fmt: skip


class EngineDecoder(BpmuxDecoder):
    """Decodes one connection with a real engine; it must have been recorded from its first byte on."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Found] = []
        # Grants and pongs follow the recording, so the engine sends none by itself.
        self._engine = bpmux.Engine(
            bpmux.Config(grants=False, pongs=False, keepalive=None), limits=GENEROUS, observer=self
        )
        self._parts: dict[tuple[bpmux.Type, int], int] = {}  # bytes that are left of messages written in parts
        self._follows = True  # until the engine cannot repeat what was recorded

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        if not self._follows:
            return super().feed(direction, data, segment=segment, offset=offset)
        found = self._found = []
        if self.begin(direction, data, segment, offset, found):
            if direction == "out":
                self.cut(direction, data, found)
            else:
                self._engine.receive_bytes(data, 0.0)
            self._settle()
        return found

    def dump(self) -> bytes:
        raise TypeError("an engine cannot be kept as bytes: decode streams without one")

    # --- received

    def _settle(self) -> None:
        """Consume everything at once."""
        engine = self._engine
        while events := engine.events():
            for event in events:
                match event:
                    case bpmux.Message(entity, payload) | bpmux.Responded(entity, payload):
                        engine.consumed(entity, len(payload))
                    case bpmux.Opened(payload=payload):
                        engine.consumed_opening(len(payload))
                    case bpmux.Failed():
                        self.halves["in"].lost = True
                    case _:
                        pass
        self._drain()

    def _drain(self) -> None:
        while self._engine.has_output() and self._engine.buffers_to_send():
            pass

    # --- sent

    def on_chunk(self, chunk: bpmux.Chunk, total: int, direction: Direction, found: list[Found]) -> None:
        """Report a chunk of the recorder, and make the engine do the same."""
        super().on_chunk(chunk, total, direction, found)
        if self._engine.over or not self._follows:
            return
        try:
            self._settle()
            self._do(chunk, total)
        except LocalProtocolError as error:
            self._give_up(error)

    def _do(self, chunk: bpmux.Chunk, total: int) -> None:
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
        """The recording does not begin with the connection, or its end broke the rules itself.

        Where the next chunk of the peer begins is known to the engine alone, so only our side is cut from here on.
        """
        half = self.halves["out"]
        self.halves["in"].lost = True
        text = f"decode without an engine: what was written does not follow from what is recorded before: {error}"
        self._found.append(row("unverified", "out", id=half.offset, text=text))
        self._follows = False

    # --- what the engine tells its observer

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


# ---------------------------------------------------------------------------- Relink

HALF_WAY: Final = 2**31
OTHER: Final = {"in": "out", "out": "in"}


@attrs.define
class Numbers:
    """Message numbers in one direction; they begin at 0 in each channel."""

    following: dict[int, int] = attrs.field(factory=dict)
    """By channel: the number of its next message."""
    again: set[int] = attrs.field(factory=set)
    """Channels without a message on this transport yet; their next one follows what the receiver has."""
    told: dict[int, int] = attrs.field(factory=dict)
    """By channel: the last number that the receiver reported on this transport."""
    acknowledged: dict[str, int] = attrs.field(factory=dict)
    """By channel and kind of acknowledgement: the last number."""

    def next(self, channel: int) -> int:
        if channel in self.again:
            self.again.discard(channel)
            self.following[channel] = self.told.get(channel, -1) + 1
        number = self.following.get(channel, 0)
        self.following[channel] = number + 1
        return number

    def restart(self) -> None:
        """Begin a new transport."""
        self.again, self.told = {*self.following}, {}

    def forget(self, channel: int) -> None:
        """Drop a closed channel; a new one of this id counts from 0."""
        self.following.pop(channel, None)
        self.told.pop(channel, None)
        self.again.discard(channel)
        for kind in (Ack.RECEIVED, Ack.CONSUMED, Ack.COMMITTED):
            self.acknowledged.pop(f"{channel} {kind}", None)

    def acknowledged_number(self, channel: int, ack: Ack, sequence: int | None) -> int:
        """Return the number that an acknowledgement names; without a sequence number it is the next one."""
        key = f"{channel} {Ack.COMMITTED if ack is Ack.UNCOMMITTED else ack}"
        last = self.acknowledged.get(key, -1)
        number = last + 1 if sequence is None else self.unwrapped(channel, sequence)
        self.acknowledged[key] = max(number, last)
        self.told[channel] = max(number, self.told.get(channel, -1))
        return number

    def unwrapped(self, channel: int, sequence: int) -> int:
        """Return the number with these lower 32 bits that is nearest to the last one sent."""
        near = max(0, self.following.get(channel, 0) - 1)
        number = near - (near % 2**32) + sequence
        if number - near > HALF_WAY and number >= 2**32:
            number -= 2**32
        elif near - number > HALF_WAY:
            number += 2**32
        return number


class RelinkEnd(TypedDict, total=False):
    """What the bytes of a Relink link do not say: the end that recorded them, and the options of its endpoint.

    What is not given is as in `RelinkDecoder`.
    """

    side: Literal["connector", "listener"]
    connector_id_size: int
    listener_id_size: int


@attrs.define
class RelinkDecoder(Decoder):
    """Decodes both directions of one link, over all its transports."""

    side: str = "connector"
    connector_id_size: int = 2
    listener_id_size: int = 2
    numbers: dict[str, Numbers] = attrs.field(factory=lambda: {"in": Numbers(), "out": Numbers()})

    def restart(self) -> None:
        super().restart()
        for numbers in self.numbers.values():
            numbers.restart()

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        bounds = _bounds(self.side, direction, self.connector_id_size, self.listener_id_size)
        packet = relink.parse_packet(cursor, bounds)
        ours = self.numbers[direction]
        # A channel is named by the direction of its messages: `out 5` goes out, and its acknowledgements come in.
        about = direction if not isinstance(packet, AckPacket) else OTHER[direction]

        def say(channel: str, name: str, size: int = 0, number: int | None = None) -> None:
            found.append(row("frame", direction, channel, name, size, id=number))

        match packet:
            case General():
                say("link", packet.name.lower())
            case MessagePacket():
                size = sum(map(len, packet.parts))
                for channel in packet.channels:
                    say(f"{about} {channel}", "message", size, ours.next(channel))
            case OperationPacket():
                for channel in packet.channels:
                    number = None if packet.sequence is None else ours.unwrapped(channel, packet.sequence)
                    say(f"{about} {channel}", packet.operation.name.lower(), 0, number)
            case AckPacket():
                theirs = self.numbers[OTHER[direction]]
                for channel in packet.channels:
                    told = None
                    if packet.ack is Ack.CLOSED:
                        theirs.forget(channel)
                    else:
                        told = theirs.acknowledged_number(channel, packet.ack, packet.sequence)
                    say(f"{about} {channel}", packet.ack.name.lower(), 0, told)
            case _:
                assert_never(packet)


@lru_cache
def _bounds(side: str, direction: Direction, connector_id_size: int, listener_id_size: int) -> relink.Bounds:
    """Return the bounds of packets in this direction, as the end of this side recorded them."""
    config = relink.Config(connector_id_size=connector_id_size, listener_id_size=listener_id_size)
    comes_to_connector = (side == "connector") == (direction == "in")
    bounds = relink.bounds_of(config, is_connector=comes_to_connector, message=Limits().message)
    return attrs.evolve(bounds, targets=2**32, parts=2**32, message=LARGEST)


# ---------------------------------------------------------------------------- whole captures


def decoder(protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]) -> Decoder:
    """Make a decoder for `bpmux` or `relink`; `end` is the recording end of a Relink link.

    With `engine` (bpmux only) a real engine repeats what the recording end did and reads what it received: violations
    of the peer come with their clause, and states are reported. Such a decoder cannot be dumped.
    """
    if protocol == "bpmux":
        return EngineDecoder() if engine else BpmuxDecoder()
    if protocol == "relink":
        return RelinkDecoder(**end)
    raise ValueError(f"no bytes of {protocol!r} can be decoded; those of bpmux and relink can")


def restore(protocol: str, dumped: bytes) -> Decoder:
    """Make a decoder that continues from a dump."""
    kinds: dict[str, type[Decoder]] = {"bpmux": BpmuxDecoder, "relink": RelinkDecoder}
    return msgspec.msgpack.decode(dumped, type=kinds[protocol])


def decode_batches(
    batches: Iterable[pa.RecordBatch], protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]
) -> Iterator[pa.RecordBatch]:
    """Decode raw rows into rows of frames; all rows of a connection must be adjacent and in order.

    Memory holds one decoder and one batch of output, however long the connections are.
    """
    rows: list[FramesRow] = []
    current: tuple[str, str] | None = None
    one: Decoder | None = None
    number = 0
    for batch in batches:
        names = ("capture", "connection", "direction", "segment", "offset", "data")
        columns = [batch.column(name).to_pylist() for name in names]
        times = batch.column("time").cast("int64").to_pylist()
        for micros, capture, connection, direction, segment, offset, data in zip(times, *columns, strict=True):
            if one is None or (capture, connection) != current:
                current, number = (capture, connection), 0
                one = decoder(protocol, engine=engine, **end)
            for found in one.feed(direction, data, segment=segment, offset=offset):
                rows.append((micros / 1e6, capture, connection, number, *found))
                number += 1
            if len(rows) >= ROWS:
                yield to_batch("frames", rows)
                rows = []
    if rows:
        yield to_batch("frames", rows)


def read_raw(folder: str | Path, selection: Selection | None = None) -> Iterator[pa.RecordBatch]:
    """Read the raw rows below a capture's folder, in the order that `decode_batches` needs.

    DuckDB sorts them, on the disk if they do not fit into memory.
    """
    wanted = selection or Selection()
    with database() as connection:
        connection.register("found", wanted.open(folder).rows("raw", wanted))
        ordered = connection.sql("SELECT * FROM found ORDER BY capture, connection, number")
        yield from ordered.to_arrow_reader(ROWS)


def decode(
    raw: DataFrame, protocol: str, *, engine: bool = False, partitions: int | None = None, **end: Unpack[RelinkEnd]
) -> DataFrame:
    """Decode raw captures, read from their `raw` folders with `spark.read.parquet`.

    With `engine` (bpmux only) real engines find the rules that peers broke. `partitions` is how many tasks share
    the connections; one connection is never split.
    """
    by_connection = raw.repartition(partitions, *KEYS) if partitions is not None else raw.repartition(*KEYS)
    function = partial(decode_batches, protocol=protocol, engine=engine, **end)
    return by_connection.sortWithinPartitions(*KEYS, "number").mapInArrow(function, FRAMES_DDL)


def decode_stream(raw: DataFrame, protocol: str, **end: Unpack[RelinkEnd]) -> DataFrame:
    """Decode a stream of raw captures (`spark.readStream.schema(…).parquet(…)`), without real engines.

    A frame that a micro-batch ends within waits in Spark's state for the rest. Files must arrive in the order in which
    their capture closed them; otherwise a `gap` is reported and the connection is decoded no further.
    """
    function = partial(_go_on, protocol=protocol, **end)
    return raw.groupBy(*KEYS).applyInPandasWithState(
        function, FRAMES_DDL, "decoder binary, number bigint", "append", "NoTimeout"
    )


def _go_on(
    key: tuple[str, str], frames: Iterator[pd.DataFrame], state: GroupState, *, protocol: str, **end: Unpack[RelinkEnd]
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    one = decoder(protocol, **end)
    number = 0
    if state.exists:
        dumped, number = state.get
        one = restore(protocol, bytes(dumped))
    came = pd.concat(list(frames)).sort_values("number")
    rows: list[tuple[object, ...]] = []
    columns = (came[name] for name in ("time", "direction", "segment", "offset", "data"))
    for moment, direction, segment, offset, data in zip(*columns, strict=True):
        for found in one.feed(direction, bytes(data), segment=int(segment), offset=int(offset)):
            rows.append((moment, *key, number, *found))
            number += 1
    state.update((one.dump(), number))
    told = pd.DataFrame(rows, columns=FRAMES.names)
    for name in ("size", "credit", "id"):
        told[name] = told[name].astype("Int64")
    yield told
