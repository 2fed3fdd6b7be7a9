"""The keepalive timers of a session: when to ping a silent peer, and when to treat the peer as lost.

When the peer has been silent for `Config.keepalive`, the engine sends a ping (`liveness`). The peer is lost if it stays
silent for `Config.timeout` after a ping, or while a channel waits for an ack. Only packets that change the state of the
session count as a sign of life: an opening, a message, an ack of new packets, an end, or an err. An ack of new packets
also counts if the channel has been removed in the meantime, or a session that gives up all its channels would treat a
peer as silent that acks each of them. Other packets don't count, because somebody else may have sent them from a forged
address.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from muxkit.core import Deadlines, Keepalive
from muxkit.protocols.e3x.config import Config

# The listener waits longer than the connector before it pings, so that the connector's ping makes the listener's ping
# unnecessary.
LISTENER_DELAY: Final = 1.25


class Timer(Enum):
    """The deadlines of the keepalive: when to send a ping, and when the answer is overdue."""

    ASK = "ask"
    ANSWER = "answer"


class Silence:
    """Records when the peer last showed a sign of life, and computes the keepalive deadlines. Idle before `start`."""

    def __init__(self, config: Config, *, odd: bool) -> None:
        interval = None if config.keepalive is None else config.keepalive * (1.0 if odd else LISTENER_DELAY)
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.was_heard: bool = False
        """True once the peer has shown a sign of life. The module docstring says which packets count."""
        self._timeout = config.timeout
        self._is_running = False
        self._keepalive = Keepalive(self.deadlines, Timer.ASK, Timer.ANSWER, interval=interval, timeout=config.timeout)

    def start(self, now: float) -> None:
        """Start the keepalive timers."""
        self._is_running = True
        self._keepalive.start(now)

    def stop(self) -> None:
        """Stop the keepalive timers, because the peer has left or is lost."""
        self._is_running = False
        for timer in Timer:
            self.deadlines.stop(timer)

    def heard(self, now: float) -> None:
        """Record a sign of life of the peer, and restart the timers."""
        self.was_heard = True
        if self._is_running:
            self._keepalive.heard(now)

    def asked(self, now: float) -> None:
        """Record that a ping was sent, and start the timeout. Any sign of life stops the timeout."""
        self._keepalive.asked(now)

    def seconds(self, now: float) -> float:
        """Return the number of seconds since the last sign of life."""
        return self._keepalive.silence(now)

    def is_due(self, now: float) -> bool:
        """Return True if the peer has been silent for so long that a ping must be sent now."""
        return self._keepalive.is_due(now)

    def is_over(self, now: float) -> bool:
        """Return True if the peer has been silent for longer than the timeout."""
        return self._is_running and now >= self._keepalive.heard_at + self._timeout
