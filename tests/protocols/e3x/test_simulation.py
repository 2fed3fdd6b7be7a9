"""Lossy networks, many seeds: everything arrives exactly once and in order, and all channels end."""

from __future__ import annotations

import attrs
import pytest

from muxkit._limits import Limits
from muxkit.protocols.e3x import Engine, EngineChannel, Event, Opened, Received
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.testing import Network, PathWeather
from tests.protocols.e3x._pairs import Conversation

BENT = PathWeather(delay=0.02, jitter=0.01, duplication=0.1, reordering=0.1, late=0.05)


@pytest.mark.clause("e3x-R02", "e3x-S08", "e3x-A02", "e3x-A11")
@pytest.mark.requirement("R-48", "R-50")
@pytest.mark.parametrize("bent", [False, True], ids=["straight", "bent"])
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05, 0.2], ids=lambda loss: f"{loss:.0%}")
@pytest.mark.seeds(8, soak=2000)
def test_everything_arrives_once_and_in_order_and_ends(seed: int, loss: float, bent: bool) -> None:
    weather = attrs.evolve(BENT if bent else PathWeather(delay=0.02), loss=loss)
    talk = Conversation(seed, weather, messages=12)
    assert talk.network.run_until(talk.is_over, most=300.0), talk.network.report()
    talk.check()


@pytest.mark.requirement("R-48", "R-50")
@pytest.mark.seeds(10, soak=2000)
def test_bursts_of_loss_change_nothing(seed: int) -> None:
    talk = Conversation(seed, attrs.evolve(BENT, burst=0.05, burst_length=0.5), messages=12)
    assert talk.network.run_until(talk.is_over, most=300.0), talk.network.report()
    talk.check()


@pytest.mark.requirement("R-50")
@pytest.mark.seeds(10, soak=2000)
def test_after_an_outage_all_work_finishes_within_a_minute(seed: int) -> None:
    """The network carries nothing for eight of the ten seconds after which a channel breaks."""
    talk = Conversation(seed, attrs.evolve(BENT, loss=0.02), timeout=10.0)
    out = attrs.evolve(BENT, loss=1.0)
    for path in talk.paths:
        talk.network.call_at(0.3, lambda path=path: setattr(path, "weather", out))  # type: ignore[misc]  # a default binds it
        talk.network.call_at(8.3, lambda path=path: setattr(path, "weather", BENT))  # type: ignore[misc]  # likewise
    talk.network.run(8.3)
    assert not talk.is_over()
    assert talk.network.run_until(talk.is_over, most=8.3 + 60.0), talk.network.report()
    talk.check()


@pytest.mark.requirement("R-50")
@pytest.mark.seeds(5, soak=500)
def test_when_the_network_stays_away_every_channel_that_waits_is_given_up(seed: int) -> None:
    talk = Conversation(seed, PathWeather(delay=0.02), timeout=10.0)
    talk.network.run(0.2)
    for path in talk.paths:
        path.weather = PathWeather(loss=1.0)
    talk.network.run(60.0)
    for side in talk.sides:
        assert side.broken
        for channel in side.engine.state.table:  # a channel that waits for nothing lives on
            assert isinstance(channel.sender, ReliableSender)
            assert channel.sender.acked == channel.sender.next_seq - 1


@pytest.mark.requirement("R-21", "R-49")
@pytest.mark.seeds(5, soak=500)
def test_corrupt_packets_never_make_an_engine_raise_or_keep_more(seed: int) -> None:
    """Only the network's checksums protect packets here: a damaged one may be anything, also an err."""
    network = Network(seed)
    engines = [Engine(odd, limits=Limits(channels=20)) for odd in (True, False)]

    def take(engine: Engine, event: Event) -> None:
        if isinstance(event, Opened) and isinstance(event.channel, EngineChannel):
            event.channel.receiver.done()
        elif isinstance(event, Received) and isinstance(event.receiver, ReliableReceiver):
            event.receiver.done()

    network.join(
        *engines,
        there=attrs.evolve(BENT, corruption=0.3),
        on_one=lambda event: take(engines[0], event),
        on_other=lambda event: take(engines[1], event),
    )
    channels = [engine.open("talk") for engine in engines for _ in range(5)]
    for number in range(100):
        for channel in channels:
            if not channel.gone and channel.sender.has_room(2000):
                channel.sender.send(bytes([number]) * (2000 if number % 10 == 0 else 20))
        network.run(network.now + 0.1)
    for engine in engines:
        assert engine.stats().faults["malformed"] > 50
        assert engine.channels <= 40
        assert engine.stats().held < 2_000_000
