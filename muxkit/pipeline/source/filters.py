"""Turns Spark's filters on `stream` and `id` into the streams and ids that a batch query reads.

Without them, a query for one stream of thousands, or for the last messages of a long stream, would read everything and
drop nearly all of it. Spark evaluates the filters that this module doesn't understand.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from pyspark.sql import datasource

from muxkit.pipeline.source.offsets import EVERYTHING, Wanted


def narrow(filters: Sequence[datasource.Filter]) -> tuple[Wanted, list[datasource.Filter]]:
    """Return the messages that can pass these filters, and the filters that Spark has to evaluate itself."""
    wanted, left = EVERYTHING, list[datasource.Filter]()
    for each in filters:
        narrowed = _narrowed(wanted, each)
        if narrowed is None:
            left.append(each)
        else:
            wanted = narrowed
    return wanted, left


def _narrowed(wanted: Wanted, each: datasource.Filter) -> Wanted | None:
    """Return the messages that also pass another filter, or None if the filter has to be left to Spark."""
    match each:
        case datasource.IsNotNull(attribute=("stream",) | ("id",)):
            return wanted  # these columns have no nulls
        case datasource.EqualTo(attribute=("stream",), value=str() as uuid):
            return _with_streams(wanted, frozenset({uuid}))
        case datasource.In(attribute=("stream",), value=values):
            return _with_streams(wanted, frozenset(str(value) for value in values))
        case datasource.EqualTo(attribute=("id",), value=int() as id):
            return _with_ids(wanted, id - 1, id)
        case datasource.In(attribute=("id",), value=[int() as id]):
            return _with_ids(wanted, id - 1, id)
        case datasource.GreaterThan(attribute=("id",), value=int() as id):
            return _with_ids(wanted, id, wanted.upto)
        case datasource.GreaterThanOrEqual(attribute=("id",), value=int() as id):
            return _with_ids(wanted, id - 1, wanted.upto)
        case datasource.LessThan(attribute=("id",), value=int() as id):
            return _with_ids(wanted, wanted.after, id - 1)
        case datasource.LessThanOrEqual(attribute=("id",), value=int() as id):
            return _with_ids(wanted, wanted.after, id)
        case _:
            return None


def _with_streams(wanted: Wanted, streams: frozenset[str]) -> Wanted:
    return attrs.evolve(wanted, streams=streams if wanted.streams is None else wanted.streams & streams)


def _with_ids(wanted: Wanted, after: int, upto: int) -> Wanted:
    return attrs.evolve(wanted, after=max(wanted.after, after), upto=min(wanted.upto, upto))
