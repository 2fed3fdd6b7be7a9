"""Channels and streams of muxkit for code that is written against AnyIO.

    async with muxkit.connect(url) as session, session.open("lines") as channel:
        lines = BufferedByteReceiveStream(muxkit.anyio.byte_stream(channel))
        await lines.receive_until(b"\\n", 1000)

`object_stream` and `byte_stream` make an `anyio.abc.ObjectStream` or `ByteStream` of a channel, and `listener` and
`object_listener` an `anyio.abc.Listener` of a session. They take the objects of `muxkit` where AnyIO runs on Trio, and
those of `muxkit.asyncio` where it runs on asyncio. Everything they raise is AnyIO's: `EndOfStream`,
`BrokenResourceError` and `ClosedResourceError`, each with muxkit's error as its cause.

The objects wrap others, and add neither tasks nor buffers. Closing a stream closes its channel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import trio

import muxkit.asyncio
from muxkit import runtime
from muxkit._errors import ExtraNeeded
from muxkit._info import SessionInfo
from muxkit.core import Headers

try:
    import anyio
    import anyio.abc
    import anyio.lowlevel
    from anyio.streams.tls import TLSAttribute
except ImportError as _missing:
    raise ExtraNeeded("muxkit.anyio", "anyio") from _missing

__all__ = ["MuxAttribute", "byte_stream", "listener", "object_listener", "object_stream", "stream_listener"]

P = ParamSpec("P")
T = TypeVar("T")
ValueT = TypeVar("ValueT")
StreamT = TypeVar("StreamT")

AnyChannel = runtime.Channel | muxkit.asyncio.Channel
AnySession = runtime.Session | muxkit.asyncio.Session

MAX_BYTES: Final = 65_536  # AnyIO's default for one `receive`
WRONG_NAME: Final = 404  # the code of a channel with another name


class MuxAttribute(anyio.TypedAttributeSet):
    """Attributes that the streams and listeners of this module have, in addition to those of AnyIO.

    Of AnyIO's own attributes they have `SocketAttribute.remote_address` and `remote_port`, if the session's peer has a
    host and a port, and `TLSAttribute.peer_certificate_binary`, if its certificate was verified.
    """

    channel_name: str = anyio.typed_attribute()
    """The name of the channel."""
    channel_headers: Headers = anyio.typed_attribute()
    """The headers of its opening, which the peer may have set."""
    session_info: SessionInfo = anyio.typed_attribute()
    """What carries the session, and who is at its other end."""


@overload
def object_stream(channel: AnyChannel) -> anyio.abc.ObjectStream[bytes]: ...
@overload
def object_stream(
    channel: runtime.TypedChannel[ValueT] | muxkit.asyncio.TypedChannel[ValueT],
) -> anyio.abc.ObjectStream[ValueT]: ...
def object_stream(channel: Any) -> anyio.abc.ObjectStream[Any]:
    """Return a channel as a stream of its messages, or of its values if it is a typed channel.

    `send_eof` finishes the channel, waits until the peer has heard it, and leaves receiving open.
    """
    return _ObjectStream(channel)


def byte_stream(channel: AnyChannel | trio.abc.HalfCloseableStream) -> anyio.abc.ByteStream:
    """Return a channel as a stream of bytes. The boundaries of messages are lost, as in `channel.as_stream()`.

    Streams that are Trio's, such as those of yamux, are taken as well.

    Raises:
        Unsupported: If messages of the channel may be lost, as those of a datagram channel.
    """
    if isinstance(channel, muxkit.asyncio.Channel):
        channel = channel.native
    if isinstance(channel, runtime.Channel):
        return _ByteStream(channel.as_stream(), _attributes_of(channel))
    return _ByteStream(channel, _attributes_of_stream(channel))


def listener(session: AnySession, name: str = "") -> anyio.abc.Listener[anyio.abc.ByteStream]:
    """Return a listener whose connections are the channels that the peer opens with this name, as streams of bytes.

    Channels with other names are refused. The listener takes all channels of the session, so use it instead of
    `incoming`. `serve` returns when the peer leaves in order, and raises `BrokenResourceError` if the session is lost.
    """
    return _Listener(_Named(session, name), byte_stream, _attributes_of_session(session))


def object_listener(session: AnySession, name: str = "") -> anyio.abc.Listener[anyio.abc.ObjectStream[bytes]]:
    """Return a listener like `listener`, whose connections are streams of messages."""
    return _Listener(_Named(session, name), object_stream, _attributes_of_session(session))


def stream_listener(streams: AsyncIterator[trio.abc.HalfCloseableStream]) -> anyio.abc.Listener[anyio.abc.ByteStream]:
    """Return a listener whose connections are Trio's streams, such as `session.streams()` of yamux."""
    return _Listener(_Streams(streams), byte_stream, {})


# ---------------------------------------------------------------------------- errors and backends


@contextmanager
def _anyio_errors() -> Iterator[None]:
    try:
        yield
    except trio.EndOfChannel as error:
        raise anyio.EndOfStream from error
    except trio.ClosedResourceError as error:
        raise anyio.ClosedResourceError from error
    except trio.BusyResourceError as error:
        raise anyio.BusyResourceError("using this stream") from error
    except trio.BrokenResourceError as error:
        raise anyio.BrokenResourceError from error


async def _call(function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a coroutine function of Trio from the task of either backend, and translate its errors."""
    with _anyio_errors():
        if trio.lowlevel.in_trio_task():
            return await function(*args, **kwargs)
        return await muxkit.asyncio.in_trio(function, *args, **kwargs)


# ---------------------------------------------------------------------------- streams


class _ObjectStream(anyio.abc.ObjectStream[Any]):
    """A channel of either backend. Their methods have the same names and raise the same errors."""

    def __init__(self, channel: AnyChannel | runtime.TypedChannel[Any] | muxkit.asyncio.TypedChannel[Any]) -> None:
        self._channel = channel

    async def send(self, item: Any) -> None:  # noqa: ANN401 - of the type that `object_stream` says
        with _anyio_errors():
            await self._channel.send(item)

    async def receive(self) -> Any:  # noqa: ANN401 - as above
        with _anyio_errors():
            return await self._channel.receive()

    async def send_eof(self) -> None:
        with _anyio_errors():
            await self._channel.finish()

    async def aclose(self) -> None:
        with _anyio_errors():
            await self._channel.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        channel = self._channel
        if isinstance(channel, (runtime.TypedChannel, muxkit.asyncio.TypedChannel)):
            channel = channel.raw
        return _attributes_of(channel)

    def __repr__(self) -> str:
        return f"<muxkit.anyio object stream of {self._channel!r}>"


class _ByteStream(anyio.abc.ByteStream):
    """A stream of Trio, used from either backend."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, attributes: Mapping[Any, Callable[[], Any]]) -> None:
        self._stream = stream
        self._attributes = attributes

    async def send(self, item: bytes) -> None:
        await _call(self._stream.send_all, item)

    async def receive(self, max_bytes: int = MAX_BYTES) -> bytes:
        data = await _call(self._stream.receive_some, max_bytes)
        if not data:
            raise anyio.EndOfStream
        return bytes(data)

    async def send_eof(self) -> None:
        await _call(self._stream.send_eof)

    async def aclose(self) -> None:
        await _call(self._stream.aclose)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._attributes

    def __repr__(self) -> str:
        return f"<muxkit.anyio byte stream of {self._stream!r}>"


# ---------------------------------------------------------------------------- listeners


class _Named(AsyncIterator[AnyChannel]):
    """The channels with one name; all others are refused. A class, since a generator would end with a cancellation."""

    def __init__(self, session: AnySession, name: str) -> None:
        self._channels: AsyncIterator[AnyChannel] = session.incoming()
        self._name = name

    async def __anext__(self) -> AnyChannel:
        while True:
            channel = await anext(self._channels)
            if channel.name == self._name:
                return channel
            channel.abort(f"only channels named {self._name!r} are accepted here", code=WRONG_NAME)


class _Streams(AsyncIterator[trio.abc.HalfCloseableStream]):
    """An iterator of Trio, used from either backend."""

    def __init__(self, streams: AsyncIterator[trio.abc.HalfCloseableStream]) -> None:
        self._streams = streams

    async def __anext__(self) -> trio.abc.HalfCloseableStream:
        return await _call(self._next)

    async def _next(self) -> trio.abc.HalfCloseableStream:
        return await self._streams.__anext__()


class _Listener(anyio.abc.Listener[StreamT], Generic[StreamT]):
    """Whatever an iterator yields, each made into a stream of AnyIO."""

    def __init__(
        self, arrivals: AsyncIterator[Any], wrap: Callable[[Any], StreamT], attributes: Mapping[Any, Callable[[], Any]]
    ) -> None:
        self._arrivals = arrivals
        self._wrap = wrap
        self._attributes = attributes
        self._scope: anyio.CancelScope | None = None
        self._is_closed = False

    async def serve(self, handler: Callable[[StreamT], Any], task_group: anyio.abc.TaskGroup | None = None) -> None:
        """Call `handler` with each stream in a task of the group, until the peer leaves.

        Raises `ClosedResourceError` once the listener is closed, `BrokenResourceError` if the session is lost.
        """
        own: AbstractAsyncContextManager[anyio.abc.TaskGroup] = (
            anyio.create_task_group() if task_group is None else nullcontext(task_group)
        )
        async with own as tasks:
            while (stream := await self._accept()) is not None:
                tasks.start_soon(handler, stream)

    async def _accept(self) -> StreamT | None:
        """Wait for the next stream; None means that the peer opens no more of them."""
        if self._is_closed:
            raise anyio.ClosedResourceError
        with anyio.CancelScope() as self._scope:
            with _anyio_errors():
                try:
                    return self._wrap(await anext(self._arrivals))
                except StopAsyncIteration:
                    return None
        raise anyio.ClosedResourceError

    async def aclose(self) -> None:
        """Accept no more streams; the session and the accepted streams stay open."""
        self._is_closed = True
        if self._scope is not None:
            self._scope.cancel()
        await anyio.lowlevel.checkpoint()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._attributes


# ---------------------------------------------------------------------------- attributes


def _attributes_of(channel: AnyChannel) -> Mapping[Any, Callable[[], Any]]:
    return {
        **_attributes_of_session(channel.session),
        MuxAttribute.channel_name: lambda: channel.name,
        MuxAttribute.channel_headers: lambda: channel.headers,
    }


def _attributes_of_stream(stream: trio.abc.HalfCloseableStream) -> Mapping[Any, Callable[[], Any]]:
    session = getattr(stream, "session", None)  # streams of yamux have one, those that others made need not
    return _attributes_of_session(session) if isinstance(session, runtime.Session) else {}


def _attributes_of_session(session: AnySession) -> Mapping[Any, Callable[[], Any]]:
    info = session.info
    attributes: dict[Any, Callable[[], Any]] = {MuxAttribute.session_info: lambda: info}
    place = info.peer.partition(" ")[2].partition(" ")[0]  # without the transport, and without remarks
    host, colon, port = place.rpartition(":")
    if colon and port.isdecimal():
        address = (host.strip("[]"), int(port))
        attributes[anyio.abc.SocketAttribute.remote_address] = lambda: address
        attributes[anyio.abc.SocketAttribute.remote_port] = lambda: address[1]
    if info.identity is not None and info.identity.certificate is not None:
        certificate = info.identity.certificate
        attributes[TLSAttribute.peer_certificate_binary] = lambda: certificate
    return attributes
