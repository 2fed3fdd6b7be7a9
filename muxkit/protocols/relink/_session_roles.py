"""Who is told what happens on a link? The one who sends on a channel, the one who receives, and the one above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muxkit.protocols.relink._events import LinkReplaced

ErrorMaker = Callable[[], Exception]


class Out(Protocol):
    """Who sends on a channel of ours."""

    def heard(self, through: int) -> None:
        """The peer has the messages through this one."""

    def consumed(self, through: int) -> None: ...
    def answered(self, through: int, *, committed: bool) -> None: ...
    def closed(self) -> None:
        """The peer confirmed the end of the channel."""

    def window_changed(self) -> None:
        """There may be room."""

    def lost(self, error: ErrorMaker) -> None: ...


class In(Protocol):
    """Who receives on a channel of the peer."""

    def opened(self) -> bool:
        """The channel's first message came; False if this one belonged to an earlier life of the channel."""

    def arrived(self) -> None: ...
    def ended(self) -> None: ...
    def in_lost(self, error: ErrorMaker) -> None: ...


class Owner(Protocol):
    """Who decides about what concerns no channel that somebody has."""

    def channel_opened(self, channel: int) -> None: ...
    def peer_shut_down(self) -> None: ...
    def changed(self, change: LinkReplaced, error: ErrorMaker) -> None: ...
    def ending(self) -> None:
        """The link will be over at once; all channels are still there."""

    def over(self, error: ErrorMaker) -> None: ...
