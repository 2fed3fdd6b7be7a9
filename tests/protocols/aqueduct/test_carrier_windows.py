"""The windows of the streams of a carrier: loans don't stand in their way, and grants measure the path."""

from __future__ import annotations

import pytest

from muxkit._limits import SHORT_WINDOW, Limits
from muxkit.protocols.aqueduct import Carrier, Engine, Mode, Role
from muxkit.protocols.aqueduct.events import Arrived, Event
from muxkit.testing._pair import EnginePair
from tests.protocols.aqueduct._helpers import budget_of, flat, incoming_of, senders_of, taken

LATENCY = 0.05  # s, one way
TRIP = 2 * LATENCY
KIB = 1024
MIB = 1024 * 1024
LIMITS = Limits(channel_bytes=4 * MIB, connection_bytes=16 * MIB)


class Line:
    """A client that sends and a server that takes all that comes at once, with a long line between them."""

    def __init__(self, *, latency: float = LATENCY, reads: bool = True) -> None:
        client, server = (Carrier(Engine(role, limits=LIMITS)) for role in (Role.CLIENT, Role.SERVER))
        self.pair: EnginePair[Carrier, Event] = EnginePair(client, server, latency=latency, listener=self._hear)
        self.reads = reads
        self.bytes = 0  # of messages that arrived
        self.server: Carrier = server
        self.pair.run_until_quiet()
        (self.sender,) = senders_of(client.engine).values()

    def _hear(self, side: int, event: Event) -> None:
        for message in flat([event]):
            if side == 1 and isinstance(message, Arrived):
                self.bytes += len(message.payload)
                if self.reads:
                    taken(message)

    def run(self, trips: float, *, size: int) -> int:
        """Send messages of this size as fast as possible for so many round trips; return the bytes that arrived."""
        before, end = self.bytes, self.pair.now + trips * TRIP
        while self.pair.now < end:
            while self.sender.admits(size):
                self.sender.transmit(bytes(size))
            self.pair.run_for(TRIP / 20)
        return self.bytes - before

    @property
    def round_trip(self) -> float | None:
        return budget_of(self.server).round_trip.seconds

    @property
    def target(self) -> int:
        """The largest window of the streams to the server."""
        return max(one.window.target for one in incoming_of(self.server).values())


@pytest.mark.parametrize("size", [8 * KIB, 64 * KIB, 200 * KIB])
def test_the_window_follows_the_path_whatever_the_size_of_messages(size: int) -> None:
    line = Line()
    line.run(25, size=size)
    assert line.target > 2 * SHORT_WINDOW
    assert line.run(5, size=size) >= 4 * 2 * SHORT_WINDOW


def test_a_frame_that_fits_the_credit_that_is_out_borrows_nothing() -> None:
    line = Line()
    line.run(10, size=64 * KIB)
    assert line.target >= SHORT_WINDOW
    assert [one.window.lent for one in incoming_of(line.server).values() if not one.over] == [0]


def test_a_frame_that_does_not_fit_borrows_just_what_is_lacking() -> None:
    line = Line(reads=False)
    line.sender.transmit(bytes(400 * KIB))
    line.pair.run_until_quiet()
    assert line.bytes == 400 * KIB
    (window,) = (one.window for one in incoming_of(line.server).values() if not one.over)
    assert (window.credit, window.lent) == (0, window.held - window.by_hand - LIMITS.channel_first)


def test_the_round_trip_is_the_time_from_a_grant_to_the_bytes_that_had_to_wait_for_it() -> None:
    line = Line()
    assert line.round_trip is None
    line.sender.transmit(bytes(300 * KIB))  # more than may be sent early
    line.pair.run_until_quiet()
    assert line.round_trip == pytest.approx(TRIP)


def test_a_sender_that_pauses_does_not_make_the_path_longer() -> None:
    line = Line()
    for _ in range(20):
        line.run(1, size=20 * KIB)
        line.pair.run_for(20 * TRIP)
    assert line.round_trip == pytest.approx(TRIP)


def test_a_stream_without_bulk_measures_nothing() -> None:
    line = Line()
    for _ in range(100):
        line.sender.transmit(bytes(100))
        line.pair.run_for(10 * TRIP)
    assert line.round_trip is None
    assert line.target <= SHORT_WINDOW


def test_each_of_many_messages_with_a_stream_of_its_own_arrives() -> None:
    line = Line()
    for _ in range(30):
        line.sender.transmit(bytes(20 * KIB), mode=Mode.UNORDERED)
        line.pair.run_for(TRIP)
    line.pair.run_until_quiet()
    assert line.bytes == 30 * 20 * KIB
    assert line.round_trip is None  # they were sent early, so none waited for a grant
