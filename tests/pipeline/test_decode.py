"""Decoding of recorded bytes, in pieces of any size, and the violations that it finds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from muxkit.pipeline import decode_batches, decoder
from muxkit.pipeline.capture.decoding import BpmuxDecoder, read_raw, restore
from muxkit.pipeline.capture.files import to_batch
from muxkit.protocols import bpmux
from muxkit.testing import EnginePair
from tests.pipeline._captures import record_sessions, rows_of
from tests.protocols.bpmux import _world

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit import Limits
    from muxkit._observer import Direction
    from muxkit.core import Buffer
    from muxkit.pipeline.capture.decoding import Decoder
    from muxkit.pipeline.capture.files import Found, RawRow

Recording = list[tuple["Direction", bytes]]


def decoded(one: Decoder, recording: Recording) -> list[Found]:
    return [found for direction, data in recording for found in one.feed(direction, data)]


def frames(found: list[Found], direction: str) -> list[tuple[object, ...]]:
    """Channel, kind and size of each."""
    return [row[2:5] for row in found if row[0] == "frame" and row[1] == direction]


def errors(found: list[Found]) -> list[Found]:
    return [row for row in found if row[0] == "error"]


# ---------------------------------------------------------------------------- bpmux


@pytest.mark.parametrize("engine", [False, True], ids=["cut", "engine"])
async def test_decoded_bytes_say_what_the_observer_was_told_live(tmp_path: Path, engine: bool) -> None:
    await record_sessions(tmp_path)
    live = rows_of(tmp_path)
    told = [row for batch in decode_batches(read_raw(tmp_path), "bpmux", engine=engine) for row in batch.to_pylist()]
    for connection in ("one", "other"):
        for direction in ("in", "out"):
            here, there = (
                [
                    (row["channel"], row["kind"], row["size"])
                    for row in rows
                    if (row["event"], row["connection"], row["direction"]) == ("frame", connection, direction)
                ]
                for rows in (live, told)
            )
            assert here == there
            assert len(here) > 50
        granted, found = (
            [(row["channel"], row["credit"]) for row in rows if (row["event"], row["direction"]) == ("credit", "in")]
            for rows in (live, told)
        )
        assert granted == found
    assert not [row for row in told if row["event"] == "error"]


async def test_with_an_engine_states_are_told_as_they_were_live(tmp_path: Path) -> None:
    await record_sessions(tmp_path)
    told = [row for batch in decode_batches(read_raw(tmp_path), "bpmux", engine=True) for row in batch.to_pylist()]
    for connection in ("one", "other"):
        states = [
            sorted(
                (row["channel"], row["kind"])
                for row in rows
                if (row["event"], row["connection"]) == ("state", connection)
            )
            for rows in (rows_of(tmp_path), told)
        ]
        assert states[0] == states[1] != []


class Recorded:
    """An engine that keeps what it reads and writes, and what it tells its observer.

    It stands before the engine, whose class has no subclasses where it is compiled.
    """

    def __init__(self, config: bpmux.Config | None = None, *, limits: Limits | None = None) -> None:
        self.recording: Recording = []
        self.told: list[tuple[object, ...]] = []
        self.engine = bpmux.Engine(config, limits=limits, observer=self)

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        buffers = self.engine.buffers_to_send(limit)
        if buffers:
            self.recording.append(("out", b"".join(buffers)))
        return buffers

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.told.append((direction, channel, name, size))

    def credit(self, direction: Direction, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self.recording.append((direction, bytes(data)))


def live_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """A random life of a connection, both ends of it recorded."""
    monkeypatch.setattr(_world, "Engine", Recorded)
    world = _world.World(seed)
    for _ in range(150):
        world.act()
    world.close()
    return [engine for engine in cast("list[object]", world.engines) if isinstance(engine, Recorded)]


@pytest.mark.parametrize("engine", [False, True], ids=["cut", "engine"])
@pytest.mark.seeds(15, soak=1500)
def test_any_life_of_a_connection_is_decoded_and_found_right(
    seed: int, engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recorded in live_world(seed, monkeypatch):
        found = decoded(decoder("bpmux", engine=engine), recorded.recording)
        assert not errors(found)
        for direction in ("in", "out"):
            assert frames(found, direction) == [one[1:] for one in recorded.told if one[0] == direction]


@pytest.mark.seeds(5, soak=200)
def test_the_pieces_that_bytes_come_in_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    recording = live_world(seed, monkeypatch)[0].recording
    whole = decoded(decoder("bpmux"), recording)
    pieces: Recording = []
    for direction, data in recording:
        while data:
            size = dice.choice((1, 2, 7, 50, len(data)))
            pieces.append((direction, data[:size]))
            data = data[size:]
    assert decoded(decoder("bpmux"), pieces) == whole


@pytest.mark.seeds(3, soak=100)
def test_a_decoder_that_is_kept_as_bytes_goes_on_as_if_nothing_was(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    recording = live_world(seed, monkeypatch)[0].recording
    one, found = decoder("bpmux"), list[Any]()
    for direction, data in recording:
        cut = dice.randint(0, len(data))
        for piece in (data[:cut], data[cut:]):
            found += one.feed(direction, piece)
            one = restore("bpmux", one.dump())
    assert found == decoded(decoder("bpmux"), recording)


def test_an_engine_cannot_be_kept_as_bytes() -> None:
    with pytest.raises(TypeError, match="without one"):
        decoder("bpmux", engine=True).dump()


def test_a_message_in_many_pieces_is_joined_once() -> None:
    one = BpmuxDecoder()
    chunk = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, bytes(10_000)))
    for at in range(0, len(chunk) - 1, 10):
        assert one.feed("in", chunk[at : min(at + 10, len(chunk) - 1)]) == []
    assert len(one.halves["in"].held) > 900
    assert frames(one.feed("in", chunk[-1:]), "in") == [("in-stream 5", "payload", 10_000)]


def greeted() -> tuple[bpmux.Engine, bpmux.Engine, Recording]:
    """Two ends, and what the first one has recorded by the time that a sink of the other is open."""
    recorded, other = Recorded(), bpmux.Engine()
    one = cast("bpmux.Engine", recorded)
    pair: EnginePair[bpmux.Engine, bpmux.Event] = EnginePair(one, other)
    pair.run_until_quiet()
    other.open_sink(b"hello", id=9)
    pair.run_until_quiet()
    return one, other, recorded.recording


@pytest.mark.requirement("R-71")
def test_an_engine_knows_of_credit_that_was_granted_between_the_pieces_of_a_message() -> None:
    """Was: Decoding a capture with an engine blamed the peer for an end payload whose credit was granted between the
    pieces of a message.
    """

    def chunk(type: bpmux.Type, **fields: Any) -> bytes:
        return bpmux.encode_chunk(bpmux.Chunk(type, 3, **fields))

    recording: Recording = [
        ("out", chunk(bpmux.Type.OUT_SINK, payload=b"")),
        ("in", chunk(bpmux.Type.IN_STREAM, credit=10)),
        ("out", bpmux.encode_partial(100) + chunk(bpmux.Type.OUT_SINK, payload=bytes(10))),
        ("out", chunk(bpmux.Type.OUT_SINK, credit=3)),
        ("in", chunk(bpmux.Type.IN_STREAM, end=b"why")),
    ]
    found = decoded(decoder("bpmux", engine=True), recording)
    assert not errors(found)
    assert frames(found, "in") == [("out-sink 3", "credit", 0), ("out-sink 3", "end", 3)]


@pytest.mark.clause("bpmux-R29")
def test_an_engine_finds_what_the_peer_must_not_do_with_its_clause() -> None:
    _, _, recording = greeted()
    end = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 9, end=bytes(140_000)))
    before = sum(len(data) for direction, data in recording if direction == "in")
    recording.append(("in", end))
    (found,) = errors(decoded(decoder("bpmux", engine=True), recording))
    assert found[3] == "RemoteProtocolError"
    assert found[7] == "bpmux-R29"
    assert found[6] == before
    assert "140000" in str(found[8])
    assert not errors(decoded(decoder("bpmux"), recording)), "that takes an engine"


@pytest.mark.clause("bpmux-G12")
@pytest.mark.parametrize("engine", [False, True], ids=["cut", "engine"])
def test_what_no_chunk_may_be_is_found_with_its_clause_and_its_byte(engine: bool) -> None:
    _, _, recording = greeted()
    before = sum(len(data) for direction, data in recording if direction == "in")
    recording += [("in", bytes.fromhex("50 f8 05 00")), ("in", b"more")]
    (found,) = errors(decoded(decoder("bpmux", engine=engine), recording))
    assert (found[7], found[6]) == ("bpmux-G12", before)


def test_with_an_engine_a_recording_that_begins_in_the_middle_is_said_to_be_one() -> None:
    one, _, recording = greeted()
    begins = len(recording)
    one.open_sink(b"", id=3)
    b"".join(one.buffers_to_send())
    later = [*recording[begins:], ("out", bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.IN_SINK, 77, b"x")))]
    told = decoded(decoder("bpmux", engine=True), later)
    (found,) = [row for row in told if row[0] == "unverified"]
    assert errors(told) == [], "the peer broke no rule"
    assert "without an engine" in str(found[8])


def test_a_gap_is_told_and_nothing_is_guessed_behind_it() -> None:
    chunk = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, b"12345"))
    one = decoder("bpmux")
    assert len(one.feed("in", chunk, offset=0)) == 1
    (gap,) = one.feed("in", chunk, offset=3 * len(chunk))
    assert (gap[0], gap[1], gap[4], gap[6]) == ("gap", "in", 2 * len(chunk), 3 * len(chunk))
    assert f"{2 * len(chunk)} bytes before byte {3 * len(chunk)}" in str(gap[8])
    assert one.feed("in", chunk, offset=4 * len(chunk)) == []
    assert len(one.feed("in", chunk, segment=1, offset=0)) == 1


def stream_of(sizes: list[int], seed: int) -> list[bytes]:
    """Chunks of three channels with random payload."""
    dice = random.Random(seed)
    types = [(bpmux.Type.OUT_SINK, 5), (bpmux.Type.IN_STREAM, 300), (bpmux.Type.OUT_REQUEST, 0)]
    return [
        bpmux.encode_chunk(bpmux.Chunk(*types[number % 3], dice.randbytes(size))) for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("read", [50, 700, 100_000])
@pytest.mark.parametrize("seed", range(5))
def test_decoding_goes_on_behind_a_gap_where_chunks_of_known_channels_follow_each_other(seed: int, read: int) -> None:
    chunks = stream_of([random.Random(seed).randrange(600) for _ in range(200)], seed)
    wire = b"".join(chunks)
    before, after = len(b"".join(chunks[:50])) + 7, len(b"".join(chunks[:120])) - 9  # both within a chunk
    one = decoder("bpmux")
    found = one.feed("in", wire[:before], offset=0)
    for at in range(after, len(wire), read):
        found += one.feed("in", wire[at : at + read], offset=at)
    assert [row[0] for row in found].count("gap") == 1
    assert not errors(found)
    (again,) = [row for row in found if row[0] == "found"]
    assert (again[4], again[6]) == (9, after + 9), "the rest of a chunk was passed over, and no more"
    sizes = [row[4] for row in found if row[3] == "payload"]
    assert sizes == [row[4] for row in decoder("bpmux").feed("in", b"".join(chunks[:50] + chunks[120:]))]


def test_a_second_gap_while_chunks_are_looked_for_is_told_as_well() -> None:
    chunks = stream_of([100] * 40, 1)
    size = [len(b"".join(chunks[:number])) for number in range(41)]
    one = decoder("bpmux")
    found = one.feed("in", b"".join(chunks[:10]), offset=0)
    found += one.feed("in", b"".join(chunks[20:22]), offset=size[20])
    found += one.feed("in", b"".join(chunks[30:]), offset=size[30])
    assert [(row[0], row[4]) for row in found if row[0] != "frame"] == [
        ("gap", size[20] - size[10]),
        ("gap", size[30] - size[22]),
        ("found", 0),
    ]
    assert [row[3] for row in found].count("payload") == 20


def test_bytes_of_another_protocol_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'restream'"):
        decoder("restream")
    with pytest.raises(ValueError, match="goes with 'bpmux', not with 'e3x'"):
        decoder("e3x", engine=True)


# ---------------------------------------------------------------------------- Arrow


def test_each_connection_has_a_decoder_of_its_own() -> None:
    half = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, b"12345"))
    rows: list[RawRow] = [
        (1.5, "c", "a", 0, "in", 0, 0, half[:3]),
        (2.5, "c", "b", 0, "in", 0, 0, half),
        (3.5, "d", "b", 0, "in", 0, 0, half),
    ]
    told = [row for batch in decode_batches([to_batch("raw", rows)], "bpmux") for row in batch.to_pylist()]
    assert [(row["capture"], row["connection"], row["number"], row["size"]) for row in told] == [
        ("c", "b", 0, 5), ("d", "b", 0, 5),
    ]  # fmt: skip
    assert told[0]["time"].timestamp() == 2.5


def test_batches_of_frames_go_out_before_all_bytes_are_read() -> None:
    chunk = bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, 5, b"1")) * 20_000
    row: RawRow = (1.0, "c", "a", 0, "in", 0, 0, chunk)
    read = 0

    def batches() -> Any:  # noqa: ANN401  # what decode_batches takes
        nonlocal read
        for place in range(3):
            read += 1
            yield to_batch("raw", [(*row[:6], place * len(chunk), chunk)])

    told = decode_batches(batches(), "bpmux")
    assert next(told).num_rows == 20_000
    assert read == 1
    assert sum(batch.num_rows for batch in told) == 40_000
