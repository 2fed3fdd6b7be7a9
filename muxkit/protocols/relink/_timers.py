"""Which deadlines has a connection?"""

from __future__ import annotations

from enum import Enum


class Timer(Enum):
    """The deadlines of a connection; without one there are none."""

    ACKS = "acks"
    """When to tell what was received and consumed."""
    KEEPALIVE = "keepalive"
    """When to ping because nothing came for a while."""
    ANSWER = "answer"
    """When to give up on a connection that is silent after that ping."""
    STALL = "stall"
    """When to look whether an unfinished packet made progress."""

    __hash__ = object.__hash__  # that of an enum is a call, and these are looked up with each read
