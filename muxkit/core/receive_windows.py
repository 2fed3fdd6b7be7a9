"""How large the receive windows of a connection are: the one policy for all protocols.

Theory of operation
===================

A window is what the peer may send on a channel before the application has taken it. A channel never carries more than
one window in a round trip, so a window that is too small leaves a long line empty. A window that is too large costs
memory as soon as its reader stops, because credit that was granted can't be taken back. So a window has to follow what
the path holds and what the application takes:

    start                `first` bytes, or `floor` if the first grants of other channels have used up half of `total`
      |  half of it is consumed within `BUSY_SECONDS`: it doubles
      v
    SHORT_WINDOW         as much as any path needs whose round trip is a few milliseconds
      |  a whole window is consumed within `LAPS` round trips: it grows, to twice its size at most
      v
    the path's window    `LAPS` times the bandwidth-delay product, `channel_bytes` at most

The bandwidth-delay product is what the application consumes in a second, times the round trip. If the window is what
limits a channel, then it is consumed in one or two round trips (two, because grants and the last message of a window
may come late), and so it doubles with each. If anything else limits the channel (the line, the peer, the application),
then a window of `LAPS` such products is never used up, and it stays. It halves again when consuming it takes more than
`SHRINK_LAPS` round trips; a window of `SHORT_WINDOW` or less halves when half of it takes more than `IDLE_SECONDS`. A
reader that stops altogether keeps what it was granted last and gets no more.

The round trip is what the `RoundTrip` of the connection says. While it is unknown no window exceeds `SHORT_WINDOW`.
Protocols have three ways to know it:

- An engine with pings sends one when `is_due` says so, which is only while a channel is received in bulk and at most
  once in `PROBE_PAUSE`. It calls `asked` when the ping is queued, and `answered` when the answer has come.
- A transport that measures round trips itself (QUIC) gives them to `measured`.
- A receiver without either can time how long the peer needs to use a grant after its credit was used up.

Of these samples the least counts. A larger one contains the queue in front of the answer, and a window that follows
the queue would make it longer. The path itself may have become longer, though. The windows can only be the reason for
samples of up to `SHRINK_LAPS` times the known round trip, since no window is larger than that. So when `LONGER_AFTER`
samples in a row exceed this, the least of them is the round trip from then on.

All windows of a connection share `total` bytes (`ReceiveBudget`), beside `floor` that each has to itself. First grants
use at most half of it. Windows that have grown beyond `first` share the other half: while their sizes together fit into
it, each gets what it wants. If they don't, then a window above the equal share makes room for those below. So a stalled
reader costs the others its own window and nothing else, and ten thousand idle channels leave the busy one its window.

A protocol without grants leaves the window to its sender. Relink's sender tells a `ReceiveWindow` which bytes the peer
acknowledges as consumed, and sends no more than `target` without that.

A protocol only says how its document writes a grant: it passes on what `start` and `consumed` return. Grants come half
a window at a time, and a quarter at a time from `SHORT_WINDOW` on, so that three quarters of the window cover the path.
"""

from __future__ import annotations

from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import SHORT_WINDOW
from muxkit.core._windows import U64_MAX

BUSY_SECONDS: Final = 1.0  # s; a channel that consumes half a window within this could use a larger one
IDLE_SECONDS: Final = 4.0  # s; a channel that takes longer for half a window has more than it needs
LAPS: Final = 3.0  # round trips; a channel that consumes a whole window within this may need a larger one
SHRINK_LAPS: Final = 6.0  # round trips; a channel that takes longer for a whole window has more than it needs
ASK_FROM: Final = SHORT_WINDOW // 4  # a busy window of so many bytes will soon need the round trip
PROBE_PAUSE: Final = 5.0  # s between two pings that measure the round trip
LONGER_AFTER: Final = 3  # samples in a row that show a longer path


class RoundTrip:
    """The round trip of a connection's path, without the queues on it; see the module."""

    __slots__ = ("_asked_at", "_least", "_longer", "_longer_count", "_next_at", "besides", "is_wanted")

    def __init__(self) -> None:
        self._least: float | None = None
        self.besides: float = 0.0
        """Seconds that a window has to last in addition, where the protocol itself resends what was lost."""
        self.is_wanted: bool = False
        """True while a window could use a sample; an engine with pings then asks `is_due`."""
        self._asked_at: float | None = None  # when the ping under way was sent
        self._next_at = 0.0  # when the next ping may be sent
        self._longer = 0.0  # the least of the last samples that show a longer path
        self._longer_count = 0

    @property
    def seconds(self) -> float | None:
        """How long a window has to last; None before the first sample."""
        return None if self._least is None else self._least + self.besides

    def is_due(self, now: float) -> bool:
        """Return True if a ping should be sent now to measure it."""
        return self.is_wanted and self._asked_at is None and now >= self._next_at

    def asked(self, now: float) -> None:
        """Note that a ping was sent."""
        self.is_wanted = False
        self._asked_at = now
        self._next_at = now + PROBE_PAUSE

    def answered(self, now: float) -> None:
        """Take the sample of the ping under way; harmless if none is."""
        if self._asked_at is not None:
            sample, self._asked_at = now - self._asked_at, None
            self.measured(sample)

    def gave_up(self) -> None:
        """The answer to the ping under way won't come, because what it was about is gone."""
        self._asked_at = None

    def measured(self, sample: float) -> None:
        """Take a sample, in seconds."""
        known = self._least
        if known is None or sample <= known:
            self._least = max(sample, 0.0)
        elif sample > SHRINK_LAPS * known:
            self._longer = min(sample, self._longer) if self._longer_count else sample
            self._longer_count += 1
            if self._longer_count < LONGER_AFTER:
                return
            self._least = self._longer
        self._longer_count = 0


class ReceiveBudget:
    """What all automatic windows of one connection may hold together, so that many channels share one bound.

    Each window has `floor` to itself; what it holds beyond that is `used` of the `total` that all share.
    """

    __slots__ = ("first", "first_half", "floor", "grown", "grown_bytes", "round_trip", "total", "used", "windows")

    def __init__(self, total: int, floor: int, first: int) -> None:
        self.total: int = total
        self.floor: int = floor
        self.first: int = first
        self.first_half: int = first // 2  # one number object for most windows
        self.used: int = 0
        self.windows: int = 0
        self.grown: int = 0  # windows that have grown beyond the first grant
        self.grown_bytes: int = 0  # what these want to keep open together
        self.round_trip: RoundTrip = RoundTrip()

    def first_room(self, wanted: int) -> int:
        """Return what a new window that wants `wanted` in the end may grant at once."""
        first = min(wanted, self.first)
        return first if self.used + first - self.floor <= self.total // 2 else min(first, self.floor)

    def most(self, target: int, *, is_grown: bool) -> int:
        """Return the size that a window of size `target` may have: the equal share, or what the others leave."""
        half, grown = self.total // 2, self.grown + (not is_grown)
        others = self.grown_bytes - target if is_grown else self.grown_bytes
        return max(self.first, half // grown, half - others)

    def room(self, wanted: int, outstanding: int) -> int:
        """Return how much a window that wants `wanted` in all and has `outstanding` may grant now."""
        pool = self.total if wanted > self.first else self.total // 2
        left = max(0, pool - self.used) + max(0, self.floor - outstanding)
        return min(wanted - outstanding, left)

    def moved(self, before: int, after: int) -> None:
        """A window that held `before` now holds `after`."""
        floor = self.floor
        self.used += (after - floor if after > floor else 0) - (before - floor if before > floor else 0)

    def resized(self, before: int, after: int) -> None:
        """A window of size `before` now has size `after`."""
        first = self.first
        self.grown += (after > first) - (before > first)
        self.grown_bytes += (after if after > first else 0) - (before if before > first else 0)


class ReceiveWindow:
    """What we have granted the peer on one channel; new grants follow consumption, see the module.

    `credit` is what the peer may still send, `held` what arrived and was not consumed. Both together are made of
    three parts: `own`, which the window renews and the budget counts; `lent`, granted beyond it so that one large
    message could be put together; and `by_hand`. What is consumed repays the loans first, then what was granted
    by hand. `unfinished` is what messages that were begun still need. `size` is the largest window to keep open; 0
    means that every grant is made by hand. `target` is the window of now.
    """

    __slots__ = (
        "_lap",
        "_renew_at",
        "budget",
        "by_hand",
        "credit",
        "held",
        "lent",
        "renewed_at",
        "renews",
        "size",
        "target",
        "unfinished",
    )

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
        self._renew_at = 0  # with no more than this outstanding, a grant is due
        self._lap = 0  # bytes consumed since `renewed_at`, of a window at `SHORT_WINDOW` or above
        if self.budget is not None:
            self.budget.windows += 1

    @property
    def own(self) -> int:
        """What the window itself has granted and was not consumed."""
        return self.credit + self.held - self.lent - self.by_hand

    @property
    def _follows_path(self) -> bool:
        return self.size > SHORT_WINDOW and self.target >= SHORT_WINDOW

    def start(self, now: float, first: int | None = None) -> int:
        """Return the first grant, `first` if the protocol says how much that is."""
        if self.budget is None or not self.renews:
            return 0
        room = self.target = self.budget.first_room(self.size)
        self._renew_at = self.budget.first_half if room == self.budget.first else room // 2
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
            # The short way: enough of the window is still out.
            return (0 if own > self._renew_at else self._refill(now)), 0
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
        budget, own = self.budget, self.own
        if self.target < budget.first:  # it began when others had the first grants; now they may be gone
            self._aim(max(self.target, budget.first_room(self.size)), budget)
        elif self.target > budget.first and self.target > (most := budget.most(self.target, is_grown=True)):
            self._aim(most, budget)
        room = budget.room(self.target, own)
        if room < max(1, own // 3 if self._follows_path else own):
            return 0
        if self._follows_path:
            self._pace_long(now, room, budget)
        else:
            self._pace_short(now, budget)
        room = max(0, budget.room(self.target, own))
        self.credit += room
        budget.moved(own, own + room)
        return room

    def _pace_short(self, now: float, budget: ReceiveBudget) -> None:
        """Size a window that is below `SHORT_WINDOW`, or can't be larger: by how long half of it lasted."""
        took, self.renewed_at = now - self.renewed_at, now
        if took < BUSY_SECONDS:
            self._grow(min(self.size, SHORT_WINDOW), budget)
        elif took > IDLE_SECONDS:
            self._aim(max(min(self.target, budget.first), self.target // 2), budget)

    def _pace_long(self, now: float, consumed: int, budget: ReceiveBudget) -> None:
        """Size a window that may grow beyond `SHORT_WINDOW`: by how many round trips a whole window lasts.

        That it lasts too long may show before it is consumed as a whole.
        """
        self._lap += consumed
        took, round_trip = now - self.renewed_at, budget.round_trip.seconds
        is_short, is_slow = self.target <= SHORT_WINDOW, took > 2 * IDLE_SECONDS
        if is_slow and is_short:
            self._aim(max(budget.first, self.target // 2), budget)
        elif is_slow or (round_trip is not None and not is_short and took > SHRINK_LAPS * round_trip):
            self._aim(max(SHORT_WINDOW, self.target // 2), budget)
        elif self._lap < self.target:
            return
        else:
            budget.round_trip.is_wanted = True
            if round_trip is not None and took < LAPS * round_trip:
                product = self._lap * round_trip / took if took > 0 else self.size
                self._grow(min(self.size, int(LAPS * product)), budget)
        self.renewed_at, self._lap = now, 0

    def _grow(self, size: int, budget: ReceiveBudget) -> None:
        """Double the window, up to `size` and to what the other windows leave."""
        target = self.target
        if self.size > SHORT_WINDOW and target >= ASK_FROM:
            budget.round_trip.is_wanted = True
        self._aim(max(target, min(size, target * 2, budget.most(target, is_grown=target > budget.first))), budget)

    def _aim(self, target: int, budget: ReceiveBudget) -> None:
        budget.resized(self.target, target)
        self.target = target
        self._renew_at = target * 3 // 4 if self._follows_path else target // 2
