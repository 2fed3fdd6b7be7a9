"""Is the peer still there, and does it get on with what it began? Keepalive, and the least speed of a message."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines
from muxkit.protocols.bpmux._engine.events import Failed, Probed, Silent

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.entities import Entity
    from muxkit.protocols.bpmux._engine.reader import Reader
    from muxkit.protocols.bpmux._engine.state import State


class Timer(Enum):
    """The deadlines of a connection."""

    KEEPALIVE = "keepalive"
    """When to ping because nothing came for a while."""
    ANSWER = "answer"
    """When to give up on a peer that is silent after that ping."""
    STALL = "stall"
    """When to look whether an unfinished message made progress."""


class Liveness:
    """The clock of a connection. Silence of `keepalive` brings a ping, `keepalive_timeout` more brings the end."""

    def __init__(self, state: State, reader: Reader) -> None:
        self._state = state
        self._reader = reader
        self._config = state.config
        self._limits = state.limits
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._started = False
        self._probing = False  # ANSWER runs
        self._watching = False  # STALL runs
        self._heard_at = 0.0
        self._mark = 0  # bytes received when the present span of a stall began
        self._loans = 0  # and loans that somebody had waited for

    def next(self) -> float | None:
        """When to call `handle`; at once, as long as nobody has said what time it is."""
        return self._deadlines.next if self._started else float("-inf")

    def heard(self, now: float) -> None:
        """Something came."""
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
        """Act on what is due; gives the last event if the connection is over."""
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
        if now < self._heard_at + interval:  # something came since the timer was set
            self._wait_for_silence()
            return
        witness = self._witness()
        if witness is None:
            self._deadlines.set(Timer.KEEPALIVE, now + interval)
            return
        self._state.control.owe_ping(witness)
        self._state.events.append(Probed(witness))
        self._probing = True
        self._deadlines.set(Timer.ANSWER, now + self._config.keepalive_timeout)

    def _witness(self) -> Entity | None:
        """An entity that a ping can be about; the top level while there is one."""
        for entity in (self._state.top_stream, self._state.top_sink):
            if not entity.gone and not entity.ending:
                return entity
        alive = (entity for entities in self._state.maps for entity in entities.values())
        return next((entity for entity in alive if entity.announced and not entity.ending), None)

    # --- the least speed

    def _watch_progress(self, now: float) -> None:
        self._mark = self._reader.offset
        self._loans = self._state.reassembly.served
        self._watching = True
        self._deadlines.set(Timer.STALL, now + self._limits.stall)

    def _check_progress(self, now: float) -> Failed | Silent | None:
        self._watching = False
        came = self._reader.offset - self._mark
        is_blamed = self._reader.is_mid_chunk or self._state.is_peer_to_go_on()
        # Credit granted late in the interval shortens the measured time.
        if is_blamed and came < self._limits.stall_bytes and self._loans == self._state.reassembly.served:
            if not came:  # a dead line looks the same, and the peer must not be blamed for it
                return Silent(now - self._heard_at)
            return Failed(
                RemoteProtocolError(
                    f"{came} bytes in {self._limits.stall} s while a message is unfinished, "
                    f"{self._limits.stall_bytes} are asked",
                    offset=self._reader.offset,
                    limit="stall",
                )
            )
        if is_blamed or self._state.unfinished:
            self._watch_progress(now)
        return None
