"""What the halves of a session's channels need from their session."""

from __future__ import annotations

from abc import ABC, abstractmethod

from muxkit.runtime.halves.budget import ErrorMaker, OutboxBudget
from muxkit.runtime.pumps.reading import Reading


class HalfOwner(ABC):
    """A session, as the halves of its channels see it."""

    budget: OutboxBudget
    """It bounds what all halves together queue ahead of the transport, and knows the thread that may call them."""

    @abstractmethod
    def request_write(self) -> None:
        """The engine may have something to write: write it now, or wake the writer."""

    @abstractmethod
    def dispatch_events(self) -> None:
        """Handle what a command made the engine report."""

    @property
    @abstractmethod
    def loss(self) -> ErrorMaker | None:
        """Return what makes the error that says why the peer can say nothing any more; None while it can."""

    def reading(self) -> Reading | None:
        """Return the reader of the connection if a task that waits for a message may read in its place."""
        return None
