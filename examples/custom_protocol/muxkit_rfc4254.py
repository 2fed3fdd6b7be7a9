"""The channels of SSH as a protocol of muxkit, in one file.

RFC 4254 describes how SSH carries many channels with windows over one encrypted connection. Here the same packets
travel over any transport of muxkit. Each packet stands behind its length, and TLS may do the encryption.

After `pip install ./examples/custom_protocol`, `muxkit.connect("rfc4254+tls://...")` opens sessions, and
`python -m muxkit_rfc4254` tries it. docs/how-to/protocol.md explains the parts of this file in its order.

Theory of operation
===================

Each side gives each channel a number of its own, and a packet names the number that its receiver has chosen. The side
that opens a channel learns the other number, and gets its first credit, with OPEN_CONFIRMATION.

    we send     OPEN -> EOF -> confirmed        EOF follows the queued data, and a request behind it confirms it
                OPEN -> over                    the peer wants no more ("eow@openssh.com"), or closes the channel
    we receive  OPEN -> ended                   EOF came
                OPEN -> stopped                 the application wants no more, and the peer is told with "eow"
    both        CLOSE is sent when both halves are done, or to give the channel up. A channel is removed once CLOSE has
                been sent and received, so its numbers are never ambiguous.

A channel that is given up says why with the request "exit-signal", which RFC 4254 has for programs that die. Messages
have four bytes of length in front of them (`muxkit.core.messages`), because the channels of RFC 4254 carry plain bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from struct import Struct
from typing import Any, Final, Literal

import trio

import muxkit
from muxkit import Limits, LocalProtocolError, Observer, RemoteProtocolError
from muxkit.core import Buffer, ChannelTable, Cursor, Ids, NeedMore, Reason
from muxkit.core.credit_sender import CreditSender
from muxkit.core.events import (
    Cancelled,
    ChannelFailed,
    Confirmed,
    Finished,
    GoingAway,
    Halves,
    LimitReached,
    Opened,
    Pong,
    Received,
    Stopped,
)
from muxkit.core.messages import PREFIX, MessageReader
from muxkit.core.mux_state import MuxState
from muxkit.core.stream_engine import StreamMuxEngine
from muxkit.core.window_receiver import WindowReceiver
from muxkit.runtime import frames_of
from muxkit.runtime.channel import MuxChannel
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf
from muxkit.runtime.mux_session import MuxSession, running
from muxkit.runtime.pumps.stream import StreamPump

# --- the grammar

U32: Final = Struct(">I")
DATA_HEADER: Final = Struct(">IBII")  # size of the packet, CHANNEL_DATA, number of the channel, size of the data
U32_MAX: Final = 2**32 - 1
MAX_PACKET: Final = 35_000  # bytes that each implementation must be able to process (RFC 4253, section 6.1)
MAX_DATA: Final = 32_768  # bytes of payload in one CHANNEL_DATA
FIRST_WINDOW: Final = 256 * 1024  # bytes that a channel may send at first; the window grows with use
KEEPALIVE: Final = 20.0  # seconds of silence before a ping, and seconds that its answer may take

STOP: Final = b"eow@openssh.com"  # the side that sends it takes no more data on this channel
WHY: Final = b"exit-signal"  # precedes the CLOSE of a channel that is given up, with a reason
CONFIRM: Final = b"keepalive@openssh.com"  # no one knows this request of a channel, so its answer is always a FAILURE
PING: Final = b"keepalive@openssh.com"  # the same as a request about the connection
DRAIN: Final = b"no-more-channels@muxkit"


class Number(IntEnum):
    """The numbers of the packets (RFC 4254, section 9; DISCONNECT is from RFC 4253)."""

    DISCONNECT = 1
    GLOBAL_REQUEST = 80
    REQUEST_SUCCESS = 81
    REQUEST_FAILURE = 82
    CHANNEL_OPEN = 90
    OPEN_CONFIRMATION = 91
    OPEN_FAILURE = 92
    WINDOW_ADJUST = 93
    CHANNEL_DATA = 94
    CHANNEL_EOF = 96
    CHANNEL_CLOSE = 97
    CHANNEL_REQUEST = 98
    CHANNEL_SUCCESS = 99
    CHANNEL_FAILURE = 100


ADMINISTRATIVELY_PROHIBITED: Final = 1  # why a channel is refused
RESOURCE_SHORTAGE: Final = 4
BY_APPLICATION: Final = 11  # why a connection ends


def packet(number: Number, *fields: int | bytes) -> bytes:
    """Return a packet with its length in front: a bool takes one byte, a number four, bytes have their length."""
    body = bytearray([number])
    for field in fields:
        if isinstance(field, bytes):
            body += U32.pack(len(field)) + field
        else:
            body += bytes([field]) if isinstance(field, bool) else U32.pack(field)
    return U32.pack(len(body)) + body


def number_in(fields: Cursor) -> int:
    return fields.uint(4, "big")


def string_in(fields: Cursor) -> bytes:
    return fields.exact(number_in(fields))


# --- the state: one object for each channel, and what they share


class SshChannel:
    """A channel inside the engine: its two numbers, and its two halves."""

    def __init__(self, state: State, *, is_ours: bool) -> None:
        self.is_ours: bool = is_ours
        self.number: int = state.channels.allocate()
        self.peer: int | None = None  # the number that the peer has chosen; None until it confirms
        self.max_data: int = MAX_DATA
        self.grant: int = 0  # credit for the peer that waits to be written
        self.is_closing: bool = False  # we have given the channel up, or sent CLOSE
        self.reason: bytes = b""  # why the side that gives the channel up does so
        self.sender: SshSender = SshSender(state, self)
        self.receiver: SshReceiver = SshReceiver(state, self)

    @property
    def label(self) -> str:
        return f"channel {self.number}"


class State(MuxState):
    """What the channels of a connection share."""

    def __init__(self, limits: Limits, observer: Observer | None) -> None:
        super().__init__(limits, observer, floor=limits.channel_floor, first=FIRST_WINDOW)
        self.channels: ChannelTable[SshChannel] = ChannelTable(limits, Ids(0, U32_MAX))
        self.frames: list[bytes] = []  # packets that go out in front of data
        self.granting: dict[SshChannel, None] = {}  # channels with credit to write

    def tell(self, channel: SshChannel, number: Number, *fields: int | bytes) -> None:
        """Queue a packet about a channel."""
        assert channel.peer is not None  # as the peer knows the channel
        self.frames.append(packet(number, channel.peer, *fields))

    def reply(self, number: Number, *fields: int | bytes) -> None:
        """Queue a packet that the peer has caused. A peer that never reads must not fill our memory."""
        self.frames.append(packet(number, *fields))
        if len(self.frames) > self.limits.pongs:
            most = self.limits.pongs
            raise RemoteProtocolError(f"the peer doesn't read: {most} answers wait to be written", limit="pongs")

    def close_if_done(self, channel: SshChannel) -> None:
        """Send CLOSE if both halves are done and the peer knows the channel."""
        receiver = channel.receiver
        is_done = channel.sender.is_ended and (receiver.has_ended or receiver.is_stopped)
        if is_done and channel.peer is not None and not channel.is_closing:
            channel.is_closing = True
            self.tell(channel, Number.CHANNEL_CLOSE)

    def give_up(self, channel: SshChannel, reason: Reason) -> None:
        """Close a channel although messages may be missing, and say why."""
        if not channel.is_closing:
            channel.is_closing = True
            channel.reason = reason.encode()
            channel.sender.drop_all()
            channel.receiver.retire()
            if channel.peer is not None:
                self.tell_why(channel)

    def tell_why(self, channel: SshChannel) -> None:
        """Send CLOSE, with the reason in front of it."""
        if channel.reason:
            self.tell(channel, Number.CHANNEL_REQUEST, WHY, False, b"ABRT", False, channel.reason, b"")
        self.tell(channel, Number.CHANNEL_CLOSE)

    def remove(self, channel: SshChannel) -> None:
        self.channels.remove(channel.number)
        channel.sender.drop_all()
        channel.receiver.retire()
        channel.is_closing = True


# --- the two halves of a channel


class SshSender(CreditSender):
    """Sends messages with their length in front, as far as the peer's window goes."""

    def __init__(self, state: State, channel: SshChannel) -> None:
        super().__init__(state, 0)
        self._state = state
        self.channel: SshChannel = channel
        self.is_ending: bool = False  # nothing more may be queued
        self.is_ended: bool = False  # EOF was written, or the peer wants no more
        self.is_confirmed: bool = False

    @property
    def label(self) -> str:
        return self.channel.label

    def check_size(self, size: int) -> None:
        if size > self._state.limits.message:
            raise LocalProtocolError(f"message too large: expected at most {self._state.limits.message}, got {size}")

    def has_room(self, size: int) -> bool:
        return super().has_room(size + PREFIX.size)

    def send(self, message: bytes) -> None:
        self.check_size(len(message))
        self._state.messages_sent += 1
        self.push(PREFIX.pack(len(message)) + message)

    def finish(self, payload: bytes = b"") -> None:
        if payload:
            raise LocalProtocolError("EOF carries no payload; send it as a message before")
        self.is_ending = True
        self._state.scheduler.add(self)

    def cancel(self, reason: Reason) -> None:
        self._state.give_up(self.channel, reason)

    def is_ready(self) -> bool:
        if self.channel.peer is None:
            return False
        return self.credit_out > 0 if self.items else self.is_ending and not self.is_ended

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        written = 0
        while written < budget and self.is_ready():
            peer = self.channel.peer
            assert peer is not None  # or we would not be ready
            if self.items:
                place = len(out)
                out.append(b"")  # the header, once the size is known
                size = self.take(min(budget - written, self.channel.max_data), out)
                out[place] = DATA_HEADER.pack(DATA_HEADER.size - U32.size + size, Number.CHANNEL_DATA, peer, size)
                written += DATA_HEADER.size + size
            else:
                self.is_ended = True
                end = packet(Number.CHANNEL_EOF, peer) + packet(Number.CHANNEL_REQUEST, peer, CONFIRM, True)
                out.append(end)
                written += len(end)
                self._state.close_if_done(self.channel)
        self.written()
        return written

    def confirmed(self) -> None:
        """The peer has processed our EOF."""
        if self.is_ended and not self.is_confirmed:
            self.is_confirmed = True
            self._state.events.append(Confirmed(self))

    def stopped(self) -> None:
        """The peer wants no more."""
        if not self.is_confirmed:
            self._state.events.append(Stopped(self))
            self.drop_all()
            self._state.close_if_done(self.channel)

    def drop_all(self) -> None:
        self.is_ending = self.is_ended = self.is_confirmed = True
        super().drop_all()


class SshReceiver(WindowReceiver):
    """Puts messages together, within the window that it has granted."""

    def __init__(self, state: State, channel: SshChannel) -> None:
        super().__init__(state)
        self._state = state
        self.channel: SshChannel = channel
        self.is_stopped: bool = False  # the application wants no more
        self.has_ended: bool = False
        self._reader = MessageReader(state.limits.message)
        self._reader.opening = b""  # the packet CHANNEL_OPEN has brought it

    @property
    def label(self) -> str:
        return self.channel.label

    def stop(self, reason: Reason) -> None:
        if not (self.is_stopped or self.has_ended):
            self.is_stopped = True
            self.consumed((), self._reader.partial)
            if self.channel.peer is not None:
                self._state.tell(self.channel, Number.CHANNEL_REQUEST, STOP, False)
            self._state.close_if_done(self.channel)

    def grant(self, amount: int) -> None:
        self.channel.grant += amount
        self._state.granting[self.channel] = None

    def receive(self, data: bytes) -> None:
        """Data came: count it against the window, and report the messages that are complete."""
        if self.has_ended:
            raise RemoteProtocolError(f"data on {self.label} after EOF")
        self.arrived(len(data))
        if self.is_stopped:
            self.consumed((), len(data))
            return
        before = self._reader.partial
        try:
            messages = self._reader.feed(data)
        except RemoteProtocolError as error:
            self.consumed((), before + len(data))
            self._reader = MessageReader(0)
            self._fail(error)
            return
        kept = sum(map(len, messages)) + self._reader.partial - before
        self.consumed((), len(data) - kept)  # the lengths in front of the messages
        if messages:
            self._state.events.append(Received(self, messages))
        if self._reader.missing or self.window.unfinished:
            self.needs(self._reader.missing)  # a message may be larger than the window

    def ended(self) -> None:
        """EOF came."""
        if self.has_ended:
            raise RemoteProtocolError(f"a second EOF on {self.label}")
        if not (self.is_stopped or self._reader.is_between_messages):
            self._fail(RemoteProtocolError(f"{self.label} ended in the middle of a message"))
            return
        self._state.events.append(Finished(self))
        self.retire()
        self._state.close_if_done(self.channel)

    def retire(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if not self.is_stopped:
                self.consumed((), self._reader.partial)
            super().retire()

    def _fail(self, error: RemoteProtocolError) -> None:
        """Give the channel up because of what the peer sent on it; the connection goes on."""
        self._state.give_up(self.channel, Reason(str(error), 400))
        self._state.events.append(ChannelFailed(Halves(self.channel.sender, self), error))


# --- the engine


class Engine(StreamMuxEngine):
    """One end of a connection, without I/O: packets and commands go in, events and packets come out."""

    def __init__(self, limits: Limits, observer: Observer | None = None) -> None:
        self._state = State(limits, observer)
        super().__init__(self._state, keepalive=KEEPALIVE, keepalive_timeout=KEEPALIVE)
        self._pings: deque[object] = deque()
        self._peer_takes_no_channels = False

    @property
    def channels(self) -> int:
        return len(self._state.channels)

    @property
    def places(self) -> int:
        return self._state.channels.census.places

    @property
    def peer_takes_no_channels(self) -> bool:
        return self._peer_takes_no_channels

    def live_channels(self) -> list[Halves]:
        return [Halves(each.sender, each.receiver) for each in self._state.channels]

    # commands

    def open_channel(self, opening: bytes) -> Halves:
        if len(opening) > MAX_DATA:
            raise LocalProtocolError(f"opening too large: expected at most {MAX_DATA} bytes, got {len(opening)}")
        channel = SshChannel(self._state, is_ours=True)
        self._state.channels.add_ours(channel.number, channel)
        first = channel.receiver.credit_in
        self._state.frames.append(
            packet(Number.CHANNEL_OPEN, b"channel@muxkit", channel.number, first, MAX_DATA, opening)
        )
        return Halves(channel.sender, channel.receiver)

    def accept(self, channel: SshChannel) -> None:
        """Confirm a channel of the peer, with its first credit."""
        self._state.channels.accept(channel.number)
        first = channel.receiver.credit_in
        self._state.tell(channel, Number.OPEN_CONFIRMATION, channel.number, first, MAX_DATA)
        if channel.sender.is_ending:
            self._state.scheduler.add(channel.sender)

    def refuse(self, channel: Any, reason: Reason) -> None:  # noqa: ANN401 - a `SshChannel`, as `Opened` has it
        self._state.tell(channel, Number.OPEN_FAILURE, ADMINISTRATIVELY_PROHIBITED, reason.encode(), b"")
        self._state.remove(channel)

    def ping(self, key: object) -> None:
        self._pings.append(key)
        self._state.frames.append(packet(Number.GLOBAL_REQUEST, PING, True))

    def go_away(self, reason: Reason) -> None:
        self._state.frames.append(packet(Number.GLOBAL_REQUEST, DRAIN, False))

    def farewell(self, reason: Reason) -> bytes:
        return packet(Number.DISCONNECT, BY_APPLICATION, reason.encode(), b"")

    # packets of the peer

    def parse(self, data: bytes, position: int) -> int:
        packets = self.frames_at_once
        while len(data) - position >= U32.size and not self.over:
            if not packets:
                self.unparsed: int = len(data) - position
                break
            (size,) = U32.unpack_from(data, position)
            if not 0 < size <= MAX_PACKET:
                raise RemoteProtocolError(f"expected a packet of 1 to {MAX_PACKET} bytes, got {size}")
            start, end = position + U32.size, position + U32.size + size
            if end > len(data):
                break
            try:
                self._take(data[start], Cursor(data[start:end], 1))
            except NeedMore as error:
                raise RemoteProtocolError(f"packet {data[start]} of {size} bytes is too short") from error
            position = end
            packets -= 1
        return position

    def _take(self, number: int, fields: Cursor) -> None:
        """Apply one packet."""
        state = self._state
        if state.observer is not None:
            state.observer.frame("in", "connection", f"packet {number}", fields.remaining)
        match number:
            case Number.CHANNEL_DATA:
                channel = self._channel(fields)
                if not channel.is_closing:
                    channel.receiver.receive(string_in(fields))
            case Number.WINDOW_ADJUST:
                self._channel(fields).sender.granted(number_in(fields), cap=U32_MAX)
            case Number.CHANNEL_OPEN:
                self._opened(fields)
            case Number.OPEN_CONFIRMATION:
                self._confirmed(self._ours(fields), fields)
            case Number.OPEN_FAILURE:
                channel = self._ours(fields)
                number_in(fields)  # the code; the text says more
                channel.reason = string_in(fields)
                self._gone(channel)
            case Number.CHANNEL_EOF:
                channel = self._channel(fields)
                if not channel.is_closing or channel.receiver.is_stopped:
                    channel.receiver.ended()
            case Number.CHANNEL_CLOSE:
                channel = self._channel(fields)
                if not channel.is_closing:
                    state.tell(channel, Number.CHANNEL_CLOSE)
                    self._gone(channel)
                else:
                    state.events += [Confirmed(channel.sender), Confirmed(channel.receiver)]
                    state.remove(channel)
            case Number.CHANNEL_REQUEST:
                self._requested(self._channel(fields), string_in(fields), bool(fields.byte()), fields)
            case Number.CHANNEL_SUCCESS | Number.CHANNEL_FAILURE:
                self._channel(fields).sender.confirmed()
            case Number.GLOBAL_REQUEST:
                if string_in(fields) == DRAIN:
                    self._peer_takes_no_channels = True
                    state.events.append(GoingAway(Reason()))
                elif fields.byte():
                    state.reply(Number.REQUEST_FAILURE)
            case Number.REQUEST_SUCCESS | Number.REQUEST_FAILURE if self._pings:
                state.events.append(Pong(self._pings.popleft()))
            case Number.DISCONNECT:
                number_in(fields)
                state.over = True
                state.events.append(GoingAway(Reason.decode(string_in(fields)) or Reason("disconnected")))
            case _:
                raise RemoteProtocolError(f"unexpected packet {number}")

    def _channel(self, fields: Cursor) -> SshChannel:
        """Read the number of a channel that both sides know."""
        number = number_in(fields)
        channel = self._state.channels.get(number)
        if channel is None or channel.peer is None:
            raise RemoteProtocolError(f"a packet about channel {number}, which isn't open")
        return channel

    def _ours(self, fields: Cursor) -> SshChannel:
        """Read the number of a channel that the peer hasn't confirmed yet."""
        number = number_in(fields)
        channel = self._state.channels.get(number)
        if channel is None or channel.peer is not None:
            raise RemoteProtocolError(f"an answer to the opening of channel {number}, which isn't being opened")
        return channel

    def _opened(self, fields: Cursor) -> None:
        state = self._state
        string_in(fields)  # the kind of channel: any is welcome
        peer, credit, max_data = number_in(fields), number_in(fields), number_in(fields)
        opening = string_in(fields) if fields.remaining else b""
        if state.channels.census.theirs >= self.limits.channels:
            state.events.append(LimitReached(self.limits.bound_of_channels))
            state.reply(Number.OPEN_FAILURE, peer, RESOURCE_SHORTAGE, b"503 too many channels", b"")
            return
        channel = SshChannel(state, is_ours=False)
        channel.peer, channel.max_data = peer, max(1, min(MAX_DATA, max_data))
        state.channels.add_theirs(channel.number, channel)
        channel.sender.granted(credit)
        state.events.append(Opened(channel, opening))

    def _confirmed(self, channel: SshChannel, fields: Cursor) -> None:
        """The peer takes a channel that we have opened, which we may have given up meanwhile."""
        state = self._state
        channel.peer, credit = number_in(fields), number_in(fields)
        channel.max_data = max(1, min(MAX_DATA, number_in(fields)))
        if channel.is_closing:
            state.tell_why(channel)
            return
        channel.sender.granted(credit)
        if channel.receiver.is_stopped:
            state.tell(channel, Number.CHANNEL_REQUEST, STOP, False)
        if channel.sender.is_ending:
            state.scheduler.add(channel.sender)

    def _requested(self, channel: SshChannel, name: bytes, wants_reply: bool, fields: Cursor) -> None:
        if name == WHY:
            string_in(fields)  # the name of a signal
            fields.byte()  # whether it left a core dump
            channel.reason = string_in(fields)[:4096]
        elif name == STOP:
            channel.sender.stopped()
        elif wants_reply and not channel.is_closing:
            assert channel.peer is not None  # as `_channel` returned it
            self._state.reply(Number.CHANNEL_FAILURE, channel.peer)

    def _gone(self, channel: SshChannel) -> None:
        """The peer has refused or closed a channel, perhaps before we were done with it."""
        state, sender, receiver = self._state, channel.sender, channel.receiver
        breaks_off = not (channel.is_ours or sender.is_ended or receiver.has_ended)
        if breaks_off:
            self.starts.broken_off(state.now)
        if not receiver.has_ended:
            state.events.append(Cancelled(receiver, channel.reason, breaks_off))
        if not sender.is_confirmed:
            state.events.append(Confirmed(sender) if sender.is_ended else Stopped(sender, channel.reason))
        elif channel.is_closing:  # we had given it up before the peer refused it
            state.events += [Confirmed(sender), Confirmed(receiver)]
        state.remove(channel)

    # writing

    def has_output(self) -> bool:
        return not self.over and bool(self._state.scheduler.line or self._state.frames or self._state.granting)

    def write(self, limit: int, out: list[Buffer]) -> None:
        """Write what waits about channels, then data in fair order, then what the ends among it have caused."""
        state = self._state
        for channel in state.granting:
            if not channel.is_closing:
                state.tell(channel, Number.WINDOW_ADJUST, channel.grant)
                channel.grant = 0
        state.granting.clear()
        for _ in range(2):
            out += state.frames
            state.frames = []
            state.scheduler.pull(limit, out)


# --- the Trio side


class Connection(MuxConnection[Engine, MuxChannel]):
    """Joins the engine to a byte stream. Everything else is inherited."""

    channel_type = MuxChannel

    def __init__(self, stream: trio.abc.Stream, limits: Limits, observer: Observer | None) -> None:
        engine = Engine(limits, frames_of(observer))
        super().__init__(engine, stream, "rfc4254", limits, observer, outbox=engine.waiting)
        self.pump = StreamPump(stream, engine, self, outbox=engine.waiting)

    def handle_opened(self, event: Opened) -> None:
        if (reason := self.refusal_of(self.incoming, event.opening)) is not None:
            self.engine.refuse(event.channel, reason)
        else:
            self.engine.accept(event.channel)
            self.offer(self.incoming, self.new_channel(event.channel, event.opening))
        self.request_write()

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        return self.halves_of(self.engine.live_channels())


class Session(MuxSession[Connection, MuxChannel]):
    """What applications hold; this protocol adds no calls of its own."""


class Plugin:
    """What `muxkit.connect` and the servers load under the name `rfc4254`."""

    options: frozenset[str] = frozenset()

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
    ) -> AbstractAsyncContextManager[Session]:
        return running(lambda: Session(Connection(stream, limits, observer)), linger)


protocol: Plugin = Plugin()


# --- an attempt: `python -m muxkit_rfc4254`


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def main() -> None:
    async with muxkit.open_server(echo, "rfc4254+tcp://127.0.0.1:0") as server:
        async with muxkit.connect(server.url) as session, session.open("greeting") as channel:
            await channel.send(b"hello over RFC 4254")
            print((await channel.receive()).decode())


if __name__ == "__main__":
    trio.run(main)
