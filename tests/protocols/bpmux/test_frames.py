"""Chunks as bytes: written and read again, whole and in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.bpmux import Chunk, Partial, Type, encode_chunk, encode_partial, parse_chunk

U64_MAX = 2**64 - 1
NUMBERS = st.one_of(
    st.integers(0, U64_MAX),
    st.sampled_from([0, 1, 247, 248, 255, 256, 2**32 - 1, 2**32, 2**56 - 1, 2**56, 2**63, U64_MAX]),
)
CHUNKS = st.builds(
    Chunk,
    type=st.sampled_from(list(Type)[:7]),
    id=NUMBERS,
    payload=st.none() | st.binary(max_size=300),
    credit=st.none() | NUMBERS,
    ping=st.booleans(),
    end=st.none() | st.binary(max_size=300),
    ack_end=st.booleans(),
)
PARTIALS = st.builds(Partial, total_size=st.integers(1, U64_MAX))


def encode(chunk: Chunk | Partial) -> bytes:
    return encode_partial(chunk.total_size) if isinstance(chunk, Partial) else encode_chunk(chunk)


@pytest.mark.requirement("R-16")
@given(CHUNKS | PARTIALS, st.binary(max_size=20))
def test_a_chunk_is_read_as_it_was_written_and_what_follows_is_left(chunk: Chunk | Partial, rest: bytes) -> None:
    data = encode(chunk)
    cursor = Cursor(data + rest)
    assert parse_chunk(cursor) == chunk
    assert cursor.position == len(data)


@pytest.mark.clause("bpmux-G13")
@given(CHUNKS | PARTIALS)
def test_a_chunk_that_is_cut_short_asks_for_what_is_missing_and_no_more(chunk: Chunk | Partial) -> None:
    data = encode(chunk)
    for end in range(len(data)):
        with pytest.raises(NeedMore) as need:
            parse_chunk(Cursor(data[:end]))
        assert 0 < need.value.missing <= len(data) - end


@pytest.mark.requirement("R-21")
@given(st.binary(max_size=60))
def test_any_bytes_are_chunks_or_too_few_or_a_violation(data: bytes) -> None:
    cursor = Cursor(data)
    try:
        while cursor.remaining:
            start = cursor.position
            chunk = parse_chunk(cursor)
            if not isinstance(chunk, Partial):
                assert encode_chunk(chunk) == data[start : cursor.position]
    except (NeedMore, RemoteProtocolError):
        pass


@pytest.mark.parametrize("total_size", [0, -1, 2**64])
def test_a_total_size_that_has_no_form_is_not_written(total_size: int) -> None:
    with pytest.raises(LocalProtocolError, match=str(total_size)):
        encode_partial(total_size)


def test_a_partial_is_not_written_as_a_chunk() -> None:
    with pytest.raises(LocalProtocolError, match="encode_partial"):
        encode_chunk(Chunk(Type.PARTIAL, 1))


@pytest.mark.parametrize("id", [-1, 2**64])
def test_an_id_outside_64_bits_is_not_written(id: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_chunk(Chunk(Type.OUT_SINK, id))
