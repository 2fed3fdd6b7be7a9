"""The numbers of messages that the peer has not answered."""

from __future__ import annotations

import random

import pytest

from muxkit.core import encode_varint
from muxkit.protocols.aqueduct.numbers import Flight
from muxkit.protocols.aqueduct.send import KEPT_MOST
from tests.protocols.aqueduct._helpers import client, entry


@pytest.mark.seeds(30, soak=3000)
def test_a_flight_knows_the_numbers_and_records_that_a_set_would(seed: int) -> None:
    dice = random.Random(seed)
    flight: Flight[str] = Flight()
    known: dict[int, str | None] = {}
    number = 0
    for _ in range(300):
        if dice.random() < 0.6:
            number += dice.choice((1, 1, 1, 3))
            record = dice.choice((None, f"record {number}"))
            flight.add(number, record)
            known[number] = record
        else:
            first = dice.randint(0, number)
            last = first + dice.randint(0, 10)
            taken = [known.pop(each) for each in range(first, last + 1) if each in known]
            assert flight.take(first, last) == [record for record in taken if record is not None]
        assert len(flight) == len(known)
        assert flight.records() == [record for record in known.values() if record is not None]
    assert flight.clear() == [record for record in known.values() if record is not None]
    assert (len(flight), flight.kept) == (0, 0)


def test_messages_without_a_record_take_no_memory_of_their_own() -> None:
    flight: Flight[str] = Flight()
    for number in range(10_000):
        flight.add(number, None)
    assert (len(flight), flight.kept) == (10_000, 1)
    flight.take(100, 9_000)
    assert (len(flight), flight.kept) == (1_099, 2)


def ack_frame(varints: list[int]) -> str:
    ranges = b"".join(map(encode_varint, varints))
    return "03 00 08" + (encode_varint(len(ranges)) + ranges).hex()


@pytest.mark.requirement("R-08")
def test_far_more_messages_may_be_unanswered_than_unsent() -> None:
    peer = client()
    sender = entry(peer)
    counts: list[int] = []
    for _ in range(5):
        before = sender.messages_sent
        while sender.admits(1):
            sender.send(b"")
        counts.append(sender.messages_sent - before)
        peer.written()
    assert counts == [KEPT_MOST] + [KEPT_MOST - 1] * 4  # those that were written are one run


@pytest.mark.requirement("R-08", "R-03")
def test_a_peer_that_acks_every_other_message_stops_the_sender_before_that_takes_much_memory() -> None:
    peer = client()
    sender = entry(peer)
    for _ in range(4):
        for _ in range(1000):
            sender.send(b"")
        peer.written()
    assert sender.admits(1)
    peer.send(ack_frame([1, 1] * KEPT_MOST))
    assert sender.reliable.kept == KEPT_MOST + 1
    assert not sender.admits(1)
    sender.notify_when_room(0)
    assert peer.send(ack_frame([0, 2 * KEPT_MOST])) == [("Writable", 0)]
    assert (len(sender.reliable), sender.reliable.kept) == (4000 - 2 * KEPT_MOST, 1)
