"""Lines from pieces of any size, and the bytes that are held meanwhile."""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.protocols.restream.engine.line_engine import Lines

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError


def cut(
    data: bytes, pieces: list[int], limit: int = 1000
) -> tuple[list[tuple[int, bytes]], RemoteProtocolError | None]:
    """Return the lines with their offsets, and the violation."""
    lines = Lines(limit, "a test")
    found: list[tuple[int, bytes]] = []
    position = 0
    for size in [*pieces, len(data)]:
        error = lines.feed(data[position : position + size], lambda line: found.append((lines.offset, line)))
        if error is not None:
            return found, error
        position += size
    assert lines.received == len(data)
    assert lines.count == len(found)
    return found, None


@pytest.mark.clause("restream-F01")
@given(st.binary(max_size=80).map(lambda data: data.replace(b"\x01", b"\n")), st.lists(st.integers(0, 9)))
def test_lines_are_what_stands_between_line_feeds(data: bytes, pieces: list[int]) -> None:
    found, error = cut(data, pieces)
    assert error is None
    assert [line for _, line in found] == data.split(b"\n")[:-1]
    assert all(data[offset : offset + len(line) + 1] == line + b"\n" for offset, line in found)


@pytest.mark.clause("restream-F12")
@given(st.lists(st.integers(0, 14), max_size=8), st.lists(st.integers(1, 9)))
def test_a_line_over_the_limit_is_the_same_violation_however_it_comes(sizes: list[int], pieces: list[int]) -> None:
    data = b"".join(b"x" * size + b"\n" for size in sizes)
    whole, part = cut(data, [], limit=10), cut(data, pieces, limit=10)
    assert whole[0] == part[0]
    assert repr(whole[1]) == repr(part[1])
    assert (whole[1] is None) == all(size <= 10 for size in sizes)
    if whole[1] is not None and part[1] is not None:
        first = next(index for index, size in enumerate(sizes) if size > 10)
        assert whole[1].offset == part[1].offset == sum(size + 1 for size in sizes[:first])


@pytest.mark.requirement("R-27")
@given(st.lists(st.integers(0, 14), max_size=8), st.lists(st.integers(1, 9)), st.integers(1, 3))
def test_lines_that_come_together_can_be_taken_a_few_at_a_time(sizes: list[int], pieces: list[int], most: int) -> None:
    data = b"".join(b"x" * size + b"\n" for size in sizes) + b"yy"
    lines = Lines(10, "a test")
    lines.at_once = most
    found: list[tuple[int, bytes]] = []
    error, position = None, 0
    for size in [*pieces, len(data)]:
        piece = data[position : position + size]
        position += size
        before = len(found)
        error = error or lines.feed(piece, lambda line: found.append((lines.offset, line)))
        assert len(found) - before <= most
        assert lines.received == len(data[:position]) or error is not None
    while lines.unparsed and error is None:
        error = lines.feed(b"", lambda line: found.append((lines.offset, line)))
    whole = cut(data, [], limit=10)
    assert found == whole[0]
    assert repr(error) == repr(whole[1])


@pytest.mark.requirement("R-24", "R-29")
def test_a_long_line_in_small_pieces_costs_its_length_only() -> None:
    """Quadratic time would copy 50 GB here."""
    lines, found = Lines(10_000_000, "a test"), list[bytes]()
    begun = time.process_time()
    for _ in range(100_000):
        assert lines.feed(b"0123456789", found.append) is None
    lines.feed(b"\n", found.append)
    assert time.process_time() - begun < 2.0
    assert found == [b"0123456789" * 100_000]


@pytest.mark.requirement("R-24", "R-29")
def test_what_is_held_of_an_unfinished_line_is_its_bytes() -> None:
    lines = Lines(64 * 1024, "a test")
    tracemalloc.start()
    try:
        for _ in range(64 * 1024):
            lines.feed(b"x", _no_line)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert lines.held == 64 * 1024
    assert held < 160 * 1024
    assert lines.feed(b"x", _no_line) is not None


def _no_line(line: bytes) -> None:
    raise AssertionError(line)
