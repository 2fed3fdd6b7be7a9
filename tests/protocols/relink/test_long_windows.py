"""How large the window of a channel becomes on a long line, in which each turn is one round trip of 100 ms."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import pytest

from muxkit._limits import SHORT_WINDOW, Limits
from muxkit.core.events import Writable
from muxkit.protocols.relink.events import Arrived
from muxkit.protocols.relink.probes import PING, PONG
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import pair, reconnect

if TYPE_CHECKING:
    from muxkit.protocols.relink.send import ChannelSender
    from tests.protocols.relink._numbered import NumberedEngine

TRIP = 0.1  # s
SIZE = 64 * 1024 - 64  # bytes of a message, so that about 16 fill a short window
MIB = 1024 * 1024
LIMITS = Limits(channel_bytes=4 * MIB, connection_bytes=8 * MIB)


@attrs.define
class Line:
    """Two engines with a long line between them."""

    one: NumberedEngine
    other: NumberedEngine
    now: float = 0.0
    answers_pings: bool = True
    pings: list[float] = attrs.field(factory=list)

    def fill(self, sender: ChannelSender) -> int:
        """Send until the window is full, and return how many bytes of messages that were."""
        count = 0
        while sender.admits(SIZE):
            sender.send(bytes(SIZE))
            count += SIZE
        return count

    def turn(self, *, unread: tuple[int, ...] = ()) -> None:
        """Let everything arrive and be consumed, except on the channels `unread`, and let the answers return."""
        data = drain(self.one)
        if PING in [data[:8], data[-8:]]:
            self.pings.append(self.now)
        self.other.receive_bytes(data, self.now)
        for event in self.other.events():
            if isinstance(event, Arrived) and event.receiver.channel not in unread:
                event.receiver.consume(event.first + len(event.messages) - 1, self.now)
        self.other.handle_deadline(self.now + 0.2)
        answer = drain(self.other)
        self.now += TRIP
        self.one.receive_bytes(answer if self.answers_pings else answer.replace(PONG, b""), self.now)


@pytest.fixture
def line() -> Line:
    return Line(*pair(limits=LIMITS))


def test_the_window_follows_the_path_up_to_the_limit_while_all_of_it_is_consumed_in_each_round_trip(line: Line) -> None:
    sender = line.one.sender(2)
    sizes = []
    for _ in range(10):
        sizes.append(line.fill(sender))
        line.turn()
    assert sizes[0] <= SHORT_WINDOW
    assert 0.9 * LIMITS.channel_bytes < sizes[-1] <= LIMITS.channel_bytes
    assert all(later <= 2.1 * earlier for earlier, later in pairwise(sizes))


def test_the_window_stays_short_while_the_peer_has_not_answered_a_ping(line: Line) -> None:
    line.answers_pings = False
    sender = line.one.sender(2)
    for _ in range(20):
        assert line.fill(sender) <= SHORT_WINDOW
        line.turn()
    assert line.pings


def test_a_link_that_sends_in_bulk_pings_once_in_five_seconds(line: Line) -> None:
    sender = line.one.sender(2)
    for _ in range(120):  # 12 seconds
        line.fill(sender)
        line.turn()
    assert [round(later - line.pings[0]) for later in line.pings] == [0, 5, 10]


def test_a_channel_without_bulk_pings_never(line: Line) -> None:
    sender = line.one.sender(2)
    for _ in range(120):
        sender.send(bytes(8 * 1024))
        line.turn()
    assert not line.pings


def test_the_ping_of_a_lost_connection_measures_nothing_and_the_next_one_pings_again(line: Line) -> None:
    line.answers_pings = False
    sender = line.one.sender(2)
    for _ in range(5):
        line.fill(sender)
        line.turn()
    assert len(line.pings) == 1
    reconnect(line.one, line.other, now=line.now)
    line.answers_pings = True
    for _ in range(80):
        line.turn()
        line.fill(sender)
    assert len(line.pings) == 2
    assert line.one.state.ours.budget.round_trip.seconds == pytest.approx(TRIP)


def stall(line: Line, *channels: int) -> list[ChannelSender]:
    """Let each channel in turn grow its window as far as it can, and then leave all of it unread."""
    senders = [line.one.sender(channel) for channel in channels]
    for sender in senders:
        for _ in range(10):
            line.fill(sender)
            line.turn(unread=channels[: senders.index(sender)])
        line.fill(sender)
        line.turn(unread=channels)
    return senders


def test_channels_of_which_the_peer_reads_nothing_leave_a_quarter_of_the_budget_to_the_others(line: Line) -> None:
    stalled = stall(line, 2, 4, 6, 8)
    total = LIMITS.connection_bytes
    assert [sender.bytes > SHORT_WINDOW for sender in stalled] == [True, True, False, False]
    assert sum(sender.bytes for sender in stalled[:2]) <= 0.75 * total + SIZE


def test_a_sender_that_waits_for_a_long_window_is_woken_when_other_channels_are_consumed(line: Line) -> None:
    *_, sender = stall(line, 2, 4, 6)
    assert sender.bytes <= SHORT_WINDOW < sender.window - 2 * SIZE
    sender.watch(SIZE)
    receiver = line.other.receiver(2)
    receiver.consume(receiver.arrived, line.now)
    line.other.handle_deadline(line.now + 0.2)
    line.one.receive_bytes(drain(line.other), line.now)
    assert [event.sender for event in line.one.events() if isinstance(event, Writable)] == [sender]
