"""Flow control and rates in plain integers: credit to send, loans, and token buckets."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from muxkit._errors import LocalProtocolError, RemoteProtocolError

U64_MAX = 2**64 - 1


class Credit:
    """Room to send, to which the peer adds by granting (bpmux)."""

    __slots__ = ("available",)

    def __init__(self, available: int = 0) -> None:
        self.available: int = available

    def grant(self, amount: int, *, cap: int = U64_MAX) -> None:
        """The peer gave more."""
        if self.available + amount > cap:
            raise RemoteProtocolError(f"credit of {amount} on top of {self.available} is above {cap}")
        self.available += amount

    def spend(self, amount: int) -> None:
        """We sent something."""
        if amount > self.available:
            raise LocalProtocolError(f"{amount} to send against {self.available} of credit")
        self.available -= amount


class Ceiling:
    """Room to send that the peer states as a size ahead of its last acknowledgement (e3x)."""

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
            raise LocalProtocolError(f"{amount} to send, {self.available} left below the ceiling")
        self.sent += amount

    def acknowledge(self, upto: int, size: int | None = None) -> None:
        """Everything up to `upto` arrived; `size` replaces the window. An older acknowledgement changes nothing."""
        if upto > self.sent:
            raise RemoteProtocolError(f"{upto} acknowledged, {self.sent} sent")
        if upto < self.acknowledged:
            return
        self.acknowledged = upto
        if size is not None:
            self.size = size


KeyT = TypeVar("KeyT")


class Reassembly(Generic[KeyT]):
    """Loans of credit beyond the windows, out of one `total` a connection, for messages that arrive in parts.

    A loan is the whole rest of a message at once: two messages that each held half of a loan would wait for each other
    for ever. A borrower that has to wait stands in line; after each `repay` and each `leave` the caller serves the line
    for as long as `next_waiting` returns a borrower that `serve` can help.
    """

    __slots__ = ("_waiting", "left", "served", "total")

    def __init__(self, total: int) -> None:
        self.total: int = total
        self.left: int = total
        self.served: int = 0  # loans that had to be waited for, ever
        self._waiting: dict[KeyT, None] = {}

    @property
    def waiting(self) -> int:
        """How many borrowers stand in line."""
        return len(self._waiting)

    def waits(self, borrower: KeyT) -> bool:
        return borrower in self._waiting

    def borrow(self, borrower: KeyT, amount: int) -> bool:
        """Take `amount` now, or wait in line."""
        if self._waiting or amount > self.left:
            self._waiting.setdefault(borrower)
            return False
        self.left -= amount
        return True

    def repay(self, amount: int) -> None:
        self.left += amount

    def next_waiting(self) -> KeyT | None:
        """Return the first borrower in line; the caller looks up what it needs now, and calls `serve` or `leave`."""
        return next(iter(self._waiting), None)

    def serve(self, borrower: KeyT, amount: int) -> bool:
        """Lend the first in line what it needs; return False if that much is not left."""
        if amount > self.left:
            return False
        self.left -= amount
        self.served += 1
        del self._waiting[borrower]
        return True

    def leave(self, borrower: KeyT) -> None:
        """The borrower is gone, or needs nothing any more."""
        self._waiting.pop(borrower, None)


LEAST_PAUSE = 1e-3  # s; a much shorter one may be too short for the clock to move


class TokenBucket:
    """Allows `burst` at once and `rate` a second after that. A clock that goes back gives nothing."""

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
        """Return the seconds until there is a token, 0 if there is one."""
        return 0.0 if self.has_token(now) else max((1 - self.tokens) / self.rate, LEAST_PAUSE)

    def take(self, now: float) -> bool:
        """Take one token; return False if there is none."""
        if not self.has_token(now):
            return False
        self.tokens -= 1
        return True


class StartPace:
    """Says when work on the next channel of a peer may start, by how many of its channels the peer broke off.

    Each of them takes from an allowance of `burst`, which refills with `rate` a second. While it is used up, one
    channel starts each 1 / `rate` seconds, however the peer spreads what it breaks off. What was broken off beyond the
    allowance is a debt, of another `burst` at most: many channels that start at once and are broken off later count
    too, and a peer whose calls timed out by the thousand is not slowed down for minutes.
    """

    __slots__ = ("_allowance", "_forgiven", "_next", "_refilled", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate: float = rate
        self.burst: float = burst
        self._allowance = burst
        self._forgiven = 0  # channels that took nothing at this time, since the debt is at its largest
        self._refilled = -math.inf
        self._next = -math.inf  # when the next channel may start, while the allowance is used up

    def _refill(self, now: float) -> None:
        if now > self._refilled:
            self._allowance = min(self.burst, self._allowance + (now - self._refilled) * self.rate)
            self._forgiven = 0
            self._refilled = now

    def broken_off(self, now: float) -> None:
        """The peer broke off one of its channels."""
        self._refill(now)
        was_free = self._allowance >= 1
        if self._allowance - 1 < -self.burst:
            self._forgiven += 1
        else:
            self._allowance -= 1
        if was_free and self._allowance < 1:
            self._next = now + 1 / self.rate

    def spared(self) -> None:
        """What was broken off had not started: it cost no work, and takes nothing from the allowance."""
        if self._forgiven:
            self._forgiven -= 1
        else:
            self._allowance = min(self._allowance + 1, self.burst)

    def started(self, now: float) -> None:
        """Work on a channel of the peer started."""
        self._refill(now)
        if self._allowance < 1:
            self._next = now + 1 / self.rate

    def pause(self, now: float) -> float:
        """Return the seconds until work on the next channel may start, 0 if it may at once."""
        self._refill(now)
        if self._allowance >= 1 or now >= self._next:
            return 0.0
        return max(min(self._next - now, (1 - self._allowance) / self.rate), LEAST_PAUSE)

    def is_full(self) -> bool:
        """Return True if nothing of the allowance is used: the peer has broken off nothing lately."""
        return self._allowance >= self.burst
