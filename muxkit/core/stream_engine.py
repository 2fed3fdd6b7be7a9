"""What the engines of protocols with many channels on one byte stream share.

`StreamMuxEngine` keeps the bytes that were received and not parsed yet, the timers of the connection, and its end. A
protocol's engine derives from it and parses frames, writes frames, and knows its own timers. This is the order of
things in each direction:

    receive_bytes      parse              (the protocol applies frames; a RemoteProtocolError becomes `Failed`)
                       measure_round_trip (a window could use it: the protocol queues a ping)
    handle_deadline    probe              (the protocol queues a ping, because the peer is silent)
                       channels_due       (channels have waited long enough for something)
    buffers_to_send    write              (the protocol appends frames)

Each of the first two returns the events. After `Failed`, `HungUp` or `Silent` the engine is over, and does nothing.

A peer may be silent between messages, and is asked then. In the middle of one it must go on: while a frame, or a
message of several frames, is unfinished, at least `Limits.stall_bytes` must come in each
`Limits.stall` seconds.
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
"""The key of the pings by which the engine measures the round trip for the windows, see `receive_windows`."""


class StreamMuxEngine(MuxEngine):
    """One end of a connection on a byte stream, without its grammar."""

    def __init__(self, shared: MuxState, *, keepalive: float | None, keepalive_timeout: float) -> None:
        self._shared = shared
        self.limits: Limits = shared.limits
        self.starts: StartPace = shared.starts
        self.waiting: Outbox = shared.outbox
        """The counter behind `outbox`, for frequent reads."""
        self.bytes_received = 0
        self.frames_at_once: int = sys.maxsize
        """The most frames that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """Received bytes behind the first `frames_at_once` frames; `receive_bytes(b"", now)` parses more of them."""
        self.has_failed: bool = False
        """True if the connection ends because the peer broke a rule."""
        self.hung_up_cleanly: bool = False
        self.is_mid_frame: bool = False
        """Set by `parse`: a frame has begun and isn't complete. The bytes that it leaves over don't count."""
        self.data_offset: int = 0
        """For `parse`: the position of the first byte of its data among all bytes of the peer."""
        self._rest = b""  # received, and not parsed from `_at` on
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
        """Apply the frames in these bytes from a position on, and return the position behind them.

        After `frames_at_once` frames it stops and sets `unparsed`. At the end it sets `is_mid_frame`. Raises
        `RemoteProtocolError` for an illegal frame.
        """

    def may_peer_continue(self) -> bool:
        """Return True if the peer has all the credit that it needs to finish some message of several frames."""
        return self._shared.unfinished > 0

    def probe(self, now: float) -> Silent | None:
        """Ask a silent peer for a sign of life and report that, or return the end if there is no hope for one."""
        self.ping(None)
        self._shared.events.append(Probed())
        self._keepalive.asked(now)
        return None

    def measure_round_trip(self, now: float) -> None:
        """Queue a ping whose answer tells the windows how long the path is."""
        self._shared.budget.round_trip.asked(now)
        self.ping(ROUND_TRIP)

    def answered(self, key: object) -> None:
        """The answer to a ping came: report it, or take the round trip that it measures."""
        if key is ROUND_TRIP:
            self._shared.budget.round_trip.answered(self._shared.now)
        else:
            self._shared.events.append(Pong(key))

    def channels_due(self, now: float) -> None:
        """Act on the channels that have waited long enough; the protocol sets `Vital.CHANNELS` for them."""

    @abstractmethod
    def write(self, limit: int, out: list[Buffer]) -> None:
        """Append about `limit` bytes of frames."""

    def observe(self, out: Sequence[Buffer]) -> None:
        """Report frames that were written to the observer."""

    # --- the face of a `StreamEngine`

    @property
    def over(self) -> bool:
        """True once the connection is over: nothing is written, and what comes is ignored."""
        return self._shared.over

    @property
    def outbox(self) -> int:
        return self._shared.outbox.used

    @property
    def messages_sent(self) -> int:
        return self._shared.messages_sent

    def events(self) -> Sequence[Any]:
        """Take the events that commands and writing have caused, oldest first."""
        shared = self._shared
        if not shared.events:
            return ()
        events, shared.events = shared.events, []
        return events

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Any]:
        """Parse and apply received bytes, and return what happened; never raises."""
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
            else:  # keep the position, because each step of a turn would copy the rest
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
        return self.events()

    def receive_eof(self, now: float) -> Sequence[Any]:
        """End the connection: the peer closed its direction of the byte stream."""
        if not self._shared.over:
            self.hung_up_cleanly = not (self.is_mid_frame or self._rest or self.channels)
            self._stop(HungUp(self.hung_up_cleanly))
        return self.events()

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Take about `limit` bytes to write now."""
        out: list[Buffer] = []
        if not self._shared.over:
            self.write(limit, out)
            if self._shared.observer is not None:
                self.observe(out)
        return out

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`: immediately until the first call, which starts the clock."""
        if self._shared.over:
            return None
        return self._shared.deadlines.next if self._is_started else float("-inf")

    def handle_deadline(self, now: float) -> Sequence[Any]:
        """Act on the timers that are due, and return what happened."""
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
        """Return the end of the connection if a message that was begun makes no progress."""
        served = self._shared.reassembly.served
        came = self._stall.shortfall(self.bytes_received, served)
        is_cut = self.is_mid_frame or (self._rest != b"" and not self.unparsed)
        is_due_from_peer = is_cut or self.may_peer_continue()
        if came is not None and is_due_from_peer:
            if not came:  # a broken network looks the same, so this is no violation
                return Silent(self._keepalive.silence(now))
            return Failed(self._stall.error(came, "message", self.bytes_received))
        if is_due_from_peer or self._shared.unfinished:
            self._stall.watch(now, self.bytes_received, served)
        return None

    def _stop(self, last: Failed | HungUp | Silent) -> None:
        """The connection is over, with this as the last event."""
        shared = self._shared
        shared.events.append(last)
        if isinstance(last, Failed):
            self.has_failed = True
            if shared.observer is not None:
                shared.observer.error(last.error)
        shared.over = True
        self.unparsed = 0
