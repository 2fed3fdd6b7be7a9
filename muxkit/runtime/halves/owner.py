"""The interface through which the halves of channels use their connection."""

from __future__ import annotations

from abc import ABC, abstractmethod

from muxkit.runtime.halves.budget import ErrorMaker, OutboxBudget
from muxkit.runtime.pumps.reading import Reading


class HalfOwner(ABC):
    """The methods of a connection that the halves of its channels call. `MuxConnection` implements them."""

    budget: OutboxBudget
    """Limits how many bytes all halves together may queue, and knows the thread that may use the halves."""
    reading: Reading | None = None
    """Reads the stream of the connection, if a task that waits for a message may borrow that job."""

    @abstractmethod
    def request_write(self) -> None:
        """Write the engine's output now, or wake the writer, because a command may have produced output."""

    def request_write_soon(self) -> None:
        """Write the engine's output within two passes of Trio's loop, because the caller will probably add to it."""
        self.request_write()

    @abstractmethod
    def dispatch_events(self) -> None:
        """Handle the events that a command has made the engine report."""

    @property
    @abstractmethod
    def loss(self) -> ErrorMaker | None:
        """A function that creates the error for the lost connection, or None while the connection isn't lost."""
