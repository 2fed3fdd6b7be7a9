"""The server's side of calls: a handler of channels that calls the methods of services."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from difflib import get_close_matches
from typing import Any, Final

import attrs
import msgspec
import trio

from muxkit import _spans
from muxkit._errors import Refused
from muxkit._handlers import UNKNOWN_CODEC, UNKNOWN_NAME, ChannelHandler, named_channels
from muxkit.codecs import CODEC_HEADER, DEFAULT_CODEC, InvalidMessage, UnknownCodec, decoded
from muxkit.rpc._call import (
    DEADLINE_PASSED,
    END,
    ERROR,
    ITEM,
    TIMEOUT_HEADER,
    Call,
    Interceptor,
    around_call,
    deadline_of,
    set_current,
)
from muxkit.rpc._errors import Code, Error, ErrorRecord, to_declared_record, to_record
from muxkit.rpc._reflection import Reflection
from muxkit.rpc._service import PREFIX, CallCodec, Method, methods_of
from muxkit.rpc._stream import OpenStream, as_stream
from muxkit.runtime import LOSSES, Channel, interruptible, log_failure, may_log, meaning_of

_log = logging.getLogger("muxkit")

BAD_FRAMING: Final = "the stream of the caller has a message that is neither an item nor its end"


def serve(
    *services: object,
    interceptors: Sequence[Interceptor] = (),
    channels: ChannelHandler | Mapping[str, ChannelHandler] | None = None,
) -> ChannelHandler:
    """Make a handler of channels that answers calls of the methods of these services.

        async with muxkit.open_server(rpc.serve(OrdersService()), url): ...

    Each call is a channel of its own. The handler runs in a cancel scope with the deadline of the caller, and is
    cancelled when the caller gives up. A method raises `rpc.Error`, or an exception that it declares, to answer with
    an error. Any other exception is logged with an id, and the caller gets `rpc.Error("internal")` with that id.

    The methods of a service are those of its interface: the base class that derives from `rpc.Service` or
    `typing.Protocol`, or the class of the service itself if it has no such base.

    Args:
        services: Objects with async methods. The calls have the names of their interfaces: `Orders.get`.
        interceptors: They run around each call, the first one outermost.
        channels: The handler of the channels that aren't calls, or the handlers by the names of the channels. Without
            one they are refused.

    Raises:
        TypeError: A method has parameters that can't travel, or two services have the same name.
    """
    return serve_bridged(services, lambda function, method: function, tuple(interceptors), channels)


def serve_bridged(
    services: Sequence[object],
    bridge: Callable[[Callable[..., Any], Method], Callable[..., Any]],
    interceptors: tuple[Interceptor, ...] = (),
    channels: ChannelHandler | Mapping[str, ChannelHandler] | None = None,
) -> ChannelHandler:
    """`serve` for services whose methods belong to another event loop: `bridge` returns the function that Trio calls.

    Raises TypeError as `serve` does.
    """
    methods: dict[str, _Served] = {}
    reflection = Reflection()
    for service in (*services, reflection):
        if isinstance(service, type):
            raise TypeError(f"invalid service: expected an object, got the class {service.__name__!r}; create one")
        for method in methods_of(type(service)).values():
            if method.full_name in methods:
                raise TypeError(f"invalid services: {method.service!r} was given twice")
            limit = method.options.max_concurrent
            limiter = None if limit is None else trio.CapacityLimiter(limit)
            function = getattr(service, method.name)
            if service is not reflection:
                function = bridge(function, method)
            methods[method.full_name] = _Served(method, function, limiter)
    reflection.methods = [each.method for each in methods.values()]
    others = named_channels(channels) if isinstance(channels, Mapping) else channels
    return _Calls(methods, interceptors, others).handle


@attrs.frozen(eq=False)
class _Served:
    """A method with the function that answers its calls."""

    method: Method
    function: Any
    limiter: trio.CapacityLimiter | None


@attrs.frozen(eq=False)
class _Calls:
    """The handler of the channels of one server."""

    methods: dict[str, _Served]
    interceptors: tuple[Interceptor, ...]
    otherwise: ChannelHandler | None

    async def handle(self, channel: Channel) -> None:
        """Answer the call of a channel."""
        name, headers, payload = channel._opened_with()
        if not name.startswith(PREFIX):
            if self.otherwise is None:
                raise Refused("this server takes calls only, and the channel is not a call", code=UNKNOWN_NAME)
            await self.otherwise(channel)
            return
        served = self.methods.get(name[len(PREFIX) :])
        if served is None:
            raise Refused(self._unknown(name[len(PREFIX) :]), code=UNKNOWN_NAME)
        try:
            codec = served.method.codec(headers.get(CODEC_HEADER, DEFAULT_CODEC))
        except UnknownCodec as error:
            raise Refused(str(error), code=UNKNOWN_CODEC) from error
        deadline = math.inf
        if (timeout := headers.get(TIMEOUT_HEADER)) is not None:
            try:
                deadline = deadline_of(timeout)
            except Error as error:
                await channel.send(ERROR + codec.error.encode(to_record(error)))
                return
        call = Call(
            method=served.method.full_name,
            side="server",
            session=channel.session,
            headers=dict(headers),
            deadline=deadline,
            is_streaming=served.method.returns_stream or served.method.stream_parameter is not None,
        )
        record: ErrorRecord | None = None
        with trio.CancelScope(deadline=deadline) as scope:
            channel._cancel_when_stopped(scope)
            record = await self._answer(channel, served, codec, payload, call)
        if scope.cancelled_caught:
            if trio.current_time() >= deadline:
                channel.abort("the deadline of the caller has passed", code=DEADLINE_PASSED)
            else:
                channel.abort()
        elif record is not None:
            await channel.send(ERROR + codec.error.encode(record))

    async def _answer(
        self, channel: Channel, served: _Served, codec: CallCodec, payload: bytes, call: Call
    ) -> ErrorRecord | None:
        """Run the interceptors and the handler; return the error to answer with, None once everything was sent."""
        method = served.method
        set_current(call)
        around = around_call(self.interceptors)
        ids: dict[str, str] = {}  # of the span, which ends before the error of a handler is logged
        try:
            if not around and served.limiter is None and method.options.timeout is None:
                await self._run(channel, served, codec, payload, is_last=True)
                return None
            with trio.CancelScope() as scope:
                if method.options.timeout is not None:
                    scope.relative_deadline = method.options.timeout
                async with AsyncExitStack() as stack:
                    for interceptor in around:
                        await stack.enter_async_context(interceptor(call))
                    if ids := _spans.current_ids():
                        channel._observe_span(ids)
                    if served.limiter is not None:
                        await stack.enter_async_context(served.limiter)
                    await self._run(channel, served, codec, payload, is_last=False)
            if scope.cancelled_caught:
                took = f"the handler took longer than {method.options.timeout:g} s"
                return ErrorRecord(Code.DEADLINE_EXCEEDED.value, took)
            return None
        except BaseException as raised:
            # The error isn't a variable here: it and this frame would hold each other, and all that the handler held.
            record = self._record_of(meaning_of(raised), channel, method, ids)
            if record is None:
                raise
            return record

    def _record_of(
        self, error: BaseException, channel: Channel, method: Method, ids: dict[str, str]
    ) -> ErrorRecord | None:
        """Return the record with which an error of a handler is answered, None if there is nobody to answer."""
        if not isinstance(error, Exception) or isinstance(error, LOSSES):
            return None
        if isinstance(error, Error):
            return to_record(error)
        if isinstance(error, method.options.raises):
            return to_declared_record(error)
        if isinstance(error, Refused):
            return ErrorRecord(Code.PERMISSION_DENIED.value, error.reason)
        return self._internal(error, channel, method, ids)

    def _internal(self, error: Exception, channel: Channel, method: Method, ids: dict[str, str]) -> ErrorRecord:
        id = secrets.token_hex(4)
        fields = {"peer": channel.session.info.peer, "channel": channel.name, "error_id": id, **ids}
        if may_log("calls whose handler failed"):
            # log: The handler of a call raised an exception that its method doesn't declare. The caller got the code
            # `internal` with this id. The next line says where it happened.
            _log.error("call of %s failed as error %s", method.full_name, id, extra=fields)
        # log: Your handler raised an exception that its method doesn't declare, and the line says where. The caller got
        # the code `internal`, and other calls continue.
        log_failure("the handler of a call failed", error, fields)
        message = f"the handler of {method.full_name} failed; the log of the server has it as error {id}"
        return ErrorRecord(Code.INTERNAL.value, message, {"id": id})

    @interruptible
    async def _run(self, channel: Channel, served: _Served, codec: CallCodec, payload: bytes, *, is_last: bool) -> None:
        """Call the method of the service with the arguments in the opening, and send its result or its items.

        With `is_last`, nothing that may fail or wait follows. The channel is then closed together with its result,
        which saves a write here and a wake-up of the caller.
        """
        method = served.method
        try:
            arguments = decoded(codec.arguments, payload)
        except InvalidMessage as error:
            where = f" at {error.path}" if error.path else ""
            raise Error(Code.INVALID_ARGUMENT, f"invalid arguments{where}: {error.problem}") from None
        given = msgspec.structs.asdict(arguments)  # its fields only, not what they hold
        if method.stream_parameter is not None:
            given[method.stream_parameter] = OpenStream(_Received(channel, codec))
        if not method.returns_stream:
            message = ITEM + codec.result.encode(await served.function(**given))
            if not is_last or not channel._try_send_last(message):
                await channel.send(message)
            return
        encode = codec.result.encode
        async with as_stream(served.function(**given)) as items:
            async for item in items:
                await channel.send(ITEM + encode(item))
        await channel.send(END)

    def _unknown(self, name: str) -> str:
        close = get_close_matches(name, self.methods, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"no method is named {name[:64]!r} here{hint}"


@attrs.define(eq=False)
class _Received(AsyncIterator[Any]):
    """The items that the caller sends."""

    channel: Channel
    codec: CallCodec
    is_over: bool = False

    async def __anext__(self) -> Any:  # noqa: ANN401 - of any method
        if self.is_over:
            raise StopAsyncIteration
        message = await self.channel.receive()
        if message[:1] == ITEM:
            try:
                return decoded(self.codec.item, message[1:])
            except InvalidMessage as error:
                raise Error(Code.INVALID_ARGUMENT, f"invalid item of the stream: {error}") from None
        self.is_over = True
        if message[:1] == END:
            raise StopAsyncIteration
        raise Error(Code.INVALID_ARGUMENT, BAD_FRAMING)
