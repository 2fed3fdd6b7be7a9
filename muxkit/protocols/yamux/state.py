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

from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import (
    Buffer,
    ChannelTable,
    Deadlines,
    Ids,
    Outbox,
    Reason,
    Reassembly,
    ReceiveBudget,
    Scheduler,
    StartPace,
)
from muxkit.core.events import Cancelled, Confirmed, Halves, Stopped
from muxkit.protocols.yamux.config import INITIAL_WINDOW, Config
from muxkit.protocols.yamux.events import Acknowledged, BrokenOff
from muxkit.protocols.yamux.frames import (
    ACK,
    DATA,
    GO_AWAY,
    HEADER_SIZE,
    PING,
    RST,
    SESSION,
    SYN,
    U32_MAX,
    WINDOW_UPDATE,
    encode_header,
)

if TYPE_CHECKING:
    from muxkit.protocols.yamux.receive import StreamReceiver
    from muxkit.protocols.yamux.send import StreamSender

CHANNEL_PRICE: Final = 5 * 1024
"""Bytes of memory for one stream with its session objects and a task that handles it, without buffered data."""


class Timer(Enum):
    """The deadlines of a connection."""

    KEEPALIVE = "keepalive"  # send a ping, because nothing was received
    ANSWER = "answer"  # end the connection, because nothing was received after that ping
    STALL = "stall"  # check that a frame that was begun made progress
    STREAMS = "streams"  # acknowledge, classify or reset streams that waited long enough


class Stream:
    """One stream: its id, its two halves, and what is due about it."""

    __slots__ = (
        "flags",
        "grant",
        "halves",
        "id",
        "is_acknowledged",
        "is_gone",
        "is_ours",
        "receiver",
        "reset",
        "sender",
    )
    __deletable__ = ("halves", "receiver", "sender")  # mypyc wants to know

    def __init__(self, id: int, *, is_ours: bool) -> None:
        self.id: int = id
        self.is_ours: bool = is_ours
        self.flags: int = SYN if is_ours else 0
        """What the next frame on this stream has to carry: SYN, ACK or nothing."""
        self.grant: int = 0
        """Credit for the peer that waits to be written."""
        self.is_acknowledged: bool = False
        self.reset: bytes | None = None
        """The payload of the RST that waits to be written; None while the stream isn't being reset by this side."""
        self.is_gone: bool = False
        """True once the stream isn't in the table any more."""
        self.sender: StreamSender
        self.receiver: StreamReceiver
        self.halves: Halves

    @property
    def label(self) -> str:
        return f"stream {self.id}"

    def join(self, sender: StreamSender, receiver: StreamReceiver) -> None:
        """Set the two halves; called once, right after the stream was made."""
        self.sender = sender
        self.receiver = receiver
        self.halves = Halves(sender, receiver)

    def part(self) -> None:
        """Break the reference cycles, so that the memory is freed without a garbage collection."""
        self.is_gone = True
        del self.halves, self.sender, self.receiver


class State:
    """Everything that the halves of all streams share."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_client: bool) -> None:
        self.config = config
        self.limits = limits
        self.observer = observer
        self.is_client: bool = is_client
        self.now: float = 0.0
        first = 1 if is_client else 2
        self.streams: ChannelTable[Stream] = ChannelTable(limits, Ids(first, U32_MAX, step=2))
        self.events: list[Any] = []
        self.outbox: Outbox = Outbox()
        self.scheduler: Scheduler = Scheduler()
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, INITIAL_WINDOW, INITIAL_WINDOW)
        self.reassembly: Reassembly[Stream] = Reassembly(limits.reassembly)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.control: Control = Control(self)
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.held: int = 0
        """Bytes of all streams that have come and that the application hasn't consumed."""
        self.unacknowledged: int = 0
        """Streams that this side opened and the peer hasn't acknowledged."""
        self.undecided: int = 0
        """Streams of the peer that haven't shown yet whether they carry messages."""
        self.messages_sent: int = 0
        self._waiting: OrderedDict[Stream, float] = OrderedDict()
        self._closing: OrderedDict[Stream, float] = OrderedDict()

    # --- the table

    def remove(self, stream: Stream) -> None:
        """Take a stream out of the table: both of its halves are final."""
        self.streams.remove(stream.id)
        self.acknowledge(stream)
        self._waiting.pop(stream, None)
        self._closing.pop(stream, None)
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
        """Note that the peer has acknowledged a stream, or that it needn't do so any more."""
        if stream.is_ours and not stream.is_acknowledged:
            stream.is_acknowledged = True
            self.unacknowledged -= 1
            self.events.append(Acknowledged())

    # --- resets

    def reset(self, stream: Stream, reason: Reason) -> None:
        """Reset a stream. It stays in the table until the RST has been written."""
        if stream.is_gone or stream.reset is not None:
            return
        if stream.flags & SYN:  # the peer has never heard of it, so there is nothing to write
            stream.reset = b""
            self.control.never_opened.append(stream)
        else:
            # Only channels carry a reason, and only within the credit that the peer has given.
            payload = reason.encode() if stream.receiver.carries_messages else b""
            stream.reset = payload if len(payload) <= stream.sender.credit_out else b""
            self.control.resets[stream] = None
        stream.sender.drop_all()
        stream.receiver.retire()

    def break_off(self, stream: Stream, error: RemoteProtocolError) -> None:
        """Reset a stream because of what its peer sent on it, and report it."""
        if stream.is_gone or stream.reset is not None:
            return
        self.reset(stream, Reason(str(error), 400))
        self.events.append(BrokenOff(stream.sender, stream.receiver, error))

    def was_reset(self, stream: Stream, payload: bytes) -> None:
        """The peer reset a stream: report it to both halves, and forget the stream."""
        sender, receiver = stream.sender, stream.receiver
        if stream.reset is not None:  # both sides reset it at the same time
            del self.control.resets[stream]
            self.events += [Confirmed(sender), Confirmed(receiver)]
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

    # --- streams that wait for something

    def wait(self, stream: Stream) -> None:
        """Let a new stream of the peer wait for the application, but acknowledge it in time."""
        self._waiting[stream] = self.now + self.limits.handshake
        self._watch()

    def waiting_streams(self) -> list[Stream]:
        """Return the streams of the peer that the application hasn't taken, and that aren't acknowledged."""
        return list(self._waiting)

    def taken(self, stream: Stream) -> None:
        """The application has taken a stream of the peer."""
        self._waiting.pop(stream, None)

    def closed(self, stream: Stream) -> None:
        """The application has closed both halves, and the peer has processed our FIN: it should end its half now.

        On a channel a reset tells it so immediately, and destroys nothing, as muxkit keeps what came before a reset.
        Other programs lose it, so a stream of bytes is only reset when the peer takes too long.
        """
        if stream.receiver.has_ended:
            return
        if stream.receiver.carries_messages:
            self.reset(stream, Reason())
        elif stream not in self._closing:
            self._closing[stream] = self.now + self.config.close_timeout
            self._watch()

    def streams_due(self) -> list[Stream]:
        """Act on the closed streams whose time is over, and return the streams that have waited long enough."""
        for stream in self._expired(self._closing):
            self.reset(stream, Reason())
        due = self._expired(self._waiting)
        self._watch()
        return due

    def _expired(self, queue: OrderedDict[Stream, float]) -> list[Stream]:
        """Remove and return the streams at the front of a queue whose time is over; the queue is in order of time."""
        due: list[Stream] = []
        while queue:
            stream = next(iter(queue))
            if queue[stream] > self.now:
                break
            del queue[stream]
            due.append(stream)
        return due

    def _watch(self) -> None:
        if Timer.STREAMS not in self.deadlines:
            firsts = [queue[next(iter(queue))] for queue in (self._waiting, self._closing) if queue]
            if firsts:
                self.deadlines.set(Timer.STREAMS, min(firsts))


class Control:
    """Frames that go out in front of data: credit and flags of streams, resets, pings and the go-away."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.dirty: dict[Stream, None] = {}
        """Streams with credit or a flag to write."""
        self.resets: dict[Stream, None] = {}
        self.refused: list[int] = []
        """Ids of streams that were never in the table."""
        self.never_opened: list[Stream] = []
        self.pings: list[int] = []
        self.pongs: list[int] = []
        self.go_away: int | None = None
        self.unconfirmed: list[StreamSender | StreamReceiver] = []
        """Halves whose end was written, and is to be confirmed by the next ping."""
        self._asked: dict[int, list[StreamSender | StreamReceiver]] = {}
        self._next_ping = 0

    def has_output(self) -> bool:
        """Return True if there is anything to write; cheap."""
        return bool(
            self.dirty
            or self.pongs
            or self.resets
            or self.refused
            or self.never_opened
            or self.pings
            or (self.unconfirmed and not self._asked)
            or self.go_away is not None
        )

    def owe(self, stream: Stream) -> None:
        """Write the credit and the flags of a stream soon."""
        self.dirty[stream] = None

    def answer(self, value: int) -> None:
        """Answer a ping."""
        self.pongs.append(value)
        self._check()

    def refuse(self, stream: int) -> None:
        """Reset a stream that the peer has just opened and that this side doesn't even put into its table."""
        self.refused.append(stream)
        self._check()

    def _check(self) -> None:
        waiting, most = len(self.pongs) + len(self.refused), self._state.limits.pongs
        if waiting > most:
            raise RemoteProtocolError(
                f"the peer doesn't read: {waiting} answers wait to be written, at most {most} may", limit="pongs"
            )

    def ping(self) -> int:
        """Queue a ping and return its value."""
        value, self._next_ping = self._next_ping, (self._next_ping + 1) & U32_MAX
        self.pings.append(value)
        return value

    def answered(self, value: int) -> bool:
        """Confirm the ends in front of one of the control's own pings; return False if the ping is another one."""
        halves = self._asked.pop(value, None)
        if halves is None:
            return False
        self._state.events += [Confirmed(half) for half in halves]
        for half in halves:
            half.was_confirmed()
        return True

    def confirm(self, out: list[Buffer]) -> int:
        """Append the ping that confirms the ends that were written, if none is under way; return its size."""
        if not self.unconfirmed or self._asked:
            return 0
        value, self._next_ping = self._next_ping, (self._next_ping + 1) & U32_MAX
        self._asked[value], self.unconfirmed = self.unconfirmed, []
        out.append(encode_header(PING, SYN, SESSION, value))
        return HEADER_SIZE

    def write(self, out: list[Buffer]) -> int:
        """Append everything that waits, and return its size."""
        frames: list[bytes] = []
        for stream in self.dirty:
            # A data frame that follows immediately carries the flag as well, so it needs no frame of its own.
            if not stream.is_gone and stream.reset is None and (stream.grant or not stream.sender.is_ready()):
                flags, stream.flags = stream.flags, 0
                grant, stream.grant = stream.grant, 0
                if flags or grant:
                    frames.append(encode_header(WINDOW_UPDATE, flags, stream.id, grant))
        self.dirty.clear()
        if self.resets or self.never_opened:
            self._write_resets(frames)
        if self.refused:
            frames += [encode_header(WINDOW_UPDATE, RST, stream, 0) for stream in self.refused]
            self.refused.clear()
        if self.pings:
            frames += [encode_header(PING, SYN, SESSION, value) for value in self.pings]
            self.pings.clear()
        if self.pongs:
            frames += [encode_header(PING, ACK, SESSION, value) for value in self.pongs]
            self.pongs.clear()
        if self.go_away is not None:
            frames.append(encode_header(GO_AWAY, 0, SESSION, self.go_away))
            self.go_away = None
        if frames:
            out.append(b"".join(frames))
        return sum(map(len, frames))

    def _write_resets(self, frames: list[bytes]) -> None:
        """Write the resets; their streams are over with that."""
        resets, self.resets = self.resets, {}
        for stream in resets:
            payload = stream.reset or b""
            frames.append(encode_header(DATA if payload else WINDOW_UPDATE, RST, stream.id, len(payload)) + payload)
        never, self.never_opened = self.never_opened, []
        for stream in (*resets, *never):
            self._state.events += [Confirmed(stream.sender), Confirmed(stream.receiver)]
            self._state.remove(stream)
