"""The interface through which a pump notifies its owner, which is the connection of a session.

A pump moves bytes between a link and an engine, and knows nothing about channels. It passes the engine's events to its
owner, and notifies the owner when bytes were written and when the connection is lost. `MuxConnection` implements this
interface, so "go to definition" leads from the pump to `handle_events` here, and from there to the connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from muxkit._observer import Facts, Observer
from muxkit.runtime.pumps.clock import Reminder

EventT = TypeVar("EventT")


class PumpOwner(ABC, Generic[EventT]):
    """The callbacks of a pump. `handle_events` and `queued_bytes` are required, and the others are optional."""

    wire_name: str = ""
    """The name of the protocol in `looks_like`. If the peer's first bytes look like another protocol, errors say so."""
    observer: Observer | None = None
    """Receives callbacks about the bytes and the errors of the connection."""
    facts: Facts | None = None
    """Receives callbacks when the peer reaches a limit, and when the connection breaks."""
    reminder: Reminder | None = None
    """The pump's clock calls this reminder when it is due, in addition to calling the engine at its deadlines."""

    @abstractmethod
    def handle_events(self, events: Sequence[EventT]) -> None:
        """Handle the engine's events, oldest first."""

    @abstractmethod
    def queued_bytes(self) -> int:
        """Return how many bytes of messages are queued in the engine, for the error about a lost connection."""

    def handle_written(self) -> None:
        """Called when the engine's output has been written, so there may be room for further messages."""

    def handle_lost(self) -> None:
        """Called once when the connection is lost or closed."""

    def handle_packet_limit(self, limit: int) -> None:
        """Called when a packet was too large for the link. From now on, packets may have at most `limit` bytes."""

    def has_understood_peer(self) -> bool:
        """Return False until the peer has sent valid bytes, for protocols that ignore invalid bytes."""
        return True
