"""Is the peer still there, and does it get on with what it began? Keepalive, and the least speed of a packet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.protocols.relink._control import Purpose
from muxkit.protocols.relink._events import Silent
from muxkit.protocols.relink._timers import Timer

if TYPE_CHECKING:
    from muxkit.protocols.relink._reader import Reader
    from muxkit.protocols.relink._state import Link


class Liveness:
    """The clock of a connection. It only ever blames the connection; the link waits for the next one."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._heard_at = 0.0
        self._mark = 0  # bytes received when the present span of a stall began
        self._is_asking = False  # ANSWER runs
        self._is_watching = False  # STALL runs

    def connect(self, now: float) -> None:
        self._heard_at = now
        self._is_asking = self._is_watching = False
        self._wait_for_silence()

    def heard(self, now: float) -> None:
        """Something came."""
        self._heard_at = now
        if self._is_asking:
            self._is_asking = False
            self._link.deadlines.stop(Timer.ANSWER)
            self._wait_for_silence()
        if not self._reader.is_mid_packet:
            if self._is_watching:
                self._is_watching = False
                self._link.deadlines.stop(Timer.STALL)
        elif not self._is_watching:
            self._watch_progress(now)

    def handle(self, now: float) -> Silent | None:
        """Act on what is due; gives the event if the connection is to be dropped."""
        link = self._link
        for timer in link.deadlines.expired(now):
            if link.observer is not None:
                link.observer.timer(timer.value)
            silent: Silent | None = None
            if timer is Timer.ACKS:
                link.control.make_all_due()
            elif timer is Timer.KEEPALIVE:
                self._keep_alive(now)
            elif timer is Timer.ANSWER:
                silent = Silent(now - self._heard_at)
            else:
                silent = self._check_progress(now)
            if silent is not None:
                return silent
        return None

    def _wait_for_silence(self) -> None:
        if self._link.config.keepalive is not None:
            self._link.deadlines.set(Timer.KEEPALIVE, self._heard_at + self._link.config.keepalive)

    def _keep_alive(self, now: float) -> None:
        config = self._link.config
        if config.keepalive is not None and now < self._heard_at + config.keepalive:
            self._wait_for_silence()  # something came since the timer was set
            return
        self._link.control.ping(Purpose.ALIVE)
        self._is_asking = True
        self._link.deadlines.set(Timer.ANSWER, now + config.keepalive_timeout)

    def _watch_progress(self, now: float) -> None:
        self._mark = self._reader.offset
        self._is_watching = True
        self._link.deadlines.set(Timer.STALL, now + self._link.limits.stall)

    def _check_progress(self, now: float) -> Silent | None:
        """A packet is unfinished, or the timer would not run."""
        limits = self._link.limits
        if self._reader.offset - self._mark < limits.stall_bytes:
            return Silent(limits.stall, stalled=True)
        self._watch_progress(now)
        return None
