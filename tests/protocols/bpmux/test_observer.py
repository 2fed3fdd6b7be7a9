"""What an observer of an engine receives: every chunk in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._limits import Limits
from muxkit.protocols.bpmux import Config, Engine, Event, Kind
from muxkit.testing._pair import EnginePair
from tests.protocols.bpmux._helpers import fed, the, violation, written

if TYPE_CHECKING:
    from muxkit._observer import Direction


class Diary:
    """An observer that records every call."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.credits: list[str] = []
        self.states: list[str] = []
        self.timers: list[str] = []
        self.errors: list[BaseException] = []
        self.bytes = 0

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.frames.append(f"{direction} {channel} {name} {size}")

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self.credits.append(f"{direction} {channel} {amount}")

    def state(self, channel: str, state: str) -> None:
        self.states.append(f"{channel} {state}")

    def timer(self, name: str) -> None:
        self.timers.append(name)

    def error(self, error: BaseException) -> None:
        self.errors.append(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        assert direction == "in"
        self.bytes += len(data)


def watched(*, grants: bool = False, keepalive: float | None = None) -> tuple[Engine, Diary]:
    diary = Diary()
    return Engine(Config(grants=grants, keepalive=keepalive), limits=Limits(channel_bytes=5000), observer=diary), diary


def test_every_part_of_a_chunk_that_comes_is_told() -> None:
    engine, diary = watched()
    engine.open_stream(id=5, credit=10)
    written(engine)
    diary.frames.clear()
    fed(engine, "64 00", "60 00", "7a 05 02 68 69 07 01 78", "50 09 00")
    assert diary.frames == [
        "in top-level in-stream ping 0",
        "in top-level in-stream pong 0",
        "in out-stream 5 payload 2",
        "in out-stream 5 credit 0",
        "in out-stream 5 end 1",
        "in in-stream 9 payload 0",
    ]
    assert diary.bytes == 15


def test_payloads_on_the_short_way_are_told_as_well() -> None:
    engine, diary = watched(grants=True)
    fed(engine, "50 09 00" + "50 09 02 68 69" * 10)
    assert diary.frames == ["in in-stream 9 payload 0", *["in in-stream 9 payload 2"] * 10]


def test_messages_in_parts_and_ends_are_told() -> None:
    engine, diary = watched()
    fed(engine, "98 09 00 01")
    sink = the(engine, Kind.SINK_IN, 9)
    sink.give_credit(2)
    sink.send(b"ab")
    written(engine)
    sink.end()
    fed(engine, "88 09 05", "e0 02 84 09")
    written(engine)
    fed(engine, "81 09")
    assert diary.frames == [
        "in in-sink 9 payload 0",
        "in in-sink 9 credit 0",
        "out in-sink 9 credit 0",
        "out in-sink 9 partial 0",
        "out in-sink 9 payload 1",
        "in in-sink 9 credit 0",
        "in in-sink 9 partial 0",
        "in in-sink 9 ping 0",
        "out in-sink 9 pong 0",
        "out in-sink 9 payload 1",
        "out in-sink 9 end 0",
        "in in-sink 9 ack-end 0",
    ]
    assert diary.credits == ["in in-sink 9 1", "out in-sink 9 2", "in in-sink 9 5"]
    assert diary.states == ["in-sink 9 open", "in-sink 9 gone"]


def test_credit_that_is_granted_is_told_also_when_it_travels_with_an_opening() -> None:
    engine, diary = watched(grants=True)
    engine.open_stream(id=3)
    engine.open_request(id=4, credit=7)
    engine.open_sink(id=5)
    assert diary.credits == ["out top-level in-stream 5000", "out out-stream 3 5000", "out out-request 4 7"]


def test_what_one_side_writes_is_what_the_other_reads() -> None:
    diaries = (Diary(), Diary())
    engines = [Engine(observer=diary) for diary in diaries]
    pair: EnginePair[Engine, Event] = EnginePair(*engines)
    pair.run_until_quiet()
    sink, _ = engines[0].open_duplex(b"hello")
    pair.run_until_quiet()
    sink.send(b"x" * 300_000)
    sink.ping()
    sink.end()
    pair.run_until_quiet()
    for side in (0, 1):
        sent = [frame.split()[-2:] for frame in diaries[side].frames if frame.startswith("out")]
        came = [frame.split()[-2:] for frame in diaries[1 - side].frames if frame.startswith("in")]
        assert sent == came
        assert sent
        assert diaries[1 - side].bytes == len(pair.sent[side])


def test_timers_and_errors_are_told() -> None:
    engine, diary = watched(keepalive=5.0)
    engine.handle_deadline(0.0)
    engine.handle_deadline(5.0)
    assert diary.timers == ["keepalive"]
    engine.events()
    error = violation(engine, "30 09 00")
    assert diary.errors == [error]


def test_a_hang_up_is_no_error() -> None:
    engine, diary = watched()
    engine.receive_eof(0.0)
    assert diary.errors == []
