"""What do a service and its connections know of each other? What holds for all of them, and what each one tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.applications import StatelessApplication
    from muxkit.protocols.restream.engine.config import ServerConfig
    from muxkit.protocols.restream.server.backend import Books
    from muxkit.protocols.restream.server.connection import Conversation


@attrs.frozen(eq=False)
class Terms:
    """What all connections of a service have in common."""

    books: Books
    stateless: StatelessApplication
    config: ServerConfig
    limits: Limits
    observer: Observer | None
    pace: float | None
    linger: float
    random32: Callable[[], int]


class Host(Protocol):
    """Who must know what becomes of a connection."""

    def asked(self, conversation: Conversation) -> None:
        """The client has said what it wants."""

    def claiming(self, conversation: Conversation, uuid: str) -> AbstractAsyncContextManager[bool]:
        """One at a time for each session; gives whether a connection that came later has it by now."""

    def took(self, conversation: Conversation) -> None:
        """It has the session of its claim."""

    def left(self, conversation: Conversation, *, undone: bool) -> None:
        """It does not need its session any more; `undone`: though the store could not be told."""

    def trouble(self, who: str, error: Exception) -> None:
        """Something failed that is not the client's fault."""
