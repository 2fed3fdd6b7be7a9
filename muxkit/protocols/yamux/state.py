"""The state of a connection: its streams, and the control frames that are still to be written.

Theory of operation
===================

A stream has two halves, one for each direction, and each half ends independently of the other.

The half that we send on (`StreamSender`) has these states:

    OPEN       the application sends                                     -> ENDING, RESET
    ENDING     `finish` was called; data may wait for the peer's credit  -> ENDED, RESET
    ENDED      the frame with FIN was written                            -> CONFIRMED, RESET
    CONFIRMED  the peer has processed the FIN                            (final)
    RESET      a frame with RST was queued, or has arrived               (final)

yamux doesn't acknowledge a FIN. But each side processes frames in order and answers each ping. So we write a ping after
a FIN, and the answer to the ping confirms all FINs that were written before the ping. Only one such ping is under way
at a time. FINs that are written in the meantime wait for the next ping, so closing thousands of streams takes only a
few pings.

The half that we receive from (`StreamReceiver`) has these states:

    OPEN       data may arrive                                           -> ENDED, STOPPED, RESET
    ENDED      a FIN has arrived                                         (final)
    STOPPED    the application doesn't want more data                    -> ENDED, RESET
    RESET      a frame with RST was queued, or has arrived               (final)

yamux has no frame that asks the peer to stop sending. Resetting the stream would do that, but it would also destroy the
data that we still have to send. So a stopped half first drops data and renews the window. Once our own FIN was written,
it answers the next data frame with RST, as TCP does for a closed socket. If the peer neither sends data nor a FIN after
our FIN, the stream is reset after `Config.close_timeout`. If the stream is a channel, the peer is muxkit and keeps data
that arrived before a reset, so the stream is reset as soon as the FIN is confirmed.

A stream is in the table of `State` from its opening until both halves are in a final state. If we reset the stream, it
stays in the table until the RST has been written. Frames for a stream that isn't in the table are ignored, because the
peer may have sent them before our RST arrived. An unknown id opens a stream only if the frame carries SYN.

Invariants:

- The first frame that we write on a stream carries SYN if we opened the stream, and ACK if the peer opened it.
  `Stream.flags` has that flag until a frame carries it.
- We write data only within the peer's credit. The credit is 256 KiB at first, and window updates add to it. For the
  data that we receive, `ReceiveWindow` decides how much credit to grant. A message that is larger than the window
  borrows more credit from `Reassembly`.
- `Limits.connection_bytes` bounds the bytes that all streams hold for the application. The peer could exceed the bound,
  because every new stream starts with 256 KiB of credit. A stream that exceeds the bound is reset, and the other
  streams continue.
- A peer that doesn't read costs a bounded amount of memory. Credit and flags that are still to be written are merged by
  stream. `Limits.pongs` limits the answers to pings and the resets of refused streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, ChannelTable, DelayQueue, Ids, Reason
from muxkit.core.events import Cancelled, ChannelFailed, Confirmed, Halves, MayOpen, Stopped
from muxkit.core.mux_state import MuxState, Vital
from muxkit.protocols.yamux.config import INITIAL_WINDOW, Config
from muxkit.protocols.yamux.frames import SESSION, U32_MAX, Flag, Type, encode_header

if TYPE_CHECKING:
    from muxkit.protocols.yamux.receive import StreamReceiver
    from muxkit.protocols.yamux.send import StreamSender

# The code of the reason that the peer gets when it has broken a rule.
BROKE_A_RULE: Final = 400


class Stream:
    """One stream: its id, its two halves, and the control information that is still to be written for it."""

    __slots__ = ("flags", "grant", "id", "is_acknowledged", "is_gone", "is_ours", "receiver", "reset", "sender")
    __deletable__: tuple[str, ...] = ("receiver", "sender")  # mypyc needs a declaration for `del`

    # The engine sets both halves right after it has created the stream. `part` deletes them.
    sender: StreamSender
    receiver: StreamReceiver

    def __init__(self, id: int, *, is_ours: bool) -> None:
        self.id: int = id
        self.is_ours: bool = is_ours
        self.flags: int = Flag.SYN if is_ours else 0
        """The flags that the next frame on this stream has to carry: SYN, ACK or none."""
        self.grant: int = 0
        """Credit for the peer that is still to be written."""
        self.is_acknowledged: bool = False
        """True once the side that didn't open the stream has acknowledged it."""
        self.reset: bytes | None = None
        """The payload of the RST that is to be written. None if we haven't reset the stream."""
        self.is_gone: bool = False
        """True once the stream was removed from the table."""

    @property
    def label(self) -> str:
        return f"stream {self.id}"

    @property
    def halves(self) -> Halves:
        return Halves(self.sender, self.receiver)

    def part(self) -> None:
        """Break the reference cycles, so that the memory is freed without a garbage collection."""
        self.is_gone = True
        del self.sender, self.receiver


class State(MuxState):
    """The state that all streams of a connection share."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_client: bool) -> None:
        super().__init__(limits, observer, floor=INITIAL_WINDOW, first=INITIAL_WINDOW)
        self.config: Config = config
        self.is_client: bool = is_client
        self.streams: ChannelTable[Stream] = ChannelTable(limits, Ids(1 if is_client else 2, U32_MAX, step=2))
        self.control: Control = Control(self)
        self.unacknowledged: int = 0
        """How many streams this side has opened that the peer hasn't acknowledged."""
        self.waiting: DelayQueue[Stream] = DelayQueue(limits.handshake)
        """Streams of the peer that the application hasn't taken. After a delay they are acknowledged anyway."""
        self.closing: DelayQueue[Stream] = DelayQueue(config.close_timeout)
        """Streams that our application has closed and the peer hasn't. After a delay they are reset."""

    def remove(self, stream: Stream) -> None:
        """Remove a stream from the table, because both of its halves are in a final state."""
        self.streams.remove(stream.id)
        self.acknowledge(stream)
        self.waiting.discard(stream)
        self.closing.discard(stream)
        stream.sender.drop_all()
        stream.receiver.retire()
        stream.part()
        if self.observer is not None:
            self.observer.state(stream.label, "gone")

    def remove_if_final(self, stream: Stream) -> None:
        """Remove a stream from the table if both of its halves have ended in an orderly way."""
        if stream.is_gone or stream.reset is not None:
            return
        if stream.sender.is_confirmed and stream.receiver.has_ended:
            self.remove(stream)

    def acknowledge(self, stream: Stream) -> None:
        """Stop counting a stream as unacknowledged. The peer has acknowledged it, or the stream has ended."""
        if stream.is_ours and not stream.is_acknowledged:
            stream.is_acknowledged = True
            self.unacknowledged -= 1
            self.events.append(MayOpen())

    def reset(self, stream: Stream, reason: Reason) -> None:
        """Reset a stream. It stays in the table until the RST has been written."""
        if stream.is_gone or stream.reset is not None:
            return
        # The reason is the payload of the RST, so it needs credit. Only peers that know channels can read it.
        payload = reason.encode() if stream.sender.carries_messages else b""
        stream.reset = payload if len(payload) <= stream.sender.credit_out else b""
        self.control.resets[stream] = None
        stream.sender.drop_all()
        stream.receiver.retire()

    def break_off(self, stream: Stream, error: RemoteProtocolError) -> None:
        """Reset a stream because the peer broke a rule on it, and report the error."""
        if stream.reset is None:
            self.reset(stream, Reason(str(error), BROKE_A_RULE))
            self.events.append(ChannelFailed(stream.halves, error))

    def was_reset(self, stream: Stream, payload: bytes) -> None:
        """Handle the peer's reset of a stream: report it for both halves, and remove the stream."""
        sender, receiver = stream.sender, stream.receiver
        if stream.reset is not None:  # both sides reset it at the same time
            del self.control.resets[stream]
            self.events.extend((Confirmed(sender), Confirmed(receiver)))
        else:
            # A reset cancels the stream, unless one half has ended before. After its FIN a peer uses a reset only to
            # tell us that it doesn't want more data.
            breaks_off = not (stream.is_ours or sender.is_ended or receiver.has_ended)
            if breaks_off:
                self.starts.broken_off(self.now)
            if not receiver.has_ended:
                self.events.append(Cancelled(receiver, payload, breaks_off))
            if not sender.is_confirmed:
                self.events.append(Stopped(sender, payload))
        self.remove(stream)

    def closed(self, stream: Stream) -> None:
        """Make the peer end its half, because the application has closed both halves and the peer has our FIN.

        A channel is reset immediately. Its peer is muxkit, which keeps data that arrived before the reset. Other
        implementations drop such data, so a stream of bytes is reset only if the peer takes too long.
        """
        if stream.sender.carries_messages:
            self.reset(stream, Reason())
        else:
            self.closing.add(stream, self.now)
            self.watch()

    def watch(self) -> None:
        """Set the timer for the stream that is due first. A running timer is kept, because waking early is harmless."""
        due = [queue.next for queue in (self.waiting, self.closing) if queue.next is not None]
        if due and Vital.CHANNELS not in self.deadlines:
            self.deadlines.set(Vital.CHANNELS, min(due))


class Control:
    """The frames that are written before data: window updates, resets, pings and the go-away."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.dirty: dict[Stream, None] = {}
        """Streams with credit or a flag to write."""
        self.resets: dict[Stream, None] = {}
        """Streams whose RST is to be written."""
        self.frames: list[bytes] = []
        """Encoded frames to write: pings, answers to pings, resets of refused streams, and the go-away."""
        self.unconfirmed: list[StreamSender | StreamReceiver] = []
        """Halves that have ended, and that the next confirming ping will cover."""
        # The confirming ping that is under way: its value, and the halves that its answer confirms.
        self._asked: tuple[int, list[StreamSender | StreamReceiver]] | None = None
        self._next_ping = 0

    def has_output(self) -> bool:
        """Return True if there is anything to write."""
        return bool(self.dirty or self.resets or self.frames or (self.unconfirmed and self._asked is None))

    def send(self, type: int, flags: int, stream: int, length: int) -> None:
        """Queue a frame. Unlike credit and flags, it isn't merged with other frames."""
        self.frames.append(encode_header(type, flags, stream, length))

    def reply(self, type: int, flags: int, stream: int, length: int) -> None:
        """Queue a frame that answers a frame of the peer.

        Raises:
            RemoteProtocolError: More than `Limits.pongs` frames wait to be written, because the peer doesn't read.
        """
        self.send(type, flags, stream, length)
        if len(self.frames) > (most := self._state.limits.pongs):
            raise RemoteProtocolError(
                f"the peer doesn't read: expected at most {most} answers that wait to be written", limit="pongs"
            )

    def ping(self) -> int:
        """Queue a ping and return its value."""
        value, self._next_ping = self._next_ping, (self._next_ping + 1) & U32_MAX
        self.send(Type.PING, Flag.SYN, SESSION, value)
        return value

    def answered(self, value: int) -> bool:
        """Handle the answer to the confirming ping. Returns False if the answer belongs to another ping."""
        if self._asked is None or self._asked[0] != value:
            return False
        halves, self._asked = self._asked[1], None
        self._state.events += [Confirmed(half) for half in halves]
        for half in halves:
            half.was_confirmed()
        return True

    def write(self, out: list[Buffer]) -> int:
        """Append all waiting frames to `out`, and return their size in bytes."""
        frames, self.frames = self.frames, []
        for stream in self.dirty:
            # If a data frame follows immediately, it can carry the flag, so a separate frame isn't needed.
            if not stream.is_gone and stream.reset is None and (stream.grant or not stream.sender.is_ready()):
                flags, stream.flags = stream.flags, 0
                grant, stream.grant = stream.grant, 0
                if flags or grant:
                    frames.append(encode_header(Type.WINDOW_UPDATE, flags, stream.id, grant))
        self.dirty.clear()
        resets, self.resets = self.resets, {}
        for stream in resets:
            payload = stream.reset or b""
            if not stream.flags & Flag.SYN:  # if the SYN is still to be written, the peer doesn't know the stream
                type = Type.DATA if payload else Type.WINDOW_UPDATE
                frames.append(encode_header(type, Flag.RST, stream.id, len(payload)) + payload)
            self._state.events += [Confirmed(stream.sender), Confirmed(stream.receiver)]
            self._state.remove(stream)
        out += frames
        return sum(map(len, frames))

    def confirm(self, out: list[Buffer]) -> None:
        """Append a confirming ping if halves wait for it and none is under way."""
        if self.unconfirmed and self._asked is None:
            self._asked = self.ping(), self.unconfirmed
            self.unconfirmed = []
            out += self.frames
            self.frames = []
