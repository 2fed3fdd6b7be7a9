"""The interfaces between an engine and the pump that connects it to a link.

An *engine* implements a protocol without I/O. A *pump* (`muxkit.runtime.pumps`) reads bytes or packets from a link,
passes them to the engine, writes the engine's output to the link, and calls the engine when a timer is due. For each
kind of link, there is one interface of an engine:

- `StreamEngine` for an ordered byte stream
- `DatagramEngine` for packets that may be lost
- `MultistreamEngine` for QUIC's streams and datagrams

`BoundedParsing`, `Answering` and `SeparateTimers` are optional abilities. A pump looks for them with `isinstance`.

An engine never reads the clock while it processes input: the pump passes the time as `now`. The commands of a session
have no such argument. An engine that needs the time for them gets a `Clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from muxkit._quick_check import QuickCheck

EventT_co = TypeVar("EventT_co", covariant=True)

Buffer = bytes | memoryview


class Clock(Protocol):
    """A clock for engines whose commands need the time. Trio's clocks have this interface."""

    def current_time(self) -> float: ...


class Engine(Protocol[EventT_co]):
    """The methods that the engines for all kinds of links have.

    The methods that process input return the events that it has caused. `events` returns the events that commands and
    writing have caused. An engine may also return None from all other methods, and report everything in `events`.
    """

    def events(self) -> Sequence[EventT_co]:
        """Return the events since the last call, oldest first."""

    def next_deadline(self) -> float | None:
        """Return the time at which to call `handle_deadline`, or None if no timer is running."""

    def handle_deadline(self, now: float) -> Sequence[EventT_co] | None:
        """Handle the timers that are due, and return the events. It is harmless to call this too early."""


class StreamEngine(Engine[EventT_co], Protocol[EventT_co]):
    """An engine over an ordered byte stream, such as TCP, TLS, a Unix socket or a WebSocket.

    The methods `receive_…` never raise. If the peer breaks a rule, they return one last event with a
    `RemoteProtocolError`, and the engine ignores everything after that. The pump pulls output from the engine when the
    link can take it, so the engine decides at the last moment what to write next.
    """

    def receive_bytes(self, data: bytes, now: float) -> Sequence[EventT_co] | None:
        """Process bytes from the peer, and return the events."""

    def receive_eof(self, now: float) -> Sequence[EventT_co] | None:
        """Process the end of the peer's direction of the stream, and return the events."""

    def has_output(self) -> bool:
        """Return True if there is anything to write. This is fast."""

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        """Remove about `limit` bytes of output from the engine and return them. The result contains whole frames."""


class DatagramEngine(Engine[EventT_co], Protocol[EventT_co]):
    """An engine over packets that may be lost, duplicated and reordered, such as those of UDP and DTLS."""

    def receive_datagram(self, data: bytes, now: float) -> Sequence[EventT_co] | None:
        """Process one packet, and return the events. Never raises."""

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        """Remove the packets that may be sent now from the engine, and return them."""


StreamId = int
"""The number of a unidirectional stream, as in QUIC: 2, 6, 10, … if the client sends on it, otherwise 3, 7, 11, …"""


@attrs.define
class Reset:
    """A request to the link to abandon a stream on which this side sends."""

    stream: StreamId


@attrs.define
class Stop:
    """A request to the link to ask the peer that it abandons a stream on which it sends."""

    stream: StreamId


@attrs.define
class Consumed:
    """A request to the link to grant `amount` bytes of new credit for a stream on which the peer sends."""

    stream: StreamId
    amount: int


@attrs.define
class Lent:
    """A request to the link to lend credit for a stream, for a frame that is larger than the stream's window.

    The bytes that are consumed next repay the loan, before they grant new credit. If the link knows how much credit the
    peer has left, the pump lends less: only as much as the frame needs (`MultistreamEngine.missing`).
    """

    stream: StreamId
    amount: int


StreamControl = Reset | Stop | Consumed | Lent


class MultistreamEngine(Engine[EventT_co], Protocol[EventT_co]):
    """An engine over unidirectional streams and datagrams, such as those of QUIC.

    Over an ordinary byte stream, a *carrier* provides such streams and datagrams.

    The methods `receive_…` never raise, and return the events. The pump pulls output from the engine, one stream at a
    time, because only the link knows how many bytes each stream accepts.
    """

    @property
    def frames(self) -> int:
        """How many frames the engine has parsed in total. The pump uses it to let other tasks run in time."""

    def missing(self, stream: StreamId) -> int:
        """Return the minimum number of bytes that are missing of the incomplete frame on a stream."""

    def set_rtt(self, seconds: float) -> None:
        """Set the round-trip time of the link."""

    def receive_closed(self, now: float, *, clean: bool = True) -> Sequence[EventT_co]:
        """Process the end of the connection. `clean` is True if the peer has closed it without an error."""

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool, now: float) -> Sequence[EventT_co]:
        """Process the next bytes of a stream. `fin` is True for the last ones."""

    def receive_reset(self, stream: StreamId, now: float) -> Sequence[EventT_co]:
        """Process that the peer has abandoned a stream on which it sends."""

    def receive_stopped(self, stream: StreamId, now: float) -> Sequence[EventT_co]:
        """Process that the peer won't read more from a stream on which this side sends."""

    def receive_datagram(self, data: bytes, now: float) -> Sequence[EventT_co]:
        """Process one datagram."""

    def has_output(self, may_open: bool) -> bool:
        """Return True if there is any output. `may_open` is True if the peer allows another stream. This is fast."""

    def control_to_run(self) -> Sequence[StreamControl]:
        """Return the requests to the link since the last call. Requests about the same stream are merged."""

    def next_stream(self, may_open: bool) -> StreamId | None:
        """Return the stream that may write next, in fair order. This may be a new stream if `may_open` is True."""

    def stream_to_send(self, stream: StreamId, limit: int) -> tuple[bytes, bool]:
        """Remove up to `limit` bytes of a stream's output. With a limit of 0, the stream waits for `stream_writable`.

        Returns:
            The bytes, and True if they are the last ones of the stream.
        """

    def stream_writable(self, stream: StreamId) -> None:
        """Let a stream write again, because the link accepts bytes on it."""

    def datagram_to_send(self, limit: int) -> bytes | None:
        """Remove the next datagram of at most `limit` bytes from the engine, or return None if there is none."""


@runtime_checkable
class BoundedParsing(Protocol, metaclass=QuickCheck):
    """An engine that can limit how many frames it parses in one call, so that other tasks can run in between.

    A limit for bytes wouldn't do, because a read that is full of the smallest frames takes a thousand times as long as
    one with a single message. A frame that takes more time than others counts as several frames.
    """

    frames_at_once: int
    """The maximum number of frames that one call of `receive_bytes` parses. The pump may change it."""

    @property
    def unparsed(self) -> int:
        """The number of bytes that weren't parsed because of the limit. `receive_bytes(b"", now)` parses more."""


@runtime_checkable
class Answering(Protocol, metaclass=QuickCheck):
    """An engine that may still send answers after the peer has ended its own direction of the stream.

    If the peer can still read, the pump calls `receive_half_close` instead of `receive_eof`. If that returns True, the
    pump goes on writing as long as `owes_peer` returns True. Then it calls `receive_eof`.
    """

    def receive_half_close(self, now: float, is_writing: bool) -> bool:
        """Process the end of the peer's direction. Return True if this side still has answers to send.

        Args:
            now: The current time.
            is_writing: True if the link hasn't accepted all bytes that have left the engine.
        """

    def owes_peer(self) -> bool:
        """Return True if this side may still send something for which the peer waits."""


@runtime_checkable
class SeparateTimers(Protocol, metaclass=QuickCheck):
    """An engine whose `next_deadline` is immediate while it has something to send.

    While the link accepts nothing, the pump uses `next_timer` instead. Otherwise, it would call the engine in an
    endless loop.
    """

    def next_timer(self) -> float | None:
        """Return the deadline of the timers alone, without regard to output."""
