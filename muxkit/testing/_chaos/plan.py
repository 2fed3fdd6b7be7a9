"""Plans of failures, and the fate that a seed draws from a plan for each connection."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum

import attrs

from muxkit._limits import ABOVE_ZERO, NOT_NEGATIVE, must_be

KIB = 1024
BLOCK = 4 * KIB  # bytes that share one draw of jitter


class Cut(Enum):
    """How a connection is lost."""

    END = "end"
    """Both sides see the end of the stream."""
    RESET = "reset"
    """Both sides see an error; what was under way may be lost."""
    STALL = "stall"
    """Nothing is delivered any more, and neither side is told."""


class Way(Enum):
    """A direction."""

    THERE = "there"
    """From the client to the target."""
    BACK = "back"
    """From the target to the client."""


BOTH_WAYS = (Way.THERE, Way.BACK)


SHARE = must_be("from 0 to 1", lambda value: 0 <= value <= 1)
RANGE = must_be("(least, most), not below 0", lambda value: 0 <= value[0] <= value[1])


@attrs.frozen(kw_only=True)
class ChaosPlan:
    """What the weather is like; without arguments it is fine. Times in seconds, shares from 0 to 1."""

    delay: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Each byte arrives so much later, in both directions."""
    jitter: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """And up to so much later still; bytes do not overtake each other."""
    rate: float | None = attrs.field(default=None, validator=attrs.validators.optional(ABOVE_ZERO))
    """Bytes a second in each direction of each connection."""
    buffer: int = attrs.field(default=64 * KIB, validator=attrs.validators.ge(1))
    """Bytes under way in each direction; more wait with the sender. With a delay this bounds the rate."""
    cut_after: tuple[int, int] | None = attrs.field(default=None, validator=attrs.validators.optional(RANGE))
    """A connection is cut behind a byte between these two, counted in one direction."""
    cut_ways: tuple[Way, ...] = attrs.field(default=BOTH_WAYS, validator=attrs.validators.min_len(1))
    """The directions that may be chosen to count in."""
    cut_share: float = attrs.field(default=1.0, validator=SHARE)
    """The share of connections that are cut at all."""
    reset: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts that are resets."""
    stall: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts that are stalls, of one direction or both; the rest are orderly ends."""
    stall_for: float = attrs.field(default=60.0, validator=NOT_NEGATIVE)
    """A stalled connection is reset after this time."""
    refuse: float = attrs.field(default=0.0, validator=SHARE)
    """The share of cuts after which new connections are refused for a while."""
    refuse_for: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """How long they are refused."""

    def __attrs_post_init__(self) -> None:
        if self.reset + self.stall > 1.0:
            raise ValueError(f"ChaosPlan(reset={self.reset}, stall={self.stall}): more than 1 in all")

    def fate(self, seed: int, number: int) -> Fate:
        """What happens to the n-th connection, counted from 0; the same for the same seed, whatever the timing."""
        dice = random.Random(f"{seed}/{number}")
        # Each is drawn whether it is wanted or not, so that one knob does not turn the others.
        is_cut = dice.random() < self.cut_share
        way = dice.choice(self.cut_ways)
        where = dice.random()
        kind = dice.random()
        stalled = dice.choice(((Way.THERE,), (Way.BACK,), BOTH_WAYS))
        is_refused = dice.random() < self.refuse
        how = Cut.RESET if kind < self.reset else Cut.STALL if kind < self.reset + self.stall else Cut.END
        cut_at = None
        if self.cut_after is not None and is_cut:
            least, most = self.cut_after
            cut_at = least + int(where * (most - least + 1))
        return Fate(
            number=number,
            cut_at=cut_at,
            way=way,
            how=how,
            stalled=stalled if how is Cut.STALL else (),
            refuse_for=self.refuse_for if is_refused else 0.0,
            seed=seed,
        )


@attrs.frozen(kw_only=True)
class Fate:
    """What happens to one connection."""

    number: int
    """Of the connection, in the order in which they were accepted, from 0."""
    cut_at: int | None
    """The byte behind which it is cut; None if it is not."""
    way: Way
    """In which direction these bytes are counted."""
    how: Cut
    stalled: tuple[Way, ...]
    """The directions in which a stall delivers nothing more."""
    refuse_for: float
    """Seconds after the cut in which connections are refused."""
    seed: int

    def lateness(self, way: Way, offset: int) -> float:
        """From 0 to 1: how much of the jitter the byte at `offset` gets."""
        return random.Random(f"{self.seed}/{self.number}/{way.value}/{offset // BLOCK}").random()


@attrs.frozen(kw_only=True)
class CutReport:
    """A cut, as it was."""

    number: int
    """Of the connection."""
    how: Cut
    way: Way | None
    """The direction in which the bytes were counted; None if it was cut by hand."""
    bytes_there: int
    bytes_back: int
    after: float
    """Seconds from the begin of the connection."""


OnCut = Callable[[CutReport], None]


@attrs.define(kw_only=True)
class ChaosStats:
    """What has happened so far; counters."""

    connections: int = 0
    live: int = 0
    ends: int = 0
    resets: int = 0
    stalls: int = 0
    unreachable: int = 0
    """Connections that were dropped because the target could not be reached."""
    bytes_there: int = 0
    """Delivered to the target."""
    bytes_back: int = 0
    """Delivered to the client."""

    @property
    def cuts(self) -> int:
        return self.ends + self.resets + self.stalls
