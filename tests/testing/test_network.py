"""The simulated network does to packets what it says, and the same again for the same seed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from muxkit.testing import AimdReceiver, AimdSender, Bottleneck, Fate, Network, PathWeather

if TYPE_CHECKING:
    from collections.abc import Sequence


class Clockwork:
    """Sends a numbered packet each `pause`, keeps what comes, and tells each arrival."""

    def __init__(self, count: int = 0, *, pause: float = 0.001, size: int = 100) -> None:
        self.got: list[tuple[float, bytes]] = []
        self._left = count
        self._count = count
        self._pause = pause
        self._size = size
        self._next = 0.0
        self._events: list[bytes] = []

    def receive_datagram(self, data: bytes, now: float) -> None:
        self.got.append((now, data))
        self._events.append(data)

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        if not self._left or now < self._next:
            return []
        self._next += self._pause
        self._left -= 1
        return [(b"%d " % (self._count - self._left - 1)).ljust(self._size, b".")]

    def events(self) -> Sequence[bytes]:
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        return self._next if self._left else None

    def handle_deadline(self, now: float) -> None:
        pass

    @property
    def numbers(self) -> list[int]:
        return [int(data.split()[0]) for _, data in self.got]


def crossed(
    weather: PathWeather, *, seed: int = 1, count: int = 2000, via: Bottleneck | None = None, pause: float = 0.001
) -> tuple[Clockwork, Network]:
    network = Network(seed)
    other = Clockwork()
    network.join(Clockwork(count, pause=pause), other, there=weather, via=via)
    network.run(60.0)
    return other, network


def test_in_fair_weather_everything_arrives_in_order_after_the_delay() -> None:
    other, network = crossed(PathWeather(delay=0.05), count=10)
    assert other.numbers == list(range(10))
    assert [when for when, _ in other.got] == pytest.approx([0.05 + number * 0.001 for number in range(10)])
    assert network.now == 60.0


def test_the_same_seed_gives_the_same_run() -> None:
    weather = PathWeather(jitter=0.01, loss=0.1, burst=0.01, duplication=0.1, reordering=0.1, corruption=0.1)
    assert crossed(weather, seed=3)[0].got == crossed(weather, seed=3)[0].got
    assert crossed(weather, seed=3)[0].got != crossed(weather, seed=4)[0].got


@pytest.mark.parametrize("chance", [0.01, 0.2])
def test_as_many_packets_are_lost_as_the_chance_says(chance: float) -> None:
    other, network = crossed(PathWeather(loss=chance), count=10_000)
    assert 10_000 - len(other.got) == pytest.approx(10_000 * chance, rel=0.25)
    assert network.paths[0].fates[Fate.LOST] == 10_000 - len(other.got)
    assert other.numbers == sorted(other.numbers)


def test_bursts_take_packets_that_follow_each_other() -> None:
    other, network = crossed(PathWeather(burst=0.005, burst_length=0.01), count=10_000)
    lost = sorted(set(range(10_000)) - set(other.numbers))
    runs = Counter(number - place for place, number in enumerate(lost))
    assert 3 < len(lost) / len(runs) < 20
    assert network.paths[0].fates[Fate.BURST] == len(lost)


def test_a_doubled_packet_arrives_twice() -> None:
    other, network = crossed(PathWeather(duplication=0.1))
    assert len(other.got) - 2000 == pytest.approx(200, rel=0.3)
    assert network.paths[0].doubled == len(other.got) - 2000


def test_a_late_packet_is_overtaken() -> None:
    other, network = crossed(PathWeather(reordering=0.1, late=0.02))
    assert sorted(other.numbers) == list(range(2000))
    overtaken = sum(later < earlier for earlier, later in zip(other.numbers, other.numbers[1:], strict=False))
    assert overtaken > 100
    assert network.paths[0].late == pytest.approx(200, rel=0.3)


def test_a_corrupt_packet_has_one_wrong_byte() -> None:
    other, network = crossed(PathWeather(corruption=0.1), count=500)
    wrong = [
        sum(one != good for one, good in zip(data, (b"%d " % number).ljust(100, b"."), strict=True))
        for number, (_, data) in enumerate(other.got)
    ]
    assert set(wrong) == {0, 1}
    assert sum(wrong) == network.paths[0].corrupt == pytest.approx(50, rel=0.5)


@pytest.mark.requirement("R-45")
def test_what_is_larger_than_the_path_takes_vanishes_without_a_word() -> None:
    other, network = crossed(PathWeather(mtu=99), count=10)
    assert other.got == []
    assert network.paths[0].fates == {Fate.LARGE: 10}
    assert len(crossed(PathWeather(mtu=100), count=10)[0].got) == 10


def test_a_bottleneck_sends_at_its_own_pace_and_refuses_what_its_queue_cannot_hold() -> None:
    line = Bottleneck(10_000, queue=500)  # a packet of 100 bytes each hundredth of a second
    other, network = crossed(PathWeather(), count=20, via=line, pause=0.0001)
    times = [when for when, _ in other.got]
    assert other.numbers == [0, 1, 2, 3, 4]
    assert times == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert line.refused == network.paths[0].fates[Fate.QUEUE] == 15
    assert max(waiting for _, waiting in line.samples) == 500
    assert line.carried == 500


def test_paths_may_share_a_bottleneck() -> None:
    network = Network()
    line = Bottleneck(10_000, queue=100_000)
    ends = [Clockwork(), Clockwork()]
    for end in ends:
        network.join(Clockwork(50, pause=0.001), end, via=line)
    network.run(0.505)
    assert [len(end.got) for end in ends] == [25, 25]


def test_every_packet_has_a_journey_that_says_what_happened() -> None:
    _, network = crossed(PathWeather(delay=0.01, loss=0.3, duplication=0.3), count=100)
    assert [journey.size for journey in network.journeys] == [100] * 100
    for journey in network.journeys:
        assert (journey.fate is Fate.ARRIVED) == bool(journey.arrived_at)
        assert len(journey.arrived_at) == (0 if journey.fate is Fate.LOST else 1 + journey.is_doubled)
        assert all(arrived == pytest.approx(journey.sent_at + 0.01) for arrived in journey.arrived_at)


def test_the_report_names_the_paths_and_what_happened() -> None:
    _, network = crossed(PathWeather(loss=1.0), count=3)
    assert network.report() == "0/there: 300 bytes sent; 3 lost\n0/back: 0 bytes sent; nothing"


def test_the_report_says_what_was_doubled_late_or_corrupt() -> None:
    _, network = crossed(PathWeather(duplication=1.0, reordering=1.0, corruption=1.0), count=3)
    assert network.report().startswith("0/there: 300 bytes sent; 3 arrived, 3 doubled, 3 late, 3 corrupt\n")


def test_an_ack_that_comes_twice_counts_once() -> None:
    sender = AimdSender()
    sender.datagrams_to_send(0.0)
    for _ in range(2):
        sender.receive_datagram(bytes(8), 0.1)
    assert sender.window == 11


def test_a_packet_is_under_way_until_it_arrives() -> None:
    network = Network()
    network.join(Clockwork(1), Clockwork(), there=PathWeather(delay=5.0))
    network.run(1.0)
    assert [journey.fate for journey in network.journeys] == [Fate.UNDER_WAY]


def test_weather_may_change_and_commands_be_given_on_the_way() -> None:
    network = Network()
    other = Clockwork()
    path, _ = network.join(Clockwork(100, pause=0.1), other)
    network.call_at(5.0, lambda: setattr(path, "weather", PathWeather(loss=1.0)))
    network.run(20.0)
    assert 48 <= len(other.got) <= 52


def test_a_listener_hears_each_event_when_it_happens() -> None:
    network = Network()
    heard: list[tuple[float, bytes]] = []
    network.join(
        Clockwork(2, pause=1.0),
        Clockwork(),
        there=PathWeather(delay=0.5),
        on_other=lambda data: heard.append((network.now, data[:1])),
    )
    network.run(10.0)
    assert heard == [(0.5, b"0"), (1.5, b"1")]


def test_a_run_ends_when_its_condition_holds_or_its_time_is_over() -> None:
    network = Network()
    other = Clockwork()
    network.join(Clockwork(100, pause=1.0), other)
    assert network.run_until(lambda: len(other.got) == 10, most=60.0)
    assert network.now == pytest.approx(9.0)
    assert not network.run_until(lambda: len(other.got) == 1000, most=60.0)


def test_an_engine_that_runs_in_circles_is_found_out() -> None:
    class Stuck(Clockwork):
        def next_deadline(self) -> float | None:
            return 0.0

    network = Network()
    network.join(Stuck(), Clockwork())
    with pytest.raises(AssertionError, match="the clock does not move"):
        network.run(1.0)


def test_without_keeping_only_counts_are_left() -> None:
    network = Network(keep=False)
    network.join(Clockwork(10), Clockwork())
    network.run(1.0)
    assert network.journeys == []
    assert network.paths[0].fates == {Fate.ARRIVED: 10}


# --- the flow like TCP's


def tcp(loss: float, *, seconds: float = 20.0, queue: int = 64_000) -> tuple[AimdReceiver, AimdSender]:
    network = Network(keep=False)
    sender, receiver = AimdSender(), AimdReceiver()
    network.join(
        sender,
        receiver,
        there=PathWeather(delay=0.025, loss=loss),
        back=PathWeather(delay=0.025),
        via=Bottleneck(1_250_000, queue=queue),
    )
    network.run(seconds)
    return receiver, sender


def test_a_flow_like_tcps_fills_a_line_that_loses_nothing() -> None:
    receiver, sender = tcp(0.0)
    assert receiver.arrived > 0.9 * 20 * 1_250_000
    assert sender.timeouts == 0
    assert sender.halvings > 3


def test_and_leaves_most_of_it_when_packets_are_lost() -> None:
    """What halving at each loss comes to: with 5 % of it, less than a fifth of the line."""
    receiver, sender = tcp(0.05)
    assert receiver.arrived < 0.2 * 20 * 1_250_000
    assert sender.halvings > 50


def test_two_such_flows_share_a_line() -> None:
    network = Network(keep=False)
    line = Bottleneck(1_250_000, queue=64_000)
    receivers = [AimdReceiver(), AimdReceiver()]
    for number, receiver in enumerate(receivers):
        network.join(AimdSender(starts_at=number), receiver, there=PathWeather(delay=0.025), via=line)
    network.run(30.0)
    one, other = (receiver.arrived for receiver in receivers)
    assert 0.5 < one / other < 2.0
    assert receivers[1].arrivals[0][0] > 1.0


def test_a_flow_that_hears_nothing_begins_anew() -> None:
    network = Network(keep=False)
    sender, receiver = AimdSender(), AimdReceiver()
    line = Bottleneck(1_250_000, queue=64_000)
    path, _ = network.join(sender, receiver, there=PathWeather(delay=0.01), via=line)
    network.run(1.0)
    path.weather = PathWeather(loss=1.0)
    network.run(5.0)
    assert sender.timeouts >= 3
    assert sender.window == 1.0
    path.weather = PathWeather(delay=0.01)
    before = receiver.arrived
    network.run(10.0)
    assert receiver.arrived > before
