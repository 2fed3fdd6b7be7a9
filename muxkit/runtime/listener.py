"""A listener over the channels of a session, for servers that were written for Trio's streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Protocol

import trio

WRONG_NAME: Final = 404  # the code of a channel with another name


class Streamable(Protocol):
    """A channel, as far as a listener needs it."""

    @property
    def name(self) -> str: ...
    def as_stream(self) -> trio.abc.HalfCloseableStream: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


class ChannelListener(trio.abc.Listener[trio.abc.HalfCloseableStream]):
    """Accepts the channels that the peer opens as streams of bytes, made by `session.listener`."""

    def __init__(self, channels: AsyncIterator[Streamable], name: str) -> None:
        self._channels = channels
        self._name = name
        self._scope: trio.CancelScope | None = None
        self._is_closed = False

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Wait for the next channel with the name, and return it as a stream. Channels with other names are refused.

        Raises `trio.ClosedResourceError` once the listener is closed, or the peer opens no more channels, and
        `LinkLost` when the connection is lost.
        """
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError("this listener was closed")
        with trio.CancelScope() as self._scope:
            async for channel in self._channels:
                if channel.name == self._name:
                    return channel.as_stream()
                channel.abort(f"only channels named {self._name!r} are accepted here", code=WRONG_NAME)
        self._is_closed = True
        raise trio.ClosedResourceError("no more channels come: this listener was closed, or the peer leaves")

    async def aclose(self) -> None:
        """Accept no more channels; the session and the accepted streams stay open."""
        self._is_closed = True
        if self._scope is not None:
            self._scope.cancel()
        await trio.lowlevel.checkpoint()
