"""The end of a channel and its next life: what is confirmed when, and what the next connection says about it."""

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
    from tests.protocols.relink._numbered import NumberedEngine


CLOSE, CLOSED = "41 00 01 00 00 00 00 00", "85 00 01 00 00 00 00 00"
MESSAGE, PING, PONG, RESUME = "11 01 01 00 00 00 00 00", "20" + "00" * 7, "40" + "00" * 7, "60" + "00" * 7


def bare(*packets: str) -> str:
    return "".join(packets).replace(" ", "")


def known(one: NumberedEngine, other: NumberedEngine) -> None:
    """Let a ping and its pong prove that the first messages arrived, so that a close goes out at once from then on."""
    for channel in one.channels:
        one.state.probes.prove(one.state.ours.live[channel], at_once=True)
    exchange(one, other)


def consume_all(engine: NumberedEngine, channel: int = 1) -> None:
    """Consume everything that arrived, whether the test has fetched the events or not."""
    incoming = engine.state.theirs.live.get(channel)
    if incoming is not None and incoming.kept:
        engine.consume(channel, through=incoming.consumed_through + len(incoming.kept), now=0.0)


@pytest.mark.clause("relink-K01", "relink-K02", "relink-K03", "relink-O03", "relink-O09")
def test_a_channel_is_closed_confirmed_and_opened_anew_from_zero() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    one.close(1)
    exchange(one, other)
    assert seen(other) == [("ChannelOpened", 1), ("Arrived", 1, 0, [(b"a",), (b"b",)]), ("Ended", 1)]
    consume_all(other)
    settle(one, other)
    assert seen(one) == [("Consumed", 1, 1), ("ChannelClosed", 1)]
    assert one.send(1, (b"c",)) == 0
    exchange(one, other)
    assert seen(other) == [("ChannelOpened", 1), ("Arrived", 1, 0, [(b"c",)])]


@pytest.mark.clause("relink-K02")
def test_closed_is_told_when_everything_before_is_consumed() -> None:
    other = listener()
    fed(other, MESSAGE, MESSAGE, CLOSE)
    assert not other.has_output()
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    assert not other.has_output()
    other.consume(1, through=1, now=0.0)
    assert other.peer_channels == (1,)
    assert bare(written(other)) == bare("2d 00 01 00 01 00 00 00", CLOSED)
    assert not other.peer_channels


@pytest.mark.clause("relink-K02", "relink-T02", "relink-R02")
def test_closed_is_told_when_the_peer_is_known_to_have_read_the_answers() -> None:
    """What is over is not spoken of after a reconnect, so an answer that may be lost keeps a channel alive."""
    other = listener(transactional())
    fed(other, MESSAGE, "01 00 01 00 00 00 00 00", CLOSE)
    taken(other, 1)
    other.consume(1, through=0, now=0.0)
    assert other.peer_channels == (1,)
    other.committed(1, through=0, now=0.0)
    assert bare(written(other)) == bare("45 00 01 00 00 00 00 00", PING)
    fed(other, PONG)
    assert bare(written(other)) == bare("25 00 01 00 00 00 00 00", CLOSED)
    assert not other.peer_channels


@pytest.mark.clause("relink-O13")
def test_a_close_moves_no_cursor() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    one.close(1)
    exchange(one, other)
    incoming = other.state.theirs.live[1]
    assert (incoming.arrived, incoming.consumed_through, incoming.told_received) == (1, -1, -1)
    fed(one, "05 00 01 00 00 00 00 00")
    assert one.state.ours.live[1].received == 0


@pytest.mark.clause("relink-K04", "relink-K03")
def test_a_message_before_the_end_is_confirmed_is_a_violation() -> None:
    other = listener()
    fed(other, MESSAGE, CLOSE)
    consume_all(other)
    assert violation(other, MESSAGE).rule == "relink-K04"


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
    known(one, other)
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
    assert seen(other).count(("ChannelOpened", 1)) == 1
    assert (one.channels, other.peer_channels) == ((), ())
    assert (one.channel_count, other.channel_count) == (0, 0)


@pytest.mark.clause("relink-R02", "relink-K02")
@pytest.mark.parametrize("is_told", [False, True])
def test_a_resume_does_not_speak_of_a_channel_that_is_over(is_told: bool) -> None:
    """A peer that has forgotten the channel would refuse every such resume, and the link could never go on."""
    other = listener()
    fed(other, MESSAGE, MESSAGE.replace("01 00 00", "02 00 00", 1), CLOSE)
    consume_all(other)
    if is_told:
        assert bare(CLOSED) in bare(written(other))
    reconnect(other)
    assert bare(written(other)) == bare("0d 00 02 00 00 00 00 00", "2d 00 02 00 ff ff ff ff", RESUME)


@pytest.mark.clause("relink-R02", "relink-K02")
def test_a_channel_whose_last_message_is_consumed_while_nobody_is_connected_is_over() -> None:
    other = listener()
    fed(other, MESSAGE, CLOSE)
    taken(other, 1)
    other.connection_lost(0.0)
    other.consume(1, through=0, now=0.0)
    assert other.channel_count == 0
    other.connection_made(0.0, epoch=other.epoch, link_id=other.link_id)
    assert bare(written(other)) == RESUME


@pytest.mark.clause("relink-K03", "relink-R02", "relink-R03")
@pytest.mark.requirement("R-44")
@pytest.mark.parametrize("transactions", [False, True])
def test_the_end_of_a_channels_last_life_is_not_taken_for_the_end_of_this_one(transactions: bool) -> None:
    """The peer is silent about the second life as it is about the first, because it has not heard anything of it."""
    one, other = pair(transactional() if transactions else None)
    one.send(1, (b"first",))
    if transactions:
        one.commit(1)
    one.close(1)
    exchange(one, other)
    taken(other, 1)
    (other.committed if transactions else other.consume)(1, through=0, now=0.0)
    exchange(one, other)
    assert ("ChannelClosed", 1) in seen(one)
    assert one.send(1, (b"second",)) == 0
    if transactions:
        one.commit(1)
    one.close(1)
    drain(one)  # lost
    reconnect(one, other)
    assert bare(written(other)) == RESUME
    reconnect(one, other)
    exchange(one, other)
    assert taken(other, 1) == [(b"second",)]
    assert ("ChannelClosed", 1) not in seen(one)
    (other.committed if transactions else other.consume)(1, through=0, now=0.0)
    settle(one, other)
    assert ("ChannelClosed", 1) in seen(one)


@pytest.mark.clause("relink-K01", "relink-K03", "relink-R02")
@pytest.mark.parametrize("sign", ["05 00 01 00 00 00 00 00", PONG], ids=["ack", "pong"])
def test_a_channel_is_closed_only_when_the_peer_is_known_to_have_heard_of_it(sign: str) -> None:
    """The resume of a peer that has forgotten the channel is the same as that of a peer that never heard of it."""
    one = connector()
    one.send(1, (b"y",))
    one.close(1)
    assert bare(written(one)) == bare("11 01 01 00 01 00 00 00 79 00 00 00 00 00 00 00", PING)
    fed(one, sign)
    assert bare(written(one)) == bare(CLOSE)


@pytest.mark.clause("relink-R03", "relink-K01")
@pytest.mark.requirement("R-51")
@pytest.mark.parametrize("is_delivered", [False, True])
def test_what_was_closed_and_lost_is_sent_once_more_and_what_arrived_is_not(is_delivered: bool) -> None:
    one, other = pair()
    one.send(1, (b"x",))
    one.close(1)
    if is_delivered:
        deliver(one, other)
        assert taken(other, 1) == [(b"x",)]
        consume_all(other)
    else:
        drain(one)
    reconnect(one, other)
    exchange(one, other)
    assert taken(other, 1) == ([] if is_delivered else [(b"x",)])
    assert seen(other).count(("ChannelOpened", 1)) == 1


@pytest.mark.clause("relink-K01")
@pytest.mark.requirement("R-05")
def test_one_ping_serves_for_all_channels_that_are_to_be_closed() -> None:
    one, other = pair()
    for channel in range(100):
        one.send(channel, (b"x",))
        one.close(channel)
    data = deliver(one, other)
    assert data.count(bytes.fromhex(PING)) == 1
    exchange(one, other)
    for channel in range(100):
        consume_all(other, channel)
    exchange(one, other)
    assert one.channels == other.peer_channels == ()


@pytest.mark.requirement("R-02", "R-05")
def test_a_peer_that_opens_and_closes_and_never_reads_is_bounded() -> None:
    other = listener(limits=Limits(channels=4))
    for channel in range(4):
        id = f"{channel:02x} 00"
        fed(other, f"11 01 {id} 00 00 00 00", f"41 00 {id} 00 00 00 00")
        consume_all(other, channel)
    assert violation(other, "11 01 09 00 00 00 00 00").limit == "channels"


@pytest.mark.requirement("R-43")
def test_nothing_of_a_closed_channel_is_remembered() -> None:
    one, other = pair(limits=Limits(channels=8))
    for channel in range(50):
        one.send(channel, (b"x",))
        one.close(channel)
        exchange(one, other)
        consume_all(other, channel)
        settle(one, other)
    assert (one.channel_count, other.channel_count) == (0, 0)
    for engine in (one, other):
        probes = engine.state.probes
        assert [*engine.state.ours.unannounced, *probes.unproven, *probes.ending] == []


# --- channels that never had a message


@pytest.mark.clause("relink-O13", "relink-K02")
@pytest.mark.parametrize("is_connector", [False, True])
def test_a_channel_that_never_had_a_message_may_be_closed(is_connector: bool) -> None:
    engine = connector() if is_connector else listener()
    assert fed(engine, CLOSE) == []
    assert bare(written(engine)) == bare(CLOSED)
    assert engine.channel_count == 0


@pytest.mark.clause("relink-O13", "relink-C02")
def test_in_a_multicast_close_unknown_channels_do_not_stop_the_others() -> None:
    other = listener()
    fed(other, MESSAGE)
    consume_all(other)
    assert fed(other, "43 00 00 00 03 00 00 00 07 00 01 00 08 00 00 00") == [("Ended", 1)]
    assert bare(written(other)) == bare(
        "25 00 01 00 00 00 00 00", CLOSED, "85 00 07 00 00 00 00 00", "85 00 08 00 00 00 00 00"
    )


@pytest.mark.clause("relink-O13", "relink-K02")
@pytest.mark.parametrize("is_connector", [False, True])
def test_a_confirmed_end_of_what_was_never_opened_or_is_forgotten_says_nothing(is_connector: bool) -> None:
    engine = connector() if is_connector else listener()
    assert fed(engine, CLOSED) == []
    engine.send(1, (b"",))
    drain(engine)
    fed(engine, "05 00 01 00 00 00 00 00")
    engine.close(1)
    drain(engine)
    assert fed(engine, "87 00 00 00 03 00 00 00 07 00 01 00 08 00 00 00")[-1:] == [("ChannelClosed", 1)]
    assert fed(engine, CLOSED) == []


@pytest.mark.clause("relink-R02", "relink-O13")
def test_the_end_of_an_unopened_channel_is_confirmed_behind_our_resume() -> None:
    """Before it, some peers take each acknowledgement for a claim to know the channel."""
    other = listener()
    reconnect(other)
    fed(other, CLOSE)
    assert bare(written(other)) == bare(RESUME, CLOSED)


@pytest.mark.requirement("R-02", "R-05")
def test_confirmations_that_a_peer_does_not_read_are_bounded() -> None:
    other = listener(limits=Limits(channels=4))
    for channel in range(4):
        fed(other, f"41 00 {channel:02x} 00 00 00 00 00", f"41 00 {channel:02x} 00 00 00 00 00")
    assert violation(other, "41 00 04 00 00 00 00 00").limit == "channels"


# --- what a peer must not do


@pytest.mark.clause("relink-K04")
@pytest.mark.parametrize(
    ("packets", "rule"),
    [
        ((MESSAGE, CLOSE, MESSAGE), "relink-K04"),
        ((MESSAGE, CLOSE, CLOSE), "relink-K04"),
        ((MESSAGE, "43 00 00 00 02 00 00 00 01 00 01 00 00 00 00 00"), "relink-K04"),
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
    one.send(1, (b"",))
    drain(one)
    assert violation(one, CLOSED).rule == "relink-K02"
    one = connector()
    one.send(1, (b"",))
    one.close(1)
    drain(one)
    fed(one, PONG)
    drain(one)
    assert violation(one, "87 00 00 00 02 00 00 00 01 00 01 00 00 00 00 00").rule == "relink-K02"


@pytest.mark.clause("relink-K02")
def test_an_end_with_unanswered_commits_cannot_be_confirmed() -> None:
    one = connector(transactional())
    one.send(1, (b"",))
    one.commit(1)
    one.close(1)
    drain(one)
    fed(one, PONG)
    drain(one)
    assert "1 not answered" in violation(one, CLOSED).message


@pytest.mark.clause("relink-K02", "relink-F04")
def test_a_foreign_peer_may_confirm_the_end_without_having_acknowledged_the_messages() -> None:
    one = connector()
    one.send(1, (b"",))
    one.close(1)
    drain(one)
    fed(one, PONG)
    drain(one)
    assert fed(one, CLOSED) == [("Consumed", 1, 0), ("ChannelClosed", 1)]
    assert one.unanswered == 0


@pytest.mark.clause("relink-K01", "relink-K02")
@pytest.mark.parametrize("reads", [65_536, 8, 16], ids=["at once", "in pieces of 8", "in pieces of 16"])
def test_a_close_behind_a_multicast_goes_out_to_a_peer_that_acknowledges_nothing_before(reads: int) -> None:
    """The proof that the close waits for is asked for in each channel, whichever of them wrote the packet."""
    one = connector()
    one.multicast([1, 2], [b"x"])
    one.close(1)
    one.close(2)
    for _ in range(10):
        if b"\x20" + bytes(7) in b"".join(one.buffers_to_send(reads)):
            one.receive_bytes(b"\x40" + bytes(7), 0.0)
    fed(one, "8500 0100 00000000", "8500 0200 00000000")
    assert not one.channels


@pytest.mark.clause("relink-K01", "relink-K02")
def test_a_close_goes_out_though_its_messages_filled_the_write_to_the_last_byte() -> None:
    one = connector()
    one.send(1, (b"x",))
    one.close(1)
    written = b""
    for _ in range(10):
        data = b"".join(one.buffers_to_send(16))
        written += data
        if b"\x20" + bytes(7) in data:
            one.receive_bytes(b"\x40" + bytes(7), 0.0)
    assert written.endswith(bytes.fromhex("4100010000000000"))
