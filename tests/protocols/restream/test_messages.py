"""Messages parsed and encoded, each with its rules and limits."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream import Status, new_uuid
from muxkit.protocols.restream.wire.integers import format_integer
from muxkit.protocols.restream.wire.messages import (
    Acknowledged,
    Message,
    Refused,
    Registered,
    Request,
    Resumed,
    StatelessRequested,
    StatusRequested,
    encode_ack,
    encode_error,
    encode_message,
    encode_request,
    encode_status,
    encode_value,
    parse_later,
    parse_message,
    parse_request,
    parse_status,
    parse_value,
)
from tests.protocols.restream._helpers import UUID, example, line
from tests.protocols.restream.test_json import VALUES

if TYPE_CHECKING:
    from muxkit.protocols.restream import Json

U32 = st.integers(0, 2**32 - 1)
IDS = st.integers(1, 2**32 - 1)
UUIDS = st.uuids().map(str)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=3)
DECIMALS = (st.integers() | st.integers(-(10**500), 10**500)).map(format_integer)
UNKNOWN = st.dictionaries(st.text(min_size=1).map("x-{}".format), VALUES, max_size=3)
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.just(StatelessRequested(None)),
    st.builds(StatelessRequested, DECIMALS),
    st.builds(Registered, UUIDS, OBJECTS),
    st.builds(Resumed, UUIDS, U32),
    st.builds(StatusRequested, UUIDS),
)


def request(value: object, *, digits: int = 100_000, status: bool = False) -> Request:
    return parse_request(line(value), digits=digits, status=status)


def with_unknown(data: bytes, unknown: dict[str, Json]) -> bytes:
    """Return the message as another implementation writes it, with unknown fields."""
    return line({**unknown, **json.loads(data)})


@pytest.mark.clause("restream-M02", "restream-S01", "restream-L10", "restream-S17", "restream-C08")
@given(REQUESTS, UNKNOWN)
def test_a_request_is_read_as_it_was_written(asked: Request, unknown: dict[str, Json]) -> None:
    data = encode_request(asked)
    assert parse_request(data, digits=1000, status=True) == asked
    assert parse_request(with_unknown(data, unknown), digits=1000, status=True) == asked


@pytest.mark.clause("restream-M02", "restream-S30")
@given(st.builds(Acknowledged, UUIDS, IDS), UNKNOWN)
def test_an_ack_is_read_as_it_was_written(ack: Acknowledged, unknown: dict[str, Json]) -> None:
    assert parse_later(encode_ack(ack), stateful=True, status=False) == ack
    assert parse_later(with_unknown(encode_ack(ack), unknown), stateful=True, status=False) == ack


@pytest.mark.clause("restream-M02", "restream-S08", "restream-S09", "restream-A06", "restream-I04")
@given(U32, VALUES, st.none() | st.floats(allow_nan=False, allow_infinity=False), UNKNOWN)
def test_a_message_is_read_as_it_was_written(id: int, data: Json, time: float | None, unknown: dict[str, Json]) -> None:
    written = encode_message(id, data, time)
    assert parse_message(written) == Message(id, data, time)
    assert parse_message(with_unknown(written, unknown)) == Message(id, data, time)
    assert ("time" in json.loads(written)) is (time is not None)


@pytest.mark.clause("restream-L02", "restream-L03", "restream-M02")
@given(DECIMALS, UNKNOWN)
def test_a_value_is_read_as_it_was_written(value: str, unknown: dict[str, Json]) -> None:
    assert json.loads(encode_value(value)) == {"data": value}
    assert parse_value(encode_value(value), digits=1000) == value
    assert parse_value(with_unknown(encode_value(value), unknown), digits=1000) == value


@given(st.builds(Status, st.just(9), st.integers(0, 9), st.booleans(), st.none() | U32), UNKNOWN)
def test_a_status_is_read_as_it_was_written(status: Status, unknown: dict[str, Json]) -> None:
    assert parse_status(encode_status(status)) == status
    assert parse_status(with_unknown(encode_status(status), unknown)) == status


@pytest.mark.clause("restream-F02", "restream-F03", "restream-F08")
@given(st.text())
def test_an_error_is_one_line_whatever_its_text(text: str) -> None:
    data = encode_error(text)
    told = json.loads(data)["error"]
    assert data.count(b"\n") == 1
    assert told
    assert len(data) < 64 * 1024
    assert parse_message(data) == parse_value(data, digits=9) == parse_status(data) == Refused(told)
    if text and len(text) <= 4000:
        assert told == text.encode("utf-8", "replace").decode()


@pytest.mark.clause("restream-F03")
def test_an_error_of_half_a_character_is_still_an_error() -> None:
    assert json.loads(encode_error("a\ud800b")) == {"error": "a?b"}
    assert len(json.loads(encode_error("\x00" * 100_000))["error"]) == 4000


@pytest.mark.clause("restream-S09", "restream-S11")
def test_the_messages_of_the_document_are_read_and_written() -> None:
    for message in example():
        parsed = parse_message(line(message))
        assert isinstance(parsed, Message)
        assert json.loads(encode_message(parsed.id, parsed.data)) == message
    assert encode_message(1, {"value": 1522805012}) == b'{"id":1,"data":{"value":1522805012}}\n'


@pytest.mark.clause("restream-L10", "restream-S17", "restream-S01")
def test_the_requests_of_the_document_are_written() -> None:
    assert encode_request(StatelessRequested(None)) == b"{}\n"
    assert encode_request(StatelessRequested("42")) == b'{"state":"42"}\n'
    assert json.loads(encode_request(Resumed(UUID, 3))) == {"uuid": UUID, "state": 3}
    opened = {"uuid": UUID, "params": {"count": 28172}}
    assert request(opened) == Registered(UUID, {"count": 28172})
    assert json.loads(encode_request(Registered(UUID, {"count": 28172}))) == opened


# --- what a client may not say first


UNUSABLE: dict[str, tuple[object, str]] = {
    "params without uuid": ({"params": {"count": 3}}, "M03"),
    "uuid alone": ({"uuid": UUID}, "M03"),
    "uuid and an unknown field": ({"uuid": UUID, "zzz": 1}, "M03"),
    "params and state": ({"uuid": UUID, "params": {"count": 3}, "state": 1}, "M03"),
    "params and ack": ({"uuid": UUID, "params": {"count": 3}, "ack": 1}, "M03"),
    "state and ack": ({"uuid": UUID, "state": 3, "ack": 1}, "M03"),
    "ack without uuid": ({"ack": 1}, "M03"),
    "state and params without uuid": ({"state": "1", "params": {}}, "M03"),
    "ack first": ({"uuid": UUID, "ack": 1}, "S32"),
    "status without the extension": ({"uuid": UUID, "status": True}, "M03"),
    "params of null": ({"uuid": UUID, "params": None}, "S01"),
    "params of an array": ({"uuid": UUID, "params": [5]}, "S01"),
}


@pytest.mark.clause("restream-M01", "restream-M03", "restream-S32")
@pytest.mark.parametrize(("value", "rule"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_request_that_makes_no_sense_is_refused(value: object, rule: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        request(value)
    assert caught.value.rule == f"restream-{rule}"


@pytest.mark.clause("restream-M02")
@pytest.mark.parametrize(
    "value", [{"foo": 1}, {"data": "5", "id": 1, "error": "x"}, {"status": True}, {"a": {"uuid": 1}}]
)
def test_an_object_without_known_fields_is_an_empty_one(value: object) -> None:
    assert request(value) == StatelessRequested(None)


@pytest.mark.parametrize("value", [False, 1, None, "true", {}])
def test_a_status_request_has_to_say_true(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        request({"uuid": UUID, "status": value}, status=True)


@pytest.mark.parametrize("reader", ["", "billing"])
@pytest.mark.parametrize("incarnation", [None, "x1"])
@pytest.mark.parametrize("until", [None, 9])
def test_a_request_beside_others_comes_back_as_it_was(reader: str, incarnation: str | None, until: int | None) -> None:
    asked = Resumed(UUID, 3, reader, incarnation, until)
    assert request(json.loads(encode_request(asked)), status=True) == asked


@pytest.mark.parametrize("until", [3, 0, -1, "9", 9.0, True, None])
def test_an_end_that_is_none_is_as_good_as_no_end(until: object) -> None:
    asked = {"uuid": UUID, "state": 3, "reader": "", "until": until}
    assert request(asked, status=True) == Resumed(UUID, 3, "")


@pytest.mark.clause("restream-S02")
def test_a_uuid_is_compared_in_lower_case() -> None:
    assert request({"uuid": UUID.upper(), "state": 1}) == Resumed(UUID, 1)


@pytest.mark.clause("restream-S02")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(
    "uuid",
    ["", "x", UUID[:-1], UUID + "0", UUID.replace("-", ""), "{" + UUID + "}", "urn:uuid:" + UUID, UUID + "\n",
     UUID[:-1] + "g", UUID[:-1] + "٣", 5, None, True, [UUID], {"a": 1}, "K" + UUID[1:]],
    ids=repr,
)  # fmt: skip
def test_a_uuid_that_is_none_is_refused(uuid: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        request({"uuid": uuid, "state": 1})
    assert caught.value.rule == "restream-S02"


@pytest.mark.clause("restream-S02")
@pytest.mark.requirement("R-64")
def test_new_uuids_are_random() -> None:
    found = {new_uuid() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", it) for it in found)


@pytest.mark.clause("restream-S28")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(
    "state", ["3", -1, 1.5, 1.0, 2**32, None, True, False, [3], 10**4000], ids=lambda it: str(it)[:9]
)
def test_the_state_of_a_session_is_an_unsigned_number_of_32_bits(state: object) -> None:
    assert request({"uuid": UUID, "state": 0}) == Resumed(UUID, 0)
    assert request({"uuid": UUID, "state": 2**32 - 1}) == Resumed(UUID, 2**32 - 1)
    with pytest.raises(RemoteProtocolError) as caught:
        request({"uuid": UUID, "state": state})
    assert caught.value.rule == "restream-S28"
    assert len(str(caught.value)) < 200


@pytest.mark.clause("restream-S30", "restream-S38")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("ack", ["3", -1, 0, 1.5, 2**32, None, True], ids=repr)
def test_an_ack_is_a_number_that_an_id_can_be(ack: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_later(line({"uuid": UUID, "ack": ack}), stateful=True, status=False)


@pytest.mark.clause("restream-L14")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("state", ["abc", "", " 1", "1.0", "+1", "007", None, True, 1.5, ["1"], {"a": 1}], ids=repr)
def test_the_state_of_a_stateless_stream_is_a_decimal_integer(state: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        request({"state": state})
    assert caught.value.rule == "restream-L14"


@pytest.mark.clause("restream-L14")
@pytest.mark.parametrize(("state", "text"), [(23, "23"), (-5, "-5"), (0, "0"), (10**3999, "1" + "0" * 3999)])
def test_a_number_is_taken_for_the_string_of_it(state: int, text: str) -> None:
    assert request({"state": state}) == StatelessRequested(text)


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize("digits", [4001, 4300, 4301, 20_000])
def test_a_number_of_more_digits_has_to_be_a_string(digits: int) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_request(b'{"state":' + b"7" * digits + b"}", digits=100_000, status=False)
    text = "7" * digits
    assert request({"state": text}) == StatelessRequested(text)


@pytest.mark.clause("restream-L04")
@pytest.mark.requirement("R-25")
@pytest.mark.parametrize("sign", ["", "-"])
def test_the_digits_of_a_state_are_bounded(sign: str) -> None:
    assert request({"state": sign + "7" * 100}, digits=100) == StatelessRequested(sign + "7" * 100)
    with pytest.raises(RemoteProtocolError, match="101 digits") as caught:
        request({"state": sign + "7" * 101}, digits=100)
    assert caught.value.rule == "restream-L04"


# --- what a server may not say


WRONG_MESSAGES: dict[str, object] = {
    "nothing": {},
    "no id": {"data": {"value": 1}},
    "no data": {"id": 1},
    "an id of text": {"id": "1", "data": 1},
    "an id of truth": {"id": True, "data": 1},
    "an id with a point": {"id": 1.0, "data": 1},
    "an id below 0": {"id": -1, "data": 1},
    "an id of 33 bits": {"id": 2**32, "data": 1},
    "an error of null": {"error": None},
    "an error of objects": {"id": 1, "data": 1, "error": {}},
}


@pytest.mark.clause("restream-S07", "restream-S08", "restream-F08")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("value", WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
def test_a_message_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_message(line(value))


@pytest.mark.clause("restream-L03", "restream-L04")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("data", [42, None, True, 1.5, "", "x", "01", "1.0", [], {}], ids=repr)
def test_a_value_that_is_no_decimal_string_is_refused(data: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_value(line({"data": data}), digits=100)
    assert caught.value.rule == "restream-L03"


@pytest.mark.clause("restream-L04")
@pytest.mark.requirement("R-25")
def test_the_digits_of_a_value_are_bounded() -> None:
    assert parse_value(line({"data": "-" + "7" * 100}), digits=100) == "-" + "7" * 100
    with pytest.raises(RemoteProtocolError, match="101 digits"):
        parse_value(line({"data": "7" * 101}), digits=100)


@pytest.mark.clause("restream-M02")
@pytest.mark.parametrize("time", ["12:00", [1], True, {}, None, 10**400], ids=lambda it: str(it)[:9])
def test_a_time_that_is_no_number_is_a_field_that_we_do_not_know(time: object) -> None:
    assert parse_message(line({"id": 1, "data": 2, "time": time})) == Message(1, 2)


def test_a_time_of_whole_seconds_is_a_time() -> None:
    assert parse_message(line({"id": 1, "data": 2, "time": 1700000000})) == Message(1, 2, 1700000000.0)


WRONG_STATUS: list[object] = [
    None,
    [],
    {},
    {"head": 1},
    {"head": 1, "acknowledged": 2, "final": True},
    {"head": 2, "acknowledged": 1, "final": 1},
    {"head": True, "acknowledged": 0, "final": True},
    {"head": 2, "acknowledged": 0, "final": True, "epoch": "1"},
]


@pytest.mark.parametrize("status", WRONG_STATUS, ids=repr)
def test_a_status_that_makes_no_sense_is_refused(status: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_status(line({"status": status}))


@pytest.mark.parametrize(
    ("id", "data", "time"), [(-1, 1, None), (2**32, 1, None), (1, "\ud800", None), (1, 1, math.nan)]
)
def test_a_message_that_has_no_form_is_not_written(id: int, data: Json, time: float | None) -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(id, data, time)
