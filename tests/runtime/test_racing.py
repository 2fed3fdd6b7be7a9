"""The race of connection attempts, with attempts that take a known time on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit.runtime import first_of


@attrs.define
class Timed:
    """An attempt that opens, or fails, after some seconds."""

    name: str
    after: float = 0.0
    failure: Exception | None = None
    closing: Exception | None = None
    began_at: float | None = None
    ended_by: str = ""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[str, None]:
        self.began_at = trio.current_time()
        try:
            await trio.sleep(self.after)
            if self.failure is not None:
                raise self.failure
            yield self.name
        except BaseException as error:
            self.ended_by = type(error).__name__
            raise
        else:
            self.ended_by = "normal"
        finally:
            if self.closing is not None:
                raise self.closing


def refused(name: str, after: float = 0.0) -> Timed:
    return Timed(name, after, ConnectionRefusedError(f"{name}: connection refused"))


async def winner_of(*groups: Sequence[Timed]) -> tuple[str, float]:
    began = trio.current_time()
    async with first_of(groups) as won:
        return won.value, round(trio.current_time() - began, 3)


async def test_an_attempt_that_opens_within_the_stagger_is_the_only_one(autojump_clock: MockClock) -> None:
    first, second = Timed("a", 0.2), Timed("b")
    assert await winner_of([first, second]) == ("a", 0.2)
    assert second.began_at is None


async def test_the_next_attempt_starts_250_ms_after_a_silent_one(autojump_clock: MockClock) -> None:
    first, second = Timed("a", 100), Timed("b", 1)
    assert await winner_of([first, second]) == ("b", 1.25)
    assert first.ended_by == "Cancelled"


async def test_the_next_attempt_starts_immediately_after_a_failure(autojump_clock: MockClock) -> None:
    assert await winner_of([refused("a", 0.1), Timed("b", 1)]) == ("b", 1.1)


async def test_losers_have_ended_while_the_winner_is_used(autojump_clock: MockClock) -> None:
    loser = Timed("a", 100)
    async with first_of([[loser, Timed("b")]]):
        await trio.testing.wait_all_tasks_blocked()
        assert loser.ended_by == "Cancelled"


async def test_an_attempt_that_started_earlier_may_still_win(autojump_clock: MockClock) -> None:
    assert await winner_of([Timed("a", 0.4), Timed("b", 10)]) == ("a", 0.4)


async def test_of_two_that_open_simultaneously_only_one_stays_open(autojump_clock: MockClock) -> None:
    attempts = [Timed("a", 0.5), Timed("b", 0.25)]
    async with first_of([attempts]) as won:
        await trio.testing.wait_all_tasks_blocked()
        loser = next(attempt for attempt in attempts if attempt.name != won.value)
        assert loser.ended_by == "Cancelled"


async def test_a_later_group_waits_until_the_one_before_has_failed(autojump_clock: MockClock) -> None:
    later = Timed("c")
    assert await winner_of([refused("a", 3), refused("b", 5)], [later]) == ("c", 5.25)
    assert later.began_at is not None


async def test_all_failures_are_in_one_error(autojump_clock: MockClock) -> None:
    with pytest.raises(muxkit.AllAttemptsFailed) as caught:
        await winner_of([refused("a"), Timed("b", 1, TimeoutError("no answer"))])
    assert str(caught.value) == (
        "no connection to any of 2 addresses: a: connection refused; b: no answer. "
        "Check that one of them runs, and that this machine may reach it"
    )
    assert [(name, type(error)) for name, error in caught.value.attempts] == [
        ("a", ConnectionRefusedError),
        ("b", TimeoutError),
    ]
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_the_failure_of_a_single_attempt_is_raised_as_it_is() -> None:
    with pytest.raises(ConnectionRefusedError, match="a: connection refused"):
        await winner_of([refused("a")])


async def test_a_mistake_of_the_program_ends_the_race(autojump_clock: MockClock) -> None:
    with pytest.raises(ValueError, match="plaintext"):
        await winner_of([Timed("a", 100), Timed("b", 0, ValueError("plaintext"))])


async def test_the_winner_is_left_by_the_error_of_the_block(autojump_clock: MockClock) -> None:
    attempts = [Timed("a"), Timed("b")]
    with pytest.raises(muxkit.Refused, match="no") as caught:
        async with first_of([attempts]):
            raise muxkit.Refused("no")
    assert attempts[0].ended_by == "Refused"
    assert caught.value.__context__ is None


async def test_the_winner_is_left_by_a_cancellation_of_the_block(autojump_clock: MockClock) -> None:
    attempts = [Timed("a"), Timed("b")]
    with trio.move_on_after(1):
        async with first_of([attempts]):
            await trio.sleep_forever()
    assert attempts[0].ended_by == "Cancelled"


async def test_the_winner_is_left_normally_with_the_block(autojump_clock: MockClock) -> None:
    attempts = [Timed("a"), Timed("b")]
    async with first_of([attempts]):
        pass
    assert attempts[0].ended_by == "normal"


async def test_an_error_of_leaving_comes_out_of_the_block(autojump_clock: MockClock) -> None:
    with pytest.raises(OSError, match="unsent"):
        async with first_of([[Timed("a", closing=OSError("unsent")), Timed("b")]]):
            pass


async def test_a_loser_that_fails_to_close_changes_nothing(autojump_clock: MockClock) -> None:
    loser = Timed("a", 100, closing=OSError("could not close"))
    assert await winner_of([loser, Timed("b")]) == ("b", 0.25)


async def test_a_cancelled_race_cancels_all_attempts(autojump_clock: MockClock) -> None:
    attempts = [Timed("a", 100), Timed("b", 100)]
    with trio.move_on_after(1) as scope:
        await winner_of(attempts)
    assert scope.cancelled_caught
    assert [attempt.ended_by for attempt in attempts] == ["Cancelled", "Cancelled"]
