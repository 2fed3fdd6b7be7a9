"""The yamux engine: received bytes and commands go in, events and bytes to send come out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Keepalive, Outbox, Reason, StallWatch
from muxkit.core.events import Failed, GoingAway, Halves, HungUp, Pong, Probed, Silent
from muxkit.core.mux_engine import MuxEngine
from muxkit.protocols.yamux.config import Config
from muxkit.protocols.yamux.events import LimitReached
from muxkit.protocols.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    HEADER_SIZE,
    PING,
    RST,
    SESSION,
    SYN,
    WINDOW_UPDATE,
    Code,
    encode_header,
    observe_frame,
    observe_written,
)
from muxkit.protocols.yamux.receive import Kind, StreamReceiver
from muxkit.protocols.yamux.send import StreamSender
from muxkit.protocols.yamux.state import CHANNEL_PRICE, State, Stream, Timer

PROTOCOL_ERROR: Final = Reason("the peer says that this side broke a rule of yamux", 400)
INTERNAL_ERROR: Final = Reason("the peer has an internal error", 500)
TOLD_CHANNELS: Final = 64
"""Channels on which the peer learns why the session ends; more would delay the end of large sessions."""
LONGEST_REASON: Final = 4096
"""Bytes of a reason that are kept."""
UNKNOWN_CODE: Final = "the peer ends the session with a code that yamux doesn't have"


class Engine(MuxEngine):
    """One end of a yamux connection; a `StreamEngine`.

    `receive_bytes` and `handle_deadline` return what happened. `events` returns what commands and writing caused. A
    peer that breaks a rule gives one last event, `Failed`, and `farewell` then has the go-away for it.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        is_client: bool,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config: Config = config or Config()
        self.limits: Limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._observer = observer
        self._state = State(self.config, self.limits, observer, is_client=is_client)
        self.starts = self._state.starts
        self.bytes_received: int = 0
        self.waiting: Outbox = self._state.outbox
        """The counter behind `outbox`, for frequent reads."""
        self.frames_at_once: int = sys.maxsize
        """The most frames that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """Received bytes behind the first `frames_at_once` frames; `receive_bytes(b"", now)` parses more of them."""
        self.over: bool = False
        self.hung_up_cleanly: bool = False
        self.takes_streams: bool = False
        """True if the application takes streams of bytes, so that a stream needn't show its first bytes to be taken."""
        self._peer_is_going_away = False
        self.is_going_away: bool = False
        """True once this side has sent a go-away: further streams of the peer are reset."""
        self._has_failed = False
        self._is_started = False
        self._rest = b""  # received and not parsed
        self._left = 0  # bytes of the data frame that are still to come
        self._receiver: StreamReceiver | None = None  # takes those bytes; None if they are dropped
        self._fin = False  # the data frame carries a FIN, which counts behind its last byte
        self._reset: Stream | None = None  # the stream that the data frame resets; its payload is the reason
        self._reason = b""
        self._user_pings: dict[int, object] = {}
        deadlines = self._state.deadlines
        self._keepalive = Keepalive(
            deadlines,
            Timer.KEEPALIVE,
            Timer.ANSWER,
            interval=self.config.keepalive,
            timeout=self.config.keepalive_timeout,
        )
        self._stall = StallWatch(deadlines, Timer.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes)

    # --- for the session

    @property
    def channels(self) -> int:
        return len(self._state.streams)

    @property
    def places(self) -> int:
        return min(self._state.streams.census.places, self.config.unacknowledged - self._state.unacknowledged)

    @property
    def outbox(self) -> int:
        return self._state.outbox.used

    @property
    def messages_sent(self) -> int:
        return self._state.messages_sent

    @property
    def peer_takes_no_channels(self) -> bool:
        return self._peer_is_going_away

    def streams(self) -> Iterator[Halves]:
        """Iterate over a copy of the streams, oldest first."""
        return (stream.halves for stream in self._state.streams if not stream.is_gone)

    def open_channel(self, opening: bytes) -> Halves:
        stream = self._open(Kind.MESSAGES)
        stream.sender.send_opening(opening)
        return stream.halves

    def open_stream(self) -> Halves:
        """Open a stream of bytes, as other yamux programs expect it."""
        stream = self._open(Kind.BYTES)
        self._state.control.owe(stream)
        return stream.halves

    def accept(self, sender: StreamSender) -> None:
        """The application has taken a stream of the peer: acknowledge it, with our own first record on a channel."""
        stream = sender.stream
        if stream.is_gone or stream.reset is not None:
            return
        self._state.streams.accept(stream.id)
        self._state.taken(stream)
        self._acknowledge(stream)

    def refuse(self, channel: Halves, reason: Reason) -> None:
        assert channel.sender is not None  # as both halves belong to one stream
        channel.sender.cancel(reason)

    def take_streams(self) -> Sequence[Any]:
        """The application takes streams of bytes from now on; return the events of those that have sent nothing."""
        self.takes_streams = True
        for stream in self._state.waiting_streams():
            if stream.receiver.is_silent:
                stream.receiver.become(Kind.BYTES)
        return self.events()

    def ping(self, key: object) -> None:
        self._user_pings[self._state.control.ping()] = key

    def go_away(self, reason: Reason) -> None:
        if not self.is_going_away:
            self.is_going_away = True
            self._state.control.go_away = Code.NORMAL

    def farewell(self, reason: Reason) -> bytes:
        """Return a go-away, behind resets of the channels: a go-away has no place for the reason, and a reset has."""
        resets: list[bytes] = []
        for stream in islice(self._state.streams, TOLD_CHANNELS):
            if stream.receiver.carries_messages and not (stream.flags & SYN or stream.reset is not None):
                self._state.reset(stream, reason)
                if stream.reset:
                    resets.append(encode_header(DATA, RST, stream.id, len(stream.reset)) + stream.reset)
        code = Code.PROTOCOL_ERROR if self._has_failed else Code.INTERNAL_ERROR
        return b"".join(resets) + encode_header(GO_AWAY, 0, SESSION, code)

    def _open(self, kind: Kind) -> Stream:
        state = self._state
        if self.over or self._peer_is_going_away:
            raise LocalProtocolError("no stream can be opened any more: the connection is ending")
        if self.places < 1:
            raise LocalProtocolError(
                f"too many streams: {state.streams.census.ours} are open and {state.unacknowledged} of them aren't "
                f"acknowledged; expected at most {self.limits.channels} and {self.config.unacknowledged}"
            )
        stream = Stream(state.streams.allocate(), is_ours=True)
        self._add(stream, kind)
        state.streams.add_ours(stream.id, stream)
        state.unacknowledged += 1
        return stream

    def _add(self, stream: Stream, kind: Kind) -> None:
        carries_messages = kind is Kind.MESSAGES
        stream.join(
            StreamSender(self._state, stream, carries_messages=carries_messages),
            StreamReceiver(self._state, stream, kind),
        )
        if self._observer is not None:
            self._observer.state(stream.label, "open")

    def _acknowledge(self, stream: Stream) -> None:
        if not stream.is_acknowledged:
            stream.is_acknowledged = True
            stream.flags = ACK
            if stream.sender.carries_messages:
                stream.sender.send_opening(b"")
            self._state.control.owe(stream)

    # --- the byte stream in

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Any]:
        """Parse and apply received bytes, and return what happened; never raises."""
        if self.over:
            return ()
        self._state.now = now
        if self._observer is not None and data:
            self._observer.transport("in", data)
        if self._rest:
            data = self._rest + data
        try:
            position = self._parse(data)
        except RemoteProtocolError as error:
            return self._stop(Failed(error))
        self._rest = data[position:]
        self.bytes_received += position
        self._keepalive.heard(now)
        if self._left or (self._rest and not self.unparsed):
            self._stall.watch(now, self.bytes_received)
        else:
            self._stall.stop()
        return self.events()

    def _parse(self, data: bytes) -> int:
        """Apply at most `frames_at_once` frames; return the position behind what was used."""
        position, size, frames = 0, len(data), self.frames_at_once
        while position < size:
            if self._left:
                end = min(size, position + self._left)
                self._left -= end - position
                self._take_payload(data[position:end])
                position = end
                continue
            if size - position < HEADER_SIZE:
                break
            if not frames:
                self.unparsed = size - position
                return position
            frames -= 1
            version, type, flags, id, length = HEADER.unpack_from(data, position)
            if version:
                raise RemoteProtocolError(
                    f"unsupported version: expected 0, got {version}",
                    rule="yamux-H02",
                    offset=self.bytes_received + position,
                )
            if self._observer is not None and type <= GO_AWAY:
                observe_frame(self._observer, "in", type, flags, id, length)
            position += HEADER_SIZE
            if type == DATA:
                self._data(flags, id, length)
            elif type == WINDOW_UPDATE:
                self._window_update(flags, id, length)
            elif type == PING:
                self._ping(flags, id, length)
            elif type == GO_AWAY:
                self._go_away(id, length)
            else:
                raise RemoteProtocolError(
                    f"unknown frame type: expected 0 to 3, got {type}",
                    rule="yamux-H03",
                    offset=self.bytes_received + position - HEADER_SIZE,
                )
        self.unparsed = 0
        return position

    def _data(self, flags: int, id: int, length: int) -> None:
        """A data frame begins; its payload follows."""
        stream = self._stream(flags, id, has_payload=length > 0)
        self._left, self._fin, self._receiver, self._reset = length, False, None, None
        if stream is None:
            return
        if flags & RST:
            self._reset, self._reason = stream, b""
            if not length:
                self._take_payload(b"")
            return
        if stream.reset is not None:
            return
        if length:
            stream.receiver.arrives(length)
            self._receiver = stream.receiver
        if flags & FIN:
            self._fin = True
            if not length:
                self._end(stream.receiver)

    def _take_payload(self, data: bytes) -> None:
        """Bytes of the payload of a data frame have come."""
        if self._reset is not None:
            self._reason += data[: LONGEST_REASON - len(self._reason)]
            if not self._left:
                stream, self._reset = self._reset, None
                if not stream.is_gone:
                    self._state.was_reset(stream, self._reason)
        elif self._receiver is not None:
            receiver = self._receiver
            receiver.receive(data, self._left)
            if not self._left:
                self._receiver = None
                if self._fin:
                    self._end(receiver)

    def _end(self, receiver: StreamReceiver) -> None:
        self._fin = False
        if receiver.stream.reset is None:
            receiver.ended()

    def _window_update(self, flags: int, id: int, credit: int) -> None:
        stream = self._stream(flags, id, has_payload=False)
        if stream is None:
            return
        if flags & RST:
            self._state.was_reset(stream, b"")
            return
        if stream.reset is not None:
            return
        if credit:
            if self._observer is not None:
                self._observer.credit("in", stream.label, credit)
            stream.sender.granted(credit)
        if flags & FIN:
            stream.receiver.ended()

    def _stream(self, flags: int, id: int, *, has_payload: bool) -> Stream | None:
        """Return the stream that a frame is about, and open it for a SYN; None if the frame is to be ignored."""
        state = self._state
        if flags & SYN:
            return self._opened(id, has_payload=has_payload)
        stream = state.streams.get(id)
        if stream is None:
            if id == SESSION:
                raise RemoteProtocolError("data or window update for stream 0", rule="yamux-S04")
            return None
        if flags & ACK and stream.is_ours:
            state.acknowledge(stream)
        return stream

    def _opened(self, id: int, *, has_payload: bool) -> Stream | None:
        """A frame with SYN came: put the stream into the table, or refuse it."""
        state = self._state
        if id == SESSION or id % 2 == int(state.is_client):
            raise RemoteProtocolError(
                f"SYN for stream {id}: expected an {'even' if state.is_client else 'odd'} id above 0 from this peer",
                rule="yamux-S02",
            )
        if id in state.streams:
            raise RemoteProtocolError(f"a second SYN for stream {id}, which is open", rule="yamux-S03")
        full = None
        if state.streams.census.theirs >= self.limits.channels:
            full = self.limits.bound_of_channels
        elif state.undecided >= self.limits.backlog:
            full = "backlog"
        if full is not None:
            state.events.append(LimitReached(full))
        if self.is_going_away or full is not None:
            state.control.refuse(id)
            return None
        stream = Stream(id, is_ours=False)
        self._add(stream, Kind.UNKNOWN)
        state.streams.add_theirs(id, stream)
        state.wait(stream)
        if self.takes_streams and not has_payload:
            stream.receiver.become(Kind.BYTES)
        return stream

    def _ping(self, flags: int, id: int, value: int) -> None:
        if id != SESSION:
            raise RemoteProtocolError(f"a ping for stream {id}: expected 0", rule="yamux-P01")
        if flags & SYN:
            self._state.control.answer(value)
        elif not self._state.control.answered(value) and value in self._user_pings:
            self._state.events.append(Pong(self._user_pings.pop(value)))

    def _go_away(self, id: int, code: int) -> None:
        if id != SESSION:
            raise RemoteProtocolError(f"a go-away for stream {id}: expected 0", rule="yamux-A01")
        self._peer_is_going_away = True
        if code == Code.NORMAL:
            reason = Reason()
        elif code == Code.PROTOCOL_ERROR:
            reason = PROTOCOL_ERROR
        elif code == Code.INTERNAL_ERROR:
            reason = INTERNAL_ERROR
        else:
            reason = Reason(UNKNOWN_CODE, code)
        self._state.events.append(GoingAway(reason))

    def receive_eof(self, now: float) -> None:
        """End the connection: the peer closed its direction of the byte stream."""
        if not self.over:
            self.hung_up_cleanly = not (self._left or self._rest or self.channels)
            self._state.events += self._stop(HungUp(self.hung_up_cleanly))

    # --- the byte stream out

    def events(self) -> Sequence[Any]:
        """Take the events since the last call, oldest first."""
        events = self._state.events
        if not events:
            return ()
        self._state.events = []
        return events

    def has_output(self) -> bool:
        """Return True if there is anything to write; cheap."""
        return not self.over and (bool(self._state.scheduler.line) or self._state.control.has_output())

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Take about `limit` bytes to write now: control frames first, then data in fair order."""
        out: list[Buffer] = []
        if not self.over:
            control = self._state.control
            written = control.write(out)
            if written < limit:
                self._state.scheduler.pull(limit - written, out)
            control.confirm(out)
            if self._observer is not None:
                observe_written(self._observer, out)
        return out

    # --- time

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`: immediately until the first call, which starts the clock."""
        if self.over:
            return None
        return self._state.deadlines.next if self._is_started else float("-inf")

    def handle_deadline(self, now: float) -> Sequence[Any]:
        """Act on the timers that are due, and return what happened."""
        if self.over:
            return ()
        self._state.now = now
        if not self._is_started:
            self._is_started = True
            self._keepalive.start(now)
        for timer in self._state.deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if timer is Timer.ANSWER:
                return self._stop(Silent(self._keepalive.silence(now)))
            if timer is Timer.STALL:
                came = self._stall.shortfall(self.bytes_received)
                if came is not None:
                    error = self._stall.error(came, "frame", self.bytes_received)
                    return self._stop(Failed(error) if came else Silent(self._keepalive.silence(now)))
                self._stall.watch(now, self.bytes_received)
            elif timer is Timer.STREAMS:
                self._streams_due()
            elif self._keepalive.is_due(now):
                self._user_pings[self._state.control.ping()] = None
                self._state.events.append(Probed())
                self._keepalive.asked(now)
        return self.events()

    def _streams_due(self) -> None:
        """Acknowledge the streams that wait for the application, so that the peer doesn't give the session up.

        One that hasn't shown its kind by now is a stream of bytes, whose peer waits for us to speak first.
        """
        for stream in self._state.streams_due():
            if stream.receiver.kind is Kind.UNKNOWN:
                stream.receiver.become(Kind.BYTES)
            if not stream.is_gone and stream.reset is None:
                self._acknowledge(stream)

    def _stop(self, last: Failed | HungUp | Silent) -> Sequence[Any]:
        self._state.events.append(last)
        if isinstance(last, Failed):
            self._has_failed = True
            if self._observer is not None:
                self._observer.error(last.error)
        self.over = True
        self.unparsed = 0
        return self.events()
