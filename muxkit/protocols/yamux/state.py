"""The streams of a connection, and what waits to be written besides their data.

Theory of operation
===================

A stream has two halves, and each half ends on its own.

We send (`StreamSender`):

    OPEN       the application sends                                     -> ENDING, RESET
    ENDING     `finish` was called; data may wait for the peer's credit  -> ENDED, RESET
    ENDED      the frame with FIN was written                            -> CONFIRMED, RESET
    CONFIRMED  the peer has processed the FIN                            (final)
    RESET      a frame with RST was queued, or came                      (final)

yamux doesn't acknowledge a FIN. But each side processes frames in order and answers each ping. So after a FIN we write
a ping, and its answer confirms all ends in front of it. One such ping is under way at a time: the ends that are written
meanwhile wait for the next one. That is why a peer which closes thousands of streams costs a few pings.

We receive (`StreamReceiver`):

    OPEN       data may come                                             -> ENDED, STOPPED, RESET
    ENDED      a FIN came                                                (final)
    STOPPED    the application wants no more                             -> ENDED, RESET
    RESET      as above                                                  (final)

yamux has no frame that says "send no more". So a stopped half answers the next data frame with RST, as TCP does for a
closed socket, once our own FIN was written. Until then it drops data and renews the window: a reset would also destroy
the data that we still have to send. A peer that neither sends nor finishes after our FIN is reset after
`Config.close_timeout`. On channels, whose other end is muxkit, the reset follows as soon as the FIN is confirmed.

A stream is in the table of `State` from its opening until both halves are final, and until its RST has been written.
Frames about streams that aren't in the table are ignored, because they may have crossed our RST. Only a SYN makes a
stream out of an unknown id.

The invariants:

- The first frame that we write on a stream carries SYN if we opened it, and ACK if the peer did. `Stream.flags` holds
  that flag until it is written, and whichever frame comes first takes it.
- Data is written only against credit. Each side has 256 KiB at first, and window updates add to it. The receiver's
  window (`ReceiveWindow`) decides about grants, and a message that is larger than the window borrows from
  `Reassembly`.
- The bytes that all streams hold for the application are bounded by `Limits.connection_bytes`, although yamux gives
  each new stream 256 KiB without asking. A stream that exceeds the bound is reset, and the others go on.
- What waits in `Control` is either merged by stream (credit, flags) or bounded by `Limits.pongs` (answers to pings,
  resets of refused streams), so a peer that doesn't read costs a bounded amount of memory.
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

BROKE_A_RULE: Final = 400  # the code of a reason


class Stream:
    """One stream: its id, its two halves, and what is due about it."""

    __slots__ = ("flags", "grant", "id", "is_acknowledged", "is_gone", "is_ours", "receiver", "reset", "sender")
    __deletable__: tuple[str, ...] = ("receiver", "sender")  # mypyc wants to know

    sender: StreamSender  # both are set as soon as the stream was made, and deleted when it is gone
    receiver: StreamReceiver

    def __init__(self, id: int, *, is_ours: bool) -> None:
        self.id: int = id
        self.is_ours: bool = is_ours
        self.flags: int = Flag.SYN if is_ours else 0  # what the next frame on this stream has to carry
        self.grant: int = 0  # credit for the peer that waits to be written
        self.is_acknowledged: bool = False
        self.reset: bytes | None = None  # the payload of the RST that waits to be written
        self.is_gone: bool = False  # it isn't in the table any more

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
    """Everything that the halves of all streams share."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_client: bool) -> None:
        super().__init__(limits, observer, floor=INITIAL_WINDOW, first=INITIAL_WINDOW)
        self.config: Config = config
        self.is_client: bool = is_client
        self.streams: ChannelTable[Stream] = ChannelTable(limits, Ids(1 if is_client else 2, U32_MAX, step=2))
        self.control: Control = Control(self)
        self.unacknowledged: int = 0  # streams that this side opened
        self.waiting: DelayQueue[Stream] = DelayQueue(limits.handshake)  # the peer's, not taken by the application
        self.closing: DelayQueue[Stream] = DelayQueue(config.close_timeout)  # the peer should end its half

    def remove(self, stream: Stream) -> None:
        """Take a stream out of the table: both of its halves are final."""
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
        """Take a stream out of the table if nothing more can happen on it."""
        if stream.is_gone or stream.reset is not None:
            return
        if stream.sender.is_confirmed and stream.receiver.has_ended:
            self.remove(stream)

    def acknowledge(self, stream: Stream) -> None:
        """Note that the peer has acknowledged a stream of this side, or that it can't do so any more."""
        if stream.is_ours and not stream.is_acknowledged:
            stream.is_acknowledged = True
            self.unacknowledged -= 1
            self.events.append(MayOpen())

    def reset(self, stream: Stream, reason: Reason) -> None:
        """Reset a stream. It stays in the table until the RST has been written."""
        if stream.is_gone or stream.reset is not None:
            return
        # Only channels carry a reason, and only within the credit that the peer has given.
        payload = reason.encode() if stream.sender.carries_messages else b""
        stream.reset = payload if len(payload) <= stream.sender.credit_out else b""
        self.control.resets[stream] = None
        stream.sender.drop_all()
        stream.receiver.retire()

    def break_off(self, stream: Stream, error: RemoteProtocolError) -> None:
        """Reset a stream because of what its peer sent on it, and report it."""
        if stream.reset is None:
            self.reset(stream, Reason(str(error), BROKE_A_RULE))
            self.events.append(ChannelFailed(stream.halves, error))

    def was_reset(self, stream: Stream, payload: bytes) -> None:
        """The peer reset a stream: report it to both halves, and forget the stream."""
        sender, receiver = stream.sender, stream.receiver
        if stream.reset is not None:  # both sides reset it at the same time
            del self.control.resets[stream]
            self.events.extend((Confirmed(sender), Confirmed(receiver)))
        else:
            # A peer that has finished before, in order, only tells us that it wants no more.
            breaks_off = not (stream.is_ours or sender.is_ended or receiver.has_ended)
            if breaks_off:
                self.starts.broken_off(self.now)
            if not receiver.has_ended:
                self.events.append(Cancelled(receiver, payload, breaks_off))
            if not sender.is_confirmed:
                self.events.append(Stopped(sender, payload))
        self.remove(stream)

    def closed(self, stream: Stream) -> None:
        """The application has closed both halves, and the peer has processed our FIN: it should end its half now.

        On a channel a reset tells it so immediately, and destroys nothing, as muxkit keeps what came before a reset.
        Other programs lose it, so a stream of bytes is only reset when the peer takes too long.
        """
        if stream.sender.carries_messages:
            self.reset(stream, Reason())
        else:
            self.closing.add(stream, self.now)
            self.watch()

    def watch(self) -> None:
        """Set the timer for the stream that is due first, unless it runs: waking too early does no harm."""
        due = [queue.next for queue in (self.waiting, self.closing) if queue.next is not None]
        if due and Vital.CHANNELS not in self.deadlines:
            self.deadlines.set(Vital.CHANNELS, min(due))


class Control:
    """Frames that go out in front of data: credit and flags of streams, resets, pings and the go-away."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.dirty: dict[Stream, None] = {}  # streams with credit or a flag to write
        self.resets: dict[Stream, None] = {}
        self.frames: list[bytes] = []  # complete ones: pings, answers, refusals, the go-away
        self.unconfirmed: list[StreamSender | StreamReceiver] = []  # their ends were written, and no ping behind them
        self._asked: tuple[int, list[StreamSender | StreamReceiver]] | None = None  # the ping under way
        self._next_ping = 0

    def has_output(self) -> bool:
        """Return True if there is anything to write; cheap."""
        return bool(self.dirty or self.resets or self.frames or (self.unconfirmed and self._asked is None))

    def send(self, type: int, flags: int, stream: int, length: int) -> None:
        """Queue a frame that nothing is merged with."""
        self.frames.append(encode_header(type, flags, stream, length))

    def reply(self, type: int, flags: int, stream: int, length: int) -> None:
        """Queue a frame that the peer has caused; at most `Limits.pongs` of them may wait."""
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
        """Confirm the ends in front of the ping that was sent for them; return False if the answer is for another."""
        if self._asked is None or self._asked[0] != value:
            return False
        halves, self._asked = self._asked[1], None
        self._state.events += [Confirmed(half) for half in halves]
        for half in halves:
            half.was_confirmed()
        return True

    def write(self, out: list[Buffer]) -> int:
        """Append everything that waits, and return its size."""
        frames, self.frames = self.frames, []
        for stream in self.dirty:
            # A data frame that follows immediately carries the flag as well, so it needs no frame of its own.
            if not stream.is_gone and stream.reset is None and (stream.grant or not stream.sender.is_ready()):
                flags, stream.flags = stream.flags, 0
                grant, stream.grant = stream.grant, 0
                if flags or grant:
                    frames.append(encode_header(Type.WINDOW_UPDATE, flags, stream.id, grant))
        self.dirty.clear()
        resets, self.resets = self.resets, {}
        for stream in resets:
            payload = stream.reset or b""
            if not stream.flags & Flag.SYN:  # or the peer has never heard of it
                type = Type.DATA if payload else Type.WINDOW_UPDATE
                frames.append(encode_header(type, Flag.RST, stream.id, len(payload)) + payload)
            self._state.events += [Confirmed(stream.sender), Confirmed(stream.receiver)]
            self._state.remove(stream)
        out += frames
        return sum(map(len, frames))

    def confirm(self, out: list[Buffer]) -> None:
        """Append the ping that confirms the ends that were written, if none is under way."""
        if self.unconfirmed and self._asked is None:
            self._asked = self.ping(), self.unconfirmed
            self.unconfirmed = []
            out += self.frames
            self.frames = []
