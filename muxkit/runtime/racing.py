"""Connection attempts that race, as "Happy Eyeballs" does (RFC 8305).

`first_of` opens several context managers, such as one connection for each address of a host. The attempts start one
after the other, `STAGGER` seconds apart, or as soon as the previous one has failed. The first that opens wins. All
others are cancelled, and each closes whatever it has opened so far. The winner stays open while the block runs.

Each attempt runs in a task of its own, because a context manager has to be left by the task that entered it. The task
of the winner therefore waits until the block ends, and then leaves the context manager in the same way as the block was
left: normally, by the same exception, or by a cancellation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Generic, Protocol, TypeVar

import attrs
import trio

from muxkit._errors import MuxError
from muxkit.core import counted
from muxkit.runtime._errors import RETRIED_ERRORS, AllAttemptsFailed
from muxkit.runtime._scope import background, protect_package, protected_manager

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

STAGGER: Final = 0.25
"""Seconds between the starts of two attempts, the "Connection Attempt Delay" that RFC 8305, section 5, recommends."""

FAILURES: Final = (*RETRIED_ERRORS, MuxError)
"""Errors that end one attempt. Any other error is a mistake in the program, and ends the race."""


class Attempt(Protocol[T_co]):
    """One of the ways that `first_of` may choose."""

    @property
    def name(self) -> str:
        """What errors call it, such as a URL without its password."""

    def open(self) -> AbstractAsyncContextManager[T_co]:
        """Return a context manager that connects when it is entered, and closes the connection when it is left."""


@attrs.frozen
class Won(Generic[T]):
    """The attempt that won, and the value of its context manager."""

    attempt: Attempt[T]
    value: T


@protected_manager
async def first_of(
    groups: Sequence[Sequence[Attempt[T]]], *, stagger: float = STAGGER, what: str = "address"
) -> AsyncGenerator[Won[T], None]:
    """Race attempts, and keep the first that opens while the block runs.

    Args:
        groups: The attempts, the preferred ones first. A group starts only after all attempts of the groups before it
            have failed, which is how SRV records define priorities.
        stagger: Seconds between the starts of two attempts of one group.
        what: What the attempts differ in, for the text of `AllAttemptsFailed`.

    Raises:
        AllAttemptsFailed: If all attempts fail. The error of a single attempt is raised unchanged.
    """
    attempts = [attempt for group in groups for attempt in group]
    if len(attempts) == 1:
        async with attempts[0].open() as value:
            yield Won(attempts[0], value)
        return
    race: _Race[T] = _Race()
    async with background() as nursery:
        winner = await race.decide(nursery, groups, stagger, what)
        try:
            yield Won(winner.attempt, winner.value)
        except Exception as error:
            await winner.leave(error)
            raise
        await winner.leave(None)


class _Race(Generic[T]):
    """The attempts that run, and the event that one of them has won or failed."""

    def __init__(self) -> None:
        self.winner: _Runner[T] | None = None
        self.mistake: Exception | None = None
        """An error other than those of a failed attempt."""
        self.changed = trio.Event()
        self._runners: list[_Runner[T]] = []

    async def decide(
        self, nursery: trio.Nursery, groups: Sequence[Sequence[Attempt[T]]], stagger: float, what: str
    ) -> _Runner[T]:
        """Return the winner after having cancelled the others; raises `AllAttemptsFailed`."""
        for group in groups:
            for attempt in group:
                runner = _Runner(attempt, self)
                self._runners.append(runner)
                nursery.start_soon(runner.run)
                with trio.move_on_after(stagger):
                    await self._wait_for([runner])
                if self.winner is not None:
                    break
            await self._wait_for(self._runners)
            if self.winner is not None:
                for runner in self._runners:
                    if runner is not self.winner:
                        runner.scope.cancel()
                return self.winner
        raise _all_failed([(runner.attempt.name, runner.failure) for runner in self._runners], what)

    async def _wait_for(self, runners: Sequence[_Runner[T]]) -> None:
        """Wait until there is a winner, or all of these attempts have failed."""
        while self.winner is None and any(runner.failure is None for runner in runners):
            if self.mistake is not None:
                try:
                    raise self.mistake
                finally:
                    self.mistake = None  # the error's traceback would refer to itself through this frame
            self.changed = trio.Event()
            await self.changed.wait()


class _Runner(Generic[T]):
    """The task of one attempt."""

    def __init__(self, attempt: Attempt[T], race: _Race[T]) -> None:
        self.attempt = attempt
        self.scope = trio.CancelScope()
        self.failure: Exception | None = None
        self.value: T
        self._race = race
        self._left = trio.Event()  # the block was left
        self._closed = trio.Event()  # the context manager was left
        self._reason: Exception | None = None
        self._raised: Exception | None = None

    async def run(self) -> None:
        race = self._race
        try:
            with self.scope:
                async with self.attempt.open() as self.value:
                    if race.winner is not None:
                        # Two attempts have opened in the same pass of the scheduler, and the other one was first.
                        self.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    race.winner = self
                    race.changed.set()
                    await self._left.wait()
                    if self._reason is not None:
                        raise self._reason
        except Exception as error:
            if race.winner is self:
                self._raised = None if error is self._reason else error
            elif race.winner is None and isinstance(error, FAILURES):
                self.failure = error
            elif race.winner is None:
                race.mistake = error
            # Otherwise it is an error while a cancelled attempt closes, which changes nothing for the winner.
        finally:
            self._reason = None
            race.changed.set()
            self._closed.set()

    async def leave(self, reason: Exception | None) -> None:
        """Leave the context manager by the same error as the block; raises what leaving raises instead."""
        self._reason = reason
        self._left.set()
        await self._closed.wait()
        raised, self._raised = self._raised, None
        if raised is not None:
            try:
                raise raised
            finally:
                del raised


def _all_failed(failures: Sequence[tuple[str, Exception | None]], what: str) -> AllAttemptsFailed:
    known = [(name, error) for name, error in failures if error is not None]
    parts = [_named(name, error) for name, error in known]
    plural = counted(len(known), what, f"{what}es" if what.endswith("s") else f"{what}s")
    text = f"no connection to any of {plural}: {'; '.join(parts)}"
    error = AllAttemptsFailed(f"{text}. Check that one of them runs, and that this machine may reach it", known)
    numbers = {failure.errno if isinstance(failure, OSError) else None for _, failure in known}
    error.errno = numbers.pop() if len(numbers) == 1 else None
    error.__cause__ = ExceptionGroup("the attempts", [failure for _, failure in known])
    return error


def _named(name: str, error: Exception) -> str:
    """Return the text of an error with the name of its attempt, unless the text already begins with it."""
    text = str(error) or type(error).__name__
    return text if text.startswith(f"{name}:") else f"{name}: {text}"


protect_package(__name__)
