"""The base class of engines with many channels over one byte stream.

`StreamMuxEngine` implements the interface for the pump (`StreamEngine`) except the frames. It keeps the received bytes
that aren't parsed yet, runs the timers, and ends the connection. A protocol's engine derives from it and implements the
methods that this class calls:

- `receive_bytes` calls `parse`, which applies the received frames. A `RemoteProtocolError` becomes a `Failed` event. It
  also calls `measure_round_trip` if a receive window needs the round-trip time.
- `handle_deadline` calls `probe` if the peer has been silent for too long, and `channels_due` if channels have waited
  for something long enough.
- `buffers_to_send` calls `write`, which appends the frames to send.

After `Failed`, `HungUp` or `Silent`, the connection has ended, and the engine ignores all input.

A peer may be silent between messages. The engine then sends a ping now and then (keepalive). Within a message, the peer
must not pause: while a frame or a message in several frames is incomplete, it must send at least `Limits.stall_bytes`
every `Limits.stall` seconds.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core._engine import Buffer
from muxkit.core._liveness import Keepalive, StallWatch
from muxkit.core._queues import Outbox
from muxkit.core._windows import StartPace
from muxkit.core.events import Failed, HungUp, Pong, Probed, Silent
from muxkit.core.mux_engine import MuxEngine
from muxkit.core.mux_state import MuxState, Vital

ROUND_TRIP: Final = "the round trip"
"""The key of the pings with which the engine measures the round-trip time for the receive windows."""


class StreamMuxEngine(MuxEngine):
    """One side of a connection over a byte stream. A protocol derives its engine from this class."""

    def __init__(self, shared: MuxState, *, keepalive: float | None, keepalive_timeout: float) -> None:
        self._shared = shared
        self.limits: Limits = shared.limits
        self.starts: StartPace = shared.starts
        self.waiting: Outbox = shared.outbox
        """The object whose attribute `outbox` returns. Reading it directly is faster."""
        self.bytes_received = 0
        self.frames_at_once: int = sys.maxsize
        """The maximum number of frames that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """The number of bytes left after `frames_at_once` frames. `receive_bytes(b"", now)` parses more of them."""
        self.has_failed: bool = False
        """True if the connection has ended because the peer broke a rule."""
        self.hung_up_cleanly: bool = False
        """True if the peer has ended the connection while no channel was open and no frame was incomplete."""
        self.is_mid_frame: bool = False
        """True if `parse` has kept the beginning of an incomplete frame itself. `parse` sets this."""
        self.data_offset: int = 0
        """The number of bytes that the peer sent before the data that was passed to `parse`."""
        self._rest = b""  # received bytes, which aren't parsed from position `_at` on
        self._at = 0
        self._is_started = False
        deadlines = shared.deadlines
        self._keepalive: Keepalive[Vital] = Keepalive(
            deadlines, Vital.KEEPALIVE, Vital.ANSWER, interval=keepalive, timeout=keepalive_timeout
        )
        self._stall: StallWatch[Vital] = StallWatch(
            deadlines, Vital.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes
        )

    # --- for the protocol's engine

    @abstractmethod
    def parse(self, data: bytes, position: int) -> int:
        """Apply the frames in `data` from a position on, and return the position after them.

        The implementation must stop after `frames_at_once` frames and set `unparsed`. It must also set `is_mid_frame`.

        Raises:
            RemoteProtocolError: If a frame breaks a rule.
        """

    def may_peer_continue(self) -> bool:
        """Return True if there is an incomplete message for whose rest the peer has enough credit."""
        return self._shared.unfinished > 0

    def probe(self, now: float) -> Silent | None:
        """Send a ping to a silent peer. Return None, or a `Silent` event to end the connection instead."""
        self.ping(None)
        self._shared.events.append(Probed())
        self._keepalive.asked(now)
        return None

    def measure_round_trip(self, now: float) -> None:
        """Queue a ping to measure the round-trip time for the receive windows."""
        self._shared.budget.round_trip.asked(now)
        self.ping(ROUND_TRIP)

    def answered(self, key: object) -> None:
        """Handle the answer to a ping. The protocol's engine calls this."""
        if key is ROUND_TRIP:
            self._shared.budget.round_trip.answered(self._shared.now)
        else:
            self._shared.events.append(Pong(key))

    def channels_due(self, now: float) -> None:
        """Handle the channels whose waiting time is over. The protocol's engine sets the timer `Vital.CHANNELS`."""

    @abstractmethod
    def write(self, limit: int, out: list[Buffer]) -> None:
        """Append about `limit` bytes of frames to `out`."""

    def observe(self, out: Sequence[Buffer]) -> None:
        """Notify the observer about frames that were written."""

    # --- the interface of a `StreamEngine`

    @property
    def over(self) -> bool:
        """True once the connection has ended. Then nothing is written, and received bytes are ignored."""
        return self._shared.over

    @property
    def outbox(self) -> int:
        return self._shared.outbox.used

    @property
    def messages_sent(self) -> int:
        return self._shared.messages_sent

    def events(self) -> Sequence[Any]:
        """Return the events since the last call, oldest first."""
        shared = self._shared
        if not shared.events:
            return ()
        events, shared.events = shared.events, []
        return events

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Any]:
        """Process bytes from the peer, and return the events. Never raises."""
        shared = self._shared
        if shared.over:
            return self.events()
        shared.now = now
        if shared.observer is not None and data:
            shared.observer.transport("in", data)
        start = 0
        if self._rest:
            if data:
                data = self._rest[self._at :] + data
            else:  # without the position, each call that parses a part of the rest would copy all of it
                data, start = self._rest, self._at
        self.data_offset = self.bytes_received - start
        self.unparsed = 0
        try:
            position = self.parse(data, start)
        except RemoteProtocolError as error:
            self._stop(Failed(error))
            return self.events()
        if self.unparsed:
            self._rest, self._at = data, position
        else:
            self._rest, self._at = data[position:], 0
        self.bytes_received: int = self.data_offset + position
        self._keepalive.heard(now)
        round_trip = shared.budget.round_trip
        if round_trip.is_wanted and round_trip.is_due(now):
            self.measure_round_trip(now)
        if self.is_mid_frame or shared.unfinished or (self._rest and not self.unparsed):
            self._stall.watch(now, self.bytes_received, shared.reassembly.served)
        elif self._stall.is_running:
            self._stall.stop()
        events, shared.events = shared.events, []
        return events

    def receive_eof(self, now: float) -> Sequence[Any]:
        """End the connection, because the peer has ended its direction of the byte stream."""
        if not self._shared.over:
            self.hung_up_cleanly = not (self.is_mid_frame or self._rest or self.channels)
            self._stop(HungUp(self.hung_up_cleanly))
        return self.events()

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Remove about `limit` bytes of output from the engine and return them."""
        out: list[Buffer] = []
        if not self._shared.over:
            self.write(limit, out)
            if self._shared.observer is not None:
                self.observe(out)
        return out

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`. The first call is due immediately, because it starts the timers."""
        if self._shared.over:
            return None
        return self._shared.deadlines.next if self._is_started else float("-inf")

    def handle_deadline(self, now: float) -> Sequence[Any]:
        """Handle the timers that are due, and return the events."""
        shared = self._shared
        if shared.over:
            return self.events()
        shared.now = now
        if not self._is_started:
            self._is_started = True
            self._keepalive.start(now)
        for timer in shared.deadlines.expired(now):
            if shared.observer is not None:
                shared.observer.timer(timer.value)
            last: Failed | Silent | None = None
            if timer is Vital.ANSWER:
                last = Silent(self._keepalive.silence(now))
            elif timer is Vital.STALL:
                last = self._stalled(now)
            elif timer is Vital.CHANNELS:
                self.channels_due(now)
            elif self._keepalive.is_due(now):
                last = self.probe(now)
            if last is not None:
                self._stop(last)
                break
        return self.events()

    def _stalled(self, now: float) -> Failed | Silent | None:
        """Return an event that ends the connection if an incomplete message makes too little progress."""
        served = self._shared.reassembly.served
        came = self._stall.shortfall(self.bytes_received, served)
        is_cut = self.is_mid_frame or (self._rest != b"" and not self.unparsed)
        is_due_from_peer = is_cut or self.may_peer_continue()
        if came is not None and is_due_from_peer:
            if not came:  # the network may have failed, so we don't blame the peer
                return Silent(self._keepalive.silence(now))
            return Failed(self._stall.error(came, "message", self.bytes_received))
        if is_due_from_peer or self._shared.unfinished:
            self._stall.watch(now, self.bytes_received, served)
        return None

    def _stop(self, last: Failed | HungUp | Silent) -> None:
        """End the connection with a last event."""
        shared = self._shared
        shared.events.append(last)
        if isinstance(last, Failed):
            self.has_failed = True
            if shared.observer is not None:
                shared.observer.error(last.error)
        shared.over = True
        self.unparsed = 0
