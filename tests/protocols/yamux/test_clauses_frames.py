"""The clauses about frames, ids and opening."""

from __future__ import annotations

import pytest

from muxkit import Limits
from muxkit.core import Reason
from muxkit.core.events import Cancelled, Finished, LimitReached, MayOpen, Opened, Stopped
from muxkit.protocols.yamux import Config
from muxkit.protocols.yamux.frames import Type
from tests.protocols.yamux._helpers import (
    ACK,
    FIN,
    RST,
    SYN,
    WINDOW,
    Frame,
    data,
    engine,
    fed,
    frames_of,
    messages,
    opened,
    ping,
    sender_of,
    update,
    violation,
    written,
)


@pytest.mark.clause("yamux-H01")
def test_a_header_has_twelve_bytes_in_network_order() -> None:
    assert update(1, 16, SYN) == bytes.fromhex("00 01 0001 00000001 00000010")
    server = engine()
    fed(server, update(1, 16, SYN))
    assert sender_of(next(server.streams())).credit_out == WINDOW + 16


@pytest.mark.clause("yamux-H02")
def test_another_version_ends_the_session() -> None:
    violation(engine(), b"\x01" + ping(0)[1:], rule="yamux-H02")


@pytest.mark.clause("yamux-H03")
def test_an_unknown_type_ends_the_session() -> None:
    violation(engine(), b"\x00\x04" + ping(0)[2:], rule="yamux-H03")


@pytest.mark.clause("yamux-H04")
def test_one_frame_may_open_a_stream_and_end_it() -> None:
    events = fed(engine(), data(1, b"all", SYN | FIN))
    assert [type(event) for event in events] == [Opened, *[type(event) for event in events[1:-1]], Finished]
    assert messages(events) == [b"all"]


@pytest.mark.clause("yamux-H05")
def test_unknown_flags_are_ignored() -> None:
    server = engine()
    fed(server, update(1, 0, SYN), update(1, 5, 0x40))
    assert sender_of(next(server.streams())).credit_out == WINDOW + 5


@pytest.mark.clause("yamux-H06")
def test_data_frames_may_be_empty() -> None:
    server = engine()
    fed(server, data(1, b"x", SYN))
    assert fed(server, data(1), data(1)) == []


@pytest.mark.clause("yamux-H07")
def test_a_conversation_may_be_cut_anywhere() -> None:
    conversation = [update(1, 7, SYN), data(1, b"hello"), ping(3), data(3, bytes(300), SYN), data(1, b"", FIN)]

    def run(*pieces: bytes) -> tuple[bytes, bytes]:
        server = engine()
        events = [event for piece in pieces for event in fed(server, piece)]
        return b"".join(messages(events)), written(server)

    octets = b"".join(conversation)
    whole = run(octets)
    assert whole[0] == b"hello" + bytes(300)
    assert run(*(octets[place : place + 1] for place in range(len(octets)))) == whole
    for place in range(1, len(octets)):
        assert run(octets[:place], octets[place:]) == whole


@pytest.mark.clause("yamux-S01")
@pytest.mark.parametrize(("is_client", "ids"), [(True, [1, 3, 5]), (False, [2, 4, 6])])
def test_ids_are_odd_for_clients_and_even_for_servers(is_client: bool, ids: list[int]) -> None:
    one = engine(is_client=is_client)
    assert [one.open_stream().id for _ in range(3)] == ids


@pytest.mark.clause("yamux-S02")
@pytest.mark.parametrize(("is_client", "id"), [(True, 1), (False, 2), (True, 0), (False, 0)])
def test_an_id_of_the_wrong_parity_ends_the_session(is_client: bool, id: int) -> None:
    violation(engine(is_client=is_client), update(id, 0, SYN), rule="yamux-S02")


@pytest.mark.clause("yamux-S03")
def test_a_second_opening_ends_the_session() -> None:
    violation(engine(), update(1, 0, SYN), data(1, b"x", SYN), rule="yamux-S03")


@pytest.mark.clause("yamux-S04")
@pytest.mark.parametrize("frame", [data(0, b"x"), update(0, 5)])
def test_data_and_credit_for_the_session_end_it(frame: bytes) -> None:
    violation(engine(), frame, rule="yamux-S04")


@pytest.mark.clause("yamux-S05")
def test_frames_about_unknown_streams_are_ignored() -> None:
    server = engine()
    late = (data(77, b"late"), update(77, 9), data(77, b"", FIN), update(78, 0, RST), data(78, b"why", RST))
    assert fed(server, *late) == []
    assert frames_of(server) == []
    assert messages(fed(server, data(1, b"x", SYN))) == [b"x"]


@pytest.mark.clause("yamux-O01")
def test_the_first_frame_carries_syn() -> None:
    client = engine(is_client=True)
    client.open_stream()
    client.open_channel(b"")
    assert [(frame.type, frame.flags, frame.stream) for frame in frames_of(client)] == [
        (Type.WINDOW_UPDATE, SYN, 1),
        (Type.DATA, SYN, 3),
    ]


@pytest.mark.clause("yamux-O02")
def test_a_stream_that_is_taken_is_acknowledged() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN)))
    assert frames_of(server) == []
    server.accept(sender_of(there))
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, ACK, 1, 0)]


@pytest.mark.clause("yamux-O03")
def test_a_stream_that_is_refused_is_reset() -> None:
    server = engine()
    server.refuse(opened(fed(server, data(1, b"x", SYN))), Reason("no"))
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, RST, 1, 0)]
    assert server.channels == 0


@pytest.mark.clause("yamux-O04")
def test_data_leaves_before_the_acknowledgement() -> None:
    client = engine(is_client=True)
    client.open_stream().sender.send(b"at once")
    assert [frame.flags for frame in frames_of(client)] in ([SYN, 0], [SYN])


@pytest.mark.clause("yamux-O05")
def test_the_opener_learns_of_a_rejection() -> None:
    client = engine(is_client=True)
    client.open_stream()
    written(client)
    assert [type(event) for event in fed(client, update(1, 0, RST))] == [Cancelled, Stopped, MayOpen]
    assert client.channels == 0


@pytest.mark.clause("yamux-O06")
def test_further_streams_wait_for_an_acknowledgement() -> None:
    client = engine(is_client=True, config=Config(unacknowledged=3, keepalive=None))
    for _ in range(3):
        client.open_stream()
    assert client.places == 0
    written(client)
    (event,) = fed(client, update(3, 0, ACK))
    assert isinstance(event, MayOpen)
    assert client.places == 1


@pytest.mark.clause("yamux-O07")
def test_a_stream_that_waits_for_the_application_is_acknowledged_in_time() -> None:
    server = engine(limits=Limits(handshake=5.0))
    fed(server, data(1, b"x", SYN))
    due = server.next_deadline()
    assert due == 5.0
    server.handle_deadline(due)
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, ACK, 1, 0)]


@pytest.mark.clause("yamux-O08")
def test_too_many_streams_are_reset_and_the_others_work() -> None:
    server = engine(limits=Limits(channels=2))
    events = fed(server, *(update(id, 0, SYN) for id in (1, 3, 5)), data(1, b"x"))
    assert [event.limit for event in events if isinstance(event, LimitReached)] == ["channels"]
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, RST, 5, 0)]
    assert messages(events) == [b"x"]
