"""How the engine measures the round trip for its windows: by a ping about the top level, while it receives in bulk."""

from __future__ import annotations

import pytest

from muxkit._limits import SHORT_WINDOW, Limits
from muxkit.core import encode_varu64
from muxkit.core.events import Pong, Probed
from muxkit.protocols.bpmux import Engine, Kind
from tests.protocols.bpmux._helpers import automatic, fed, sums_of, the, written

TOP_PING = "a400"
TOP_PONG = "60 00"


def receiving(limits: Limits | None = None) -> Engine:
    engine = automatic(limits=limits)
    written(engine)
    fed(engine, "50 09 00")
    return engine


def receive_bulk(engine: Engine, now: float) -> str:
    """Let the peer use all credit of a channel and the application take it; return what the engine writes then."""
    stream = the(engine, Kind.STREAM_IN, 9)
    left = stream.credit_in
    while left > 0:
        size = min(SHORT_WINDOW, left)
        engine.receive_bytes(b"\x50\x09" + encode_varu64(size) + bytes(size), now)
        stream.consumed((), size)
        left -= size
    return written(engine)


def test_an_engine_that_receives_in_bulk_pings_once_in_a_while() -> None:
    engine, pings = receiving(), []
    for turn in range(120):  # 12 seconds
        if TOP_PING in receive_bulk(engine, 0.1 * turn):
            pings.append(turn)
            assert [type(event) for event in engine.receive_bytes(bytes.fromhex(TOP_PONG), 0.1 * turn)] == [Pong]
    assert [later - pings[0] for later in pings] == [0, 50, 100]


def test_the_window_exceeds_the_short_one_as_soon_as_the_pong_has_come() -> None:
    engine = receiving()
    for turn in range(10):
        receive_bulk(engine, 0.1 * turn)
    assert the(engine, Kind.STREAM_IN, 9).credit_in == SHORT_WINDOW
    engine.receive_bytes(bytes.fromhex(TOP_PONG), 1.0)
    for turn in range(11, 30):
        receive_bulk(engine, 0.1 * turn)
    assert the(engine, Kind.STREAM_IN, 9).credit_in == Limits().channel_bytes


def test_the_session_hears_of_the_ping_so_that_it_counts_the_pongs_right() -> None:
    engine = receiving()
    for turn in range(2):
        receive_bulk(engine, 0.1 * turn)
    size = the(engine, Kind.STREAM_IN, 9).credit_in
    events = engine.receive_bytes(b"\x50\x09" + encode_varu64(size) + bytes(size), 0.2)
    assert [event.key for event in events if isinstance(event, Probed)] == [engine.top_stream]


def test_the_pong_of_an_earlier_ping_measures_nothing() -> None:
    engine = receiving()
    engine.ping(None)
    written(engine)
    for turn in range(3):
        receive_bulk(engine, 0.1 * turn)
    engine.receive_bytes(bytes.fromhex(TOP_PONG), 0.21)
    assert sums_of(engine).budget.round_trip.seconds is None
    engine.receive_bytes(bytes.fromhex(TOP_PONG), 0.7)
    assert sums_of(engine).budget.round_trip.seconds == pytest.approx(0.5)


def test_a_ping_whose_entity_is_gone_is_given_up_and_the_next_one_is_about_another() -> None:
    engine = receiving()
    for turn in range(4):
        receive_bulk(engine, 0.1 * turn)
    fed(engine, "62 00 00")  # the peer ends the top level that it sends on
    assert sums_of(engine).budget.round_trip.seconds is None
    later = "".join(receive_bulk(engine, 6.0 + 0.1 * turn) for turn in range(4))
    assert "6400" in later  # about the sink of the top level


def test_with_windows_that_stay_short_there_is_no_ping() -> None:
    engine = receiving(Limits(channel_bytes=SHORT_WINDOW))
    assert TOP_PING not in "".join(receive_bulk(engine, 0.1 * turn) for turn in range(100))
