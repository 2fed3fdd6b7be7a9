"""Properties of connections under random commands, random bytes and random splits."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muxkit._limits import Limits
from muxkit.core import encode_varu64
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Config, Engine
from muxkit.protocols.bpmux.entities import Kind
from muxkit.testing._pair import EngineCase, check_every_split, check_stream_engine, drain, feed, one_by_one
from tests.protocols.bpmux._helpers import automatic, by_hand, fed, grant, state_of, the, told
from tests.protocols.bpmux._world import TIGHT, World
from tests.protocols.bpmux.test_observer import Diary

if TYPE_CHECKING:
    from muxkit._observer import Observer

ROOMY = Limits(
    channel_bytes=300_000, channel_floor=1, connection_bytes=1_000_000, message=150_000, reassembly=160_000, channels=5,
    resets_burst=1_000_000,
)  # fmt: skip
POOR = Limits(
    channel_bytes=100,
    channel_floor=1,
    connection_bytes=100,
    message=200_000,
    reassembly=200_000,
    resets_burst=1_000_000,
)
STARVED = Limits(
    channel_bytes=1, channel_floor=1, connection_bytes=1, message=40, reassembly=40, resets_burst=1_000_000
)


@pytest.mark.clause("bpmux-T01", "bpmux-T02", "bpmux-S02", "bpmux-G13")
@pytest.mark.requirement("R-22", "R-32", "R-33", "R-44")
@pytest.mark.seeds(10, soak=2500)
@pytest.mark.parametrize("limits", [TIGHT, ROOMY, POOR, STARVED], ids=["tight", "roomy", "poor", "starved"])
def test_a_random_life_keeps_the_books_and_loses_nothing(seed: int, limits: Limits) -> None:
    """Run ten thousand calls: credit is conserved, order is kept, nothing is lost, and nothing is left at the end."""
    world = World(seed, limits)
    for _ in range(250):
        world.act()
        world.check()
    world.close()
    assert world.done > 0


@pytest.mark.requirement("R-21")
def test_random_bytes_are_at_most_one_failure() -> None:
    _survive(random.Random(2), 20_000)


@pytest.mark.soak
@pytest.mark.requirement("R-21")
@pytest.mark.seeds(1, soak=50)
def test_a_million_random_inputs_are_at_most_one_failure_each(seed: int) -> None:
    _survive(random.Random(1000 + seed), 20_000)


def _survive(dice: random.Random, count: int) -> None:
    for _ in range(count):
        engine = by_hand()
        engine.top_stream.give_credit(30)
        data = _nearly_right(dice) if dice.random() < 0.7 else dice.randbytes(dice.randrange(1, 80))
        cut = dice.randrange(len(data) + 1)
        events = feed(engine, [data[:cut], data[cut:]])
        failures = [index for index, event in enumerate(events) if isinstance(event, Failed)]
        assert failures in ([], [len(events) - 1])
        assert engine.over == bool(failures)
        drain(engine)


def _nearly_right(dice: random.Random) -> bytes:
    """Generate chunks with random flags and small numbers; many are legal."""
    data = bytearray()
    for _ in range(dice.randrange(1, 8)):
        tag = dice.choice((0x10, 0x50, 0x90, 0xD0, 0x70, 0x60, 0x64, 0xA8, 0xE0, dice.randrange(256)))
        data.append(tag)
        if tag >= 0xE0:
            data += dice.randrange(1, 1 << 8 * ((tag & 7) + 1)).to_bytes((tag & 7) + 1)
            continue
        data.append(dice.choice((0, 1, 1, 1, 2, 2, 7)))
        for flag in (0x10, 0x02):
            if flag == 0x02 and tag & 0x08:
                data += encode_varu64(dice.choice((0, 1, 200, 300, 2**64 - 1)))
            if tag & flag:
                size = dice.choice((0, 0, 1, 3))
                data += bytes([size]) + bytes(size)
    return bytes(data)


def streams(*, observer: Observer | None = None) -> Engine:
    """Make an engine with two streams of the peer and a local one, little credit and small messages only."""
    config, limits = Config(grants=False, keepalive=None), Limits(message=50, reassembly=50)
    engine = Engine(config, limits=limits, observer=observer)
    engine.top_stream.give_credit(200)
    fed(engine, "50 01 00", "50 f9 01 00 00")
    for id in (1, 256):
        engine.entities(Kind.STREAM_IN)[id].give_credit(120)
    engine.open_stream(id=2, credit=70)
    drain(engine)
    return engine


CHANNELS = st.sampled_from([b"\x50\x01", b"\x50\x01", b"\x50\xf9\x01\x00", b"\x70\x02", b"\x70\x00", b"\x50\xf8\x01"])
PAYLOADS = st.one_of(st.integers(0, 20), st.sampled_from([48, 49, 50, 51, 248])).map(
    lambda n: encode_varu64(n) + bytes(n)
)
OTHERS = st.sampled_from([b"\x64\x00", b"\x60\x00", b"\xe0\x05", b"\x50\x09\x00", b"\x42\x01\x00", b"\x70\x02\xf8\x05"])
RUNS = st.lists(st.one_of(st.tuples(CHANNELS, PAYLOADS).map(b"".join), OTHERS), max_size=25).map(b"".join)


@pytest.mark.clause("bpmux-G13")
@given(RUNS)
def test_the_short_way_for_payloads_gives_what_the_long_way_gives(data: bytes) -> None:
    """Fed byte by byte, every chunk takes the general path."""
    whole, bytewise = streams(), streams()
    events = [told(event) for event in one_by_one(feed(whole, [data]))]
    assert events == [told(event) for event in feed(bytewise, [data[i : i + 1] for i in range(len(data))])]
    assert state_of(whole) == state_of(bytewise)
    assert drain(whole) == drain(bytewise)


def duplexes(*, observer: Observer | None = None) -> Engine:
    """Make an engine with a duplex of its own, one of the peer, a request each way, and some of them ended."""
    engine = by_hand(observer=observer)
    grant(engine, "in-stream 0", 100)
    engine.top_stream.give_credit(200)
    for id in (2, 255, 256):
        engine.open_duplex(id=id)
    engine.open_request(id=3, credit=9)
    fed(engine, "d0 01 00", "d0 f9 01 00 00", "10 07 00")
    the(engine, Kind.SINK_OUT, 2).end()
    the(engine, Kind.STREAM_IN, 1).end()
    drain(engine)
    the(engine, Kind.SINK_IN, 1).end()  # not written yet
    return engine


def controls(flags: int) -> st.SearchStrategy[bytes]:
    """Generate chunks with these flags about what `duplexes` has, and about what it has not."""
    tags = st.sampled_from([type << 5 | flags for type in range(7)])
    ids = st.sampled_from(["01", "02", "02", "03", "07", "00", "09", "f8 ff", "f9 01 00", "f8 02", "f9 00 ff"])
    numbers = st.sampled_from(["00", "00", "05", "f7", "f8 f8", "f8 05", "fc 01 00 00 00 00", "f9 01 00", "ff" * 9])
    return st.tuples(tags, ids, numbers).map(
        lambda chunk: bytes([chunk[0]]) + bytes.fromhex(chunk[1] + (chunk[2] if flags & 0x0A else ""))
    )


CONTROL = st.lists(st.one_of(controls(0x08), controls(0x02), controls(0x01), OTHERS), max_size=8).map(b"".join)


@pytest.mark.clause("bpmux-G12", "bpmux-G13")
@pytest.mark.requirement("R-20")
@given(CONTROL, st.integers(0, 40))
@example(bytes.fromhex("a8 f8 ff" + "ff" * 9 + "a8 f8 ff 01"), 0)  # credit of 2^64
@example(bytes.fromhex("c8 01 05"), 0)  # a duplex chunk about a known entity
def test_the_short_way_for_credit_and_ends_gives_what_the_long_way_gives(data: bytes, cut: int) -> None:
    """Under the eyes of an observer every chunk takes the general path."""
    short, general = duplexes(), duplexes(observer=Diary())
    pieces = [data[:cut], data[cut:]]
    assert [*map(told, one_by_one(feed(short, pieces)))] == [*map(told, one_by_one(feed(general, pieces)))]
    assert state_of(short) == state_of(general)
    assert drain(short) == drain(general)


def test_messages_are_joined_only_where_they_come_one_behind_the_other() -> None:
    engine = streams()
    data = "50 01 01 61  50 01 01 62  70 02 01 63  50 01 01 64  64 00  50 01 01 65  50 01 02 66 67" + "64 00" * 10
    assert [one for one in fed(engine, data) if one[0] != "Pinged"] == [
        ("Received", "in-stream 1", b"a", b"b"),
        ("Received", "out-stream 2", b"c"),
        ("Received", "in-stream 1", b"d"),
        ("Received", "in-stream 1", b"e", b"fg"),
    ]


def test_no_more_messages_are_joined_than_may_be_parsed_at_once() -> None:
    engine = streams()
    engine.frames_at_once = 3
    assert [told(event) for event in engine.receive_bytes(bytes.fromhex("50 01 00" * 20), 0.0)] == [
        ("Received", "in-stream 1", b"", b"", b"")
    ]
    assert engine.unparsed == 17 * 3


STRANGE = {
    "an id in two bytes that needs one": "50 f8 01 00",
    "an id in three bytes that needs two": "50 f9 00 f8 00",
    "an id in more bytes": "50 fa 01 00 00 00",
    "a length in two bytes that needs one": "50 01 f8 01 61",
    "a length of 2^32": "50 01 fc 01 00 00 00 00",
    "a message above the limit": "50 01 33" + "00" * 51,
    "an id in two bytes": "50 f8 f8 00",
}


@pytest.mark.clause("bpmux-G12", "bpmux-G13")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("chunk", STRANGE.values(), ids=STRANGE)
def test_the_short_way_leaves_what_is_strange_to_the_long_way(chunk: str) -> None:
    data = bytes.fromhex("50 01 01 61" + chunk + "50 01 01 62" * 5)
    check_every_split(streams, data, normalise=told)


TRANSCRIPTS = [
    "50 09 00 50 09 02 68 69 44 09 42 09 01 21",
    "10 01 03 61 62 63 d8 03 01 64 0a 98 05 00 07 82 05 00",
    "e0 05 50 09 02 68 65 64 00 50 09 03 6c 6c 6f 50 09 00 50 09 12 000102030405060708090a0b0c0d0e0f1011",
    "a8 00 f9 01 2c 70 00 02 79 6f 62 00 00 a2 00 00",
    "e1 01 00 d0 03 01 00 e0 01 70 00 01 61",
]


@pytest.mark.clause("bpmux-G13")
@pytest.mark.parametrize("transcript", TRANSCRIPTS)
def test_any_cut_gives_the_same_events_and_answers(transcript: str) -> None:
    check_every_split(automatic, bytes.fromhex(transcript), normalise=told)


@pytest.mark.requirement("R-06", "R-21")
def test_the_engine_keeps_what_every_engine_promises() -> None:
    check_stream_engine(
        EngineCase(
            make=Engine,
            is_failure=lambda event: isinstance(event, Failed),
            normalise=told,
            transcripts=[bytes.fromhex(transcript) for transcript in TRANSCRIPTS],
            question=bytes.fromhex("64 00"),
        )
    )


@pytest.mark.requirement("R-21")
def test_the_engine_keeps_its_promises_by_the_letter_and_when_acknowledging() -> None:
    check_stream_engine(
        EngineCase(
            make=lambda: automatic(letter=True),
            is_failure=lambda event: isinstance(event, Failed),
            normalise=told,
            transcripts=[bytes.fromhex("50 09 00 50 09 02 68 69 44 09 42 09 01 21")],
            preface=bytes.fromhex("50 09 00"),
            question=bytes.fromhex("44 09"),
        ),
        seed=7,
    )
