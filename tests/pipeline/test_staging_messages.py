"""Messages come back as they were, and everything else is refused with one kind of error."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.pipeline import Encoding, StagingLimits, make_block
from muxkit.pipeline.errors import STAGING_ERRORS, StagingError, StagingRequestInvalid, TransactionGone
from muxkit.pipeline.staging.records import (
    LAST_BATCH,
    MOST_JSON,
    START,
    Abort,
    Aborted,
    AnyQuestion,
    Ask,
    Begin,
    Begun,
    Committing,
    Failed,
    Prepare,
    Stored,
    answer,
    decode_block,
    encode,
    encode_block,
    is_block,
    question,
    rows_of,
)

LIMITS = StagingLimits()

QUESTIONS: list[AnyQuestion] = [
    Begin(stream="s", app="a", txn="t", batch=LAST_BATCH, encoding=Encoding.JSON, ttl=1.5, token="x", once=True),
    Prepare(stream="s", app="a", txn="t", batch=0, rows=7),
    Committing(stream="s", app="ü", batch=3, parts=[("t", 7), ("u", 0)]),
    Abort(stream="s", app="a", batch=3, txns=["t"]),
    Ask(stream="s", app="a"),
]


@given(st.integers(0, 2**40), st.lists(st.binary(max_size=50), min_size=1, max_size=30))
def test_a_block_comes_back_as_it_was(first: int, content: list[bytes]) -> None:
    block = decode_block(encode_block(make_block(first, content)), LIMITS)
    assert (block.first, block.rows) == (first, len(content))
    assert rows_of(block) == content


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10), st.data())
def test_a_block_with_one_byte_changed_is_refused(content: list[bytes], data: st.DataObject) -> None:
    message = bytearray(encode_block(make_block(5, content)))
    at = data.draw(st.integers(START, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StagingRequestInvalid, match=r"the block from row 5 was changed on its way"):
        decode_block(bytes(message), LIMITS)


@pytest.mark.requirement("R-21")
@given(st.binary(max_size=200))
def test_any_bytes_behind_a_b_are_a_block_or_refused(data: bytes) -> None:
    with suppress(StagingRequestInvalid):
        decode_block(b"B" + data, LIMITS)


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(
    ("first", "rows", "told"),
    [
        (0, 0, "0 rows"),
        (0, 4, "4 rows in 12 bytes"),
        (2**64 - 1, 2, "2 rows in 12 bytes"),
        (0, 2**32 - 1, "4,294,967,295 rows in 12 bytes"),
        (0, 1, "have 1 bytes, and 8 came"),
        (0, 3, r"have [\d,]+ bytes, and 0 came"),
    ],
)
def test_numbers_that_do_not_fit_the_bytes_are_refused(first: int, rows: int, told: str) -> None:
    block = make_block(0, [b"a", b"bbb"])
    assert len(block.body) == 12
    with pytest.raises(StagingRequestInvalid, match=told):
        decode_block(encode_block(block._replace(first=first, rows=rows)), LIMITS)


@pytest.mark.requirement("R-26")
def test_a_block_and_a_row_may_be_so_large() -> None:
    limits = StagingLimits(row=10, block=100)
    assert decode_block(encode_block(make_block(0, [b"x" * 10])), limits).rows == 1
    with pytest.raises(StagingRequestInvalid, match=r"row 7 has 11 bytes, more than StagingLimits\(row=10\)"):
        decode_block(encode_block(make_block(6, [b"", b"x" * 11])), limits)
    with pytest.raises(StagingRequestInvalid, match=r"has 104 bytes, more than StagingLimits\(block=100\)"):
        decode_block(encode_block(make_block(0, [b"x" * 9] * 8)), limits)


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: type(asked).__name__)
def test_a_question_comes_back_as_it_was(asked: AnyQuestion) -> None:
    assert question(encode(asked)) == asked
    assert not is_block(encode(asked))


@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(
    "change",
    [
        {"stream": ""},
        {"stream": "x" * 256},
        {"app": None},
        {"batch": -1},
        {"batch": LAST_BATCH + 1},
        {"batch": 1.5},
        {"ttl": 0},
        {"ttl": 1e300},
        {"encoding": "xml"},
        {"ask": "drop"},
        {"txn": 5},
    ],
    ids=str,
)
def test_a_question_that_cannot_be_meant_is_refused(change: dict[str, object]) -> None:
    right = json.loads(encode(QUESTIONS[0])[1:])
    with pytest.raises(StagingRequestInvalid, match=r"this is no question: "):
        question(b"J" + json.dumps({**right, **change}).encode())


@pytest.mark.requirement("R-21")
@given(st.binary(max_size=100) | st.text(max_size=100).map(lambda text: b"J" + text.encode()))
def test_any_bytes_are_a_question_or_refused(data: bytes) -> None:
    for read in (question, answer):
        with suppress(StagingRequestInvalid):
            read(data)


def test_a_question_may_be_so_long() -> None:
    asked = Committing(stream="s", app="a", batch=0, parts=[("x" * 200, 1)] * 6000)
    assert len(encode(asked)) > MOST_JSON
    with pytest.raises(StagingRequestInvalid, match=r"is no question \(of at most 1,048,576\)"):
        question(encode(asked))


@pytest.mark.parametrize("said", [Begun(wanted=False), Stored(blocks=3), Aborted(dropped=1)], ids=repr)
def test_an_answer_comes_back_as_it_was(said: Begun | Stored | Aborted) -> None:
    assert answer(encode(said)) == said


def test_a_failure_comes_back_as_the_error_that_it_was() -> None:
    for kind, error in {**STAGING_ERRORS, StagingError.kind: StagingError}.items():
        with pytest.raises(error, match="why"):
            answer(encode(Failed(kind=kind, text="why")))
    with pytest.raises(StagingError, match="why") as caught:
        answer(encode(Failed(kind="of a newer version", text="why")))
    assert type(caught.value) is StagingError
    assert TransactionGone.kind == "gone"
