"""The sessions, channels, requests and servers that asyncio tasks use.

Each object wraps the corresponding object of Trio, which is its attribute `native`. A method that has to wait is called
in Trio, through the `Guest`. `Channel.send` and `Channel.receive` first try without Trio, because a switch to Trio and
back costs many times as much as a short message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import trio

from muxkit import runtime
from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._server import Server as TrioServer
from muxkit.asyncio.guest import Guest
from muxkit.codecs import Codec
from muxkit.core import Headers
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, ChannelStats, OnLag, SessionStats

if TYPE_CHECKING:
    from types import TracebackType

ItemT = TypeVar("ItemT")
OpenedT = TypeVar("OpenedT")
ValueT = TypeVar("ValueT")
ForTrio = TypeVar("ForTrio")


class _Face(Generic[ForTrio]):
    """Base class of the wrappers. Two wrappers are equal if they wrap the same object of Trio."""

    __slots__ = ("_guest", "native")

    def __init__(self, guest: Guest, native: ForTrio) -> None:
        self._guest = guest
        self.native: ForTrio = native
        """The wrapped object. It has all methods of the protocol. Call coroutine functions of it with `in_trio`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Face) and self.native is other.native

    def __hash__(self) -> int:
        return hash(self.native)

    def __repr__(self) -> str:
        return f"<muxkit.asyncio.{type(self).__name__} of {self.native!r}>"


class Channel(_Face[runtime.Channel]):
    """A two-way channel for messages. Many channels share one session.

    A message arrives as a whole or not at all. If `send` is cancelled, the message wasn't sent. If `receive` is
    cancelled, no message is lost.

    To be fast, `send` and `receive` let other tasks run only if they have to wait, or after 64 calls or 128 KiB.
    """

    __slots__ = ("_since_yield",)

    def __init__(self, guest: Guest, native: runtime.Channel) -> None:
        super().__init__(guest, native)
        self._since_yield = 0  # bytes

    # --- sending

    async def send(self, message: bytes) -> None:
        """Send a message. This returns when the session has accepted the message, and may have to wait for credit.

        Raises:
            trio.ClosedResourceError: If this side has called `finish`, `abort` or `aclose`.
            ChannelStopped: If the peer doesn't want to receive any more.
            LinkLost: If the connection was lost.
            LocalProtocolError: If the message can't be sent, for example because it is larger than `Limits.message`.
        """
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        if self.native._try_send(message):
            self._count(len(message))
        else:
            self._since_yield = 0
            await self._guest.call(partial(self.native.send, message))

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages, which is faster than one by one. If cancelled, the first ones may have been sent."""
        await self._guest.call(partial(self.native.send_many, [*messages]))

    async def finish(self) -> None:
        """Announce that this side sends no more messages, and wait until the peer has confirmed that.

        The application can still receive messages.
        """
        await self._guest.call(self.native.finish)

    # --- receiving

    async def receive(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            trio.EndOfChannel: If the peer has finished sending, and all its messages were received.
            ChannelCancelled: If the peer has cancelled the channel.
            LinkLost: If the connection was lost.
            trio.ClosedResourceError: If this side has called `abort` or `aclose`.
        """
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        message = self.native._try_receive()
        if message is None:
            self._since_yield = 0
            return await self._guest.call(self.native.receive)
        self._count(len(message))
        return message

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, and return all messages that have arrived, but at most `limit`."""
        return await self._guest.call(partial(self.native.receive_many, limit))

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def _count(self, size: int) -> None:
        self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call

    async def _yield(self) -> None:
        """Let other tasks run. The caller hasn't done anything yet, so it may be cancelled here."""
        self._since_yield = 0
        await asyncio.sleep(0)

    # --- the end

    async def aclose(self) -> None:
        """Finish sending and stop receiving, without waiting for the peer's confirmation."""
        await self._guest.call(self.native.aclose)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel both directions of the channel without waiting. Some messages may not arrive.

        At the peer, receiving raises `ChannelCancelled` and sending raises `ChannelStopped`. Both have the reason and
        the code, if the protocol can transmit them.
        """
        self.native.abort(reason, code=code)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- what it is

    @property
    def session(self) -> Session:
        """The session that carries this channel."""
        return Session(self._guest, self.native.session)

    @property
    def name(self) -> str:
        """The name of the channel, which says what it is for. "" if the side that opened it gave no name."""
        return self.native.name

    @property
    def opening(self) -> bytes:
        """The payload that was sent with the opening of the channel. It isn't one of the messages."""
        return self.native.opening

    @property
    def headers(self) -> Headers:
        """The headers that were sent with the opening of the channel. They are empty if there were none."""
        return self.native.headers

    def stats(self) -> ChannelStats:
        """Return statistics about the channel."""
        return self.native.stats()


class TypedChannel(Generic[ValueT]):
    """A two-way channel for values of one type. `session.open(codec=...)` and `handler` make such channels.

    `send` encodes a value and sends it as one message, and `receive` decodes a message. Cancellation works as described
    for `Channel`.

    If the peer sends a message that doesn't fit the type, `receive` raises `InvalidMessage` and aborts the channel. The
    peer gets the code 422 and a description of the problem. The session and its other channels continue.
    """

    __slots__ = ("native", "raw")

    def __init__(self, raw: Channel, codec: Codec[ValueT]) -> None:
        self.raw: Channel = raw
        """The channel that carries the encoded values."""
        self.native: runtime.TypedChannel[ValueT] = runtime.TypedChannel(raw.native, codec)
        """The wrapped object. Call coroutine functions of it with `in_trio`."""

    def __repr__(self) -> str:
        return f"<muxkit.asyncio.TypedChannel of {self.native!r}>"

    @property
    def codec(self) -> Codec[ValueT]:
        """The codec of both directions."""
        return self.native.codec

    @property
    def session(self) -> Session:
        """The session that carries this channel."""
        return self.raw.session

    @property
    def name(self) -> str:
        """The name of the channel, or "" if the side that opened it gave no name."""
        return self.raw.name

    @property
    def opening(self) -> bytes:
        """The payload that was sent with the opening of the channel, as bytes. The codec doesn't apply to it."""
        return self.raw.opening

    @property
    def headers(self) -> Headers:
        """The headers that were sent with the opening of the channel."""
        return self.raw.headers

    async def send(self, value: ValueT) -> None:
        """Send a value. If this is cancelled, the value wasn't sent.

        If the codec can't encode the value, its exception is raised, and nothing was sent.
        """
        await self.raw.send(self.codec.encode(value))

    async def send_many(self, values: Iterable[ValueT]) -> None:
        """Send several values, which is faster than one by one. If cancelled, the first ones may have been sent."""
        encode = self.codec.encode
        await self.raw.send_many([encode(value) for value in values])

    async def receive(self) -> ValueT:
        """Wait for the next value and return it.

        Raises:
            trio.EndOfChannel: If the peer has finished sending, and all its values were received.
            InvalidMessage: If the message isn't a valid value.
        """
        return self.native._decoded(await self.raw.receive())

    async def receive_many(self, limit: int | None = None) -> list[ValueT]:
        """Wait for at least one value, and return all values that have arrived, but at most `limit`.

        Raises the same exceptions as `receive`.
        """
        return [self.native._decoded(message) for message in await self.raw.receive_many(limit)]

    def __aiter__(self) -> TypedChannel[ValueT]:
        return self

    async def __anext__(self) -> ValueT:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    async def finish(self) -> None:
        """Announce that this side sends no more values, and wait until the peer has confirmed that.

        The application can still receive values.
        """
        await self.raw.finish()

    async def aclose(self) -> None:
        """Close both directions of the channel. See `Channel.aclose`."""
        await self.raw.aclose()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel both directions of the channel without waiting. See `Channel.abort`."""
        self.raw.abort(reason, code=code)

    async def __aenter__(self) -> TypedChannel[ValueT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def stats(self) -> ChannelStats:
        """Return statistics about the channel."""
        return self.raw.stats()


class Subscription(AsyncIterator[ValueT], Generic[ValueT]):
    """The updates of a topic. `session.subscribe` returns it, and a program iterates over it with `async for`."""

    __slots__ = ("_guest", "native")

    def __init__(self, guest: Guest, native: runtime.Subscription[ValueT]) -> None:
        self._guest = guest
        self.native: runtime.Subscription[ValueT] = native
        """The wrapped object."""

    @property
    def position(self) -> str:
        """The position after the last received update. Pass it as `since=` to a later subscription to continue
        there."""
        return self.native.position

    @property
    def lost(self) -> int:
        """How many updates were lost until now, because this subscriber was too slow."""
        return self.native.lost

    async def __anext__(self) -> ValueT:
        """Wait for the next update. Raises `Lagged` if updates were lost and `on_lag` is "end"."""
        return await self._guest.call(self._next)

    async def _next(self) -> ValueT:
        return await self.native.__anext__()

    async def aclose(self) -> None:
        """End the subscription."""
        await self._guest.call(self.native.aclose)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """End the subscription without waiting."""
        self.native.abort(reason, code=code)

    async def __aenter__(self) -> Subscription[ValueT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Opening(Generic[OpenedT]):
    """Opens a channel, with `async with` or with `await`.

    Leaving the block of `async with` closes the channel. If an exception leaves the block, the channel is aborted
    instead. After `await`, the caller has to close the channel.
    """

    __slots__ = ("_face", "_guest", "_opening")

    if not TYPE_CHECKING:
        __enter__ = runtime.Opening.__enter__
        __exit__ = runtime.Opening.__exit__
        __getattr__ = runtime.Opening.__getattr__

    def __init__(self, guest: Guest, opening: runtime.Opening[Any], face: Callable[[Guest, Any], OpenedT]) -> None:
        self._guest = guest
        self._opening = opening
        self._face = face

    def __await__(self) -> Generator[Any, None, OpenedT]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> OpenedT:
        return self._face(self._guest, await self._guest.call(self._opening.__aenter__))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self._guest.call(partial(self._opening.__aexit__, None, None, None))
        elif self._opening._opened is not None:
            self._opening._abort(self._opening._opened, error)


class Request(_Face[runtime.IncomingRequest]):
    """A request of the peer, which the application answers with one response.

    Use it in an `async with` block. If the block ends without a response, the request is declined.
    """

    __slots__ = ()

    @property
    def session(self) -> Session:
        """The session that carries this request."""
        return Session(self._guest, self.native.session)

    @property
    def payload(self) -> bytes:
        """The content of the request."""
        return self.native.payload

    async def respond(self, payload: bytes) -> None:
        """Send the response. If this is cancelled, the response wasn't sent."""
        await self._guest.call(partial(self.native.respond, payload))

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Decline the request without waiting. Does nothing if it has a response."""
        self.native.abort(reason, code=code)

    async def __aenter__(self) -> Request:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.native.abort()


class _Items(AsyncIterator[ItemT]):
    """Wraps an iterator of Trio, and each of its items."""

    def __init__(self, guest: Guest, items: AsyncIterator[Any], face: type[ItemT]) -> None:
        self._guest = guest
        self._items = items
        self._face: Any = face

    async def __anext__(self) -> ItemT:
        face: ItemT = self._face(self._guest, await self._guest.call(self._next))
        return face

    async def _next(self) -> object:
        return await self._items.__anext__()


class Session(_Face[runtime.Session]):
    """A connection to a peer, with any number of channels."""

    __slots__ = ()

    @overload
    def open(self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None) -> Opening[Channel]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: Headers | None = None
    ) -> Opening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
    ) -> Opening[Channel] | Opening[TypedChannel[ValueT]]:
        """Open a channel to the peer: `async with session.open()` or `channel = await session.open()`.

        With `async with`, leaving the block normally closes the channel after everything was sent. If an exception
        leaves the block, the channel is aborted.

        Args:
            name: What the channel is for. The peer reads it as `channel.name`, and `by_name` chooses a handler by it.
            codec: A codec such as `muxkit.Json(Price)`. The result is then a `TypedChannel`, which sends and receives
                values.
            payload: Bytes that arrive together with the opening. The peer reads them as `channel.opening`.
            headers: Names and values with facts about the channel. The peer reads them as `channel.headers`.
        """
        if codec is None:
            return Opening(self._guest, self.native.open(name, payload=payload, headers=headers), Channel)
        opening = self.native.open(name, codec=codec, payload=payload, headers=headers)
        return Opening(self._guest, opening, _typed)

    def subscribe(
        self,
        topic: str,
        *,
        codec: Codec[ValueT],
        since: int | str | None = None,
        on_lag: OnLag = "end",
        member: str | None = None,
        headers: Headers | None = None,
    ) -> Opening[Subscription[ValueT]]:
        """Subscribe to a topic of the peer. `muxkit.Session.subscribe` describes the arguments.

        async with session.subscribe("prices", codec=muxkit.Json(Price)) as prices:
            async for price in prices: ...
        """
        opening = self.native.subscribe(topic, codec=codec, since=since, on_lag=on_lag, member=member, headers=headers)
        return Opening(self._guest, opening, Subscription)

    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens, until the peer closes the session in order."""
        return _Items(self._guest, self.native.incoming(), Channel)

    def __aiter__(self) -> AsyncIterator[Channel]:
        return self.incoming()

    def channels(self) -> Sequence[Channel]:
        """Return the live channels that the application has opened or accepted."""
        return [Channel(self._guest, channel) for channel in self.native.channels()]

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for its response. If this is cancelled, the request is cancelled too.

        Raises:
            ChannelStopped: If the peer declines the request.
            LinkLost: If the connection is lost.
            Unsupported: If the protocol has no requests. Only bpmux has them.
        """
        return await self._guest.call(partial(self.native.request, payload))

    def requests(self) -> AsyncIterator[Request]:
        """Iterate over the requests of the peer. Raises `Unsupported` if the protocol has no requests."""
        return _Items(self._guest, self.native.requests(), Request)

    async def ping(self) -> float:
        """Send a ping to the peer's session, and return the seconds until its answer arrived."""
        return await self._guest.call(self.native.ping)

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new channels, wait up to `grace` seconds until the live ones have ended, and abort the others."""
        await self._guest.call(partial(self.native.shutdown, grace=grace))

    @property
    def limits(self) -> Limits:
        """The limits of this session."""
        return self.native.limits

    @property
    def info(self) -> SessionInfo:
        """The protocol and transport of the session, and the identity of the peer."""
        return self.native.info

    def stats(self) -> SessionStats:
        """Return statistics about the session."""
        return self.native.stats()


def _typed(guest: Guest, native: runtime.TypedChannel[ValueT]) -> TypedChannel[ValueT]:
    return TypedChannel(Channel(guest, native.raw), native.codec)


class Server(_Face[TrioServer]):
    """A running server."""

    __slots__ = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs to which clients connect, one for each address."""
        return self.native.urls

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.native.url

    def sessions(self) -> Sequence[Session]:
        """Return the sessions whose handlers run now."""
        return [Session(self._guest, session) for session in self.native.sessions()]

    def reload(self) -> None:
        """Read the files of `tls` again, for new connections. If they are invalid, raise ValueError and keep the
        old."""
        self.native.reload()

    async def shutdown(self, *, grace: float, redirect: str | Sequence[str] | None = None) -> None:
        """Stop accepting sessions and channels, wait up to `grace` seconds for live ones, then stop serving.

        `redirect` sends clients to another URL, as in `muxkit.Server.shutdown`.
        """
        await self._guest.call(partial(self.native.shutdown, grace=grace, redirect=redirect))

    async def wait_closed(self) -> None:
        """Wait until the server was shut down, or can't serve any more."""
        await self._guest.call(self.native.wait_closed)
