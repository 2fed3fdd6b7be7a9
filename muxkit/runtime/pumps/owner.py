"""What a pump works for: a session that is told what happens on its connection.

A pump moves bytes between a link and an engine and knows nothing of channels. Whatever it learns on the way goes to its
owner: the events of the engine, that something was written, that the connection is lost. A session is the owner of its
pump, so "go to definition" leads from the pump to `handle_events` here, and from there to the sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from muxkit._observer import Facts, Observer
from muxkit.runtime.pumps.clock import Reminder

EventT = TypeVar("EventT")


class PumpOwner(ABC, Generic[EventT]):
    """What a pump tells its session, and asks it.

    Except for `handle_events` and `queued_bytes`, an owner overrides only the methods that concern it.
    """

    wire_name: str = ""
    """The protocol as `looks_like` names it. A peer whose first bytes look like anything else is called foreign."""
    observer: Observer | None = None
    """It is told of the bytes and the errors of the connection."""
    facts: Facts | None = None
    """They are told which limit the peer reached, and that the connection broke."""
    reminder: Reminder | None = None
    """The pump's clock rings it, in addition to calling the engine at its deadlines."""

    @abstractmethod
    def handle_events(self, events: Sequence[EventT]) -> None:
        """Act on what the engine reports, oldest event first."""

    @abstractmethod
    def queued_bytes(self) -> int:
        """Return how many bytes of messages the engine still holds, for the error when the connection is lost."""

    def handle_written(self) -> None:
        """Bytes have left the engine, so there may be room for further messages."""

    def handle_lost(self) -> None:
        """The connection is over, whatever the reason. The pump calls this once."""

    def handle_packet_limit(self, limit: int) -> None:
        """A packet was larger than the link takes: from now on no packet may be larger than `limit` bytes."""

    def has_understood_peer(self) -> bool:
        """Return False while nothing that came had a meaning, for protocols that ignore such bytes."""
        return True
