"""The contract of an engine: one interface for each kind of link, and optional capabilities that a pump looks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from muxkit._quick_check import QuickCheck

EventT_co = TypeVar("EventT_co", covariant=True)

Buffer = bytes | memoryview


class Clock(Protocol):
    """Gives the time to an engine whose commands need it, since commands bring none; Trio's clocks are such."""

    def current_time(self) -> float: ...


class Engine(Protocol[EventT_co]):
    """Rules without I/O: bytes and times go in, events and bytes come out.

    What comes in returns the events that it caused; `events` has those that commands and writing caused. An engine may
    leave all of them to `events`, and return None.
    """

    def events(self) -> Sequence[EventT_co]:
        """Return what happened since the last call, oldest first."""

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`, on the clock that `now` comes from."""

    def handle_deadline(self, now: float) -> Sequence[EventT_co] | None:
        """Act on the timers that are due, and return what happened; harmless when early.

        None stands for an engine that has everything in `events`.
        """


class StreamEngine(Engine[EventT_co], Protocol[EventT_co]):
    """Speaks over an ordered byte stream: TCP, TLS, Unix sockets, WebSockets.

    `receive_*` never raises: a bad peer gives one last event that holds the `RemoteProtocolError`, then
    silence. Output is pulled, so that what to write is chosen at the last moment.
    """

    def receive_bytes(self, data: bytes, now: float) -> Sequence[EventT_co] | None:
        """Take in the bytes that the transport brought, and return what happened.

        None stands for an engine that has everything in `events`.
        """

    def receive_eof(self, now: float) -> Sequence[EventT_co] | None:
        """The peer will send nothing more."""

    def has_output(self) -> bool:
        """Return True if there is anything to write; cheap."""

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        """Take out about `limit` bytes to write now; a frame that was begun is finished."""


class DatagramEngine(Engine[EventT_co], Protocol[EventT_co]):
    """Speaks over packets that may be lost, repeated and reordered: UDP, DTLS."""

    def receive_datagram(self, data: bytes, now: float) -> Sequence[EventT_co] | None:
        """Take in one packet; never raises."""

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        """Take out the packets to send now."""


StreamId = int
"""The number of a unidirectional stream, as QUIC counts them: 2, 6, 10, … of a client, 3, 7, 11, … of a server."""


@attrs.define
class Reset:
    """Give up a stream that we write: nothing more is sent on it."""

    stream: StreamId


@attrs.define
class Stop:
    """Ask the peer to give up a stream that it writes."""

    stream: StreamId


@attrs.define
class Consumed:
    """Renew so many bytes of credit for a stream that the peer writes: they were consumed."""

    stream: StreamId
    amount: int


@attrs.define
class Lent:
    """Let the peer send so many bytes beyond the window; what is consumed of the stream repays them first.

    A link that knows how much credit is out lends what the frame lacks beyond that (`MultistreamEngine.missing`).
    """

    stream: StreamId
    amount: int


StreamControl = Reset | Stop | Consumed | Lent


class MultistreamEngine(Engine[EventT_co], Protocol[EventT_co]):
    """Speaks over unidirectional streams and datagrams: QUIC, or a byte stream through a carrier.

    `receive_*` never raises, and returns what happened. Output is pulled, a stream at a time, by a writer that knows
    the room of each.
    """

    @property
    def frames(self) -> int:
        """How many frames it has parsed, so that its pump can end a turn in time."""

    def missing(self, stream: StreamId) -> int:
        """Return how many more bytes of a stream it only collects: no frame ends before that."""

    def set_rtt(self, seconds: float) -> None:
        """A round trip of the link takes so long."""

    def receive_closed(self, now: float, *, clean: bool = True) -> Sequence[EventT_co]:
        """Nothing more can come, nor be sent; with `clean` the peer ended the connection in order."""

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool, now: float) -> Sequence[EventT_co]:
        """The next bytes of a stream that the peer writes; with `fin` the last ones."""

    def receive_reset(self, stream: StreamId, now: float) -> Sequence[EventT_co]:
        """The peer gave up a stream that it writes."""

    def receive_stopped(self, stream: StreamId, now: float) -> Sequence[EventT_co]:
        """The peer wants no more of a stream that we write."""

    def receive_datagram(self, data: bytes, now: float) -> Sequence[EventT_co]:
        """Take in one datagram."""

    def has_output(self, may_open: bool) -> bool:
        """Return True if there is anything to run or to write, if new streams may be opened or not; cheap."""

    def control_to_run(self) -> Sequence[StreamControl]:
        """Take out what the link is to do about its streams, merged since the last call."""

    def next_stream(self, may_open: bool) -> StreamId | None:
        """Return the stream that writes next, in fair order; a new one only if the peer allows one more."""

    def stream_to_send(self, stream: StreamId, limit: int) -> tuple[bytes, bool]:
        """Take out at most `limit` bytes, and whether they end the stream; with 0 it waits for `stream_writable`."""

    def stream_writable(self, stream: StreamId) -> None:
        """A stream has room again."""

    def datagram_to_send(self, limit: int) -> bytes | None:
        """Take out the next datagram, no larger than `limit`; its number is assigned here."""


@runtime_checkable
class BoundedParsing(Protocol, metaclass=QuickCheck):
    """An engine that parses a bounded number of frames at a time, so that its pump can end a turn in time.

    Bytes alone are no measure: a read that is full of the smallest frames takes a thousand times as long as one
    with a single message. Nor are frames: one that does more than others counts as several.
    """

    frames_at_once: int
    """`receive_bytes` parses at most so many; all, unless a pump says otherwise."""

    @property
    def unparsed(self) -> int:
        """Bytes that were kept because of that; call `receive_bytes(b"", now)` until there are none."""


@runtime_checkable
class Answering(Protocol, metaclass=QuickCheck):
    """An engine that can still owe the peer something when the peer has ended its direction of the stream.

    A pump calls `receive_half_close` instead of `receive_eof` if the link can still carry bytes to the peer. While that
    returned True, and `owes_peer` does, the pump goes on writing. Then it calls `receive_eof`.
    """

    def receive_half_close(self, now: float, is_writing: bool) -> bool:
        """The peer will send nothing more, but may read on. Return True if this side still owes it something.

        `is_writing` says that bytes have left the engine which the link hasn't taken. These are owed, too.
        """

    def owes_peer(self) -> bool:
        """Return True if this side may still send something that the peer waits for."""


@runtime_checkable
class SeparateTimers(Protocol, metaclass=QuickCheck):
    """An engine whose `next_deadline` is now while it has something to send, as its timers begin when that leaves.

    While its transport takes nothing a pump goes by `next_timer`, or it would call such an engine without end.
    """

    def next_timer(self) -> float | None:
        """`next_deadline` without what waits to be sent."""
