"""The yamux engine: received bytes and commands go in, events and bytes to send come out.

The engine does no I/O, and it works without Trio. It parses frames and passes them to the halves of streams, which
`send` and `receive` implement. `state` explains the theory of operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Reason
from muxkit.core.events import GoingAway, Halves, LimitReached
from muxkit.core.stream_engine import StreamMuxEngine
from muxkit.protocols.yamux.config import Config
from muxkit.protocols.yamux.frames import (
    HEADER,
    HEADER_SIZE,
    SESSION,
    U32_MAX,
    Code,
    Flag,
    Type,
    encode_header,
    observe_frame,
    observe_written,
)
from muxkit.protocols.yamux.receive import Kind, StreamReceiver
from muxkit.protocols.yamux.send import StreamSender
from muxkit.protocols.yamux.state import State, Stream

# Bytes of memory for one stream with its session objects and a task that handles it, without buffered data.
CHANNEL_PRICE: Final = 5 * 1024
# `farewell` sends the reason for the end in a frame with this header after the go-away. The frame's length follows.
REASON_FOLLOWS: Final = encode_header(Type.DATA, Flag.RST, SESSION, 0)[:-4]
# A longer reason of the peer is truncated to this many bytes.
LONGEST_REASON: Final = 4096
# The reasons for go-aways with an error code, from peers that don't send a reason.
GONE_AWAY: Final[dict[int, Reason]] = {
    Code.PROTOCOL_ERROR: Reason("the peer says that this side broke a rule of yamux", 400),
    Code.INTERNAL_ERROR: Reason("the peer has an internal error", 500),
}


class Engine(StreamMuxEngine):
    """One end of a yamux connection. It implements `StreamEngine`.

    `receive_bytes` and `handle_deadline` return events. `events` returns the events that commands and writing have
    caused. If the peer breaks a rule, the last event is `Failed`, and `farewell` returns the go-away to send.
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
        self._state = State(self.config, (limits or Limits()).at_price(CHANNEL_PRICE), observer, is_client=is_client)
        super().__init__(self._state, keepalive=self.config.keepalive, keepalive_timeout=self.config.keepalive_timeout)
        # True if the application takes streams of bytes. A stream on which nothing has arrived can then be delivered
        # immediately. Otherwise its first bytes have to show whether it is a channel.
        self._takes_streams = False
        self._is_going_away = False
        self._peer_is_going_away = False
        # The pings of the session that are under way, by value, with the keys that `ping` was called with.
        self._pings: dict[int, object] = {}
        # The data frame whose payload is arriving. First, how many bytes are still to arrive.
        self._left = 0
        # The receiver that gets the payload, or None if the payload is dropped.
        self._receiver: StreamReceiver | None = None
        # True if the frame carries FIN. The FIN takes effect after the last byte of the payload.
        self._has_fin = False
        # The stream that the frame resets. The payload is then the reason.
        self._reset: Stream | None = None
        self._reason = b""

    # --- for the session

    @property
    def channels(self) -> int:
        return len(self._state.streams)

    @property
    def places(self) -> int:
        return min(self._state.streams.census.places, self.config.unacknowledged - self._state.unacknowledged)

    @property
    def peer_takes_no_channels(self) -> bool:
        return self._peer_is_going_away

    def streams(self) -> Iterator[Halves]:
        """Iterate over the streams, oldest first. Streams may be removed during the iteration."""
        return (stream.halves for stream in self._state.streams if not stream.is_gone)

    def open_channel(self, opening: bytes) -> Halves:
        stream = self._open(Kind.MESSAGES)
        stream.sender.send_opening(opening)
        return stream.halves

    def open_stream(self) -> Stream:
        """Open a stream of bytes, which any yamux implementation understands."""
        stream = self._open(Kind.BYTES)
        self._state.control.dirty[stream] = None
        return stream

    def accept(self, sender: StreamSender) -> None:
        """Acknowledge a stream of the peer, because the application has taken it.

        On a channel, our own opening record is sent as well.
        """
        stream = sender.stream
        if not stream.is_gone and stream.reset is None:
            self._state.streams.accept(stream.id)
            self._state.waiting.discard(stream)
            self._acknowledge(stream)

    def take_streams(self) -> None:
        """Deliver streams of bytes from now on, including those on which the peer hasn't sent anything."""
        self._takes_streams = True
        for stream in self._state.waiting:
            if stream.receiver.is_silent:
                stream.receiver.become(Kind.BYTES)

    def ping(self, key: object) -> None:
        self._pings[self._state.control.ping()] = key

    def go_away(self, reason: Reason) -> None:
        if not self._is_going_away:
            self._is_going_away = True
            self._state.control.send(Type.GO_AWAY, 0, SESSION, Code.NORMAL)

    def farewell(self, reason: Reason) -> bytes:
        """Return the encoded go-away for an error, followed by a frame with the reason.

        A go-away has no field for a reason. The extra frame doesn't disturb other implementations, because they stop
        reading at a go-away with an error code.
        """
        code = Code.PROTOCOL_ERROR if self.has_failed else Code.INTERNAL_ERROR
        payload = reason.encode()
        told = encode_header(Type.DATA, Flag.RST, SESSION, len(payload)) + payload
        return encode_header(Type.GO_AWAY, 0, SESSION, code) + (told if payload else b"")

    def _open(self, kind: Kind) -> Stream:
        state = self._state
        if self.over or self._peer_is_going_away:
            raise LocalProtocolError("no stream can be opened any more: the connection is ending")
        if self.places < 1:
            raise LocalProtocolError(
                f"too many streams: {state.streams.census.ours} are open and {state.unacknowledged} of them aren't "
                f"acknowledged; expected at most {self.limits.channels} and {self.config.unacknowledged}"
            )
        stream = self._new_stream(state.streams.allocate(), kind, is_ours=True)
        state.streams.add_ours(stream.id, stream)
        state.unacknowledged += 1
        return stream

    def _new_stream(self, id: int, kind: Kind, *, is_ours: bool) -> Stream:
        stream, state = Stream(id, is_ours=is_ours), self._state
        stream.sender = StreamSender(state, stream, carries_messages=kind is Kind.MESSAGES)
        stream.receiver = StreamReceiver(state, stream, kind)
        if state.observer is not None:
            state.observer.state(stream.label, "open")
        return stream

    def _acknowledge(self, stream: Stream) -> None:
        if not stream.is_acknowledged:
            stream.is_acknowledged = True
            stream.flags = Flag.ACK
            if stream.sender.carries_messages:
                stream.sender.send_opening(b"")
            self._state.control.dirty[stream] = None

    # --- frames of the peer

    def parse(self, data: bytes, position: int) -> int:
        size, frames = len(data), self.frames_at_once
        while position < size and not self._state.over:
            if self._left:
                end = min(size, position + self._left)
                self._left -= end - position
                self._take_payload(data[position:end])
                position = end
                continue
            if size - position < HEADER_SIZE or self._is_reason_cut(data, position):
                break
            if not frames:
                self.unparsed: int = size - position
                break
            frames -= 1
            self._take_header(data, position)
            position += HEADER_SIZE
        self.is_mid_frame: bool = self._left > 0
        return position

    def _take_header(self, data: bytes, position: int) -> None:
        """Apply a frame, or the beginning of a data frame."""
        version, type, flags, id, length = HEADER.unpack_from(data, position)
        if version or type > Type.GO_AWAY:
            raise RemoteProtocolError(
                f"not a yamux frame: expected version 0 and a type from 0 to 3, got version {version} and type {type}",
                rule="yamux-H02" if version else "yamux-H03",
                offset=self.data_offset + position,
            )
        if self._state.observer is not None:
            observe_frame(self._state.observer, "in", type, flags, id, length)
        if type == Type.DATA:
            self._data(flags, id, length)
        elif type == Type.WINDOW_UPDATE:
            self._window_update(flags, id, length)
        elif id != SESSION:
            raise RemoteProtocolError(
                f"a frame about the session names stream {id}: expected 0",
                rule="yamux-P01" if type == Type.PING else "yamux-A01",
            )
        elif type == Type.PING:
            self._ping(flags, length)
        else:
            self._go_away(length, data[position + HEADER_SIZE :])

    def _data(self, flags: int, id: int, length: int) -> None:
        stream = self._stream(flags, id, has_payload=length > 0)
        self._left, self._has_fin, self._receiver, self._reset = length, False, None, None
        if stream is None:
            return
        if flags & Flag.RST:
            self._reset, self._reason = stream, b""
        elif stream.reset is None:
            if length:
                stream.receiver.frame_begins(length)
            self._receiver = stream.receiver
            self._has_fin = bool(flags & Flag.FIN)
        if not length:
            self._take_payload(b"")

    def _take_payload(self, data: bytes) -> None:
        """Handle bytes of a data frame's payload. If the frame has no payload, `data` is empty."""
        receiver, reset = self._receiver, self._reset
        if receiver is not None:
            if data:
                receiver.receive(data, self._left)
            if not self._left and self._has_fin and not (receiver.stream.is_gone or receiver.stream.reset is not None):
                receiver.ended()
        elif reset is not None:
            self._reason += data[: LONGEST_REASON - len(self._reason)]
            if not self._left and not reset.is_gone:
                self._state.was_reset(reset, self._reason)

    def _window_update(self, flags: int, id: int, credit: int) -> None:
        stream = self._stream(flags, id, has_payload=False)
        if stream is None:
            return
        if flags & Flag.RST:
            self._state.was_reset(stream, b"")
        elif stream.reset is None:
            if credit:
                stream.sender.granted(credit, cap=U32_MAX)
            if flags & Flag.FIN:
                stream.receiver.ended()

    def _stream(self, flags: int, id: int, *, has_payload: bool) -> Stream | None:
        """Return the stream of a frame, or None if the frame is to be ignored. A SYN opens the stream."""
        if flags & Flag.SYN:
            return self._opened(id, has_payload=has_payload)
        if id == SESSION:
            raise RemoteProtocolError("a frame about a stream names the session", rule="yamux-S04")
        stream = self._state.streams.get(id)
        if stream is not None and flags & Flag.ACK:
            self._state.acknowledge(stream)
        return stream

    def _opened(self, id: int, *, has_payload: bool) -> Stream | None:
        """Handle a SYN: create the stream, or refuse it and return None.

        Raises:
            RemoteProtocolError: The peer may not open a stream with this id.
        """
        state = self._state
        if id == SESSION or id % 2 == int(state.is_client):
            raise RemoteProtocolError(
                f"SYN for stream {id}: expected an {'even' if state.is_client else 'odd'} id above 0 from this peer",
                rule="yamux-S02",
            )
        if id in state.streams:
            raise RemoteProtocolError(f"a second SYN for stream {id}, which is open", rule="yamux-S03")
        is_full = state.streams.census.theirs >= self.limits.channels
        if is_full:
            state.events.append(LimitReached(self.limits.bound_of_channels))
        if is_full or self._is_going_away:
            state.control.reply(Type.WINDOW_UPDATE, Flag.RST, id, 0)
            return None
        stream = self._new_stream(id, Kind.UNKNOWN, is_ours=False)
        state.streams.add_theirs(id, stream)
        state.waiting.add(stream, state.now)
        state.watch()
        if self._takes_streams and not has_payload:
            stream.receiver.become(Kind.BYTES)
        return stream

    def _ping(self, flags: int, value: int) -> None:
        if flags & Flag.SYN:
            self._state.control.reply(Type.PING, Flag.ACK, SESSION, value)
        elif not self._state.control.answered(value) and value in self._pings:
            self.answered(self._pings.pop(value))

    def _is_reason_cut(self, data: bytes, position: int) -> bool:
        """Return True if there is a go-away at `position` and the frame with its reason is incomplete.

        `_go_away` needs both frames at the same time (see `farewell`).
        """
        if data[position + 1] != Type.GO_AWAY:
            return False
        rest = data[position + HEADER_SIZE :]
        if len(rest) < HEADER_SIZE:
            return bool(rest) and (REASON_FOLLOWS.startswith(rest) or rest.startswith(REASON_FOLLOWS))
        length: int = HEADER.unpack_from(rest)[-1]
        return rest.startswith(REASON_FOLLOWS) and len(rest) < HEADER_SIZE + min(length, LONGEST_REASON)

    def _go_away(self, code: int, rest: bytes) -> None:
        """Handle the peer's go-away.

        With code 0 the peer opens no more streams, and the session ends in an orderly way. With any other code the
        session ends immediately. If the peer is muxkit, a reason follows.
        """
        self._peer_is_going_away = True
        reason = Reason()
        if code != Code.NORMAL:
            self._state.over = True
            reason = GONE_AWAY.get(code) or Reason("the peer ended the session with an unknown code", code)
            if rest.startswith(REASON_FOLLOWS) and len(rest) > HEADER_SIZE:
                reason = Reason.decode(rest[HEADER_SIZE : HEADER_SIZE + LONGEST_REASON])
        self._state.events.append(GoingAway(reason))

    # --- writing and time

    def has_output(self) -> bool:
        """Return True if there is anything to write."""
        return not self.over and (bool(self._state.scheduler.line) or self._state.control.has_output())

    def write(self, limit: int, out: list[Buffer]) -> None:
        """Write control frames, then data in fair order, and finally the ping that confirms the FINs before it."""
        written = self._state.control.write(out)
        if written < limit:
            self._state.scheduler.pull(limit - written, out)
        self._state.control.confirm(out)

    def observe(self, out: Sequence[Buffer]) -> None:
        if self._state.observer is not None:
            observe_written(self._state.observer, out)

    def channels_due(self, now: float) -> None:
        """Act on the streams whose time has come.

        Streams that the peer should have closed are reset. Streams that wait for the application are acknowledged,
        because a peer may give up the whole session if an acknowledgement takes too long. If no first bytes have shown
        the kind of such a stream, it becomes a stream of bytes, because its peer probably waits for us to send first.
        """
        state = self._state
        for stream in state.closing.pop_due(now):
            state.reset(stream, Reason())
        for stream in state.waiting.pop_due(now):
            if stream.receiver.kind is Kind.UNKNOWN:
                stream.receiver.become(Kind.BYTES)
            if stream.reset is None:
                self._acknowledge(stream)
        state.watch()
