"""Timers of a connection: keepalive, and the least speed of an incomplete message."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines
from muxkit.protocols.bpmux.engine.events import Failed, Probed, Silent

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.engine.entities import Entity
    from muxkit.protocols.bpmux.engine.receiving import ChunkReader
    from muxkit.protocols.bpmux.engine.state import State


class Timer(Enum):
    """The deadlines of a connection."""

    KEEPALIVE = "keepalive"
    """When to ping because nothing was received."""
    ANSWER = "answer"
    """When to end the connection because nothing was received after that ping."""
    STALL = "stall"
    """When to check that an incomplete message made progress."""


class Liveness:
    """Sends a ping after `keepalive` of silence, and ends the connection after another `keepalive_timeout`."""

    def __init__(self, state: State, reader: ChunkReader) -> None:
        self._state = state
        self._reader = reader
        self._config = state.config
        self._limits = state.limits
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._started = False
        self._probing = False  # ANSWER runs
        self._watching = False  # STALL runs
        self._heard_at = 0.0
        self._mark = 0  # bytes received when STALL was set
        self._loans = 0  # loans that had to be waited for, then

    def next(self) -> float | None:
        """When to call `handle`; at once until the first call, which tells the time."""
        return self._deadlines.next if self._started else float("-inf")

    def heard(self, now: float) -> None:
        """Bytes were received."""
        self._heard_at = now
        if self._probing:
            self._probing = False
            self._deadlines.stop(Timer.ANSWER)
            self._wait_for_silence()
        if not self._reader.is_mid_chunk and not self._state.unfinished:
            if self._watching:
                self._watching = False
                self._deadlines.stop(Timer.STALL)
        elif not self._watching:
            self._watch_progress(now)

    def handle(self, now: float) -> Failed | Silent | None:
        """Act on the timers that are due; return the last event if the connection is over."""
        if not self._started:
            self._started = True
            self._heard_at = now
            self._wait_for_silence()
        last: Failed | Silent | None = None
        for timer in self._deadlines.expired(now):
            if self._state.observer is not None:
                self._state.observer.timer(timer.value)
            if timer is Timer.KEEPALIVE:
                self._keep_alive(now)
            elif timer is Timer.ANSWER:
                last = Silent(now - self._heard_at)
            else:
                last = self._check_progress(now)
            if last is not None:
                break
        return last

    # --- keepalive

    def _wait_for_silence(self) -> None:
        if self._config.keepalive is not None:
            self._deadlines.set(Timer.KEEPALIVE, self._heard_at + self._config.keepalive)

    def _keep_alive(self, now: float) -> None:
        interval = self._config.keepalive or 0.0
        if now < self._heard_at + interval:  # bytes were received since the timer was set
            self._wait_for_silence()
            return
        entity = self._pingable_entity()
        if entity is None:
            self._deadlines.set(Timer.KEEPALIVE, now + interval)
            return
        self._state.control.owe_ping(entity)
        self._state.events.append(Probed(entity))
        self._probing = True
        self._deadlines.set(Timer.ANSWER, now + self._config.keepalive_timeout)

    def _pingable_entity(self) -> Entity | None:
        """Return an entity to send a ping about: the top level while there is one."""
        for entity in (self._state.top_stream, self._state.top_sink):
            if not entity.gone and not entity.ending:
                return entity
        alive = (entity for entities in self._state.maps for entity in entities.values())
        return next((entity for entity in alive if entity.announced and not entity.ending), None)

    # --- least speed

    def _watch_progress(self, now: float) -> None:
        self._mark = self._reader.offset
        self._loans = self._state.reassembly.served
        self._watching = True
        self._deadlines.set(Timer.STALL, now + self._limits.stall)

    def _check_progress(self, now: float) -> Failed | Silent | None:
        self._watching = False
        came = self._reader.offset - self._mark
        is_due_from_peer = self._reader.is_mid_chunk or self._state.can_peer_continue()
        # Credit granted late in the interval shortens the measured time.
        if is_due_from_peer and came < self._limits.stall_bytes and self._loans == self._state.reassembly.served:
            if not came:  # a broken network looks the same, so this is no violation
                return Silent(now - self._heard_at)
            return Failed(
                RemoteProtocolError(
                    f"{came} bytes in {self._limits.stall} s while a message is unfinished, "
                    f"{self._limits.stall_bytes} are asked",
                    offset=self._reader.offset,
                    limit="stall",
                )
            )
        if is_due_from_peer or self._state.unfinished:
            self._watch_progress(now)
        return None
