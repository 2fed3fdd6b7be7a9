"""What do all protocols offer alike? The common face: a session with channels, over any protocol on any link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit._limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager


class Channel(trio.abc.Channel[bytes]):
    """A two-way channel of whole messages inside a session.

    `send` and `receive` are atomic under cancellation: cancelled means not sent, and nothing is lost. Both
    check for cancellation in every call and yield at the latest on every 64th call or 16 KiB, and always when
    they had to wait.
    """

    __slots__ = ()

    @abstractmethod
    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint; cancelled, a prefix of them was sent."""

    @abstractmethod
    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, then give all that have come, at most `limit`.

        Raises `trio.EndOfChannel` at the clean end.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Say that no more messages follow, and wait until the peer has heard it; receiving goes on."""

    @abstractmethod
    def abort(self) -> None:
        """Give up both directions now; the peer learns that messages are missing."""


@attrs.frozen(kw_only=True)
class SessionInfo:
    """Who speaks what with whom."""

    protocol: str
    peer: str
    """The other end, for people: `tcp 127.0.0.1:7000`; empty when the transport does not say."""


@attrs.frozen(kw_only=True)
class SessionStats:
    """Counters since the session began, and gauges of now."""

    bytes_received: int
    bytes_sent: int
    messages_received: int
    messages_sent: int
    channels: int
    """Live channels, those of both sides."""
    queued: int
    """Bytes accepted by `send` that the transport has not taken yet."""
    round_trip: float | None
    """Seconds, smoothed; None before the first answer to a ping."""


class Session(ABC):
    """One connection that carries many channels; it owns its tasks and ends with its `async with` block."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Channel]:
        """A new channel to the peer; leaving the block normally finishes it, leaving by an error aborts it."""

    @abstractmethod
    def incoming(self) -> AsyncIterator[Channel]:
        """The channels that the peer opens, until it hangs up in an orderly way."""

    def __aiter__(self) -> AsyncIterator[Channel]:
        return self.incoming()

    @abstractmethod
    async def ping(self) -> float:
        """One round trip through the peer's session, in seconds."""

    @abstractmethod
    async def shutdown(self, *, grace: float) -> None:
        """Take no new channels, let the live ones end for up to `grace` seconds, then cut them."""

    @property
    def limits(self) -> Limits:
        """What holds for this session."""
        return Limits()

    @property
    @abstractmethod
    def info(self) -> SessionInfo: ...

    @abstractmethod
    def stats(self) -> SessionStats: ...
