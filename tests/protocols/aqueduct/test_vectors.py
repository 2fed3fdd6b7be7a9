"""Every row of the collected vectors, as its `expect` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, encode_varint
from muxkit.protocols.aqueduct import Bounds, Config, Frame, RouteTo, encode_frame, parse_frame
from tests.protocols.aqueduct._helpers import server

ROWS = json.loads((Path(__file__).parents[2] / "data/vectors/aqueduct.json").read_text(encoding="utf-8"))
WITHOUT_FIELD = Bounds(channel_field=False)


def rows(expect: str, *, numbers: bool = False) -> list[object]:
    chosen = [row for row in ROWS if row["expect"].startswith(expect) and row["name"].startswith("varint") == numbers]
    return [pytest.param(row, id=row["name"]) for row in chosen]


def parsed(data: bytes, bounds: Bounds | None = None) -> list[Frame]:
    cursor, frames = Cursor(data), []
    while cursor.remaining:
        frames.append(parse_frame(cursor, bounds or Bounds()))
    return frames


def test_every_row_is_of_a_kind_that_is_tested_here() -> None:
    kinds = ("wire", "reject", "option", "reference-only")
    assert len(ROWS) == sum(len(rows(kind, numbers=it)) for kind in kinds for it in (True, False))


@pytest.mark.clause("aqueduct-E02", "aqueduct-E03")
@pytest.mark.parametrize("row", rows("wire", numbers=True))
def test_a_number_is_written_and_read_as_the_vector_says(row: dict[str, str]) -> None:
    number, data = int(row["name"].split()[-1]), bytes.fromhex(row["hex"])
    assert encode_varint(number) == data
    assert Cursor(data).varint() == number


@pytest.mark.clause("aqueduct-T01", "aqueduct-T06", "aqueduct-T07", "aqueduct-T12", "aqueduct-T20", "aqueduct-T28")
@pytest.mark.parametrize("row", rows("wire"))
def test_frames_are_written_and_read_as_the_vector_says(row: dict[str, str]) -> None:
    data = bytes.fromhex(row["hex"])
    assert b"".join(map(encode_frame, parsed(data))) == data


@pytest.mark.parametrize("row", rows("reject"))
def test_what_the_vectors_refuse_ends_the_connection(row: dict[str, str]) -> None:
    is_routed = row["hex"][:2] not in ("02", "03")
    server().violation("03 02" + row["hex"] if is_routed else row["hex"])


@pytest.mark.clause("aqueduct-T28")
@pytest.mark.parametrize("row", rows("option: channel_field=False"))
def test_the_report_without_its_field_is_an_option(row: dict[str, str]) -> None:
    data = bytes.fromhex(row["hex"])
    if row["name"].startswith("invalid"):
        with pytest.raises(RemoteProtocolError, match="T32"):
            parsed(data, WITHOUT_FIELD)
        server(config=Config(channel_field=False)).violation("03 02" + row["hex"])
    else:
        (frame,) = parsed(data, WITHOUT_FIELD)
        assert encode_frame(frame) == data


def test_a_chanid_behind_forget_channel_is_no_part_of_it() -> None:
    """What the reference program wrote by mistake: the tag is the whole frame."""
    data = bytes.fromhex("0b08")
    cursor = Cursor(data)
    parse_frame(cursor)
    assert cursor.remaining == 1
    assert encode_frame(RouteTo(8)) != data
