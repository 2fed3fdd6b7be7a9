"""Two engines on a lossy network that exchange messages until both are done, and the checks of the result."""

from __future__ import annotations

import random

import attrs

from muxkit.protocols.e3x import (
    Broken,
    Closed,
    Config,
    Delivered,
    Engine,
    EngineChannel,
    Event,
    Finished,
    Opened,
    Received,
)
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.testing import Network, PathWeather


def last_of(channel: EngineChannel) -> int:
    """Return the seq of the last packet that was queued."""
    assert isinstance(channel.sender, ReliableSender)
    return channel.sender.next_seq - 1


SIZES = (0, 1, 20, 200, 1300, 1400, 5000)


@attrs.define
class Talk:
    """One channel from one side's view: the messages to send, and those received."""

    to_send: list[bytes]
    got: list[bytes] = attrs.field(factory=list)
    receipts: list[int] = attrs.field(factory=list)
    delivered: int = 0
    ended: int = 0
    closed: int = 0


class Side:
    """An engine and its application, which sends little by little and processes some messages slowly."""

    def __init__(self, network: Network, odd: bool, seed: str, *, messages: int, timeout: float) -> None:
        self.engine = Engine(odd, Config(window=64, timeout=timeout))
        self.talks: dict[int, Talk] = {}
        self.broken: list[str] = []
        self._network = network
        self._random = random.Random(seed)
        self._messages = messages

    def open(self) -> None:
        self._begin(self.engine.open("talk"))

    def _begin(self, channel: EngineChannel) -> None:
        talk = Talk([self._random.randbytes(self._random.choice(SIZES)) for _ in range(self._messages)])
        self.talks[channel.id] = talk
        self._go_on(channel, list(talk.to_send), talk)

    def _go_on(self, channel: EngineChannel, pending: list[bytes], talk: Talk) -> None:
        if channel.gone:
            return
        while pending and self._random.random() < 0.7 and channel.sender.has_room(len(pending[0])):
            channel.sender.send(pending.pop(0))
            talk.receipts.append(last_of(channel))
        if pending:
            pause = self._random.random() * 0.05
            self._network.call_at(self._network.now + pause, lambda: self._go_on(channel, pending, talk))
        else:
            channel.sender.finish()
            talk.receipts.append(last_of(channel))

    def hear(self, event: Event) -> None:
        match event:
            case Opened(EngineChannel() as channel, body):
                assert body == b""
                self._begin(channel)
                self._take(channel)
            case Received(ReliableReceiver() as receiver, [body]):
                self.talks[receiver.channel.id].got.append(body)
                self._take(receiver.channel)
            case Delivered(EngineChannel() as channel, first, last):
                talk = self.talks[channel.id]
                assert first == talk.delivered + 1, "each packet is delivered once"
                talk.delivered = last
            case Finished(ReliableReceiver() as receiver):
                self.talks[receiver.channel.id].ended += 1
            case Closed(EngineChannel() as channel):
                self.talks[channel.id].closed += 1
            case Broken(EngineChannel() as channel, cause, text):
                self.broken.append(f"channel {channel.id}: {cause.value}: {text}")
            case _:
                pass

    def _take(self, channel: EngineChannel) -> None:
        if self._random.random() < 0.8:
            channel.receiver.done()
        else:  # a slow application
            self._network.call_at(self._network.now + self._random.random() * 0.2, lambda: channel.receiver.done())


class Conversation:
    """Let both sides open channels and send on all of them."""

    def __init__(
        self, seed: int, weather: PathWeather, *, channels: int = 2, messages: int = 25, timeout: float = 60.0
    ) -> None:
        # At 20 % of loss ten seconds without an answer can occur by chance, so the timeout is longer here.
        self.network = Network(seed, keep=False)
        self.sides = [
            Side(self.network, odd, f"{seed}/{odd}", messages=messages, timeout=timeout) for odd in (True, False)
        ]
        one, other = self.sides
        self.paths = self.network.join(
            one.engine, other.engine, there=weather, on_one=one.hear, on_other=other.hear, name="pair"
        )
        for side in self.sides:
            for _ in range(channels):
                side.open()
        self._channels = 2 * channels

    def is_over(self) -> bool:
        return all(
            (len(side.talks) == self._channels and side.engine.channels == 0) or side.broken for side in self.sides
        )

    def check(self) -> None:
        """Check that everything arrived once and in order, all channels ended, and nothing is kept."""
        one, other = self.sides
        assert one.broken == other.broken == []
        assert one.talks.keys() == other.talks.keys()
        for id, here in one.talks.items():
            there = other.talks[id]
            assert here.got == there.to_send
            assert there.got == here.to_send
            for talk in (here, there):
                assert (talk.ended, talk.closed) == (1, 1)
                assert talk.delivered == talk.receipts[-1]
        for side in self.sides:
            stats = side.engine.stats()
            assert (stats.held, stats.unsent, stats.channels) == (0, 0, 0)
            assert side.engine.state.reassembly.used == 0
            assert "malformed" not in stats.faults
            assert "misplaced" not in stats.faults
            assert "unsent" not in stats.faults
