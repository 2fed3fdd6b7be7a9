"""One link over many connections: what is told again, what is held back, and what happens when the link is gone."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
    EPOCH,
    LINK,
    arrived,
    connector,
    deliver,
    exchange,
    fed,
    listener,
    pair,
    quiet,
    reconnect,
    seen,
    settle,
    taken,
    transactional,
    violation,
    written,
)
from tests.protocols.relink._numbered import NumberedEngine

MESSAGE, PING, PONG, RESUME = "11 01 01 00 00 00 00 00", "20" + "00" * 7, "40" + "00" * 7, "60" + "00" * 7


def bare(*packets: str) -> str:
    return "".join(packets).replace(" ", "")


def resuming(count: int = 7) -> NumberedEngine:
    """Return a connector that sent messages on channel 1 before the connection broke, and has written its resume."""
    engine = connector()
    for n in range(count):
        engine.send(1, (bytes([n]),))
    drain(engine)
    reconnect(engine)
    assert bare(written(engine)) == RESUME
    return engine


# --- the order of things


def test_a_resume_of_many_channels_is_written_in_pieces_of_the_size_that_the_transport_asks_for() -> None:
    one, other = pair()
    for channel in range(1, 200, 2):
        one.send(channel, (b"x",))
    exchange(one, other)
    reconnect(one, other)
    assert 100 <= sum(map(len, other.buffers_to_send(100))) < 150


@pytest.mark.clause("relink-R01")
def test_a_new_link_has_no_resume() -> None:
    one, other = pair()
    one.send(1, (b"x",))
    assert RESUME not in deliver(one, other).hex()
    assert RESUME not in drain(other).hex()
    reconnect(one, other)
    assert drain(one).hex().count(RESUME) == 1
    assert drain(other).hex().count(RESUME) == 1


@pytest.mark.clause("relink-R02", "relink-O05", "relink-Q05")
def test_everything_that_was_received_and_consumed_is_told_before_the_resume() -> None:
    other = listener()
    fed(other, *[MESSAGE] * 5)
    other.consume(1, through=2, now=0.0)
    drain(other)
    reconnect(other)
    assert written(other) == f"0d00010004000000 2d00010002000000 {RESUME}"


@pytest.mark.clause("relink-R02", "relink-R03")
def test_a_channel_of_which_nothing_is_consumed_says_so_with_the_number_before_the_first() -> None:
    other = listener(quiet(first_sequence=5))
    fed(other, MESSAGE)
    reconnect(other)
    assert written(other) == f"0d00010005000000 2d00010004000000 {RESUME}"
    one = connector(quiet(first_sequence=5))
    one.send(1, (b"",))
    drain(one)
    reconnect(one)
    drain(one)
    assert fed(one, "0d 00 01 00 04 00 00 00", "2d 00 01 00 04 00 00 00", RESUME) == [("Resumed",)]
    assert bare(written(one)) == bare(MESSAGE)


@pytest.mark.clause("relink-R03", "relink-H35")
def test_messages_wait_for_the_peer_and_go_on_from_what_it_has() -> None:
    one = resuming()
    one.send(1, (b"new",))
    assert not one.has_output()
    assert not one.state.is_resumed
    fed(one, "0d 00 01 00 04 00 00 00")
    packets = written(one).split()
    assert [bytes.fromhex(packet)[8] for packet in packets] == [5, 6, ord("n")]


@pytest.mark.clause("relink-H35", "relink-N01")
def test_pings_and_acks_flow_before_the_resume() -> None:
    one, other = pair()
    other.send(1, (b"x",))
    deliver(other, one)
    reconnect(one)
    seen(one)
    one.ping()
    one.consume(1, through=0, now=0.0)
    assert written(one) == f"{PING} 0d00010000000000 2d00010000000000 {RESUME}"
    assert fed(one, PING) == []
    assert written(one) == PONG


@pytest.mark.clause("relink-H35")
def test_a_channel_that_the_peer_has_nothing_of_waits_for_its_resume() -> None:
    one = resuming(2)
    one.send(2, (b"",))
    assert not one.has_output()
    fed(one, RESUME)
    assert [packet[:8] for packet in written(one).split()] == ["11010100"] * 2 + ["11010200"]


@pytest.mark.clause("relink-H35", "relink-R03")
def test_consumed_alone_frees_no_channel_since_more_may_be_received() -> None:
    one = resuming(7)
    fed(one, "2d 00 01 00 02 00 00 00")
    assert not one.has_output()
    fed(one, "0d 00 01 00 05 00 00 00")
    assert len(written(one).split()) == 1


@pytest.mark.clause("relink-R02")
def test_acks_that_are_due_meanwhile_go_into_the_resumption() -> None:
    other = listener(quiet(window=8))
    fed(other, *[MESSAGE] * 5)
    reconnect(other)
    taken(other, 1)
    other.consume(1, through=4, now=0.0)
    assert written(other) == f"0d00010004000000 2d00010004000000 {RESUME}"
    other.handle_deadline(1.0)
    assert not other.has_output()


@pytest.mark.clause("relink-R03")
@pytest.mark.requirement("R-51")
def test_nothing_that_was_given_out_is_given_out_again() -> None:
    one, other = pair()
    for n in range(6):
        one.send(1, (bytes([n]),))
    data = drain(one)
    other.receive_bytes(data[: 16 * 4 + 5], 0.0)
    assert len(taken(other, 1)) == 4
    reconnect(one, other)
    exchange(one, other)
    assert arrived(other, 1) == [(4, [(b"\4",), (b"\5",)])]


@pytest.mark.clause("relink-R03")
def test_what_was_queued_between_two_connections_is_sent() -> None:
    one, other = pair()
    one.connection_lost(1.0)
    other.connection_lost(1.0)
    one.send(1, (b"x",))
    assert not one.has_output()
    assert one.buffers_to_send() == []
    for engine in (one, other):
        engine.connection_made(2.0, epoch=EPOCH, link_id=LINK)
    settle(one, other)
    assert taken(other, 1) == [(b"x",)]


def test_what_is_queued_before_the_first_connection_goes_out_at_once() -> None:
    one, other = NumberedEngine(quiet(), is_connector=True), listener()
    assert (one.epoch, one.link_id, one.is_connected) == (0, 0, False)
    one.send(1, (b"x",))
    one.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    assert seen(one) == []
    deliver(one, other)
    assert taken(other, 1) == [(b"x",)]


# --- what a peer must not do


@pytest.mark.clause("relink-R04")
def test_a_resume_that_is_not_due_is_a_violation() -> None:
    assert violation(connector(), RESUME).rule == "relink-R04"
    assert violation(resuming(), RESUME, RESUME).rule == "relink-R04"


@pytest.mark.clause("relink-R02", "relink-R03")
def test_a_resume_that_leaves_out_a_channel_that_it_had_acknowledged_is_a_violation() -> None:
    one = connector()
    for channel in (1, 2, 3):
        one.send(channel, (b"",))
    drain(one)
    fed(one, "0d 00 01 00 00 00 00 00", "2d 00 02 00 00 00 00 00")
    reconnect(one)
    drain(one)
    error = violation(one, "0d 00 02 00 00 00 00 00", RESUME)
    assert error.rule == "relink-R02"
    assert "left out channel 1" in error.message


@pytest.mark.clause("relink-K02", "relink-R03")
def test_a_foreign_peer_may_have_forgotten_a_channel_that_was_closed() -> None:
    one = connector()
    one.send(1, (b"",))
    one.close(1)
    drain(one)
    fed(one, "05 00 01 00 00 00 00 00")
    drain(one)
    reconnect(one)
    drain(one)
    assert fed(one, RESUME) == [("Consumed", 1, 0), ("ChannelClosed", 1), ("Resumed",)]


CLOSE = "41 00 01 00 00 00 00 00"


def lacking(*, written_again: bool) -> NumberedEngine:
    """Send three messages and a close; after a reconnect the peer tells that it has one message, then reconnects."""
    one = connector()
    for _ in range(3):
        one.send(1, (b"",))
    drain(one)
    fed(one, "05 00 01 00 00 00 00 00")
    one.close(1)
    assert bare(written(one)) == bare(CLOSE)
    reconnect(one)
    drain(one)
    fed(one, "0d 00 01 00 00 00 00 00")
    if written_again:
        assert bare(written(one)) == bare(MESSAGE, MESSAGE, CLOSE)
    reconnect(one)
    drain(one)
    return one


@pytest.mark.clause("relink-R02")
@pytest.mark.requirement("R-17", "R-19")
def test_a_resume_that_leaves_out_a_closed_channel_whose_messages_were_not_written_again_is_a_violation() -> None:
    """The peer lacked two messages, so it cannot have had the close behind them, and has to speak of the channel."""
    error = violation(lacking(written_again=False), RESUME)
    assert error.rule == "relink-R02"
    assert "left out channel 1, where 0 was received" in error.message


@pytest.mark.clause("relink-R02", "relink-K02")
def test_a_resume_may_leave_out_a_closed_channel_whose_messages_were_all_written_again() -> None:
    one = lacking(written_again=True)
    assert fed(one, RESUME) == [("Consumed", 1, 2), ("ChannelClosed", 1), ("Resumed",)]
    assert (one.channel_count, one.unanswered, one.retained_bytes) == (0, 0, 0)


@pytest.mark.clause("relink-K02", "relink-R03")
def test_a_peer_that_had_all_messages_may_have_had_the_close_that_was_not_repeated() -> None:
    """It names the channel once more while its application still works, and has forgotten it one connection later."""
    one = connector()
    one.send(1, (b"",))
    drain(one)
    fed(one, "05 00 01 00 00 00 00 00")
    one.close(1)
    drain(one)
    reconnect(one)
    drain(one)
    fed(one, "0d 00 01 00 00 00 00 00", "2d 00 01 00 ff ff ff ff")
    reconnect(one)
    drain(one)
    assert fed(one, RESUME) == [("Consumed", 1, 0), ("ChannelClosed", 1), ("Resumed",)]


@pytest.mark.clause("relink-H35", "relink-R02")
def test_a_resume_behind_consumed_alone_has_told_of_the_channel() -> None:
    one = resuming(3)
    fed(one, "2d 00 01 00 01 00 00 00", RESUME)
    assert [bytes.fromhex(packet)[8] for packet in written(one).split()] == [2]


@pytest.mark.clause("relink-K04", "relink-H35")
def test_after_a_resume_a_closed_channel_takes_no_messages_either() -> None:
    other = listener()
    fed(other, MESSAGE, CLOSE)
    reconnect(other)
    drain(other)
    assert violation(other, MESSAGE).rule == "relink-K04"


@pytest.mark.clause("relink-R03", "relink-Q11")
@pytest.mark.parametrize(
    "packet",
    ["0d 00 01 00 01 00 00 00", "0d 00 01 00 07 00 00 00", "0d 00 01 00 ff ff ff ff"],
    ids=["back", "beyond", "none"],
)
def test_a_peer_comes_back_with_what_it_had_or_more_of_what_was_sent(packet: str) -> None:
    one = connector()
    for _ in range(7):
        one.send(1, (b"",))
    drain(one)
    fed(one, "2d 00 01 00 02 00 00 00")
    reconnect(one)
    drain(one)
    assert violation(one, packet).rule in ("relink-Q11", "relink-R03")


@pytest.mark.clause("relink-H35")
@pytest.mark.parametrize("packet", [MESSAGE, "11 01 02 00 00 00 00 00", "41 00 01 00 00 00 00 00"])
def test_a_peer_that_does_not_wait_for_what_we_have_is_a_violation(packet: str) -> None:
    other = listener()
    fed(other, MESSAGE)
    reconnect(other)
    assert violation(other, packet).rule == "relink-H35"


@pytest.mark.clause("relink-H35", "relink-T01")
def test_decisions_wait_as_well() -> None:
    other = listener(transactional())
    fed(other, MESSAGE)
    reconnect(other)
    assert violation(other, "01 00 01 00 00 00 00 00").rule == "relink-H35"


@pytest.mark.clause("relink-Q11", "relink-R03")
def test_decisions_behind_the_cursor_are_ignored_only_after_a_resume_and_only_at_first() -> None:
    decided = "09 00 01 00 00 00 00 00"
    other = listener(transactional())
    assert violation(other, MESSAGE, decided, decided).rule == "relink-Q11"
    other = listener(transactional())
    fed(other, MESSAGE, MESSAGE, decided)
    reconnect(other)
    drain(other)
    assert fed(other, decided) == []
    fed(other, "01 00 01 00 00 00 00 00")
    assert violation(other, decided).rule == "relink-Q11"
    other = listener(transactional(window=4))
    fed(other, MESSAGE, decided)
    reconnect(other)
    drain(other)
    assert violation(other, "09 00 01 00 f0 ff ff ff").rule == "relink-Q11"


@pytest.mark.clause("relink-Q11")
def test_answers_behind_the_cursor_are_ignored_only_while_the_peer_resumes() -> None:
    one = connector(transactional())
    for _ in range(3):
        one.send(1, (b"",))
    one.commit(1)
    drain(one)
    fed(one, "4d 00 01 00 01 00 00 00")
    assert violation(one, "6d 00 01 00 01 00 00 00").rule == "relink-Q11"
    one = connector(transactional())
    for _ in range(3):
        one.send(1, (b"",))
    one.commit(1)
    drain(one)
    fed(one, "4d 00 01 00 01 00 00 00")
    assert fed(one, "4d 00 01 00 01 00 00 00") == []
    reconnect(one)
    drain(one)
    assert fed(one, "0d 00 01 00 02 00 00 00", "6d 00 01 00 00 00 00 00", RESUME)[1:] == [("Resumed",)]
    assert violation(one, "4d 00 01 00 00 00 00 00").rule == "relink-Q11"


@pytest.mark.clause("relink-Q11", "relink-R03")
def test_a_decision_that_is_to_be_told_again_cannot_be_answered_yet() -> None:
    one = connector(transactional())
    for _ in range(3):
        one.send(1, (b"",))
    one.commit(1)
    drain(one)
    reconnect(one)
    drain(one)
    fed(one, "0d 00 01 00 00 00 00 00", RESUME)
    one.buffers_to_send(9)
    assert violation(one, "4d 00 01 00 01 00 00 00").rule == "relink-Q11"


@pytest.mark.clause("relink-T04", "relink-T05")
def test_the_first_answer_on_a_new_connection_has_a_number() -> None:
    other = listener(transactional())
    fed(other, MESSAGE, MESSAGE, "09 00 01 00 01 00 00 00")
    taken(other, 1)
    other.committed(1, through=0, now=0.0)
    drain(other)
    reconnect(other)
    drain(other)
    other.committed(1, through=1, now=0.0)
    assert written(other) == "4d00010001000000"


# --- another link


@pytest.mark.clause("relink-H34", "relink-H26")
@pytest.mark.parametrize(("epoch", "name"), [(EPOCH, "LinkReplaced"), (EPOCH + 1, "EpochChanged")])
def test_when_the_link_is_another_one_everything_about_the_old_one_is_gone(epoch: int, name: str) -> None:
    one = connector()
    fed(one, MESSAGE)
    seen(one)
    for _ in range(3):
        one.send(1, (b"",))
    drain(one)
    one.send(2, (b"",))
    one.connection_lost(1.0)
    one.connection_made(2.0, epoch=epoch, link_id=LINK + 1)
    assert seen(one) == [(name, EPOCH, LINK, epoch, LINK + 1, 4)]
    assert (one.channels, one.peer_channels, one.unanswered, one.held_bytes, one.outbox) == ((), (), 0, 0, 0)
    assert not one.has_output()
    assert one.send(1, (b"",)) == 0
    assert bare(written(one)) == bare(MESSAGE)
    assert arrived(one, 1) == []


@pytest.mark.clause("relink-H33")
def test_a_link_that_is_refused_is_gone() -> None:
    one = connector()
    one.send(1, (b"",))
    one.watch(1)
    one.connection_lost(1.0)
    seen(one)
    one.link_lost(1.0, epoch=EPOCH + 1)
    assert seen(one) == [("EpochChanged", EPOCH, LINK, EPOCH + 1, 0, 1)]
    assert (one.epoch, one.link_id, one.unanswered) == (0, 0, 0)
    one.link_lost(1.0)
    assert seen(one) == []
    one.connection_made(2.0, epoch=EPOCH + 1, link_id=9)
    assert seen(one) == []


def test_connections_follow_each_other_and_name_a_link() -> None:
    one = connector()
    with pytest.raises(LocalProtocolError, match="a call of connection_lost first"):
        one.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    one.connection_lost(0.0)
    one.connection_lost(0.0)
    for epoch, link_id in ((0, LINK), (EPOCH, 0)):
        with pytest.raises(LocalProtocolError, match="invalid link"):
            one.connection_made(0.0, epoch=epoch, link_id=link_id)
    one.receive_bytes(b"\xff" * 8, 0.0)
    one.receive_eof(0.0)
    assert seen(one) == []


@pytest.mark.requirement("R-47")
def test_a_packet_that_was_cut_off_is_not_continued_on_the_next_connection() -> None:
    for size in (3, 12):
        other = listener()
        fed(other, "11 01 01 00 05 00 00 00 68 65 6c 6c 6f 00 00 00"[: 3 * size])
        reconnect(other)
        assert fed(other, RESUME) == [("Resumed",)]
        fed(other, PING)
        assert PONG in written(other)
