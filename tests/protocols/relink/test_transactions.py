"""Transactions: held until decided, answered once, and in order whatever is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
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

if TYPE_CHECKING:
    from tests.protocols.relink._numbered import NumberedEngine


COMMIT, ROLLBACK = "01 00 01 00 00 00 00 00", "21 00 01 00 00 00 00 00"
COMMITTED, UNCOMMITTED = "45 00 01 00 00 00 00 00", "65 00 01 00 00 00 00 00"
MESSAGE = "11 01 01 00 00 00 00 00"


def through(first: str, number: int) -> str:
    """Encode a packet about channel 1 with a sequence number."""
    return f"{first} 00 01 00 {number.to_bytes(4, 'little').hex(' ')}"


def transacting(count: int = 0) -> tuple[NumberedEngine, NumberedEngine]:
    """Return two engines; the listener holds undecided messages on channel 1."""
    one, other = pair(transactional())
    for n in range(count):
        one.send(1, (bytes([n]),))
    deliver(one, other)
    seen(other)
    return one, other


def offering(count: int) -> NumberedEngine:
    """Return a connector that has sent undecided messages on channel 1."""
    engine = connector(transactional())
    for _ in range(count):
        engine.send(1, (b"",))
    drain(engine)
    return engine


@pytest.mark.clause("relink-T01")
def test_messages_wait_for_the_decision() -> None:
    one, other = transacting(3)
    assert seen(other) == []
    one.commit(1, through=0)
    one.rollback(1, through=1)
    deliver(one, other)
    assert seen(other) == [("Arrived", 1, 0, [(b"\0",)]), ("RolledBack", 1, 1)]
    one.commit(1)
    deliver(one, other)
    assert seen(other) == [("Arrived", 1, 2, [(b"\2",)])]


@pytest.mark.clause("relink-T02", "relink-O07", "relink-O08")
def test_what_became_of_a_commit_is_answered_at_once() -> None:
    one, other = transacting(2)
    one.commit(1)
    deliver(one, other)
    taken(other, 1)
    other.committed(1, through=0, now=0.0)
    assert written(other).replace(" ", "") == COMMITTED.replace(" ", "")
    other.uncommitted(1, through=1, now=0.0)
    assert written(other).replace(" ", "") == through("6d", 1).replace(" ", "")
    fed(one, COMMITTED)
    assert fed(one, UNCOMMITTED) == [("Uncommitted", 1, 1, 1)]


@pytest.mark.clause("relink-T02")
def test_a_first_failure_is_told_without_a_number() -> None:
    one, other = transacting(1)
    one.commit(1)
    deliver(one, other)
    taken(other, 1)
    other.uncommitted(1, through=0, now=0.0)
    assert written(other).replace(" ", "") == UNCOMMITTED.replace(" ", "")


@pytest.mark.clause("relink-T03", "relink-T07")
def test_a_rollback_is_not_answered_but_counts_as_consumed() -> None:
    one, other = transacting(2)
    one.rollback(1)
    deliver(one, other)
    assert not other.has_output()
    other.handle_deadline(1.0)
    assert written(other) == "2d00010001000000"
    assert other.held_bytes == 0
    fed(one, "2d 00 01 00 01 00 00 00")
    assert one.room(1) == 65_536


@pytest.mark.clause("relink-T04", "relink-T05")
def test_the_answer_after_a_rollback_names_its_message() -> None:
    one, other = transacting(2)
    one.rollback(1, through=0)
    one.commit(1, through=1)
    assert written(one).replace(" ", "") == (ROLLBACK + through("09", 1)).replace(" ", "")
    assert fed(other, ROLLBACK, through("09", 1)) == [("RolledBack", 1, 0), ("Arrived", 1, 1, [(b"\1",)])]
    other.committed(1, through=1, now=0.0)
    assert written(other).replace(" ", "") == through("4d", 1).replace(" ", "")
    assert fed(one, through("4d", 1)) == [("Committed", 1, 0, 1)]
    assert one.room(1) == 65_536


@pytest.mark.clause("relink-T05", "relink-R03")
def test_a_rollback_that_was_lost_is_told_again_before_a_later_commit() -> None:
    """The hard case: without the journal the commit would give out what was rolled back."""
    one, other = transacting(2)
    one.rollback(1, through=0)
    drain(one)  # lost
    reconnect(one, other)
    one.commit(1, through=1)
    exchange(one, other)
    assert arrived(other, 1) == [(1, [(b"\1",)])]
    other.committed(1, through=1, now=0.0)
    settle(one, other)
    assert ("Committed", 1, 0, 1) in seen(one)
    assert one.unanswered == 0


@pytest.mark.clause("relink-T05", "relink-R03")
def test_decisions_that_had_arrived_and_are_told_again_change_nothing() -> None:
    one, other = transacting(4)
    one.commit(1, through=0)
    one.rollback(1, through=1)
    one.commit(1, through=2)
    deliver(one, other)
    assert taken(other, 1) == [(b"\0",), (b"\2",)]
    reconnect(one, other)
    deliver(one, other)
    deliver(other, one)
    seen(other)
    again = [through("09", 0), through("29", 1), through("09", 2)]
    assert written(one).replace(" ", "") == "".join(again).replace(" ", "")
    assert fed(other, *again) == []
    one.rollback(1)
    deliver(one, other)
    assert seen(other) == [("RolledBack", 1, 3)]
    other.committed(1, through=2, now=0.0)
    settle(one, other)
    assert ("Committed", 1, 0, 2) in seen(one)


@pytest.mark.clause("relink-R02", "relink-R03")
def test_answers_that_were_lost_are_told_again_as_runs_before_the_resume() -> None:
    one, other = transacting(5)
    one.commit(1)
    deliver(one, other)
    taken(other, 1)
    other.committed(1, through=1, now=0.0)
    other.uncommitted(1, through=2, now=0.0)
    other.committed(1, through=4, now=0.0)
    drain(other)  # lost
    reconnect(one, other)
    burst = "0d00010004000000 2d00010004000000 4d00010001000000 6d00010002000000 4d00010004000000 6000000000000000"
    assert written(other) == burst
    told = fed(one, burst)
    assert told[2:] == [("Committed", 1, 0, 1), ("Uncommitted", 1, 2, 2), ("Committed", 1, 3, 4), ("Resumed",)]
    reconnect(one, other)
    assert fed(one, burst) == [("Resumed",)]


@pytest.mark.clause("relink-R02", "relink-Q11")
def test_a_run_that_is_known_in_part_is_news_for_the_rest() -> None:
    one = offering(3)
    one.commit(1)
    drain(one)
    assert fed(one, COMMITTED) == [("Committed", 1, 0, 0)]
    reconnect(one)
    drain(one)
    assert fed(one, through("0d", 2), through("4d", 2))[1:] == [("Committed", 1, 1, 2)]


@pytest.mark.clause("relink-R03")
def test_a_commit_waits_for_its_message_that_is_sent_again() -> None:
    one = offering(3)
    one.commit(1)
    drain(one)
    reconnect(one)
    drain(one)
    fed(one, through("0d", 0), "60 00 00 00 00 00 00 00")
    assert written(one).replace(" ", "") == (MESSAGE + MESSAGE + through("09", 2)).replace(" ", "")


@pytest.mark.clause("relink-O11", "relink-P11")
def test_a_decision_is_told_without_a_number_when_it_is_the_next_of_its_kind() -> None:
    one = offering(6)
    expected = [COMMIT, COMMIT, through("29", 2), ROLLBACK, through("09", 5)]
    for operation, number in (("commit", 0), ("commit", 1), ("rollback", 2), ("rollback", 3), ("commit", 5)):
        getattr(one, operation)(1, through=number)
        assert written(one).replace(" ", "") == expected.pop(0).replace(" ", "")


@pytest.mark.clause("relink-O11", "relink-Q10")
def test_decisions_share_one_cursor() -> None:
    other = listener(transactional())
    fed(other, *[MESSAGE] * 5)
    assert fed(other, COMMIT, ROLLBACK) == [("Arrived", 1, 0, [(b"",)]), ("RolledBack", 1, 1)]
    assert fed(other, through("09", 3)) == [("Arrived", 1, 2, [(b"",), (b"",)])]
    fed(other, ROLLBACK)
    assert other.state.theirs.live[1].decided == 4


@pytest.mark.clause("relink-Q12")
def test_one_number_serves_all_channels_of_a_multicast_decision() -> None:
    other = listener(transactional())
    for _ in range(6):
        fed(other, "13 01 00 00 02 00 00 00 05 00 06 00 00 00 00 00")
    fed(other, "01 00 05 00 00 00 00 00")
    events = fed(other, "0b 00 00 00 02 00 00 00 05 00 06 00 04 00 00 00")
    assert events == [("Arrived", 5, 1, [(b"",)] * 4), ("Arrived", 6, 0, [(b"",)] * 5)]


@pytest.mark.clause("relink-T06")
@pytest.mark.parametrize("packet", [COMMIT, ROLLBACK, through("09", 0), through("29", 0)])
def test_decisions_on_a_channel_without_transactions_are_violations(packet: str) -> None:
    assert violation(listener(), MESSAGE, packet).rule == "relink-T06"


@pytest.mark.clause("relink-T06")
@pytest.mark.parametrize("packet", [COMMITTED, UNCOMMITTED, through("4d", 0), through("6d", 0)])
def test_answers_on_a_channel_without_transactions_are_violations(packet: str) -> None:
    one = connector()
    one.send(1, (b"",))
    drain(one)
    assert violation(one, packet).rule == "relink-T06"


@pytest.mark.clause("relink-T06")
def test_a_direction_may_have_transactions_alone() -> None:
    one, other = pair(quiet(connector_transactions=True))
    other.send(1, (b"x",))
    exchange(one, other)
    assert taken(one, 1) == [(b"x",)]
    with pytest.raises(LocalProtocolError, match="no transactions"):
        other.commit(1)
    with pytest.raises(LocalProtocolError, match="no transactions"):
        one.committed(1, through=0, now=0.0)


# --- the window


@pytest.mark.clause("relink-F04", "relink-T07")
def test_a_message_leaves_the_window_only_when_it_is_answered_or_rolled_back() -> None:
    one = offering(4)
    one.commit(1, through=1)
    one.rollback(1, through=2)
    drain(one)
    fed(one, through("0d", 3), through("2d", 3))
    assert one.unanswered == 4
    fed(one, COMMITTED)
    assert one.unanswered == 3
    fed(one, COMMITTED)
    assert one.unanswered == 1  # and with the answer goes the rollback behind it, which is consumed


# --- what is refused here


@pytest.mark.parametrize("name", ["commit", "rollback"])
def test_only_what_is_undecided_can_be_decided(name: str) -> None:
    one = offering(2)
    decide = getattr(one, name)
    with pytest.raises(LocalProtocolError, match="0 to 1 are not decided"):
        decide(1, through=2)
    decide(1, through=0)
    with pytest.raises(LocalProtocolError, match="1 to 1 are not decided"):
        decide(1, through=0)
    with pytest.raises(LocalProtocolError, match="channel 2 is not open"):
        decide(2)
    decide(1)
    with pytest.raises(LocalProtocolError):
        decide(1)


def test_only_committed_messages_can_be_answered_and_once() -> None:
    one, other = transacting(4)
    with pytest.raises(LocalProtocolError, match="message 0; -1 is the last that was given"):
        other.committed(1, through=0, now=0.0)
    one.commit(1, through=0)
    one.rollback(1, through=1)
    one.commit(1)
    deliver(one, other)
    with pytest.raises(LocalProtocolError, match="no message 1 waits"):
        other.committed(1, through=1, now=0.0)
    other.uncommitted(1, through=2, now=0.0)
    with pytest.raises(LocalProtocolError, match="no message 2 waits"):
        other.committed(1, through=2, now=0.0)
    with pytest.raises(LocalProtocolError, match="message 4; 3 is the last"):
        other.committed(1, through=4, now=0.0)
    other.committed(1, through=3, now=0.0)
    with pytest.raises(LocalProtocolError, match="no channel 2"):
        other.committed(2, through=0, now=0.0)


def test_a_message_may_be_consumed_before_it_is_answered() -> None:
    one, other = transacting(1)
    one.commit(1)
    deliver(one, other)
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    other.rewind(1)
    assert taken(other, 1) == []
    other.committed(1, through=0, now=0.0)
    settle(one, other)
    assert one.unanswered == 0


def test_a_channel_with_undecided_messages_is_not_closed() -> None:
    one = offering(2)
    one.commit(1, through=0)
    with pytest.raises(LocalProtocolError, match="1 message neither committed nor rolled back"):
        one.close(1)
    one.rollback(1)
    one.close(1)


def test_what_was_rolled_back_between_taken_messages_is_never_given_out() -> None:
    one, other = transacting(6)
    for number, name in enumerate(("commit", "rollback", "rollback", "commit", "commit", "rollback")):
        getattr(one, name)(1, through=number)
    deliver(one, other)
    assert arrived(other, 1) == [(0, [(b"\0",)]), (3, [(b"\3",), (b"\4",)])]
    other.rewind(1)
    assert arrived(other, 1) == [(0, [(b"\0",)]), (3, [(b"\3",), (b"\4",)])]
    other.consume(1, through=0, now=0.0)
    assert other.state.theirs.live[1].consumed_through == 2
    other.rewind(1)
    assert arrived(other, 1) == [(3, [(b"\3",), (b"\4",)])]
    other.consume(1, through=4, now=0.0)
    assert other.state.theirs.live[1].consumed_through == 5
    assert other.held_bytes == 0


# --- what is kept for a resume


@pytest.mark.requirement("R-06")
def test_answers_are_kept_only_until_the_peer_is_known_to_have_read_them() -> None:
    one, other = transacting()
    now = 0.0
    for n in range(3000):
        one.send(1, (b"x",))
        one.commit(1)
        deliver(one, other, now)
        taken(other, 1)
        (other.committed if n % 2 else other.uncommitted)(1, through=n, now=now)
        deliver(other, one, now)
    now = settle(one, other, now)
    assert other.state.probes.outcomes < 1100
    assert one.unanswered == 0


@pytest.mark.requirement("R-06")
def test_answers_behind_the_window_are_not_kept() -> None:
    other = listener(transactional(window=8))
    for n in range(100):
        fed(other, MESSAGE, COMMIT)
        taken(other, 1)
        (other.committed if n % 2 else other.uncommitted)(1, through=n, now=0.0)
        drain(other)
    assert other.state.probes.outcomes <= 9


@pytest.mark.requirement("R-03", "R-06")
def test_a_peer_that_never_shows_that_it_reads_answers_is_left() -> None:
    other = listener(transactional())
    other.state.outcomes_most = 2
    for n in range(3):
        fed(other, MESSAGE, COMMIT)
        taken(other, 1)
        (other.committed if n % 2 else other.uncommitted)(1, through=n, now=0.0)
    assert "3 answers" in violation(other, MESSAGE, COMMIT).message
