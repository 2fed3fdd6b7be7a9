"""What the engines of protocols with many channels on one byte stream share.

`StreamMuxEngine` keeps the bytes that were received and not parsed yet, the timers of the connection, and its end. A
protocol's engine derives from it and parses frames, writes frames, and knows its own timers. This is the order of
things in each direction:

    receive_bytes      parse              (the protocol applies frames; a RemoteProtocolError becomes `Failed`)
    handle_deadline    probe              (the protocol queues a ping, because the peer is silent)
                       channels_due       (channels have waited long enough for something)
    buffers_to_send    write              (the protocol appends frames)

Each of the first two returns the events. After `Failed`, `HungUp` or `Silent` the engine is over, and does nothing.
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
        self.over: bool = False
        self.has_failed: bool = False
        """True if the connection ends because the peer broke a rule."""
        self.hung_up_cleanly: bool = False
        self._rest = b""  # received and not parsed
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
    def parse(self, data: bytes) -> int:
        """Apply the frames in these bytes and return the position behind them.

        After `frames_at_once` frames it stops and sets `unparsed`. Raises `RemoteProtocolError` for an illegal frame.
        """

    @property
    @abstractmethod
    def is_mid_frame(self) -> bool:
        """True if the payload of a frame has begun and isn't complete."""

    def probe(self) -> None:
        """Queue a ping, because the peer is silent, and report it."""
        self.ping(None)
        self._shared.events.append(Probed())

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
    def outbox(self) -> int:
        return self._shared.outbox.used

    @property
    def messages_sent(self) -> int:
        return self._shared.messages_sent

    def events(self) -> Sequence[Any]:
        """Take the events that commands and writing have caused, oldest first."""
        return self._shared.take_events() if self._shared.events else ()

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Any]:
        """Parse and apply received bytes, and return what happened; never raises."""
        if self.over:
            return ()
        shared = self._shared
        shared.now = now
        if shared.observer is not None and data:
            shared.observer.transport("in", data)
        if self._rest:
            data = self._rest + data
        self.unparsed = 0
        try:
            position = self.parse(data)
        except RemoteProtocolError as error:
            return self._stop(Failed(error))
        self._rest = data[position:]
        self.bytes_received: int = self.bytes_received + position
        self._keepalive.heard(now)
        round_trip = shared.budget.round_trip
        if round_trip.is_wanted and round_trip.is_due(now):
            round_trip.asked(now)
            self.ping(ROUND_TRIP)
        if self.is_mid_frame or (self._rest and not self.unparsed):
            self._stall.watch(now, self.bytes_received)
        else:
            self._stall.stop()
        return self.events()

    def receive_eof(self, now: float) -> None:
        """End the connection: the peer closed its direction of the byte stream."""
        if not self.over:
            self.hung_up_cleanly = not (self.is_mid_frame or self._rest or self.channels)
            self._shared.events += self._stop(HungUp(self.hung_up_cleanly))

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Take about `limit` bytes to write now."""
        out: list[Buffer] = []
        if not self.over:
            self.write(limit, out)
            if self._shared.observer is not None:
                self.observe(out)
        return out

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`: immediately until the first call, which starts the clock."""
        if self.over:
            return None
        return self._shared.deadlines.next if self._is_started else float("-inf")

    def handle_deadline(self, now: float) -> Sequence[Any]:
        """Act on the timers that are due, and return what happened."""
        if self.over:
            return ()
        shared = self._shared
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
                self.probe()
                self._keepalive.asked(now)
            if last is not None:
                return self._stop(last)
        return self.events()

    def _stalled(self, now: float) -> Failed | Silent | None:
        """Return the end of the connection if a frame that was begun makes no progress."""
        came = self._stall.shortfall(self.bytes_received)
        if came is None:
            self._stall.watch(now, self.bytes_received)
            return None
        if not came:  # a broken network looks the same, so this is no violation
            return Silent(self._keepalive.silence(now))
        return Failed(self._stall.error(came, "frame", self.bytes_received))

    def _stop(self, last: Failed | HungUp | Silent) -> Sequence[Any]:
        """The connection is over; return the last events."""
        self._shared.events.append(last)
        if isinstance(last, Failed):
            self.has_failed = True
            if self._shared.observer is not None:
                self._shared.observer.error(last.error)
        self.over = True
        self.unparsed = 0
        return self.events()
