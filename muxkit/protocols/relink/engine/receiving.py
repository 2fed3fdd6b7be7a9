"""Split received bytes into packets, check each, and apply it to the state of the link."""

from __future__ import annotations

import struct
import sys
from collections import Counter
from functools import partial
from itertools import compress, repeat
from typing import TYPE_CHECKING, Final, assert_never

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, Pieces
from muxkit.protocols.relink.engine.events import Ended, Opened, PeerShutDown, Ponged, Resumed
from muxkit.protocols.relink.engine.items import advance, resolve
from muxkit.protocols.relink.engine.state import Purpose
from muxkit.protocols.relink.frames import (
    CHANNEL,
    LARGE,
    OVERHEAD,
    SMALL_MOST,
    Ack,
    AckPacket,
    Bounds,
    Format,
    General,
    MessageHead,
    Operation,
    OperationPacket,
    Parts,
    message_cost,
    parse_head,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.relink.engine.state import Incoming, Link, Outgoing


# The head of a message of one small part to one channel: the header as a number, the id, the size.
HEADS: Final = {0: "<HH", 1: "<HBxH", 2: "<HHH", 4: "<HIH", 8: "<HQH"}
ONE_PART: Final = CHANNEL | Format.MESSAGE << 2 | 1 << 8
LARGE_PART: Final = ONE_PART | LARGE
PARTS_A_FRAME: Final = 16  # so many parts of a message take as long as one packet
MOST_WEIGHT: Final = (8 + OVERHEAD) // 8  # of a message for each byte of its packet; the smallest has 8


class Body:
    """The payloads of a message whose head was parsed, collected as they come."""

    __slots__ = ("_filled", "_left", "_parts", "_pieces", "_skip", "head", "weight")

    def __init__(self, head: MessageHead, weight: int) -> None:
        self.head = head
        self.weight = weight
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


class Reader:
    """Incremental packet parser. It buffers only the received bytes of an unfinished packet."""

    def __init__(self, link: Link, bounds: Bounds) -> None:
        self._link = link
        self._bounds = bounds
        self._receiving = Receiving(link)
        code = HEADS.get(bounds.id_size) if bounds.message >= SMALL_MOST else None
        self._head = struct.Struct(code) if code else None
        self._payload_at = 0 if self._head is None else (self._head.size + 7) // 8 * 8
        self.frames_at_once = sys.maxsize
        self._left = 0  # packets that this call may still parse
        self.offset = 0  # bytes taken in on this connection
        self.restart()

    def restart(self) -> None:
        """Start with an empty buffer, on a new connection."""
        self._held = Pieces()
        self._wanted = 0  # size of the held bytes with which parsing may get on
        self._body: Body | None = None
        self._data = b""  # what came and waits for the next call, from `_at` on
        self._at = 0
        self._undelivered: tuple[tuple[int, ...], Body] | None = None  # a multicast, and the channels without it
        self.offset = 0

    @property
    def is_mid_packet(self) -> bool:
        return self._held.size > 0 or self._body is not None or self._undelivered is not None

    @property
    def unparsed(self) -> int:
        """Received bytes that were left unparsed because the call had parsed `frames_at_once` packets.

        A multicast that not all of its channels have yet counts as one more.
        """
        return len(self._data) - self._at + (self._undelivered is not None)

    def feed(self, data: bytes) -> RemoteProtocolError | None:
        """Parse more bytes; returns the protocol violation, if any, after which no more may be fed."""
        if self._link.observer is not None and data:
            self._link.observer.transport("in", data)
        start = 0
        if self._data:
            if data:
                data = self._data[self._at :] + data
            else:  # a position is kept, or each step of a turn would copy what is left
                data, start = self._data, self._at
            self._data, self._at = b"", 0
        self._left = self.frames_at_once
        base = self.offset - start
        try:
            if self._undelivered is not None:
                channels, body = self._undelivered
                self._undelivered = None
                self._left -= 1
                self._deliver(channels, body)
            if self._left <= 0:
                if start < len(data):
                    self._data, self._at = data, start
                return None
            position = self._go_on(data, start)
            while self._held.size:
                missing = self._wanted - self._held.size
                self._held.append(data[position : position + missing])
                position += missing
                if self._held.size < self._wanted:
                    self.offset = base + len(data)
                    return None
                held = self._held.join()
                self._parse(held, 0, base + position - len(held))
                position = self._go_on(data, position)
            position = self._parse(data, position, base)
        except RemoteProtocolError as error:
            return error
        self.offset = base + position
        if position < len(data):
            self._data, self._at = data, position
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
        self._receiving.deliver(now, body.parts, body.weight)
        if len(now) < len(channels):
            self._undelivered = channels[len(now) :], body

    def _parse(self, data: bytes, position: int, base: int) -> int:
        """Parse packets from `position` on; buffers an incomplete one. `base` is the stream offset of `data`.

        Returns the position reached: the end, unless the limit of packets a call came first.
        """
        size = len(data)
        bounds, receiving = self._bounds, self._receiving
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
                packet = parse_head(cursor, bounds)
                if isinstance(packet, MessageHead):
                    weight = receiving.check(packet)
                    self._body = Body(packet, weight)
                    self._left -= len(packet.sizes) // PARTS_A_FRAME
                    position = self._go_on(data, cursor.position)
                    continue
                receiving.apply(packet)
            except NeedMore as need:
                self._held.append(data[position:])
                self._wanted = size - position + need.missing
                return size
            except RemoteProtocolError as error:
                error.offset = base + position
                raise
            self._left -= 1 if isinstance(packet, General) else max(1, len(packet.channels))
            position = cursor.position
        return position

    def _begin_large(self, data: bytes, position: int) -> bool:
        """Begin a message of one large part on a known channel; False if the general parser has to decide."""
        link, head = self._link, self._head
        at = position + self._payload_at  # where its size stands
        if head is None or len(data) < at + 8 or link.held_over + self._bounds.message > link.held_most:
            return False
        header, channel, _ = (
            head.unpack_from(data, position) if self._bounds.id_size else _without_id(head, data, position)
        )
        size = int.from_bytes(data[at : at + 8], "little")
        incoming = link.incoming.get(channel)
        if header != LARGE_PART or size <= SMALL_MOST or size > link.limits.message:
            return False
        if incoming is None or not incoming.direct or not incoming.room:
            return False
        weight = self._payload_at + 8 + (size + 7 & -8) + OVERHEAD
        self._body = Body(MessageHead((channel,), False, (size,), -size & 7), weight)
        return True

    def _parse_messages(self, data: bytes, position: int, head: struct.Struct) -> int:
        """Fast path for messages of one small part on a known channel with room.

        Stops before the first packet of any other kind, for the general parser.
        """
        link = self._link
        size = len(data)
        if link.observer is not None or link.held_over + (size - position) * MOST_WEIGHT > link.held_most:
            return position
        channels = link.incoming
        unpack = head.unpack_from if self._bounds.id_size else partial(_without_id, head)
        payload_at, last = self._payload_at, size - head.size
        while position <= last and self._left > 0:
            header, channel, length = unpack(data, position)
            if header != ONE_PART:
                break
            incoming = channels.get(channel)
            if incoming is None or not incoming.direct:
                break
            put, weigh, room = incoming.put, incoming.weigh, min(incoming.room, self._left)
            start, count, same = position, 0, channel
            while count < room and same == channel and header == ONE_PART:
                begin = position + payload_at
                end = begin + (length + 7 & -8)
                if end > size:
                    break
                put((data[begin : begin + length],))
                weigh(end - position + OVERHEAD)
                count += 1
                position = end
                if position > last:
                    break
                header, same, length = unpack(data, position)
            if not count:
                break
            self._left -= count
            incoming.came(count, position - start + count * OVERHEAD)
        return position


def _without_id(head: struct.Struct, data: bytes, position: int) -> tuple[int, int, int]:
    header, length = head.unpack_from(data, position)
    return header, 0, length


class Receiving:
    """Checks a packet against the state of the link, then applies it: all of it or, with an error, nothing."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def apply(self, packet: General | OperationPacket | AckPacket) -> None:
        """Apply a packet without payload; raises and changes nothing if it breaks a rule."""
        if isinstance(packet, General):
            self._apply_general(packet)
        elif isinstance(packet, OperationPacket):
            if packet.operation is Operation.CLOSE:
                self._close(packet.channels)
            else:
                self._decide(packet)
            self._observe("in", packet.channels, packet.operation.name.lower())
        else:
            if packet.ack is Ack.CLOSED:
                self._closed(packet.channels)
            else:
                self._acknowledge(packet)
            self._observe("out", packet.channels, packet.ack.name.lower())

    # --- general packets

    def _apply_general(self, packet: General) -> None:
        link = self._link
        match packet:
            case General.NOP:
                pass
            case General.PING:
                if link.control.pongs >= link.limits.pongs:
                    what = f"{link.control.pongs} pings not answered yet because the peer does not read"
                    raise RemoteProtocolError(what, limit="pongs")
                link.control.pongs += 1
            case General.PONG:
                if link.control.pong_came() is Purpose.ASKED:
                    link.events.append(Ponged())
            case General.RESUME:
                link.check_resume()
                link.resume()
                link.events.append(Resumed())
            case General.SHUTDOWN:
                if not link.peer_shut_down:
                    link.peer_shut_down = True
                    link.events.append(PeerShutDown())
            case _:
                assert_never(packet)
        if link.observer is not None and packet is not General.NOP:
            link.observer.frame("in", "link", packet.name.lower(), 0)

    # --- messages

    def check(self, head: MessageHead) -> int:
        """Check the head of a message; returns its cost in each of its channels."""
        link = self._link
        weight = message_cost(head.sizes, link.in_id_size, head.padding)
        counts = _counts(head.channels)
        new = 0
        over = link.held_over
        for channel, count in counts.items():
            incoming = link.incoming.get(channel)
            what = f"a message on channel {channel}"
            if incoming is None:
                self._check_opening(channel, new)
                new += 1
                room, held = link.config.window, 0
            else:
                if not incoming.known:
                    raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
                if incoming.ended:
                    raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
                room, held = incoming.room, incoming.bytes
            if count > room:
                raise RemoteProtocolError(
                    f"{what}: {count} beside {link.config.window - room} that are not consumed, "
                    f"Config(window={link.config.window}) are allowed",
                    rule="relink-F03",
                )
            over += max(0, min(held + count * weight - link.floor, count * weight))
            if over > link.held_most:
                raise RemoteProtocolError(
                    f"{what}: {count * weight} bytes beside {link.held} that are not consumed, "
                    f"{link.limits.connection_bytes} are allowed",
                    limit="connection_bytes",
                )
        return weight

    def _check_opening(self, channel: int, new: int) -> None:
        link = self._link
        what = f"a message that opens channel {channel}"
        if link.peer_shut_down:
            raise RemoteProtocolError(f"{what} after the shutdown", rule="relink-S04")
        if not link.told_resume:
            raise RemoteProtocolError(f"{what} before our resume", rule="relink-H35")
        live = len(link.incoming) + new
        if live >= link.limits.channels:
            raise RemoteProtocolError(f"{what} beside {live} live ones", limit=link.limits.bound_of_channels)

    def deliver(self, channels: Sequence[int], parts: Parts, weight: int) -> None:
        """Store a complete message that `check` admitted."""
        link = self._link
        for channel in channels:
            incoming = link.incoming.get(channel)
            if incoming is None:
                incoming = link.accept(channel)
                link.events.append(Opened(channel))
            incoming.put(parts)
            incoming.weigh(weight)
            incoming.came(1, weight)
        if link.observer is not None:
            size = sum(map(len, parts))
            for channel in channels:
                link.observer.frame("in", f"in {channel}", "message", size)

    # --- operations

    def _decide(self, packet: OperationPacket) -> None:
        link = self._link
        if link.outcomes > link.outcomes_most:
            raise RemoteProtocolError(f"{link.outcomes} answers, and no sign that the peer has read them")
        plans: list[tuple[Incoming, int | None]] = []
        for channel, count in _counts(packet.channels).items():
            incoming = self._known(channel, packet.operation)
            plans.append((incoming, incoming.meant(packet.operation, packet.sequence, count)))
        for incoming, number in plans:
            if number is not None:
                incoming.decide(packet.operation, number)

    def _close(self, channels: Sequence[int]) -> None:
        link, plans, unopened = self._link, [], dict[int, None]()
        for channel, count in _counts(channels).items():
            if channel not in link.incoming:
                unopened[channel] = None  # a close is tied to no message: there may never have been one
                continue
            incoming = self._known(channel, Operation.CLOSE)
            incoming.check_close()
            if count > 1:
                raise RemoteProtocolError(f"close on channel {channel} {count} times", rule="relink-K04")
            plans.append(incoming)
        owed = len(unopened.keys() | link.control.unopened) if unopened else 0
        if owed > link.limits.channels:
            what = f"close on {owed} channels without a message, and the peer does not read that they are closed"
            raise RemoteProtocolError(what, limit="channels")
        link.control.close_unopened(unopened)
        for incoming in plans:
            incoming.close_came = True
            if not incoming.ended:  # it may have come before, on an earlier connection
                incoming.ended = True
                incoming.direct = False
                link.events.append(Ended(incoming.channel))
            incoming.confirm_end()

    def _known(self, channel: int, operation: Operation) -> Incoming:
        what = f"{operation.name.lower()} on channel {channel}"
        incoming = self._link.incoming.get(channel)
        if incoming is None:
            raise RemoteProtocolError(f"{what}, which is not open", rule="relink-O12")
        if not incoming.known:
            raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
        return incoming

    # --- acknowledgements

    def _acknowledge(self, packet: AckPacket) -> None:
        link = self._link
        plans = []
        for channel, count in _counts(packet.channels).items():
            outgoing = link.outgoing.get(channel)
            if outgoing is None:
                what = f"{packet.ack.name.lower()} on channel {channel}, which is not open"
                raise RemoteProtocolError(what, rule="relink-O12")
            plans.append((outgoing, meant(outgoing, packet.ack, packet.sequence, count)))
        for outgoing, number in plans:
            outgoing.heard = True
            if number is not None:
                outgoing.take(packet.ack, number)

    def _closed(self, channels: Sequence[int]) -> None:
        link = self._link
        plans = []
        for channel, count in _counts(channels).items():
            outgoing = link.outgoing.get(channel)
            if outgoing is None:
                continue  # it never had a message, or its end was heard of before: nothing follows
            if count > 1:
                what = f"closed on channel {channel} {count} times, which was closed once"
                raise RemoteProtocolError(what, rule="relink-K02")
            if is_end(outgoing):
                plans.append(outgoing)
        for outgoing in plans:
            outgoing.closed()

    def _observe(self, side: str, channels: Sequence[int], name: str) -> None:
        observer = self._link.observer
        if observer is not None:
            for channel in channels:
                observer.frame("in", f"{side} {channel}", name, 0)


def _counts(channels: Sequence[int]) -> dict[int, int]:
    """Count how often each channel is named."""
    return {channels[0]: 1} if len(channels) == 1 else Counter(channels)


def meant(outgoing: Outgoing, ack: Ack, sequence: int | None, count: int) -> int | None:
    """Return the number that an ack stands for; None if it repeats known facts, as in a resume."""
    link = outgoing.link
    what = f"{ack.name.lower()} on channel {outgoing.channel}"
    if ack is Ack.RECEIVED or ack is Ack.CONSUMED:
        done = outgoing.received_told if ack is Ack.RECEIVED else outgoing.consumed_told
        if sequence is None:
            return advance(what, count, done=done, last=outgoing.sent)
        number = resolve(what, sequence, done=done, last=outgoing.sent)
        if ack is Ack.RECEIVED and number is not None and not outgoing.free and number < outgoing.received:
            known = f"{outgoing.received} was acknowledged before"
            raise RemoteProtocolError(f"{what}: {number}, though {known}", rule="relink-R03")
        return number
    if not link.out_transactions:
        raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
    if sequence is None:
        number = advance(what, count, done=outgoing.answered, last=outgoing.told)
    else:
        behind = link.config.window if link.is_resuming else 0
        found = resolve(what, sequence, done=outgoing.answered, last=outgoing.told, behind=behind)
        if found is None:
            return None
        number = found
        if number == outgoing.answered:
            if link.is_resuming or ack is outgoing.last_answer:
                return None
            raise RemoteProtocolError(f"{what}: {sequence} was answered otherwise before", rule="relink-Q11")
    run = next(run for run in outgoing.journal if run.through >= number)
    if run.operation is not Operation.COMMIT:
        rule = "relink-T04" if sequence is None else "relink-T03"
        raise RemoteProtocolError(f"{what}: message {number} was rolled back", rule=rule)
    return number


def is_end(outgoing: Outgoing) -> bool:
    """Return True if `closed` ends the channel, False if it repeats, in a resume, an earlier end."""
    what = f"closed on channel {outgoing.channel}"
    if not outgoing.close_told:
        if outgoing.link.is_resuming and not outgoing.heard:
            return False
        raise RemoteProtocolError(f"{what}, which was not closed", rule="relink-K02")
    unanswered = any(run.operation is Operation.COMMIT for run in outgoing.journal)
    if outgoing.unsent or unanswered:
        open_ends = f"{len(outgoing.unsent)} messages not received, {outgoing.decided - outgoing.answered} not answered"
        raise RemoteProtocolError(f"{what}: {open_ends}", rule="relink-K02")
    return True
