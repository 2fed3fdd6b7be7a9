"""The sessions and channels of a program as JSON: sizes, credit and waits, and never payload."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import attrs
import trio

from muxkit._observer import Counted
from muxkit.core import without_secrets
from muxkit.runtime import Channel, Session, SessionStats

SESSIONS_MOST: Final = 500
CHANNELS_MOST: Final = 50  # of one session
COUNTERS: Final = tuple(field.name for field in attrs.fields(SessionStats))
NAME_MOST: Final = 200  # characters of what a peer may have named


class Serving(Protocol):
    """A server whose state can be shown, such as `muxkit.Server` and `restream.Served`."""

    @property
    def urls(self) -> tuple[str, ...]: ...
    @property
    def is_draining(self) -> bool: ...


class Listing:
    """Describes live sessions. A session keeps its number as long as it lives."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Counted, int] = WeakKeyDictionary()
        self._next = count(1)

    def describe(self, server: Serving | None, sessions: Sequence[Counted]) -> dict[str, Any]:
        """Return the current state as JSON: the newest 500 sessions, and 50 channels of each."""
        for each in sessions:
            if each not in self._numbers:
                self._numbers[each] = next(self._next)
        shown = sorted(sessions, key=self._numbers.__getitem__)[-SESSIONS_MOST:]
        return {
            "process": os.getpid(),
            "urls": [] if server is None else list(map(without_secrets, server.urls)),
            "draining": server is not None and server.is_draining,
            "time": trio.current_time(),
            "sessions": [self._session(each) for each in shown],
            "sessions_left_out": len(sessions) - len(shown),
        }

    def _session(self, session: Counted) -> dict[str, Any]:
        info = session.info
        stats = session.stats()
        channels = session.channels() if isinstance(session, Session) else ()
        return {
            "number": self._numbers[session],
            "protocol": info.protocol,
            "transport": info.transport,
            "peer": info.peer,
            "local": info.local,
            "user": info.user,
            **{name: _finite(getattr(stats, name, None)) for name in COUNTERS},
            "open": [*_channels(channels)],
            "open_left_out": max(0, len(channels) - CHANNELS_MOST),
        }


def _channels(channels: Sequence[Channel]) -> Iterable[dict[str, Any]]:
    """Describe channels: first those whose senders have waited longest, then those that store most."""
    now = trio.current_time()
    found = [(channel, channel.stats()) for channel in channels]
    found.sort(key=lambda each: (each[1].waiting_since or math.inf, -each[1].queued - each[1].unread))
    for channel, stats in found[:CHANNELS_MOST]:
        yield {
            "name": channel.name[:NAME_MOST],
            "queued": stats.queued,
            "unread": stats.unread,
            "credit_out": stats.credit_out,
            "credit_in": stats.credit_in,
            "blocked": None if stats.waiting_since is None else max(0.0, now - stats.waiting_since),
        }


def _finite(value: Any) -> Any:  # noqa: ANN401 - of any field
    return None if isinstance(value, float) and not math.isfinite(value) else value
