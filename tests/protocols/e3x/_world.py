"""Programs on both ends of a simulated network: an endless feed, and pairs that exchange messages until the end."""

from __future__ import annotations

import random

from muxkit._limits import MIB, Limits
from muxkit.protocols.e3x import Broken, Config, Engine, EngineChannel, Event, Opened, Received, Writable
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.state import EngineReceiver
from muxkit.testing import AimdReceiver, AimdSender, Bottleneck, Network, PathWeather

LINE = 1_250_000  # bytes a second: 10 Mbit/s
WIDE = Limits(channel_bytes=8 * MIB, connection_bytes=64 * MIB)


class Feed:
    """One engine sends on one channel as fast as it may, the other processes everything at once."""

    def __init__(self, *, window: int = 2000, starts_at: float = 0.0, size: int | None = None) -> None:
        config = Config(window=window, timeout=60.0)
        self.sender = Engine(True, config, limits=WIDE)
        self.receiver = Engine(False, config, limits=WIDE)
        self.channel: EngineChannel | None = None
        self.size = size
        self.starts_at = starts_at
        self.arrived = 0  # bytes processed by the application
        self.arrivals: list[tuple[float, int]] = []
        self._network: Network | None = None

    def join(self, network: Network, *, there: PathWeather, via: Bottleneck | None, name: str) -> None:
        self._network = network
        network.join(
            self.sender,
            self.receiver,
            there=there,
            back=PathWeather(delay=there.delay, loss=there.loss),
            via=via,
            on_one=self._sent,
            on_other=self._took,
            name=name,
        )
        network.call_at(self.starts_at, self._start)

    def _start(self) -> None:
        self.channel = self.sender.open("feed")
        self._fill(self.channel)

    def _fill(self, channel: EngineChannel) -> None:
        body = bytes(self.size or channel.sender.quota)
        while channel.sender.has_room(len(body)):
            channel.sender.send(body)
        channel.sender.notify_when_room(len(body))

    def _sent(self, event: Event) -> None:
        if isinstance(event, Writable):
            assert self.channel is not None
            self._fill(self.channel)
        assert not isinstance(event, Broken), event.text

    def _took(self, event: Event) -> None:
        if isinstance(event, Opened):
            assert isinstance(event.channel, EngineChannel)
            self._processed(event.channel.receiver, event.opening)
        elif isinstance(event, Received):
            assert isinstance(event.receiver, ReliableReceiver)
            self._processed(event.receiver, event.items[0])

    def _processed(self, receiver: EngineReceiver, body: bytes) -> None:
        self.arrived += len(body)
        assert self._network is not None
        self.arrivals.append((self._network.now, self.arrived))
        receiver.done()


def goodput(
    *, loss: float, round_trip: float, seconds: float, seed: int = 0, rate: float = LINE, window: int = 2000
) -> tuple[float, Feed]:
    """Return the bytes a second that an application receives over a line, of 10 Mbit/s by default, and its feed."""
    network = Network(seed, keep=False)
    line = Bottleneck(rate, queue=max(64_000, int(rate * round_trip)))
    feed = Feed(window=window)
    feed.join(network, there=PathWeather(delay=round_trip / 2, loss=loss), via=line, name="feed")
    network.run(seconds)
    return feed.arrived / seconds, feed


class Shared:
    """Two feeds and one flow like TCP's on one line."""

    def __init__(self, *, round_trip: float = 0.05, queue: int = 64_000, seed: int = 0, tcp: bool = True) -> None:
        self.network = Network(seed, keep=False)
        self.line = Bottleneck(LINE, queue=queue)
        starts = random.Random(seed)
        self.feeds = [Feed(starts_at=starts.uniform(0, 2)) for _ in range(2)]
        weather = PathWeather(delay=round_trip / 2)
        for number, feed in enumerate(self.feeds):
            feed.join(self.network, there=weather, via=self.line, name=f"e3x {number}")
        self.tcp = AimdReceiver()
        self.tcp_sender = AimdSender(starts_at=starts.uniform(0, 2))
        if tcp:
            self.network.join(self.tcp_sender, self.tcp, there=weather, via=self.line, name="tcp")

    @property
    def shares(self) -> list[int]:
        """Return the bytes of each flow."""
        return [feed.arrived for feed in self.feeds] + [self.tcp.arrived]


def jain(shares: list[int]) -> float:
    """Return Jain's index: 1 if all shares are equal, 1 / n if one flow has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
