"""Pings of one connection: those under way, the tasks that wait for their answers, and the smoothed round trip."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from muxkit.runtime.halves.turn import ErrorMaker

KeyT = TypeVar("KeyT", bound="Hashable")

SMOOTHING = 0.125  # weight of the newest round trip


class Ping:
    """One ping under way; a ping that the engine sends by itself is waited for by no task."""

    __slots__ = ("_answer", "_error", "is_wanted", "sent_at", "took")

    def __init__(self) -> None:
        self.sent_at = trio.current_time()
        self.took: float | None = None
        """Seconds, once it was answered."""
        self.is_wanted = True
        """False once the task that waited for it was cancelled."""
        self._answer: trio.Event | None = None
        self._error: ErrorMaker | None = None

    async def wait(self) -> float:
        """Wait for the answer, and return the round trip in seconds; raises what ended the ping instead."""
        if self.took is None and self._error is None:
            self._answer = trio.Event()
            try:
                await self._answer.wait()
            except BaseException:
                self.is_wanted = False
                raise
        else:
            await trio.lowlevel.checkpoint()
        if self.took is None:
            assert self._error is not None  # it ended in one way or the other
            raise self._error()
        return self.took

    def end(self, *, took: float | None = None, error: ErrorMaker | None = None) -> None:
        """Wake the task that waits."""
        self.took, self._error = took, error
        if self._answer is not None:
            self._answer.set()


class Pings(Generic[KeyT]):
    """Pings under way by what they are about, each answered in the order in which they were sent.

    `ping = pings.sent(key)` after the engine was told, then `await ping.wait()`; the session calls `answered` and
    `ended`. `round_trip` is smoothed over all answers.
    """

    def __init__(self) -> None:
        self.round_trip: float | None = None
        """Seconds, smoothed; None before the first answer."""
        self._under_way: dict[KeyT, deque[Ping]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return sum(map(len, self._under_way.values()))

    def sent(self, key: KeyT) -> Ping:
        """Note that a ping was sent now, or will be by `resend`."""
        ping = Ping()
        self._under_way.setdefault(key, deque()).append(ping)
        return ping

    def answered(self, key: KeyT) -> None:
        """The oldest ping about this was answered; harmless if there is none."""
        waiting = self._under_way.get(key)
        if not waiting:
            return
        ping = waiting.popleft()
        if not waiting:
            del self._under_way[key]
        took = trio.current_time() - ping.sent_at
        known = self.round_trip
        self.round_trip = took if known is None else (1 - SMOOTHING) * known + SMOOTHING * took
        ping.end(took=took)

    def ended(self, error: ErrorMaker, key: KeyT | None = None) -> None:
        """No answer comes any more: to the pings about `key`, or to all."""
        keys = [*self._under_way] if key is None else [key]
        for each in keys:
            for ping in self._under_way.pop(each, ()):
                ping.end(error=error)

    def resend(self, send: Callable[[KeyT], None]) -> None:
        """Send every ping that a task still waits for again, on a new connection."""
        self.forget_unwanted()
        for key, waiting in self._under_way.items():
            for ping in waiting:
                ping.sent_at = trio.current_time()
                send(key)

    def forget_unwanted(self) -> None:
        """Drop the pings whose tasks were cancelled; only for those that were not sent, or whose connection is gone."""
        kept = {key: deque(ping for ping in waiting if ping.is_wanted) for key, waiting in self._under_way.items()}
        self._under_way = {key: waiting for key, waiting in kept.items() if waiting}
