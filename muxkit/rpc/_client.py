"""The client's side of calls: an object with the methods of a service, each of which opens a channel."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import attrs
import trio

from muxkit.codecs import CODEC_HEADER, DEFAULT_CODEC, Codec, InvalidMessage, decoded
from muxkit.rpc._call import (
    DEADLINE_PASSED,
    END,
    ERROR,
    ITEM,
    TIMEOUT_HEADER,
    Call,
    Interceptor,
    around_call,
    timeout_text,
)
from muxkit.rpc._errors import CODE_OF_STATUS, Code, Error, from_record
from muxkit.rpc._service import CallCodec, Method, methods_of
from muxkit.rpc._stream import RemoteStream, Stream, as_stream
from muxkit.runtime import Channel, ChannelCancelled, ChannelStopped, LinkLost, Session, background

ServiceT = TypeVar("ServiceT")

FIRST_PAUSE: Final = 0.05  # s before the second attempt; it doubles with each
MAX_PAUSE: Final = 5.0  # s
REFUSED_BY_CODE: Final = "the server ended the call"
LAST_MOMENT: Final = 1.0
"""Seconds that a caller waits for its own deadline after the server says that it has passed: clocks differ a little."""


def client(
    service: Callable[..., ServiceT],
    session: Session,
    *,
    codec: str = DEFAULT_CODEC,
    interceptors: Sequence[Interceptor] = (),
) -> ServiceT:
    """Return an object with the methods of a service, which are calls on this session.

        orders = rpc.client(Orders, session)
        order = await orders.get(7)

    A call opens a channel, sends its arguments with the opening and waits for the result. The deadline of the caller
    travels with it. Cancelling the caller cancels the handler. Making the client does no I/O.

    Args:
        service: The class of the service: an interface (`rpc.Service`, `typing.Protocol`), or the class of the server.
        session: The session that carries the calls.
        codec: The name of the codec, such as "json" or "msgpack".
        interceptors: They run around each call, the first one outermost.

    The methods raise `rpc.Error`, the exceptions that they declare, and `LinkLost` when the connection is lost. It is
    then unknown whether the handler ran.

    Raises:
        TypeError: The class isn't a service.
        UnknownCodec: No codec has this name.
    """
    return client_over(service, _Fixed(session), codec, tuple(interceptors))


def client_over(
    service: Callable[..., ServiceT], sessions: Sessions, codec: str, interceptors: tuple[Interceptor, ...]
) -> ServiceT:
    """Return a client whose calls go over whatever session there is."""
    if not isinstance(service, type):
        raise TypeError(f"invalid service: expected a class, got {type(service).__name__!r}")
    for method in methods_of(service).values():
        method.codec(codec)  # raises for an unknown one
    made = _client_class(service)(_Caller(sessions, codec, interceptors))
    return cast("ServiceT", made)  # it has all methods of the service, made from its annotations


class _Unanswered(Error):
    """The server ended the channel of a call without an answer."""


_Unanswered.__name__ = _Unanswered.__qualname__ = "Error"  # users need not know the difference


class Sessions(Protocol):
    """Gives calls a session."""

    @property
    def only(self) -> Session | None:
        """The session of all calls. None if another session follows a lost one, so that a call can be repeated."""
        ...

    async def get(self) -> Session:
        """Return a session that is open; wait until there is one."""
        ...


@attrs.frozen
class _Fixed:
    """One session, and no other."""

    only: Session

    async def get(self) -> Session:
        return self.only


class _Prepared(NamedTuple):
    """The parts of a call that are sent."""

    codec: CallCodec
    arguments: bytes
    items: Stream[Any] | None
    headers: dict[str, str]


@attrs.frozen(eq=False)
class _Caller:
    """Makes calls; one for each client.

    A call on the only session without interceptors, which is the usual one, runs in a single coroutine of this class
    (`_exchange`), because each level of coroutines costs time whenever the task wakes up.
    """

    sessions: Sessions
    codec: str
    interceptors: tuple[Interceptor, ...]

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Make a call that has one result."""
        session = self.sessions.only
        if session is None:
            return self._call_on_any(method, args, kwargs)
        if around_call(self.interceptors):
            return self._within_interceptors(session, method, args, kwargs)
        return self._exchange(session, method, args, kwargs)

    async def _call_on_any(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - of any method
        """Make a call on the present session. If the method is idempotent, repeat it after a loss."""
        is_repeated = method.options.idempotent and method.stream_parameter is None
        for attempt in count():
            try:
                return await self._within_interceptors(await self.sessions.get(), method, args, kwargs)
            except (LinkLost, _Unanswered) as error:
                if not is_repeated or (isinstance(error, _Unanswered) and error.code is not Code.UNAVAILABLE):
                    raise
            await _pause(attempt)
        raise AssertionError("the attempts never end by themselves")

    async def _within_interceptors(
        self, session: Session, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - of any method
        prepared = self._prepared(method, args, kwargs)
        around = around_call(self.interceptors)
        if not around:
            return await self._exchange(session, method, args, kwargs, prepared)
        call = self._call(method, session, prepared.headers)
        async with AsyncExitStack() as stack:
            for interceptor in around:
                await stack.enter_async_context(interceptor(call))
            return await self._exchange(session, method, args, kwargs, prepared)
        raise AssertionError("an interceptor kept an error from its caller")

    def _prepared(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Prepared:
        """Encode the arguments of a call. Raises TypeError for wrong ones."""
        codec = method.codec(self.codec)
        arguments, items = bound(method, args, kwargs)
        return _Prepared(codec, codec.arguments.encode(arguments), items, {CODEC_HEADER: codec.name})

    async def _exchange(
        self,
        session: Session,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepared: _Prepared | None = None,
    ) -> Any:  # noqa: ANN401 - of any method
        """Open the channel of a call, send the items of its stream if it has one, and wait for the result."""
        if prepared is None:
            prepared = self._prepared(method, args, kwargs)
        codec = prepared.codec
        try:
            channel = await self._opened(session, method, prepared)
        except ChannelStopped as error:
            raise _Unanswered(Code.UNAVAILABLE, str(error)) from error
        try:
            if prepared.items is None:
                message = await channel.receive()
            else:
                async with background() as nursery:
                    nursery.start_soon(_send_items, channel, codec.item, prepared.items)
                    message = await channel.receive()
        except (ChannelCancelled, ChannelStopped) as error:
            await _raise_status(error)
        except trio.EndOfChannel:
            channel.close()
            raise Error(Code.INTERNAL, "the server ended the call without a result") from None
        except BaseException:
            channel.abort()
            raise
        if message[:1] != ITEM:
            channel.close()
            raise _error_in(message, method, codec)
        try:
            result = decoded(codec.result, message[1:])
        except InvalidMessage as error:
            channel.abort(str(error))
            raise Error(Code.INTERNAL, f"the server sent an {error}") from error
        channel.close()  # without a checkpoint, because receiving was one
        return result

    def _opened(self, session: Session, method: Method, prepared: _Prepared) -> Awaitable[Channel]:
        """Open the channel of a call. Raises `ChannelStopped` if the only session opens no channels any more."""
        if self.sessions.only is None:
            return self._opened_on_any(session, method, prepared)
        return _open(session, method, prepared)

    async def _opened_on_any(self, session: Session, method: Method, prepared: _Prepared) -> Channel:
        """Open the channel of a call. On a session that can't, the call wasn't sent, so another one is taken."""
        for attempt in count():
            with suppress(ChannelStopped, LinkLost):
                return await _open(session, method, prepared)
            await _pause(attempt)
            session = await self.sessions.get()
        raise AssertionError("the attempts never end by themselves")

    def stream(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """Return the stream of a call; the call is made when its block is entered."""
        bound(method, args, kwargs)  # raises for wrong arguments, where they were given
        return RemoteStream(partial(self._stream, method, args, kwargs))

    @asynccontextmanager
    async def _stream(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[AsyncIterator[Any]]:
        prepared = self._prepared(method, args, kwargs)
        codec, items = prepared.codec, prepared.items
        session = await self.sessions.get()
        async with AsyncExitStack() as stack:
            around = around_call(self.interceptors)
            call = self._call(method, session, prepared.headers) if around else None
            for interceptor in around:
                assert call is not None
                await stack.enter_async_context(interceptor(call))
            try:
                channel = await self._opened(session, method, prepared)
            except ChannelStopped as error:
                raise _Unanswered(Code.UNAVAILABLE, str(error)) from error
            try:
                if items is None:
                    yield _Received(channel, method, codec)
                else:
                    async with background() as nursery:
                        nursery.start_soon(_send_items, channel, codec.item, items)
                        yield _Received(channel, method, codec)
            except Exception:
                await trio.lowlevel.checkpoint_if_cancelled()
                await channel.aclose()
                raise
            except BaseException:
                channel.abort()
                raise
            else:
                await channel.aclose()

    def _call(self, method: Method, session: Session, headers: dict[str, str]) -> Call:
        return Call(
            method=method.full_name,
            side="client",
            session=session,
            headers=headers,
            deadline=trio.current_effective_deadline(),
            is_streaming=method.returns_stream or method.stream_parameter is not None,
        )


def _open(session: Session, method: Method, prepared: _Prepared) -> Awaitable[Channel]:
    timeout = timeout_text()
    if timeout is not None:
        prepared.headers[TIMEOUT_HEADER] = timeout
    return session.open(method.channel_name, payload=prepared.arguments, headers=prepared.headers)


async def _pause(attempt: int) -> None:
    """Wait before another attempt, a random time so that many clients don't come back together."""
    await trio.sleep(random.uniform(0.5, 1) * min(MAX_PAUSE, FIRST_PAUSE * 2**attempt))


class _Client:
    """The base of the classes of clients; their methods are calls."""

    __slots__ = ("_caller",)

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


_classes: WeakKeyDictionary[type, type[_Client]] = WeakKeyDictionary()


def _client_class(service: type) -> type[_Client]:
    known = _classes.get(service)
    if known is not None:
        return known
    namespace: dict[str, object] = {"__slots__": (), "__doc__": service.__doc__}
    for name, method in methods_of(service).items():
        namespace[name] = _stream_method(method) if method.returns_stream else _call_method(method)
    made = _classes[service] = type(f"Client of {service.__name__}", (_Client,), namespace)
    return made


def _call_method(method: Method) -> Callable[..., Awaitable[Any]]:
    def call(self: _Client, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self._caller.call(method, args, kwargs)

    call.__name__, call.__doc__ = method.name, method.doc
    return call


def _stream_method(method: Method) -> Callable[..., Stream[Any]]:
    def call(self: _Client, *args: Any, **kwargs: Any) -> Stream[Any]:
        return self._caller.stream(method, args, kwargs)

    call.__name__, call.__doc__ = method.name, method.doc
    return call


def bound(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Stream[Any] | None]:
    """Return the struct of the arguments, and the stream among them. Raises TypeError for wrong arguments."""
    if method.stream_parameter is None:
        try:
            return method.arguments(*args, **kwargs), None
        except TypeError:
            method.signature.bind(None, *args, **kwargs)  # its text is the one that a function has
            raise
    given = method.signature.bind(None, *args, **kwargs).arguments
    given.pop(next(iter(method.signature.parameters)))  # self
    items = as_stream(given.pop(method.stream_parameter, ()))
    return method.arguments(**given), items


async def _send_items(channel: Channel, codec: Codec[Any], items: Stream[Any]) -> None:
    async with items as opened:
        async for item in opened:
            if not await _was_sent(channel, ITEM + codec.encode(item)):
                return
    await _was_sent(channel, END)


async def _was_sent(channel: Channel, message: bytes) -> bool:
    """Send a message; False means that the server takes no more. The task that receives its answer learns why."""
    try:
        await channel.send(message)
    except (ChannelStopped, LinkLost, trio.ClosedResourceError):
        return False
    return True


@attrs.define(eq=False)
class _Received(AsyncIterator[Any]):
    """The items that the server sends.

    It is no generator, because a generator that isn't exhausted has to be closed by whoever iterates over it.
    """

    channel: Channel
    method: Method
    codec: CallCodec
    is_over: bool = False

    async def __anext__(self) -> Any:  # noqa: ANN401 - of any method
        if self.is_over:
            raise StopAsyncIteration
        try:
            message = await self.channel.receive()
        except (ChannelCancelled, ChannelStopped) as error:
            await _raise_status(error)
        except trio.EndOfChannel:
            raise Error(Code.DATA_LOSS, "the server ended the stream before its last item") from None
        if message[:1] == ITEM:
            try:
                return decoded(self.codec.result, message[1:])
            except InvalidMessage as error:
                raise Error(Code.INTERNAL, f"the server sent an {error}") from error
        self.is_over = True
        if message[:1] == END:
            raise StopAsyncIteration
        raise _error_in(message, self.method, self.codec)


def _error_in(message: bytes, method: Method, codec: CallCodec) -> Exception:
    """Return the error that a message holds."""
    if message[:1] != ERROR:
        return Error(Code.INTERNAL, "the server sent a message that is neither a result nor an error")
    try:
        return from_record(decoded(codec.error, message[1:]), method.errors)
    except InvalidMessage as error:
        return Error(Code.INTERNAL, f"the server sent an error that can't be decoded: {error}")


async def _raise_status(error: ChannelCancelled | ChannelStopped) -> NoReturn:
    """Raise what it means that the server ended the channel of a call without an answer."""
    if error.code == DEADLINE_PASSED and trio.current_effective_deadline() < math.inf:
        await trio.sleep_until(min(trio.current_effective_deadline(), trio.current_time() + LAST_MOMENT))
        await trio.lowlevel.checkpoint()  # raises Cancelled
    code = CODE_OF_STATUS.get(error.code, Code.UNAVAILABLE)
    raise _Unanswered(code, error.reason or REFUSED_BY_CODE) from error
