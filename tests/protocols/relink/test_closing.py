"""The end of a channel, and its next life: what is confirmed when, and what is remembered until both sides know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
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

if TYPE_CHECKING:
    from muxkit.protocols.relink import LinkEngine

CLOSE, CLOSED = "41 00 01 00 00 00 00 00", "85 00 01 00 00 00 00 00"
MESSAGE, PING, PONG, RESUME = "11 01 01 00 00 00 00 00", "20" + "00" * 7, "40" + "00" * 7, "60" + "00" * 7


def bare(*packets: str) -> str:
    return "".join(packets).replace(" ", "")


def consume_all(engine: LinkEngine, channel: int = 1) -> None:
    first, batch = engine.receive(channel)
    if batch:
        engine.consume(channel, through=first + len(batch) - 1, now=0.0)


@pytest.mark.clause("relink-K01", "relink-K02", "relink-K03", "relink-O03", "relink-O09")
def test_a_channel_is_closed_confirmed_and_opened_anew_from_zero() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    one.close(1)
    assert bare(written(one)).endswith(bare(CLOSE))
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    one.close(1)
    deliver(one, other)
    assert seen(other) == [("Opened", 1), ("Arrived", 1), ("Ended", 1)]
    consume_all(other)
    settle(one, other)
    assert seen(one) == [("Consumed", 1, 1), ("ChannelClosed", 1)]
    assert one.send(1, (b"c",)) == 0
    exchange(one, other)
    assert seen(other) == [("Opened", 1), ("Arrived", 1)]
    assert other.receive(1) == (0, [(b"c",)])


@pytest.mark.clause("relink-K02")
def test_closed_is_told_when_everything_before_is_consumed() -> None:
    other = listener()
    fed(other, MESSAGE, MESSAGE, CLOSE)
    assert not other.has_output()
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    assert not other.has_output()
    other.consume(1, through=1, now=0.0)
    assert bare(written(other)) == bare("2d 00 01 00 01 00 00 00", CLOSED, PING)
    assert other.peer_channels == ()


@pytest.mark.clause("relink-K02", "relink-T02")
def test_closed_is_told_behind_the_answers() -> None:
    other = listener(transactional())
    fed(other, MESSAGE, "01 00 01 00 00 00 00 00", CLOSE)
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    assert other.peer_channels == (1,)
    other.committed(1, through=0, now=0.0)
    assert bare(written(other)) == bare("45 00 01 00 00 00 00 00", "25 00 01 00 00 00 00 00", CLOSED, PING)


@pytest.mark.clause("relink-O13")
def test_a_close_moves_no_cursor() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    one.close(1)
    deliver(one, other)
    incoming = other._link.incoming[1]
    assert (incoming.arrived, incoming.consumed, incoming.told_received) == (1, -1, -1)
    fed(one, "05 00 01 00 00 00 00 00")
    assert one._link.outgoing[1].received == 0


@pytest.mark.clause("relink-K04")
def test_nothing_is_sent_on_a_channel_until_its_end_is_confirmed() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.close(1)
    one.watch(1)
    for command in (lambda: one.send(1, (b"",)), lambda: one.multicast([1], (b"",)), lambda: one.close(1)):
        with pytest.raises(LocalProtocolError, match="closed"):
            command()
    assert one.room(1) == 0
    assert not one.admits(1, 0)
    deliver(one, other)
    consume_all(other)
    exchange(one, other)
    assert seen(one) == [("Consumed", 1, 0), ("ChannelClosed", 1), ("Writable", 1)]
    one.send(1, (b"",))


@pytest.mark.clause("relink-K01")
def test_only_an_open_channel_can_be_closed() -> None:
    with pytest.raises(LocalProtocolError, match="channel 1 is not open"):
        connector().close(1)


# --- connections that break around it


@pytest.mark.clause("relink-R03", "relink-K02")
@pytest.mark.requirement("R-44")
@pytest.mark.parametrize("transactions", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_an_end_is_confirmed_once_wherever_the_connection_breaks(stage: int, transactions: bool) -> None:
    one, other = pair(transactional() if transactions else None)
    one.send(1, (b"a",))
    if transactions:
        one.commit(1)
    one.close(1)
    data = drain(one)
    if stage >= 1:
        other.receive_bytes(data, 0.0)
    if stage >= 2:
        taken(other, 1)
        (other.committed if transactions else other.consume)(1, through=0, now=0.0)
        data = drain(other)
        if stage >= 3:
            one.receive_bytes(data, 0.0)
    reconnect(one, other)
    exchange(one, other)
    if stage < 2:
        assert taken(other, 1) == [(b"a",)]
        (other.committed if transactions else other.consume)(1, through=0, now=0.0)
    settle(one, other)
    told = seen(one)
    assert told.count(("ChannelClosed", 1)) == 1
    assert told.count(("Committed", 1, 0, 0)) == transactions
    assert seen(other).count(("Opened", 1)) == 1
    assert (one.channels, other.peer_channels, other._link.tombs) == ((), (), {})


@pytest.mark.clause("relink-K03", "relink-R02", "relink-R03")
@pytest.mark.requirement("R-44")
@pytest.mark.parametrize("transactions", [False, True])
def test_the_end_of_a_channels_last_life_is_not_taken_for_the_end_of_this_one(transactions: bool) -> None:
    """The peer repeats how the first life ended, because it has not heard anything of the second."""
    one, other = pair(transactional() if transactions else None)
    one.send(1, (b"first",))
    if transactions:
        one.commit(1)
    one.close(1)
    deliver(one, other)
    taken(other, 1)
    (other.committed if transactions else other.consume)(1, through=0, now=0.0)
    deliver(other, one)
    assert ("ChannelClosed", 1) in seen(one)
    assert one.send(1, (b"second",)) == 0
    if transactions:
        one.commit(1)
    one.close(1)
    drain(one)  # lost, and with it the pong
    reconnect(one, other)
    assert bare(written(other)).endswith(bare(CLOSED, RESUME, PING))
    reconnect(one, other)
    exchange(one, other)
    assert taken(other, 1) == [(b"second",)]
    assert ("ChannelClosed", 1) not in seen(one)
    (other.committed if transactions else other.consume)(1, through=0, now=0.0)
    settle(one, other)
    assert ("ChannelClosed", 1) in seen(one)


@pytest.mark.clause("relink-K01", "relink-K03")
def test_a_channel_that_was_opened_anew_is_closed_only_when_the_peer_has_heard_of_it() -> None:
    one, other = pair()
    for _ in range(2):
        one.send(1, (b"x",))
        one.close(1)
        deliver(one, other)
        consume_all(other)
        settle(one, other)
    assert one.channels == ()
    one.send(1, (b"y",))
    one.close(1)
    assert bare(written(one)) == bare("11 01 01 00 01 00 00 00 79 00 00 00 00 00 00 00")
    fed(one, "05 00 01 00 00 00 00 00")
    assert bare(written(one)) == bare(CLOSE)


@pytest.mark.requirement("R-05", "R-43")
def test_how_a_channel_ended_is_remembered_until_the_pong_shows_that_the_peer_knows() -> None:
    one, other = pair()
    for channel in range(100):
        one.send(channel, (b"x",))
        one.close(channel)
    deliver(one, other)
    for channel in range(100):
        consume_all(other, channel)
    assert len(other._link.tombs) == 100
    data = drain(other)
    assert data.count(bytes.fromhex(PING)) == 1
    one.receive_bytes(data, 0.0)
    deliver(one, other)
    assert other._link.tombs == {}
    assert not other.has_output()


@pytest.mark.clause("relink-K03")
def test_a_message_shows_as_well_that_the_peer_knows_the_end() -> None:
    other = listener()
    fed(other, MESSAGE, CLOSE)
    consume_all(other)
    drain(other)
    other.consume(1, through=0, now=0.0)
    fed(other, MESSAGE)
    assert other._link.tombs == {}
    fed(other, PONG)
    assert other.receive(1) == (0, [(b"",)])
    reconnect(other)
    assert bare(written(other)) == bare("0d 00 01 00 00 00 00 00 2d 00 01 00 ff ff ff ff", RESUME)


@pytest.mark.requirement("R-02", "R-05")
def test_ends_that_a_peer_does_not_confirm_are_bounded() -> None:
    other = listener(limits=Limits(channels=4))
    for channel in range(5):
        id = f"{channel:02x} 00"
        fed(other, f"11 01 {id} 00 00 00 00", f"41 00 {id} 00 00 00 00")
        consume_all(other, channel)
        drain(other)
    assert len(other._link.tombs) == 5
    assert violation(other, "11 01 09 00 00 00 00 00").limit == "channels"


@pytest.mark.requirement("R-43")
def test_what_was_closed_is_not_remembered_for_ever() -> None:
    one, other = pair(limits=Limits(channels=8))
    for channel in range(50):
        one.send(channel, (b"x",))
        one.close(channel)
        deliver(one, other)
        consume_all(other, channel)
        settle(one, other)
    assert len(one._link.recently_closed) == 8
    assert (other._link.tombs, other._link.incoming, one._link.outgoing) == ({}, {}, {})
    assert one._link.unannounced == {}


# --- what a peer must not do


@pytest.mark.clause("relink-K04")
@pytest.mark.parametrize(
    ("packets", "rule"),
    [
        ((MESSAGE, CLOSE, MESSAGE), "relink-K04"),
        ((MESSAGE, CLOSE, CLOSE), "relink-K04"),
        ((MESSAGE, "43 00 00 00 02 00 00 00 01 00 01 00 00 00 00 00"), "relink-K04"),
        ((CLOSE,), "relink-O12"),
        ((MESSAGE, "41 00 02 00 00 00 00 00"), "relink-O12"),
    ],
)
def test_a_channel_is_closed_once_and_for_all(packets: tuple[str, ...], rule: str) -> None:
    assert violation(listener(), *packets).rule == rule


@pytest.mark.clause("relink-K04", "relink-K02")
@pytest.mark.parametrize(
    ("packets", "rule"),
    [
        ((MESSAGE, CLOSE), "relink-K02"),
        ((MESSAGE, "01 00 01 00 00 00 00 00", CLOSE, "01 00 01 00 00 00 00 00"), "relink-K04"),
    ],
)
def test_under_transactions_everything_is_decided_before_the_close(packets: tuple[str, ...], rule: str) -> None:
    assert violation(listener(transactional()), *packets).rule == rule


@pytest.mark.clause("relink-K02")
def test_what_was_not_closed_cannot_be_confirmed() -> None:
    one = connector()
    assert violation(one, CLOSED).rule == "relink-K02"
    one = connector()
    one.send(1, (b"",))
    drain(one)
    assert violation(one, CLOSED).rule == "relink-K02"
    one = connector()
    one.send(1, (b"",))
    one.close(1)
    drain(one)
    assert violation(one, "87 00 00 00 02 00 00 00 01 00 01 00 00 00 00 00").rule == "relink-K02"


@pytest.mark.clause("relink-K02")
def test_an_end_with_unanswered_commits_cannot_be_confirmed() -> None:
    one = connector(transactional())
    one.send(1, (b"",))
    one.commit(1)
    one.close(1)
    drain(one)
    assert "1 not answered" in violation(one, CLOSED).message


@pytest.mark.clause("relink-K02", "relink-F04")
def test_a_foreign_peer_may_confirm_the_end_without_having_acknowledged_the_messages() -> None:
    one = connector()
    one.send(1, (b"",))
    one.close(1)
    drain(one)
    assert fed(one, CLOSED) == [("Consumed", 1, 0), ("ChannelClosed", 1)]
    assert one.unanswered == 0
