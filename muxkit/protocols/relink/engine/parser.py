"""Split received bytes into packets, and apply each to the state of the link."""

from __future__ import annotations

import struct
from functools import partial
from itertools import compress, repeat
from typing import Final, assert_never

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, Pieces
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.engine.events import PeerShutDown, Ponged, Resumed
from muxkit.protocols.relink.engine.incoming import PeerChannels
from muxkit.protocols.relink.engine.link import LinkState, Purpose
from muxkit.protocols.relink.engine.outgoing import OurChannels

# The head of a message of one small part to one channel: the header as a number, the id, the size.
HEADS: Final = {0: "<HH", 1: "<HBxH", 2: "<HHH", 4: "<HIH", 8: "<HQH"}
ONE_PART: Final = frames.CHANNEL | frames.Format.MESSAGE << 2 | 1 << 8
LARGE_PART: Final = ONE_PART | frames.LARGE
PARTS_A_FRAME: Final = 16  # so many parts of a message take as long as one packet
MOST_WEIGHT: Final = (8 + frames.OVERHEAD) // 8  # of a message for each byte of its packet; the smallest has 8


class Body:
    """The payloads of a message whose head was parsed, collected as they come."""

    __slots__ = ("_filled", "_left", "_parts", "_pieces", "_skip", "head", "weight")

    def __init__(self, head: frames.MessageHead, weight: int) -> None:
        self.head: frames.MessageHead = head
        self.weight: int = weight
        self._parts: list[bytes] = []
        # Which parts have bytes; a loop of our own over those without would take milliseconds for a large head.
        self._filled = compress(range(len(head.sizes)), head.sizes)
        self._pieces = Pieces()
        self._left = 0  # bytes of the present part that are to come
        self._skip = 0  # padding bytes behind it that are to come
        self._begin_part()

    def _begin_part(self) -> None:
        """Go to the next part that has bytes."""
        sizes, parts = self.head.sizes, self._parts
        following = next(self._filled, len(sizes))
        if following > len(parts):
            parts.extend(repeat(b"", following - len(parts)))
        self._left = sizes[following] if following < len(sizes) else 0

    @property
    def count(self) -> int:
        """Complete parts."""
        return len(self._parts)

    @property
    def is_complete(self) -> bool:
        return not self._left and not self._skip

    @property
    def parts(self) -> tuple[bytes, ...]:
        return tuple(self._parts)

    def feed(self, data: bytes, position: int, most: int) -> int:
        """Take payload bytes until `most` parts are complete; returns the position behind them."""
        size = len(data)
        while position < size and (self._left or self._skip) and len(self._parts) < most:
            if self._skip:
                step = min(self._skip, size - position)
                self._skip -= step
                position += step
                if not self._skip:
                    self._begin_part()
                continue
            step = min(self._left, size - position)
            if step == self._left and not self._pieces.size:
                part = data[position : position + step]
            else:  # copied when the rest is there
                self._pieces.append(memoryview(data)[position : position + step])
                part = b""
            position += step
            self._left -= step
            if self._left:
                break
            if self._pieces.size:
                part = self._pieces.join()
            self._parts.append(part)
            self._skip = -len(part) & 7
            if not self._skip:
                self._begin_part()
        return position


class Parser:
    """Incremental packet parser. It buffers only the received bytes of an unfinished packet.

    A packet is checked against the state of the link, then applied: all of it or, with an error, nothing.
    """

    def __init__(self, link: LinkState, ours: OurChannels, theirs: PeerChannels, bounds: frames.Bounds) -> None:
        self._link = link
        self._ours = ours
        self._theirs = theirs
        self._bounds = bounds
        code = HEADS.get(bounds.id_size) if bounds.message >= frames.SMALL_MOST else None
        self._head = struct.Struct(code) if code else None
        self._payload_at = 0 if self._head is None else (self._head.size + 7) // 8 * 8
        self._left = 0  # packets that this call may still parse
        self.restart()

    def restart(self) -> None:
        """Start with an empty buffer, on a new connection."""
        self._held = Pieces()
        self._wanted = 0  # size of the held bytes with which parsing may get on
        self._body: Body | None = None
        self._data = b""  # what came and waits for the next call, from `_at` on
        self._at = 0
        self._undelivered: tuple[tuple[int, ...], Body] | None = None  # a multicast, and the channels without it
        self.offset: int = 0
        """Bytes parsed on this connection."""
        self.unparsed: int = 0
        """Received bytes that the last call left, and 1 for a multicast that not all of its channels have."""
        self.is_mid_packet: bool = False

    def feed(self, data: bytes, most: int) -> RemoteProtocolError | None:
        """Parse up to so many packets more; returns the violation, if any, after which no more may be fed."""
        if self._link.observer is not None and data:
            self._link.observer.transport("in", data)
        start = 0
        if self._data:
            if data:
                data = self._data[self._at :] + data
            else:  # a position is kept, or each step of a turn would copy what is left
                data, start = self._data, self._at
            self._data = b""
        self._left = most
        base = self.offset - start
        position = start
        try:
            if self._undelivered is not None:
                channels, body = self._undelivered
                self._left -= 1
                self._deliver(channels, body)
            if self._left > 0:
                if self._body is not None:
                    position = self._go_on(data, position)
                while self._held.size:
                    missing = self._wanted - self._held.size
                    self._held.append(data[position : position + missing])
                    position += missing
                    if self._held.size < self._wanted:
                        position = len(data)
                        break
                    held = self._held.join()
                    self._parse(held, 0, base + position - len(held))
                    position = self._go_on(data, position)
                position = self._parse(data, position, base)
        except RemoteProtocolError as error:
            return error
        self.offset = base + position
        self.unparsed = len(data) - position
        if self.unparsed:
            self._data, self._at = data, position
        if self._undelivered is not None:
            self.unparsed += 1
        self.is_mid_packet = self._held.size > 0 or self._body is not None or self._undelivered is not None
        return None

    def _go_on(self, data: bytes, position: int) -> int:
        """Feed the unfinished message, if any; returns the position behind it."""
        body = self._body
        if body is None:
            return position
        before = body.count
        position = body.feed(data, position, before + self._left * PARTS_A_FRAME)
        self._left -= (body.count - before) // PARTS_A_FRAME
        if body.is_complete:
            self._body = None
            self._left -= 1
            self._deliver(body.head.channels, body)
        return position

    def _deliver(self, channels: tuple[int, ...], body: Body) -> None:
        """Deliver to each channel, counted as a packet each; those over the limit of this call wait for the next."""
        now = channels[: max(1, self._left + 1)]
        self._left -= max(0, len(now) - 1)
        self._theirs.deliver(now, body.parts, body.weight)
        self._undelivered = (channels[len(now) :], body) if len(now) < len(channels) else None

    def _parse(self, data: bytes, position: int, base: int) -> int:
        """Parse packets from `position` on; buffers an incomplete one. `base` is the stream offset of `data`.

        Returns the position reached: the end, unless the limit of packets a call came first.
        """
        size = len(data)
        while position < size and self._left > 0:
            if self._head is not None and data[position] == ONE_PART & 0xFF:
                position = self._parse_messages(data, position, self._head)
                if position >= size or self._left <= 0:
                    break
            elif data[position] == LARGE_PART & 0xFF and self._begin_large(data, position):
                position = self._go_on(data, position + self._payload_at + 8)
                continue
            cursor = Cursor(data, position)
            try:
                packet = frames.parse_head(cursor, self._bounds)
                if isinstance(packet, frames.MessageHead):
                    weight = self._theirs.check(packet)
                    self._body = Body(packet, weight)
                    self._left -= len(packet.sizes) // PARTS_A_FRAME
                    position = self._go_on(data, cursor.position)
                    continue
                self._apply(packet)
            except NeedMore as need:
                self._held.append(data[position:])
                self._wanted = size - position + need.missing
                return size
            except RemoteProtocolError as error:
                error.offset = base + position
                raise
            self._left -= 1 if isinstance(packet, frames.General) else max(1, len(packet.channels))
            position = cursor.position
        return position

    def _begin_large(self, data: bytes, position: int) -> bool:
        """Begin a message of one large part on a known channel; False if the general parser has to decide."""
        link, head = self._link, self._head
        at = position + self._payload_at  # where its size stands
        if head is None or len(data) < at + 8 or self._theirs.held_over + self._bounds.message > link.held_most:
            return False
        header, channel, _ = (
            head.unpack_from(data, position) if self._bounds.id_size else _without_id(head, data, position)
        )
        size = int.from_bytes(data[at : at + 8], "little")
        incoming = self._theirs.live.get(channel)
        if header != LARGE_PART or size <= frames.SMALL_MOST or size > link.limits.message:
            return False
        if incoming is None or not incoming.direct or not incoming.room:
            return False
        weight = self._payload_at + 8 + (size + 7 & -8) + frames.OVERHEAD
        self._body = Body(frames.MessageHead((channel,), False, (size,), -size & 7), weight)
        return True

    def _parse_messages(self, data: bytes, position: int, head: struct.Struct) -> int:
        """Fast path for messages of one small part on a known channel with room.

        Stops before the first packet of any other kind, for the general parser.
        """
        link, theirs = self._link, self._theirs
        size = len(data)
        if link.observer is not None or theirs.held_over + (size - position) * MOST_WEIGHT > link.held_most:
            return position
        channels = theirs.live
        unpack = head.unpack_from if self._bounds.id_size else partial(_without_id, head)
        payload_at, last = self._payload_at, size - head.size
        while position <= last and self._left > 0:
            header, channel, length = unpack(data, position)
            if header != ONE_PART:
                break
            incoming = channels.get(channel)
            if incoming is None or not incoming.direct:
                break
            messages: list[frames.Parts] = []
            start, count, same, room = position, 0, channel, min(incoming.room, self._left)
            while count < room and same == channel and header == ONE_PART:
                begin = position + payload_at
                end = begin + (length + 7 & -8)
                if end > size:
                    break
                messages.append((data[begin : begin + length],))
                count += 1
                position = end
                if position > last:
                    break
                header, same, length = unpack(data, position)
            if not count:
                break
            self._left -= count
            incoming.came(messages, position - start + count * frames.OVERHEAD)
        return position

    def _apply(self, packet: frames.General | frames.OperationPacket | frames.AckPacket) -> None:
        """Apply a packet without payload; raises and changes nothing if it breaks a rule."""
        if isinstance(packet, frames.General):
            self._apply_general(packet)
            return
        if isinstance(packet, frames.OperationPacket):
            self._theirs.operate(packet)
            side, name = "in", packet.operation.name
        else:
            self._ours.acknowledge(packet)
            side, name = "out", packet.ack.name
        if self._link.observer is not None:
            for channel in packet.channels:
                self._link.observer.frame("in", f"{side} {channel}", name.lower(), 0)

    def _apply_general(self, packet: frames.General) -> None:
        link = self._link
        match packet:
            case frames.General.NOP:
                return
            case frames.General.PING:
                if link.probes.pongs >= link.limits.pongs:
                    what = f"{link.probes.pongs} pings not answered yet because the peer does not read"
                    raise RemoteProtocolError(what, limit="pongs")
                link.probes.pongs += 1
            case frames.General.PONG:
                if link.probes.pong_came() is Purpose.ASKED:
                    link.happened.append(Ponged())
            case frames.General.RESUME:
                if not link.is_resuming:
                    raise RemoteProtocolError("a resume on a connection that has none to come", rule="relink-R04")
                self._ours.resume()
                link.happened.append(Resumed())
            case frames.General.SHUTDOWN:
                if not link.has_peer_shut_down:
                    link.has_peer_shut_down = True
                    link.happened.append(PeerShutDown())
            case _:
                assert_never(packet)
        if link.observer is not None:
            link.observer.frame("in", "link", packet.name.lower(), 0)


def _without_id(head: struct.Struct, data: bytes, position: int) -> tuple[int, int, int]:
    header, length = head.unpack_from(data, position)
    return header, 0, length
