"""Violations by a peer: each ends the link with one error that names its clause, and changes nothing."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._limits import Limits
from muxkit.core.events import Failed
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import connector, fed, listener, quiet, state_of, taken, transactional, violation
from tests.protocols.relink._numbered import NumberedEngine

MESSAGE = "11 01 01 00 00 00 00 00"
COMMIT = "01 00 01 00 00 00 00 00"
KIB = 1024


def sent(count: int, *, transactions: bool = False, decided: str = "") -> NumberedEngine:
    """Return a connector that has sent messages on channel 1, and committed (c) or rolled back (r) each."""
    engine = connector(transactional() if transactions else None)
    for _ in range(count):
        engine.send(1, (b"",))
    for number, decision in enumerate(decided):
        (engine.commit if decision == "c" else engine.rollback)(1, through=number)
    drain(engine)
    return engine


@pytest.mark.requirement("R-17", "R-19")
@pytest.mark.parametrize(
    ("packet", "rule"),
    [
        pytest.param(
            "05 00 02 00 00 00 00 00", "relink-O12", marks=pytest.mark.clause("relink-O12"), id="unknown channel"
        ),
        pytest.param(
            "0d 00 02 00 00 00 00 00", "relink-O12", marks=pytest.mark.clause("relink-O12"), id="unknown, numbered"
        ),
        pytest.param("0d 00 01 00 02 00 00 00", "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="beyond"),
        pytest.param(
            "2d 00 01 00 00 00 00 80", "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="half way round"
        ),
        pytest.param("2d 00 01 00 fe ff ff ff", "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="behind none"),
        pytest.param(
            "07 00 00 00 03 00 00 00 01 00 01 00 01 00 00 00",
            "relink-O12",
            marks=pytest.mark.clause("relink-O12"),
            id="three of two",
        ),
        pytest.param(
            "0f 00 00 00 02 00 00 00 01 00 02 00 00 00 00 00",
            "relink-O12",
            marks=pytest.mark.clause("relink-O12"),
            id="one of two unknown",
        ),
        pytest.param(
            "a0 00 00 00 00 00 00 00", "relink-G06", marks=pytest.mark.clause("relink-A07", "relink-G06"), id="type 5"
        ),
    ],
)
def test_acks_of_what_was_not_sent(packet: str, rule: str) -> None:
    error = violation(sent(2), packet)
    assert (error.rule, error.offset) == (rule, 0)


@pytest.mark.clause("relink-O12")
def test_an_ack_for_what_is_queued_and_not_written_is_for_what_was_not_sent() -> None:
    engine = sent(1)
    engine.send(1, (b"",))
    assert violation(engine, "0d 00 01 00 01 00 00 00").rule == "relink-Q11"


@pytest.mark.requirement("R-17", "R-19")
@pytest.mark.parametrize(
    ("decided", "packets", "rule"),
    [
        pytest.param(
            "c", ["4d 00 01 00 01 00 00 00"], "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="undecided"
        ),
        pytest.param(
            "", ["45 00 01 00 00 00 00 00"], "relink-O12", marks=pytest.mark.clause("relink-O12"), id="next undecided"
        ),
        pytest.param(
            "rc", ["45 00 01 00 00 00 00 00"], "relink-T04", marks=pytest.mark.clause("relink-T04"), id="rolled back"
        ),
        pytest.param(
            "crc",
            ["6d 00 01 00 01 00 00 00"],
            "relink-T03",
            marks=pytest.mark.clause("relink-T03"),
            id="same, numbered",
        ),
        pytest.param(
            "cc",
            ["4d 00 01 00 01 00 00 00", "4d 00 01 00 00 00 00 00"],
            "relink-Q11",
            marks=pytest.mark.clause("relink-Q11"),
            id="back",
        ),
        pytest.param(
            "cc",
            ["45 00 01 00 00 00 00 00", "6d 00 01 00 00 00 00 00"],
            "relink-Q11",
            marks=pytest.mark.clause("relink-Q11"),
            id="otherwise",
        ),
    ],
)
def test_answers_that_do_not_fit_the_decisions(decided: str, packets: list[str], rule: str) -> None:
    assert violation(sent(3, transactions=True, decided=decided), *packets).rule == rule


@pytest.mark.requirement("R-17", "R-19")
@pytest.mark.parametrize(
    ("packets", "rule"),
    [
        pytest.param([COMMIT, COMMIT], "relink-O12", marks=pytest.mark.clause("relink-O12"), id="one more"),
        pytest.param(["09 00 01 00 01 00 00 00"], "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="beyond"),
        pytest.param(
            ["09 00 02 00 00 00 00 00"], "relink-O12", marks=pytest.mark.clause("relink-O12"), id="unknown channel"
        ),
        pytest.param(["29 00 01 00 ff ff ff ff"], "relink-Q11", marks=pytest.mark.clause("relink-Q11"), id="none"),
        pytest.param(
            ["03 00 00 00 02 00 00 00 01 00 02 00 00 00 00 00"],
            "relink-O12",
            marks=pytest.mark.clause("relink-O12"),
            id="one of two unknown",
        ),
    ],
)
def test_decisions_about_what_did_not_come(packets: list[str], rule: str) -> None:
    assert violation(listener(transactional()), MESSAGE, *packets).rule == rule


@pytest.mark.clause("relink-A07")
def test_nothing_behind_a_violation_is_processed_and_all_before_it_is() -> None:
    engine = listener()
    events = fed(engine, MESSAGE + "a0 00 00 00 00 00 00 00" + MESSAGE)
    assert events[:2] == [("ChannelOpened", 1), ("Arrived", 1, 0, [(b"",)])]
    assert [event[0] for event in events[2:]] == ["Failed"]
    assert events[-1][1:4] == ("relink-G06", None, 8)


# --- numbers that are huge


@pytest.mark.requirement("R-16", "R-18", "R-26")
@pytest.mark.parametrize("id_size", [0, 2, 8])
@pytest.mark.parametrize(
    ("packet", "rule"),
    [
        pytest.param("13 01 00 00 ff ff ff ff", "relink-C06", marks=pytest.mark.clause("relink-C06"), id="message"),
        pytest.param("03 00 00 00 ff ff ff ff", "relink-C06", marks=pytest.mark.clause("relink-C06"), id="commit"),
        pytest.param("0f 00 00 00 ff ff ff ff", "relink-C06", marks=pytest.mark.clause("relink-C06"), id="received"),
    ],
)
def test_a_count_of_all_channels_is_refused_before_anything_is_done(packet: str, rule: str, id_size: int) -> None:
    engine = listener(quiet(connector_id_size=id_size, listener_id_size=id_size))
    tracemalloc.start()
    try:
        assert violation(engine, packet).rule == rule
        assert tracemalloc.get_traced_memory()[1] < 256 * KIB, "or even a loop over them would never end"
    finally:
        tracemalloc.stop()


@pytest.mark.clause("relink-C06", "relink-C05")
def test_as_many_targets_as_allowed_are_served() -> None:
    engine = listener(quiet(connector_id_size=0, targets=3))
    events = fed(engine, "13 01 00 00 03 00 00 00 00 00 00 00 00 00 00 00")
    assert events == [("ChannelOpened", 0), ("Arrived", 0, 0, [(b"",)] * 3)]
    assert violation(engine, "13 01 00 00 04 00 00 00").rule == "relink-C06"


@pytest.mark.clause("relink-M08", "relink-M11", "relink-M12")
@pytest.mark.requirement("R-16", "R-18", "R-26")
@pytest.mark.parametrize(
    ("head", "rule"),
    [
        ("31 00 01 00 ff ff ff ff", "relink-M08"),
        ("31 00 01 00 05 00 00 00", "relink-M08"),
        ("51 01 01 00 00 00 00 00 ff ff ff ff ff ff ff ff", "relink-M11"),
        ("51 01 01 00 00 00 00 00 01 10 00 00 00 00 00 00", "relink-M11"),
        ("51 02 01 00 00 00 00 00 f8 ff ff ff ff ff ff ff f8 ff ff ff ff ff ff ff", "relink-M11"),
        ("51 02 01 00 00 00 00 00 00 08 00 00 00 00 00 00 01 08 00 00 00 00 00 00", "relink-M12"),
        ("11 01 01 00 01 10 00 00", "relink-M11"),
    ],
)
def test_a_message_above_the_limits_is_refused_at_its_head(head: str, rule: str) -> None:
    limits = Limits(message=4096, reassembly=4096)
    error = violation(listener(quiet(parts=4), limits=limits), MESSAGE, head)
    assert error.rule == rule
    assert error.offset == 8
    assert error.limit == (None if rule == "relink-M08" else "message")


@pytest.mark.clause("relink-M11")
@pytest.mark.requirement("R-16")
def test_a_message_at_the_limits_is_taken() -> None:
    limits = Limits(message=100_000, reassembly=100_000)
    one, other = connector(quiet(parts=4), limits=limits), listener(quiet(parts=4), limits=limits)
    message = (bytes(99_997), b"a", b"b", b"c")
    one.send(1, message)
    other.receive_bytes(drain(one), 0.0)
    assert taken(other, 1) == [message]


# --- what it costs


@pytest.mark.requirement("R-04", "R-26")
def test_nothing_is_kept_in_advance_of_what_came() -> None:
    engine = listener()
    tracemalloc.start()
    try:
        fed(engine, "51 01 01 00 00 00 00 00 00 00 00 01 00 00 00 00")
        assert tracemalloc.get_traced_memory()[0] < 16 * KIB
        for _ in range(20_000):
            engine.receive_bytes(b"x", 0.0)
        assert tracemalloc.get_traced_memory()[0] < 20_000 * 4
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("R-04", "R-18")
def test_a_large_packet_in_tiny_pieces_costs_its_bytes() -> None:
    """Ids, sizes and payload: nothing that was read is read again for each new byte."""
    one = connector()
    one.multicast(list(range(1000)), (b"a",) * 1000)
    data = drain(one)
    other = listener()
    wanted = set()  # bytes that it waits for before it looks at the packet again
    for at in range(len(data)):
        other.receive_bytes(data[at : at + 1], 0.0)
        wanted.add(other._reader._wanted)
    assert len(other.peer_channels) == 1000
    assert len(wanted) < 8 < len(data)


@pytest.mark.requirement("R-05")
@pytest.mark.parametrize(
    "packet",
    ["00" * 8, "13 00 00 00 00 00 00 00", "0d 00 01 00 ff ff ff ff", "40" + "00" * 7, "80" + "00" * 7],
    ids=["nop", "nobody", "none", "pong", "shutdown"],
)
def test_packets_that_say_nothing_leave_nothing_behind(packet: str) -> None:
    engine = sent(1)
    data = bytes.fromhex(packet)
    engine.receive_bytes(data, 0.0)
    engine.events()
    before = state_of(engine)
    tracemalloc.start()
    try:
        for _ in range(100):
            engine.receive_bytes(data * 100, 0.0)
            assert not any(isinstance(event, Failed) for event in engine.events())
        assert tracemalloc.get_traced_memory()[0] < 32 * KIB
    finally:
        tracemalloc.stop()
    assert state_of(engine) == before


@pytest.mark.requirement("R-03")
@pytest.mark.parametrize("parts", [(b"",), (b"abc", b"", b"de"), (b"xy",) * 50, (b"x" * 3000,)], ids=len)
def test_with_full_windows_and_nobody_reading_memory_stays_within_the_limits(parts: tuple[bytes, ...]) -> None:
    limits = Limits(connection_bytes=256 * KIB, channel_bytes=64 * KIB, message=32 * KIB, reassembly=32 * KIB)
    one, other = connector(limits=limits), listener(quiet(parts=64), limits=limits)
    for channel in range(30):
        while one.admits(channel, sum(map(len, parts)), len(parts)):
            one.send(channel, parts)
    data = drain(one)
    tracemalloc.start()
    try:
        for at in range(0, len(data), 4096):
            other.receive_bytes(data[at : at + 4096], 0.0)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert not other.over
    declared = 256 * KIB + 32 * KIB + 30 * 4 * KIB
    assert declared / 2 < other.held_bytes < declared
    assert held < 1.5 * declared + 64 * KIB
