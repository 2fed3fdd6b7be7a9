"""Reasons: what was encoded is read again, and what a hostile peer writes can be shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.core import Reason, counted

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(TEXTS, st.integers(0, 2**32 - 1))
def test_a_reason_is_read_as_it_was_written(text: str, code: int) -> None:
    reason = Reason(text, code)
    again = Reason.decode(reason.encode())
    assert again.code == code
    if text.isprintable():
        assert again == reason


@given(st.binary(max_size=2000))
def test_what_any_peer_writes_is_printable_and_short(payload: bytes) -> None:
    reason = Reason.decode(payload)
    assert reason.text.isprintable()
    assert len(reason.text) <= 512
    assert 0 <= reason.code < 2**32


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**32 - 1), st.integers(12, 512))
def test_a_reason_is_cut_between_characters(text: str, code: int, most: int) -> None:
    written = Reason(text, code).encode(most)
    assert len(written) <= most
    written.decode()


def test_no_reason_is_no_bytes() -> None:
    assert Reason().encode() == b""
    assert not Reason.decode(b"")
    assert str(Reason("disk full", 7)) == "disk full (code 7)"
    assert Reason("disk full", 7).encode() == b"7 disk full"
    assert str(Reason(code=3)) == "code 3"


def test_a_text_that_begins_with_a_number_keeps_it() -> None:
    assert Reason.decode(Reason("404 pages").encode()) == Reason("404 pages")
    assert Reason.decode(Reason("404 pages").encode()).code == 0


def test_control_characters_are_escaped() -> None:
    assert Reason.decode(b"\x1b[31mred\nline").text == r"\x1b[31mred\nline"


@pytest.mark.parametrize("code", [-1, 2**32, 1.5])
def test_a_code_is_a_number_of_32_bits(code: float) -> None:
    with pytest.raises((ValueError, TypeError)):
        Reason("x", code)  # type: ignore[arg-type]


def test_one_is_counted_without_a_plural() -> None:
    """Was: "the peer hung up while 1 channels were open"."""
    assert [counted(number, "channel", were=True) for number in (0, 1, 2)] == [
        "0 channels were",
        "1 channel was",
        "2 channels were",
    ]
    assert [counted(number, "half", "halves") for number in (1, 1234)] == ["1 half", "1,234 halves"]


@pytest.mark.parametrize("most", range(5))
def test_a_code_that_does_not_fit_is_left_out_with_its_text(most: int) -> None:
    """Was: a channel whose peer had granted one byte read the reason "4", and no code, in place of 429."""
    told = Reason.decode(Reason("too slow", 429).encode(most))
    assert told == (Reason("", 429) if most == 4 else Reason())
