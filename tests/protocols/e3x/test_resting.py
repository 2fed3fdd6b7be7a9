"""What a message that an application keeps in hand costs: packets and timers, counted on virtual time."""

from __future__ import annotations

from collections import Counter

import pytest

from muxkit.protocols.e3x import Broken, Config, Delivered, Engine, EngineChannel, Opened, Received
from muxkit.protocols.e3x.send import REST_MOST

TEN_MINUTES = 600.0


class Pair:
    """A connector and a listener on a link without delay, on virtual time."""

    def __init__(self) -> None:
        config = Config(congestion=False)
        self.now = 0.0
        self.engines = Engine(True, config, clock=self), Engine(False, config, clock=self)
        self.packets: Counter[int] = Counter()
        """Packets by the side that sent them."""
        self.timers = 0
        self.lost: set[int] = set()
        """The sides whose packets are lost."""
        self.events: list[list[object]] = [[], []]

    def current_time(self) -> float:
        return self.now

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for side, engine in enumerate(self.engines):
                for packet in engine.datagrams_to_send(self.now):
                    moved = True
                    self.packets[side] += 1
                    if side not in self.lost:
                        self.events[1 - side].extend(self.engines[1 - side].receive_datagram(packet, self.now))
                self.events[side].extend(engine.events())

    def run(self, until: float) -> None:
        """Let time pass, from one deadline to the next."""
        while True:
            self.settle()
            dues = [due for engine in self.engines if (due := engine.next_deadline()) is not None]
            if not dues or min(dues) > until:
                self.now = until
                return
            self.now = max(self.now, min(dues))
            for engine in self.engines:
                self.events[self.engines.index(engine)].extend(engine.handle_deadline(self.now))
                self.timers += 1

    def open(self, channels: int) -> list[EngineChannel]:
        opened = [self.engines[0].open("work", b"a task") for _ in range(channels)]
        self.settle()
        return opened

    def held(self) -> list[EngineChannel]:
        """The listener's channels, each with a message in the application's hand."""
        opened = [event.channel for event in self.events[1] if isinstance(event, Opened)]
        return [channel for channel in opened if isinstance(channel, EngineChannel)]


@pytest.mark.clause("e3x-A05", "e3x-R02")
def test_a_message_in_hand_costs_a_packet_each_way_in_half_a_minute() -> None:
    pair = Pair()
    pair.open(1)
    pair.run(60)
    pair.packets.clear()
    pair.timers = 0
    pair.run(60 + TEN_MINUTES)
    assert pair.packets[0] <= TEN_MINUTES / REST_MOST + 1
    assert pair.packets[1] <= TEN_MINUTES / REST_MOST + 1
    assert pair.timers <= 8 * TEN_MINUTES / REST_MOST


def test_a_thousand_messages_in_hand_cost_about_a_packet_per_second_each_way() -> None:
    pair = Pair()
    pair.open(1000)
    pair.run(10)
    pair.packets.clear()
    pair.timers = 0
    pair.run(10 + TEN_MINUTES)
    assert pair.packets[0] <= TEN_MINUTES + 10
    assert pair.packets[1] <= TEN_MINUTES + 10
    assert pair.timers <= 8 * TEN_MINUTES
    assert not [event for event in pair.events[0] if isinstance(event, Broken)]


@pytest.mark.clause("e3x-A05")
def test_the_ack_of_a_message_that_was_long_in_hand_goes_at_once_and_twice() -> None:
    pair = Pair()
    pair.open(1)
    pair.run(100)
    pair.packets.clear()
    pair.held()[0].receiver.done()
    pair.settle()
    assert [event for event in pair.events[0] if isinstance(event, Delivered)]
    pair.run(110)
    assert pair.packets == {1: 2}


def test_an_ack_that_was_lost_twice_is_asked_for_within_the_longest_rest() -> None:
    pair = Pair()
    pair.open(1)
    pair.run(100)
    pair.held()[0].receiver.done()
    pair.lost = {1}
    pair.run(101)
    pair.lost = set()
    pair.run(101 + REST_MOST)
    assert [event for event in pair.events[0] if isinstance(event, Delivered)]


def test_a_new_message_ends_the_rest_of_its_channel() -> None:
    """It may be lost as the last of them, so it is sent again after a second."""
    pair = Pair()
    (channel,) = pair.open(1)
    pair.run(100)
    channel.sender.send(b"more")
    pair.lost = {0}
    pair.settle()
    pair.lost = set()
    pair.held()[0].receiver.done()
    pair.run(101.5)
    assert [event.items for event in pair.events[1] if isinstance(event, Received)] == [[b"more"]]


@pytest.mark.clause("e3x-R02")
def test_a_peer_that_is_gone_is_noticed_ten_seconds_after_the_next_question() -> None:
    pair = Pair()
    pair.open(1)
    pair.run(100)
    pair.lost = {0, 1}
    pair.run(100 + REST_MOST + 11)
    assert [event for event in pair.events[0] if isinstance(event, Broken)]
