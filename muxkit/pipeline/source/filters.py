"""Which filters need not read everything? Those on `stream` and `id`; all others are left to Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from muxkit.pipeline.source.offsets import Span

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_ID = 0xFFFFFFFF


@attrs.define
class Bounds:
    """What may come: these streams, None for all, and ids above `above` up to `upto`."""

    streams: set[str] | None = None
    above: int = 0
    upto: int = MOST_ID

    def narrow(self, spans: Iterable[Span]) -> list[Span]:
        """What is left of these ranges."""
        narrowed = []
        for span in spans:
            begin, end = max(span.begin, self.above), min(span.end, self.upto)
            if begin < end and (self.streams is None or span.uuid in self.streams):
                narrowed.append(Span(span.uuid, span.server, begin, end))
        return narrowed

    def only(self, streams: Iterable[object]) -> None:
        wanted = {each for each in streams if isinstance(each, str)}
        self.streams = wanted if self.streams is None else self.streams & wanted


def bounds_of(filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """What these filters leave, and those of them that it does not cover."""
    bounds = Bounds()
    left = [each for each in filters if not _cover(bounds, each)]
    return bounds, left


def _cover(bounds: Bounds, each: Filter) -> bool:
    match each:
        case EqualTo(("stream",), str() as value):
            bounds.only((value,))
        case In(("stream",), values):
            bounds.only(values)
        case EqualTo(("id",), int() as value):
            bounds.above, bounds.upto = max(bounds.above, value - 1), min(bounds.upto, value)
        case GreaterThan(("id",), int() as value):
            bounds.above = max(bounds.above, value)
        case GreaterThanOrEqual(("id",), int() as value):
            bounds.above = max(bounds.above, value - 1)
        case LessThan(("id",), int() as value):
            bounds.upto = min(bounds.upto, value - 1)
        case LessThanOrEqual(("id",), int() as value):
            bounds.upto = min(bounds.upto, value)
        case IsNotNull(("stream",) | ("id",) | ("value",)):
            pass
        case _:
            return False
    return True
