"""How does one QUIC connection live on Trio? aioquic's core, the packets it is fed and asked for, and who waits."""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import trio
from aioquic.quic import events as quic_events

from muxkit.runtime import MultistreamLink

from .._sockets import OneAtATime
from ._old_arrivals import Arrivals, Resets
from ._old_departures import Departures
from ._old_ending import FAILED, ConnectionEnded, clipped, ending_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit import Limits, RemoteProtocolError
    from muxkit.runtime import Arrival

    from .connection import LimitedConnection
    from .sockets import Packet, UdpSocket

PAUSE = 100e-6  # s without anything written, after which the next goes out at once
GRAIN = 1e-6  # s, between two calls of aioquic's timer
DATAGRAMS_OUT = 64  # that wait to be sent; more are refused
DATAGRAMS_AT_ONCE = 8  # handed to aioquic, which sends all of them before any stream


class QuicLink(MultistreamLink):
    """A QUIC connection; `run` is its task, and whoever reads the socket calls `feed`, then `settle`."""

    def __init__(
        self,
        quic: LimitedConnection,
        wire: UdpSocket,
        *,
        role: Literal["client", "server"],
        name: str,
        limits: Limits,
        keep_alive: float | None,
        after: Callable[[], None] = lambda: None,
        on_id: Callable[[bytes, bool], None] = lambda connection_id, is_new: None,
    ) -> None:
        self._quic = quic
        self._departures = Departures(wire)
        self._role: Literal["client", "server"] = role
        self._name = name
        self._limits = limits
        self._keep_alive = keep_alive
        self._after = after  # called when aioquic has worked
        self._on_id = on_id
        self.established = trio.Event()
        self.alpn: str | None = None
        """The protocol that both sides agreed on."""
        self.is_resumed = False
        """Was the handshake a short one, by a ticket of an earlier connection?"""
        self.had_early_data = False
        """Was anything taken that could have been a repetition? It never is."""
        # who waits
        self._doorbell = trio.lowlevel.ParkingLot()  # `run`
        self._heard = trio.lowlevel.ParkingLot()  # `receive`
        self._roomy = trio.lowlevel.ParkingLot()  # `wait_writable`, `wait_delivered`, `aclose`
        self._receiving = OneAtATime("receiving from this connection")
        self._waiting = OneAtATime("waiting for room on this connection")
        self._alarm = trio.CancelScope()
        # what came
        self._arrivals = Arrivals()
        self._resets = Resets(limits, trio.current_time())
        self._last_heard = trio.current_time()
        # what goes
        self._datagrams_out: deque[bytes] = deque()
        self._wants_room: dict[int, None] = {}  # streams found without, in order
        self._wants_stream = False
        self._wants_datagram = False
        self._last_ping = self._timed_at = self._flushed_at = -math.inf
        # how it ends
        self._is_closing = False
        self._is_closed = False
        self._failure: RemoteProtocolError | None = None

    # --- what is known

    @property
    def role(self) -> Literal["client", "server"]:
        return self._role

    @property
    def peer(self) -> str:
        return self._name

    @property
    def round_trip(self) -> float | None:
        return self._quic.round_trip

    @property
    def wire(self) -> UdpSocket:
        """The socket that it sends on."""
        return self._departures.wire

    @property
    def dropped_datagrams(self) -> int:
        """Datagrams that came and found the queue full."""
        return self._arrivals.dropped

    @property
    def is_over(self) -> bool:
        return self._is_closed or self._quic.ending is not None

    @property
    def _is_over_in_order(self) -> bool:
        return self._quic.ending is not None and not (self._is_closing or self._is_closed) and self.ended is None

    @property
    def ended(self) -> ConnectionEnded | None:
        """How it ended; None while it lives, or after an orderly end."""
        return ending_of(self._quic, self._name, by_us=self._is_closing, failure=self._failure)

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

    def lend(self, stream: int, amount: int) -> None:
        if not self.is_over and self._quic.incoming.lend(stream, amount):
            self._doorbell.unpark_all()

    def stop(self, stream: int) -> None:
        if not self.is_over and self._quic.stop(stream):
            self._resets.asked.add(stream)
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
        room = min(self._quic.credit(stream), self._limits.outbox - self._quic.buffered)
        if room > 0:
            return room
        self._wants_room.setdefault(stream)
        return 0

    def write(self, stream: int, data: bytes, is_last: bool) -> None:
        if self.is_over or not self._quic.is_writable(stream):
            return  # whoever writes will hear of it, or has
        if len(data) > (room := self.room(stream)):
            raise ValueError(f"stream {stream}: {len(data)} bytes to write, there is room for {room}")
        self._quic.write(stream, data, is_last)
        self._nudge()

    def reset(self, stream: int) -> None:
        if not self.is_over and self._quic.give_up(stream):
            self._wants_room.pop(stream, None)
            self._doorbell.unpark_all()

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
        """Not for every packet that the peer confirms: a quarter of the outbox at a time."""
        if not self._wants_room or 4 * (self._limits.outbox - self._quic.buffered) < self._limits.outbox:
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
        """Say goodbye now; `code` is 0 for an orderly end and 1 for another, unless it is given."""
        if self._is_closing or self._quic.ending is not None:
            return
        self._is_closing = True
        code = code if code is not None else FAILED if error else 0
        self._quic.close(error_code=code, reason_phrase=clipped(error))
        self.flush()
        self._wake_all()

    async def aclose(self) -> None:
        self.close()
        try:
            await trio.lowlevel.checkpoint()
            while self._departures.waiting and not self._quic.is_terminated:
                await self._roomy.park()
        finally:
            self._is_closed = True
            self._wake_all()

    def _fail(self, error: RemoteProtocolError) -> None:
        """The peer broke a rule of ours."""
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
        """Send what is to be sent, when it is to be sent, until nothing can be any more."""
        while not self._quic.is_terminated:
            self.flush()
            if self._departures.waiting:
                await self._departures.wait()
                self._roomy.unpark_all()
                continue
            with trio.CancelScope(deadline=self._next_deadline()) as self._alarm:
                await self._doorbell.park()
            if self._alarm.cancelled_caught:
                self._on_time(trio.current_time())
        self._wake_all()

    def _on_time(self, now: float) -> None:
        timer = self._quic.get_timer()
        if timer is not None and timer <= now:
            self._timed_at = now
            self._quic.handle_timer(now)
            self.settle(is_timer=True)
        elif self._ping_at() <= now:
            self._last_ping = now
            self._quic.send_ping(0)

    def _next_deadline(self) -> float:
        timer = self._quic.get_timer()
        # Rounding can make aioquic find that it was called too early, which it is not a moment later.
        return min(math.inf if timer is None else max(timer, self._timed_at + GRAIN), self._ping_at())

    def _ping_at(self) -> float:
        if self._keep_alive is None or self.is_over or not self.established.is_set():
            return math.inf
        return max(self._last_heard, self._last_ping) + self._keep_alive

    # --- packets

    def _nudge(self) -> None:
        """Something was written: who comes after a pause need not wait for another task, the others go together."""
        if self._doorbell and perf_counter() - self._flushed_at >= PAUSE:
            self.flush()
        else:
            self._doorbell.unpark_all()

    def feed(self, packet: Packet) -> None:
        """Take in one packet; `settle` comes after the last of several."""
        data, address = packet
        if self._departures.has_said_goodbye:
            self._departures.repeat_goodbye()
            return
        now = self._last_heard = trio.current_time()
        self._quic.receive_datagram(data, address, now)
        self._collect(now)

    def settle(self, *, is_timer: bool = False) -> None:
        """Whatever came has been taken in: answer it, and wake whom it concerns."""
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
        """Send what may be sent now, as far as the kernel takes it; aioquic must be asked after its timer."""
        now = trio.current_time()
        while not self._departures.waiting:
            if self._datagrams_out and not self._quic.waiting_datagrams:
                for _ in range(min(DATAGRAMS_AT_ONCE, len(self._datagrams_out))):
                    self._quic.send_datagram_frame(self._datagrams_out.popleft())
            if not (is_timer or self._quic.has_output(now)):
                break
            packets = self._quic.datagrams_to_send(now)
            if packets:
                self._departures.send(packets, is_goodbye=self._quic.ending is not None)
            if not (packets and self._datagrams_out):
                break
        if self._departures.waiting:
            self._doorbell.unpark_all()
        self._collect(now)
        if self._doorbell:  # `run` is asleep
            self._alarm.deadline = min(self._alarm.deadline, self._next_deadline())
        self._after()
        self._flushed_at = perf_counter()

    def replace_wire(self, wire: UdpSocket) -> UdpSocket:
        """Go on from another socket, and from another connection id; gives the one before."""
        before = self._departures.replace(wire)
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
                case quic_events.StreamReset(stream_id=stream):
                    self._quic.has_ended(stream, now)
                    if not self._resets.count(stream, now):
                        self._fail(self._resets.error)
                    self._arrivals.add_reset(stream)
                case quic_events.StopSendingReceived(stream_id=stream):
                    if self._quic.give_up(stream):
                        self._wants_room.pop(stream, None)
                        self._arrivals.add_stop(stream)
                case quic_events.DatagramFrameReceived(data=data):
                    self._arrivals.add_datagram(data)
                case quic_events.HandshakeCompleted() as handshake:
                    self.alpn, self.is_resumed = handshake.alpn_protocol, handshake.session_resumed
                    self.had_early_data = handshake.early_data_accepted
                    self.established.set()
                case quic_events.ConnectionIdIssued(connection_id=connection_id):
                    self._on_id(connection_id, True)
                case quic_events.ConnectionIdRetired(connection_id=connection_id):
                    self._on_id(connection_id, False)
