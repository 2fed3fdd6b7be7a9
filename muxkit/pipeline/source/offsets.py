"""Offsets of a query (a position in each stream, as JSON), the ranges of a batch, and lag.

Spark stores offsets and compares them as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import attrs

from muxkit.pipeline.errors import OffsetError
from muxkit.pipeline.options import MOST_ID, is_uuid

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

JsonOffset = dict[str, object]


VERSION: Final = 2
OWNERS_VERSION: Final = 1  # its positions count the owners of a session, which we don't need


@attrs.frozen
class Position:
    """The last message of a stream in a batch, and the incarnation of its session, or None if that is unknown."""

    id: int
    incarnation: str | None = None


@attrs.frozen
class Offset:
    """The end of a batch. `begins` has the start of the streams that don't continue where the last batch ended."""

    streams: Mapping[str, Position] = attrs.field(factory=dict)
    begins: Mapping[str, int] = attrs.field(factory=dict)

    def to_json(self) -> JsonOffset:
        """Convert to JSON with sorted keys, because Spark would treat another order as another offset."""
        return {
            "begins": dict(sorted(self.begins.items())),
            "streams": {
                uuid: position.id if position.incarnation is None else [position.id, position.incarnation]
                for uuid, position in sorted(self.streams.items())
            },
            "version": VERSION,
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, object]) -> Offset:
        """Parse JSON. Raises `OffsetError` if it isn't an offset of this source."""
        version = offset.get("version")
        if type(version) is not int or version not in (VERSION, OWNERS_VERSION):
            raise OffsetError(
                f"this offset has version {version!r} and this muxkit reads version {VERSION}: "
                "go on with the version that wrote the checkpoint, or begin a new checkpoint"
            )
        streams, begins = offset.get("streams"), offset.get("begins", {})
        if not isinstance(streams, dict) or not isinstance(begins, dict):
            raise OffsetError("this offset has no streams: the checkpoint belongs to another source")
        found = cls(
            {uuid: _position(uuid, each) for uuid, each in streams.items()},
            {uuid: _id(uuid, each) for uuid, each in begins.items()},
        )
        for uuid, begin in found.begins.items():
            # Such a batch would be empty. Then everything up to its end would be acknowledged without being read.
            if uuid not in found.streams or begin > found.streams[uuid].id:
                raise OffsetError(
                    f"this offset begins after message {begin} of stream {uuid}, which is beyond its end: the "
                    "checkpoint is damaged"
                )
        return found


@attrs.frozen
class Span:
    """The messages of a stream after `begin`, up to `end`. `server` is where the stream was found.

    `incarnation` is that of the session, or None if it is unknown.
    """

    uuid: str
    server: str
    begin: int
    end: int
    incarnation: str | None = None

    @property
    def count(self) -> int:
        """The number of messages in the range."""
        return self.end - self.begin


@attrs.frozen
class Wanted:
    """The messages that a batch query needs, as far as Spark's filters say.

    Attributes:
        streams: the streams, or None for all streams of the query.
        after: the message before the first one.
        upto: the last message.
    """

    streams: frozenset[str] | None = None
    after: int = 0
    upto: int = MOST_ID


EVERYTHING: Final = Wanted()


def share(lags: Mapping[str, int], most: int, *, turn: int = 0) -> dict[str, int]:
    """Divide `most` messages among streams, in proportion to their lag.

    Every stream gets at least one message. If there aren't enough for that, the streams take turns.
    """
    waiting = [uuid for uuid in sorted(lags) if lags[uuid] > 0]
    total = sum(lags[uuid] for uuid in waiting)
    if total <= most:
        return {uuid: lags[uuid] for uuid in waiting}
    if len(waiting) >= most:
        first = turn % len(waiting)
        return dict.fromkeys((waiting[first:] + waiting[:first])[:most], 1)
    rest = {uuid: lags[uuid] - 1 for uuid in waiting}
    left, total = most - len(waiting), total - len(waiting)
    shares = {uuid: rest[uuid] * left // total for uuid in waiting}
    # The remainder goes to the streams that lost most by rounding.
    by_loss = sorted(waiting, key=lambda uuid: (-(rest[uuid] * left % total), uuid))
    for uuid in by_loss[: left - sum(shares.values())]:
        shares[uuid] += 1
    return {uuid: shares[uuid] + 1 for uuid in waiting}


def cut(spans: Sequence[Span], most_messages: int, *, least: int | None = None, most: int | None = None) -> list[Span]:
    """Cut long spans into ranges.

    Ranges have at most `most_messages`. They are shorter if there would otherwise be fewer than `least` ranges of equal
    size, and longer if there would be more than `most`. A span without an incarnation isn't cut, because its server may
    let only one connection read a session.
    """
    whole = sum(span.count for span in spans)
    if least is not None and whole:
        most_messages = min(most_messages, -(-whole // least))
    if most is not None:
        most_messages = max(most_messages, -(-whole // most))
    pieces: list[Span] = []
    for span in spans:
        number = 1 if span.incarnation is None else -(-span.count // most_messages)
        ends = [span.begin + span.count * index // max(1, number) for index in range(number + 1)]
        pieces += [attrs.evolve(span, begin=begin, end=end) for begin, end in pairwise(ends)]
    return pieces


def group(spans: Sequence[Span], most: int | None) -> list[tuple[Span, ...]]:
    """Return one partition per span, or `most` partitions of about equal size."""
    if most is None or len(spans) <= most:
        return [(span,) for span in spans]
    groups: list[list[Span]] = [[] for _ in range(most)]
    sizes = [0] * most
    for span in sorted(spans, key=lambda each: (-each.count, each.uuid, each.begin)):
        least = sizes.index(min(sizes))
        groups[least].append(span)
        sizes[least] += span.count
    return [tuple(sorted(each, key=lambda span: (span.uuid, span.begin))) for each in groups]


def _position(uuid: str, value: object) -> Position:
    if isinstance(value, list) and len(value) == 2:
        incarnation = value[1] if isinstance(value[1], str) else None
        return Position(_id(uuid, value[0]), incarnation)
    return Position(_id(uuid, value))


def _id(uuid: str, value: object) -> int:
    if not is_uuid(uuid):
        raise OffsetError(f"this offset has a stream {uuid!r:.100}, and that is no uuid: the checkpoint is damaged")
    if type(value) is not int or not 0 <= value <= MOST_ID:
        raise OffsetError(f"this offset says {value!r:.100} of stream {uuid}, and no number: the checkpoint is damaged")
    return value


def lag(progress: StreamingQueryProgress | Mapping[str, object] | None) -> dict[str, int]:
    """Return how many messages of each stream are not in a batch yet.

    Args:
        progress: `query.lastProgress`, or the progress of a listener's event.

    Returns:
        The numbers by stream. Empty before the first batch, and for queries that don't read this source.
    """
    if progress is None:
        return {}
    told: Any = json.loads(progress.json) if hasattr(progress, "json") else progress
    behind: dict[str, int] = {}
    for source in told["sources"]:
        latest, end = offset_of(source.get("latestOffset")), offset_of(source.get("endOffset"))
        for uuid, head in latest.streams.items():
            read = end.streams.get(uuid)
            if read is not None:
                behind[uuid] = max(0, head.id - read.id)
    return behind


def offset_of(value: object) -> Offset:
    """Parse an offset in Spark's progress, which is an object or text. Return an empty one for other sources."""
    try:
        told = json.loads(value) if isinstance(value, str) else value
        return Offset.from_json(told) if isinstance(told, dict) else Offset()
    except (OffsetError, ValueError, RecursionError):  # RecursionError is raised for deeply nested brackets
        return Offset()
