"""Pings, shutdown, silence, and what an observer sees."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.relink import Config
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
    EPOCH,
    LINK,
    connector,
    deliver,
    exchange,
    fed,
    listener,
    pair,
    reconnect,
    seen,
    settle,
    taken,
    transactional,
    violation,
    written,
)
from tests.protocols.relink._numbered import NumberedEngine

MESSAGE = "11 01 01 00 00 00 00 00"
NOP, PING, PONG, RESUME, SHUTDOWN = (f"{kind:02x}" + "00" * 7 for kind in (0x00, 0x20, 0x40, 0x60, 0x80))


# --- pings


@pytest.mark.clause("relink-N01", "relink-N02")
def test_each_ping_has_its_pong() -> None:
    one, other = pair()
    for _ in range(3):
        one.ping()
    assert deliver(one, other).hex() == PING * 3
    assert deliver(other, one).hex() == PONG * 3
    assert seen(one) == [("Pong",)] * 3


@pytest.mark.clause("relink-N03")
def test_a_pong_is_not_kept_for_the_next_connection() -> None:
    other = listener()
    fed(other, PING)
    other.ping()
    reconnect(other)
    assert written(other) == RESUME


@pytest.mark.clause("relink-N04")
def test_a_pong_that_nobody_asked_for_is_told() -> None:
    assert fed(connector(), PONG) == [("Pong",)]


@pytest.mark.clause("relink-N01")
def test_there_is_no_ping_without_a_connection() -> None:
    one = connector()
    one.connection_lost(0.0)
    with pytest.raises(LocalProtocolError, match="no connection"):
        one.ping()


@pytest.mark.clause("relink-G01", "relink-G08", "relink-G02", "relink-P07", "relink-A05")
def test_nops_fill_the_space_between_packets() -> None:
    other = listener()
    assert fed(other, NOP + NOP + "3e 09" + "ff" * 6 + NOP) == []
    assert written(other) == PONG


@pytest.mark.clause("relink-G07")
def test_a_packet_counts_when_its_last_byte_has_come() -> None:
    other = listener()
    fed(other, PING[:14])
    assert not other.has_output()
    fed(other, PING[14:])
    assert written(other) == PONG


@pytest.mark.requirement("R-06", "R-12")
def test_pings_of_a_peer_that_never_reads_are_a_number_and_bounded() -> None:
    other = listener(limits=Limits(pongs=1000))
    for _ in range(100):
        fed(other, PING * 10)
    assert sum(map(len, other.buffers_to_send(80))) <= 88
    assert len(drain(other)) >= 8 * 989
    for _ in range(100):
        fed(other, PING * 10)
    assert violation(other, PING).limit == "pongs"


# --- shutdown


@pytest.mark.clause("relink-S01", "relink-G05")
def test_after_the_shutdown_no_channel_is_opened() -> None:
    one, other = pair()
    one.send(1, (b"",))
    one.shutdown()
    assert written(one).split() == [MESSAGE.replace(" ", ""), SHUTDOWN]
    with pytest.raises(LocalProtocolError, match="none can be opened after the shutdown"):
        one.send(2, (b"",))
    with pytest.raises(LocalProtocolError, match="none can be opened after the shutdown"):
        one.multicast([1, 2], (b"",))
    assert fed(other, SHUTDOWN) == [("GoingAway",)]
    assert fed(other, SHUTDOWN) == []


@pytest.mark.clause("relink-S02")
def test_channels_that_are_open_stay_so_until_they_are_closed() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.shutdown()
    deliver(one, other)
    one.send(1, (b"b",))
    deliver(one, other)
    assert taken(other, 1) == [(b"a",), (b"b",)]
    one.close(1)
    other.consume(1, through=1, now=0.0)
    exchange(one, other)
    assert one.channels == ()
    with pytest.raises(LocalProtocolError, match="after the shutdown"):
        one.send(1, (b"",))


@pytest.mark.clause("relink-S03")
@pytest.mark.requirement("R-42")
def test_the_link_is_finished_when_both_have_shut_down_and_all_is_answered() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.shutdown()
    deliver(one, other)
    other.shutdown()
    deliver(other, one)
    assert ("LinkFinished",) not in seen(one) + seen(other)
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    exchange(one, other)
    assert seen(other)[-1] == ("LinkFinished",)
    assert seen(one)[-1] == ("LinkFinished",)
    for engine in (one, other):
        assert engine.over
        assert engine.next_deadline() is None
        assert not engine.has_output()
        with pytest.raises(LocalProtocolError, match="the link has ended"):
            engine.send(1, (b"",))
        with pytest.raises(LocalProtocolError, match="the link has ended"):
            engine.connection_made(1.0, epoch=EPOCH, link_id=LINK)


@pytest.mark.clause("relink-S03")
def test_shutdowns_alone_finish_a_link_without_channels() -> None:
    one, other = pair()
    one.shutdown()
    other.shutdown()
    exchange(one, other)
    assert seen(one) == [("GoingAway",), ("LinkFinished",)]
    assert seen(other) == [("GoingAway",), ("LinkFinished",)]


@pytest.mark.clause("relink-S03", "relink-T02")
def test_a_commit_without_an_answer_keeps_the_link() -> None:
    one, other = pair(transactional())
    one.send(1, (b"a",))
    one.commit(1)
    one.shutdown()
    other.shutdown()
    exchange(one, other)
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    settle(one, other)
    assert not one.over
    assert not other.over
    other.committed(1, through=0, now=0.0)
    exchange(one, other)
    assert one.over
    assert other.over


@pytest.mark.clause("relink-S03", "relink-R03")
@pytest.mark.requirement("R-42")
def test_a_shutdown_is_told_again_and_behind_what_the_peer_lacks() -> None:
    one, other = pair()
    one.send(1, (b"",))
    one.shutdown()
    drain(one)  # lost
    reconnect(one, other)
    assert written(one) == RESUME
    fed(one, RESUME)
    assert drain(one).hex() == MESSAGE.replace(" ", "") + SHUTDOWN
    assert one.is_shutting_down
    assert not other.has_peer_shut_down


@pytest.mark.clause("relink-S04")
@pytest.mark.parametrize("packet", ["11 01 02 00 00 00 00 00", "13 01 00 00 02 00 00 00 01 00 02 00 00 00 00 00"])
def test_a_channel_that_is_opened_after_the_shutdown_is_a_violation(packet: str) -> None:
    other = listener()
    fed(other, MESSAGE, SHUTDOWN, MESSAGE)
    assert violation(other, packet).rule == "relink-S04"


@pytest.mark.clause("relink-S04")
def test_a_channel_that_is_opened_anew_after_the_shutdown_is_a_violation() -> None:
    other = listener()
    fed(other, MESSAGE, SHUTDOWN, "41 00 01 00 00 00 00 00")
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    drain(other)
    assert violation(other, MESSAGE).rule == "relink-S04"


# --- silence


@pytest.mark.requirement("R-46", "R-52")
def test_a_connection_that_is_silent_is_asked_and_then_given_up() -> None:
    engine = NumberedEngine(Config(keepalive=20.0, keepalive_timeout=15.0), is_connector=True)
    engine.connection_made(100.0, epoch=EPOCH, link_id=LINK)
    engine.receive_bytes(bytes(8), 110.0)
    engine.handle_deadline(120.0)
    assert not engine.has_output()
    assert engine.next_deadline() == 130.0
    engine.handle_deadline(130.0)
    assert written(engine) == PING
    assert engine.next_deadline() == 145.0
    assert fed(engine, PONG, now=131.0) == []
    assert engine.next_deadline() == 151.0
    engine.handle_deadline(151.0)
    engine.handle_deadline(166.0)
    assert seen(engine) == [("Silent", 35.0)]
    assert not engine.over
    engine.connection_lost(167.0)
    assert engine.next_deadline() is None


@pytest.mark.requirement("R-29", "R-04")
def test_a_packet_that_does_not_get_on_is_given_up() -> None:
    limits = Limits(stall=30.0, stall_bytes=100)
    other = listener(limits=limits)
    fed(other, "51 01 01 00 00 00 00 00 00 00 01 00 00 00 00 00")
    for second in range(1, 30):
        fed(other, "00" * 4, now=float(second))
    other.handle_deadline(30.0)
    assert seen(other) == []
    fed(other, "00" * 50, now=59.0)
    other.handle_deadline(60.0)
    assert seen(other) == [("Stalled", 30.0)]


@pytest.mark.requirement("R-29")
def test_a_packet_that_is_complete_is_not_watched() -> None:
    other = listener()
    fed(other, MESSAGE[:5])
    assert other.next_deadline() == 30.0
    fed(other, MESSAGE[5:], now=29.0)
    other.handle_deadline(29.0)
    assert other.next_deadline() == pytest.approx(29.1)


@pytest.mark.requirement("R-47")
def test_an_end_of_file_is_clean_between_packets_only() -> None:
    other = listener()
    other.receive_eof(0.0)
    assert seen(other) == [("HungUp", True)]
    other = listener()
    fed(other, "11")
    other.receive_eof(0.0)
    assert seen(other) == [("HungUp", False)]
