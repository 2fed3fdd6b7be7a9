"""Decides how large the receive windows of all channels are, for all protocols with flow control.

Theory of operation
===================

The window of a channel is the number of bytes that the peer may send before the application has consumed them. The peer
gets its permission to send in grants of *credit*. At most one window can be sent in a round trip. So with a window that
is too small, the channel can't use a fast connection with a long round-trip time. But a window that is too large costs
memory if the application stops reading, because granted credit can't be revoked. So we let each window grow and shrink:

    start                `first` bytes, or `floor` if the first grants of other channels have used up half of `total`
      |  the application consumes half of the window within `BUSY_SECONDS`: the window doubles
      v
    SHORT_WINDOW         enough for every path whose round-trip time is a few milliseconds
      |  it consumes a whole window within `LAPS` round trips: the window grows, at most to twice its size
      v
    the path's window    `LAPS` times the bandwidth-delay product, and at most `channel_bytes`

The bandwidth-delay product is the number of bytes that the application consumes per second, times the round-trip time.
If a channel is limited by its window, the application consumes a whole window in one or two round trips. (In two,
because grants and the last message of a window may come late.) The window then doubles each time. If anything else
limits the channel, such as the bandwidth, the peer or the application, a window of `LAPS` products is never used up,
and it doesn't grow any further.

A window is halved if the application needs more than `SHRINK_LAPS` round trips to consume it. A window of
`SHORT_WINDOW` or less is halved if half of it takes more than `IDLE_SECONDS`. If the application stops reading, the
peer keeps the credit that was last granted, and gets no more.

**The round-trip time** comes from the `RoundTrip` object of the connection. While it is unknown, no window exceeds
`SHORT_WINDOW`. A protocol can measure it in one of three ways:

- An engine with pings sends one when `RoundTrip.is_due` returns True. That is only the case while a channel receives
  large amounts of data, and at most once every `PROBE_PAUSE` seconds. The engine calls `asked` when it has queued the
  ping, and `answered` when the answer has arrived.
- A transport that measures round trips itself, such as QUIC, passes them to `measured`.
- A receiver without either can measure the time from a grant to the next byte of a peer that had no credit left.

We use the smallest of these samples. A larger one includes the time that the answer spent in queues. If the windows
grew with the queues, they would make the queues longer. But the path itself may also become longer. Queues that are
caused by our windows can lengthen a sample to at most `SHRINK_LAPS` times the known round-trip time, because no window
is larger than that. So if `LONGER_AFTER` samples in a row are larger, we use the smallest of these from then on.

**The budget.** All windows of a connection share `total` bytes (`ReceiveBudget`). In addition, each window has `floor`
bytes for itself. The first grants of all channels use at most half of `total`. The windows that have grown beyond
`first` share the other half. If they don't all fit, a window that is larger than an equal share shrinks in favour of
smaller ones. So a channel whose application doesn't read takes only its own window from the others, and ten thousand
idle channels don't reduce the window of a busy one.

**Protocols.** A protocol sends the grants that `start` and `consumed` return. Each is for half of the window. Windows
of `SHORT_WINDOW` and more are renewed in quarters, so that at least three quarters of the window are available for the
path. In Relink, which has no grants, the sender limits itself: it counts the bytes that the peer has acknowledged as
consumed in a `ReceiveWindow`, and sends at most `target` bytes more.
"""

from __future__ import annotations

from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import SHORT_WINDOW
from muxkit.core._windows import U64_MAX

BUSY_SECONDS: Final = 1.0  # a channel that consumes half a window in less time could use a larger window
IDLE_SECONDS: Final = 4.0  # a channel that needs more time for half a window could do with a smaller window
LAPS: Final = 3.0  # a channel that consumes a whole window in fewer round trips may need a larger window
SHRINK_LAPS: Final = 6.0  # a channel that needs more round trips for a whole window could do with a smaller window
ASK_FROM: Final = SHORT_WINDOW // 4  # a busy window of this size will soon need the round-trip time
PROBE_PAUSE: Final = 5.0  # minimum number of seconds between two pings that measure the round-trip time
LONGER_AFTER: Final = 3  # number of larger samples in a row after which we believe that the path is longer


class RoundTrip:
    """An estimate of the round-trip time of a connection's path, without queues. The module explains it."""

    __slots__ = ("_asked_at", "_least", "_longer", "_longer_count", "_next_at", "besides", "is_wanted")

    def __init__(self) -> None:
        self._least: float | None = None
        self.besides: float = 0.0
        """Seconds to add for protocols that resend lost packets themselves, because that takes additional time."""
        self.is_wanted: bool = False
        """True while a window needs a sample. An engine with pings then calls `is_due`."""
        self._asked_at: float | None = None  # when the unanswered ping was sent
        self._next_at = 0.0  # when the next ping may be sent
        self._longer = 0.0  # the smallest of the last samples that indicate a longer path
        self._longer_count = 0  # number of these samples

    @property
    def seconds(self) -> float | None:
        """The time for which a window must be sufficient, or None before the first sample."""
        return None if self._least is None else self._least + self.besides

    def is_due(self, now: float) -> bool:
        """Return True if the engine should send a ping now."""
        return self.is_wanted and self._asked_at is None and now >= self._next_at

    def asked(self, now: float) -> None:
        """Record that the engine has sent a ping."""
        self.is_wanted = False
        self._asked_at = now
        self._next_at = now + PROBE_PAUSE

    def answered(self, now: float) -> None:
        """Use the time since the ping as a sample. Does nothing if there is no unanswered ping."""
        if self._asked_at is not None:
            sample, self._asked_at = now - self._asked_at, None
            self.measured(sample)

    def gave_up(self) -> None:
        """Forget the unanswered ping, because its answer won't arrive."""
        self._asked_at = None

    def measured(self, sample: float) -> None:
        """Update the estimate with a sample in seconds."""
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
    """The memory that all windows of one connection share.

    Each window may use `floor` bytes that don't count. The bytes beyond that count in `used`, which is limited by
    `total`.
    """

    __slots__ = ("first", "first_half", "floor", "grown", "grown_bytes", "round_trip", "total", "used", "windows")

    def __init__(self, total: int, floor: int, first: int) -> None:
        self.total: int = total
        self.floor: int = floor
        self.first: int = first
        self.first_half: int = first // 2  # shared by most windows, to save an integer object for each
        self.used: int = 0
        self.windows: int = 0  # number of windows
        self.grown: int = 0  # number of windows that have grown beyond `first`
        self.grown_bytes: int = 0  # the sum of the sizes of these windows
        self.round_trip: RoundTrip = RoundTrip()

    def first_room(self, wanted: int) -> int:
        """Return how many bytes a new window may grant first. `wanted` is its maximum size."""
        first = min(wanted, self.first)
        return first if self.used + first - self.floor <= self.total // 2 else min(first, self.floor)

    def most(self, target: int, *, is_grown: bool) -> int:
        """Return the size to which a window of size `target` may grow: an equal share, or more if the others need less.

        `is_grown` is True if the window is larger than `first`.
        """
        half, grown = self.total // 2, self.grown + (not is_grown)
        others = self.grown_bytes - target if is_grown else self.grown_bytes
        return max(self.first, half // grown, half - others)

    def room(self, wanted: int, outstanding: int) -> int:
        """Return how many bytes a window may grant now.

        `wanted` is its size, and `outstanding` is the number of bytes that it has granted before and that weren't
        consumed.
        """
        pool = self.total if wanted > self.first else self.total // 2
        left = max(0, pool - self.used) + max(0, self.floor - outstanding)
        return min(wanted - outstanding, left)

    def moved(self, before: int, after: int) -> None:
        """Update `used`, because the outstanding bytes of a window have changed."""
        floor = self.floor
        self.used += (after - floor if after > floor else 0) - (before - floor if before > floor else 0)

    def resized(self, before: int, after: int) -> None:
        """Update the sums, because the size of a window has changed."""
        first = self.first
        self.grown += (after > first) - (before > first)
        self.grown_bytes += (after if after > first else 0) - (before if before > first else 0)


class ReceiveWindow:
    """The window of one channel. It counts bytes and decides when to grant how many more.

    `credit` is the number of bytes that the peer may still send. `held` is the number of bytes that have arrived and
    weren't consumed. The sum of both consists of three parts:

    - `own` bytes were granted by the window. The window renews them, and they count in the budget.
    - `lent` bytes were lent for messages that are larger than the window (see `Reassembly`).
    - `by_hand` bytes were granted by the application.

    Consumed bytes first repay the loans, then the bytes granted by the application, and then renew the window.

    Args:
        size: The maximum size of the window. 0 means that the application makes all grants.
        budget: The budget of the connection.

    Attributes:
        target: The current size of the window.
        unfinished: How many bytes are missing of incomplete messages.
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
        """The number of bytes that the window has granted and that weren't consumed."""
        return self.credit + self.held - self.lent - self.by_hand

    @property
    def _follows_path(self) -> bool:
        """True if the size of the window depends on the round-trip time."""
        return self.size > SHORT_WINDOW and self.target >= SHORT_WINDOW

    def start(self, now: float, first: int | None = None) -> int:
        """Make the first grant and return its size. It is `first` if the protocol defines how much it must be."""
        if self.budget is None or not self.renews:
            return 0
        room = self.target = self.budget.first_room(self.size)
        self._renew_at = self.budget.first_half if room == self.budget.first else room // 2
        self.renewed_at = now
        if first is not None:
            room = first
            # The first bytes that are consumed make the window grant the rest of its size. They mustn't look like half
            # a window that was consumed quickly, or the window would double.
            self.renewed_at -= BUSY_SECONDS
        # Most windows make the same first grant and no other. This lets them share one integer object.
        self.credit = self.credit + room if self.credit else room
        self.budget.moved(0, room)
        return room

    def grant(self, amount: int) -> None:
        """Count a grant that the application makes in addition to the window."""
        if amount < 0 or self.credit + amount > U64_MAX:
            raise LocalProtocolError(
                f"invalid credit of {amount}: with the {self.credit} before, expected 0 to {U64_MAX}"
            )
        self.credit += amount
        self.by_hand += amount

    def arrived(self, amount: int) -> None:
        """Count bytes that the peer has sent. Raises `RemoteProtocolError` if they exceed its credit."""
        if amount > self.credit:
            raise RemoteProtocolError(f"the peer sent {amount} bytes: expected at most {self.credit}, its credit")
        self.credit -= amount
        self.held += amount

    def consumed(self, amount: int, now: float) -> tuple[int, int]:
        """Count `amount` bytes as consumed by the application.

        Returns:
            How many bytes to grant to the peer now, and how many bytes to return to `Reassembly`.
        """
        if not 0 <= amount <= self.held:
            raise LocalProtocolError(f"{amount} bytes consumed: expected at most {self.held}, which have arrived")
        self.held -= amount
        if not (self.lent or self.by_hand) and self.budget is not None:
            own, floor = self.credit + self.held, self.budget.floor
            if own + amount > floor:  # `ReceiveBudget.moved` is inlined here, because this runs for each message
                self.budget.used -= own + amount - (own if own > floor else floor)  # noqa: FURB136 - `max` is slower
            # Fast path: the peer still has enough of the window.
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
        """Return how many bytes of credit the peer lacks to complete its messages."""
        return max(0, self.unfinished - self.credit)

    def lend(self, amount: int) -> None:
        """Count a grant that was borrowed from `Reassembly`."""
        self.credit += amount
        self.lent += amount

    def quiet(self) -> None:
        """Make no more grants. The peer may still use the credit that it has."""
        self.renews = False

    def retire(self) -> int:
        """Close the window, because no more bytes will arrive.

        The bytes in `held` still count until they are consumed. Returns how many bytes to return to `Reassembly`.
        """
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
        if self.target < budget.first:  # other channels had used up the first grants, but may have ended since then
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
        """Resize a window that is below `SHORT_WINDOW` or can't be larger, by the time in which half was consumed."""
        took, self.renewed_at = now - self.renewed_at, now
        if took < BUSY_SECONDS:
            self._grow(min(self.size, SHORT_WINDOW), budget)
        elif took > IDLE_SECONDS:
            self._aim(max(min(self.target, budget.first), self.target // 2), budget)

    def _pace_long(self, now: float, consumed: int, budget: ReceiveBudget) -> None:
        """Resize a window that may grow beyond `SHORT_WINDOW`, by the number of round trips for a whole window.

        A window that is too large is reduced before it is consumed completely.
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
        """Double the window, but not beyond `size` or the room that the other windows leave."""
        target = self.target
        if self.size > SHORT_WINDOW and target >= ASK_FROM:
            budget.round_trip.is_wanted = True
        self._aim(max(target, min(size, target * 2, budget.most(target, is_grown=target > budget.first))), budget)

    def _aim(self, target: int, budget: ReceiveBudget) -> None:
        budget.resized(self.target, target)
        self.target = target
        self._renew_at = target * 3 // 4 if self._follows_path else target // 2
