"""A plain Aqueduct peer over a byte stream, written from the document and the page of the carrier alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

GREETING = b"AQUEDUX1"
VERSION = bytes.fromhex("ef505fa6600f408e") + b"AQUEDUCT" + b"\x0b0.0.0-AFTER"
DATA, LAST, RESET, STOP, CREDIT, STREAMS, DATAGRAM = range(7)
EARLY = 8
ACK_VERSION, HEADERS, ROUTE, MESSAGE, COUNT, FINISH, CANCEL, ACK, REPORT, CLOSE, FORGET = range(1, 12)
FIRST_WINDOW = 4096  # bytes of one stream before any credit
FIRST_STREAMS = 16
Pairs = tuple[tuple[bytes, bytes], ...]


class Refused(Exception):
    """What came breaks the named clause."""


class Short(Exception):
    """The frame goes on in bytes that have not come."""


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def varbytes(data: bytes) -> bytes:
    return varint(len(data)) + data


def header_data(pairs: Pairs) -> bytes:
    return varbytes(b"".join(varbytes(part) for pair in pairs for part in pair))


class Reader:
    """Takes values off the front of some bytes."""

    def __init__(self, data: bytes, *, whole: bool = False) -> None:
        self.data, self.at, self.whole = data, 0, whole

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            if self.whole:
                raise Refused("aqueduct-E07: the container ends inside a value")
            raise Short
        self.at += size
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        number = 0
        for place in range(10):
            byte = self.take(1)[0]
            number |= (byte & 127) << 7 * place
            if byte < 128:
                if byte == 0 and place:
                    raise Refused("aqueduct-E04: a longer form of a number is never sent")
                if number >> 64:
                    raise Refused("aqueduct-E03: a number above 64 bits")
                return number
        raise Refused("aqueduct-E03: a number of more than 10 bytes")

    def inner(self) -> "Reader":
        return Reader(self.take(self.varint()), whole=True)

    def more(self) -> bool:
        return self.at < len(self.data)

    def varints(self) -> list[int]:
        reader, found = self.inner(), []
        while reader.more():
            found.append(reader.varint())
        return found

    def pairs(self) -> Pairs:
        reader, found = self.inner(), []
        while reader.more():
            found.append(reader.take(reader.varint()))
        if len(found) % 2:
            raise Refused("aqueduct-E15: an odd number of values in header data")
        return tuple(zip(found[::2], found[1::2], strict=True))


@dataclass
class Incoming:
    """A stream or a datagram of the other side."""

    name: int
    is_datagram: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    window: int = FIRST_WINDOW
    has_begun: bool = False
    ended: bool = False
    over: bool = False  # ended or reset, and told so in credit for streams
    channel: int | None = None
    is_ignored: bool = False


@dataclass(eq=False)
class Outgoing:
    """A stream of this side; it has a number once its first bytes are written."""

    buffer: bytearray
    number: int | None = None
    credit: int = FIRST_WINDOW
    is_last: bool = False
    ended: bool = False


@dataclass
class Sending:
    stream: Outgoing | None = None
    reliable: int = 0
    datagrams: int = 0
    counted: int = 0
    reported: int = 0
    ended: bool = False
    known: set[tuple[bool, int]] = field(default_factory=set)  # acked or nacked
    carried: dict[tuple[bool, int], list[int]] = field(default_factory=dict)


@dataclass
class Receiving:
    reliable: set[int] = field(default_factory=set)
    datagrams: set[int] = field(default_factory=set)
    learned: int = 0
    reported: int = 0
    total: int | None = None
    count_stream: int | None = None
    acks: Outgoing | None = None
    unacked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Message:
    payload: bytes
    headers: Pairs = ()
    attachments: tuple[tuple[int, Pairs], ...] = ()


class Peer:
    """One end of a connection as bytes in and bytes out; what it refuses stands in `refusals`."""

    def __init__(
        self, *, is_client: bool, headers: Pairs = (), grant: int = 0, acks_version: bool = True, most_streams: int = 0
    ) -> None:
        self.me = 0 if is_client else 1
        self.grant = grant  # bytes of credit in one frame, 0 for all that is due
        self.acks_version = acks_version
        self.out = bytearray(GREETING)
        self.refusals: list[str] = []
        self.inbox: dict[int, list[Message]] = {}
        self.ends: dict[int, str] = {}
        self.unacked: dict[int, int] = {}  # messages that were not acked when the receiver was closed
        self.reports: dict[int, list[tuple[bool, int]]] = {}
        self.in_order = False  # before the headers ACK_VERSION holds up what is behind it in its sequence
        self.is_silent = False  # it says only what the test puts into `out`
        self.deaf: set[int] = set()  # numbers of datagrams that count as lost
        self.loses_datagrams = False  # whether the line may; that of the page never does
        self.peer_headers: Pairs | None = None
        self.resets = 0
        self._headers = headers
        self._in = bytearray()
        self._greeted = False
        self._streams: dict[int, Incoming] = {}
        self._opened = 0
        self._may_be_opened = FIRST_STREAMS
        self._waiting: list[Incoming] = []
        self._mine: list[Outgoing] = []
        self._next, self._may_open = 0, FIRST_STREAMS
        self._version_acked = False  # by the other side
        self._version_due, self._ack_version_sent = False, False
        self._sending: dict[int, Sending] = {0: Sending()} if is_client else {}
        self._receiving: dict[int, Receiving] = {} if is_client else {0: Receiving()}
        self._ack_streams: dict[int, Incoming] = {}
        self._gone: set[int] = set()
        self._issued: set[int] = {0} if is_client else set()
        self._attached: set[int] = set()
        self._counters = {0: 1}
        if is_client:
            self._write(self._open(), bytes([HEADERS]) + header_data(headers), last=True)

    # ------------------------------------------------------------ what the test says

    def channel(self, *, i_send: bool, oneshot: bool = False) -> int:
        kind = self.me | (self.me if i_send else 1 - self.me) << 1 | oneshot << 2
        index = self._counters.get(kind, 0)
        self._counters[kind] = index + 1
        return index << 3 | kind

    def send(
        self,
        channel: int,
        payload: bytes,
        attachments: Iterable[int] = (),
        *,
        headers: Pairs = (),
        how: str = "ordered",
    ) -> None:
        """Send a message: ordered, unordered, as a datagram, or as one that is lost on the way."""
        state, carried = self._sending[channel], list(attachments)
        in_stream = how in ("ordered", "unordered")
        number = state.reliable if in_stream else state.datagrams
        state.carried[in_stream, number] = carried
        for attached in carried:
            self._issued.add(attached)
            if attached >> 1 & 1 == self.me:
                self._sending.setdefault(attached, Sending())
            else:
                self._receiving.setdefault(attached, Receiving())
        entries = b"".join(varint(attached) + header_data(()) for attached in carried)
        frame = bytes([MESSAGE]) + varint(number) + header_data(headers) + varbytes(entries) + varbytes(payload)
        if in_stream:
            state.reliable += 1
        else:
            state.datagrams += 1
        if how == "ordered":
            self._write(self._main(channel), frame)
        elif how == "unordered":
            self._write(self._open(), bytes([ROUTE]) + varint(channel) + frame, last=True)
        elif how == "datagram":
            sequence = self._version() + bytes([ROUTE]) + varint(channel) + frame
            self._put_datagram(sequence)

    def count(self, channel: int) -> None:
        """Tell how many datagrams have been sent since the last time."""
        state = self._sending[channel]
        if state.datagrams > state.counted:
            self._write(self._main(channel), bytes([COUNT]) + varint(state.datagrams - state.counted))
            state.counted = state.datagrams

    def finish(self, channel: int) -> None:
        state = self._sending[channel]
        self.count(channel)
        self._write(self._main(channel), bytes([FINISH]) + varint(state.reliable), last=True)
        state.ended = True

    def cancel(self, channel: int) -> None:
        state = self._sending[channel]
        self._write(self._open(), bytes([ROUTE]) + varint(channel) + bytes([CANCEL]), last=True)
        self._reset(state.stream)
        state.ended = True

    def close(self, channel: int) -> None:
        self._write(self._ack_stream(channel), bytes([CLOSE]), last=True)
        del self._receiving[channel]
        self._gone.add(channel)

    def forget(self, channel: int) -> None:
        self._destroy(channel)
        self._write(self._open(), bytes([ROUTE]) + varint(channel) + bytes([FORGET]), last=True)

    def raw(self, frames: bytes) -> None:
        """Send a whole sequence of frames as it is."""
        self._write(self._open(), frames, last=True)

    def ack_version(self) -> None:
        """Send the ACK_VERSION that was held back."""
        if self._version_due and not self._ack_version_sent:
            self._write(self._open(), bytes([ACK_VERSION]), last=True)
            self._ack_version_sent = True

    def is_over(self) -> bool:
        return not self._sending and not self._receiving

    # ------------------------------------------------------------ writing

    def _version(self) -> bytes:
        return b"" if self._version_acked else VERSION

    def _open(self) -> Outgoing:
        stream = Outgoing(bytearray(self._version()))
        self._mine.append(stream)
        return stream

    def _main(self, channel: int) -> Outgoing:
        state = self._sending[channel]
        if state.stream is None:
            state.stream = self._open()
            state.stream.buffer += bytes([ROUTE]) + varint(channel)
        return state.stream

    def _ack_stream(self, channel: int) -> Outgoing:
        state = self._receiving[channel]
        if state.acks is None:
            state.acks = self._open()
            state.acks.buffer += bytes([ROUTE]) + varint(channel)
        return state.acks

    def _write(self, stream: Outgoing, data: bytes, *, last: bool = False) -> None:
        if not stream.ended:
            stream.buffer += data
            stream.is_last |= last
            self._pump()

    def _reset(self, stream: Outgoing | None) -> None:
        if stream is None or stream.ended:
            return
        stream.ended = True
        if stream.number is not None:
            self._put_reset(stream.number)

    def _put(self, number: int, part: bytes, *, last: bool) -> None:
        self.out += bytes([LAST if last else DATA]) + varint(number) + varbytes(part)

    def _put_reset(self, number: int) -> None:
        self.out += bytes([RESET]) + varint(number)

    def _put_datagram(self, sequence: bytes) -> None:
        self.out += bytes([DATAGRAM]) + varbytes(sequence)

    def _pump(self) -> None:
        for stream in self._mine:
            if stream.ended or not (stream.buffer or stream.is_last):
                continue
            if stream.number is None:
                if self._next >= self._may_open:
                    continue
                stream.number = self._next
                self._next += 1
            part = bytes(stream.buffer[: stream.credit])
            del stream.buffer[: len(part)]
            stream.credit -= len(part)
            stream.ended = stream.is_last and not stream.buffer
            if part or stream.ended:
                self._put(stream.number, part, last=stream.ended)

    # ------------------------------------------------------------ the carrier

    def receive(self, data: bytes) -> None:
        """Take what came; after a refusal nothing more is taken."""
        if self.refusals or self.is_silent:
            return
        self._in += data
        try:
            self._carrier_frames()
            self._answer()
        except Refused as refusal:
            self.refusals.append(str(refusal))

    def end(self) -> None:
        """Take note that nothing more comes."""
        if self._in and not self.refusals:
            self.refusals.append("carrier: the byte stream ends inside a frame")

    def _carrier_frames(self) -> None:
        if not self._greeted:
            if not GREETING.startswith(self._in[:8]):
                raise Refused(f"carrier: another greeting, {bytes(self._in[:8])!r}")
            if len(self._in) < 8:
                return
            del self._in[:8]
            self._greeted = True
        reader, taken = Reader(bytes(self._in)), 0
        try:
            while reader.more():
                self._carrier_frame(reader)
                taken = reader.at
        except Short:
            pass
        del self._in[:taken]

    def _carrier_frame(self, reader: Reader) -> None:
        kind = reader.take(1)[0]
        if kind in (DATA, LAST):
            name, data = reader.varint(), reader.take(reader.varint())
            if kind == DATA and not data:
                raise Refused(f"carrier: an empty DATA on stream {name}")
            self._arrived(name, data, last=kind == LAST)
        elif kind == RESET:
            stream = self._live(reader.varint())
            stream.is_ignored = True
            self.resets += 1
            self._over(stream)
        elif kind in (STOP, CREDIT):
            name = reader.varint()
            amount = reader.varint() if kind == CREDIT else 0
            if name >= self._next:
                raise Refused(f"carrier: frame {kind} for stream {name}, {self._next} were opened")
            mine = next(each for each in self._mine if each.number == name)
            mine.credit += amount
            if kind == STOP:
                self._reset(mine)
        elif kind == STREAMS:
            self._may_open += reader.varint()
        elif kind == EARLY:
            reader.varint()  # an offer that this peer doesn't use
        elif kind == DATAGRAM:
            data = reader.take(reader.varint())
            if len(data) > 65536:
                raise Refused(f"carrier: a datagram of {len(data)} bytes")
            self._read(Incoming(-1, is_datagram=True, buffer=bytearray(data), ended=True))
        else:
            raise Refused(f"carrier: no frame begins with {kind}")

    def _live(self, name: int) -> Incoming:
        stream = self._streams.get(name)
        if stream is None or stream.over:
            raise Refused(f"carrier: stream {name} has ended or never was")
        return stream

    def _arrived(self, name: int, data: bytes, *, last: bool) -> None:
        if name not in self._streams:
            if name != self._opened or name >= self._may_be_opened:
                raise Refused(f"carrier: stream {name}, {self._opened} opened of {self._may_be_opened} allowed")
            self._opened += 1
            self._streams[name] = Incoming(name)
        stream = self._live(name)
        stream.window -= len(data)
        if stream.window < 0:
            raise Refused(f"carrier: {-stream.window} bytes beyond the credit of stream {name}")
        stream.buffer += data
        stream.ended = last
        if last:
            self._over(stream)
        else:
            self._credit(stream, len(data))
        self._read(stream)

    def _credit(self, stream: Incoming, amount: int) -> None:
        stream.window += amount
        while amount:
            part = min(amount, self.grant or amount)
            self.out += bytes([CREDIT]) + varint(stream.name) + varint(part)
            amount -= part

    def _over(self, stream: Incoming) -> None:
        stream.over = True
        self._may_be_opened += 1
        self.out += bytes([STREAMS, 1])

    # ------------------------------------------------------------ frames

    def _read(self, stream: Incoming) -> None:
        while stream.buffer and not stream.is_ignored:
            reader = Reader(bytes(stream.buffer))
            try:
                if not self._frame(stream, reader):
                    if stream not in self._waiting:
                        self._waiting.append(stream)
                    return
            except Short:
                if stream.ended:
                    raise Refused("aqueduct-F09: a sequence ends inside a frame") from None
                return
            stream.has_begun = True
            del stream.buffer[: reader.at]

    def _frame(self, stream: Incoming, reader: Reader) -> bool:
        tag = reader.take(1)[0]
        if not stream.has_begun and tag != VERSION[0] and not self._ack_version_sent:
            raise Refused("aqueduct-V06: a sequence without VERSION before ACK_VERSION was sent")
        if tag in (VERSION[0], ACK_VERSION, HEADERS) and stream.channel is not None:
            raise Refused(f"aqueduct-F04: frame {tag} behind ROUTE_TO")
        if tag == VERSION[0]:
            if reader.take(len(VERSION) - 1) != VERSION[1:]:
                raise Refused("aqueduct-T04: another version")
            self._version_due = True
            if self.acks_version:
                self.ack_version()
            return True
        if tag == HEADERS:
            self._connection_headers(stream, reader.pairs())
            return True
        if self.peer_headers is None and (tag != ACK_VERSION or self.in_order):
            return False
        if tag == ACK_VERSION:
            if self._version_acked:
                raise Refused("aqueduct-V04: a second ACK_VERSION")
            if stream.is_datagram:
                raise Refused("aqueduct-V03: ACK_VERSION in a datagram")
            self._version_acked = True
        elif tag == ROUTE:
            if stream.channel is not None:
                raise Refused("aqueduct-F03: a second ROUTE_TO")
            stream.channel = reader.varint()
        elif tag > FORGET:
            raise Refused(f"aqueduct-F10: no frame begins with {tag}")
        elif stream.channel is None:
            raise Refused(f"aqueduct-F05: frame {tag} without ROUTE_TO")
        else:
            self._channel_frame(stream, stream.channel, tag, reader)
        return True

    def _connection_headers(self, stream: Incoming, pairs: Pairs) -> None:
        if stream.is_datagram:
            raise Refused("aqueduct-H07: CONNECTION_HEADERS in a datagram")
        if self.peer_headers is not None:
            raise Refused("aqueduct-H06: a second CONNECTION_HEADERS")
        self.peer_headers = pairs
        if self.me == 1:
            self._write(self._open(), bytes([HEADERS]) + header_data(self._headers), last=True)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._read(each)

    def _channel_frame(self, stream: Incoming, channel: int, tag: int, reader: Reader) -> None:
        by_sender = tag in (MESSAGE, COUNT, FINISH, CANCEL)
        is_mine = (channel & 1 == self.me and channel != 0) or (channel == 0 and self.me == 0)
        if tag == FORGET:
            if is_mine:
                raise Refused(f"aqueduct-T37: FORGET_CHANNEL for {channel}, which the other side did not make")
        elif (channel >> 1 & 1 != self.me) != by_sender:
            raise Refused(f"aqueduct-T09: frame {tag} on channel {channel} from the wrong side")
        if is_mine and channel not in self._issued:
            raise Refused(f"aqueduct-L02: channel {channel} was never made")
        if channel in self._gone:
            self._skip(tag, reader)
            if tag in (ACK, REPORT, CLOSE) and self.ends.get(channel) == "closed":
                raise Refused(f"aqueduct-L14: frame {tag} on channel {channel} behind CLOSE_RECEIVER")
            return
        if tag == FORGET:
            self._destroy(channel)
            self.ends[channel] = "forgotten"
        elif by_sender:
            self._from_sender(stream, channel, self._receiving.setdefault(channel, Receiving()), tag, reader)
        else:
            self._from_receiver(stream, channel, self._sending.setdefault(channel, Sending()), tag, reader)

    def _skip(self, tag: int, reader: Reader) -> None:
        if tag == MESSAGE:
            reader.varint(), reader.pairs(), reader.inner(), reader.inner()
        elif tag in (COUNT, FINISH) or tag == REPORT:
            reader.varint()
        if tag in (ACK, REPORT):
            reader.varints()

    def _from_sender(self, stream: Incoming, channel: int, state: Receiving, tag: int, reader: Reader) -> None:
        if tag == MESSAGE:
            self._message(stream, channel, state, reader)
            return
        if stream.is_datagram:
            raise Refused(f"aqueduct-S09: frame {tag} in a datagram")
        number = reader.varint() if tag in (COUNT, FINISH) else 0
        if state.total is not None:
            raise Refused(f"aqueduct-S12: frame {tag} on channel {channel} behind FINISH_SENDER")
        if tag in (COUNT, FINISH):
            if state.count_stream not in (None, stream.name):
                raise Refused(f"aqueduct-S11: counts of channel {channel} on a second stream")
            state.count_stream = stream.name
        if tag == COUNT:
            state.learned += number
            if not number:
                raise Refused("aqueduct-T19: a count of 0 is never sent")
            if state.learned > len(state.datagrams) and not self.loses_datagrams:
                raise Refused(f"carrier: {state.learned} datagrams counted, {len(state.datagrams)} have come")
        elif tag == FINISH:
            if state.reliable and max(state.reliable) >= number:
                raise Refused(f"aqueduct-S10: {number} messages in all, {max(state.reliable)} came")
            if state.learned < len(state.datagrams):
                raise Refused(f"aqueduct-S09: {len(state.datagrams)} datagrams, {state.learned} counted at the end")
            state.total = number
            self.ends[channel] = "finishing"
        else:
            self.ends[channel] = "cancelled"
            self.close(channel)

    def _message(self, stream: Incoming, channel: int, state: Receiving, reader: Reader) -> None:
        number, headers, entries = reader.varint(), reader.pairs(), reader.inner()
        attachments = []
        while entries.more():
            attachments.append((entries.varint(), entries.pairs()))
        payload = reader.inner().data
        known = state.datagrams if stream.is_datagram else state.reliable
        if number in known:
            raise Refused(f"aqueduct-S08: message {number} of channel {channel} came twice")
        if stream.is_datagram and number != len(known) and not self.loses_datagrams:
            raise Refused(f"aqueduct-S07: datagram {number} of channel {channel}, {len(known)} is next")
        if state.total is not None and not stream.is_datagram and number >= state.total:
            raise Refused(f"aqueduct-S10: message {number} of channel {channel}, {state.total} in all")
        if channel >> 2 & 1 and (state.datagrams or state.reliable):
            raise Refused(f"aqueduct-E26: a second message on the oneshot channel {channel}")
        if stream.is_datagram and number in self.deaf:
            known.add(number)
            return
        if stream.is_datagram and number < state.reported:
            known.add(number)  # it was overtaken by the count, and has been reported as lost
            return
        for attached, _ in attachments:
            if attached & 1 == self.me:
                raise Refused(f"aqueduct-T13: channel {attached} attached, which the other side did not make")
            if attached == 0 or attached in self._attached:
                raise Refused(f"aqueduct-T15: channel {attached} attached twice")
            self._attached.add(attached)
            if attached not in self._gone:
                i_send = attached >> 1 & 1 == self.me
                self._sending.setdefault(attached, Sending()) if i_send else self._receiving.setdefault(
                    attached, Receiving()
                )
        known.add(number)
        if not stream.is_datagram:
            state.unacked.append(number)
        self.inbox.setdefault(channel, []).append(Message(payload, headers, tuple(attachments)))

    def _from_receiver(self, stream: Incoming, channel: int, state: Sending, tag: int, reader: Reader) -> None:
        if stream.is_datagram:
            raise Refused(f"aqueduct-A08: frame {tag} in a datagram")
        if self._ack_streams.setdefault(channel, stream) is not stream:
            raise Refused(f"aqueduct-L12: frame {tag} of channel {channel} on a second stream")
        if tag == ACK:
            ranges = reader.varints()
            if not ranges or len(ranges) % 2 or 0 in ranges[1:]:
                raise Refused(f"aqueduct-T26: ranges {ranges}")
            at = 0
            for gap, length in zip(ranges[::2], ranges[1::2], strict=True):
                if at + gap + length > state.reliable:
                    raise Refused(f"aqueduct-A04: ack up to {at + gap + length}, {state.reliable} were sent")
                state.known |= {(True, number) for number in range(at + gap, at + gap + length)}
                at += gap + length
        elif tag == REPORT:
            if reader.varint() != channel:
                raise Refused(f"aqueduct-T28: a report on channel {channel} names another")
            ranges = reader.varints()
            if not ranges or 0 in ranges[1:] or ranges == [0]:
                raise Refused(f"aqueduct-T32: ranges {ranges}")
            if state.reported + sum(ranges) > state.counted:
                raise Refused(f"aqueduct-A11: report up to {state.reported + sum(ranges)}, {state.counted} counted")
            for place, length in enumerate(ranges):
                for number in range(state.reported, state.reported + length):
                    state.known.add((False, number))
                    self.reports.setdefault(channel, []).append((place % 2 == 0, number))
                    if place % 2:
                        self._lose(state.carried[False, number])
                state.reported += length
        else:
            self.unacked[channel] = state.reliable + state.datagrams - len(state.known)
            lost = [each for key, carried in state.carried.items() if key not in state.known for each in carried]
            if state.ended and state.stream is not None and not state.stream.ended:
                self._reset(state.stream)
            elif state.stream is not None:
                self._write(state.stream, b"", last=True)
            del self._sending[channel]
            self._gone.add(channel)
            self.ends[channel] = "closed"
            self._lose(lost)

    # ------------------------------------------------------------ what follows from them

    def _answer(self) -> None:
        for channel, state in list(self._receiving.items()):
            if state.unacked:
                self._write(self._ack_stream(channel), bytes([ACK]) + varbytes(_ack_ranges(state.unacked)))
                state.unacked.clear()
            if state.learned > state.reported:
                runs = _runs([each in state.datagrams - self.deaf for each in range(state.reported, state.learned)])
                report = varint(channel) + varbytes(runs)
                self._write(self._ack_stream(channel), bytes([REPORT]) + report)
                state.reported = state.learned
            if state.total is not None and len(state.reliable) == state.total:
                self.ends[channel] = "finished"
                self.close(channel)
        self._pump()

    def _destroy(self, channel: int) -> None:
        self._gone.add(channel)
        sending, receiving = self._sending.pop(channel, None), self._receiving.pop(channel, None)
        if sending is not None:
            self._reset(sending.stream)
            self._lose(each for carried in sending.carried.values() for each in carried)
        if receiving is not None:
            self._reset(receiving.acks)

    def _lose(self, channels: Iterable[int]) -> None:
        for channel in channels:
            if channel not in self._gone:
                self.forget(channel)


def _ack_ranges(numbers: list[int]) -> bytes:
    found: list[int] = []
    at = 0
    for number in sorted(numbers):
        if found and number == at:
            found[-1] += 1
        else:
            found += [number - at, 1]
        at = number + 1
    return b"".join(map(varint, found))


def _runs(answers: list[bool]) -> bytes:
    found = [0]
    for answer in answers:
        if answer != (len(found) % 2 == 1):
            found.append(0)
        found[-1] += 1
    return b"".join(map(varint, found))


class Wire:
    """Runs a peer on a socket, and cuts the line after so many bytes of a direction."""

    def __init__(
        self, peer: Peer, stream: trio.abc.Stream, *, cut_read: int | None = None, cut_write: int | None = None
    ) -> None:
        self.peer, self._stream = peer, stream
        self._reads, self._writes = cut_read, cut_write
        self.read = self.written = 0
        self.is_open = True

    async def until(self, fact: Callable[[], bool]) -> bool:
        """Take part in the conversation until something is so; False if the line or the peer's patience ended first."""
        await self.flush()
        while self.is_open and not fact():
            try:
                room = 65536 if self._reads is None else self._reads - self.read
                data = await self._stream.receive_some(room) if room else b""
            except trio.BrokenResourceError:
                data = b""
            self.read += len(data)
            if not data:
                if self._reads is None and self._writes is None:
                    self.peer.end()
                await self.hang_up()
                break
            self.peer.receive(bytes(data))
            await self.flush()
            if self.peer.refusals:
                await self.hang_up()
        return fact()

    async def flush(self) -> None:
        data, self.peer.out = bytes(self.peer.out), bytearray()
        if self._writes is not None:
            data = data[: self._writes - self.written]
        self.written += len(data)
        try:
            if data and self.is_open:
                await self._stream.send_all(data)
        except trio.BrokenResourceError:
            await self.hang_up()
        if self._writes is not None and self.written >= self._writes:
            await self.hang_up()

    async def hang_up(self) -> None:
        self.is_open = False
        await self._stream.aclose()
