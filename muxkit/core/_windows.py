"""Counters for flow control and for rate limits, which the engines share. They know no protocol and no clock.

- `Credit` and `Ceiling` count how much this side may still send.
- `Reassembly` lets the peer send messages that are larger than the window of their channel.
- `TokenBucket` limits how often something may happen.
- `StartPace` slows down a peer that keeps cancelling the channels it opens.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from muxkit._errors import LocalProtocolError, RemoteProtocolError

U64_MAX = 2**64 - 1


class Credit:
    """How many bytes this side may send, for protocols in which the peer grants additional bytes."""

    __slots__ = ("available",)

    def __init__(self, available: int = 0) -> None:
        self.available: int = available

    def grant(self, amount: int, *, cap: int = U64_MAX) -> None:
        """Add an amount that the peer has granted. Raises `RemoteProtocolError` if the sum is larger than `cap`."""
        if self.available + amount > cap:
            raise RemoteProtocolError(f"too much credit: {amount} on top of {self.available} is more than {cap}")
        self.available += amount

    def spend(self, amount: int) -> None:
        """Subtract an amount that this side has sent. Raises `LocalProtocolError` if there isn't enough credit."""
        if amount > self.available:
            raise LocalProtocolError(f"not enough credit: {amount} to send, {self.available} are granted")
        self.available -= amount


class Ceiling:
    """How much this side may send, in protocols in which the peer states how far it may be ahead of the last ack."""

    __slots__ = ("acknowledged", "sent", "size")

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.sent: int = 0
        self.acknowledged: int = 0

    @property
    def available(self) -> int:
        return max(0, self.acknowledged + self.size - self.sent)

    def spend(self, amount: int) -> None:
        if amount > self.available:
            raise LocalProtocolError(f"the window is full: {amount} to send, room for {self.available}")
        self.sent += amount

    def acknowledge(self, upto: int, size: int | None = None) -> None:
        """Apply an ack of everything up to `upto`, and a new window of `size` if it is given.

        An ack that is older than the last one changes nothing. Raises `RemoteProtocolError` if `upto` wasn't sent.
        """
        if upto > self.sent:
            raise RemoteProtocolError(f"invalid ack of {upto}: expected at most {self.sent}, the last that was sent")
        if upto < self.acknowledged:
            return
        self.acknowledged = upto
        if size is not None:
            self.size = size


KeyT = TypeVar("KeyT")


class Reassembly(Generic[KeyT]):
    """A budget for credit that is lent to messages that are larger than the window of their channel.

    Such a message arrives in parts. It can't be delivered before all parts have arrived, so its channel's window isn't
    renewed in the meantime, and the peer would have to stop. We therefore grant the peer the missing credit in advance,
    which we call a loan. The bytes of the message repay it when the application has consumed them. `total` limits the
    loans of a connection.

    A loan always covers the whole rest of a message. Otherwise, two messages could each hold half of what they need,
    and wait for each other forever. A borrower (a receiving half) that can't get its loan waits in a queue. After each
    `repay` and `leave`, the caller must call `serve` for the borrower that `next_waiting` returns. It repeats that
    until no borrower waits, or until `serve` returns False.
    """

    __slots__ = ("_waiting", "left", "served", "total")

    def __init__(self, total: int) -> None:
        self.total: int = total
        self.left: int = total
        self.served: int = 0  # how many borrowers have got their loan after waiting, in total
        self._waiting: dict[KeyT, None] = {}

    @property
    def waiting(self) -> int:
        """The number of borrowers that wait for a loan."""
        return len(self._waiting)

    def waits(self, borrower: KeyT) -> bool:
        return borrower in self._waiting

    def borrow(self, borrower: KeyT, amount: int) -> bool:
        """Lend `amount` and return True, or add the borrower to the queue and return False."""
        if self._waiting or amount > self.left:
            self._waiting.setdefault(borrower)
            return False
        self.left -= amount
        return True

    def repay(self, amount: int) -> None:
        """Return an amount to the budget."""
        self.left += amount

    def next_waiting(self) -> KeyT | None:
        """Return the borrower that has waited longest, or None. It may need less than when it began to wait."""
        return next(iter(self._waiting), None)

    def serve(self, borrower: KeyT, amount: int) -> bool:
        """Lend `amount` to a waiting borrower. Return False, without lending anything, if less than that is left."""
        if amount > self.left:
            return False
        self.left -= amount
        self.served += 1
        del self._waiting[borrower]
        return True

    def leave(self, borrower: KeyT) -> None:
        """Remove a borrower from the queue, because it has ended or needs no loan any more."""
        self._waiting.pop(borrower, None)


LEAST_PAUSE = 1e-3  # seconds; after a much shorter pause, the clock may still show the same time


class TokenBucket:
    """Allows `burst` events immediately, and `rate` events per second on average.

    If the clock goes backwards, no tokens are added.
    """

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate: float = rate
        self.burst: float = burst
        self.tokens: float = burst
        self._at: float | None = None

    def has_token(self, now: float) -> bool:
        """Return True if `take` would succeed."""
        if self._at is None:
            self._at = now
        elif now > self._at:
            self.tokens = min(self.burst, self.tokens + (now - self._at) * self.rate)
            self._at = now
        return self.tokens >= 1

    def pause(self, now: float) -> float:
        """Return the seconds until there is a token, or 0 if there is one now."""
        return 0.0 if self.has_token(now) else max((1 - self.tokens) / self.rate, LEAST_PAUSE)

    def take(self, now: float) -> bool:
        """Take a token. Return False if there is none."""
        if not self.has_token(now):
            return False
        self.tokens -= 1
        return True


class StartPace:
    """Limits how fast handlers start for a peer that keeps cancelling the channels it opens.

    A peer could open channels and cancel them immediately, so that we start and stop handlers for nothing. (In HTTP/2,
    this attack is called "rapid reset".) So each cancelled channel takes 1 from an allowance. The allowance is `burst`
    at first, and grows by `rate` per second up to `burst`. While less than 1 is left, only one handler may start every
    1 / `rate` seconds.

    The allowance may become negative, because a peer can cancel many channels whose handlers have started before. It
    never falls below -`burst`, so that a peer whose calls have timed out by the thousand isn't slowed down for minutes.
    """

    __slots__ = ("_allowance", "_forgiven", "_next", "_refilled", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate: float = rate
        self.burst: float = burst
        self._allowance = burst
        self._forgiven = 0  # cancelled channels that took nothing, because the allowance was at its minimum
        self._refilled = -math.inf  # when the allowance was last updated
        self._next = -math.inf  # when the next handler may start, while the allowance is used up

    def _refill(self, now: float) -> None:
        if now > self._refilled:
            self._allowance = min(self.burst, self._allowance + (now - self._refilled) * self.rate)
            self._forgiven = 0
            self._refilled = now

    def broken_off(self, now: float) -> None:
        """Count a channel that the peer has cancelled."""
        self._refill(now)
        was_free = self._allowance >= 1
        if self._allowance - 1 < -self.burst:
            self._forgiven += 1
        else:
            self._allowance -= 1
        if was_free and self._allowance < 1:
            self._next = now + 1 / self.rate

    def spared(self) -> None:
        """Refund the last cancelled channel, because its handler had not started."""
        if self._forgiven:
            self._forgiven -= 1
        else:
            self._allowance = min(self._allowance + 1, self.burst)

    def started(self, now: float) -> None:
        """Count a handler that has started."""
        self._refill(now)
        if self._allowance < 1:
            self._next = now + 1 / self.rate

    def pause(self, now: float) -> float:
        """Return the seconds until the next handler may start, or 0 if it may start now."""
        self._refill(now)
        if self._allowance >= 1 or now >= self._next:
            return 0.0
        return max(min(self._next - now, (1 - self._allowance) / self.rate), LEAST_PAUSE)

    def is_full(self) -> bool:
        """Return True if the peer hasn't cancelled any channels recently."""
        return self._allowance >= self.burst
