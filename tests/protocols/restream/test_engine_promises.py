"""The promises of the engines to a pump, a reconnecting client and an observer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from muxkit.core import BoundedParsing
from muxkit.protocols.restream import ClientConfig, ClientEngine, ReceivedValue, ServerConfig, ServerEngine, Status
from tests.protocols.restream._helpers import UUID, example, hear, joined, line, lines, reader, said, violation

if TYPE_CHECKING:
    from muxkit._observer import Direction


class Diary:
    """An observer that records everything."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.timers: list[str] = []
        self.bytes = 0

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.frames.append(f"{direction} {channel} {name} {size}")

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        raise AssertionError(amount)

    def state(self, channel: str, state: str) -> None:
        raise AssertionError(state)

    def timer(self, name: str) -> None:
        self.timers.append(name)

    def error(self, error: BaseException) -> None:
        raise AssertionError(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        assert direction == "in"
        assert data
        self.bytes += len(data)


@pytest.mark.requirement("R-27")
def test_a_server_parses_as_many_lines_at_once_as_its_pump_wants() -> None:
    server = ServerEngine()
    assert isinstance(server, BoundedParsing)
    server.frames_at_once = 2
    ack = line({"uuid": UUID, "ack": 1})
    data = line({"uuid": UUID, "state": 1}) + ack * 5
    server.receive_bytes(data, 0.0)
    assert server.unparsed == 4 * len(ack)
    server.accept(head=1)
    for left in (2, 0):
        server.receive_bytes(b"", 0.0)
        assert server.unparsed == left * len(ack)
    assert server.acknowledged == 1
    assert server.frames_at_once == 2


@pytest.mark.requirement("R-27")
def test_a_client_parses_as_many_lines_at_once_as_its_pump_wants() -> None:
    client = reader()
    assert isinstance(client, BoundedParsing)
    client.frames_at_once = 3
    assert [type(event).__name__ for event in hear(client, *example())] == ["Received"] * 3
    assert client.unparsed == sum(map(len, map(line, example()[3:])))
    client.receive_bytes(b"", 0.0)
    assert [type(event).__name__ for event in client.events()] == ["Received", "Received", "Finished"]
    assert client.unparsed == 0
    assert client.frames_at_once == 3


def test_what_was_not_parsed_when_the_connection_is_lost_comes_again() -> None:
    client = reader()
    client.frames_at_once = 2
    hear(client, *example())
    client.connection_lost(0.0)
    assert client.unparsed == 0
    assert joined(client) == [{"uuid": UUID, "state": 2}]
    assert client.last_id == 2
    assert len(hear(client, *example()[2:4])) == 2


def test_a_violation_leaves_nothing_unparsed() -> None:
    server = ServerEngine()
    server.frames_at_once = 1
    server.receive_bytes(b"{}\nnope\n{}\n", 0.0)
    violation(server, b"")
    assert server.unparsed == 0


def test_an_observer_of_a_server_is_told_every_line_and_no_content() -> None:
    diary = Diary()
    server = ServerEngine(ServerConfig(status=True), observer=diary)
    data = lines({"uuid": UUID, "state": 3}, {"uuid": UUID, "ack": 3})
    server.receive_bytes(data, 0.0)
    server.accept(head=3)
    server.send_message(4, {"value": 5})
    server.receive_bytes(b"{", 0.0)
    server.handle_deadline(30.0)
    sizes = [len(each) - 1 for each in data.splitlines(keepends=True)]
    assert diary.frames == [
        f"in restream asking {sizes[0]}",
        f"in restream opening {sizes[1]}",
        "out restream messages 27",
        "out restream messages 81",
    ]
    assert diary.timers == ["stall"]
    assert diary.bytes == len(data) + 1


def test_an_observer_of_a_client_is_told_every_line_and_no_content() -> None:
    diary = Diary()
    client = ClientEngine.stateful(UUID, {"count": 2}, config=ClientConfig(ack_every=1), observer=diary)
    joined(client)
    (received,) = hear(client, example()[0])
    client.taken(received)  # type: ignore[arg-type]
    said(client)
    client.receive_bytes(b"", 0.0)
    other = ClientEngine.stateless(observer=diary)
    joined(other)
    hear(other, {"data": "5"})
    assert other.last_value == "5"
    assert diary.frames == [
        "out restream stateful 68",
        f"in restream message {len(line(example()[0])) - 1}",
        "out restream stateful 55",
        "out restream stateless 2",
        "in restream value 13",
    ]
    assert diary.bytes == len(line(example()[0])) + 14


def test_a_status_is_answered_after_what_it_is_about() -> None:
    """Tested with both engines, as the status request is an extension."""
    server, client = ServerEngine(ServerConfig(status=True)), ClientEngine.status(UUID)
    client.connection_made(0.0)
    server.receive_bytes(b"".join(map(bytes, client.buffers_to_send())), 0.0)
    server.events()
    server.send_status(Status(2**32 - 1, 0, True, 7))
    client.receive_bytes(b"".join(map(bytes, server.buffers_to_send())), 0.0)
    (event,) = client.events()
    status = (
        "Status(head=4294967295, acknowledged=0, final=True, epoch=7, incarnation=None, written=None, position=None)"
    )
    assert repr(event) == f"StatusReceived(status={status}, statuses=None)"


@pytest.mark.parametrize("size", [0, -5])
def test_a_limit_of_nothing_is_no_limit(size: int) -> None:
    for make in (ServerConfig, ClientConfig):
        with pytest.raises(ValueError, match="digits"):
            make(digits=size)
        with pytest.raises(ValueError, match="line"):
            make(line=size)
    with pytest.raises(ValueError, match="ack_every"):
        ClientConfig(ack_every=0)


@pytest.mark.requirement("R-25")
def test_a_line_has_room_for_the_longest_integer() -> None:
    assert (ServerConfig().line, ServerConfig().first_line) == (65_536, 104_096)
    assert (ClientConfig().line, ClientConfig().value_line) == (65_536, 104_096)
    assert ServerConfig(digits=5, line=10_000).first_line == 10_000


@pytest.mark.requirement("R-25")
def test_the_longest_integers_do_not_hold_up_an_engine() -> None:
    """They pass as text, at the cost of any line; `parse_integer` is called elsewhere."""
    digits = "7" * 100_000
    best = 9.0
    for _ in range(5):
        server, client = ServerEngine(), ClientEngine.stateless(state=digits)
        begun = time.perf_counter()
        client.connection_made(0.0)
        server.receive_bytes(b"".join(map(bytes, client.buffers_to_send())), 0.0)
        server.send_value(digits)
        client.receive_bytes(b"".join(map(bytes, server.buffers_to_send())), 0.0)
        best = min(best, time.perf_counter() - begun)
        assert client.events() == [ReceivedValue(digits)]
    assert best < 0.01


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize("digits", [100_001, 1_000_000])
def test_an_integer_over_the_limit_is_an_error_line(digits: int) -> None:
    violation(ServerEngine(), [{"state": "7" * digits}])
