"""Decoding of Relink packets. The decoder also computes the numbers of messages, which the packets don't contain."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, TypedDict, assert_never

import attrs

from muxkit import Limits
from muxkit._observer import Direction
from muxkit.core import Cursor
from muxkit.pipeline.capture.decoding.decoder import LARGEST, OTHER, Decoder
from muxkit.pipeline.capture.files import Found, row
from muxkit.protocols import relink
from muxkit.protocols.relink.frames import Ack, AckPacket, General, MessagePacket, OperationPacket

HALF_WAY: Final = 2**31


@attrs.define
class Numbers:
    """The message numbers of one direction. In each channel they start at 0."""

    following: dict[int, int] = attrs.field(factory=dict)
    """The number of the next message, by channel."""
    again: set[int] = attrs.field(factory=set)
    """Channels without a message on this transport yet. Their next message follows the last one that was received."""
    told: dict[int, int] = attrs.field(factory=dict)
    """The last number that the receiver reported on this transport, by channel."""
    acknowledged: dict[str, int] = attrs.field(factory=dict)
    """The last acknowledged number, by channel and kind of acknowledgement."""

    def next(self, channel: int) -> int:
        """Return the number of the next message of a channel."""
        if channel in self.again:
            self.again.discard(channel)
            self.following[channel] = self.told.get(channel, -1) + 1
        number = self.following.get(channel, 0)
        self.following[channel] = number + 1
        return number

    def restart(self) -> None:
        """Start a new transport."""
        self.again, self.told = {*self.following}, {}

    def forget(self, channel: int) -> None:
        """Forget a closed channel. A new channel with this id counts from 0."""
        self.following.pop(channel, None)
        self.told.pop(channel, None)
        self.again.discard(channel)
        for kind in (Ack.RECEIVED, Ack.CONSUMED, Ack.COMMITTED):
            self.acknowledged.pop(f"{channel} {kind}", None)

    def acknowledged_number(self, channel: int, ack: Ack, sequence: int | None) -> int:
        """Return the number that an acknowledgement names. Without a sequence number, it is the next one."""
        key = f"{channel} {Ack.COMMITTED if ack is Ack.UNCOMMITTED else ack}"
        last = self.acknowledged.get(key, -1)
        number = last + 1 if sequence is None else self.unwrapped(channel, sequence)
        self.acknowledged[key] = max(number, last)
        self.told[channel] = max(number, self.told.get(channel, -1))
        return number

    def unwrapped(self, channel: int, sequence: int) -> int:
        """Return the number with these lower 32 bits that is nearest to the last one sent."""
        near = max(0, self.following.get(channel, 0) - 1)
        number = near - (near % 2**32) + sequence
        if number - near > HALF_WAY and number >= 2**32:
            number -= 2**32
        elif near - number > HALF_WAY:
            number += 2**32
        return number


class RelinkEnd(TypedDict, total=False):
    """Information that the bytes of a Relink link don't contain: which end recorded them, and options of its endpoint.

    The defaults are those of `RelinkDecoder`.
    """

    side: Literal["connector", "listener"]
    connector_id_size: int
    listener_id_size: int


@attrs.define
class RelinkDecoder(Decoder):
    """Decodes both directions of one link, over all its transports."""

    side: str = "connector"
    connector_id_size: int = 2
    listener_id_size: int = 2
    numbers: dict[str, Numbers] = attrs.field(factory=lambda: {"in": Numbers(), "out": Numbers()})

    def restart(self) -> None:
        super().restart()
        for numbers in self.numbers.values():
            numbers.restart()

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        bounds = _bounds(self.side, direction, self.connector_id_size, self.listener_id_size)
        packet = relink.frames.parse_packet(cursor, bounds)
        ours = self.numbers[direction]
        # A channel is named by the direction of its messages: the messages of `out 5` go out, and its acknowledgements
        # come in.
        about = direction if not isinstance(packet, AckPacket) else OTHER[direction]

        def say(channel: str, name: str, size: int = 0, number: int | None = None) -> None:
            found.append(row("frame", direction, channel, name, size, id=number))

        match packet:
            case General():
                say("link", packet.name.lower())
            case MessagePacket():
                size = sum(map(len, packet.parts))
                for channel in packet.channels:
                    say(f"{about} {channel}", "message", size, ours.next(channel))
            case OperationPacket():
                for channel in packet.channels:
                    number = None if packet.sequence is None else ours.unwrapped(channel, packet.sequence)
                    say(f"{about} {channel}", packet.operation.name.lower(), 0, number)
            case AckPacket():
                theirs = self.numbers[OTHER[direction]]
                for channel in packet.channels:
                    told = None
                    if packet.ack is Ack.CLOSED:
                        theirs.forget(channel)
                    else:
                        told = theirs.acknowledged_number(channel, packet.ack, packet.sequence)
                    say(f"{about} {channel}", packet.ack.name.lower(), 0, told)
            case _:
                assert_never(packet)


@lru_cache
def _bounds(side: str, direction: Direction, connector_id_size: int, listener_id_size: int) -> relink.frames.Bounds:
    """Return the limits for packets in this direction, given the side that recorded them."""
    config = relink.Config(connector_id_size=connector_id_size, listener_id_size=listener_id_size)
    comes_to_connector = (side == "connector") == (direction == "in")
    bounds = relink.frames.bounds_of(config, is_connector=comes_to_connector, message=Limits().message)
    return attrs.evolve(bounds, targets=2**32, parts=2**32, message=LARGEST)
