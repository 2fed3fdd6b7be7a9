"""What each measured program implements: a peer that serves and connects, and its connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from .conversations import Conversation
    from .server import Server


class Connection(ABC):
    """The connection of a client."""

    @abstractmethod
    async def open(self) -> Conversation: ...

    async def open_to_keep(self) -> object:
        """Open an idle channel, and return the object that keeps it open."""
        return await self.open()

    @abstractmethod
    async def close(self, conversation: Conversation) -> None:
        """Close a channel; called in the reverse order of opening, by the same task."""

    @abstractmethod
    async def echo_once(self, message: bytes) -> bytes:
        """Open a channel, send, receive, and close it in an orderly way."""


class Peer(ABC):
    """A way to carry channels between two processes."""

    @abstractmethod
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        """Serve until cancelled; `started` is told what a client connects to.

        For each channel: `server.keeps(channel)`, and unless it does, `server.serve(conversation)` in a task.
        """

    @abstractmethod
    def connect(self, address: str) -> AbstractAsyncContextManager[Connection]: ...
