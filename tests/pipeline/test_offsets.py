"""Offsets of a query, and how a limit is divided."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.pipeline import OffsetError
from muxkit.pipeline.source.offsets import Offset, Position, Span, cut, group, share
from tests.pipeline._source_servers import ONE, THREE, TWO

NAMES = st.integers(0, 99).map(lambda n: f"{n:08x}-0000-4000-8000-000000000000")
POSITIONS = st.builds(Position, st.integers(0, 0xFFFFFFFF), st.none() | st.text("0123456789abcdef", min_size=1))
OFFSETS = st.dictionaries(NAMES, POSITIONS).flatmap(
    lambda streams: st.builds(
        Offset,
        st.just(streams),
        st.fixed_dictionaries({}, optional={uuid: st.integers(0, each.id) for uuid, each in streams.items()}),
    )
)
LAGS = st.dictionaries(NAMES, st.integers(0, 1_000_000), max_size=30)


@given(OFFSETS)
def test_an_offset_comes_back_from_text_as_it_was(offset: Offset) -> None:
    assert Offset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


@given(OFFSETS)
def test_equal_offsets_have_equal_text_whatever_the_order(offset: Offset) -> None:
    turned = Offset(dict(reversed([*offset.streams.items()])), dict(reversed([*offset.begins.items()])))
    assert json.dumps(offset.to_json()) == json.dumps(turned.to_json())
    assert json.dumps(offset.to_json()) == json.dumps(offset.to_json(), sort_keys=True)


@pytest.mark.parametrize(
    ("streams", "begins"),
    [({ONE: 20}, {ONE: 21}), ({}, {ONE: 1}), ({ONE: 20}, {ONE: 1 << 40})],
    ids=["beyond the end", "of no stream", "beyond all messages"],
)
def test_an_offset_that_would_acknowledge_what_it_does_not_read_is_refused(
    streams: dict[str, int], begins: dict[str, int]
) -> None:
    with pytest.raises(OffsetError, match=f"begins after message|offset says {1 << 40}"):
        Offset.from_json({"version": 2, "streams": streams, "begins": begins})


@pytest.mark.parametrize("uuid", ["", "../etc", TWO[:-1]])
def test_an_offset_with_a_name_that_is_no_uuid_is_refused(uuid: str) -> None:
    with pytest.raises(OffsetError, match="no uuid: the checkpoint is damaged"):
        Offset.from_json({"version": 2, "streams": {uuid: 5}})


def test_an_offset_beyond_the_last_id_that_a_stream_can_have_is_refused() -> None:
    with pytest.raises(OffsetError, match="the checkpoint is damaged"):
        Offset.from_json({"version": 2, "streams": {ONE: 1 << 32}})


@pytest.mark.parametrize("version", [3, None, "1"])
def test_an_offset_of_another_version_is_refused_with_both_versions(version: object) -> None:
    with pytest.raises(OffsetError, match=rf"version {version!r} and this muxkit reads version 2"):
        Offset.from_json({"version": version, "streams": {}, "begins": {}})


@pytest.mark.parametrize(
    "offset",
    [
        {"version": 1},
        {"version": 1, "streams": [], "begins": {}},
        {"version": 1, "streams": {ONE: "7"}},
        {"version": 1, "streams": {ONE: [7]}},
        {"version": 1, "streams": {ONE: -7}},
        {"version": 1, "streams": {ONE: True}},
        {"version": 1, "streams": {ONE: 7}, "begins": {ONE: 7.5}},
    ],
)
def test_what_is_no_offset_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(OffsetError):
        Offset.from_json(offset)


def test_an_offset_that_counts_owners_is_read_without_them() -> None:
    old = {"version": 1, "streams": {ONE: [7, 3], TWO: 9}, "begins": {TWO: 4}}
    assert Offset.from_json(old) == Offset({ONE: Position(7), TWO: Position(9)}, {TWO: 4})


@given(LAGS, st.integers(1, 2_000_000), st.integers(0, 100))
def test_shares_use_the_limit_up_and_nobody_gets_more_than_waits(lags: dict[str, int], most: int, turn: int) -> None:
    shares = share(lags, most, turn=turn)
    assert sum(shares.values()) == min(most, sum(lags.values()))
    assert all(0 < count <= lags[uuid] for uuid, count in shares.items())


@given(LAGS, st.integers(1, 2_000_000))
def test_everybody_who_waits_gets_something_if_there_is_one_for_each(lags: dict[str, int], most: int) -> None:
    waiting = {uuid for uuid, lag in lags.items() if lag}
    if len(waiting) <= most:
        assert set(share(lags, most)) == waiting


def test_shares_follow_what_waits() -> None:
    assert share({ONE: 9_000, TWO: 1_000, THREE: 0}, 100) == {ONE: 89, TWO: 11}


def test_with_fewer_places_than_streams_it_goes_in_turns() -> None:
    lags = {ONE: 1_000_000, TWO: 1, THREE: 1_000_000}
    assert {uuid for turn in range(3) for uuid in share(lags, 1, turn=turn)} == {ONE, TWO, THREE}


@given(st.lists(st.integers(1, 1000), max_size=40), st.none() | st.integers(1, 10))
def test_each_range_is_in_one_partition_and_no_stream_in_two(sizes: list[int], most: int | None) -> None:
    spans = [Span(str(index), "x", 10, 10 + size) for index, size in enumerate(sizes)]
    groups = group(spans, most)
    assert sorted(span.uuid for each in groups for span in each) == sorted(span.uuid for span in spans)
    assert len(groups) == (len(spans) if most is None else min(most, len(spans)))


def whole(size: int, uuid: str = ONE, begin: int = 0) -> Span:
    return Span(uuid, "x", begin, begin + size, "incarnation")


@given(st.lists(st.integers(1, 1000), max_size=10), st.integers(1, 300), st.none() | st.integers(1, 20))
def test_a_stream_is_cut_into_ranges_that_follow_each_other(sizes: list[int], most: int, least: int | None) -> None:
    spans = [whole(size, str(index), begin=index) for index, size in enumerate(sizes)]
    pieces = cut(spans, most, least=least)
    assert all(0 < piece.count <= most for piece in pieces)
    assert least is None or len(pieces) >= min(least, sum(sizes))
    for span in spans:
        ranges = [(piece.begin, piece.end) for piece in pieces if piece.uuid == span.uuid]
        assert (ranges[0][0], ranges[-1][1]) == (span.begin, span.end)
        assert all(before[1] == after[0] for before, after in pairwise(ranges))


def test_a_hot_stream_fills_the_partitions_that_there_may_be() -> None:
    pieces = cut([whole(1_000_000), whole(10, TWO)], 100_000, most=2)
    assert [piece.count for piece in pieces] == [500_000, 500_000, 10]
    assert sorted(sum(piece.count for piece in each) for each in group(pieces, 2)) == [500_000, 500_010]


def test_a_stream_of_a_server_that_lets_one_connection_read_stays_whole() -> None:
    span = Span(ONE, "x", 0, 1_000_000)
    assert cut([span], 1000, least=8) == [span]


def test_partitions_are_of_about_one_size() -> None:
    spans = [Span(str(size), "x", 0, size) for size in (90, 50, 40, 10, 10)]
    assert sorted(sum(span.count for span in each) for each in group(spans, 2)) == [100, 100]
