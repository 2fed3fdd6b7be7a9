"""Every row of the collected vectors has the result that its `expect` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varint
from muxkit.protocols.aqueduct import Bounds, Config, Frame, RouteTo, encode_frame, parse_frame
from tests.protocols import _vectors as vectors
from tests.protocols.aqueduct._helpers import server

if TYPE_CHECKING:
    from tests.protocols._vectors import Row

WITHOUT_FIELD = Bounds(channel_field=False)
UNROUTED = ("02", "03")  # tags of frames that come before or at the beginning of a sequence
OPTION = "option: channel_field=False"


def parsed(data: bytes, bounds: Bounds | None = None) -> list[Frame]:
    cursor, frames = Cursor(data), []
    while cursor.remaining:
        frames.append(parse_frame(cursor, bounds or Bounds()))
    return frames


def is_number(row: Row) -> bool:
    return vectors.first_word(row) == "varint"


def routed(row: Row) -> str:
    return str(row["hex"]) if row["hex"][:2] in UNROUTED else "03 02" + row["hex"]


def check_number(row: Row) -> None:
    number, data = int(row["name"].split()[-1]), bytes.fromhex(row["hex"])
    assert encode_varint(number) == data
    assert Cursor(data).varint() == number


def check_frames(row: Row) -> None:
    data = bytes.fromhex(row["hex"])
    assert data
    assert b"".join(map(encode_frame, parsed(data))) == data


def check_violation(row: Row) -> None:
    server().violation(routed(row))


def check_report_without_field(row: Row) -> None:
    data = bytes.fromhex(row["hex"])
    (frame,) = parsed(data, WITHOUT_FIELD)
    assert encode_frame(frame) == data


def check_bad_report_without_field(row: Row) -> None:
    with pytest.raises(RemoteProtocolError):
        parsed(bytes.fromhex(row["hex"]), WITHOUT_FIELD)
    server(config=Config(channel_field=False)).violation(routed(row))


def is_optional(row: Row) -> bool:
    return str(row["expect"]) == OPTION


KINDS = (
    vectors.Kind("evidence", vectors.evidence, vectors.nothing_owed),
    vectors.Kind("number", lambda row: vectors.expects(row, "wire") and is_number(row), check_number),
    vectors.Kind("frames", lambda row: vectors.expects(row, "wire") and not is_number(row), check_frames),
    vectors.Kind("violation", lambda row: vectors.expects(row, "reject"), check_violation),
    vectors.Kind(
        "report without its field",
        lambda row: is_optional(row) and vectors.first_word(row) != "invalid",
        check_report_without_field,
    ),
    vectors.Kind(
        "bad report without its field",
        lambda row: is_optional(row) and vectors.first_word(row) == "invalid",
        check_bad_report_without_field,
    ),
)
ROWS = vectors.rows_of("aqueduct")


@pytest.mark.clause("aqueduct-E02", "aqueduct-E03", "aqueduct-T01", "aqueduct-T06", "aqueduct-T07", "aqueduct-T12")
@pytest.mark.clause("aqueduct-T20", "aqueduct-T28")
@pytest.mark.parametrize("row", vectors.params(ROWS))
def test_a_row_holds(row: Row) -> None:
    vectors.check(row, KINDS)


NEW_ROWS: list[Row] = [
    {"name": "varint seed LEB128 300", "hex": "ac02", "meaning": "", "expect": "wire"},
    {"name": "FINISH_SENDER sent_reliable=1", "hex": "0601", "meaning": "", "expect": "wire"},
    {"name": "an unknown tag", "hex": "3f", "meaning": "", "expect": "reject"},
    {"name": "ACK_NACK_UNRELIABLE deltas=[4]", "hex": "090104", "meaning": "", "expect": OPTION},
    {"name": "invalid: no deltas", "hex": "0900", "meaning": "", "expect": OPTION},
]
WRONG = {"wire": "0a00", "reject": "0a", OPTION: "090104"}


@pytest.mark.parametrize("row", vectors.params(NEW_ROWS))
def test_a_new_row_of_a_known_kind_is_tested(row: Row) -> None:
    vectors.check(row, KINDS)
    wrong = row | {"hex": WRONG[row["expect"]] if row["hex"] != "090104" else "090100"}
    with pytest.raises((AssertionError, IndexError, NeedMore, RemoteProtocolError, pytest.fail.Exception)):
        vectors.check(wrong, KINDS)


@pytest.mark.parametrize("expect", ["option: unheard of", "overruled", "", "wired"])
def test_a_row_of_an_unknown_kind_fails(expect: str) -> None:
    with pytest.raises(AssertionError, match="has to be of one kind"):
        vectors.check({"name": "new", "hex": "0a", "meaning": "", "expect": expect}, KINDS)


def test_a_chanid_behind_forget_channel_is_no_part_of_it() -> None:
    """A mistake of the reference program: the tag is the whole frame."""
    data = bytes.fromhex("0b08")
    cursor = Cursor(data)
    parse_frame(cursor)
    assert cursor.remaining == 1
    assert encode_frame(RouteTo(8)) != data
