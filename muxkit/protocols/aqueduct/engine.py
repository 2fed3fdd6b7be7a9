"""The Aqueduct engine: one side of a connection, without I/O.

The bytes of streams, datagrams and the session's commands go in. Events, and the bytes and datagrams to send, come out.
This module has the interface for the link, and the commands that don't concern a single channel. The commands for
sending and receiving messages are methods of the halves (`send` and `receive`). The module `state` explains how
channels begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, overload

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Clock, Reason, Reset, StartPace, StreamControl, StreamId
from muxkit.core.events import Halves, HungUp, Silent
from muxkit.core.mux_engine import MuxEngine
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.events import Event, Parted
from muxkit.protocols.aqueduct.frames import Pairs, Role
from muxkit.protocols.aqueduct.half import EngineHalf
from muxkit.protocols.aqueduct.handshake import Handshake
from muxkit.protocols.aqueduct.openings import NAME, OPENING_SIZE, encode_opening
from muxkit.protocols.aqueduct.reader import Reader
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender, Ticket
from muxkit.protocols.aqueduct.state import State, Timer

CHANNEL_PRICE: Final = 5 * 1024  # bytes of memory for a half, its session objects and its share of a handler's task


class Engine(MuxEngine):
    """One side of an Aqueduct connection. It implements the interface `muxkit.core.MultistreamEngine`.

    A command that raises `LocalProtocolError` has changed nothing. The session must pass every `Arrived` message to
    `EngineReceiver.consumed`, or the engine grants no new credit. It must call `accept` for every half that the
    application takes.

    Args:
        role: Whether this side is the client or the server.
        config: The settings of the protocol.
        headers: The connection headers of this side.
        limits: Limits for memory, time and numbers of channels.
        observer: Receives notifications about the frames.
        clock: Commands read the time from this clock.
    """

    def __init__(
        self,
        role: Role,
        config: Config | None = None,
        *,
        headers: Pairs = (),
        limits: Limits | None = None,
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config: Config = config or Config()
        self.limits: Limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self.role: Role = role
        self.observer: Observer | None = observer
        self.most_streams: int = 2 * self.limits.channels + self.config.streams
        self.opener: EngineSender | None = None
        """The sender on which `open_channel` opens muxkit's channels, once there is one."""
        handshake = frames.encode_frame(frames.ConnectionHeaders(tuple(headers)))
        self.state: State = State(role, self.config, self.limits, observer, clock)
        self.state.check_headers(handshake, headers, self.config.connection_headers)
        self.reader: Reader = Reader(self.state, Handshake(self.state, handshake), self.most_streams)
        self.starts: StartPace = self.state.starts
        self.bytes_received: int = 0
        """Bytes of streams and datagrams."""

    def start(self, now: float) -> None:
        """Give the peer `Limits.handshake` seconds from now for its connection headers."""
        self.state.now = now
        self.state.deadlines.set(Timer.HANDSHAKE, now + self.limits.handshake)

    # --- properties for the session

    @property
    def over(self) -> bool:
        """True once the connection has ended."""
        return self.state.over

    @property
    def entrypoint(self) -> EngineHalf:
        """The client's sender, or the server's receiver."""
        return self.state.entrypoint

    @property
    def halves(self) -> list[EngineHalf]:
        """All live halves of this side, the entrypoint's among them."""
        return [*self.state.table]

    @property
    def channels(self) -> int:
        return len(self.state.table)

    @property
    def most_ours(self) -> int:
        """How many channels this side may make.

        An eighth of the peer's limit is left free, because it may not have heard of the end of the latest channels.
        """
        return self.limits.channels - self.limits.channels // 8

    @property
    def places(self) -> int:
        # A receiver that we close is gone immediately, but the peer has the channel until it hears of that.
        ours = self.state.table.census.ours + len(self.state.closing)
        return (self.most_ours - ours) // 2

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.opener is not None and (self.opener.gone or self.opener.cancelling)

    @property
    def outbox(self) -> int:
        return self.state.outbox

    @property
    def messages_sent(self) -> int:
        return self.state.messages_sent

    @property
    def frames(self) -> int:
        """Frames that were received."""
        return self.reader.frames

    # --- commands

    @overload
    def channel(
        self, *, sends: Literal[True], oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[EngineSender, Ticket]: ...
    @overload
    def channel(
        self, *, sends: Literal[False], oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[EngineReceiver, Ticket]: ...
    def channel(self, *, sends: bool, oneshot: bool = False, headers: Pairs = ()) -> tuple[EngineHalf, Ticket]:
        """Make a channel: the half that stays here, and a ticket for the other one. It has an id once that is sent."""
        self.state.check_alive()
        ticket = self.state.make_ticket(sends=sends, oneshot=oneshot, headers=self.state.encode(headers))
        return ticket.half, ticket

    def open_channel(self, opening: bytes) -> Halves:
        """Open a two-way channel of muxkit on `opener`, which must have room for its message."""
        if self.opener is None:
            raise LocalProtocolError("no channel can be opened before the client has sent its first message")
        payload, headers = encode_opening(opening)
        sender, to_sender = self.channel(sends=True)
        receiver, to_receiver = self.channel(sends=False)
        self.opener.transmit(payload, headers=headers, attachments=(to_sender, to_receiver))
        return Halves(sender, receiver)

    def size_of_opening(self, opening: bytes) -> int:
        """Return how much room the message of an opening needs; raises `LocalProtocolError` if it is too large."""
        payload, headers = encode_opening(opening)
        self.state.check_size(len(payload) + len(self.state.encode(headers)))
        return OPENING_SIZE + len(payload) + len(dict(headers).get(NAME, b""))

    def accept(self, half: EngineHalf) -> None:
        """Note that the application has taken a half that came."""
        self.state.accept(half)

    def refuse(self, channel: Halves, reason: Reason) -> None:
        super().refuse(channel, reason)
        if channel.receiver is not None:
            channel.receiver.stop(reason)

    def forget(self, half: EngineHalf) -> None:
        """Discard a channel that we made, both halves of it, whatever is on its way."""
        self.state.forget(half)

    def charge_failure(self) -> None:
        """Count a failure of local work on a channel that the peer opened, as if the peer had cancelled it."""
        self.state.count_reset()

    def ping(self, key: object) -> None:
        raise LocalProtocolError("Aqueduct has no ping; the link may measure the round trip")

    def go_away(self, reason: Reason) -> None:
        """Do nothing: a side that takes no new channels closes the receiver on which they are opened."""

    def farewell(self, reason: Reason) -> bytes:
        """Return the encoded reason, which the goodbye of the link carries."""
        return reason.encode()

    # --- what the link brings; a violation ends the connection and is not raised

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool, now: float) -> Sequence[Event]:
        """Take in bytes of a stream, and return what happened."""
        if self.state.over:
            return ()
        self.state.now = now
        self.take_stream(stream, data, fin=fin)
        return self.events()

    def take_stream(self, stream: StreamId, data: bytes, *, fin: bool) -> None:
        try:
            self.reader.receive_stream(stream, data, 0, len(data), fin=fin)
        except RemoteProtocolError as error:
            self.state.fail_at(f"stream {stream}", error)
        self.bytes_received = self.reader.bytes_received

    def receive_reset(self, stream: StreamId, now: float) -> Sequence[Event]:
        """The peer has reset a stream that it wrote."""
        if not self.state.over:
            self.state.now = now
            self.take_reset(stream)
        return self.events()

    def take_reset(self, stream: StreamId) -> None:
        try:
            self.reader.reset(stream)
        except RemoteProtocolError as error:
            self.state.fail_at(f"stream {stream}", error)

    def receive_stopped(self, stream: StreamId, now: float) -> Sequence[Event]:
        """The peer wants no more of a stream of ours: it is reset, and a sender that needs it gives up."""
        if not self.state.over:
            self.state.now = now
            self.take_stopped(stream)
        return self.events()

    def take_stopped(self, stream: StreamId) -> None:
        try:
            self.reader.stopped(stream)
        except RemoteProtocolError as error:
            self.state.fail_at(f"stream {stream}", error)

    def receive_datagram(self, data: bytes, now: float) -> Sequence[Event]:
        """Take in one datagram, and return what happened."""
        if not self.state.over:
            self.state.now = now
            self.take_datagram(data)
        return self.events()

    def take_datagram(self, data: bytes) -> None:
        self.reader.bytes_received += len(data)
        self.bytes_received = self.reader.bytes_received
        try:
            self.reader.receive_datagram(data)
        except RemoteProtocolError as error:
            self.state.fail_at(f"datagram of {len(data)} bytes", error)

    def take_reason(self, reason: Reason) -> None:
        """The carrier brought the reason for which the peer ends the connection."""
        if not self.state.over:
            self.state.events.append(Parted(reason))

    def receive_closed(self, now: float, *, clean: bool = True) -> Sequence[Event]:
        """The link is closed: nothing more comes, and nothing more can be sent."""
        if not self.state.over:
            self.state.now = now
            alive = [half for half in self.halves if half is not self.entrypoint]
            self.state.stop(HungUp(clean and not alive))
        return self.events()

    def fail(self, error: RemoteProtocolError) -> None:
        """End the connection, because the peer broke a rule of the link."""
        self.state.fail(error)

    def set_rtt(self, seconds: float) -> None:
        """Set the round-trip time that the link has measured."""
        self.state.rtt = seconds

    def keeps_order(self) -> None:
        """On this link no datagram is overtaken by bytes that were written after it, so none has to be waited for."""
        self.state.in_order = True

    def missing(self, stream: StreamId) -> int:
        return self.reader.missing(stream)

    # --- what the link takes

    def events(self) -> Sequence[Event]:
        """Take the events that commands and writing have caused, oldest first."""
        events = self.state.events
        if not events:
            return ()
        self.state.events = []
        return events

    def has_output(self, may_open: bool = True) -> bool:
        state = self.state
        if state.over:
            return False
        streams = state.streams
        has_bytes = streams.has_output(may_open) or bool(state.datagram_senders)
        return has_bytes or self.reader.has_control or bool(streams.resets)

    def control_to_run(self) -> Sequence[StreamControl]:
        resets = self.state.streams.resets
        control = [*map(Reset, resets), *self.reader.take_control()]
        resets.clear()
        return () if self.state.over else control

    def next_stream(self, may_open: bool) -> StreamId | None:
        return None if self.state.over else self.state.streams.next(may_open)

    def stream_to_send(self, stream: StreamId, limit: int) -> tuple[bytes, bool]:
        buffers, _, is_last = self.state.streams.pull(stream, limit)
        return b"".join(buffers), is_last

    def stream_writable(self, stream: StreamId) -> None:
        self.state.streams.writable(stream)

    def datagram_to_send(self, limit: int) -> bytes | None:
        return None if self.state.over else self.state.next_datagram(limit)

    # --- time

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`."""
        return None if self.state.over else self.state.deadlines.next

    def handle_deadline(self, now: float) -> Sequence[Event]:
        """Act on the timers that are due, and return what happened."""
        state = self.state
        if state.over:
            return ()
        state.now = max(now, state.now)
        try:
            for timer in state.deadlines.expired(now):
                if self.observer is not None:
                    self.observer.timer(timer.value)
                match timer:
                    case Timer.FLUSH:
                        state.flush()
                    case Timer.REPORT:
                        state.report(now)
                    case Timer.STRAY:
                        state.drop_strays(now)
                    case Timer.STALL:
                        if self.reader.check_stall():
                            state.stop(Silent(self.limits.stall))
                    case Timer.HANDSHAKE:
                        raise RemoteProtocolError(
                            f"no connection headers after {self.limits.handshake:g} s", limit="handshake"
                        )
        except RemoteProtocolError as error:
            state.fail(error)
        return self.events()
