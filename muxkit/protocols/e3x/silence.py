"""Whether the peer still says something: when it was heard last, and when to ask it.

A peer that was silent for `Config.keepalive` is asked by a ping (`liveness`). If it says nothing for `Config.timeout`
after that, or while a channel waits for an ack, it is gone. What counts as heard is what has a meaning: an opening,
a message, an ack of something new, an end, an err. Packets that change nothing may be forged.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from muxkit.core import Deadlines, Keepalive
from muxkit.protocols.e3x.config import Config

LISTENER_DELAY: Final = 1.25  # a listener asks a little later, so that the connector's ping makes its own unnecessary


class Timer(Enum):
    """What the session's own deadlines are for."""

    ASK = "ask"
    ANSWER = "answer"


class Silence:
    """When the peer was heard, and the deadlines that follow from it; nothing runs before `start`."""

    def __init__(self, config: Config, *, odd: bool) -> None:
        interval = None if config.keepalive is None else config.keepalive * (1.0 if odd else LISTENER_DELAY)
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.was_heard: bool = False
        """True once the peer has sent anything that had a meaning."""
        self._timeout = config.timeout
        self._is_running = False
        self._keepalive = Keepalive(self.deadlines, Timer.ASK, Timer.ANSWER, interval=interval, timeout=config.timeout)

    def start(self, now: float) -> None:
        """Begin to notice silence."""
        self._is_running = True
        self._keepalive.start(now)

    def stop(self) -> None:
        """Notice silence no longer, since the peer has left or is given up."""
        self._is_running = False
        for timer in Timer:
            self.deadlines.stop(timer)

    def heard(self, now: float) -> None:
        """The peer has sent something that had a meaning."""
        self.was_heard = True
        if self._is_running:
            self._keepalive.heard(now)

    def asked(self, now: float) -> None:
        """The peer was asked: wait for whatever it sends."""
        self._keepalive.asked(now)

    def seconds(self, now: float) -> float:
        """Return the seconds since the peer was heard."""
        return self._keepalive.silence(now)

    def is_due(self, now: float) -> bool:
        """Return True if the peer is to be asked, at the deadline for that."""
        return self._keepalive.is_due(now)

    def is_over(self, now: float) -> bool:
        """Return True if the peer was silent for so long that it is gone."""
        return self._is_running and now >= self._keepalive.heard_at + self._timeout
