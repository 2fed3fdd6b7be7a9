"""`connect`, `open_server` and `reconnecting` for programs that run on asyncio."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, cast

import muxkit._door
import muxkit._handlers
import muxkit._reconnecting
import muxkit._server
from muxkit import runtime
from muxkit._authorize import Authorize
from muxkit._options import ConnectOptions, ReconnectOptions, ServeOptions
from muxkit._signatures import check_handler, kind_of
from muxkit.asyncio.faces import Channel, Request, Server, Session
from muxkit.asyncio.guest import Block, Guest, guest_of_loop
from muxkit.asyncio.topics import Topic
from muxkit.runtime import SessionInfo

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")
FaceT = TypeVar("FaceT")
ForTrio = TypeVar("ForTrio")

ChannelHandler: TypeAlias = "Callable[[Channel], Coroutine[Any, Any, object]]"
SessionHandler: TypeAlias = "Callable[[Session], Coroutine[Any, Any, object]]"
RequestHandler: TypeAlias = "Callable[[Request], Coroutine[Any, Any, object]]"


class Handlers:
    """Handlers of the channels and requests of a session. `each_channel`, `by_name` and `each_request` make it."""

    def __init__(
        self,
        channels: Mapping[str, ChannelHandler] | ChannelHandler | None,
        requests: RequestHandler | None,
        max_concurrent: int | None,
    ) -> None:
        for handler in (channels, requests):
            for each in handler.values() if isinstance(handler, Mapping) else [handler]:
                if each is not None:
                    check_handler(each)
        self._channels = channels
        self._requests = requests
        self._max_concurrent = max_concurrent

    def for_trio(self, guest: Guest) -> muxkit._handlers.SessionHandler:
        """Return a handler of sessions for Trio, which runs the handlers as asyncio tasks."""
        most = self._max_concurrent
        requests = None if self._requests is None else _in_asyncio(guest, Request, self._requests)
        if isinstance(self._channels, Mapping):
            named = {name: _in_asyncio(guest, Channel, handler) for name, handler in self._channels.items()}
            return muxkit._handlers.by_name(named, requests=requests, max_concurrent=most)
        if self._channels is not None:
            channels = _in_asyncio(guest, Channel, self._channels)
            return muxkit._handlers.each_channel(channels, requests=requests, max_concurrent=most)
        assert requests is not None  # by `each_request`
        return muxkit._handlers.each_request(requests, max_concurrent=most)


def each_channel(
    handler: ChannelHandler, *, requests: RequestHandler | None = None, max_concurrent: int | None = None
) -> Handlers:
    """Make a handler that calls `handler` with each channel of a session, as `muxkit.each_channel` does."""
    return Handlers(handler, requests, max_concurrent)


def by_name(
    handlers: Mapping[str, ChannelHandler], *, requests: RequestHandler | None = None, max_concurrent: int | None = None
) -> Handlers:
    """Make a handler that calls the handler with the name of each channel, as `muxkit.by_name` does."""
    return Handlers(dict(handlers), requests, max_concurrent)


def each_request(handler: RequestHandler, *, max_concurrent: int | None = None) -> Handlers:
    """Make a handler that calls `handler` with each request of a session, as `muxkit.each_request` does."""
    return Handlers(None, handler, max_concurrent)


class _AsyncioBlock(runtime.NeedsBlock, AbstractAsyncContextManager[FaceT], Generic[FaceT, ForTrio]):
    """A block of Trio that an asyncio task enters. The task gets the block's value in a wrapper of `faces`."""

    def __init__(self, call: str, face: Callable[[Guest, ForTrio], FaceT], block: Block[ForTrio]) -> None:
        self._call = call
        self._face = face
        self._block = block

    async def __aenter__(self) -> FaceT:
        guest, value = await self._block.enter()
        return self._face(guest, value)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._block.leave(error)


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Session]:
    """Open a session with the server at `url`, as `muxkit.connect` does. The session ends with the block.

    `connect` has no timeout of its own: use `asyncio.timeout`. Leaving the block takes at most `linger` seconds.

    Args:
        url: The server's URL, or a list of URLs, which are raced.
        **options: The options of `ConnectOptions`.
    """
    make = partial(muxkit._door.connect, url, **options)
    return _AsyncioBlock("connect(...)", Session, Block(lambda _: make()))


def open_server(
    handler: SessionHandler | ChannelHandler | Handlers, url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[Server]:
    """Serve at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Each call of the handler is an asyncio task. So is each call of `authorize`, which may be a coroutine function.

    Args:
        handler: A coroutine function with one parameter. It is called with each channel of each session, or with each
            session if its parameter is annotated as a `Session`. Both classes are those of `muxkit.asyncio`.
        url: The URL, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        TypeError: If the handler isn't async, doesn't take one argument, or has an unknown annotation.
    """
    takes_channel = not isinstance(handler, Handlers) and (
        kind_of(handler, channel=Channel, session=Session, module="muxkit.asyncio") == "channel"
    )
    handlers = Handlers(cast("ChannelHandler", handler), None, None) if takes_channel else handler

    def make(guest: Guest) -> AbstractAsyncContextManager[muxkit._server.Server]:
        given, authorize = options.copy(), options.get("authorize")
        if authorize is not None:
            given["authorize"] = _authorize_for_trio(guest, authorize)
        return muxkit._server.open_server(
            _handler_for_trio(guest, cast("SessionHandler | Handlers", handlers)), url, **given
        )

    return _AsyncioBlock("open_server(...)", Server, Block(make))


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session after another with the server at `url`, as `muxkit.reconnecting` does.

        async with muxkit.asyncio.reconnecting(url) as sessions:
            async for session in sessions:
                ...

    Leaving the block closes the current session.

    Args:
        url: The server's URL, or a list of URLs.
        **options: The options of `ReconnectOptions`.
    """
    make = partial(muxkit._reconnecting.reconnecting, url, **options)
    return _AsyncioBlock("reconnecting(...)", _Sessions, Block(lambda _: make()))


class _Sessions(AsyncIterator[Session]):
    """The sessions of a block of `reconnecting`, for an asyncio task."""

    def __init__(self, guest: Guest, native: AsyncIterator[runtime.Session]) -> None:
        self._guest = guest
        self._native = native

    async def __anext__(self) -> Session:
        return Session(self._guest, await self._guest.call(self._native.__anext__))


async def in_trio(function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a coroutine function in Trio, and return its result. A session or a server must be open.

    Use this for methods that only one protocol has: `sink = await in_trio(session.native.open_sink, b"log")`.

    If the asyncio task is cancelled, the call is cancelled. If the call completes in spite of that, its result is
    returned, and the next `await` of the task raises `asyncio.CancelledError`.

    Raises:
        RuntimeError: If no session and no server is open in this loop.
    """
    return await guest_of_loop().call(partial(function, *args, **kwargs))


# --- functions that Trio calls


def _in_asyncio(
    guest: Guest, face: Callable[[Guest, ForTrio], FaceT], handler: Callable[[FaceT], Coroutine[Any, Any, object]]
) -> Callable[[ForTrio], Awaitable[object]]:
    if isinstance(handler, Topic):
        topic: Any = handler.native
        served: Callable[[ForTrio], Awaitable[object]] = topic
        return served

    async def handle(native: ForTrio) -> object:
        return await guest.run_in_asyncio(partial(handler, face(guest, native)))

    return handle


def _handler_for_trio(guest: Guest, handler: SessionHandler | Handlers) -> muxkit._handlers.SessionHandler:
    if isinstance(handler, Handlers):
        return handler.for_trio(guest)
    handle = _in_asyncio(guest, Session, handler)

    async def handle_session(session: runtime.Session) -> None:
        await handle(session)

    return handle_session


def _authorize_for_trio(guest: Guest, authorize: Authorize) -> Authorize:
    async def in_asyncio(info: SessionInfo, token: str | None) -> str | None:
        user = authorize(info, token)
        return await user if inspect.isawaitable(user) else user

    async def in_trio(info: SessionInfo, token: str | None) -> str | None:
        return await guest.run_in_asyncio(partial(in_asyncio, info, token))

    return in_trio
