"""The tasks of a client process and its answers, one JSON object each."""

from __future__ import annotations

from typing import TypedDict


class Task(TypedDict):
    """A pass of one job."""

    job: str
    channels: int
    """How many are open at once; beside the measured one, if the job has one."""
    size: int
    """Bytes of a message."""
    batch: int
    """Messages that are sent together."""
    each: bool
    """True if the receiver takes small messages one by one."""
    seconds: float
    """The length of the pass."""
    count: int
    """Units on each channel, as found before; 0 if not known yet."""
    least: int
    """The least units on each channel, even if that takes longer."""


class Measured(TypedDict):
    """The result of a pass; times in seconds."""

    count: int
    """Units on each channel."""
    units: float
    seconds: float
    client_cpu: float
    server_cpu: float
    also: dict[str, float]
    """Other figures of the job."""
