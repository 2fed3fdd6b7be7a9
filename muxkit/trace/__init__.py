"""Traces of sessions: write them as qlog-style JSON sequences, read them, and show them as a page."""

from __future__ import annotations

from muxkit.trace.reading import (
    ChannelSummary,
    Event,
    Follower,
    Recording,
    Summary,
    TraceError,
    differences,
    read,
    summary,
)
from muxkit.trace.viewing import page
from muxkit.trace.writing import FOLDER, SessionTrace, Trace, traced

__all__ = [
    "FOLDER",
    "ChannelSummary",
    "Event",
    "Follower",
    "Recording",
    "SessionTrace",
    "Summary",
    "Trace",
    "TraceError",
    "differences",
    "page",
    "read",
    "summary",
    "traced",
]
