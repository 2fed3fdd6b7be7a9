"""Integers of any size as decimal text, and back."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.protocols.restream import INLINE_DIGITS, format_integer, parse_integer
from muxkit.protocols.restream.wire.integers import count_digits, is_canonical

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def limit_of_python(digits: int) -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(digits)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def digits_of(count: int) -> str:
    return ("9081726354" * (count // 10 + 1))[:count]


@pytest.mark.clause("restream-L04")
@given(st.integers() | st.integers(-(2**9000), 2**9000))
def test_a_number_is_written_and_read_as_python_would(value: int) -> None:
    assert format_integer(value) == str(value)
    assert parse_integer(str(value)) == value


@pytest.mark.clause("restream-L04")
@pytest.mark.requirement("R-25")
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 1023, 1024, 1025, 4300, 4301, 20_000, 100_000])
def test_any_number_of_digits_survives(count: int, sign: str) -> None:
    """It works with any limit of the interpreter, even the lowest."""
    text = sign + digits_of(count)
    with limit_of_python(640):
        value = parse_integer(text)
        assert format_integer(value) == text
    with limit_of_python(0):
        assert value == int(text)


@pytest.mark.parametrize("exponent", [511, 512, 1600, 4300, 5000, 20_000])
def test_powers_of_ten_and_their_neighbours_are_right(exponent: int) -> None:
    power = 10**exponent
    assert format_integer(power) == "1" + "0" * exponent
    assert format_integer(power - 1) == "9" * exponent
    assert format_integer(-power - 1) == "-1" + "0" * (exponent - 1) + "1"
    assert parse_integer("1" + "0" * exponent) == power


@pytest.mark.clause("restream-L04", "restream-L14")
@pytest.mark.parametrize("text", ["0", "7", "-7", "10", "123456789012345678901234567890"])
def test_canonical_text_is_known(text: str) -> None:
    assert is_canonical(text)


@pytest.mark.clause("restream-L04", "restream-L14")
@pytest.mark.parametrize(
    "text",
    ["", "-", "-0", "+1", "00", "01", "-01", "1.0", "1e3", " 1", "1 ", "1_000", "0x10", "٣", "abc", "--1", "1\n"],
)
def test_other_text_is_not_canonical(text: str) -> None:
    assert not is_canonical(text)


def test_a_sign_is_no_digit() -> None:
    assert (count_digits("-123"), count_digits("123")) == (3, 3)


@pytest.mark.requirement("R-25")
def test_what_is_converted_in_place_is_over_soon() -> None:
    """A loop may stall for at most ten milliseconds."""
    text = digits_of(INLINE_DIGITS)
    best = 9.0
    for _ in range(5):
        begun = time.thread_time()
        value = parse_integer(text)
        halfway = time.thread_time()
        format_integer(value)
        best = min(best, max(halfway - begun, time.thread_time() - halfway))
    assert best < 0.05


@pytest.mark.requirement("R-25")
def test_the_longest_that_is_allowed_is_converted_in_a_fraction_of_a_second() -> None:
    text = digits_of(100_000)
    best = 9.0
    for _ in range(3):
        begun = time.thread_time()
        format_integer(parse_integer(text))
        best = min(best, time.thread_time() - begun)
    assert best < 0.6  # a tenth of a second on a quiet machine; ten times the digits take a hundred times as long
