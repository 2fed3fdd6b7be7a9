"""The QUIC link: it runs one aioquic connection on Trio, and queues its input and output.

`QuicLink` implements `muxkit.runtime.MultistreamLink`, which Aqueduct speaks over. aioquic does no I/O. One task runs
the connection's timers and writes packets, and another one reads the socket and feeds packets to the connection. Both
memory and work are bounded: stream data by granted credit, datagrams by a queue, and resets by a rate.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Final, Literal

import trio
from aioquic.quic import events as quic_events
from aioquic.quic.packet import QuicErrorCode

from muxkit import Identity, RemoteProtocolError
from muxkit.runtime import Arrival, Datagram, MultistreamLink, StreamData, StreamReset, StreamStopped, TokenBucket

from .._identity import of_x509
from .._sockets import OneAtATime, local_name
from ..packets.options import Address
from ..packets.sockets import PacketSocket
from .connection import LimitedConnection
from .options import QuicOptions
from .qlog import Trace

PAUSE = 100e-6  # s without a write after which the next write is sent immediately
GRAIN = 1e-6  # s between two calls of aioquic's timer
DATAGRAMS_OUT = 64  # datagrams that may wait to be sent; more are refused
DATAGRAMS_AT_ONCE = 8  # datagrams to pass to aioquic, which sends all of them before any stream data
# Sent bytes are kept until they are acknowledged, because they may have to be sent again. A connection keeps as many as
# the outbox, or as many as this rate needs on a longer path, up to so many outboxes. aioquic reaches a few times less.
FASTEST = 100 * 1024 * 1024  # bytes per second
UNACKNOWLEDGED = 8
# Bulk data fills the outbox except for this share, which is left to streams that have nothing unsent. Without it, a
# short message would wait until a quarter of the outbox has been sent: 50 ms at 5 MiB/s.
SPARED = 16
QUICK_BYTES = 4 * 1024  # bytes that such a stream may write when only that share is left
JOIN_BELOW = 16 * 1024  # bytes of one stream up to which pieces are joined into one arrival
DATAGRAMS_MOST = 1024  # received datagrams that may wait; more are dropped
DATAGRAM_BYTES_MOST = 1024 * 1024
GOODBYES = 8  # the close frame is repeated this often, each time after twice as many received packets

ORDERLY: Final = 0
FAILED: Final = 1  # close codes are defined by the application protocol; these two are ours
REASON_MOST = 256  # bytes of the text in a close frame
TLS_ALERTS: Final = 0x100  # error codes from here on are TLS alerts


Packet = tuple[bytes, Address]


class QuicLink(MultistreamLink):
    """One QUIC connection.

    The task that runs the connection calls `run`. The task that reads the socket calls `feed` for each packet, and then
    `finish_feeding`.
    """

    def __init__(
        self,
        quic: LimitedConnection,
        wire: PacketSocket,
        *,
        role: Literal["client", "server"],
        name: str,
        options: QuicOptions,
        on_id: Callable[[bytes, bool], None] = lambda connection_id, is_new: None,
    ) -> None:
        self._quic = quic
        self._writer = PacketWriter(wire)
        self._role: Literal["client", "server"] = role
        self._name = name
        self._limits = options.limits
        self._keep_alive = options.keep_alive
        self._trace = quic.trace if isinstance(quic.trace, Trace) else None
        self._on_id = on_id
        self.established: trio.Event = trio.Event()
        self._completed: quic_events.HandshakeCompleted | None = None  # held back while the server may reject a client
        self.alpn: str | None = None
        """The protocol that both sides agreed on."""
        self.is_resumed: bool = False
        """True if the handshake used a session ticket of an earlier connection."""
        self.had_early_data: bool = False
        """True if early data was accepted. It never is, because early data can be replayed."""
        # parking lots
        self._doorbell = trio.lowlevel.ParkingLot()  # `run`
        self._heard = trio.lowlevel.ParkingLot()  # `receive`
        self._roomy = trio.lowlevel.ParkingLot()  # `wait_writable`, `wait_delivered`, `aclose`
        self._receiving = OneAtATime("receiving from this connection")
        self._waiting = OneAtATime("waiting for room on this connection")
        self._alarm = trio.CancelScope()
        # received
        self._arrivals = ArrivalQueue()
        self._resets = TokenBucket(options.limits.resets_per_second, options.limits.resets_burst)
        self._stopped: set[int] = set()  # streams that we asked the peer to reset
        self._last_heard = trio.current_time()
        # to be sent
        self._datagrams_out: deque[bytes] = deque()
        self._wants_room: dict[int, None] = {}  # streams for which `room` returned 0, in order
        self._bulky: set[int] = set()  # streams whose last write took all the room that they had
        self._wants_stream = False
        self._wants_datagram = False
        self._last_ping = self._timed_at = self._flushed_at = -math.inf
        # its end
        self._is_closing = False
        self._is_closed = False
        self._failure: RemoteProtocolError | None = None

    # --- state

    @property
    def role(self) -> Literal["client", "server"]:
        return self._role

    @property
    def peer(self) -> str:
        return self._name

    @property
    def local(self) -> str:
        """The name of this end, in the form of `peer`. Empty once the socket is closed."""
        return local_name(self._name, self.wire.socket)

    @property
    def identity(self) -> Identity | None:
        """The identity in the peer's verified certificate. None if the peer presented none or wasn't asked for one."""
        certificate = self._quic.certificate
        return None if certificate is None else of_x509(certificate)

    @property
    def round_trip(self) -> float | None:
        return self._quic.round_trip

    @property
    def wire(self) -> PacketSocket:
        """The socket on which this connection sends."""
        return self._writer.wire

    @property
    def dropped_datagrams(self) -> int:
        """The number of received datagrams that were dropped because the queue was full."""
        return self._arrivals.dropped

    @property
    def is_over(self) -> bool:
        """True once the connection has ended, or was closed on this side."""
        return self._is_closed or self._quic.ending is not None

    @property
    def _is_over_in_order(self) -> bool:
        return self._quic.ending is not None and not (self._is_closing or self._is_closed) and self.ended is None

    @property
    def ended(self) -> ConnectionEnded | None:
        """The error with which the connection ended.

        None before the end, after an orderly end, and after a close on this side.
        """
        quic, name, ending = self._quic, self._name, self._quic.ending
        if ending is None or self._is_closing:
            return None
        code, reason = ending.error_code, printable(ending.reason_phrase)
        is_application = ending.frame_type is None
        by: Literal["peer", "local", "network"] = "peer"
        if self._failure is not None:
            text = f"{name}: {self._failure}"
        elif quic.is_ended_by_peer:
            if code == ORDERLY:
                return None
            text = f"{name}: the peer closed the connection with {_named(code, is_application)}{_with(reason)}"
            if not is_application:
                reason = f"{_named(code, is_application)}{_with(reason)}"
        elif quic.is_timed_out:
            by = "network"
            text = f"{name}: no data from the peer for {quic.configuration.idle_timeout:g} s"
        else:
            text = f"{name}: the peer broke a rule of QUIC, {_named(code, is_application)}{_with(reason)}"
        error = ConnectionEnded(text, code=code, is_application=is_application, reason=reason, by=by)
        error.__cause__ = self._failure
        return error

    def __repr__(self) -> str:
        return f"<QuicLink {self._name}{', closed' if self.is_over else ''}>"

    # --- receiving

    async def receive(self) -> Sequence[Arrival]:
        with self._receiving:
            await trio.lowlevel.checkpoint()
            while True:
                if self._is_closing or self._is_closed or not self._arrivals:
                    if self._is_over_in_order:
                        return ()
                    self._check_alive()
                if self._arrivals:
                    return self._arrivals.take()
                await self._heard.park()

    def consumed(self, stream: int, amount: int) -> None:
        if not self.is_over and self._quic.incoming.consumed(stream, amount, trio.current_time()):
            self._doorbell.unpark_all()

    def credit(self, stream: int) -> int:
        return self._quic.incoming.of(stream)

    def lend(self, stream: int, amount: int) -> None:
        if not self.is_over and self._quic.incoming.lend(stream, amount):
            self._doorbell.unpark_all()

    def stop(self, stream: int) -> None:
        if not self.is_over and self._quic.stop(stream):
            self._stopped.add(stream)
            self._doorbell.unpark_all()

    # --- sending

    def may_open(self) -> bool:
        self._wants_stream = not self._quic.may_open
        return not self._wants_stream

    def open(self) -> int:
        if self._quic.ending is None and not self._quic.may_open:
            raise ValueError(f"{self._name}: the peer takes no more streams now")
        return self._quic.open()

    def room(self, stream: int) -> int:
        room = self._room(stream)
        if room > 0:
            return room
        self._wants_room.setdefault(stream)
        return 0

    def _room(self, stream: int) -> int:
        free, spared = self._free, self._limits.outbox // SPARED
        if free > spared:
            free -= spared
        elif stream in self._bulky or not self._quic.has_sent_all(stream):
            return 0
        else:
            free = min(free, QUICK_BYTES)
        return min(self._quic.credit(stream), free)

    @property
    def _free(self) -> int:
        """The number of bytes for which there is memory, including the share that is left to short messages."""
        quic, outbox = self._quic, self._limits.outbox
        needed = int(FASTEST * (quic.incoming.round_trip.seconds or 0.0))
        kept = min(max(outbox, needed), UNACKNOWLEDGED * outbox)
        return min(outbox - quic.unsent, kept - quic.buffered)

    def write(self, stream: int, data: bytes, is_last: bool) -> None:
        if self.is_over or not self._quic.is_writable(stream):
            return  # the writer learns of the end from another call
        if len(data) > (room := self.room(stream)):
            raise ValueError(f"stream {stream}: {len(data)} bytes to write, there is room for {room}")
        if is_last or len(data) < room:
            self._bulky.discard(stream)
        else:
            self._bulky.add(stream)
        self._quic.write(stream, data, is_last)
        self._nudge()

    def reset(self, stream: int) -> None:
        if not self.is_over and self._quic.give_up(stream):
            self._forget(stream)
            self._doorbell.unpark_all()

    def _forget(self, stream: int) -> None:
        """Forget a stream on which nothing is written any more."""
        self._wants_room.pop(stream, None)
        self._bulky.discard(stream)

    async def wait_writable(self) -> Sequence[int]:
        with self._waiting:
            await trio.lowlevel.checkpoint()
            while True:
                self._check_alive()
                streams = self._with_room()
                if streams or self._is_asked_for():
                    for stream in streams:
                        del self._wants_room[stream]
                    self._wants_stream = self._wants_stream and not self._quic.may_open
                    self._wants_datagram = self._wants_datagram and self._is_full_of_datagrams
                    return streams
                await self._roomy.park()

    async def wait_delivered(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._datagrams_out or not self._quic.is_all_delivered:
            self._check_alive()
            await self._roomy.park()

    def _with_room(self) -> list[int]:
        """Return the streams that have room again, once a quarter of the outbox is free, to avoid frequent wake-ups."""
        if not self._wants_room or 4 * self._free < self._limits.outbox:
            return []
        credit, is_writable = self._quic.credit, self._quic.is_writable
        return [stream for stream in self._wants_room if credit(stream) > 0 or not is_writable(stream)]

    def _is_asked_for(self) -> bool:
        return (self._wants_stream and self._quic.may_open) or (self._wants_datagram and not self._is_full_of_datagrams)

    # --- datagrams

    @property
    def datagram_limit(self) -> int:
        return self._quic.datagram_limit

    def may_send_datagram(self) -> bool:
        self._wants_datagram = self._is_full_of_datagrams
        return not self._wants_datagram

    @property
    def _is_full_of_datagrams(self) -> bool:
        return len(self._datagrams_out) >= DATAGRAMS_OUT

    def send_datagram(self, data: bytes) -> bool:
        if len(data) > (limit := self.datagram_limit):
            raise ValueError(f"{self._name}: a datagram of {len(data)} bytes against {limit}")
        if self.is_over or self._is_full_of_datagrams:
            return False
        self._datagrams_out.append(data)
        self._nudge()
        return True

    # --- the end

    def close(self, *, error: str = "", code: int | None = None) -> None:
        """Send the close frame now. By default its code is 0 without an error, and 1 with one."""
        if self._is_closing or self._quic.ending is not None:
            return
        self._is_closing = True
        code = code if code is not None else FAILED if error else 0
        self._quic.close(error_code=code, reason_phrase=clipped(error))
        self.flush()
        self._wake_all()

    def drop(self, error: str) -> None:
        """Close the connection if it isn't closed yet, and end its trace. For the tasks that run the connection."""
        self.close(error=error)
        if self._trace is not None:
            self._trace.write()
            self._trace.close()

    async def aclose(self) -> None:
        self.close()
        try:
            await trio.lowlevel.checkpoint()
            while self._writer.waiting and not self._quic.is_terminated:
                await self._roomy.park()
        finally:
            self._is_closed = True
            self._wake_all()

    def _fail(self, error: RemoteProtocolError) -> None:
        """Close the connection because the peer broke a rule."""
        if not self.is_over:
            self._failure = error
            self._quic.close(error_code=FAILED, reason_phrase=clipped(error.message))

    def _check_alive(self) -> None:
        if self._is_closing or self._is_closed:
            raise trio.ClosedResourceError(f"{self._name}: this connection was closed on our side")
        if self._quic.ending is not None:
            raise self.ended or trio.BrokenResourceError(f"{self._name}: the peer closed the connection")

    def _wake_all(self) -> None:
        for lot in (self._doorbell, self._heard, self._roomy):
            lot.unpark_all()

    # --- the task

    async def run(self) -> None:
        """Send packets when they are due, until the connection is terminated."""
        while not self._quic.is_terminated:
            self.flush()
            if self._writer.waiting:
                await self._writer.wait()
                self._roomy.unpark_all()
                continue
            with trio.CancelScope(deadline=self._next_deadline()) as self._alarm:
                await self._doorbell.park()
            if self._alarm.cancelled_caught:
                self._on_time(trio.current_time())
        self._wake_all()

    def _on_time(self, now: float) -> None:
        self._release_streams(now)
        timer = self._quic.get_timer()
        if timer is not None and timer <= now:
            self._timed_at = now
            self._quic.handle_timer(now)
            self.finish_feeding(is_timer=True)
        elif self._ping_at() <= now:
            self._last_ping = now
            self._quic.send_ping(0)

    def _release_streams(self, now: float) -> None:
        while self._quic.withheld and self._resets.take(now):
            self._quic.withheld -= 1

    def _release_at(self, now: float) -> float:
        return now + max(self._resets.pause(now), GRAIN) if self._quic.withheld and not self.is_over else math.inf

    def _next_deadline(self) -> float:
        timer = self._quic.get_timer()
        release = self._release_at(trio.current_time())
        # Because of rounding, aioquic may consider a call too early. It accepts a call a moment later.
        return min(math.inf if timer is None else max(timer, self._timed_at + GRAIN), self._ping_at(), release)

    def _ping_at(self) -> float:
        if self._keep_alive is None or self.is_over or not self.established.is_set():
            return math.inf
        return max(self._last_heard, self._last_ping) + self._keep_alive

    # --- packets

    def _nudge(self) -> None:
        """Send the first write after a pause immediately. Leave further writes to `run`, which joins them."""
        if self._doorbell and perf_counter() - self._flushed_at >= PAUSE:
            self.flush()
        else:
            self._doorbell.unpark_all()

    def feed(self, packet: Packet) -> None:
        """Process one packet. After the last of several packets, call `finish_feeding`."""
        data, address = packet
        if self._writer.has_said_goodbye:
            self._writer.repeat_goodbye()
            return
        now = self._last_heard = trio.current_time()
        self._quic.receive_datagram(data, address, now)
        self._collect(now)

    def finish_feeding(self, *, is_timer: bool = False) -> None:
        """Answer the packets that were processed, and wake the tasks that wait for their effects."""
        self._quic.look_at_sent()
        self._collect(trio.current_time())
        self.flush(is_timer=is_timer)
        if self._quic.ending is not None:
            self._wake_all()
            return
        if self._arrivals:
            self._heard.unpark_all()
        if self._roomy and (self._with_room() or self._is_asked_for() or self._quic.is_all_delivered):
            self._roomy.unpark_all()

    def flush(self, *, is_timer: bool = False) -> None:
        """Send what may be sent now, as far as the kernel accepts it. After a timer, ask aioquic in any case."""
        now = trio.current_time()
        while not self._writer.waiting:
            if self._datagrams_out and not self._quic.waiting_datagrams:
                for _ in range(min(DATAGRAMS_AT_ONCE, len(self._datagrams_out))):
                    self._quic.send_datagram_frame(self._datagrams_out.popleft())
            if not (is_timer or self._quic.has_output(now)):
                break
            packets = self._quic.datagrams_to_send(now)
            if packets:
                self._writer.send(packets, is_goodbye=self._quic.ending is not None)
            if not (packets and self._datagrams_out):
                break
        if self._writer.waiting:
            self._doorbell.unpark_all()
        self._collect(now)
        if self._doorbell:  # `run` is asleep
            self._alarm.deadline = min(self._alarm.deadline, self._next_deadline())
        if self._trace is not None:
            self._trace.write()
        self._flushed_at = perf_counter()

    def replace_wire(self, wire: PacketSocket) -> PacketSocket:
        """Continue on another socket, with another connection id. Return the previous socket."""
        before, self._writer.wire = self._writer.wire, wire
        self._writer.waiting = []  # these packets count as lost
        self._quic.change_connection_id()
        self._quic.send_ping(0)
        self._doorbell.unpark_all()
        return before

    # --- events

    def _collect(self, now: float) -> None:
        while (event := self._quic.next_event()) is not None:
            match event:
                case quic_events.StreamDataReceived(data=data, end_stream=is_last, stream_id=stream):
                    self._quic.arrived(stream, len(data), is_last, now)
                    self._arrivals.add_data(stream, data, is_last)
                    if is_last:
                        self._stopped.discard(stream)
                case quic_events.StreamReset(stream_id=stream):
                    # A reset stream costs us more than the peer, so the peer regains such streams at a limited rate.
                    if stream in self._stopped:
                        self._stopped.discard(stream)
                    elif not self._resets.take(now):
                        self._quic.withheld += 1
                    self._quic.has_ended(stream, now)
                    self._arrivals.add_reset(stream)
                case quic_events.StopSendingReceived(stream_id=stream):
                    if self._quic.give_up(stream):
                        self._forget(stream)
                        self._arrivals.add_stop(stream)
                case quic_events.DatagramFrameReceived(data=data):
                    self._arrivals.add_datagram(data)
                case quic_events.HandshakeCompleted() as handshake:
                    self._completed = handshake
                case quic_events.ConnectionIdIssued(connection_id=connection_id):
                    self._on_id(connection_id, True)
                case quic_events.ConnectionIdRetired(connection_id=connection_id):
                    self._on_id(connection_id, False)
        if self._completed is not None and not self._quic.awaits_verdict:
            handshake, self._completed = self._completed, None
            self.alpn, self.is_resumed = handshake.alpn_protocol, handshake.session_resumed
            self.had_early_data = handshake.early_data_accepted
            self.established.set()


# --- the queue of arrivals


class ArrivalQueue:
    """Arrivals in order, until `receive` takes them. Small pieces of a stream are joined.

    The credit granted to the peer bounds the bytes of streams. Datagrams have their own limit.
    """

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []
        self._tails: dict[int, _Tail] = {}  # the last arrival of each stream, to which further data is added
        self._datagrams = 0
        self._datagram_bytes = 0
        self.dropped: int = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Arrival]:
        """Return all arrivals, and empty the queue."""
        waiting, self._waiting = self._waiting, []
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()
        self._datagrams = self._datagram_bytes = 0
        return waiting

    def add_data(self, stream: int, data: bytes, is_last: bool) -> None:
        """Add data of a stream, joined with the last piece if that is small."""
        tail = self._tails.get(stream)
        if tail is not None and tail.size < JOIN_BELOW:
            tail.add(data, is_last)
            return
        if tail is not None:
            tail.close()
        arrival = StreamData(stream, data, is_last)
        self._waiting.append(arrival)
        self._tails[stream] = _Tail(arrival)

    def add_reset(self, stream: int) -> None:
        """Add the reset of a stream."""
        if (tail := self._tails.pop(stream, None)) is not None:
            tail.close()
        self._waiting.append(StreamReset(stream))

    def add_stop(self, stream: int) -> None:
        """Add the request of the peer to stop sending on a stream."""
        self._waiting.append(StreamStopped(stream))

    def add_datagram(self, data: bytes) -> None:
        """Add a datagram, or drop it if the queue is full."""
        if self._datagrams >= DATAGRAMS_MOST or self._datagram_bytes + len(data) > DATAGRAM_BYTES_MOST:
            self.dropped += 1
            return
        self._datagrams += 1
        self._datagram_bytes += len(data)
        self._waiting.append(Datagram(data))


class _Tail:
    """The last arrival of a stream. Pieces that are added to it are copied only once, by `close`."""

    __slots__ = ("_arrival", "_pieces", "size")

    def __init__(self, arrival: StreamData) -> None:
        self._arrival = arrival
        self._pieces: list[bytes] = [arrival.data]
        self.size = len(arrival.data)

    def add(self, data: bytes, is_last: bool) -> None:
        self._pieces.append(data)
        self.size += len(data)
        self._arrival.is_last = is_last

    def close(self) -> None:
        if len(self._pieces) > 1:
            self._arrival.data = b"".join(self._pieces)


# --- output


class PacketWriter:
    """Writes packets to the socket, queues those that the kernel doesn't accept yet, and repeats the close frame."""

    def __init__(self, wire: PacketSocket) -> None:
        self.wire = wire
        self.waiting: list[Packet] = []
        self._goodbye: list[Packet] = []
        self._unheard = 0

    @property
    def has_said_goodbye(self) -> bool:
        """True once a close frame was sent."""
        return bool(self._goodbye)

    def send(self, packets: list[Packet], *, is_goodbye: bool = False) -> None:
        """Send as many packets as the kernel accepts now. The rest is queued."""
        if is_goodbye:
            self._goodbye = packets
        with suppress(trio.ClosedResourceError):
            self.waiting = send_now(self.wire, packets)

    async def wait(self) -> None:
        """Wait until the kernel accepts more packets, then send the queued ones."""
        wire = self.wire
        try:
            await wire.wait_writable()
        except trio.ClosedResourceError:
            if wire is self.wire:  # closed without a replacement
                self.waiting = []
            return
        waiting, self.waiting = self.waiting, []
        self.send(waiting)

    def repeat_goodbye(self) -> None:
        """Send the close frame again, after the first packet that follows it, the second, the fourth, and so on."""
        self._unheard += 1
        if self._unheard < 1 << GOODBYES and self._unheard & (self._unheard - 1) == 0 and not self.waiting:
            self.send(self._goodbye)


def send_now(wire: PacketSocket, packets: list[Packet]) -> list[Packet]:
    """Send as many packets as the kernel accepts now, and return the rest.

    All packets go to the address of the first, since aioquic returns packets for one address at a time. A packet that
    is too large for the path counts as lost.
    """
    while packets:
        try:
            taken = wire.send([data for data, _ in packets], packets[0][1])
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            wire.lost += 1
            taken = 1
        if not taken:
            break
        packets = packets[taken:]
    return packets


# --- how it ended


class ConnectionEnded(trio.BrokenResourceError):
    """Raised when a QUIC connection has ended abnormally.

    `code` is the error code, and `is_application` is True if the application protocol defined it instead of QUIC.
    `reason` is the text that came with it, and `by` is the side that ended the connection.
    """

    def __init__(
        self, text: str, *, code: int, is_application: bool, reason: str, by: Literal["peer", "local", "network"]
    ) -> None:
        super().__init__(text)
        self.code = code
        self.is_application = is_application
        self.reason = reason
        self.by: Literal["peer", "local", "network"] = by


def alert_name(code: int) -> str | None:
    """Return the name of the TLS alert for an error code of QUIC, such as "certificate required", or None."""
    return ALERTS.get(code - TLS_ALERTS)


def clipped(text: str) -> str:
    """Cut a text to the size that a close frame, which is a single packet, can hold."""
    return text.encode()[:REASON_MOST].decode(errors="ignore")


def printable(text: str) -> str:
    """Replace unprintable characters in a peer's text, so that a log or a terminal can show it."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text[:REASON_MOST])


ALERTS: Final = {
    40: "handshake failure",
    42: "bad certificate",
    43: "unsupported certificate",
    45: "certificate expired",
    46: "certificate unknown",
    48: "unknown authority",
    116: "certificate required",
    120: "no application protocol in common",
}


def _named(code: int, is_application: bool) -> str:
    if is_application:
        return f"code {code}"
    if code in {known.value for known in QuicErrorCode}:
        return QuicErrorCode(code).name.lower().replace("_", " ")
    alert = code - TLS_ALERTS
    return f"TLS alert {ALERTS.get(alert, alert)}" if alert >= 0 else f"code {code:#x} of QUIC"


def _with(reason: str) -> str:
    return f": {reason}" if reason else ""
