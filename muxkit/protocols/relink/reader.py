"""Split received bytes into packets, and apply each packet to the state of the link.

A packet is checked as a whole before any of it is applied, so a packet that breaks a rule changes nothing. `Reader`
parses most packets with the functions in `frames`; we call that the general path. There are two fast paths in addition.
`_parse_messages` handles runs of messages with one small part on a channel that has room for them. `_begin_large`
handles the head of a message with one large part. If anything is unusual, both leave the packet to the general path,
which also raises all errors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import compress, repeat
from typing import Final, assert_never

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, Pieces, Reason
from muxkit.core.events import GoingAway, Pong
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.events import Resumed
from muxkit.protocols.relink.numbers import counts_of
from muxkit.protocols.relink.probes import Purpose
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender
from muxkit.protocols.relink.state import State

# For each size of channel ids, the `struct` format of the head of a message with one small part on one channel. Its
# fields are the header as a number, the channel id, and the size of the part.
HEADS: Final = {0: "<HH", 1: "<HBxH", 2: "<HHH", 4: "<HIH", 8: "<HQH"}
ONE_PART: Final = frames.CHANNEL | frames.Format.MESSAGE << 2 | 1 << 8
LARGE_PART: Final = ONE_PART | frames.LARGE
# Parsing this many parts of a message takes about as long as parsing a packet, so they count as one packet.
PARTS_A_FRAME: Final = 16
# The highest cost of a message per byte of its packet. The smallest packet, with 8 bytes, has the highest.
MOST_WEIGHT: Final = (8 + frames.OVERHEAD) // 8


class Body:
    """Collects the payloads of a message whose head was parsed, as the payloads arrive."""

    __slots__ = ("_filled", "_left", "_parts", "_pieces", "_skip", "head", "weight")

    def __init__(self, head: frames.MessageHead, weight: int) -> None:
        self.head: frames.MessageHead = head
        self.weight: int = weight
        self._parts: list[bytes] = []
        # Iterates over the indices of the parts that aren't empty. A message may have tens of thousands of empty parts,
        # and a Python loop over them would take milliseconds.
        self._filled = compress(range(len(head.sizes)), head.sizes)
        self._pieces = Pieces()
        # How many bytes of the current part are still to arrive, and how many bytes of padding after it.
        self._left = 0
        self._skip = 0
        self._begin_part()

    def _begin_part(self) -> None:
        """Move on to the next part that isn't empty."""
        sizes, parts = self.head.sizes, self._parts
        following = next(self._filled, len(sizes))
        if following > len(parts):
            parts.extend(repeat(b"", following - len(parts)))
        self._left = sizes[following] if following < len(sizes) else 0

    @property
    def count(self) -> int:
        """Number of complete parts."""
        return len(self._parts)

    @property
    def is_complete(self) -> bool:
        return not self._left and not self._skip

    @property
    def parts(self) -> tuple[bytes, ...]:
        return tuple(self._parts)

    def feed(self, data: bytes, position: int, most: int) -> int:
        """Consume payload bytes of `data` from `position` on, until `most` parts are complete in total.

        Returns the position after the consumed bytes.
        """
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
            else:
                # The part is incomplete. `Pieces` copies its bytes once, when the rest has arrived.
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
    """Parses packets as they arrive, and buffers the bytes of an incomplete packet."""

    def __init__(self, state: State, bounds: frames.Bounds) -> None:
        self._state = state
        self._ours = state.ours
        self._theirs = state.theirs
        self._bounds = bounds
        code = HEADS.get(bounds.id_size) if bounds.message >= frames.SMALL_MOST else None
        self._head = struct.Struct(code) if code else None
        self._payload_at = 0 if self._head is None else (self._head.size + 7) // 8 * 8
        # How many packets the current call of `feed` may still parse.
        self._left = 0
        self.restart()

    def restart(self) -> None:
        """Start again with an empty buffer, on a new connection."""
        # The bytes of a packet whose head is incomplete, and the size that they must reach before parsing can go on.
        self._held = Pieces()
        self._wanted = 0
        # The message whose head was parsed and whose payloads are arriving.
        self._body: Body | None = None
        # Received bytes that the last call of `feed` left unparsed because of its limit: those from `_at` on.
        self._data = b""
        self._at = 0
        # A complete multicast, and the channels that it is still to be delivered to.
        self._undelivered: tuple[tuple[int, ...], Body] | None = None
        self.offset: int = 0
        """Bytes parsed on this connection."""
        self.unparsed: int = 0
        """How many received bytes the last call of `feed` left unparsed.

        A multicast that is still to be delivered to some of its channels counts as one more byte.
        """
        self.is_mid_packet: bool = False
        """True if the last packet is incomplete, or not delivered to all of its channels."""

    def feed(self, data: bytes, most: int) -> RemoteProtocolError | None:
        """Parse the bytes that the last call left and those in `data`, up to `most` packets.

        Returns an error if the peer has broken a rule. After that the reader can't be used on this connection.
        """
        if self._state.observer is not None and data:
            self._state.observer.transport("in", data)
        start = 0
        if self._data:
            if data:
                data = self._data[self._at :] + data
            else:
                # The caller only wants to continue. Slicing here would copy all remaining bytes with each call, so we
                # start at a position instead.
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
        """Feed `data` to the incomplete message, if there is one, and return the position after the consumed bytes."""
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
        """Deliver a complete message to its channels.

        Each channel counts as one packet. If that exceeds the limit of this call, the next call delivers to the
        remaining channels.
        """
        now = channels[: max(1, self._left + 1)]
        self._left -= max(0, len(now) - 1)
        self._deliver_to(now, body.parts, body.weight)
        self._undelivered = (channels[len(now) :], body) if len(now) < len(channels) else None

    def _parse(self, data: bytes, position: int, base: int) -> int:
        """Parse packets from `position` on, and buffer an incomplete packet at the end.

        `base` is the offset of `data` in the received stream. Returns the position that was reached. It is the end of
        `data`, unless the call's limit of packets was reached before.
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
                    weight = self._check_message(packet)
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
        """Fast path for the head of a message with one large part on a known channel.

        Returns False and changes nothing if the general path has to decide.
        """
        state, head = self._state, self._head
        at = position + self._payload_at  # the position of the part's size
        if head is None or len(data) < at + 8 or self._theirs.held_over + self._bounds.message > state.held_most:
            return False
        header, channel, _ = (
            head.unpack_from(data, position) if self._bounds.id_size else _without_id(head, data, position)
        )
        size = int.from_bytes(data[at : at + 8], "little")
        receiver = self._theirs.live.get(channel)
        if header != LARGE_PART or size <= frames.SMALL_MOST or size > state.limits.message:
            return False
        if receiver is None or not receiver.direct or not receiver.room:
            return False
        weight = self._payload_at + 8 + (size + 7 & -8) + frames.OVERHEAD
        self._body = Body(frames.MessageHead((channel,), False, (size,), -size & 7), weight)
        return True

    def _parse_messages(self, data: bytes, position: int, head: struct.Struct) -> int:
        """Fast path for messages with one small part on a known channel with room.

        Returns the position of the first packet that the general path has to parse.
        """
        state, theirs = self._state, self._theirs
        size = len(data)
        if state.observer is not None or theirs.held_over + (size - position) * MOST_WEIGHT > state.held_most:
            return position
        channels = theirs.live
        unpack = head.unpack_from if self._bounds.id_size else partial(_without_id, head)
        payload_at, last = self._payload_at, size - head.size
        while position <= last and self._left > 0:
            header, channel, length = unpack(data, position)
            if header != ONE_PART:
                break
            receiver = channels.get(channel)
            if receiver is None or not receiver.direct:
                break
            messages: list[frames.Parts] = []
            start, count, same, room = position, 0, channel, min(receiver.room, self._left)
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
            receiver.came(messages, position - start + count * frames.OVERHEAD)
        return position

    # --- messages

    def _check_message(self, head: frames.MessageHead) -> int:
        """Check the head of a message, and return how many bytes of the window it takes in each of its channels.

        Raises:
            RemoteProtocolError: The peer may not send this message now.
        """
        state, theirs = self._state, self._theirs
        weight = frames.message_cost(head.sizes, state.in_id_size, head.padding)
        new = 0
        over = theirs.held_over
        for channel, count in counts_of(head.channels).items():
            receiver = theirs.live.get(channel)
            what = f"a message on channel {channel}"
            if receiver is None:
                self._check_opening(channel, new)
                new += 1
                room, held = state.config.window, 0
            else:
                if not receiver.known:
                    raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
                if receiver.ended:
                    raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
                room, held = receiver.room, receiver.bytes
            if count > room:
                raise RemoteProtocolError(
                    f"{what}: {count} beside {state.config.window - room} that are not consumed, "
                    f"Config(window={state.config.window}) are allowed",
                    rule="relink-F03",
                )
            over += max(0, min(held + count * weight - theirs.floor, count * weight))
            if over > state.held_most:
                raise RemoteProtocolError(
                    f"{what}: {count * weight} bytes beside {theirs.bytes} that are not consumed, "
                    f"{state.limits.connection_bytes} are allowed",
                    limit="connection_bytes",
                )
        return weight

    def _check_opening(self, channel: int, new: int) -> None:
        state = self._state
        what = f"a message that opens channel {channel}"
        if state.has_peer_shut_down:
            raise RemoteProtocolError(f"{what} after the shutdown", rule="relink-S04")
        if not state.told_resume:
            raise RemoteProtocolError(f"{what} before our resume", rule="relink-H35")
        live = len(self._theirs.live) + new
        if live >= state.limits.channels:
            raise RemoteProtocolError(f"{what} beside {live} live ones", limit=state.limits.bound_of_channels)

    def _deliver_to(self, channels: Sequence[int], parts: frames.Parts, weight: int) -> None:
        """Store a complete message in its channels. `_check_message` has accepted it before."""
        state, theirs = self._state, self._theirs
        for channel in channels:
            receiver = theirs.live.get(channel)
            if receiver is None:
                receiver = theirs.expected.get(channel) or ChannelReceiver(channel, state)
                receiver.enter()
            receiver.came([parts], weight)
        if state.observer is not None:
            for channel in channels:
                state.observer.frame("in", f"in {channel}", "message", sum(map(len, parts)))

    # --- packets without payload

    def _apply(self, packet: frames.General | frames.OperationPacket | frames.AckPacket) -> None:
        """Apply a packet without payload. Raises and changes nothing if the packet breaks a rule."""
        if isinstance(packet, frames.General):
            self._apply_general(packet)
            return
        if isinstance(packet, frames.OperationPacket):
            self._operate(packet)
            side, name = "in", packet.operation.name
        else:
            self._acknowledge(packet)
            side, name = "out", packet.ack.name
        if self._state.observer is not None:
            for channel in packet.channels:
                self._state.observer.frame("in", f"{side} {channel}", name.lower(), 0)

    def _apply_general(self, packet: frames.General) -> None:
        state, probes = self._state, self._state.probes
        match packet:
            case frames.General.NOP:
                return
            case frames.General.PING:
                if probes.pongs >= state.limits.pongs:
                    what = f"{probes.pongs} pings not answered yet because the peer does not read"
                    raise RemoteProtocolError(what, limit="pongs")
                probes.pongs += 1
            case frames.General.PONG:
                purpose = probes.pong_came()
                if purpose is Purpose.ASKED:
                    state.events.append(Pong())
                elif purpose is Purpose.ROUND_TRIP:
                    self._ours.budget.round_trip.answered(state.now)
            case frames.General.RESUME:
                if not state.is_resuming:
                    raise RemoteProtocolError("a resume on a connection that has none to come", rule="relink-R04")
                self._ours.resume()
                state.events.append(Resumed())
            case frames.General.SHUTDOWN:
                if not state.has_peer_shut_down:
                    state.has_peer_shut_down = True
                    state.report(GoingAway(Reason()))
            case _:
                assert_never(packet)
        if state.observer is not None:
            state.observer.frame("in", "link", packet.name.lower(), 0)

    def _operate(self, packet: frames.OperationPacket) -> None:
        """Apply a commit, a rollback or a close to channels of the peer."""
        state, theirs, operation = self._state, self._theirs, packet.operation
        outcomes = state.probes.outcomes
        if operation is not frames.Operation.CLOSE and outcomes > state.outcomes_most:
            raise RemoteProtocolError(f"{outcomes} answers, and no sign that the peer has read them")
        plans: list[tuple[ChannelReceiver, int | None]] = []
        unopened: dict[int, None] = {}
        for channel, count in counts_of(packet.channels).items():
            what = f"{operation.name.lower()} on channel {channel}"
            receiver = theirs.live.get(channel)
            if receiver is None:
                if operation is not frames.Operation.CLOSE:
                    raise RemoteProtocolError(f"{what}, which is not open", rule="relink-O12")
                # A close doesn't refer to a message, so it is allowed on a channel on which no message has arrived.
                unopened[channel] = None
            elif not receiver.known:
                raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
            elif operation is frames.Operation.CLOSE:
                receiver.check_close(count)
                plans.append((receiver, None))
            else:
                plans.append((receiver, receiver.meant(operation, packet.sequence, count)))
        owed = len(unopened.keys() | theirs.unopened.keys()) if unopened else 0
        if owed > state.limits.channels:
            what = f"close on {owed} channels without a message, and the peer does not read that they are closed"
            raise RemoteProtocolError(what, limit="channels")
        theirs.unopened.update(unopened)
        for receiver, number in plans:
            if operation is frames.Operation.CLOSE:
                receiver.close()
            elif number is not None:
                receiver.decide(operation, number)

    def _acknowledge(self, packet: frames.AckPacket) -> None:
        """Apply an acknowledgement to channels that we send on."""
        name = packet.ack.name.lower()
        plans: list[tuple[ChannelSender, int | None]] = []
        is_end = packet.ack is frames.Ack.CLOSED
        for channel, count in counts_of(packet.channels).items():
            sender = self._ours.live.get(channel)
            if sender is None:
                if is_end:
                    # The channel was never opened, or an earlier `closed` has ended it. Nothing is left to do.
                    continue
                raise RemoteProtocolError(f"{name} on channel {channel}, which is not open", rule="relink-O12")
            if not is_end:
                plans.append((sender, sender.meant(packet.ack, packet.sequence, count)))
            elif count > 1:
                what = f"closed on channel {channel} {count} times, which was closed once"
                raise RemoteProtocolError(what, rule="relink-K02")
            elif sender.check_closed():
                plans.append((sender, None))
        for sender, number in plans:
            if is_end:
                sender.closed()
                continue
            sender.heard = True
            if number is not None:
                sender.take(packet.ack, number)


def _without_id(head: struct.Struct, data: bytes, position: int) -> tuple[int, int, int]:
    header, length = head.unpack_from(data, position)
    return header, 0, length
