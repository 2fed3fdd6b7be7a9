"""Typed calls for programs that run on asyncio: the same services as with `muxkit.rpc`.

    from muxkit.asyncio import rpc

    async with muxkit.asyncio.connect(url) as session:
        orders = rpc.client(Orders, session)
        order = await orders.get(7)

On both sides, the methods of a service run in asyncio tasks. Streams, errors and options are those of `muxkit.rpc`.

If the asyncio task of a call is cancelled, the server's method is cancelled too. So `asyncio.timeout` works as a
deadline. But the server doesn't know the deadline in advance, as it does with `trio.fail_after`, because asyncio has no
way to ask for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import trio

import muxkit.rpc
from muxkit._options import ReconnectOptions
from muxkit.asyncio.door import Handlers, _AsyncioBlock
from muxkit.asyncio.faces import Session
from muxkit.asyncio.guest import Block, Guest
from muxkit.codecs import DEFAULT_CODEC
from muxkit.rpc import Code, Error, Interceptor, Stream, method, stream
from muxkit.rpc.services import Method, as_stream, methods_of, serve_bridged

__all__ = ["Code", "Error", "Stream", "client", "connect", "method", "serve", "stream"]

ServiceT = TypeVar("ServiceT")


def client(
    service: Callable[..., ServiceT],
    session: Session,
    *,
    codec: str = DEFAULT_CODEC,
    interceptors: Sequence[Interceptor] = (),
) -> ServiceT:
    """Return an object whose methods call those of a service at the peer of a session. See `muxkit.rpc.client`.

    Interceptors run in Trio.
    """
    native = muxkit.rpc.client(service, session.native, codec=codec, interceptors=interceptors)
    return _face(service, session._guest, native)


def connect(
    service: Callable[..., ServiceT],
    url: str | Sequence[str],
    *,
    codec: str = DEFAULT_CODEC,
    **options: Unpack[ReconnectOptions],
) -> AbstractAsyncContextManager[ServiceT]:
    """Call a service at a URL, and connect again when the connection is lost. See `muxkit.rpc.connect`.

    If no further attempt to connect makes sense, the body of the block is cancelled, and the block raises the error.

    Args:
        service: As for `client`.
        url: The server's URL, or a list of URLs.
        codec: As for `client`.
        **options: The options of `ReconnectOptions`.
    """
    block = Block(lambda guest: muxkit.rpc.connect(service, url, codec=codec, **options))
    return _AsyncioBlock("rpc.connect(...)", partial(_face, service), block)


def serve(*services: object) -> Handlers:
    """Return a handler for `muxkit.asyncio.open_server` that answers calls. See `muxkit.rpc.serve`.

    The methods run in asyncio tasks.
    """
    serve_bridged(services, lambda function, method: function)  # raises for a mistake, where it was made
    return _Calls(services)


class _Calls(Handlers):
    """Handlers whose channels are calls."""

    def __init__(self, services: tuple[object, ...]) -> None:
        super().__init__(None, None, None)
        self._services = services

    def for_trio(self, guest: Guest) -> muxkit.SessionHandler:
        """Return a handler of sessions for Trio."""
        return muxkit.each_channel(serve_bridged(self._services, partial(_in_asyncio, guest)))


def _in_asyncio(guest: Guest, function: Callable[..., Any], method: Method) -> Callable[..., Any]:
    """Return a function for Trio that runs a method of a service in asyncio."""
    if method.returns_stream:

        def make(**arguments: Any) -> Stream[Any]:
            given = _with_asyncio_stream(guest, method, arguments)
            return Stream(_FromAsyncio(guest, lambda: function(**given)))

        return make

    async def call(**arguments: Any) -> Any:  # noqa: ANN401 - of any method
        return await guest.run_in_asyncio(partial(function, **_with_asyncio_stream(guest, method, arguments)))

    return call


def _with_asyncio_stream(guest: Guest, method: Method, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. A stream among them is replaced by one that asyncio can read."""
    name = method.stream_parameter
    if name is None:
        return arguments
    return {**arguments, name: Stream(_FromTrio(guest, arguments[name]))}


class _FromTrio(AsyncIterator[Any]):
    """Lets an asyncio task iterate over a stream of Trio."""

    def __init__(self, guest: Guest, items: Any) -> None:  # noqa: ANN401 - of any method
        self._guest = guest
        self._items: AsyncIterator[Any] = aiter(items)

    async def __anext__(self) -> Any:  # noqa: ANN401 - of any method
        item, is_over = await self._guest.call(partial(_next, self._items))
        if is_over:
            raise StopAsyncIteration
        return item


class _FromAsyncio(AsyncIterator[Any]):
    """Lets a Trio task iterate over a stream of asyncio. The first step enters the stream, and `aclose` leaves it."""

    def __init__(self, guest: Guest, make: Callable[[], Any]) -> None:
        self._guest = guest
        self._make = make
        self._stream: Stream[Any] | None = None

    async def __anext__(self) -> Any:  # noqa: ANN401 - of any method
        item, is_over = await self._guest.run_in_asyncio(self._step)
        if is_over:
            raise StopAsyncIteration
        return item

    async def _step(self) -> tuple[Any, bool]:
        if self._stream is None:
            self._stream = as_stream(self._make())
            await self._stream.__aenter__()
        return await _next(aiter(self._stream))

    async def aclose(self) -> None:
        """Leave the stream in asyncio."""
        entered, self._stream = self._stream, None
        if entered is not None:
            with trio.CancelScope(shield=True):  # the program's generator must be able to clean up
                await self._guest.run_in_asyncio(partial(_leave, entered))


async def _leave(entered: Stream[Any]) -> None:
    await entered.__aexit__(None, None, None)


async def _next(items: AsyncIterator[Any]) -> tuple[Any, bool]:
    """Return the next item and False, or None and True at the end.

    `StopAsyncIteration` can't be raised out of an asyncio task, so the end needs another form.
    """
    try:
        return await items.__anext__(), False
    except StopAsyncIteration:
        return None, True


class _AsyncioStream(Stream[Any]):
    """The stream of a call, for an asyncio task. A Trio task enters and leaves the block of the wrapped stream."""

    def __init__(self, native: Stream[Any]) -> None:
        super().__init__(())
        self._held = Block(lambda guest: native)

    async def __aenter__(self) -> Self:
        guest, items = await self._held.enter()
        self._items = _FromTrio(guest, items)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._items = None
        await self._held.leave(error)

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._items is None:
            raise RuntimeError("the stream isn't open: expected 'async with ... as items:'")
        return self._items


class _Client:
    """Base class of the classes that `client` creates."""

    def __init__(self, guest: Guest, native: Any) -> None:  # noqa: ANN401 - of any service
        self._guest = guest
        self._native = native


def _face(service: Callable[..., ServiceT], guest: Guest, native: ServiceT) -> ServiceT:
    """Return an object for asyncio whose methods call those of a client in Trio."""
    assert isinstance(service, type)  # as `muxkit.rpc.client` has checked
    namespace = {name: _call(method) for name, method in methods_of(service).items()}
    made: Any = type(f"Client of {service.__name__}", (_Client,), namespace)(guest, native)
    face: ServiceT = made
    return face


def _call(method: Method) -> Callable[..., Any]:
    def call(self: _Client, *args: Any, **kwargs: Any) -> Awaitable[Any] | Stream[Any]:
        args, kwargs = _with_trio_stream(self._guest, method, args, kwargs)
        native = getattr(self._native, method.name)
        if method.returns_stream:
            return _AsyncioStream(native(*args, **kwargs))
        return self._guest.call(partial(native, *args, **kwargs))

    call.__name__, call.__doc__ = method.name, method.doc
    return call


def _with_trio_stream(
    guest: Guest, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call. A stream among them is replaced by one that Trio can read."""
    if method.stream_parameter is None:
        return args, kwargs
    bound = method.signature.bind(None, *args, **kwargs)
    given = dict(list(bound.arguments.items())[1:])
    source = as_stream(given[method.stream_parameter])
    given[method.stream_parameter] = Stream(_FromAsyncio(guest, lambda: source))
    return (), given
