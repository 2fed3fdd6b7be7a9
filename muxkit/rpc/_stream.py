"""Streams: the values that a call gives one after another, in either direction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar, cast

import trio

ItemT = TypeVar("ItemT")
P = ParamSpec("P")

_NOT_ENTERED = (
    "the stream isn't open: expected 'async with ... as items:' and then 'async for item in items', "
    "so that leaving the block stops whoever makes the items"
)


class Stream(AsyncIterable[ItemT], Generic[ItemT]):
    """Values that come one after another.

        async with orders.watch(since=7) as updates:
            async for order in updates: ...

    Leaving the block early stops the producer, on the other side of the connection too. The stream of a call can be
    used once. Inside of a handler, the streams that it gets as arguments are open already, and need no block.

    A stream can be made from anything that can be iterated over, to pass it to a call: `rpc.Stream(rows)`. Functions
    that make the items are decorated with `rpc.stream`.
    """

    def __init__(self, source: AsyncIterable[ItemT] | Iterable[ItemT]) -> None:
        self._source = source
        self._block: AbstractAsyncContextManager[AsyncIterator[ItemT]] | None = None
        self._items: AsyncIterator[ItemT] | None = None

    def _open(self) -> AbstractAsyncContextManager[AsyncIterator[ItemT]]:
        return _iterating(self._source)

    async def __aenter__(self) -> Self:
        if self._block is not None:
            raise RuntimeError("this stream was opened before; make another one")
        self._block = self._open()
        self._items = await self._block.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None  # it was entered
        self._items = None
        return await self._block.__aexit__(kind, error, traceback)

    def __aiter__(self) -> AsyncIterator[ItemT]:
        if self._items is not None:
            return self._items
        return self._all_items()

    async def _all_items(self) -> AsyncIterator[ItemT]:
        """Iterate over a stream that isn't open, from its begin to its end."""
        async with self as items:
            async for item in items:
                yield item

    def __anext__(self) -> Awaitable[ItemT]:
        """Return the next value; only for a stream that is open."""
        if self._items is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._items.__anext__()


class OpenStream(Stream[ItemT]):
    """A stream that is open as long as its call is: handlers get their streams so."""

    def __init__(self, items: AsyncIterator[ItemT]) -> None:
        super().__init__(())
        self._items = items

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class BlockStream(Stream[ItemT]):
    """A stream whose block is made by a function."""

    def __init__(self, open: Callable[[], AbstractAsyncContextManager[AsyncIterator[ItemT]]]) -> None:
        super().__init__(())
        self._make = open

    def _open(self) -> AbstractAsyncContextManager[AsyncIterator[ItemT]]:
        return self._make()


class RemoteStream(BlockStream[ItemT]):
    """The stream of a call, which has to be entered: otherwise nothing would stop the producer in time."""

    def _all_items(self) -> NoReturn:
        raise RuntimeError(_NOT_ENTERED)


def stream(function: Callable[P, AsyncIterable[ItemT]]) -> Callable[P, Stream[ItemT]]:
    """Make a method that returns a `Stream` from an async generator.

        @rpc.stream
        async def watch(self, since: int) -> AsyncIterator[Order]:
            yield ...

    The generator runs while the block around the stream does, and is closed with it.
    """

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Stream[ItemT]:
        return BlockStream(lambda: _iterating(function(*args, **kwargs)))

    return make


def as_stream(source: Any) -> Stream[Any]:  # noqa: ANN401 - whatever a handler or a caller gives
    """Return a stream of what a handler returned or a caller passed.

    Raises TypeError for anything that can't be iterated over.
    """
    if isinstance(source, Stream):
        return source
    if hasattr(source, "__aiter__") or (hasattr(source, "__iter__") and not isinstance(source, (str, bytes))):
        return Stream(source)
    raise TypeError(f"invalid stream: expected rpc.Stream or something to iterate over, got {type(source).__name__!r}")


@asynccontextmanager
async def _iterating(source: AsyncIterable[ItemT] | Iterable[ItemT]) -> AsyncIterator[AsyncIterator[ItemT]]:
    if isinstance(source, AsyncIterable):
        items = source.__aiter__()
        if hasattr(items, "aclose"):  # an async generator, or a channel of Trio
            async with aclosing(cast("AsyncGenerator[ItemT, None]", items)):  # it has the method, as was checked
                yield items
        else:
            yield items
    else:
        async with aclosing(_slowly(source)) as items:
            yield items


async def _slowly(source: Iterable[ItemT]) -> AsyncGenerator[ItemT, None]:
    for item in source:
        yield item
        if trio.lowlevel.in_trio_task():  # asyncio iterates over streams as well
            await trio.lowlevel.checkpoint()
