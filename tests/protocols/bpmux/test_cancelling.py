"""Channels that the peer cancels: how many it may cancel, and what does not count."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._limits import Limits
from muxkit.core.events import Failed, Stopped
from muxkit.protocols.bpmux import Engine, Kind
from muxkit.testing._pair import drain
from tests.protocols.bpmux._helpers import by_hand, channel_of, fed, the, written


def churn(engine: Engine, chunks: str, count: int, *, now: float = 0.0) -> int:
    """Open and cancel so many channels and read the answers; return how many were allowed."""
    for done in range(count):
        engine.receive_bytes(bytes.fromhex(chunks), now)
        drain(engine)
        if engine.over:
            return done
    return count


CHURN = {
    "request": "10 09 00 02 09 00",
    "stream": "90 09 00 82 09 00",
    "duplex": "d0 09 00 82 09 00 42 09 00",
    "request at once": "12 09 00 00",
    "stream at once": "92 09 00 00",
    "duplex at once": "d2 09 00 00 42 09 00",
}


@pytest.mark.requirement("R-01", "R-10")
@pytest.mark.parametrize("chunks", CHURN.values(), ids=CHURN)
def test_cancelling_slows_a_peer_down_and_never_ends_the_connection(chunks: str) -> None:
    """Was: "more than 50 channels cancelled at once and 10 a second", and the end of every call on the connection."""
    engine = by_hand(limits=Limits(resets_burst=50, resets_per_second=10))
    assert churn(engine, chunks, 49) == 49
    assert engine.starts.pause(0.0) == 0
    assert churn(engine, chunks, 10_000) == 10_000
    assert engine.starts.pause(0.0) == pytest.approx(0.1)
    assert engine.starts.pause(0.1) == 0
    engine.starts.started(0.1)
    assert engine.starts.pause(0.1) == pytest.approx(0.1)
    assert engine.starts.pause(10.0) == 0


@pytest.mark.requirement("R-10")
def test_a_cancellation_in_parts_counts_once() -> None:
    engine = by_hand(limits=Limits(resets_burst=2, resets_per_second=1))
    for id in (1, 3):
        fed(engine, f"90 {id:02x} 00")
        the(engine, Kind.SINK_IN, id).give_credit(3)
        assert fed(engine, f"e0 03 82 {id:02x} 01 61", f"82 {id:02x} 02 62 63")[-1][0] == "Stopped"
    fed(engine, "90 05 00")
    assert engine.starts.pause(0.0) > 0


@pytest.mark.requirement("R-10")
def test_orderly_ends_are_not_limited() -> None:
    engine = by_hand(limits=Limits(resets_burst=1, resets_per_second=1))
    assert churn(engine, "52 09 00 00", 500) == 500
    for _ in range(100):
        fed(engine, "90 09 00", "10 09 00")
        the(engine, Kind.SINK_IN, 9).end()
        the(engine, Kind.REQUEST_IN, 9).send(b"")
        written(engine)
        fed(engine, "81 09", "01 09")
    assert not engine.over


@pytest.mark.requirement("R-10")
def test_ends_that_cross_are_not_limited() -> None:
    engine = by_hand(limits=Limits(resets_burst=1, resets_per_second=1))
    for _ in range(100):
        fed(engine, "90 09 00")
        the(engine, Kind.SINK_IN, 9).end()
        written(engine)
        assert [event[0] for event in fed(engine, "82 09 00")] == ["Stopped"]


@pytest.mark.requirement("R-10", "R-42")
def test_a_goodbye_may_cancel_everything_that_was_open() -> None:
    engine = by_hand(limits=Limits(resets_burst=1, resets_per_second=1))
    fed(engine, *(f"90 {id:02x} 00" for id in range(1, 100)))
    fed(engine, "62 00 00", *(f"82 {id:02x} 00" for id in range(1, 100)))
    assert not engine.over


@pytest.mark.requirement("R-10")
def test_a_goodbye_is_no_licence_to_open_and_cancel() -> None:
    engine = by_hand(limits=Limits(resets_burst=5, resets_per_second=1))
    fed(engine, "62 00 00")
    assert churn(engine, "90 09 00 82 09 00", 5) == 5
    assert engine.starts.pause(0.0) > 0


@pytest.mark.requirement("R-01", "R-11")
def test_channels_that_have_to_be_refused_are_limited() -> None:
    engine = by_hand(limits=Limits(resets_burst=5, resets_per_second=1))
    refused = 0
    for id in range(1, 20):
        fed(engine, f"50 {id:02x} 00")
        engine.refuse(channel_of(the(engine, Kind.STREAM_IN, id)))
        if engine.over:
            break
        refused += 1
    (event,) = engine.events()
    assert isinstance(event, Failed)
    assert event.error.limit == "backlog"
    assert refused == 5


@pytest.mark.requirement("R-10")
def test_ten_thousand_opens_and_cancels_leave_no_memory() -> None:
    engine = by_hand(limits=Limits(resets_burst=10**9))
    chunk = bytes.fromhex("90 09 00 82 09 00")
    engine.receive_bytes(chunk * 100, 0.0)
    drain(engine)
    tracemalloc.start()
    try:
        for _ in range(100):
            assert sum(isinstance(event, Stopped) for event in engine.receive_bytes(chunk * 100, 0.0)) == 100
            drain(engine)
        assert tracemalloc.get_traced_memory()[0] < 16 * 1024
    finally:
        tracemalloc.stop()
