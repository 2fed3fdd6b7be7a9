"""Every row of the collected vectors has the result that its `expect` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varint
from muxkit.protocols.aqueduct import Config
from muxkit.protocols.aqueduct.frames import (
    AckNackUnreliable,
    AckReliable,
    Bounds,
    FinishSender,
    Frame,
    MessageFrame,
    RouteTo,
    SentUnreliable,
    encode_frame,
    name_of,
    parse_frame,
)
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
    return vectors.first_word(row) == "varint" or "value" in row


def routed(row: Row) -> str:
    data = vectors.data_of(row).hex()
    return data if data[:2] in UNROUTED else "03 02" + data


def check_number(row: Row) -> None:
    """Check a number that stands in a field `value`, or at the end of the name."""
    data, last = vectors.data_of(row), row["name"].split()[-1]
    values = {int(row["value"])} if "value" in row else set()
    values |= {int(last)} if last.isdigit() else set()
    (number,) = values  # if both are there they agree
    assert encode_varint(number) == data
    cursor = Cursor(data)
    assert cursor.varint() == number
    assert not cursor.remaining


def check_frames(row: Row) -> None:
    """Check that frames are encoded as they came, and say what the row says about a single one."""
    data = vectors.data_of(row)
    assert data
    read = parsed(data)
    assert b"".join(map(encode_frame, read)) == data
    facts = facts_of(read[0]) if len(read) == 1 else {}
    if "frames" in row:
        assert [facts_of(frame) for frame in read] == row["frames"]
        row = {field: value for field, value in row.items() if field != "frames"}
    if len(read) == 1 and (word := vectors.first_word(row)).isupper():
        assert word == facts["frame"]
    vectors.agree(row, facts)


def facts_of(frame: Frame) -> dict[str, object]:
    """Return what a frame says, under the names that the document and the rows give to its parts."""
    facts: dict[str, object] = {"frame": name_of(frame)}
    match frame:
        case RouteTo(channel):
            bits = {"creator": channel & 1, "sender": channel >> 1 & 1, "oneshot": channel >> 2 & 1}
            facts |= {**bits, "index": channel >> 3}
        case SentUnreliable(count):
            facts["count"] = count
        case FinishSender(sent_reliable):
            facts["sent_reliable"] = sent_reliable
        case AckReliable(ranges):
            facts["deltas"] = ranges
        case AckNackUnreliable(ranges, channel):
            facts |= {"deltas": ranges, "channel": channel}
        case MessageFrame():
            facts |= {"num": frame.number, "ids": [id for id, _ in frame.attachments]}
            facts["payload_hex"] = frame.payload.hex()
        case _:
            pass
    return facts


def check_violation(row: Row) -> None:
    server().violation(routed(row))


def check_report_without_field(row: Row) -> None:
    data = vectors.data_of(row)
    (frame,) = parsed(data, WITHOUT_FIELD)
    assert encode_frame(frame) == data
    vectors.agree(row, facts_of(frame))


def check_bad_report_without_field(row: Row) -> None:
    with pytest.raises(RemoteProtocolError):
        parsed(vectors.data_of(row), WITHOUT_FIELD)
    server(config=Config(channel_field=False)).violation(routed(row))


def is_optional(row: Row) -> bool:
    return str(row["expect"]) == OPTION


VALUE = frozenset({"value"})
OF_FRAMES = frozenset(
    [
        "frame",
        "frames",
        "creator",
        "sender",
        "oneshot",
        "index",
        "count",
        "sent_reliable",
        "deltas",
        "channel",
        "num",
        "ids",
        "payload_hex",
    ]
)
KINDS = (
    vectors.Kind("evidence", vectors.evidence, vectors.nothing_owed),
    vectors.Kind("number", lambda row: vectors.expects(row, "wire") and is_number(row), check_number, VALUE),
    vectors.Kind("frames", lambda row: vectors.expects(row, "wire") and not is_number(row), check_frames, OF_FRAMES),
    vectors.Kind("violation", lambda row: vectors.expects(row, "reject"), check_violation),
    vectors.Kind(
        "report without its field",
        lambda row: is_optional(row) and vectors.first_word(row) != "invalid",
        check_report_without_field,
        frozenset({"deltas"}),
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
    with pytest.raises((AssertionError, IndexError, NeedMore, ValueError, RemoteProtocolError, pytest.fail.Exception)):
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
