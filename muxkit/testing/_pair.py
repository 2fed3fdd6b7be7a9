"""Two connected engines on a virtual clock, and a conformance suite for stream engines.

    pair = EnginePair(Engine(), Engine(), latency=0.05)
    pair.engines[0].open_sink(b"hello")
    pair.run_until_quiet()
    assert pair.events[1] == [...]

This module depends neither on Trio nor on any protocol.
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

MOST_STEPS = 1_000_000  # a pair that isn't quiet after this many steps never will be
PULL = 256 * 1024  # bytes to take out of an engine per call
SMALL_PULLS = (1, 64, 1024, 65_536)  # the limits among which a random writer chooses
ASKED = 20_000  # times to repeat frames that ask for an answer
HELD_MOST = 64 * 1024  # bytes that an engine may hold because of them


class EnginePair(Generic[EngineT, EventT]):
    """Two engines that are connected by two byte pipes.

    The sides are numbered 0 and 1. `events[side]` holds all events of the engine on that side, and `sent[side]` all
    bytes that it sent.

    Args:
        one: the engine of side 0.
        other: the engine of side 1.
        latency: the time that bytes take, in seconds.
        weather: a random generator. If given, it draws how many bytes are pulled from an engine and in which pieces
            they arrive.
        listener: called with (side, event) for each event as it happens. It may call the engine.
        now: the time at which the clock starts.
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
        self.sent: tuple[bytearray, bytearray] = (bytearray(), bytearray())  # all bytes that each side sent
        self._listener = listener
        # The bytes in flight to each side: (arrival time, bytes), with None for the end of the stream.
        self._flying: tuple[deque[tuple[float, bytes | None]], ...] = (deque(), deque())

    # --- moving on

    def step(self) -> bool:
        """Do once what is due at this moment. Return whether anything happened."""
        moved = False
        for side in (0, 1):
            moved |= self._handle_deadline(side)
            moved |= self._pull(side)
        for side in (0, 1):
            moved |= self._deliver(side)
        return moved

    def run_until_quiet(self) -> None:
        """Run until nothing is in flight. The clock moves only as far as the latency requires.

        Raises:
            AssertionError: if the engines aren't quiet after `MOST_STEPS` steps.
        """
        for _ in range(MOST_STEPS):
            if not self.step():
                arrival = self._next_arrival()
                if arrival == math.inf:
                    return
                self._move_clock(arrival)
        raise AssertionError(f"the engines are not quiet after {MOST_STEPS} steps")

    def run_for(self, seconds: float) -> None:
        """Let this much time pass, with every deadline and every arrival at its exact time.

        Raises:
            AssertionError: if the engines keep working without letting the clock move.
        """
        end = self.now + seconds
        for _ in range(MOST_STEPS):
            if not self.step():
                self._move_clock(min(end, self._next_arrival()))
                if self.now >= end and not self.step():
                    return
        raise AssertionError(f"the engines are busy at one moment for more than {MOST_STEPS} steps")

    def jump(self, seconds: float) -> None:
        """Advance the clock without doing anything else, as when a laptop sleeps."""
        self.now += seconds

    def hang_up(self, side: int) -> None:
        """Close the sending direction of this side. The other side sees the end after the bytes in flight."""
        self._flying[1 - side].append((self.now + self.latency, None))

    # --- looking

    def in_flight(self, side: int) -> bytes:
        """Return the bytes in flight to this side."""
        return b"".join(data for _, data in self._flying[side] if data is not None)

    def take_events(self, side: int) -> list[EventT]:
        """Return the events of this side since the last call, and forget them."""
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
        # The type of an engine's events can't be checked at runtime, so we trust the type arguments of the caller.
        for event in cast("Sequence[EventT]", all_events(self.engines[side], returned)):
            self.events[side].append(event)
            if self._listener is not None:
                self._listener(side, event)

    def _next_arrival(self) -> float:
        return min((flying[0][0] for flying in self._flying if flying), default=math.inf)

    def _move_clock(self, moment: float) -> None:
        """Advance the clock to that moment, or to the first deadline before it."""
        due = [due for engine in self.engines if (due := engine.next_deadline()) is not None]
        self.now = max(self.now, min([moment, *due]))


def require(condition: object, sentence: str) -> None:
    """Raise AssertionError with this sentence, under any test runner, if the condition is false."""
    if not condition:
        raise AssertionError(sentence)


# ---------------------------------------------------------------------------- one engine, fed by hand


def all_events(engine: Engine[EventT], returned: Sequence[EventT] | None) -> list[EventT]:
    """Return the events that a call of the engine returned, followed by those that the engine has queued."""
    return [*(returned or ()), *engine.events()]


def feed(engine: StreamEngine[EventT], pieces: Iterable[bytes], *, now: float = 0.0) -> list[EventT]:
    """Pass these pieces to an engine, and return all events."""
    events: list[EventT] = []
    for piece in pieces:
        events += all_events(engine, engine.receive_bytes(piece, now))
        while isinstance(engine, BoundedParsing) and engine.unparsed:
            events += all_events(engine, engine.receive_bytes(b"", now))
    return events


def one_by_one(events: Iterable[EventT]) -> Iterator[EventT]:
    """Split each `Received` into one per message, because the size of reads decides how many arrive together."""
    for event in events:
        if isinstance(event, Received):
            # One of the events is a `Received`, so `EventT` includes that type.
            yield from (cast("EventT", Received(event.receiver, [item])) for item in event.items)
        else:
            yield event


def check_every_split(
    make_engine: Callable[[], StreamEngine[EventT]], data: bytes, *, normalise: Callable[[EventT], object] = repr
) -> list[object]:
    """Check that an engine gives the same events and output no matter how its input is split.

    The input is passed as a whole, byte by byte, and cut in two at each position. A `BoundedParsing` engine gets it
    once more, one frame at a time. Messages that are received together count as received one by one.

    Args:
        make_engine: returns a new engine.
        data: the input.
        normalise: converts an event to a value that can be compared with that of another engine.

    Returns:
        The normalised events.

    Raises:
        AssertionError: if events or output differ.
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
    """Return everything that an engine has to send now."""
    written = bytearray()
    while engine.has_output():
        for buffer in engine.buffers_to_send(PULL):
            written += buffer
    return bytes(written)


# ---------------------------------------------------------------------------- the promises of every engine


@attrs.frozen(kw_only=True)
class EngineCase(Generic[EventT]):
    """Describes an engine to `check_stream_engine`."""

    make: Callable[[], StreamEngine[EventT]]
    """Returns a new engine, which is the same each time."""
    is_failure: Callable[[EventT], bool]
    """Returns True for the last event of a broken connection, which holds the `RemoteProtocolError`."""
    normalise: Callable[[EventT], object] = repr
    """Converts an event to a value that can be compared with that of another engine."""
    transcripts: Sequence[bytes]
    """Inputs that a conforming peer might send, each from the start of the connection."""
    preface: bytes = b""
    """The bytes that must precede `question`."""
    question: bytes = b""
    """Frames that ask for an answer and may be repeated any number of times."""


def check_stream_engine(case: EngineCase[EventT], *, seed: int = 0, rounds: int = 200) -> None:
    """Check the rules that every stream engine must follow.

    No input may make the engine raise. After the event of a failure, it must be silent. Equal inputs must give equal
    events and output, however the input is split. Calling `handle_deadline` early must change nothing. Requests of a
    peer that doesn't read the answers must not fill memory.

    Args:
        case: describes the engine.
        seed: decides the random inputs.
        rounds: the number of random inputs.

    Raises:
        AssertionError: if the engine breaks a rule.
    """
    _survives_garbage(case, random.Random(seed), rounds)
    for transcript in case.transcripts:
        check_every_split(case.make, transcript, normalise=case.normalise)
        # Equal inputs give equal events and bytes, and calling `handle_deadline` before the deadline changes nothing.
        run = _run(case, transcript, early=False)
        require(run == _run(case, transcript, early=False), f"{transcript.hex()}: two runs differ")
        hasty = _run(case, transcript, early=True)
        require(run == hasty, f"{transcript.hex()}: an early handle_deadline makes a difference")
    _answers_without_a_queue(case)


def _survives_garbage(case: EngineCase[EventT], weather: random.Random, rounds: int) -> None:
    """Check that no input raises, and that an invalid input gives one last event and then silence."""
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
    """Return random bytes, or a valid transcript with random damage."""
    if not case.transcripts or weather.random() < 0.5:
        return weather.randbytes(weather.randrange(1, 64))
    data = bytearray(weather.choice(case.transcripts))
    for _ in range(weather.randrange(1, 4)):
        data[weather.randrange(len(data))] = weather.randrange(256)
    return bytes(data[: weather.randrange(1, len(data) + 1)])


def _run(case: EngineCase[EventT], transcript: bytes, *, early: bool) -> tuple[list[object], bytes]:
    """Pass one byte every tenth of a second, followed by a minute of silence."""
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
    """Check that a peer that asks and never reads makes the engine hold counters, and not a queue of answers."""
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
