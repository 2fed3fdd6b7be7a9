"""The pair of engines and the promises of engines, tried with engines that are small and some that are wrong."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from muxkit.testing._pair import EngineCase, EnginePair, check_every_split, check_stream_engine, drain, feed

if TYPE_CHECKING:
    from collections.abc import Sequence


class Liner:
    """Speaks lines: tells each, answers `?` with `!`, pings each 10 s of silence, and fails on `x`."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._held = b""
        self._owed = 0
        self._queue: list[bytes] = []
        self._heard: float | None = None
        self.over = False

    def say(self, line: bytes) -> None:
        self._queue.append(line + b"\n")

    def events(self) -> Sequence[str]:
        told, self._told = self._told, []
        return told

    def next_deadline(self) -> float | None:
        if self.over:
            return None
        return float("-inf") if self._heard is None else self._heard + 10.0

    def handle_deadline(self, now: float) -> None:
        if self.over:
            return
        if self._heard is None:
            self._heard = now
        elif now >= self._heard + 10.0:
            self._heard = now
            self.say(b"ping")

    def receive_bytes(self, data: bytes, now: float) -> None:
        self._heard = now
        for line in self._lines(data):
            if self.over:
                return
            self._line(line)

    def _lines(self, data: bytes) -> list[bytes]:
        *lines, self._held = (self._held + data).split(b"\n")
        return lines

    def _line(self, line: bytes) -> None:
        if line == b"x":
            self._told.append("failed")
            self.over = True
        elif line == b"?":
            self._owed += 1
        else:
            self._told.append(line.decode("latin-1"))

    def receive_eof(self, now: float) -> None:
        if not self.over:
            self._told.append("eof")
            self.over = True

    def has_output(self) -> bool:
        return not self.over and bool(self._queue or self._owed)

    def buffers_to_send(self, limit: int) -> list[bytes | memoryview]:
        if self.over:
            return []
        answers = min(self._owed, limit // 2 + 1)
        self._owed -= answers
        queue, self._queue = self._queue, []
        return [b"!\n" * answers, *queue]


def case_of(make: type[Liner]) -> EngineCase[str]:
    return EngineCase(
        make=make,
        is_failure=lambda event: event == "failed",
        transcripts=[b"one\n?\ntwo\n", b"x\nafter\n"],
        preface=b"hello\n",
        question=b"?\n",
    )


# --- the pair


def test_what_one_says_the_other_is_told() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner())
    pair.engines[0].say(b"hello")
    pair.run_until_quiet()
    assert pair.events == ([], ["hello"])
    assert bytes(pair.sent[0]) == b"hello\n"
    assert pair.now == 0.0


def test_what_is_said_takes_its_time() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), latency=2.5)
    pair.engines[0].say(b"?")
    assert pair.step()
    assert pair.in_flight(1) == b"?\n"
    pair.run_until_quiet()
    assert pair.now == 5.0
    assert pair.take_events(0) == ["!"]
    assert pair.take_events(0) == []


def test_deadlines_come_at_their_moment() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), latency=1.0)
    pair.run_for(25.0)
    assert pair.now == 25.0
    assert pair.events[1] == ["ping", "ping"]
    assert pair.events[0] == ["ping", "ping"]


def test_a_deadline_on_the_way_to_an_arrival_is_met() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), latency=11.0)
    pair.step()
    pair.engines[0].say(b"slow")
    pair.step()
    pair.run_for(12.0)
    assert bytes(pair.sent[1]) == b"ping\n"
    assert pair.events[1] == ["slow"]


def test_a_jump_of_the_clock_lets_nothing_happen_in_between() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner())
    pair.run_for(1.0)
    pair.jump(100.0)
    pair.run_for(1.0)
    assert pair.events == (["ping"], ["ping"])


def test_the_end_comes_after_what_was_said_before() -> None:
    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), latency=1.0)
    pair.engines[0].say(b"bye")
    pair.step()
    pair.hang_up(0)
    pair.run_until_quiet()
    assert pair.events[1] == ["bye", "eof"]


def test_bad_weather_changes_the_pieces_and_nothing_else() -> None:
    lines = [str(number).encode() for number in range(500)]
    for seed in range(5):
        pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), weather=random.Random(seed))
        for line in lines:
            pair.engines[0].say(line)
        pair.run_until_quiet()
        assert pair.events[1] == [line.decode() for line in lines]


def test_a_listener_may_answer_at_once() -> None:
    def listen(side: int, event: str) -> None:
        if event == "marco":
            pair.engines[side].say(b"polo")

    pair: EnginePair[Liner, str] = EnginePair(Liner(), Liner(), listener=listen)
    pair.engines[0].say(b"marco")
    pair.run_until_quiet()
    assert pair.events == (["polo"], ["marco"])


class Chatterbox(Liner):
    def has_output(self) -> bool:
        return True

    def buffers_to_send(self, limit: int) -> list[bytes | memoryview]:
        return [b"!\n"]


@pytest.mark.parametrize("run", ["run_until_quiet", "run_for"])
def test_engines_that_never_fall_silent_are_an_error(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxkit.testing._pair.MOST_STEPS", 100)
    pair: EnginePair[Liner, str] = EnginePair(Chatterbox(), Liner())
    with pytest.raises(AssertionError, match="100 steps"):
        pair.run_until_quiet() if run == "run_until_quiet" else pair.run_for(1.0)


# --- the promises


def test_an_engine_that_keeps_its_promises_passes() -> None:
    check_stream_engine(case_of(Liner))


def test_an_engine_that_answers_nothing_needs_no_question() -> None:
    check_stream_engine(EngineCase(make=Liner, is_failure=lambda event: event == "failed", transcripts=[]), rounds=10)


def test_all_splits_give_the_events() -> None:
    assert check_every_split(Liner, b"one\ntwo\n") == ["'one'", "'two'"]


def test_feeding_and_draining_by_hand() -> None:
    engine = Liner()
    assert feed(engine, [b"o", b"ne\n?", b"\n"]) == ["one"]
    assert drain(engine) == b"!\n"


class Raises(Liner):
    def _line(self, line: bytes) -> None:
        line.decode("ascii")
        super()._line(line)


class SpeaksAfterTheEnd(Liner):
    def receive_bytes(self, data: bytes, now: float) -> None:
        was_over = self.over
        super().receive_bytes(data, now)
        if was_over:
            self._told.append("still here")


class GoesOnAfterAFailure(Liner):
    def receive_bytes(self, data: bytes, now: float) -> None:
        for line in self._lines(data):
            self.over = False
            self._line(line)


class WantsToBeCalledAfterTheEnd(Liner):
    def next_deadline(self) -> float | None:
        return 5.0


class MindsTheCut(Liner):
    def _lines(self, data: bytes) -> list[bytes]:
        return data.split(b"\n")[:-1]


class Rolls(Liner):
    def buffers_to_send(self, limit: int) -> list[bytes | memoryview]:
        buffers = super().buffers_to_send(limit)
        return [*buffers, random.SystemRandom().randbytes(8)] if buffers else []


class IsHasty(Liner):
    def handle_deadline(self, now: float) -> None:
        if self._heard is not None and not self.over:
            self.say(b"ping")
        super().handle_deadline(now)


class KeepsAQueue(Liner):
    def _line(self, line: bytes) -> None:
        if line == b"?":
            self._queue.append(b"!" * 10 + str(len(self._queue)).encode())
        else:
            super()._line(line)


class Refuses(Liner):
    def _line(self, line: bytes) -> None:
        super()._line(b"x" if line == b"?" else line)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (SpeaksAfterTheEnd, "no silence after the failure"),
        (GoesOnAfterAFailure, "after the failure"),
        (WantsToBeCalledAfterTheEnd, "no silence after the failure"),
        (MindsTheCut, "as a whole"),
        (Rolls, "gives"),
        (IsHasty, "an early handle_deadline makes a difference"),
        (KeepsAQueue, "bytes held after 20000 questions"),
        (Refuses, "is a violation"),
    ],
)
def test_an_engine_that_breaks_a_promise_is_found_out(make: type[Liner], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_stream_engine(case_of(make))


def test_an_engine_that_raises_is_found_out() -> None:
    with pytest.raises(UnicodeDecodeError):
        check_stream_engine(case_of(Raises))
