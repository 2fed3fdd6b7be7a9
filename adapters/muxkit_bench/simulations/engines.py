"""Simulations of the engines: each makes a world from a seed, runs it on virtual time, and checks it.

A simulation is a function of the seed. It returns a line about what happened, the same for the same seed, and raises
if anything went wrong. It takes milliseconds, never sleeps, and touches nothing outside.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final
from zlib import crc32

from muxkit import Limits
from muxkit.core.events import Cancelled, Failed, Finished, Halves, Opened, Received, Writable
from muxkit.protocols import bpmux, e3x, relink
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.testing import EnginePair, Network, PathWeather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit.core.halves import Receiver, Sender

    Simulation = Callable[[int], str]

SIZES: Final = (0, 1, 20, 300, 1500, 9000)
MOST_ROUNDS: Final = 100_000
EPOCH, LINK = 1, 1


class NotAsPromised(AssertionError):
    """Something was lost, repeated, changed, or did not end."""


def demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotAsPromised(otherwise)


def contents(seed: str, most: int) -> list[bytes]:
    """Make the messages of a sender; both ends can make them."""
    dice = random.Random(seed)
    return [dice.randbytes(dice.choice(SIZES)) for _ in range(dice.randint(1, most))]


# ---------------------------------------------------------------------------- bpmux


class _Mux:
    """Both sides open duplexes; on each both sides send, end, and read sooner or later."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.seed = seed
        window = dice.choice((100, 2_000, 60_000))
        limits = Limits(channel_bytes=window, channel_first=window, channel_floor=min(window, 100))
        config = bpmux.Config(keepalive=None)
        self.pair: EnginePair[bpmux.Engine, bpmux.Event] = EnginePair(
            bpmux.Engine(config, limits=limits), bpmux.Engine(config, limits=limits), weather=dice, listener=self.hear
        )
        self.to_send: dict[object, list[bytes]] = {}  # by the half to send on
        self.expected: dict[object, list[bytes]] = {}  # by the half to receive from
        self.later: list[tuple[Receiver[bytes], int]] = []
        self.messages = 0

    def run(self) -> str:
        self.pair.run_until_quiet()  # an opening is paid from the first grant
        for side in (0, 1):
            for _ in range(self.dice.randint(1, 5)):
                self.open(side)
        for _ in range(MOST_ROUNDS):
            self.pair.run_until_quiet()
            if not self.later:
                break
            self.dice.shuffle(self.later)
            self.take(self.dice.randint(1, len(self.later)))
        for side, engine in enumerate(self.pair.engines):
            demand(engine.channels == 0, f"side {side}: {engine.channels} channels did not come to their end")
        left = sum(map(len, (*self.to_send.values(), *self.expected.values())))
        demand(left == 0, f"{left} messages were not sent, or not received")
        sent = self.pair.sent
        return f"{self.messages} messages, {len(sent[0])} + {len(sent[1])} bytes, {crc32(sent[1], crc32(sent[0])):08x}"

    def open(self, side: int) -> None:
        sink, source = self.pair.engines[side].open_duplex(b"talk")
        self.expected[source] = self.told(1 - side, side, source.id)
        self.begin(sink, self.told(side, side, sink.id))

    def told(self, teller: int, opener: int, id: int) -> list[bytes]:
        return contents(f"{self.seed}/{teller}/{opener}/{id}", 12)

    def begin(self, sink: Sender, messages: list[bytes]) -> None:
        self.to_send[sink] = messages
        self.go_on(sink)

    def go_on(self, sink: Sender) -> None:
        messages = self.to_send[sink]
        while messages and sink.has_room(len(messages[0])):
            sink.send(messages.pop(0))
        if messages:
            sink.notify_when_room(len(messages[0]))
        else:
            sink.finish()

    def hear(self, side: int, event: bpmux.Event) -> None:
        match event:
            case Opened(Halves(bpmux.Sender() as sink, bpmux.Receiver() as source), payload):
                demand(payload == b"talk", "an opening was changed")
                self.pair.engines[side].consumed_opening(len(payload))
                self.expected[source] = self.told(1 - side, 1 - side, source.id)
                self.begin(sink, self.told(side, 1 - side, sink.id))
            case Received(source, payloads):
                waiting = self.expected[source]
                for payload in payloads:
                    demand(
                        bool(waiting) and waiting.pop(0) == payload, f"{source.label}: not the message that was sent"
                    )
                    self.messages += 1
                    self.later.append((source, len(payload)))
                    if self.dice.random() < 0.7:
                        self.take(1)
            case Finished(source) if source in self.expected:
                demand(not self.expected[source], f"{source.label}: its end overtook a message")
            case Cancelled(source) if source in self.expected:
                raise NotAsPromised(f"{source.label}: its sender gave up")
            case Writable(bpmux.Sender() as sink) if not sink.ending:
                self.go_on(sink)
            case Failed(error):
                raise NotAsPromised(f"a correct peer was accused: {error}")
            case _:
                pass

    def take(self, count: int) -> None:
        for _ in range(count):
            receiver, size = self.later.pop()
            receiver.consumed((), size)


def mux(seed: int) -> str:
    """bpmux engines with output in random pieces, windows that are often too small, and slow readers."""
    return _Mux(seed).run()


# ---------------------------------------------------------------------------- Relink


class _Link:
    """A connector and a listener whose connection is cut at random bytes, again and again."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        config = relink.Config(keepalive=None, window=dice.choice((1, 4, 100)))
        self.engines = [relink.Engine(config, is_connector=is_connector) for is_connector in (True, False)]
        self.pipes = [bytearray(), bytearray()]  # on the way to each side
        self.now = 0.0
        self.cuts = self.messages = 0
        self.digest = 0
        self.cutting = dice.choice((0.0, 0.02, 0.1))
        channels = range(1, dice.randint(2, 5))
        self.to_send = {
            (side, channel): contents(f"{seed}/{side}/{channel}", 15) for side in (0, 1) for channel in channels
        }
        self.expected = {key: [*messages] for key, messages in self.to_send.items()}
        self.closed = 0

    def run(self) -> str:
        self.connect()
        for _ in range(400):
            self.step()
        self.cutting = 0.0
        for _ in range(MOST_ROUNDS):
            if self.closed == len(self.to_send):
                break
            self.step()
        demand(self.closed == len(self.to_send), f"{self.closed} of {len(self.to_send)} channels came to their end")
        left = sum(map(len, self.expected.values()))
        demand(left == 0, f"{left} messages were lost")
        return f"{self.messages} messages over {self.cuts + 1} connections, {self.digest:08x}"

    def connect(self) -> None:
        for engine in self.engines:
            engine.connection_made(self.now, epoch=EPOCH, link_id=LINK)
        for side in (0, 1):
            self.hear(side)

    def step(self) -> None:
        dice = self.dice
        if dice.random() < self.cutting:
            for pipe, engine in zip(self.pipes, self.engines, strict=True):
                pipe.clear()
                engine.connection_lost(self.now)
            self.cuts += 1
            self.connect()
        for side, engine in enumerate(self.engines):
            if dice.random() < 0.7:
                self.send(side)
            if dice.random() < 0.7 and engine.has_output():
                self.pipes[1 - side] += b"".join(engine.buffers_to_send(dice.choice((1, 100, 100_000))))
            if dice.random() < 0.7:
                size = dice.choice((1, 30, 100_000))
                data = bytes(self.pipes[side][:size])
                del self.pipes[side][:size]
                if data:
                    self.digest = crc32(data, self.digest)
                    self.hear(side, engine.receive_bytes(data, self.now))
        self.now += dice.choice((0.0, 0.01, 0.2))
        for side, engine in enumerate(self.engines):
            self.hear(side, engine.handle_deadline(self.now))

    def send(self, side: int) -> None:
        engine = self.engines[side]
        for (sender, channel), messages in self.to_send.items():
            if sender != side or not messages:
                continue
            half = engine.sender(channel)
            if half.admits(len(messages[0])):
                half.send_parts((messages.pop(0),))
                if not messages:
                    half.close()

    def hear(self, side: int, events: Sequence[relink.events.Event] = ()) -> None:
        """Act on what one engine has reported, and on what that causes."""
        while events := [*events, *self.engines[side].events()]:
            for event in events:
                match event:
                    case relink.events.Arrived():
                        self.take(side, event)
                    case relink.events.ChannelClosed():
                        self.closed += 1
                    case Failed(error):
                        raise NotAsPromised(f"a correct peer was accused: {error}")
                    case _:
                        pass
            events = ()

    def take(self, side: int, arrived: relink.events.Arrived) -> None:
        channel, messages = arrived.receiver.channel, arrived.messages
        waiting = self.expected[1 - side, channel]
        for parts in messages:
            what = f"channel {channel}: not the message that was sent next"
            demand(bool(waiting) and (waiting.pop(0),) == parts, what)
            self.messages += 1
        arrived.receiver.consume(arrived.first + len(messages) - 1, self.now)


def link(seed: int) -> str:
    """Relink engines over a connection that is cut at random bytes: each message once, in order."""
    return _Link(seed).run()


# ---------------------------------------------------------------------------- e3x


class _Packets:
    """Two engines on paths that lose, double and reorder packets; both open channels and send on all of them."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.seed = seed
        weather = PathWeather(
            delay=0.02, jitter=0.01, loss=dice.choice((0.0, 0.02, 0.1)), duplication=0.05, reordering=0.1
        )
        self.network = Network(seed, keep=False)
        self.engines = [e3x.Engine(odd, e3x.Config(window=64, timeout=60.0)) for odd in (True, False)]
        one, other = self.engines
        self.paths = self.network.join(
            one,
            other,
            there=weather,
            on_one=lambda event: self.hear(0, event),
            on_other=lambda event: self.hear(1, event),
        )
        self.to_send: dict[tuple[int, int], list[bytes]] = {}
        self.expected: dict[tuple[int, int], list[bytes]] = {}
        self.open_ends = 0
        self.messages = 0

    def run(self) -> str:
        for side in (0, 1):
            for _ in range(self.dice.randint(1, 3)):
                channel = self.engines[side].open("talk")
                self.open_ends += 2
                self.begin(side, channel)
        is_over = self.network.run_until(lambda: self.open_ends == 0, most=300.0)
        demand(is_over, f"{self.open_ends} ends of channels are open after {self.network.now} s")
        left = sum(map(len, self.expected.values()))
        demand(left == 0, f"{left} messages were lost")
        there, back = self.paths
        return f"{self.messages} messages in {self.network.now:.6f} s, {there.bytes_sent} + {back.bytes_sent} bytes"

    def begin(self, side: int, channel: e3x.EngineChannel) -> None:
        for teller, book in ((side, self.to_send), (1 - side, self.expected)):
            book[side, channel.id] = contents(f"{self.seed}/{teller}/{channel.id}", 12)
        self.go_on(side, channel)

    def go_on(self, side: int, channel: e3x.EngineChannel) -> None:
        sender, messages = channel.sender, self.to_send[side, channel.id]
        while messages and sender.has_room(len(messages[0])):
            sender.send(messages.pop(0))
        if messages:
            sender.notify_when_room(len(messages[0]))
        else:
            sender.finish()

    def hear(self, side: int, event: e3x.Event) -> None:
        match event:
            case e3x.Opened(e3x.EngineChannel() as channel):
                self.begin(side, channel)
                channel.receiver.done()
            case e3x.Received(ReliableReceiver() as receiver, [body]):
                channel = receiver.channel
                waiting = self.expected[side, channel.id]
                demand(bool(waiting) and waiting.pop(0) == body, f"channel {channel.id}: not the message that was sent")
                self.messages += 1
                receiver.done()
            case e3x.Writable(ReliableSender() as sender):
                self.go_on(side, sender.channel)
            case e3x.Closed():
                self.open_ends -= 1
            case e3x.Broken(e3x.EngineChannel() as channel, cause, text):
                raise NotAsPromised(f"channel {channel.id} broke: {cause.value}: {text}")
            case _:
                pass


def packets(seed: int) -> str:
    """e3x engines on a network that loses, doubles, delays and reorders."""
    return _Packets(seed).run()
