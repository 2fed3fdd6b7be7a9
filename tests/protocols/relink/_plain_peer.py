"""A Relink peer from the document, on bytes alone: it forgets closed channels at once and refuses unknown ones.

Its channel ids have two bytes, its messages one small part, and it has no transactions. Where the document leaves a
choice it does what the original program in Go does: `received` is told only while it resumes, a `closed` may go out
before the `close` is repeated, and every acknowledgement that names a channel it does not have, before our resume, ends
the connection.
"""

from __future__ import annotations

import attrs

NONE = 0xFFFFFFFF


class RefusedError(Exception):
    """The peer would close the connection here."""


@attrs.define
class Out:
    """A channel of the peer's own."""

    messages: list[bytes] = attrs.field(factory=list)
    sent: int = 0
    received: int = 0
    consumed: int = 0
    is_closed: bool = False
    close_sent: bool = False
    is_resuming: bool = False


@attrs.define
class In:
    """A channel of the other side."""

    received: int = 0
    consumed: int = 0
    consumed_told: int = 0
    is_closed: bool = False


@attrs.define
class PlainPeer:
    """`lives` has the messages of each life of each channel that came, in order."""

    is_hasty: bool
    """As the original it closes at once behind its messages, though they could be lost with the close."""
    outs: dict[int, Out] = attrs.field(factory=dict)
    ins: dict[int, In] = attrs.field(factory=dict)
    lives: dict[int, list[list[bytes]]] = attrs.field(factory=dict)
    is_resuming: bool = False
    """The other side has not said what it has."""
    resume_due: bool = False
    held: bytes = b""
    out: bytearray = attrs.field(factory=bytearray)

    # --- connections

    def connect(self, *, resumed: bool) -> None:
        self.held = b""
        self.out.clear()
        self.is_resuming = self.resume_due = resumed
        for out in self.outs.values():
            out.is_resuming = resumed

    # --- what its application does

    def send(self, channel: int, payload: bytes) -> None:
        out = self.outs.get(channel) or Out(is_resuming=False)
        if not out.is_closed:
            self.outs[channel] = out
            out.messages.append(payload)

    def close(self, channel: int) -> None:
        """Close a channel, also one that never had a message, as the program in Go does."""
        self.outs.setdefault(channel, Out()).is_closed = True

    def consume(self, channel: int, count: int) -> None:
        incoming = self.ins.get(channel)
        if incoming is not None:
            incoming.consumed = min(incoming.received, incoming.consumed + count)

    # --- writing

    def write(self) -> bytes:
        for channel, incoming in [*self.ins.items()]:
            if self.resume_due:
                self._ack(0x0D, channel, incoming.received)
            if self.resume_due or incoming.consumed != incoming.consumed_told:
                self._ack(0x2D, channel, incoming.consumed)
                incoming.consumed_told = incoming.consumed
            if incoming.is_closed and incoming.consumed == incoming.received:
                self.out += _packet(0x85, channel)
                del self.ins[channel]
        if self.resume_due:
            self.out += _general(0x60)
            self.resume_due = False
        for channel, out in self.outs.items():
            if out.is_resuming:
                continue
            for payload in out.messages[out.sent :]:
                head = bytes((0x11, 1)) + channel.to_bytes(2, "little") + len(payload).to_bytes(2, "little")
                self.out += _padded(_padded(head) + payload)
            out.sent = len(out.messages)
            is_known = self.is_hasty or out.received or not out.messages
            if out.is_closed and not out.close_sent and is_known:
                self.out += _packet(0x41, channel)
                out.close_sent = True
        data = bytes(self.out)
        self.out.clear()
        return data

    def _ack(self, kind: int, channel: int, count: int) -> None:
        self.out += _packet(kind, channel, ((count - 1) & NONE).to_bytes(4, "little"))

    # --- reading

    def read(self, data: bytes) -> None:
        self.held += data
        while len(self.held) >= 8:
            size = _size_of(self.held)
            if size is None or len(self.held) < size:
                return
            packet, self.held = self.held[:size], self.held[size:]
            self._take(packet)

    def _take(self, packet: bytes) -> None:
        kind, channel = packet[0], int.from_bytes(packet[2:4], "little")
        count = (int.from_bytes(packet[4:8], "little") + 1) & NONE
        if kind == 0x20:
            self.out += _general(0x40)
        elif kind == 0x60:
            self._resumed()
        elif kind == 0x11:
            self._message(channel, packet)
        elif kind == 0x41:
            if channel in self.ins:
                self.ins[channel].is_closed = True
        elif kind in (0x05, 0x25, 0x0D, 0x2D, 0x85):
            out = self.outs.get(channel)
            if out is None:
                if self.is_resuming:
                    raise RefusedError(f"the other side claims to know channel {channel} after a reconnect")
                return
            if kind == 0x85:
                if not out.close_sent:
                    raise RefusedError(f"closed on channel {channel}, which was not closed")
                del self.outs[channel]
            elif kind & 0x20:
                self._consumed(channel, out, count if kind == 0x2D else out.consumed + 1)
            else:
                self._received(channel, out, count if kind == 0x0D else out.received + 1)
        elif kind:
            raise RefusedError(f"packet {packet.hex()}")

    def _message(self, channel: int, packet: bytes) -> None:
        if self.resume_due:
            raise RefusedError(f"a message on channel {channel} before the resume")
        if channel not in self.ins:
            self.ins[channel] = In()
            self.lives.setdefault(channel, []).append([])
        incoming = self.ins[channel]
        if incoming.is_closed:
            raise RefusedError(f"a message on channel {channel}, which was closed")
        incoming.received += 1
        size = int.from_bytes(packet[4:6], "little")
        self.lives[channel][-1].append(packet[8 : 8 + size])

    def _received(self, channel: int, out: Out, count: int) -> None:
        if not out.received <= count <= out.sent:
            raise RefusedError(f"received {count} on channel {channel}, {out.received} to {out.sent} are possible")
        out.received = count
        if out.is_resuming:
            out.is_resuming = False
            out.sent = count
            out.close_sent = False

    def _consumed(self, channel: int, out: Out, count: int) -> None:
        if not out.consumed <= count <= out.sent:
            raise RefusedError(f"consumed {count} on channel {channel}, {out.consumed} to {out.sent} are possible")
        out.consumed = count
        out.received = max(out.received, count)

    def _resumed(self) -> None:
        if not self.is_resuming:
            raise RefusedError("a resume that is not due")
        self.is_resuming = False
        for channel, out in [*self.outs.items()]:
            if not out.is_resuming:
                continue
            if out.close_sent:
                del self.outs[channel]
            elif out.received:
                raise RefusedError(f"channel {channel} with received messages was not resumed")
            else:
                out.is_resuming = False
                out.sent = 0


def _general(kind: int) -> bytes:
    return bytes((kind,)) + bytes(7)


def _packet(kind: int, channel: int, number: bytes = b"") -> bytes:
    return _padded(bytes((kind, 0)) + channel.to_bytes(2, "little") + number)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _size_of(data: bytes) -> int | None:
    """Return the size of the packet that begins here."""
    if data[0] == 0x11:
        if data[1] != 1:
            raise RefusedError("a message that is not of one part")
        return 8 + (int.from_bytes(data[4:6], "little") + 7) // 8 * 8
    return 8
