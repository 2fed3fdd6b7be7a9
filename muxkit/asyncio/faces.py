"""Sessions, channels, requests and servers as asyncio tasks use them; each stands for the object of Trio behind it."""

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
    """One of several equal objects that stand for the same object of Trio."""

    __slots__ = ("_guest", "native")

    def __init__(self, guest: Guest, native: ForTrio) -> None:
        self._guest = guest
        self.native: ForTrio = native
        """The object of Trio, for what the protocol has beyond this class: see `in_trio`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Face) and self.native is other.native

    def __hash__(self) -> int:
        return hash(self.native)

    def __repr__(self) -> str:
        return f"<muxkit.asyncio.{type(self).__name__} of {self.native!r}>"


class Channel(_Face[runtime.Channel]):
    """A two-way channel of whole messages inside a session.

    `send` and `receive` are atomic under cancellation: cancelled means not sent, and nothing was taken. Both yield to
    the loop at the latest on every 64th call or 128 KiB, and always when they have to wait.
    """

    __slots__ = ("_since_yield",)

    def __init__(self, guest: Guest, native: runtime.Channel) -> None:
        super().__init__(guest, native)
        self._since_yield = 0  # bytes

    # --- sending

    async def send(self, message: bytes) -> None:
        """Send one message; returns when the connection has it. Cancelled means not sent.

        Raises `trio.ClosedResourceError` after `finish`, `abort` or `aclose`, `ChannelStopped` when the peer wants no
        more, `LinkLost` when the connection is gone, `LocalProtocolError` for what cannot be sent.
        """
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        if self.native._try_send(message):
            self._count(len(message))
        else:
            self._since_yield = 0
            await self._guest.call(partial(self.native.send, message))

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages, which costs less than one by one; cancelled, a prefix of them was sent."""
        await self._guest.call(partial(self.native.send_many, [*messages]))

    async def finish(self) -> None:
        """Say that no more messages follow, and wait until the peer has heard it; receiving goes on."""
        await self._guest.call(self.native.finish)

    # --- receiving

    async def receive(self) -> bytes:
        """Wait for the next message and take it. Cancelled means that none was taken.

        Raises `trio.EndOfChannel` at the clean end, `ChannelCancelled` when the peer gave up before it was done,
        `LinkLost` when the connection is gone, `trio.ClosedResourceError` after `aclose`.
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
        """Wait for at least one message, then return all that have come, at most `limit`."""
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
        """Let other tasks run, before the call has done anything: a cancellation may strike here."""
        self._since_yield = 0
        await asyncio.sleep(0)

    # --- the end

    async def aclose(self) -> None:
        """Say that no more follows, and stop receiving."""
        await self._guest.call(self.native.aclose)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up both directions now; the peer learns that messages are missing, and the reason."""
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
        """What it was opened for; "" if the side that opened it gave no name."""
        return self.native.name

    @property
    def opening(self) -> bytes:
        """The payload that came, or went, with the opening; not a message."""
        return self.native.opening

    @property
    def headers(self) -> Headers:
        """The headers that came, or went, with the opening; empty if there were none."""
        return self.native.headers

    def stats(self) -> ChannelStats:
        """What is queued, the credit both ways, and since when a sender waits."""
        return self.native.stats()


class TypedChannel(Generic[ValueT]):
    """A two-way channel of values of one type, made by `session.open(codec=...)` and `muxkit.asyncio.handler`.

    `send` and `receive` have the cancellation rules of `Channel`. A message of the peer that doesn't fit the type
    raises `InvalidMessage` in `receive`, and the channel is aborted with the code 422 and the problem as the reason.
    The session isn't affected.
    """

    __slots__ = ("native", "raw")

    def __init__(self, raw: Channel, codec: Codec[ValueT]) -> None:
        self.raw: Channel = raw
        """The channel of bytes below."""
        self.native: runtime.TypedChannel[ValueT] = runtime.TypedChannel(raw.native, codec)
        """The object of Trio, for what this class doesn't have: see `in_trio`."""

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
        """The name that the opening side gave; "" if it gave none."""
        return self.raw.name

    @property
    def opening(self) -> bytes:
        """The payload that came, or went, with the opening, in bytes."""
        return self.raw.opening

    @property
    def headers(self) -> Headers:
        """The headers that came, or went, with the opening."""
        return self.raw.headers

    async def send(self, value: ValueT) -> None:
        """Send a value. Cancelled means not sent.

        Raises what the codec raises for a value that it can't encode; then nothing was sent.
        """
        await self.raw.send(self.codec.encode(value))

    async def send_many(self, values: Iterable[ValueT]) -> None:
        """Send several values, which costs less than one by one; cancelled, a prefix of them was sent."""
        encode = self.codec.encode
        await self.raw.send_many([encode(value) for value in values])

    async def receive(self) -> ValueT:
        """Wait for the next value. Raises `trio.EndOfChannel` at the clean end, `InvalidMessage` for an invalid one."""
        return self.native._decoded(await self.raw.receive())

    async def receive_many(self, limit: int | None = None) -> list[ValueT]:
        """Wait for at least one value, then return all that have come, at most `limit`. Raises as `receive` does."""
        return [self.native._decoded(message) for message in await self.raw.receive_many(limit)]

    def __aiter__(self) -> TypedChannel[ValueT]:
        return self

    async def __anext__(self) -> ValueT:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    async def finish(self) -> None:
        """Say that no more values follow, and wait until the peer has heard it; receiving goes on."""
        await self.raw.finish()

    async def aclose(self) -> None:
        """Close both directions, as `Channel.aclose` does."""
        await self.raw.aclose()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up both directions now, as `Channel.abort` does."""
        self.raw.abort(reason, code=code)

    async def __aenter__(self) -> TypedChannel[ValueT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def stats(self) -> ChannelStats:
        """Return the gauges of the channel."""
        return self.raw.stats()


class Subscription(AsyncIterator[ValueT], Generic[ValueT]):
    """The updates of a topic, made by `session.subscribe`."""

    __slots__ = ("_guest", "native")

    def __init__(self, guest: Guest, native: runtime.Subscription[ValueT]) -> None:
        self._guest = guest
        self.native: runtime.Subscription[ValueT] = native
        """The object of Trio."""

    @property
    def position(self) -> str:
        """Where the subscriber is: give it as `since=` to a later subscription, to go on after the last update."""
        return self.native.position

    @property
    def lost(self) -> int:
        """How many updates were lost so far, because this subscriber was too slow."""
        return self.native.lost

    async def __anext__(self) -> ValueT:
        """Wait for the next update. Raises `Lagged` if the policy is to end with it."""
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
    """Opens a channel when it is awaited, or when its block is entered.

    The block closes the channel when it is left normally, and aborts it when it is left by an error. What was awaited
    has to be closed by the caller.
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
    """A request of the peer; leaving an `async with` block around it declines it if it has no response."""

    __slots__ = ()

    @property
    def session(self) -> Session:
        """The session that carries this request."""
        return Session(self._guest, self.native.session)

    @property
    def payload(self) -> bytes:
        """The bytes that the peer sent with the request."""
        return self.native.payload

    async def respond(self, payload: bytes) -> None:
        """Send the response; returns when the session has accepted it. Cancelled means not sent."""
        await self._guest.call(partial(self.native.respond, payload))

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Decline, if there is no response."""
        self.native.abort(reason, code=code)

    async def __aenter__(self) -> Request:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.native.abort()


class _Items(AsyncIterator[ItemT]):
    """What comes out of an iterator of Trio, each item as its face."""

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
    """One connection that carries many channels."""

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

        Leaving the block normally finishes the channel, leaving it by an error aborts it. The peer reads the arguments
        as `channel.name`, `channel.opening` and `channel.headers`. With a codec, such as `muxkit.Json(Price)`, the
        channel is a `TypedChannel`, which sends and receives values.
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
        """Subscribe to a topic of the peer, as `muxkit.Session.subscribe` does.

        async with session.subscribe("prices", codec=muxkit.Json(Price)) as prices:
            async for price in prices: ...
        """
        opening = self.native.subscribe(topic, codec=codec, since=since, on_lag=on_lag, member=member, headers=headers)
        return Opening(self._guest, opening, Subscription)

    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens, until it hangs up in an orderly way."""
        return _Items(self._guest, self.native.incoming(), Channel)

    def __aiter__(self) -> AsyncIterator[Channel]:
        return self.incoming()

    def channels(self) -> Sequence[Channel]:
        """Return the live channels that this application has, those that it opened and those that it took."""
        return [Channel(self._guest, channel) for channel in self.native.channels()]

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for the response; a cancellation cancels the request.

        Raises `Unsupported` where the protocol has none: only bpmux has.
        """
        return await self._guest.call(partial(self.native.request, payload))

    def requests(self) -> AsyncIterator[Request]:
        """Iterate over the requests of the peer. Raises `Unsupported` where the protocol has none."""
        return _Items(self._guest, self.native.requests(), Request)

    async def ping(self) -> float:
        """Return the seconds of one round trip through the peer's session."""
        return await self._guest.call(self.native.ping)

    async def shutdown(self, *, grace: float) -> None:
        """Take no new channels, let the live ones end for up to `grace` seconds, then cut them."""
        await self._guest.call(partial(self.native.shutdown, grace=grace))

    @property
    def limits(self) -> Limits:
        """The limits of this session."""
        return self.native.limits

    @property
    def info(self) -> SessionInfo:
        """What carries the session, and who the peer is."""
        return self.native.info

    def stats(self) -> SessionStats:
        """What the session has sent, received and holds."""
        return self.native.stats()


def _typed(guest: Guest, native: runtime.TypedChannel[ValueT]) -> TypedChannel[ValueT]:
    return TypedChannel(Channel(guest, native.raw), native.codec)


class Server(_Face[TrioServer]):
    """A running server."""

    __slots__ = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """What clients connect to, one URL for each address."""
        return self.native.urls

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.native.url

    def sessions(self) -> Sequence[Session]:
        """Return the sessions whose handlers run now."""
        return [Session(self._guest, session) for session in self.native.sessions()]

    def reload(self) -> None:
        """Read the files of `tls` again, for new connections; faulty ones change nothing, and raise ValueError."""
        self.native.reload()

    async def shutdown(self, *, grace: float, redirect: str | Sequence[str] | None = None) -> None:
        """Stop accepting sessions and channels, wait up to `grace` seconds for live ones, then stop serving.

        `redirect` sends clients to another URL, as in `muxkit.Server.shutdown`.
        """
        await self._guest.call(partial(self.native.shutdown, grace=grace, redirect=redirect))

    async def wait_closed(self) -> None:
        """Wait until the server was shut down, or can serve no more."""
        await self._guest.call(self.native.wait_closed)
