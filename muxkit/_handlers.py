"""Makes handlers of sessions from functions that handle a single channel or request.

`each_channel`, `by_name` and `each_request` return such handlers, and `handler` makes a handler of typed channels. The
module also decides which errors of handlers are failures, which are logged, and which are usual, such as a lost
connection.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextvars import copy_context
from difflib import get_close_matches
from typing import Generic, TypeAlias, TypeVar, cast

import attrs
import trio

from muxkit import _spans
from muxkit._errors import Refused
from muxkit._signatures import check_handler, kind_of
from muxkit.codecs import CODEC_HEADER, DEFAULT_CODEC, Codec, InvalidMessage, Json, UnknownCodec, codec_for
from muxkit.core import printable
from muxkit.runtime import (
    LOSSES,
    Backlog,
    Channel,
    IncomingRequest,
    LinkLost,
    Session,
    SlotQueue,
    Taker,
    TypedChannel,
    background,
    bare_nursery,
    interruptible,
    log_failure,
    may_log,
    meaning_of,
    protect_package,
    run_handler,
)

SessionHandler: TypeAlias = "Callable[[Session], Awaitable[object]]"
ChannelHandler: TypeAlias = "Callable[[Channel], Awaitable[object]]"
RequestHandler: TypeAlias = "Callable[[IncomingRequest], Awaitable[object]]"

ItemT = TypeVar("ItemT", bound=Hashable)

ValueT = TypeVar("ValueT")

HANDLER_FAILED = 500  # the code of a channel whose handler raised
UNKNOWN_CODEC = 415  # the code of a channel with a codec that this side doesn't have
UNKNOWN_NAME = 404  # the code of a channel that was refused because no handler has its name

_log = logging.getLogger("muxkit")


def each_channel(
    handler: ChannelHandler, *, requests: RequestHandler | None = None, max_concurrent: int | None = None
) -> SessionHandler:
    """Make a session handler that calls `handler` with each channel that the peer opens, concurrently.

    A channel is closed when its handler returns. If the handler raises `Refused`, the channel is aborted with that
    reason. Any other error aborts this channel and is logged, unless the peer ended the channel or the connection was
    lost.

    Args:
        handler: An async function that takes the channel.
        requests: An async function that takes each request of the peer, as `each_request` does. Without one a server
            declines all requests. Only bpmux has requests.
        max_concurrent: How many handlers of each kind may run at the same time in one session, by default
            `Limits.channels`. A handler that keeps working after its channel has ended still counts, because otherwise
            a peer could start any number of them.

    Raises:
        TypeError: A handler isn't an async function with one parameter, or it takes a session.
    """
    return _Handlers(_channel_handler(handler), _request_handler(requests), max_concurrent)


def by_name(
    handlers: Mapping[str, ChannelHandler], *, requests: RequestHandler | None = None, max_concurrent: int | None = None
) -> SessionHandler:
    """Make a session handler that calls the handler with the name for which the peer opened a channel.

    A channel with any other name is aborted with a reason that lists the names. The other arguments and the errors are
    those of `each_channel`.
    """
    return _Handlers(named_channels(handlers), _request_handler(requests), max_concurrent)


def named_channels(handlers: Mapping[str, ChannelHandler]) -> ChannelHandler:
    """Return a handler of channels that calls the one with the name of the channel."""
    known = {name: _channel_handler(handler) for name, handler in handlers.items()}

    async def handle_channel(channel: Channel) -> None:
        handler = known.get(channel.name)
        if handler is None:
            channel.abort(_unknown(channel.name, [*known]), code=UNKNOWN_NAME)
        else:
            await handler(channel)

    return handle_channel


def each_request(handler: RequestHandler, *, max_concurrent: int | None = None) -> SessionHandler:
    """Make a session handler that calls `handler` with each request of the peer, concurrently.

    The call is cancelled when the peer needs no response any more, because it gave up or has the response. A request
    that is left without a response is declined. If the handler raises `Refused`, the request is declined with that
    reason. Any other error declines the request and is logged, unless the peer gave up or the connection was lost.

    A server with this handler declines all channels. To serve both, give the handler as `requests=` to `each_channel`
    or `by_name`. Only bpmux has requests, and a server of another protocol raises `Unsupported` when it starts.

    Args:
        handler: An async function that takes the request and calls its `respond`.
        max_concurrent: How many handlers may run at the same time in one session, by default `Limits.channels`.

    Raises:
        TypeError: The handler isn't an async function with one parameter.
    """
    return _Handlers(None, _request_handler(handler), max_concurrent)


def handler(
    values: type[ValueT] | Codec[ValueT],
) -> Callable[[Callable[[TypedChannel[ValueT]], Awaitable[object]]], ChannelHandler]:
    """Make a handler of channels from an async function that takes a `TypedChannel`.

        @muxkit.handler(Price)
        async def prices(channel: muxkit.TypedChannel[Price]) -> None: ...

    The peer chooses the codec: its name is in the headers of the channel. A peer that names none speaks JSON. A channel
    with a codec that isn't available here is refused with the code 415 and the names of those that are.

    Args:
        values: The type of the values, or a codec such as `Protobuf(Price)`. With a codec, a channel that has another
            one is refused.

    Raises:
        TypeError: The function isn't an async function with one parameter, or no codec can handle the type.
    """
    codecs = codecs_of(values)

    def decorate(function: Callable[[TypedChannel[ValueT]], Awaitable[object]]) -> ChannelHandler:
        check_handler(function)

        async def handle_channel(channel: Channel) -> None:
            await function(TypedChannel(channel, codecs.named(channel.headers.get(CODEC_HEADER))))

        return handle_channel

    return decorate


def codecs_of(values: type[ValueT] | Codec[ValueT]) -> Codecs[ValueT]:
    """Return the codecs of a handler for a type, or for a codec. Raises TypeError if no codec can handle the type."""
    given: object = values
    if not isinstance(given, type) and hasattr(given, "decode") and hasattr(given, "encode"):
        codec = cast("Codec[ValueT]", values)  # the check above tells both apart
        return Codecs(None, {codec.name: codec})
    of_values = cast("type[ValueT]", values)
    return Codecs(of_values, {DEFAULT_CODEC: Json(of_values)})


@attrs.frozen(eq=False)
class Codecs(Generic[ValueT]):
    """The codecs of a typed handler, by name. They are created when a peer uses them for the first time."""

    values: type[ValueT] | None
    known: dict[str, Codec[ValueT]]

    def named(self, name: str | None) -> Codec[ValueT]:
        """Return the codec with this name, or the default one for None. Raises `Refused` if there is none."""
        if name is None:
            return next(iter(self.known.values()))
        found = self.known.get(name)
        if found is not None:
            return found
        if self.values is None:
            expected = next(iter(self.known))
            raise Refused(f"unknown codec {printable(name, 64)!r}: expected {expected!r}", code=UNKNOWN_CODEC)
        try:
            made = self.known[name] = codec_for(name, self.values)
        except UnknownCodec as error:
            raise Refused(str(error), code=UNKNOWN_CODEC) from error
        return made


class Running(Taker[ItemT]):
    """The handlers of one kind that are running in one session.

    A handler starts as soon as its channel arrives. Only if all handlers that may run are running, or if the peer keeps
    cancelling channels, a channel waits in the backlog for the task that iterates over it.

    Args:
        nursery: The handlers run in it.
        handle: The function that runs in the handler's task. It must call `ended`.
        bound: How many handlers may run at the same time.
    """

    def __init__(
        self, nursery: trio.Nursery, handle: Callable[[ItemT, Running[ItemT]], Awaitable[None]], bound: int
    ) -> None:
        self._nursery = nursery
        self._handle = handle
        self._bound = bound
        self._items: set[ItemT] = set()
        self._slots = SlotQueue(self._free)
        # The handlers and their spans inherit the context variables of the task that iterates, and not those of the
        # reader task.
        self._context = copy_context()

    def _free(self) -> int:
        return self._bound - len(self._items)

    async def wait_for_slot(self) -> None:
        """Wait until another handler may start."""
        await self._slots.wait_for_slot()

    def start(self, item: ItemT) -> None:
        """Start a handler."""
        self._items.add(item)
        self._nursery.start_soon(self._handle, item, self)

    def ended(self, item: ItemT) -> None:
        """Forget a handler that has ended."""
        self._items.discard(item)
        self._slots.wake_waiters()

    def may_take(self) -> bool:
        # Leave one slot to the iterating task, which has waited for it.
        return self._bound - len(self._items) >= 2

    def take(self, item: ItemT, taken: Callable[[ItemT], None]) -> None:
        self._context.run(self._take, item, taken)

    def _take(self, item: ItemT, taken: Callable[[ItemT], None]) -> None:
        taken(item)
        self.start(item)


@attrs.frozen(eq=False)
class _Handlers:
    """A session handler that calls one function with each channel, another one with each request, or both.

    When a session handler of the program calls it, other tasks of that handler may take what this one doesn't.
    `serve_alone` is for a server that has no other handler: it declines immediately whatever this one doesn't take.
    """

    channels: ChannelHandler | None
    requests: RequestHandler | None
    max_concurrent: int | None

    async def __call__(self, session: Session) -> None:
        if self.requests is None:
            await self._handle_channels(session)
        elif self.channels is None:
            await self._handle_requests(session)
        else:
            async with bare_nursery() as nursery:
                nursery.start_soon(self._handle_channels, session)
                nursery.start_soon(self._handle_requests, session)

    async def serve_alone(self, session: Session) -> None:
        kinds = {"channels": self.channels, "requests": self.requests}
        session._takes_only([kind for kind, handler in kinds.items() if handler is not None])
        await self(session)

    async def _handle_channels(self, session: Session) -> None:
        await self._handle_each(session, session.incoming(), self._handle_channel)

    async def _handle_requests(self, session: Session) -> None:
        await self._handle_each(session, session.requests(), self._handle_request)

    async def _handle_each(
        self, session: Session, items: AsyncIterator[ItemT], handle: Callable[[ItemT, Running[ItemT]], Awaitable[None]]
    ) -> None:
        async with bare_nursery() as nursery:
            running = Running(nursery, handle, self.max_concurrent or session.limits.channels)
            backlog: Backlog[ItemT] | None = items if isinstance(items, Backlog) else None
            try:
                if backlog is not None:
                    backlog.taker = running
                async for item in items:
                    running.start(item)
                    await running.wait_for_slot()  # an accepted channel mustn't wait, so wait before the next one
            except LinkLost as error:
                # log: The connection of a session was lost while its handler was running. This is usual when peers
                # leave.
                _log.debug("session lost: %s", error)
            finally:
                if backlog is not None:
                    backlog.taker = None

    @interruptible
    async def _handle_channel(self, channel: Channel, running: Running[Channel]) -> None:
        if channel._span is None:
            await self._run_channel(channel, running)
        else:
            with channel._span.as_current():
                await self._run_channel(channel, running)

    @interruptible
    async def _run_channel(self, channel: Channel, running: Running[Channel]) -> None:
        assert self.channels is not None  # otherwise, no channel would be accepted
        try:
            await self.channels(channel)
        except BaseException as raised:
            error = meaning_of(raised)
            if channel._span is not None:
                channel._span.failed(error)
            if not isinstance(error, Exception):
                channel.abort()
                raise
            if isinstance(error, Refused):
                channel.abort(error.reason, code=error.code)
                if may_log("channels that were refused"):
                    # log: A channel handler raised `Refused`. The peer receives the reason.
                    _log.info("a channel was refused: %s", printable(str(error)), extra=_fields(channel))
            elif isinstance(error, InvalidMessage):
                channel.abort()  # `receive` has aborted it before, with the problem as the reason
                if may_log("channels with an invalid message"):
                    where = printable(error.path) or "the whole message"  # its text may quote the message
                    # log: A typed handler received a message that doesn't fit its type. The line names the place in the
                    # message, and the peer receives the whole problem.
                    _log.info("aborted a channel for an invalid message (%s)", where, extra=_fields(channel))
            elif isinstance(error, LOSSES):
                channel.abort()
                # log: The handler raised an error because its channel had ended. This isn't a failure.
                _log.debug("the peer ended a channel before its handler was done: %s", error, extra=_fields(channel))
            else:
                channel.abort("the handler of this channel failed", code=HANDLER_FAILED)
                # log: Your handler raised an error, and the line says where. The session and its other channels
                # continue.
                log_failure("the handler of a channel failed, the channel was aborted", error, _fields(channel))
            del error  # its traceback and this frame would form a reference cycle with everything in the handler
        else:
            channel.close()
        finally:
            running.ended(channel)

    async def _handle_request(self, request: IncomingRequest, running: Running[IncomingRequest]) -> None:
        assert self.requests is not None  # or there would be no request

        async def stop_when_unwanted() -> None:
            await request.cancelled()
            nursery.cancel_scope.cancel()

        try:
            async with request, background() as nursery:
                nursery.start_soon(stop_when_unwanted)
                try:
                    await run_handler(self.requests, request)
                except Refused as error:
                    request.abort(error.reason, code=error.code)
                except LOSSES:
                    raise
                except Exception:
                    request.abort("the handler of this request failed", code=HANDLER_FAILED)
                    raise
        except Exception as error:
            if not is_loss(error, of_channel=True):
                fields = {"peer": request.session.info.peer}
                # log: Your request handler raised an error, and the line says where.
                log_failure("the handler of a request failed, the request was declined", error, fields)
        finally:
            running.ended(request)


def session_handler(handler: SessionHandler | ChannelHandler) -> SessionHandler:
    """Return a handler of sessions for a handler of channels, or the handler itself if it takes sessions.

    Raises:
        TypeError: If `muxkit._signatures` doesn't accept it as a handler.
    """
    if isinstance(handler, _Handlers):
        return handler.serve_alone
    if kind_of(handler, channel=trio.abc.Channel, session=Session) == "session":
        return cast("SessionHandler", handler)
    return _Handlers(cast("ChannelHandler", handler), None, None).serve_alone


def takes_requests(handler: SessionHandler | ChannelHandler) -> bool:
    """Return True for a handler that needs a protocol with requests."""
    return isinstance(handler, _Handlers) and handler.requests is not None


def _channel_handler(handler: ChannelHandler) -> ChannelHandler:
    """Return a handler of channels, or raise TypeError if it can't be one."""
    if isinstance(handler, _Handlers):
        raise TypeError("invalid handler: expected one for channels, got one for sessions; don't wrap it a second time")
    parameter = check_handler(handler)
    if parameter is not None and parameter.annotation is not parameter.empty:
        try:
            takes_session = kind_of(handler, channel=trio.abc.Channel, session=Session) == "session"
        except TypeError:  # an annotation of the program's own, which is its business: the call says what it takes
            takes_session = False
        if takes_session:
            raise TypeError("invalid handler: expected one for channels, got one for sessions; pass it to the server")
    return handler


def _request_handler(handler: RequestHandler | None) -> RequestHandler | None:
    if handler is not None:
        check_handler(handler)
    return handler


def is_loss(error: BaseException, *, of_channel: bool = False) -> bool:
    """Return True if an error means that the connection was lost, or that a channel ended, if that counts as well."""
    return isinstance(meaning_of(error), LOSSES if of_channel else LinkLost)


def _fields(channel: Channel) -> dict[str, object]:
    return {"peer": channel.session.info.peer, "channel": channel.name, **_spans.current_ids()}


def _unknown(name: str, known: list[str]) -> str:
    said, listed = f"no channel is named {name[:64]!r} here", ", ".join(sorted(known))
    close = get_close_matches(name, known, 1)
    if close:
        return f"{said}; did you mean {close[0]!r}? There are: {listed}"
    return f"{said}; there are: {listed}" if known else f"{said}; there are none"


protect_package(__name__)
