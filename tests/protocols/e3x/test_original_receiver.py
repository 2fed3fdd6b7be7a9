"""A channel to a plain model of the JavaScript original's receiver, whose first packet was lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from muxkit.protocols.e3x import (
    Broken,
    Config,
    Engine,
    EngineChannel,
    Event,
    Packet,
    Writable,
    encode_packet,
    parse_packet,
)
from muxkit.testing import Network, PathWeather

if TYPE_CHECKING:
    from collections.abc import Sequence

BUFFER = 50  # packets that the original keeps while one is missing
MESSAGES = 300


class OriginalReceiver:
    """The receiving side of the original, as far as a sender notices it.

    Packets of a channel that was not opened are dropped, and so are packets above the buffer, which are answered at
    once. Each packet that is taken is processed and acked at once, with `miss` while something is missing.
    """

    def __init__(self) -> None:
        self.processed = 0
        self.dropped = 0
        self._waiting: set[int] = set()
        self._out: list[bytes] = []

    def receive_datagram(self, data: bytes, now: float) -> None:
        packet = parse_packet(data)
        seq = packet.seq
        if seq is None:
            return
        if not self.processed and seq != 1:
            self.dropped += 1
            return
        if seq > self.processed + BUFFER:
            self.dropped += 1
        elif seq > self.processed:
            self._waiting.add(seq)
            while self.processed + 1 in self._waiting:
                self.processed += 1
                self._waiting.remove(self.processed)
        self._answer(is_dropping=seq > self.processed + BUFFER)

    def _answer(self, *, is_dropping: bool) -> None:
        miss = None
        if self._waiting or is_dropping:
            missing = set(range(self.processed + 1, max(self._waiting, default=0))) - self._waiting
            edges = [self.processed, *sorted(missing), self.processed + BUFFER]
            miss = [later - earlier for earlier, later in itertools.pairwise(edges)]
        self._out.append(encode_packet(Packet(1, ack=self.processed, miss=miss)))

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        out, self._out = self._out, []
        return out

    def events(self) -> Sequence[Event]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def handle_deadline(self, now: float) -> None:
        return None


class Talk:
    """300 messages on one channel, whose opening is lost."""

    def __init__(self, config: Config) -> None:
        self.engine = Engine(True, config)
        self.receiver = OriginalReceiver()
        self.broken: list[str] = []
        self._left = MESSAGES - 1  # the opening is the first
        self.network = Network(0)
        there, _ = self.network.join(
            self.engine,
            self.receiver,
            there=PathWeather(delay=0.02, loss=1.0),
            back=PathWeather(delay=0.02),
            on_one=self._heard,
        )
        self._channel = self.engine.open("chat", b"0")
        self.network.run(0.0)
        there.weather = PathWeather(delay=0.02)
        self._fill(self._channel)

    def _fill(self, channel: EngineChannel) -> None:
        while self._left and channel.sender.has_room(100):
            channel.sender.send(bytes(100))
            self._left -= 1
        if self._left:
            channel.sender.notify_when_room(100)

    def _heard(self, event: Event) -> None:
        if isinstance(event, Writable):
            self._fill(self._channel)
        elif isinstance(event, Broken):
            self.broken.append(event.text)

    def took(self) -> float:
        """Return the virtual seconds until the receiver has processed everything."""
        assert self.network.run_until(lambda: self.receiver.processed == MESSAGES or bool(self.broken), most=600.0)
        assert not self.broken
        return self.network.now


@pytest.mark.clause("e3x-M06", "e3x-R02")
@pytest.mark.parametrize("first_window", [50, 100])
def test_a_lost_opening_costs_seconds_and_not_one_for_each_packet(first_window: int) -> None:
    """Half of the first 100 packets are dropped: each of these windows waits for one probe."""
    assert Talk(Config(frag=False, first_window=first_window)).took() < 5.0


@pytest.mark.clause("e3x-M06")
def test_after_the_opening_hardly_anything_is_sent_that_the_receiver_has_to_drop() -> None:
    talk = Talk(Config(frag=False))
    talk.took()
    assert talk.receiver.dropped == BUFFER - 1, "what followed the lost opening before its probe"
