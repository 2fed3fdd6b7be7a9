"""Two engines and nothing else: a link in memory, a clock that is a number, and what every engine has promised.

    pair = EnginePair(Engine(), Engine(), latency=0.05)
    pair.engines[0].open_sink(b"hello")
    pair.run_until_quiet()
    assert pair.events[1] == [...]

Knows no protocol and no Trio.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import attrs

from muxkit.core import BoundedParsing, Engine, StreamEngine
from muxkit.core.events import Received

EventT = TypeVar("EventT")
EngineT = TypeVar("EngineT", bound="StreamEngine[object]")

MOST_STEPS = 1_000_000  # after so many a pair that is not quiet never will be
PULL = 256 * 1024  # bytes to take out of an engine at once
SMALL_PULLS = (1, 64, 1024, 65_536)  # what a random writer asks for
ASKED = 20_000  # times to repeat what asks for an answer
HELD_MOST = 64 * 1024  # bytes that an engine may hold because of it


class EnginePair(Generic[EngineT, EventT]):
    """Two engines joined by two byte pipes. Sides are 0 and 1; `events[side]` is all that the engine there told.

    With `weather`, pulls are of random sizes and what is in flight arrives in random pieces. A `listener` is called
    with (side, event) for each event as it happens, and may give commands to the engine.
    """

    def __init__(
        self,
        one: EngineT,
        other: EngineT,
        *,
        latency: float = 0.0,
        weather: random.Random | None = None,
        listener: Callable[[int, EventT], None] | None = None,
        now: float = 0.0,
    ) -> None:
        self.engines: tuple[EngineT, EngineT] = (one, other)
        self.latency = latency
        self.weather = weather
        self.now: float = now
        self.events: tuple[list[EventT], list[EventT]] = ([], [])
        self.sent: tuple[bytearray, bytearray] = (bytearray(), bytearray())  # all bytes that left each side
        self._listener = listener
        # What goes to each side: (when it arrives, bytes), None for the end.
        self._flying: tuple[deque[tuple[float, bytes | None]], ...] = (deque(), deque())

    # --- moving on

    def step(self) -> bool:
        """Let happen what is due at this moment, once; gives whether anything did."""
        moved = False
        for side in (0, 1):
            moved |= self._handle_deadline(side)
            moved |= self._pull(side)
        for side in (0, 1):
            moved |= self._deliver(side)
        return moved

    def run_until_quiet(self) -> None:
        """Go on until nothing is on its way; the clock moves only as far as the link needs."""
        for _ in range(MOST_STEPS):
            if not self.step():
                arrival = self._next_arrival()
                if arrival == math.inf:
                    return
                self._move_clock(arrival)
        raise AssertionError(f"the engines are not quiet after {MOST_STEPS} steps")

    def run_for(self, seconds: float) -> None:
        """Let so much time pass, with every deadline and every arrival at its exact moment."""
        end = self.now + seconds
        for _ in range(MOST_STEPS):
            if not self.step():
                self._move_clock(min(end, self._next_arrival()))
                if self.now >= end and not self.step():
                    return
        raise AssertionError(f"the engines are busy at one moment for more than {MOST_STEPS} steps")

    def jump(self, seconds: float) -> None:
        """The clock goes on and nothing else happens, as when a laptop sleeps."""
        self.now += seconds

    def hang_up(self, side: int) -> None:
        """This side writes nothing more; the other hears it after what is under way."""
        self._flying[1 - side].append((self.now + self.latency, None))

    # --- looking

    def in_flight(self, side: int) -> bytes:
        """What is on its way to this side."""
        return b"".join(data for _, data in self._flying[side] if data is not None)

    def take_events(self, side: int) -> list[EventT]:
        """The events of this side since the last call."""
        taken = self.events[side].copy()
        self.events[side].clear()
        return taken

    # --- inside

    def _handle_deadline(self, side: int) -> bool:
        due = self.engines[side].next_deadline()
        if due is None or due > self.now:
            return False
        returned = self.engines[side].handle_deadline(self.now)
        self._collect(side, returned)
        return True

    def _pull(self, side: int) -> bool:
        engine = self.engines[side]
        if not engine.has_output():
            return False
        limit = PULL if self.weather is None else self.weather.choice(SMALL_PULLS)
        data = b"".join(engine.buffers_to_send(limit))
        if data:
            self.sent[side].extend(data)
            self._flying[1 - side].append((self.now + self.latency, data))
        self._collect(side)
        return True

    def _deliver(self, side: int) -> bool:
        flying = self._flying[side]
        if not flying or flying[0][0] > self.now:
            return False
        when, data = flying.popleft()
        returned: Sequence[object] | None
        if data is None:
            returned = self.engines[side].receive_eof(self.now)
        else:
            if self.weather is not None and len(data) > 1 and self.weather.random() < 0.5:
                cut = self.weather.randrange(1, len(data))
                flying.appendleft((when, data[cut:]))
                data = data[:cut]
            returned = self.engines[side].receive_bytes(data, self.now)
        self._collect(side, returned)
        return True

    def _collect(self, side: int, returned: Sequence[object] | None = None) -> None:
        # The type of an engine's events cannot be asked for; the caller that names both types is responsible.
        for event in cast("Sequence[EventT]", all_events(self.engines[side], returned)):
            self.events[side].append(event)
            if self._listener is not None:
                self._listener(side, event)

    def _next_arrival(self) -> float:
        return min((flying[0][0] for flying in self._flying if flying), default=math.inf)

    def _move_clock(self, moment: float) -> None:
        """To that moment, or to the first deadline on the way."""
        due = [due for engine in self.engines if (due := engine.next_deadline()) is not None]
        self.now = max(self.now, min([moment, *due]))


def require(condition: object, sentence: str) -> None:
    """Fail with a sentence, under any test runner, if the condition is false."""
    if not condition:
        raise AssertionError(sentence)


# ---------------------------------------------------------------------------- one engine, fed by hand


def all_events(engine: Engine[EventT], returned: Sequence[EventT] | None) -> list[EventT]:
    """Return the events that a call of the engine returned, and those that it has besides."""
    return [*(returned or ()), *engine.events()]


def feed(engine: StreamEngine[EventT], pieces: Iterable[bytes], *, now: float = 0.0) -> list[EventT]:
    """Give an engine these pieces; all events that it tells."""
    events: list[EventT] = []
    for piece in pieces:
        events += all_events(engine, engine.receive_bytes(piece, now))
        while isinstance(engine, BoundedParsing) and engine.unparsed:
            events += all_events(engine, engine.receive_bytes(b"", now))
    return events


def one_by_one(events: Iterable[EventT]) -> Iterator[EventT]:
    """Iterate over events with one `Received` for each message: how many come together depends on the reads."""
    for event in events:
        if isinstance(event, Received):
            # The type of the events holds `Received`, since one of them is.
            yield from (cast("EventT", Received(event.receiver, [item])) for item in event.items)
        else:
            yield event


def check_every_split(
    make_engine: Callable[[], StreamEngine[EventT]], data: bytes, *, normalise: Callable[[EventT], object] = repr
) -> list[object]:
    """Whole, byte by byte, and cut in two at each place: always the same events, and the same answer.

    A `BoundedParsing` engine gets the whole once more, a frame at a time. Messages that are received together count as
    received one by one.
    `normalise` makes events of two engines comparable. Gives the events.
    """

    def run(pieces: Sequence[bytes], *, paced: bool = False) -> tuple[list[object], bytes]:
        engine = make_engine()
        if paced and isinstance(engine, BoundedParsing):
            engine.frames_at_once = 1
        return [normalise(event) for event in one_by_one(feed(engine, pieces))], drain(engine)

    whole = run([data])
    splits = [[data[i : i + 1] for i in range(len(data))], *([data[:i], data[i:]] for i in range(1, len(data)))]
    for pieces in splits:
        result = run(pieces)
        if result != whole:
            cut = "byte by byte" if len(pieces) != 2 else f"cut at byte {len(pieces[0])}"
            raise AssertionError(f"{data.hex()} {cut} gives {result}, as a whole {whole}")
    result = run([data], paced=True)
    if result != whole:
        raise AssertionError(f"{data.hex()} a frame at a time gives {result}, as a whole {whole}")
    return whole[0]


def drain(engine: StreamEngine[EventT]) -> bytes:
    """Everything that an engine has to write by now."""
    written = bytearray()
    while engine.has_output():
        for buffer in engine.buffers_to_send(PULL):
            written += buffer
    return bytes(written)


# ---------------------------------------------------------------------------- the promises of every engine


@attrs.frozen(kw_only=True)
class EngineCase(Generic[EventT]):
    """What `check_stream_engine` has to know about an engine."""

    make: Callable[[], StreamEngine[EventT]]
    """A new engine, each time the same."""
    is_failure: Callable[[EventT], bool]
    """True for the last event, the one that holds the `RemoteProtocolError`."""
    normalise: Callable[[EventT], object] = repr
    """Makes events of two engines comparable."""
    transcripts: Sequence[bytes]
    """What a peer that keeps the rules might send, each from its first byte on."""
    preface: bytes = b""
    """What must come before `question`."""
    question: bytes = b""
    """Frames that ask for an answer and may be sent again and again."""


def check_stream_engine(case: EngineCase[EventT], *, seed: int = 0, rounds: int = 200) -> None:
    """Try the rules that every engine keeps; raises AssertionError with what was broken."""
    _survives_garbage(case, random.Random(seed), rounds)
    for transcript in case.transcripts:
        check_every_split(case.make, transcript, normalise=case.normalise)
        # Rule 4: equal inputs give equal events and bytes, and `handle_deadline` before the deadline changes nothing.
        run = _run(case, transcript, early=False)
        require(run == _run(case, transcript, early=False), f"{transcript.hex()}: two runs differ")
        hasty = _run(case, transcript, early=True)
        require(run == hasty, f"{transcript.hex()}: an early handle_deadline makes a difference")
    _answers_without_a_queue(case)


def _survives_garbage(case: EngineCase[EventT], weather: random.Random, rounds: int) -> None:
    """Rule 1: no input raises; what is wrong gives one last event, and after it there is silence."""
    for _ in range(rounds):
        data = _garbage(case, weather)
        engine = case.make()
        events = feed(engine, [data])
        failures = [case.is_failure(event) for event in events]
        if not any(failures):
            continue
        require(failures.index(True) == len(events) - 1, f"{data.hex()}: events after the failure")
        before = engine.has_output() or engine.next_deadline() is not None
        told = [engine.receive_bytes(data, 1.0), engine.receive_eof(1.0), engine.handle_deadline(2.0)]
        after = any(told) or engine.events() or engine.has_output() or engine.buffers_to_send(PULL)
        require(not before and not after, f"{data.hex()}: no silence after the failure")


def _garbage(case: EngineCase[EventT], weather: random.Random) -> bytes:
    """Random bytes, or a good transcript that was damaged somewhere."""
    if not case.transcripts or weather.random() < 0.5:
        return weather.randbytes(weather.randrange(1, 64))
    data = bytearray(weather.choice(case.transcripts))
    for _ in range(weather.randrange(1, 4)):
        data[weather.randrange(len(data))] = weather.randrange(256)
    return bytes(data[: weather.randrange(1, len(data) + 1)])


def _run(case: EngineCase[EventT], transcript: bytes, *, early: bool) -> tuple[list[object], bytes]:
    """One byte each tenth of a second, then a minute of silence."""
    engine = case.make()
    events: list[EventT] = []
    written = bytearray()
    for tick in range(len(transcript) + 600):
        now = tick / 10
        due = engine.next_deadline()
        if early or (due is not None and due <= now):
            events += engine.handle_deadline(now) or ()
        if tick < len(transcript):
            events += engine.receive_bytes(transcript[tick : tick + 1], now) or ()
        events += engine.events()
        written += drain(engine)
    return [case.normalise(event) for event in one_by_one(events)], bytes(written)


def _answers_without_a_queue(case: EngineCase[EventT]) -> None:
    """Rules 5 and 6: a peer that asks and never reads makes the engine hold counters, not a queue."""
    if not case.question:
        return
    engine = case.make()
    failures = [case.is_failure(event) for event in feed(engine, [case.preface, case.question])]
    require(not any(failures), f"{case.question.hex()} is no question, it is a violation")
    tracemalloc.start()
    try:
        for _ in range(ASKED):
            engine.receive_bytes(case.question, 0.0)
            engine.events()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    require(held <= HELD_MOST, f"{held} bytes held after {ASKED} questions, {HELD_MOST} are allowed")
    for limit in (1, 1000, PULL):
        size = sum(map(len, engine.buffers_to_send(limit)))
        require(size <= limit + HELD_MOST, f"{size} bytes to write at once where {limit} were asked for")
