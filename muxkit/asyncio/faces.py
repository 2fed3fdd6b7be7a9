"""Sessions, channels, requests and servers as asyncio tasks use them; each stands for the object of Trio behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from muxkit import runtime
from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._server import Server as TrioServer
from muxkit.asyncio.guest import Guest
from muxkit.core import Headers
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, ChannelStats, SessionStats

if TYPE_CHECKING:
    from types import TracebackType

ItemT = TypeVar("ItemT")
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


class Opening:
    """Opens a channel when it is awaited, or when its block is entered.

    The block closes the channel when it is left normally, and aborts it when it is left by an error. What was awaited
    has to be closed by the caller.
    """

    __slots__ = ("_guest", "_opening")

    if not TYPE_CHECKING:
        __enter__ = runtime.Opening.__enter__
        __exit__ = runtime.Opening.__exit__
        __getattr__ = runtime.Opening.__getattr__

    def __init__(self, guest: Guest, opening: runtime.Opening[runtime.Channel]) -> None:
        self._guest = guest
        self._opening = opening

    def __await__(self) -> Generator[Any, None, Channel]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Channel:
        return Channel(self._guest, await self._guest.call(self._opening.__aenter__))

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

    def open(self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None) -> Opening:
        """Open a channel to the peer: `async with session.open()` or `channel = await session.open()`.

        Leaving the block normally finishes the channel, leaving it by an error aborts it. The peer reads the arguments
        as `channel.name`, `channel.opening` and `channel.headers`.
        """
        return Opening(self._guest, self.native.open(name, payload=payload, headers=headers))

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
