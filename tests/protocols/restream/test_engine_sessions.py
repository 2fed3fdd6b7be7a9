"""The server's engine in a session: where it begins, what is sent, and what is acknowledged."""

from __future__ import annotations

import json

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.restream import Acknowledged, HungUp, Phase, ServerConfig, ServerEngine, Status, StatusRequested
from muxkit.protocols.restream.wire import StoredMessage
from muxkit.testing._pair import drain
from tests.protocols.restream._helpers import (
    OTHER,
    UUID,
    asked,
    is_silent,
    is_silent_but_for_the_end,
    refused,
    registered,
    said,
    tell,
    violation,
)

RESUMED: dict[str, object] = {"uuid": UUID, "state": 3}
OPENED: dict[str, object] = {"uuid": UUID, "params": {"count": 5}}
ANSWERED = ServerConfig(status=True)


def ack(id: int, uuid: str = UUID) -> dict[str, object]:
    return {"uuid": uuid, "ack": id}


# --- sessions


@pytest.mark.clause("restream-S08", "restream-S09", "restream-I04")
def test_messages_go_out_with_their_ids() -> None:
    server = registered()
    for id, value in enumerate((1522805012, 3535044222, 402765600), 1):
        server.send_message(id, {"value": value})
    assert drain(server) == (
        b'{"id":1,"data":{"value":1522805012}}\n{"id":2,"data":{"value":3535044222}}\n{"id":3,"data":{"value":402765600}}\n'
    )


@pytest.mark.clause("restream-A06", "restream-I02")
def test_the_data_of_another_application_is_carried_as_it_is() -> None:
    server = registered()
    server.send_message(1, {"t": "x"}, 1700000000.5)
    server.send_message(2, [None, {"é": 2**70}])
    assert said(server) == [
        {"id": 1, "data": {"t": "x"}, "time": 1700000000.5},
        {"id": 2, "data": [None, {"é": 2**70}]},
    ]


STORED = (
    StoredMessage(1, None, b'{"t":"x"}'),
    StoredMessage(2, 1700000000.5, b"null"),
    StoredMessage(3, 1700000000.5, b"[1,2]"),
    StoredMessage(4, 1e300, b'"z"'),
    StoredMessage(5, None, b"5"),
)


@pytest.mark.clause("restream-S08", "restream-F01")
def test_stored_messages_have_the_lines_of_messages_that_are_sent_as_values() -> None:
    server, other = registered(), registered()
    server.send_stored(STORED)
    for id, time, data in STORED:
        other.send_message(id, json.loads(data), time)
    assert server.messages_sent == other.messages_sent == 5
    assert server.outbox == other.outbox
    assert drain(server) == drain(other)


def test_an_acknowledgement_may_be_for_any_of_the_stored_messages_that_were_sent_together() -> None:
    server = registered()
    server.send_stored(STORED)
    drain(server)
    assert tell(server, ack(3)) == [Acknowledged(UUID, 3)]


@pytest.mark.parametrize(
    "wrong", [[StoredMessage(1, None, b"1"), StoredMessage(1, None, b"1")], [StoredMessage(1, None, b"[1,\n2]")]]
)
def test_stored_messages_that_cannot_be_sent_change_nothing(wrong: list[StoredMessage]) -> None:
    server = registered()
    with pytest.raises(LocalProtocolError):
        server.send_stored(wrong)
    assert (server.outbox, server.messages_sent, server.has_output()) == (0, 0, False)
    server.send_stored(STORED)


@pytest.mark.clause("restream-S22", "restream-S10", "restream-S21")
def test_after_the_final_message_the_connection_closes() -> None:
    server = registered(state=3, head=5)
    server.send_message(4, {"value": 681225668})
    server.send_message(5, {"value": 505780829, "crc": 3848541339}, final=True)
    assert server.closing
    with pytest.raises(LocalProtocolError, match="closing"):
        server.send_message(6, {"value": 1})
    assert said(server) == [
        {"id": 4, "data": {"value": 681225668}},
        {"id": 5, "data": {"value": 505780829, "crc": 3848541339}},
    ]
    server.receive_eof(0.0)
    assert server.events() == [HungUp()]


@pytest.mark.clause("restream-S23")
def test_a_client_that_has_everything_gets_nothing_and_no_error() -> None:
    server = registered(state=5, head=5, acknowledged=5)
    server.finish()
    assert server.closing
    assert not server.has_output()
    assert server.events() == ()


@pytest.mark.clause("restream-S30", "restream-S31")
def test_an_acknowledgement_of_the_final_message_is_still_heard() -> None:
    server = registered(state=4, head=5)
    server.send_message(5, {}, final=True)
    said(server)
    assert tell(server, ack(5)) == [Acknowledged(UUID, 5)]
    assert tell(server, {}) != ()  # a violation, but the last line is written: no other follows it
    assert not server.has_output()
    is_silent(server)


def test_a_violation_before_the_final_message_is_out_gets_its_error_line() -> None:
    server = registered(state=4, head=5)
    server.send_message(5, {}, final=True)
    violation(server, [{}], "S35")


@pytest.mark.clause("restream-G06")
@pytest.mark.requirement("R-70")
def test_ids_ascend_and_end_with_32_bits() -> None:
    server = registered(state=2**32 - 3, head=2**32 - 1)
    server.send_message(2**32 - 2, {})
    for id in (2**32 - 2, 5, 0):
        with pytest.raises(LocalProtocolError, match="ascend"):
            server.send_message(id, {})
    server.send_message(2**32 - 1, {})
    with pytest.raises(LocalProtocolError, match="4294967295"):
        server.send_message(2**32, {})
    assert len(said(server)) == 2


def test_a_message_that_json_cannot_say_changes_nothing() -> None:
    server = registered()
    with pytest.raises(LocalProtocolError):
        server.send_message(1, {"x": float("nan")}, final=True)
    assert not server.closing
    server.send_message(1, {})
    assert len(said(server)) == 1


@pytest.mark.clause("restream-S26", "restream-G01")
def test_a_session_goes_on_anywhere_after_what_was_acknowledged() -> None:
    for state in range(11):
        server = asked({"uuid": UUID, "state": state})
        if state >= 4:
            assert server.accept(acknowledged=4, head=10)
            assert not server.has_output()
        else:
            assert not server.accept(acknowledged=4, head=10)
            refused(server, "S26")


@pytest.mark.clause("restream-S27")
def test_a_client_cannot_have_more_than_there_is() -> None:
    server = asked({"uuid": UUID, "state": 4})
    assert not server.accept(head=3)
    refused(server, "S27")


@pytest.mark.clause("restream-S29")
def test_a_session_that_was_acknowledged_is_not_registered_again() -> None:
    server = asked(OPENED)
    assert not server.accept(head=3, acknowledged=1)
    refused(server, "S26")


@pytest.mark.clause("restream-S19", "restream-S35")
def test_state_says_where_the_stream_begins() -> None:
    server = asked({"uuid": UUID, "state": 1})
    assert server.accept(head=3)
    with pytest.raises(LocalProtocolError, match="ascend"):
        server.send_message(1, {})
    server.send_message(2, {})
    server.send_message(3, {})
    assert [message["id"] for message in said(server) if isinstance(message, dict)] == [2, 3]


@pytest.mark.clause("restream-S33", "restream-S34")
def test_an_ack_does_not_change_what_is_sent() -> None:
    server = registered(3)
    assert tell(server, ack(2)) == [Acknowledged(UUID, 2)]
    assert not server.has_output()
    server.send_message(4, {})
    assert said(server) == [{"id": 4, "data": {}}]


@pytest.mark.clause("restream-S36")
def test_an_ack_for_what_was_not_sent_is_an_error() -> None:
    server = registered(3)
    server.send_message(4, {})  # queued, and not written yet
    violation(server, [ack(4)], "S36")


@pytest.mark.clause("restream-S36")
def test_an_ack_for_what_an_earlier_connection_was_sent_is_none() -> None:
    server = registered(state=1, head=3)
    assert tell(server, ack(3)) == [Acknowledged(UUID, 3)]
    violation(server, [ack(4)], "S36")


@pytest.mark.clause("restream-S37", "restream-S39")
def test_acks_must_not_go_back() -> None:
    server = registered(3)
    assert tell(server, ack(2)) == [Acknowledged(UUID, 2)]
    violation(server, [ack(1)], "S37")
    server = registered(state=3, head=3, acknowledged=3)
    violation(server, [ack(2)], "S37")


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S37", "restream-S39", "restream-S16")
def test_an_ack_must_not_go_back_behind_the_state_of_its_connection() -> None:
    """A state is what the client has acknowledged, in the specification's words."""
    server = registered(state=5, head=9)
    assert "ack 4 after state 5" in str(violation(server, [ack(4)], "S37"))
    server = registered(state=5, head=9)
    assert tell(server, ack(5), ack(7)) == [Acknowledged(UUID, 5), Acknowledged(UUID, 7)]
    assert "ack 6 after ack 7" in str(violation(server, [ack(6)], "S37"))


@pytest.mark.clause("restream-S37", "restream-G05")
def test_the_state_of_an_earlier_connection_does_not_bind_a_later_one() -> None:
    """A client may go back to a snapshot, unless it has acknowledged more."""
    server = registered(state=2, head=9)
    assert tell(server, ack(3)) == [Acknowledged(UUID, 3)]


@pytest.mark.clause("restream-S38")
@pytest.mark.requirement("R-05")
def test_the_same_ack_again_is_nothing_new() -> None:
    server = registered(3)
    assert tell(server, ack(2), ack(2), ack(2)) == [Acknowledged(UUID, 2)]
    assert tell(server, ack(2)) == ()
    assert not server.has_output()
    violation(server, [ack(0)], "S38")


@pytest.mark.clause("restream-S40")
def test_an_ack_is_for_the_session_of_the_connection() -> None:
    assert tell(registered(3), ack(2, UUID.upper())) == [Acknowledged(UUID, 2)]
    violation(registered(3), [ack(2, OTHER)], "S40")


@pytest.mark.clause("restream-S35", "restream-M03", "restream-M02")
@pytest.mark.parametrize(
    ("later", "rule"),
    [(RESUMED, "S35"), (OPENED, "S35"), ({}, "S35"), ({"uuid": UUID}, "S35"), ({"ack": 1}, "M03"),
     ({**RESUMED, "ack": 1}, "M03")],
    ids=repr,
)  # fmt: skip
def test_only_acks_may_follow_in_a_session(later: object, rule: str) -> None:
    server = registered(3)
    assert tell(server, {"zzz": 1}, {"data": 5}) == ()
    violation(server, [later], rule)


# --- what comes before the application has answered


@pytest.mark.clause("restream-S36", "restream-S39")
def test_acks_that_come_at_once_wait_until_the_session_is_known() -> None:
    server = asked(RESUMED, ack(3), ack(3), ack(4))
    assert server.accept(acknowledged=1, head=4)
    assert server.events() == [Acknowledged(UUID, 4)]
    server = asked(RESUMED, ack(3))
    assert server.accept(acknowledged=3, head=3)
    assert server.events() == ()


def test_acks_that_come_at_once_are_judged_then() -> None:
    server = asked(RESUMED, ack(3), ack(4))
    assert not server.accept(acknowledged=2, head=3)
    refused(server, "S36")


@pytest.mark.clause("restream-S37", "restream-S40")
def test_acks_that_are_wrong_anyhow_need_no_session() -> None:
    violation(asked(RESUMED), [ack(4), ack(3)], "S37")
    violation(asked(RESUMED), [ack(2)], "S37")
    violation(asked(RESUMED), [ack(3, OTHER)], "S40")


def test_a_session_is_accepted_once_and_only_if_it_was_asked_for() -> None:
    for server in (ServerEngine(), asked({}), registered()):
        with pytest.raises(LocalProtocolError):
            server.accept()
    server = asked(RESUMED)
    with pytest.raises(LocalProtocolError, match="head=2"):
        server.accept(acknowledged=3, head=2)
    with pytest.raises(LocalProtocolError, match="opening"):
        server.send_message(1, {})
    assert server.phase is Phase.OPENING


def test_a_session_that_comes_too_late_is_not_accepted() -> None:
    """The client broke a rule, or left, while the session was looked up."""
    server = asked(RESUMED)
    violation(server, [ack(3, OTHER)], "S40")
    assert not server.accept(head=3)
    server = asked(RESUMED)
    server.connection_lost(0.0)
    assert not server.accept(head=3)
    assert server.over


# --- status


def test_a_status_request_is_answered_where_that_is_wanted() -> None:
    server = asked(config=ANSWERED)
    assert tell(server, {"uuid": UUID, "status": True}) == [StatusRequested(UUID)]
    server.send_status(Status(head=9, acknowledged=4, final=False, epoch=2))
    assert server.closing
    assert said(server) == [{"status": {"head": 9, "acknowledged": 4, "final": False, "epoch": 2}}]
    is_silent_but_for_the_end(server)


def test_a_status_request_is_an_error_elsewhere() -> None:
    violation(ServerEngine(), [{"uuid": UUID, "status": True}], "M03")


@pytest.mark.parametrize("later", [ack(1), {"uuid": UUID, "status": True}, {}], ids=repr)
def test_nothing_follows_a_status_request(later: object) -> None:
    violation(asked({"uuid": UUID, "status": True}, config=ANSWERED), [later])
