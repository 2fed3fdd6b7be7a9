"""The base class of the session objects that applications use.

`MuxSession` has only the public methods. The engine, the pump and the backlogs of channels belong to its connection
(`muxkit.runtime.connection`). Each protocol with channels derives its `Session` from this class, and adds the methods
that only this protocol has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, overload

from muxkit import _spans
from muxkit._errors import LocalProtocolError
from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._observer import measured
from muxkit._spans import SpanMaker
from muxkit.codecs import Codec, announced
from muxkit.core import Headers, encode_headers, with_name
from muxkit.runtime._scope import background, protected_manager, reason_for_leaving
from muxkit.runtime._session import Session, SessionStats, TypedChannel, ValueT, typed
from muxkit.runtime.channel import MuxChannel
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.opening import ChannelOpening

LINGER: Final = 5.0  # default for the maximum number of seconds that closing a session may take

ChannelT = TypeVar("ChannelT", bound=MuxChannel)
ConnectionT = TypeVar("ConnectionT", bound=MuxConnection[Any, Any])
SessionT = TypeVar("SessionT", bound="MuxSession[Any, Any]")


@protected_manager
async def running(make: Callable[[], SessionT], linger: float) -> AsyncGenerator[SessionT, None]:
    """Create a session and run it for a block.

    Leaving the block normally closes the session, which takes at most `linger` seconds, and raises `LinkLost` if the
    peer may not have received every message. If the block raises an exception, the peer gets a reason. If the block is
    cancelled, the peer gets no reason.
    """
    session = make()  # inside the block, because a session belongs to the thread and the Trio run of its block
    connection: MuxConnection[Any, Any] = session._connection
    with measured(connection.facts, session):
        async with background() as nursery:
            connection.start(nursery)
            try:
                yield session
            except Exception as error:
                told = reason_for_leaving(error, connection.reason_of_error)
                connection.lose("an error ended the session's block", by="local", told=told)
                raise
            except BaseException:
                connection.abandon()
                raise
            await connection.leave(linger)


def connection_of(session: MuxSession[ConnectionT, Any]) -> ConnectionT:
    """Return the connection of a session, for tests and tools. Applications don't need it."""
    return session._connection


class MuxSession(Session, Generic[ConnectionT, ChannelT]):
    """A session with many channels of the class `ChannelT`, on a connection of the class `ConnectionT`."""

    def __init__(self, connection: ConnectionT) -> None:
        self._connection: ConnectionT = connection
        connection.session = self

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[ChannelT]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
    ) -> ChannelOpening[ChannelT] | ChannelOpening[TypedChannel[ValueT]]:
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec)), codec)
        opening = self._opening_bytes(name, payload, headers)
        if _spans.maker is None:
            return ChannelOpening(partial(self._connection.open_channel, opening))
        return ChannelOpening(partial(self._open_with_span, _spans.maker, name, payload, headers, {}))

    def _opening_bytes(self, name: str, payload: bytes, headers: Headers | None) -> bytes:
        """Return what travels in the opening of a channel. Raises for headers and names that can't be sent."""
        return with_name(name, payload, encode_headers(headers, self.limits.headers))

    def _open_channel(self, name: str, opening: bytes, options: Mapping[str, Any]) -> Awaitable[ChannelT]:
        """Open a channel. `options` are those that only the `open` of this protocol has."""
        return self._connection.open_channel(opening)

    async def _open_with_span(
        self, maker: SpanMaker, name: str, payload: bytes, headers: Headers | None, options: Mapping[str, Any]
    ) -> ChannelT:
        """Open a channel with a span, whose context travels in the headers if there is room for it."""
        span, with_context = maker.opening(self, name, headers)
        try:
            try:
                opening = self._opening_bytes(name, payload, with_context)
            except LocalProtocolError:
                opening = self._opening_bytes(name, payload, headers)
            channel = await self._open_channel(name, opening, options)
        except BaseException as error:
            if span is not None:
                span.failed(error)
                span.end()
            raise
        channel._span = span
        if span is not None:
            self._connection.keep_span(span)
        channel._observe_span(maker.ids() if span is None else span.ids())
        return channel

    def incoming(self) -> AsyncIterator[ChannelT]:
        return self._connection.incoming.claim()

    def _takes_only(self, kinds: Sequence[str]) -> None:
        self._connection.take_only(kinds)

    def channels(self) -> Sequence[ChannelT]:
        return self._connection.taken_channels()

    async def ping(self) -> float:
        return await self._connection.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Stop accepting channels, wait up to `grace` seconds for the live channels to end, then abort them.

        The peer is notified immediately. If the peer opens a channel before it gets the notification, the channel is
        refused. `incoming` still returns the channels that arrived before this call, and then ends.
        """
        await self._connection.shutdown(grace=grace)

    @property
    def limits(self) -> Limits:
        return self._connection.limits

    @property
    def info(self) -> SessionInfo:
        return self._connection.info

    def stats(self) -> SessionStats:
        return self._connection.stats()

    def __repr__(self) -> str:
        info = self.info
        return f"<{info.protocol} session, {info.peer or 'on a stream'}: {self._connection.state_text()}>"
