"""The tasks of a client process and its answers, one JSON object each."""

from __future__ import annotations

from typing import TypedDict


class Task(TypedDict):
    """A pass of one job."""

    job: str
    channels: int
    """At the same time; those beside the one that is measured, where there is one."""
    size: int
    """Bytes of a message."""
    batch: int
    """Messages that are sent together."""
    each: bool
    """Does the receiver take small messages one by one?"""
    seconds: float
    """How long it should take."""
    count: int
    """Units on each channel, as found out before; 0 if it is not known yet."""
    least: int
    """Units on each channel, even if that takes longer."""


class Measured(TypedDict):
    """What came out of it; times in seconds."""

    count: int
    """Units on each channel."""
    units: float
    seconds: float
    client_cpu: float
    server_cpu: float
    also: dict[str, float]
    """What else there is to say about this job."""
