"""Who is this id? The channels that live, the ids that are free, and the ids that ended a moment ago."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from muxkit._errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muxkit._limits import Limits

ChannelT = TypeVar("ChannelT")


class UsedIds(Protocol):
    """Ids that must not be given out: a dict does, and so does a `ChannelTable`."""

    def __contains__(self, id: int, /) -> bool: ...
    def __len__(self) -> int: ...


class Ids:
    """One sequence of ids: `first`, `first + step`, … up to `last`.

    `start` is the one to begin with. With `wraps` an id comes again once its channel is gone, as the sequence
    starts over after `last`; without, the sequence ends there.
    """

    __slots__ = ("_first", "_last", "_next", "_step", "_wraps")

    def __init__(self, first: int, last: int, *, step: int = 1, start: int | None = None, wraps: bool = False) -> None:
        self._first = first
        self._last = last
        self._step = step
        self._next = first if start is None else start
        self._wraps = wraps

    def allocate(self, used: UsedIds) -> int:
        """The next id that is not in use; it comes again only after the sequence started over."""
        # One more try than there are ids in use, or one for each id that exists, must meet a free one.
        for _ in range(min(len(used) + 1, (self._last - self._first) // self._step + 1)):
            if self._next > self._last:
                if not self._wraps:
                    break
                self._next = self._first
            id = self._next
            self._next += self._step
            if id not in used:
                return id
        raise LocalProtocolError(
            f"no id is free from {self._first} to {self._last} in steps of {self._step} ({len(used)} in use)"
        )


class Census:
    """How many channels does each side have, and how many did the application not take yet?

    One for a connection, whatever number of tables its channels are spread over.
    """

    __slots__ = ("_limits", "ours", "theirs", "waiting")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.ours = 0
        self.theirs = 0
        self.waiting = 0

    @property
    def places(self) -> int:
        """How many more we may open."""
        return self._limits.channels - self.ours

    @property
    def has_backlog_room(self) -> bool:
        """May the peer open one more? If not, it is for the protocol to say what a refusal looks like."""
        return self.waiting < self._limits.backlog

    def check_ours(self) -> None:
        if self.places < 1:
            raise LocalProtocolError(f"{self.ours} channels of {self._limits.channels} allowed are open")

    def check_theirs(self) -> None:
        if self.theirs >= self._limits.channels:
            raise RemoteProtocolError(
                f"peer opened channel {self.theirs + 1} of {self._limits.channels} allowed at once",
                limit=self._limits.bound_of_channels,
            )


class ChannelTable(Generic[ChannelT]):
    """The channels of one id space, by id.

    Ids of both sides may share it; then its `ids` give ours only. Tables of one connection share a `census`.
    """

    __slots__ = ("_ids", "_live", "_theirs", "_tombstone_limit", "_tombstones", "census")

    def __init__(self, limits: Limits, ids: Ids, census: Census | None = None) -> None:
        self.census = Census(limits) if census is None else census
        self._ids = ids
        self._live: dict[int, ChannelT] = {}
        self._theirs: dict[int, bool] = {}  # id of a channel that the peer opened: does it still wait?
        # id: end of its rest, the oldest burial first. In a plain dict the way to the first entry leads past
        # all that were deleted before it; here it does not.
        self._tombstones: OrderedDict[int, float] = OrderedDict()
        self._tombstone_limit = limits.tombstones

    def __contains__(self, id: int) -> bool:
        """Is it live?"""
        return id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[ChannelT]:
        """The live channels, oldest first, as they were at the call: removing some meanwhile is fine."""
        return iter(tuple(self._live.values()))

    def get(self, id: int) -> ChannelT | None:
        return self._live.get(id)

    # Coming

    def allocate(self) -> int:
        """An id for a channel of ours that is not live."""
        return self._ids.allocate(self._live)

    def add_ours(self, id: int, channel: ChannelT) -> None:
        if id in self._live:
            raise LocalProtocolError(f"channel {id} is open already")
        self.census.check_ours()
        self._live[id] = channel
        self.census.ours += 1

    def add_theirs(self, id: int, channel: ChannelT) -> None:
        """The peer opened it; it waits until `accept`."""
        if id in self._live:
            raise RemoteProtocolError(f"peer opened channel {id}, which is open already")
        self.census.check_theirs()
        self._live[id] = channel
        self._theirs[id] = True
        self.census.theirs += 1
        self.census.waiting += 1

    def accept(self, id: int) -> None:
        """The application took it; fine also if it did so before, or if the channel is gone."""
        if self._theirs.get(id, False):
            self._theirs[id] = False
            self.census.waiting -= 1

    # Going

    def remove(self, id: int) -> ChannelT:
        if id not in self._live:
            raise LocalProtocolError(f"channel {id} is not open")
        if id in self._theirs:
            self.accept(id)
            del self._theirs[id]
            self.census.theirs -= 1
        else:
            self.census.ours -= 1
        return self._live.pop(id)

    def bury(self, id: int, now: float, keep: float) -> None:
        """Remember for `keep` seconds that it ended; above `Limits.tombstones` the oldest give way."""
        self._tombstones.pop(id, None)
        self._tombstones[id] = now + keep
        while (oldest := next(iter(self._tombstones))) != id and (
            self._tombstones[oldest] <= now or len(self._tombstones) > self._tombstone_limit
        ):
            del self._tombstones[oldest]

    def is_buried(self, id: int, now: float) -> bool:
        """Did it end less than its `keep` ago?"""
        until = self._tombstones.get(id)
        if until is None or now < until:
            return until is not None
        del self._tombstones[id]
        return False
