"""Goodput on lossy paths, and the share of other flows on the same path."""

from __future__ import annotations

import statistics

import pytest

from muxkit.protocols.e3x import Config, Engine
from muxkit.protocols.e3x.congestion import Congestion, Extreme
from muxkit.protocols.e3x.send import ReliableSender
from tests.protocols.e3x._world import LINE, Shared, goodput, jain

# The least share of the line that an application gets, by round trip and loss; tests/bench/e3x_network.py has the
# figures of a run. A packet that is lost twice waits a second by the document, so with much loss and a long round
# trip a window of 2,000 packets limits the rate before the line does.
LEAST = {
    (0.001, 0.0): 0.70,
    (0.001, 0.01): 0.65,
    (0.001, 0.05): 0.55,
    (0.001, 0.2): 0.30,
    (0.05, 0.0): 0.75,
    (0.05, 0.01): 0.60,
    (0.05, 0.05): 0.45,
    (0.05, 0.2): 0.25,
    (0.3, 0.0): 0.45,
    (0.3, 0.01): 0.45,
    (0.3, 0.05): 0.35,
    (0.3, 0.2): 0.10,
}


@pytest.mark.requirement("R-48")
@pytest.mark.parametrize(("path", "least"), LEAST.items(), ids=[f"{rtt * 1e3:.0f} ms, {p:.0%}" for rtt, p in LEAST])
def test_a_lossy_path_is_used(path: tuple[float, float], least: float) -> None:
    round_trip, loss = path
    seconds = 4.0 if round_trip < 0.3 else 10.0
    if loss == 0.2:
        seconds += 2.0  # Recovering from the losses of the first second takes up to three seconds.
    # With much loss, some seeds lose one packet several times and wait for it for most of the run.
    seeds = range(3 if loss == 0.2 else 1)
    got = [goodput(round_trip=round_trip, loss=loss, seconds=seconds, seed=seed)[0] for seed in seeds]
    assert statistics.median(got) >= least * LINE


@pytest.mark.requirement("R-48")
@pytest.mark.seeds(1, soak=50)
def test_at_5_percent_of_loss_and_50_ms_at_least_half_of_the_loss_free_goodput_is_left(seed: int) -> None:
    fair, _ = goodput(round_trip=0.05, loss=0.0, seconds=10.0, seed=seed)
    lossy, feed = goodput(round_trip=0.05, loss=0.05, seconds=10.0, seed=seed)
    assert lossy >= fair / 2
    assert feed.receiver.stats().faults.get("duplicate", 0) < 20, "hardly anything is sent in vain"


@pytest.mark.requirement("R-48")
@pytest.mark.seeds(1, soak=20)
def test_two_flows_share_a_line_with_each_other_and_with_one_like_tcp(seed: int) -> None:
    shared = Shared(seed=seed)
    shared.network.run(30.0)
    one, other, tcp = shared.shares
    assert sum(shared.shares) >= 0.85 * 30 * LINE
    assert jain([one, other]) >= 0.8
    assert tcp >= sum(shared.shares) / 5


@pytest.mark.requirement("R-48")
@pytest.mark.parametrize("seed", [23, 38])
def test_a_beginning_that_loses_more_than_can_be_listed_is_recovered_from(seed: int) -> None:
    """The first losses occur when the rate is many times the line's, and the peer cannot list all that it misses."""
    got, feed = goodput(round_trip=0.05, loss=0.05, seconds=8.0, seed=seed)
    assert feed.sender.stats().lost > 400
    assert got >= 0.4 * LINE


def grown_window(*, round_trip: float, loss: float) -> float:
    """Return by what factor a window has grown after some seconds on a line of 4 MB/s."""
    _, feed = goodput(round_trip=round_trip, loss=loss, seconds=10.0, rate=4e6, window=Config().window)
    assert feed.channel is not None
    assert isinstance(feed.channel.sender, ReliableSender)
    return feed.channel.sender.window / Config().window


def test_the_window_grows_to_what_a_long_path_holds() -> None:
    assert grown_window(round_trip=0.5, loss=0.0) > 2


def test_the_window_covers_the_pause_until_a_packet_comes_again_that_was_lost_twice() -> None:
    assert grown_window(round_trip=0.05, loss=0.05) > 2


# --- the parts


def test_a_loss_without_a_queue_changes_nothing() -> None:
    pace = Congestion(1400)
    now = 0.0
    while pace.share < 100 * 1400:
        now += 0.001
        assert now < 5.0
        while pace.may_send(now):
            pace.sent(1400, now)
        pace.ack_received(0.05, 1 if int(now * 1000) % 20 == 0 else 0, now)
    assert pace.falls == 0


def test_a_loss_with_a_queue_near_its_longest_lowers_the_share() -> None:
    pace = Congestion(1400)
    queue, now = 0.0, 0.0
    while now < 3.0:
        now += 0.01
        queue = min(0.05, queue + 0.0005)
        pace.sent(1400, now)
        pace.ack_received(0.05 + queue, 0, now)
    assert pace.falls == 0
    before = pace.share
    pace.ack_received(0.1, 1, now)
    pace.ack_received(0.1, 0, now + 0.2)
    assert pace.falls == 1
    assert pace.share == pytest.approx(0.6 * before)


def test_heavy_loss_counts_also_where_no_queue_is_seen() -> None:
    pace = Congestion(1400)
    now = 0.0
    for number in range(2000):
        now += 0.001
        pace.sent(1400, now)
        pace.ack_received(0.02, 1 if number > 1000 and number % 2 else 0, now)
    assert pace.falls >= 1


def test_a_rate_that_is_not_used_does_not_grow() -> None:
    pace = Congestion(1400)
    for number in range(1000):
        pace.sent(100, number * 0.1)
        pace.ack_received(0.05, 0, number * 0.1)
    assert pace.share == 10 * 1400


def test_packets_are_spaced_by_the_rate() -> None:
    pace = Congestion(1400)
    pace.ack_received(0.1, 0, 0.0)
    now = 100.0
    times: list[float] = []
    while len(times) < 50:
        if pace.may_send(now):
            pace.sent(1400, now)
            times.append(now)
        else:
            now = pace.free_at
    assert len([when for when in times if when == 100.0]) <= 3
    assert times[-1] - times[10] == pytest.approx(39 * 1400 / pace.rate, rel=0.1)


def test_the_least_is_forgotten_after_a_while() -> None:
    least = Extreme()
    least.add(1.0, 0.0)
    for second in range(1, 40):
        least.add(5.0, second)
    assert least.value == 5.0
    least.add(7.0, 200.0)
    assert least.value == 7.0


def test_what_the_pace_is_made_of_can_be_seen() -> None:
    engine = Engine(True, Config())
    stats = engine.stats()
    assert stats.round_trip is None
    assert stats.least_round_trip is None
    assert (stats.rate, stats.falls, stats.queue) == (140_000.0, 0, 0.0)
