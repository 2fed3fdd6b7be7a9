"""Decoding of Relink packets, with the message numbers that the wire does not carry, over several transports."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from muxkit.core.events import Failed
from muxkit.pipeline import decoder
from muxkit.pipeline.capture.decoding import RelinkDecoder, restore
from muxkit.protocols import relink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Direction
    from muxkit.pipeline.capture.files import Found


def errors(found: list[Found]) -> list[Found]:
    return [row for row in found if row[0] == "error"]


class Link:
    """Two engines whose connection is cut at random bytes; what the connector reads and writes is recorded."""

    def __init__(self, seed: int, *, window: int | None = None) -> None:
        dice = self.dice = random.Random(seed)
        config = relink.Config(keepalive=None, window=window or dice.choice((1, 5, 100)))
        self.engines = [relink.Engine(config, is_connector=is_connector) for is_connector in (True, False)]
        self.pipes = [bytearray(), bytearray()]
        self.recording: list[tuple[Direction, bytes, int]] = []
        self.segment = self.now = 0
        self.sent: dict[int, int] = {}  # messages that the connector sent, by channel
        self.arrived: list[tuple[int, int]] = []
        self.consumed: list[tuple[int, int]] = []
        self.sending = True
        self.connect()

    def connect(self) -> None:
        for engine in self.engines:
            engine.connection_made(self.now, epoch=1, link_id=1)

    def live(self, steps: int, cutting: float = 0.0, *, sending: bool = True) -> None:
        self.sending = sending
        for _ in range(steps):
            if self.dice.random() < cutting:
                for pipe, engine in zip(self.pipes, self.engines, strict=True):
                    pipe.clear()
                    engine.connection_lost(self.now)
                self.segment += 1
                self.connect()
            self.now += 1
            for side, engine in enumerate(self.engines):
                self.step(side, engine)

    def step(self, side: int, engine: relink.Engine) -> None:
        dice = self.dice
        channel = dice.randint(1, 3)
        if self.sending and dice.random() < 0.5 and engine.sender(channel).admits(50):
            engine.sender(channel).send_parts((dice.randbytes(dice.randint(0, 50)),))
            if side == 0:
                self.sent[channel] = self.sent.get(channel, 0) + 1
        data = b"".join(engine.buffers_to_send(dice.choice((1, 200, 9999)))) if engine.has_output() else b""
        self.pipes[1 - side] += data
        if data and side == 0:
            self.recording.append(("out", data, self.segment))
        size = dice.choice((0, 1, 33, 9999))
        came = bytes(self.pipes[side][:size])
        del self.pipes[side][:size]
        if came:
            if side == 0:
                self.recording.append(("in", came, self.segment))
            self.act_on(side, engine.receive_bytes(came, self.now))
        self.act_on(side, engine.handle_deadline(self.now))
        while events := engine.events():
            self.act_on(side, events)

    def act_on(self, side: int, events: Sequence[relink.events.Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, relink.events.Consumed) and side == 0:
                self.consumed.append((event.sender.channel, event.through))
            elif isinstance(event, relink.events.Arrived):
                numbers = range(event.first, event.first + len(event.messages))
                event.receiver.consume(numbers[-1], self.now)
                if side == 0:
                    self.arrived += [(event.receiver.channel, number) for number in numbers]

    def decoded(self) -> list[Found]:
        one = decoder("relink")
        return [found for way, data, segment in self.recording for found in one.feed(way, data, segment=segment)]


def numbers(found: list[Found], way: str, kind: str) -> list[tuple[int, int]]:
    """Channel and number of each such row."""
    rows = [row for row in found if row[:2] == ("frame", way) and row[3] == kind]
    return [(int(str(row[2]).split()[1]), int(str(row[6]))) for row in rows]


@pytest.mark.seeds(20, soak=2000)
def test_messages_of_relink_are_numbered_as_the_engines_do_though_links_are_cut(seed: int) -> None:
    link = Link(seed)
    link.live(150, cutting=random.Random(seed).choice((0.0, 0.03, 0.1)))
    link.live(300, sending=False)
    found = link.decoded()
    assert not errors(found)
    came = numbers(found, "in", "message")
    assert sorted(set(came)) == sorted(link.arrived), "what came, by the numbers that the engine gave"
    assert len(came) == len(set(came)), "a message that came whole is not sent again"
    for channel, count in link.sent.items():
        told = [number for one, number in numbers(found, "out", "message") if one == channel]
        assert sorted(set(told)) == list(range(count))
    assert set(link.consumed) <= set(numbers(found, "in", "consumed"))
    assert dict(link.consumed) == {channel: count - 1 for channel, count in link.sent.items()}


def test_what_is_sent_again_has_the_same_number_again() -> None:
    link = Link(1, window=5)
    connector = link.engines[0]
    for _ in range(3):
        connector.sender(1).send_parts((b"x",))
    for segment in (0, 1):
        link.recording.append(("out", b"".join(connector.buffers_to_send()), segment))
        if segment == 0:
            for engine in link.engines:
                engine.connection_lost(0.0)
            link.connect()
            connector.receive_bytes(relink.frames.encode_packet(relink.frames.General.RESUME, 2), 0.0)
            link.recording.append(("in", relink.frames.encode_packet(relink.frames.General.RESUME, 2), 1))
    assert numbers(link.decoded(), "out", "message") == [(1, 0), (1, 1), (1, 2), (1, 0), (1, 1), (1, 2)]


def test_numbers_go_on_where_a_number_on_the_wire_wraps() -> None:
    one = RelinkDecoder()
    one.numbers["out"].following[1] = 2**32 + 5
    packets = [relink.frames.AckPacket(relink.frames.Ack.RECEIVED, (1,), sequence) for sequence in (2**32 - 1, 2)]
    found = [row for packet in packets for row in one.feed("in", relink.frames.encode_packet(packet, 2))]
    assert [row[6] for row in found] == [2**32 - 1, 2**32 + 2]


def test_a_channel_that_was_closed_counts_from_the_beginning_again() -> None:
    one = RelinkDecoder()
    message = relink.frames.encode_packet(relink.frames.MessagePacket((1,), (b"x",)), 2)
    closed = relink.frames.encode_packet(relink.frames.AckPacket(relink.frames.Ack.CLOSED, (1,)), 2)
    found = one.feed("out", message * 2) + one.feed("in", closed) + one.feed("out", message)
    assert numbers(found, "out", "message") == [(1, 0), (1, 1), (1, 0)]


def test_a_broken_packet_of_relink_is_told_with_its_clause() -> None:
    (found,) = decoder("relink").feed("in", bytes((7 << 5, 0, 0, 0, 0, 0, 0, 0)))
    assert (found[3], found[7], found[6]) == ("RemoteProtocolError", "relink-G06", 0)


@pytest.mark.seeds(3, soak=100)
def test_a_relink_decoder_that_is_kept_as_bytes_goes_on_as_if_nothing_was(seed: int) -> None:
    link = Link(seed)
    link.live(100, cutting=0.05)
    one, found = decoder("relink"), list[Any]()
    for way, data, segment in link.recording:
        found += one.feed(way, data, segment=segment)
        one = restore("relink", one.dump())
    assert found == link.decoded()
