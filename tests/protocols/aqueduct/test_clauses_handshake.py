"""Sections 3.1 and 3.2: VERSION until it is acked, connection headers once, and what waits for them."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.aqueduct import Config, Engine, Mode, Role
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    V,
    client,
    entry,
    fresh,
    hexed,
    receivers_of,
    senders_of,
    server,
    statistics_of,
)

clause = pytest.mark.clause


@clause("aqueduct-O02")
def test_at_the_start_there_is_the_entrypoint_and_nothing_else() -> None:
    one, other = Engine(Role.CLIENT), Engine(Role.SERVER)
    assert (list(senders_of(one)), list(receivers_of(one))) == ([0], [])
    assert (list(senders_of(other)), list(receivers_of(other))) == ([], [0])


@clause("aqueduct-V01")
def test_until_it_is_acked_version_begins_every_sequence() -> None:
    peer = fresh(Role.CLIENT)
    for _ in range(3):
        entry(peer).transmit(b"", mode=Mode.UNORDERED)
    entry(peer).transmit(b"", mode=Mode.UNRELIABLE)
    sequences = peer.bytes_written() + peer.datagrams()
    assert len(sequences) == 5
    assert all(text.startswith(V) for text in sequences)


@clause("aqueduct-V02")
def test_once_it_is_acked_version_is_left_out_and_still_accepted() -> None:
    peer = client()
    entry(peer).transmit(b"")
    assert peer.bytes_written() == [hexed("03 00" + EMPTY)]
    peer.send(V + "03 03" + EMPTY)
    assert not peer.engine.over


@clause("aqueduct-V03", "aqueduct-V05", "aqueduct-H03")
def test_version_is_acked_in_a_stream_and_headers_wait_for_the_clients() -> None:
    peer = fresh(Role.SERVER)
    peer.datagram(V)
    assert peer.datagrams() == []
    assert peer.written() == [(3, hexed(V + "01"), True)]


@clause("aqueduct-V04")
def test_version_is_acked_once() -> None:
    peer = fresh(Role.SERVER)
    for _ in range(5):
        peer.send(V)
    assert peer.written() == [(3, hexed(V + "01"), True)]


@clause("aqueduct-V06")
@pytest.mark.parametrize("text", ["03 00" + EMPTY, "01", "02 00"])
def test_a_sequence_without_version_ends_the_connection_before_version_came(text: str) -> None:
    assert fresh(Role.SERVER).violation(text).rule == "aqueduct-V06"
    assert fresh(Role.SERVER).datagram_violation(text).rule == "aqueduct-V06"


@clause("aqueduct-V07")
def test_after_our_ack_sequences_need_no_version() -> None:
    peer = fresh(Role.SERVER)
    assert peer.send("") == []  # correct so far
    peer.send(V + "02 00", fin=True)
    assert peer.send("03 00" + EMPTY) == [("Arrived", 0, 0, b"")]


@clause("aqueduct-V08")
def test_an_ack_of_version_may_repeat_and_come_in_a_datagram() -> None:
    peer = fresh(Role.CLIENT)
    peer.send(V + "02 00")
    peer.datagram("01")
    peer.send("01 01", fin=True)
    assert not peer.engine.over
    assert not any(V in text for text in peer.bytes_written())


@clause("aqueduct-H01")
def test_the_client_begins_with_its_headers_in_a_stream() -> None:
    peer = fresh(Role.CLIENT, headers=((b"k", b"v"),))
    assert peer.written() == [(2, hexed(V + "02 04 01 6B 01 76"), True)]


@clause("aqueduct-H02")
def test_the_server_answers_headers_with_headers() -> None:
    peer = fresh(Role.SERVER, headers=((b"k", b"v"),))
    assert peer.send(V + "02 04 01 61 01 62", fin=True) == [("Connected", ((b"a", b"b"),))]
    assert peer.written() == [(3, hexed(V + "02 04 01 6B 01 76 01"), True)]


@clause("aqueduct-H04")
def test_all_but_version_waits_for_the_headers() -> None:
    peer = fresh(Role.SERVER)
    assert peer.datagram(V + "03 00" + "04 00 00 00 01 64") == []
    assert peer.send(V + "01 03 00" + "04 00 00 00 01 61") == []
    assert peer.send(V + "03 08" + "04 00 00 00 01 62" + "06 01", fin=True) == []
    assert receivers_of(peer.engine).keys() == {0}
    assert all(text.startswith(V) for text in peer.bytes_written())
    assert peer.send(V + "02 00") == [
        ("Connected", ()),
        ("Arrived", 0, 0, b"a"),
        ("Arrived", 8, 0, b"b"),
        ("Finished", 8),
        ("Arrived", 0, 0, b"d"),
    ]
    assert not any(text.startswith(V) for text in peer.bytes_written())


@clause("aqueduct-H05")
@pytest.mark.requirement("R-13")
def test_early_datagrams_are_dropped_beyond_a_bound() -> None:
    peer = fresh(Role.SERVER, config=Config(early_bytes=1000))
    for number in range(10):
        peer.datagram(V + f"03 00 04 {number:02x} 00 00 00")
    assert statistics_of(peer.engine).dropped_datagrams == 7
    assert peer.send(V + "02 00")[1:] == [("Arrived", 0, number, b"") for number in range(3)]


@clause("aqueduct-H05")
def test_early_streams_get_no_credit_and_are_bounded() -> None:
    peer = fresh(Role.SERVER, limits=Limits(connection_bytes=1000))
    peer.send(V + "03 00 04 00 00 00 83 10")
    version, route = peer.engine.control_to_run(), 0
    assert [(control.stream, getattr(control, "amount", route)) for control in version] == [(2, 28)]
    error = peer.violation("00" * 1001, stream=2)
    assert (error.rule, error.limit) == ("aqueduct-H05", "connection_bytes")


@clause("aqueduct-H06")
def test_connection_headers_come_once() -> None:
    assert server().violation("02 00").rule == "aqueduct-H06"
    assert client().violation("02 00").rule == "aqueduct-H06"


@clause("aqueduct-H07")
def test_connection_headers_are_not_for_datagrams() -> None:
    assert fresh(Role.SERVER).datagram_violation(V + "02 00").rule == "aqueduct-H07"


@pytest.mark.requirement("R-13", "R-14")
def test_headers_that_are_too_many_are_refused_on_both_sides() -> None:
    with pytest.raises(LocalProtocolError, match="expected at most 2 in"):
        Engine(Role.CLIENT, Config(header_pairs=2), headers=[(b"k", b"v")] * 3)
    with pytest.raises(LocalProtocolError):
        Engine(Role.CLIENT, Config(connection_headers=10), headers=[(b"k", b"v" * 10)])
    assert "connection_headers=" in str(fresh(Role.SERVER).violation(V + "02 81 80 01"))


@pytest.mark.requirement("R-13")
def test_a_peer_that_sends_no_headers_is_given_up() -> None:
    engine = Engine(Role.SERVER, limits=Limits(handshake=3))
    engine.start(10.0)
    assert engine.next_deadline() == 13.0
    engine.handle_deadline(12.9)
    assert not engine.over
    (failed,) = engine.handle_deadline(13.0)
    assert engine.over
    assert "no connection headers after 3 s" in str(failed)


def test_the_clock_of_the_handshake_stops_when_the_headers_come() -> None:
    engine = Engine(Role.SERVER)
    engine.start(0.0)
    engine.receive_stream(2, bytes.fromhex(V + "02 00"), True, 1.0)
    assert engine.next_deadline() is None
