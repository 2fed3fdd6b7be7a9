"""A plain Relink peer for both roles, written from the document; imports nothing of muxkit.

It is as harsh as the Go original: a closed channel is forgotten at once, and a violation ends the connection
without a word.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tests.foreign.wire import LineCut, Plan, Refusal, Violation, Wire, listeners, uncut

NONE = 0xFFFFFFFF
PING, PONG, RESUME, SHUTDOWN = 1, 2, 3, 4
OPERATION, ACK, SEQ_OPERATION, SEQ_ACK, MESSAGE = range(5)
COMMIT, ROLLBACK, CLOSE = range(3)
RECEIVED, CONSUMED, COMMITTED, UNCOMMITTED, CLOSED = range(5)
MOST = {OPERATION: 2, ACK: 4, SEQ_OPERATION: 1, SEQ_ACK: 3, MESSAGE: 3}
UNUSED = {OPERATION: "O04", ACK: "O10", SEQ_OPERATION: "Q04", SEQ_ACK: "Q09", MESSAGE: "M03"}


def up(offset: int, to: int) -> int:
    return -(-offset // to) * to


def general(kind: int) -> bytes:
    return bytes([kind << 5]) + bytes(7)


LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of struct, by the bytes of a channel id


def control(form: int, kind: int, channel: int, number: int | None = None, *, size: int = 2) -> bytes:
    head = struct.pack(f"<BB{LETTERS[size]}", 1 | form << 2 | kind << 5, 0, channel)
    if number is not None:
        head += bytes(-len(head) % 4) + struct.pack("<I", number & NONE)
    return head + bytes(-len(head) % 8)


def multicast(form: int, kind: int, channels: list[int]) -> bytes:
    data = struct.pack(f"<BBHI{len(channels)}H", 3 | form << 2 | kind << 5, 0, 0, len(channels), *channels)
    return data + bytes(-len(data) % 8)


def message(channels: list[int], parts: list[bytes], *, size: int = 2) -> bytes:
    large, long = any(len(part) > 65535 for part in parts), len(parts) > 255
    head = bytes([1 | (len(channels) != 1) << 1 | MESSAGE << 2 | long << 5 | large << 6, 0 if long else len(parts)])
    count = struct.pack("<HI", 0, len(channels)) if len(channels) != 1 else b""
    data = head + count + struct.pack(f"<{len(channels)}{LETTERS[size]}", *channels)
    data += bytes(-len(data) % 2)
    if long:
        data += struct.pack("<I", len(parts))
    if large:
        data += bytes(-len(data) % 8)
    data += struct.pack(f"<{len(parts)}{'Q' if large else 'H'}", *map(len, parts))
    data += bytes(-len(data) % 8)
    return data + b"".join(part + bytes(-len(part) % 8) for part in parts)


@dataclass
class Packet:
    form: int  # -1: general
    kind: int
    channels: list[int]
    number: int = NONE
    sequence: bool = False
    parts: list[bytes] = field(default_factory=list)


class Parser:
    """Reads packets, and refuses padding that is not zero."""

    def __init__(self, theirs: int = 2, ours: int = 2) -> None:
        """Take the bytes of a channel id for their channels, and for ours, which their acknowledgements name."""
        self.data = b""
        self.theirs, self.ours = theirs, ours

    def _need(self, size: int) -> None:
        if len(self.data) < size:
            raise EOFError

    def _zero(self, start: int, end: int) -> None:
        self._need(end)
        if any(self.data[start:end]):
            raise Violation("relink-P01", f"padding {self.data[start:end].hex()} in {self.data[:end].hex()}")

    def next(self) -> Packet | None:
        try:
            packet, size = self._read()
        except EOFError:
            return None
        self.data = self.data[size:]
        return packet

    def _read(self) -> tuple[Packet, int]:
        self._need(8)
        first = self.data[0]
        form, kind = first >> 2 & 7, first >> 5
        if not first & 1:
            self._zero(1, 8)
            if kind > SHUTDOWN or first & 30:
                raise Violation("relink-G07", f"general packet {first:02x}")
            return Packet(-1, kind, []), 8
        if form > MESSAGE:
            raise Violation("relink-P14", f"format {form}")
        if kind > MOST[form]:
            raise Violation(f"relink-{UNUSED[form]}", f"type {kind} of format {form}")
        if form != MESSAGE or kind & 1:
            self._zero(1, 2)
        at, count = 2, 1
        if first & 2:
            self._zero(2, 4)
            [count] = struct.unpack_from("<I", self.data, 4)
            at = 8
        size = self.ours if form in (ACK, SEQ_ACK) else self.theirs
        self._need(at + size * count)
        packet = Packet(form, kind, list(struct.unpack_from(f"<{count}{LETTERS[size]}", self.data, at)))
        at += size * count
        if form in (SEQ_OPERATION, SEQ_ACK):
            self._zero(at, up(at, 4))
            at = up(at, 4)
            self._need(at + 4)
            [packet.number] = struct.unpack_from("<I", self.data, at)
            packet.form, packet.sequence, at = form - 2, True, at + 4
        elif form == MESSAGE:
            at = self._parts(packet, at)
        self._zero(at, up(at, 8))
        return packet, up(at, 8)

    def _parts(self, packet: Packet, at: int) -> int:
        count = self.data[1]
        self._zero(at, up(at, 2))
        at = up(at, 2)
        if packet.kind & 1:
            self._need(at + 4)
            [count] = struct.unpack_from("<I", self.data, at)
            at += 4
        size = 8 if packet.kind & 2 else 2
        if size == 8:
            self._zero(at, up(at, 8))
            at = up(at, 8)
        self._need(at + size * count)
        sizes = struct.unpack_from(f"<{count}{'Q' if size == 8 else 'H'}", self.data, at)
        at += size * count
        for length in sizes:
            self._zero(at, up(at, 8))
            at = up(at, 8)
            self._need(at + length)
            packet.parts.append(self.data[at : at + length])
            at += length
        return at


@dataclass
class Outgoing:
    """A channel of ours: all its messages, and how far the other side is with them (-1: none)."""

    messages: list[list[bytes]] = field(default_factory=list)
    cursors: dict[int, int] = field(default_factory=lambda: {RECEIVED: -1, CONSUMED: -1, COMMITTED: -1})
    decisions: list[tuple[int, int]] = field(default_factory=list)  # operation, through
    outcomes: dict[int, int] = field(default_factory=dict)
    closing: bool = False
    close_sent: bool = False
    named: bool = True  # in this connection, so that messages may go out

    def settled(self, transactions: bool) -> int:
        """Count the messages that the other side is done with."""
        if not transactions:
            return self.cursors[CONSUMED] + 1
        back = [through for operation, through in self.decisions if operation == ROLLBACK]
        return max([self.cursors[COMMITTED], *back]) + 1


@dataclass
class Incoming:
    """A channel of the other side."""

    received: int = -1
    decided: int = -1
    consumed: int = -1
    held: dict[int, list[bytes]] = field(default_factory=dict)
    outcomes: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Link:
    """What lives longer than a connection."""

    epoch: int = 0
    id: int = 0
    out: dict[int, Outgoing] = field(default_factory=dict)
    incoming: dict[int, Incoming] = field(default_factory=dict)
    our_shutdown: bool = False
    their_shutdown: bool = False


@dataclass
class Peer:
    """One side of one link; `got` has what was delivered, per channel."""

    connector: bool
    our_transactions: bool = False
    their_transactions: bool = False
    name: bytes = b""
    sizes: tuple[int, int] = (2, 2)  # bytes of a channel id: the connector's, the listener's
    plan: Plan = uncut
    late_resume: bool = False  # say our part of a resumption only when the other side's is complete
    refusals: list[Refusal] = field(default_factory=list)
    got: dict[int, list[list[bytes]]] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    link: Link = field(default_factory=Link)
    want_shutdown: bool = False
    over: bool = False
    pongs: int = 0
    outbox: bytearray = field(default_factory=bytearray)
    shared: list[list[bytes]] = field(default_factory=list)  # messages to several channels
    changed: trio.Event = field(default_factory=trio.Event)
    resuming: bool = False  # the other side's resume is due
    said: set[int] = field(default_factory=set)  # incoming channels that may carry messages in this connection
    all_said: bool = True
    mentioned: set[int] = field(default_factory=set)
    live: bool = False
    told: Callable[[], None] = lambda: None  # called when the other side has shut down, and when a connection is over

    @property
    def _our_size(self) -> int:
        return self.sizes[not self.connector]

    @property
    def _their_size(self) -> int:
        return self.sizes[self.connector]

    # Commands

    def send(self, channel: int, *parts: bytes) -> None:
        out = self.link.out.setdefault(channel, Outgoing())
        out.messages.append(list(parts))
        if self.live and out.named and not self.resuming:
            self._put(message([channel], list(parts), size=self._our_size))

    def multicast(self, channels: list[int], *parts: bytes) -> None:
        """Send one packet to channels that had no other messages; a resumption sends it again to those that miss it."""
        shared = list(parts)
        self.shared.append(shared)
        for channel in channels:
            self.link.out.setdefault(channel, Outgoing()).messages.append(shared)
        assert not self.live

    def decide(self, channel: int, operation: int) -> None:
        out = self.link.out[channel]
        through = len(out.messages) - 1
        out.decisions.append((operation, through))
        if self.live and not self.resuming:
            self._tell(SEQ_OPERATION, operation, channel, through)

    def close(self, channel: int) -> None:
        self.link.out.setdefault(channel, Outgoing()).closing = True
        self._close_done()

    def shutdown(self) -> None:
        self.want_shutdown = True
        self._close_done()

    def ping(self) -> None:
        self._put(general(PING))

    def _put(self, data: bytes) -> None:
        if self.live:
            self.outbox += data
            self.changed.set()

    # Connections

    async def listen(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        bound, port = await listeners()
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._connection, bound)
            task_status.started(port)

    async def dial(self, port: int) -> None:
        while not self.over and not self.refusals:
            await self._connection(await trio.open_tcp_stream("127.0.0.1", port))

    async def _connection(self, stream: trio.SocketStream) -> None:
        wire = Wire(stream, self.plan(len(self.wires)))
        self.wires.append(wire)
        try:
            parser = Parser(self._their_size, self._our_size)
            await (self._greet(wire, parser) if self.connector else self._answer(wire, parser))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, wire)
                await self._read(wire, parser)
                nursery.cancel_scope.cancel()
        except* LineCut:
            pass
        except* Violation as group:
            for violation in group.exceptions:
                assert isinstance(violation, Violation)
                self.refusals.append(violation.refusal)
        finally:
            self.live = False
            self.outbox.clear()
            await wire.cut()
            self.told()

    async def _write(self, wire: Wire) -> None:
        while True:
            await self.changed.wait()
            self.changed = trio.Event()
            data = bytes(self.outbox)
            self.outbox.clear()
            await wire.send(data)

    async def _exactly(self, wire: Wire, parser: Parser, size: int) -> bytes:
        while len(parser.data) < size:
            data = await wire.take()
            if not data:
                raise LineCut
            parser.data += data
        data, parser.data = parser.data[:size], parser.data[size:]
        return data

    async def _greet(self, wire: Wire, parser: Parser) -> None:
        await wire.send(bytes(8))
        if await self._exactly(wire, parser, 8) != bytes(8):
            raise Violation("relink-H06", "another version than 0")
        flags = self.our_transactions | self.their_transactions << 1
        data = bytes([len(self.name)]) + self.name + bytes([*self.sizes, flags])
        await wire.send(data + bytes(-len(data) % 8) + struct.pack("<QQ", self.link.epoch, self.link.id))
        epoch, number = struct.unpack("<QQ", await self._exactly(wire, parser, 16))
        if not 0 < number < 1 << 63 or not epoch:
            raise Violation("relink-H27", f"link {number} of epoch {epoch}")
        old = (epoch, number) == (self.link.epoch, self.link.id)
        if self.link.id and not old:
            if self.link.our_shutdown:  # the other side's may have been lost, and then its link was over
                self.over = True
                raise LineCut
            raise Violation("relink-H30", "the link is not known any more")
        self.link.epoch, self.link.id = epoch, number
        self._start(old)

    async def _answer(self, wire: Wire, parser: Parser) -> None:
        if await self._exactly(wire, parser, 8) != bytes(8):
            raise Violation("relink-H02", "another version than 0, or padding")
        await wire.send(bytes(8))
        size = (await self._exactly(wire, parser, 1))[0]
        if await self._exactly(wire, parser, size) != self.name:
            raise Violation("relink-H22", "another endpoint name")
        if await self._exactly(wire, parser, 3) != bytes(
            [*self.sizes, self.their_transactions | self.our_transactions << 1]
        ):
            raise Violation("relink-H23", "other sizes or flags")
        if any(await self._exactly(wire, parser, -(size + 4) % 8)):
            raise Violation("relink-H17", "padding")
        epoch, number = struct.unpack("<QQ", await self._exactly(wire, parser, 16))
        old = number != 0 and (epoch, number) == (self.link.epoch, self.link.id)
        if not old:
            if self.link.incoming or (self.link.their_shutdown and number):
                raise Violation("relink-H19", f"link {number} of {epoch}, known is {self.link.id} of {self.link.epoch}")
            waiting = self.link.out
            self.link = Link(epoch=1_700_000_000_000_000, id=self.link.id + 1, out=waiting)
        await wire.send(struct.pack("<QQ", self.link.epoch, self.link.id))
        self._start(old)

    def _start(self, old: bool) -> None:
        self.live, self.resuming, self.mentioned, self.said = True, old, set(), set()
        self.all_said = not old
        if not old:
            self._resend()
        elif not self.late_resume:
            self._say_all()

    def _say_all(self) -> None:
        for channel, one in self.link.incoming.items():
            self.said.add(channel)
            self._tell(SEQ_ACK, RECEIVED, channel, one.received)
            self._tell(SEQ_ACK, CONSUMED, channel, one.consumed)
            for outcome, through in one.outcomes:
                self._tell(SEQ_ACK, outcome, channel, through)
        self._put(general(RESUME))
        self.all_said = True

    def _resend(self) -> None:
        starts = {}
        for channel, out in list(self.link.out.items()):
            for operation, through in out.decisions:
                if through > out.cursors[COMMITTED] and through <= out.cursors[RECEIVED]:
                    self._tell(SEQ_OPERATION, operation, channel, through)
            starts[channel] = max(out.cursors[RECEIVED], out.cursors[CONSUMED]) + 1
        for parts in self.shared:  # these are the first of their channels
            missing = [
                channel
                for channel, out in self.link.out.items()
                if any(each is parts for each in out.messages[starts[channel] :])
            ]
            if missing:
                self._put(message(missing, parts, size=self._our_size))
        for channel, out in list(self.link.out.items()):
            for number in range(starts[channel], len(out.messages)):
                if not any(out.messages[number] is parts for parts in self.shared):
                    self._put(message([channel], out.messages[number], size=self._our_size))
                for operation, through in out.decisions:
                    if through == number:
                        self._tell(SEQ_OPERATION, operation, channel, through)
            if out.close_sent:
                self._tell(OPERATION, CLOSE, channel)
        if self.link.our_shutdown:
            self._put(general(SHUTDOWN))
        self._close_done()

    def _tell(self, form: int, kind: int, channel: int, number: int | None = None) -> None:
        size = self._their_size if form in (ACK, SEQ_ACK) else self._our_size
        self._put(control(form, kind, channel, number, size=size))

    def _close_done(self) -> None:
        """Close what is consumed, and shut down when no channel is left."""
        if not self.live or self.resuming:
            return
        for channel, out in self.link.out.items():
            if out.closing and not out.close_sent and out.settled(self.our_transactions) == len(out.messages):
                out.close_sent = True
                self._tell(OPERATION, CLOSE, channel)
        if self.want_shutdown and not self.link.out and not self.link.our_shutdown:
            self.link.our_shutdown = True
            self._put(general(SHUTDOWN))

    # What comes

    async def _read(self, wire: Wire, parser: Parser) -> None:
        while True:
            while (packet := parser.next()) is not None:
                self._packet(packet)
            data = await wire.take()
            if not data:
                self.over = self.link.our_shutdown and self.link.their_shutdown
                return
            parser.data += data

    def _packet(self, packet: Packet) -> None:
        if packet.form == -1:
            self._general(packet.kind)
        for channel in packet.channels:
            if packet.form == MESSAGE:
                self._message(channel, packet.parts)
            elif packet.form == OPERATION:
                self._operation(channel, packet, len(packet.channels) > 1)
            else:
                self._ack(channel, packet)

    def _general(self, kind: int) -> None:
        if kind == PING:
            self._put(general(PONG))
        elif kind == PONG:
            self.pongs += 1
        elif kind == SHUTDOWN:
            self.link.their_shutdown = True
            self.told()
        elif kind == RESUME:
            if not self.resuming:
                raise Violation("relink-R01", "a resume on a new link, or a second one")
            self.resuming = False
            for channel, out in list(self.link.out.items()):
                if channel in self.mentioned:
                    continue
                if out.close_sent:
                    del self.link.out[channel]
                elif max(out.cursors.values()) >= 0:
                    raise Violation("relink-R02", f"the resumption leaves out channel {channel} with {out.cursors}")
            if not self.all_said:
                self._say_all()
            self._resend()

    def _message(self, channel: int, parts: list[bytes]) -> None:
        if not self.all_said and channel not in self.said:
            raise Violation("relink-H35", f"a message on channel {channel} before it was resumed")
        if channel not in self.link.incoming and self.link.their_shutdown:
            raise Violation("relink-S04", f"channel {channel} opened after the shutdown")
        one = self.link.incoming.setdefault(channel, Incoming())
        one.received += 1
        if self.their_transactions:
            one.held[one.received] = parts
            self._tell(SEQ_ACK, RECEIVED, channel, one.received)
            return
        one.consumed = one.received
        self.got.setdefault(channel, []).append(parts)
        # Both forms of the acknowledgement in turn.
        if one.consumed % 2:
            self._tell(SEQ_ACK, CONSUMED, channel, one.consumed)
        else:
            self._tell(ACK, CONSUMED, channel)

    def _operation(self, channel: int, packet: Packet, many: bool) -> None:
        one = self.link.incoming.get(channel)
        if packet.kind == CLOSE:
            self.link.incoming.pop(channel, None)
            if one is not None or not many:
                self._tell(ACK, CLOSED, channel)
            return
        if not self.their_transactions:
            raise Violation("relink-T06", f"operation {packet.kind} on channel {channel} without transactions")
        if one is None:
            raise Violation("relink-O12", f"operation {packet.kind} on channel {channel}, which is not open")
        through = packet.number if packet.sequence else one.decided + 1
        if through > one.received:
            raise Violation("relink-Q11", f"operation {packet.kind} through {through}, received {one.received}")
        for number in range(one.decided + 1, through + 1):
            parts = one.held.pop(number)
            one.decided = one.consumed = number
            if packet.kind == COMMIT:
                outcome = UNCOMMITTED if parts[:1] == [b"bad"] else COMMITTED
                if outcome == COMMITTED:
                    self.got.setdefault(channel, []).append(parts)
                one.outcomes.append((outcome, number))
                self._tell(SEQ_ACK, outcome, channel, number)
        self._tell(SEQ_ACK, CONSUMED, channel, one.consumed)

    def _ack(self, channel: int, packet: Packet) -> None:
        out = self.link.out.get(channel)
        if out is None:
            clause = "relink-R02" if self.resuming else "relink-K02" if packet.kind == CLOSED else "relink-O12"
            after = " after reconnect" if self.resuming else ""
            raise Violation(clause, f"peer claims to know nonexistent channel {channel}{after} (ack {packet.kind})")
        self.mentioned.add(channel)
        if packet.kind == CLOSED:
            if not out.close_sent:
                raise Violation("relink-K02", f"closed for channel {channel}, which is open")
            del self.link.out[channel]
            self._close_done()
            return
        kind = COMMITTED if packet.kind == UNCOMMITTED else packet.kind
        if kind == COMMITTED and not self.our_transactions:
            raise Violation("relink-T06", f"ack {packet.kind} on channel {channel} without transactions")
        cursor = out.cursors[kind]
        number = (-1 if packet.number == NONE else packet.number) if packet.sequence else cursor + 1
        if number >= len(out.messages) or (number < cursor and not (kind == COMMITTED and self.resuming)):
            raise Violation("relink-Q11", f"ack {packet.kind} through {number} of {len(out.messages)}, before {cursor}")
        if kind == COMMITTED:
            for each in range(cursor + 1, number + 1):
                out.outcomes[each] = packet.kind
        out.cursors[kind] = max(cursor, number)
        self._close_done()
