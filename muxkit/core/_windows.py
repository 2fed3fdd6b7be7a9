"""Flow control and rates in plain integers: credit, windows, loans and a token bucket."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from muxkit._errors import LocalProtocolError, RemoteProtocolError

U64_MAX = 2**64 - 1
BUSY_SECONDS = 1.0  # s; a channel that consumes half a window within this could use a larger one
IDLE_SECONDS = 4.0  # s; a channel that takes longer for half a window has more than it needs


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


class InFlight:
    """Room to send that we set ourselves: at most `limit` may be unanswered (Relink, Aqueduct)."""

    __slots__ = ("limit", "unanswered")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.unanswered: int = 0

    @property
    def available(self) -> int:
        return self.limit - self.unanswered

    def spend(self, amount: int = 1) -> None:
        if amount > self.available:
            raise LocalProtocolError(f"{amount} to send, {self.unanswered} of {self.limit} unanswered")
        self.unanswered += amount

    def answered(self, amount: int = 1) -> None:
        if amount > self.unanswered:
            raise RemoteProtocolError(f"{amount} answered, {self.unanswered} were waiting for an answer")
        self.unanswered -= amount


class ReceiveBudget:
    """What all automatic windows of one connection may hold together, so that many channels share one bound.

    Each window has `floor` to itself; what it holds beyond that is `used` of the `total` that all share. A window
    begins with `first` and grows only while its channel is busy: credit that was granted cannot be taken back, so what
    idle channels were given is lost to the busy ones. Windows of up to `first` may use half of `total`, those that have
    grown share the other half. If the shared pool is empty, a window still gets `floor`.
    """

    __slots__ = ("first", "floor", "grown", "total", "used", "windows")

    def __init__(self, total: int, floor: int, first: int) -> None:
        self.total: int = total
        self.floor: int = floor
        self.first: int = first
        self.used: int = 0
        self.windows: int = 0
        self.grown: int = 0  # windows that have grown beyond the first grant

    def first_room(self, wanted: int) -> int:
        """Return what a new window that wants `wanted` in the end may grant at once."""
        first = min(wanted, self.first)
        return first if self.used + first - self.floor <= self.total // 2 else min(first, self.floor)

    def room(self, wanted: int, outstanding: int) -> int:
        """Return how much a window that wants `wanted` in all and has `outstanding` may grant now."""
        share = max(self.first, self.total // 2 // max(1, self.grown))
        pool = self.total if wanted > self.first else self.total // 2
        left = max(0, pool - self.used) + max(0, self.floor - outstanding)
        return min(min(wanted, share) - outstanding, left)

    def moved(self, before: int, after: int) -> None:
        """A window that held `before` now holds `after`."""
        floor = self.floor
        self.used += (after - floor if after > floor else 0) - (before - floor if before > floor else 0)


class ReceiveWindow:
    """What we have granted the peer on one channel; new grants follow consumption, half a window at a time.

    `credit` is what the peer may still send, `held` what arrived and was not consumed. Both together are made of
    three parts: `own`, which the window renews and the budget counts; `lent`, granted beyond it so that one large
    message could be put together; and `by_hand`. What is consumed repays the loans first, then what was granted
    by hand. `unfinished` is what messages that were begun still need. `size` is the largest window to keep open; 0
    means that every grant is made by hand. `target` is the window of now: what was granted first, and it doubles while
    half of it is consumed within `BUSY_SECONDS`, and halves when that takes longer than `IDLE_SECONDS`.
    """

    __slots__ = ("budget", "by_hand", "credit", "held", "lent", "renewed_at", "renews", "size", "target", "unfinished")

    def __init__(self, size: int = 0, budget: ReceiveBudget | None = None) -> None:
        self.size: int = size
        self.renews: bool = size > 0
        self.budget: ReceiveBudget | None = budget if size else None
        self.credit: int = 0
        self.held: int = 0
        self.lent: int = 0
        self.by_hand: int = 0
        self.unfinished: int = 0
        self.renewed_at: float = 0.0
        self.target: int = 0
        if self.budget is not None:
            self.budget.windows += 1

    @property
    def own(self) -> int:
        """What the window itself has granted and was not consumed."""
        return self.credit + self.held - self.lent - self.by_hand

    def start(self, now: float, first: int | None = None) -> int:
        """Return the first grant, `first` if the protocol says how much that is."""
        if self.budget is None or not self.renews:
            return 0
        room = self.target = self.budget.first_room(self.size)
        self.renewed_at = now
        if first is not None:
            room = first
            self.renewed_at -= BUSY_SECONDS  # the rest follows with the first bytes consumed
        # Most windows grant the same at first, and nothing else: then they share one number object.
        self.credit = self.credit + room if self.credit else room
        self.budget.moved(0, room)
        return room

    def grant(self, amount: int) -> None:
        """Grant by hand, beside what the window does."""
        if amount < 0 or self.credit + amount > U64_MAX:
            raise LocalProtocolError(f"credit of {amount} on top of {self.credit} is outside 0 … {U64_MAX}")
        self.credit += amount
        self.by_hand += amount

    def arrived(self, amount: int) -> None:
        """The peer used credit."""
        if amount > self.credit:
            raise RemoteProtocolError(f"{amount} bytes sent against {self.credit} granted")
        self.credit -= amount
        self.held += amount

    def consumed(self, amount: int, now: float) -> tuple[int, int]:
        """The application took `amount`; returns (what to grant now, what to repay of loans)."""
        if not 0 <= amount <= self.held:
            raise LocalProtocolError(f"{amount} bytes consumed, {self.held} were there")
        self.held -= amount
        if not (self.lent or self.by_hand) and self.budget is not None:
            own, floor = self.credit + self.held, self.budget.floor
            if own + amount > floor:  # as `moved` does, which would be one more call for each message
                self.budget.used -= own + amount - (own if own > floor else floor)  # noqa: FURB136 - so is `max`
            # The short way: more than half of the window is still out.
            return (0 if 2 * own > self.target else self._refill(now)), 0
        repaid = min(self.lent, amount)
        self.lent -= repaid
        by_hand = min(self.by_hand, amount - repaid)
        self.by_hand -= by_hand
        if self.budget is not None:
            own = self.own
            self.budget.moved(own + amount - repaid - by_hand, own)
        return self._refill(now), repaid

    def shortfall(self) -> int:
        """Return what begun messages need beyond the credit that is out."""
        return max(0, self.unfinished - self.credit)

    def lend(self, amount: int) -> None:
        """Grant beyond the window, out of the connection's budget for reassembly."""
        self.credit += amount
        self.lent += amount

    def quiet(self) -> None:
        """Grant nothing more; what is out may still be used."""
        self.renews = False

    def retire(self) -> int:
        """Nothing more will arrive; what is held stays counted until it is consumed. Returns what to repay of loans."""
        before = self.own
        repaid = max(0, self.lent - self.held)
        self.lent -= repaid
        self.by_hand = min(self.by_hand, self.held - self.lent)
        self.credit = self.unfinished = 0
        self.renews = False
        if self.budget is not None:
            self.budget.moved(before, self.own)
            self.budget.windows -= 1
            self._aim(min(self.target, self.budget.first), self.budget)
        return repaid

    def _refill(self, now: float) -> int:
        if self.budget is None or not self.renews:
            return 0
        own = self.own
        if self.target < self.budget.first:  # it began when others had the first grants; now they may be gone
            self.target = max(self.target, self.budget.first_room(self.size))
        room = self.budget.room(self.target, own)
        if room <= 0 or room < own:
            return 0
        took, self.renewed_at = now - self.renewed_at, now
        if took < BUSY_SECONDS:
            self._aim(min(self.size, self.target * 2), self.budget)
        elif took > IDLE_SECONDS:
            self._aim(max(min(self.target, self.budget.first), self.target // 2), self.budget)
        room = max(0, self.budget.room(self.target, own))
        self.credit += room
        self.budget.moved(own, own + room)
        return room

    def _aim(self, target: int, budget: ReceiveBudget) -> None:
        budget.grown += (target > budget.first) - (self.target > budget.first)
        self.target = target


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
