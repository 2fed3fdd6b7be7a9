"""The server's engine on one connection: requests, answers, and violations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.restream import (
    Acknowledged,
    Doubling,
    Failed,
    HungUp,
    Permutation,
    Registered,
    Resumed,
    ServerConfig,
    ServerEngine,
    Silent,
    StatelessRequested,
    parse_integer,
)
from muxkit.testing._pair import drain
from tests.protocols.restream._helpers import (
    OTHER,
    UUID,
    asked,
    is_silent,
    is_silent_but_for_the_end,
    line,
    lines,
    refused,
    registered,
    said,
    tell,
    violation,
)

if TYPE_CHECKING:
    from collections.abc import Callable

RESUMED: dict[str, object] = {"uuid": UUID, "state": 3}
OPENED: dict[str, object] = {"uuid": UUID, "params": {"count": 5}}
ANSWERED = ServerConfig(status=True)


def ack(id: int, uuid: str = UUID) -> dict[str, object]:
    return {"uuid": uuid, "ack": id}


# --- the first line


@pytest.mark.clause("restream-C01", "restream-M01", "restream-L01", "restream-S01")
def test_the_first_line_decides_what_the_connection_is() -> None:
    assert tell(ServerEngine(), {}) == [StatelessRequested(None)]
    assert tell(ServerEngine(), {"state": "42"}) == [StatelessRequested("42")]
    assert tell(ServerEngine(), OPENED) == [Registered(UUID, {"count": 5})]
    assert tell(ServerEngine(), RESUMED) == [Resumed(UUID, 3)]


@pytest.mark.clause("restream-C02")
def test_a_server_says_nothing_before_the_client() -> None:
    server = ServerEngine()
    server.handle_deadline(0.0)
    assert not server.has_output()
    assert not server.events()
    with pytest.raises(LocalProtocolError):
        server.send_value(1)
    with pytest.raises(LocalProtocolError):
        server.send_message(1, {})


@pytest.mark.clause("restream-M02")
def test_fields_that_nobody_knows_change_nothing() -> None:
    assert tell(ServerEngine(), {"foo": 1}) == [StatelessRequested(None)]
    params = {"count": 2, "x": 0}
    assert tell(ServerEngine(), {"uuid": UUID, "params": params, "y": 1}) == [Registered(UUID, params)]


@pytest.mark.clause("restream-F11")
def test_a_carriage_return_is_space() -> None:
    server = ServerEngine()
    server.receive_bytes(b"{}\r\n", 0.0)
    assert server.events() == [StatelessRequested(None)]


WRONG: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"nope\n", "F05"),
    "no UTF-8": (b'{"a":"\xff"}\n', "F04"),
    "an empty line": (b"\n", "F05"),
    "an empty line of Windows": (b"\r\n", "F05"),
    "an array": (b"[]\n", "F05"),
    "a number": (b"5\n", "F05"),
    "null": (b"null\n", "F05"),
    "an object over several lines": (b'{\n  "uuid": "x"\n}\n', "F05"),
    "an ack": (line(ack(1)), "S32"),
    "a uuid alone": (line({"uuid": UUID}), "M03"),
    "a state that is no number": (line({"state": "abc"}), "L14"),
    "a uuid that is none": (line({"uuid": "me", "state": 1}), "S02"),
}


@pytest.mark.clause(
    "restream-F04", "restream-F05", "restream-F07", "restream-F08", "restream-S05", "restream-S32", "restream-M03"
)
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize(("data", "rule"), WRONG.values(), ids=WRONG)
def test_a_wrong_first_line_gets_an_error_and_then_silence(data: bytes, rule: str) -> None:
    error = violation(ServerEngine(), data, rule)
    assert error.offset == 0


@pytest.mark.clause("restream-F09")
def test_after_an_error_nothing_that_follows_is_looked_at() -> None:
    error = violation(ServerEngine(), b"nope\n{}\n" + line(OPENED) + b"nope\n")
    assert error.offset == 0


@pytest.mark.clause("restream-F06", "restream-I07")
def test_what_the_application_cannot_do_is_told_and_ends_the_connection() -> None:
    server = asked(OPENED)
    server.fail("the disk is full")
    assert server.closing
    assert tell(server, ack(1), {"nonsense": 1}, 5) == ()
    server.fail("and so is the other")
    server.finish()
    assert said(server) == [{"error": "the disk is full"}]
    server.receive_eof(0.0)
    assert server.events() == [HungUp()]


@pytest.mark.requirement("R-66")
def test_an_error_tells_numbers_and_no_content() -> None:
    secret = "5ec4e7" * 5
    for request in ({"state": secret}, {"uuid": secret}, {"uuid": OTHER, "ack": 7}, {"uuid": OTHER, "state": secret}):
        server = ServerEngine()
        error = violation(server, [request])
        assert secret not in str(error)
        assert OTHER not in str(error)


# --- limits of lines


@pytest.mark.clause("restream-F12", "restream-L04")
@pytest.mark.requirement("R-24", "R-25")
def test_the_first_line_may_hold_the_longest_integer() -> None:
    server = ServerEngine()
    digits = "7" * 100_000
    assert tell(server, {"state": digits, "zzz": "x" * 4000}) == [StatelessRequested(digits)]


@pytest.mark.clause("restream-F12")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_the_first_line_has_an_end(ending: bytes) -> None:
    longest = 100_000 + 4096
    server = ServerEngine()
    server.receive_bytes(b" " * longest, 0.0)
    assert not server.events()
    server = ServerEngine()
    server.receive_bytes(b" " * (longest + 1) + ending, 0.0)
    assert "ServerConfig(digits=100000)" in str(refused(server, "F12"))


@pytest.mark.clause("restream-F12")
@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("first", [{}, OPENED], ids=["stateless", "stateful"])
def test_later_lines_are_shorter(first: object) -> None:
    longest = 64 * 1024
    padded = b'{"zzz":1}' + b" " * (longest - 9)
    server = asked(first)
    server.receive_bytes(padded + b"\n", 0.0)
    assert not server.events()
    error = violation(server, padded + b" \n", "F12")
    assert error.offset == len(line(first)) + longest + 1
    assert "ServerConfig(line=65536)" in str(error)


@pytest.mark.requirement("R-29", "R-13")
def test_a_client_that_does_not_say_what_it_wants_is_given_up() -> None:
    server = ServerEngine(limits=Limits(handshake=10.0))
    assert server.next_deadline() == float("-inf")
    server.handle_deadline(100.0)
    assert server.next_deadline() == 110.0
    for second in range(101, 110):
        server.receive_bytes(b" " * 2000, float(second))
        server.handle_deadline(float(second))
    assert not server.events()
    server.handle_deadline(110.0)
    assert refused(server).limit == "handshake"


@pytest.mark.requirement("R-29")
def test_a_client_that_dribbles_is_given_up() -> None:
    server = ServerEngine(limits=Limits(stall=30.0, stall_bytes=1024))
    server.receive_bytes(line(OPENED), 0.0)
    server.events()
    server.accept()
    assert server.next_deadline() is None
    server.receive_bytes(b"{" + b" " * 100, 5.0)
    assert server.next_deadline() == 35.0
    server.receive_bytes(b" " * 1024, 34.0)
    server.handle_deadline(35.0)
    assert not server.events()
    server.receive_bytes(b" " * 1000, 64.0)
    server.handle_deadline(65.0)
    assert refused(server).limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_client_whose_line_dies_in_the_middle_broke_no_rule() -> None:
    server = registered(3)
    server.receive_bytes(b"{", 5.0)
    server.handle_deadline(35.0)
    assert [*server.events()][-1] == Silent(30.0)
    assert b"nothing came for 30 s" in b"".join(server.buffers_to_send())


@pytest.mark.requirement("R-29")
def test_a_line_that_is_over_stalls_no_more() -> None:
    server = registered(3)
    server.receive_bytes(b"{", 0.0)
    server.receive_bytes(b'"zzz":1}\n', 29.0)
    assert server.next_deadline() is None
    server.receive_bytes(b"{", 40.0)
    assert server.next_deadline() == 70.0


# --- stateless


@pytest.mark.clause("restream-L02", "restream-L03", "restream-L05")
def test_values_go_out_one_by_one_as_strings() -> None:
    server = asked({})
    for value in (42, -1, 2**200, "7"):
        server.send_value(value)
    assert drain(server) == b'{"data":"42"}\n{"data":"-1"}\n{"data":"%d"}\n{"data":"7"}\n' % 2**200


@pytest.mark.clause("restream-L11", "restream-L12", "restream-L13")
def test_a_fresh_server_goes_on_from_the_value_alone() -> None:
    server = ServerEngine()
    (event,) = tell(server, {"state": "23"})
    assert isinstance(event, StatelessRequested)
    value = parse_integer(event.state or "")
    for _ in range(3):
        value = Doubling().next(value)
        server.send_value(value)
    assert said(server) == [{"data": "46"}, {"data": "92"}, {"data": "184"}]


@pytest.mark.clause("restream-L06")
def test_a_stateless_stream_has_no_end_of_its_own() -> None:
    server, value = asked({}), 1
    for _ in range(100_000):
        value = Permutation().next(value)
        server.send_value(value)
        server.buffers_to_send()
    assert not server.closing
    assert server.outbox == 0


@pytest.mark.clause("restream-L07")
def test_a_client_that_has_enough_hangs_up_and_that_is_no_error() -> None:
    server = asked({})
    server.send_value(1)
    server.receive_bytes(b'{"unfinished', 0.0)
    server.receive_eof(0.0)
    assert server.events() == [HungUp()]
    assert server.over
    is_silent(server)


@pytest.mark.clause("restream-L15", "restream-M02")
@pytest.mark.parametrize("later", [ack(1), {}, {"state": "5"}, OPENED, RESUMED, {"ack": 1}, {"params": {}}], ids=repr)
def test_nothing_known_may_follow_in_a_stateless_stream(later: object) -> None:
    server = asked({})
    assert tell(server, {"zzz": 1}) == ()
    violation(server, [later], "L15")


@pytest.mark.clause("restream-L04")
@pytest.mark.requirement("R-25")
def test_a_value_beyond_the_digits_is_not_sent_and_the_stream_can_end_with_an_error() -> None:
    server = asked({}, config=ServerConfig(digits=300))
    server.send_value(-(10**300 - 1))
    with pytest.raises(LocalProtocolError, match="301 digits"):
        server.send_value(10**300)
    assert not server.closing
    server.fail("the values have outgrown the limit")
    assert said(server)[1] == {"error": "the values have outgrown the limit"}


@pytest.mark.parametrize("value", ["", "01", "x", "1\n", True], ids=repr)
def test_a_value_that_is_no_integer_is_not_sent(value: str) -> None:
    server = asked({})
    with pytest.raises(LocalProtocolError):
        server.send_value(value)
    assert not server.has_output()


# --- the end


@pytest.mark.parametrize("first", [(), ({},), (OPENED,), (RESUMED,)], ids=repr)
def test_a_server_that_shuts_down_closes_without_an_error(first: tuple[object, ...]) -> None:
    server = asked(*first)
    server.finish()
    server.finish()
    assert server.closing
    assert not server.has_output()
    is_silent_but_for_the_end(server)


def lost(server: ServerEngine) -> None:
    server.connection_lost(0.0)


def hung_up(server: ServerEngine) -> None:
    server.receive_eof(0.0)


@pytest.mark.parametrize("end", [lost, hung_up])
def test_when_the_client_is_gone_nothing_is_written_any_more(end: Callable[[ServerEngine], None]) -> None:
    server = registered(2)
    server.send_message(3, {})
    server.receive_bytes(lines(ack(1)) + b"{", 0.0)
    end(server)
    assert server.over
    assert not server.has_output()
    assert server.outbox == 0
    assert server.next_deadline() is None
    assert server.events()[0] == Acknowledged(UUID, 1)
    with pytest.raises(LocalProtocolError, match="over"):
        server.send_message(4, {})
    server.fail("too late")
    server.finish()
    is_silent(server)


def test_the_outbox_counts_what_waits() -> None:
    server = registered()
    for id in range(1, 101):
        server.send_message(id, {"value": id})
    queued = server.outbox
    taken = sum(map(len, server.buffers_to_send(1000)))
    assert 1000 <= taken < 1100
    assert server.outbox == queued - taken
    assert server.sent < 100
    assert taken + len(drain(server)) == queued
    assert (server.outbox, server.sent) == (0, 100)


def test_one_violation_is_one_failure() -> None:
    server = ServerEngine()
    server.receive_bytes(b"[]\n[]\n", 0.0)
    server.receive_bytes(b"[]\n", 0.0)
    (event,) = server.events()
    assert isinstance(event, Failed)
