"""The client's engine over its connections: requests, messages, and the end of the stream."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.restream import (
    ClientConfig,
    ClientEngine,
    Failed,
    Finished,
    HungUp,
    Received,
    ReceivedValue,
    Refused,
    Silent,
    Status,
    StatusReceived,
    StreamState,
    Unverified,
)
from muxkit.testing._pair import drain
from tests.protocols.restream._helpers import (
    EXAMPLE,
    UUID,
    broken,
    example,
    hear,
    is_silent,
    joined,
    line,
    lines,
    reader,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.restream import Json

OPENED = {"uuid": UUID, "params": {"count": 5}}


def numbers(events: Sequence[object]) -> list[tuple[int, Json]]:
    return [(event.id, event.data) for event in events if isinstance(event, Received)]


def take_all(client: ClientEngine, events: Sequence[object]) -> None:
    for event in events:
        if isinstance(event, (Received, ReceivedValue)):
            client.taken(event)


# --- what is asked for


@pytest.mark.clause("restream-C08", "restream-L01", "restream-S01")
def test_a_new_stream_is_asked_for_with_the_first_line() -> None:
    client = ClientEngine.stateless()
    client.connection_made(0.0)
    assert drain(client) == b"{}\n"
    client = ClientEngine.stateful(UUID.upper(), {"count": 5})
    assert not client.has_output()
    assert joined(client) == [OPENED]


@pytest.mark.clause("restream-L08", "restream-L10", "restream-C08")
def test_a_stateless_stream_goes_on_after_the_last_value() -> None:
    client = ClientEngine.stateless()
    joined(client)
    assert hear(client, {"data": "41"}, {"data": "42"}) == [ReceivedValue("41"), ReceivedValue("42")]
    client.receive_bytes(b'{"data":"43"', 0.0)
    client.connection_lost(0.0)
    client.connection_made(1.0)
    assert drain(client) == b'{"state":"42"}\n'


@pytest.mark.clause("restream-L09", "restream-S18")
def test_a_client_that_has_nothing_yet_asks_as_at_first() -> None:
    for client in (ClientEngine.stateless(), ClientEngine.stateful(UUID, {"count": 5})):
        first = joined(client)
        client.receive_bytes(b'{"', 0.0)
        client.connection_lost(0.0)
        assert joined(client) == first


@pytest.mark.clause("restream-S16", "restream-S17", "restream-C08")
def test_a_session_goes_on_after_the_highest_id() -> None:
    client = reader()
    assert len(hear(client, *example()[:3])) == 3
    client.connection_lost(0.0)
    assert joined(client) == [{"uuid": UUID, "state": 3}]
    assert hear(client, *example()[3:])[-1] == Finished()


def test_a_session_that_exists_is_joined_without_params() -> None:
    client = ClientEngine.stateful(UUID, None, verifier=Unverified())
    assert joined(client) == [{"uuid": UUID, "state": 0}]
    assert numbers(hear(client, {"id": 1, "data": "x"})) == [(1, "x")]


@pytest.mark.clause("restream-L08")
def test_what_nobody_took_is_asked_for_again_after_a_rewind() -> None:
    client = ClientEngine.stateless()
    joined(client)
    seven, _ = hear(client, {"data": "7"}, {"data": "8"})
    assert isinstance(seven, ReceivedValue)
    client.taken(seven)
    client.receive_bytes(line({"data": "9"}), 0.0)
    with pytest.raises(LocalProtocolError, match="connected"):
        client.rewind()
    client.connection_lost(0.0)
    client.rewind()
    assert client.events() == ()
    assert joined(client) == [{"state": "7"}]


def test_a_rewound_session_verifies_the_same_numbers_again() -> None:
    client = reader()
    events = hear(client, *example()[:4])
    take_all(client, events[:2])
    client.connection_lost(0.0)
    client.rewind()
    assert joined(client) == [{"uuid": UUID, "state": 2}]
    assert hear(client, *example()[2:])[-1] == Finished()


# --- what comes


@pytest.mark.clause("restream-S09", "restream-S11", "restream-S15")
def test_the_stream_of_the_document_is_taken_and_verified() -> None:
    client = reader()
    *messages, end = hear(client, *example())
    assert [data["value"] for _, data in numbers(messages) if isinstance(data, dict)] == EXAMPLE
    assert [message.final for message in messages if isinstance(message, Received)] == [False] * 4 + [True]
    assert end == Finished()
    assert client.state is StreamState.FINISHED
    assert not client.may_resume
    with pytest.raises(LocalProtocolError, match="finished"):
        client.connection_made(1.0)


@pytest.mark.clause("restream-S15")
def test_a_wrong_checksum_is_told_and_ends_the_stream() -> None:
    client = reader()
    hear(client, *example()[:4])
    error = broken(client, [{"id": 5, "data": {"value": EXAMPLE[-1], "crc": 1}}], "S15")
    assert "3848541339" in str(error)
    assert client.state is StreamState.FAILED


def test_a_checksum_of_zero_is_one() -> None:
    """Its presence marks the last message: a value whose four bytes have the CRC 0."""
    client = reader(1)
    assert hear(client, {"id": 1, "data": {"value": 0x9D0AD96D, "crc": 0}})[-1:] == [Finished()]


@pytest.mark.clause("restream-S14")
def test_a_stream_that_ends_too_early_is_over_all_the_same() -> None:
    client = ClientEngine.stateful(UUID, {"count": 6})
    joined(client)
    hear(client, *example()[:4])
    error = broken(client, example()[4:], "S14")
    assert "5 numbers, 6" in str(error)


def test_what_comes_after_the_final_message_is_not_looked_at() -> None:
    client = reader()
    assert hear(client, *example(), {"error": "late"}, 5)[-1] == Finished()
    client.receive_bytes(b"garbage\n", 0.0)
    client.receive_eof(0.0)
    assert client.events() == ()


@pytest.mark.clause("restream-M02")
def test_fields_that_nobody_knows_are_ignored() -> None:
    client = reader()
    assert numbers(hear(client, {"id": 1, "data": {"value": 5, "z": 1}, "q": 2})) == [(1, {"value": 5, "z": 1})]


@pytest.mark.clause("restream-L04")
def test_values_are_exact_whatever_their_size() -> None:
    client = ClientEngine.stateless()
    joined(client)
    longest = "-" + "7" * 100_000
    assert hear(client, {"data": str(2**200)}, {"data": longest}) == [
        ReceivedValue(str(2**200)),
        ReceivedValue(longest),
    ]
    broken(client, [{"data": "7" * 100_001}], "L04")


@pytest.mark.clause("restream-S08")
@pytest.mark.parametrize("ids", [(1, 1), (1, 2, 1), (0,), (1, 3), (2,)], ids=repr)
def test_a_message_that_is_not_the_next_one_is_a_violation(ids: tuple[int, ...]) -> None:
    broken(reader(9), [{"id": id, "data": {"value": id}} for id in ids], "S08")


@pytest.mark.clause("restream-S08")
def test_ids_may_leave_gaps_where_that_is_allowed() -> None:
    client = reader(9, config=ClientConfig(consecutive=False))
    assert [id for id, _ in numbers(hear(client, *({"id": id, "data": {"value": 1}} for id in (2, 9, 10))))] == [
        2,
        9,
        10,
    ]
    broken(client, [{"id": 10, "data": {"value": 1}}], "S08")


@pytest.mark.clause("restream-F10", "restream-C04")
@pytest.mark.parametrize(
    "client", [ClientEngine.stateless(), ClientEngine.stateful(UUID, {}), ClientEngine.status(UUID)]
)
def test_an_error_of_the_server_ends_the_stream(client: ClientEngine) -> None:
    joined(client)
    assert hear(client, {"error": "x"}, {"data": "1"}) == [Refused("x")]
    assert client.state is StreamState.REFUSED
    assert not client.may_resume
    is_silent(client)
    client.connection_lost(0.0)
    with pytest.raises(LocalProtocolError, match="refused"):
        client.connection_made(1.0)


@pytest.mark.requirement("R-24")
@pytest.mark.parametrize("data", [b"nope\n", b"\n", b"[]\n", b'{"id":1,"data":NaN}\n', b"\xff\n", b'{"error":5}\n'])
def test_a_line_that_cannot_be_understood_ends_the_stream(data: bytes) -> None:
    client = reader()
    hear(client, example()[0])
    error = broken(client, data)
    assert error.offset == len(line(example()[0]))


def test_offsets_are_those_of_the_connection() -> None:
    client = reader()
    hear(client, *example()[:2])
    client.receive_bytes(b'{"half', 0.0)
    client.connection_lost(0.0)
    joined(client)
    hear(client, example()[2])
    assert broken(client, b"nope\n").offset == len(line(example()[2]))


@pytest.mark.clause("restream-F12")
@pytest.mark.requirement("R-24")
def test_the_lines_of_a_server_are_bounded() -> None:
    longest = 64 * 1024
    data = b'{"id":1,"data":{"value":1}}'
    client = reader()
    assert len(numbers(hear(client))) == 0
    client.receive_bytes(data + b" " * (longest - len(data)) + b"\n", 0.0)
    assert len(client.events()) == 1
    assert "ClientConfig(line=65536)" in str(broken(client, b" " * (longest + 1), "F12"))


@pytest.mark.clause("restream-F01")
def test_a_message_without_its_end_is_none() -> None:
    client = reader()
    client.receive_bytes(line(example()[0]) + line(example()[1])[:-1], 0.0)
    client.receive_eof(0.0)
    *messages, end = client.events()
    assert [id for id, _ in numbers(messages)] == [1]
    assert end == HungUp()
    assert client.state is StreamState.DISCONNECTED
    assert joined(client) == [{"uuid": UUID, "state": 1}]
    assert hear(client, *example()[1:])[-1] == Finished()


@pytest.mark.requirement("R-29")
def test_a_server_that_dribbles_is_given_up_and_an_idle_one_is_not() -> None:
    client = ClientEngine.stateful(UUID, None, limits=Limits(stall=30.0, stall_bytes=100))
    client.connection_made(0.0)
    assert client.next_deadline() is None
    client.receive_bytes(b'{"id":', 1000.0)
    assert client.next_deadline() == 1030.0
    client.handle_deadline(1029.0)
    assert client.events() == ()
    client.receive_bytes(b"1", 1029.0)
    client.handle_deadline(1030.0)
    (failed,) = client.events()
    assert isinstance(failed, Failed)
    assert failed.error.limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_line_that_dies_in_the_middle_is_silence_and_no_broken_rule() -> None:
    client = ClientEngine.stateful(UUID, None, limits=Limits(stall=30.0))
    client.connection_made(0.0)
    client.receive_bytes(b'{"id":', 1000.0)
    client.handle_deadline(1030.0)
    assert [*client.events()] == [Silent(30.0)]
    assert not client.over
    assert client.state is StreamState.DISCONNECTED


@pytest.mark.clause("restream-G07")
def test_a_client_keeps_one_id_and_no_list_of_messages() -> None:
    client = ClientEngine.stateful(UUID, None, verifier=Unverified())
    joined(client)
    held: list[int] = []
    tracemalloc.start()
    try:
        for start in range(0, 10_000, 1000):
            client.receive_bytes(lines(*({"id": start + id, "data": {"value": id}} for id in range(1, 1001))), 0.0)
            count = len(client.events())
            held.append(tracemalloc.get_traced_memory()[0])
            assert count == 1000
    finally:
        tracemalloc.stop()
    assert held[-1] - held[1] < 2048
    assert client.last_id == 10_000


# --- status, and what makes no sense


def test_a_status_is_asked_for_and_told() -> None:
    client = ClientEngine.status(UUID)
    assert joined(client) == [{"uuid": UUID, "status": True}]
    status = {"head": 9, "acknowledged": 4, "final": False, "epoch": None}
    assert hear(client, {"status": status}) == [StatusReceived(Status(9, 4, False))]
    assert not client.may_resume
    with pytest.raises(LocalProtocolError):
        client.snapshot()


def test_a_client_is_not_made_of_what_makes_no_sense() -> None:
    with pytest.raises(LocalProtocolError, match="uuid"):
        ClientEngine.stateful("me", {"count": 5})
    with pytest.raises(LocalProtocolError, match="JSON"):
        ClientEngine.stateful(UUID, {"count": float("nan")})
    with pytest.raises(LocalProtocolError, match="decimal"):
        ClientEngine.stateless(state="+5")
    with pytest.raises(LocalProtocolError, match="uuid"):
        ClientEngine.status("")


def test_a_connection_is_made_once() -> None:
    client = reader()
    with pytest.raises(LocalProtocolError, match="already"):
        client.connection_made(0.0)
    client.connection_lost(0.0)
    client.connection_lost(0.0)
    client.receive_bytes(b"{}\n", 0.0)
    client.receive_eof(0.0)
    assert client.events() == ()
