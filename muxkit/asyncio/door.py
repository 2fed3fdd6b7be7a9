"""`connect`, `open_server` and `reconnecting` for programs that run on asyncio."""

from __future__ import annotations

import inspect
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

import muxkit._door
import muxkit._handlers
import muxkit._reconnecting
import muxkit._server
from muxkit import runtime
from muxkit._authorize import Authorize
from muxkit._door import LINGER_SECONDS
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._tls import TLS
from muxkit.asyncio.faces import Channel, Server, Session
from muxkit.asyncio.guest import Block, Guest, enter_guest, guest_of_loop
from muxkit.runtime import Backoff, SessionInfo

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")
FaceT = TypeVar("FaceT")
ForTrio = TypeVar("ForTrio")

ChannelHandler: TypeAlias = "Callable[[Channel], Coroutine[Any, Any, object]]"
SessionHandler: TypeAlias = "Callable[[Session], Coroutine[Any, Any, object]]"


class Handlers:
    """Handlers of the channels of a session, by name or for all; made by `each_channel` and `by_name`."""

    def __init__(self, handlers: Mapping[str, ChannelHandler] | ChannelHandler, max_concurrent: int | None) -> None:
        self._handlers = handlers
        self._max_concurrent = max_concurrent

    def for_trio(self, guest: Guest) -> muxkit._handlers.SessionHandler:
        """Return the handler of sessions that Trio calls."""
        if callable(self._handlers):
            return muxkit._handlers.each_channel(
                _in_asyncio(guest, Channel, self._handlers), max_concurrent=self._max_concurrent
            )
        return muxkit._handlers.by_name(
            {name: _in_asyncio(guest, Channel, handler) for name, handler in self._handlers.items()},
            max_concurrent=self._max_concurrent,
        )


def each_channel(handler: ChannelHandler, *, max_concurrent: int | None = None) -> Handlers:
    """Make a handler that calls `handler` with each channel of a session, as `muxkit.each_channel` does."""
    return Handlers(handler, max_concurrent)


def by_name(handlers: Mapping[str, ChannelHandler], *, max_concurrent: int | None = None) -> Handlers:
    """Make a handler that calls the handler with the name of each channel, as `muxkit.by_name` does."""
    return Handlers(dict(handlers), max_concurrent)


class _AsyncioBlock(runtime.NeedsBlock, AbstractAsyncContextManager[FaceT], Generic[FaceT, ForTrio]):
    """A block of Trio whose value has a face in asyncio."""

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


def connect(
    url: str,
    *,
    tls: TLS | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AbstractAsyncContextManager[Session]:
    """Open a session with the server at `url`, as `muxkit.connect` does; it ends with the block.

    Time limits are yours to set (`asyncio.timeout`); leaving the block takes at most `linger` seconds.
    """
    make = partial(
        muxkit._door.connect, url, tls=tls, token=token, limits=limits, observer=observer, linger=linger, **options
    )
    return _AsyncioBlock("connect(...)", Session, Block(lambda _: make()))


def open_server(
    handler: SessionHandler | ChannelHandler | Handlers,
    url: str | Sequence[str],
    *,
    tls: TLS | None = None,
    authorize: Authorize | None = None,
    listeners: Sequence[socket.socket] = (),
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AbstractAsyncContextManager[Server]:
    """Serve at `url`, or at several, while the block runs, as `muxkit.open_server` does.

    `handler` and `authorize` may be coroutine functions of asyncio, and each call of them is an asyncio task. A handler
    whose parameter is a `Channel` is called with each channel of each session, another one with each session.
    """

    muxkit._server.check_order(handler, url)

    def make(guest: Guest) -> AbstractAsyncContextManager[muxkit._server.Server]:
        return muxkit._server.open_server(
            _handler_for_trio(guest, handler),
            url,
            tls=tls,
            authorize=None if authorize is None else _authorize_for_trio(guest, authorize),
            listeners=listeners,
            limits=limits,
            observer=observer,
            linger=linger,
            **options,
        )

    return _AsyncioBlock("open_server(...)", Server, Block(make))


async def reconnecting(
    url: str,
    *,
    backoff: Backoff | None = None,
    patience: float | None = None,
    tls: TLS | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AsyncGenerator[Session, None]:
    """Iterate over sessions with the server at `url`, one after the other, as `muxkit.reconnecting` does.

    A session that is left with the loop is closed when the generator is: in the background, or at once with
    `contextlib.aclosing`.
    """
    guest = await enter_guest()
    try:
        sessions = muxkit._reconnecting.reconnecting(
            url,
            backoff=backoff,
            patience=patience,
            tls=tls,
            token=token,
            limits=limits,
            observer=observer,
            linger=linger,
            **options,
        )

        async def following() -> runtime.Session | None:
            return await anext(sessions, None)

        while (session := await guest.call(following)) is not None:
            yield Session(guest, session)
    finally:
        sessions = following = None  # type: ignore[assignment]  # which ends a session that was left
        await guest.leave()


async def in_trio(function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a coroutine function of Trio while a session or a server is open, and return what it returns.

    For what a protocol has beyond the common face: `sink = await in_trio(session.native.open_sink, b"log")`. A
    cancellation of the asyncio task cancels the call, and is raised if Trio's side was cancelled by it.
    """
    return await guest_of_loop().call(partial(function, *args, **kwargs))


# --- what Trio calls


def _in_asyncio(
    guest: Guest, face: Callable[[Guest, ForTrio], FaceT], handler: Callable[[FaceT], Coroutine[Any, Any, object]]
) -> Callable[[ForTrio], Awaitable[object]]:
    async def handle(native: ForTrio) -> object:
        return await guest.run_in_asyncio(partial(handler, face(guest, native)))

    return handle


def _handler_for_trio(
    guest: Guest, handler: SessionHandler | ChannelHandler | Handlers
) -> muxkit._handlers.SessionHandler:
    if isinstance(handler, Handlers):
        return handler.for_trio(guest)
    if muxkit._handlers.takes_channel(handler, Channel):
        return Handlers(cast("ChannelHandler", handler), None).for_trio(guest)
    return _in_asyncio(guest, Session, cast("SessionHandler", handler))


def _authorize_for_trio(guest: Guest, authorize: Authorize) -> Authorize:
    async def in_asyncio(info: SessionInfo, token: str | None) -> str | None:
        user = authorize(info, token)
        return await user if inspect.isawaitable(user) else user

    async def in_trio(info: SessionInfo, token: str | None) -> str | None:
        return await guest.run_in_asyncio(partial(in_asyncio, info, token))

    return in_trio
