"""Spans of OpenTelemetry for calls, channels and topics, joined across the wire by W3C trace context in headers.

    from muxkit import spans

    spans.instrument()

- A call has a span of the kind CLIENT at its caller and one of the kind SERVER around its handler. Names and attributes
  are those of OpenTelemetry's conventions for RPC.
- Any other channel has a CLIENT span on the side that opens it, from the opening to the close, and a SERVER span on the
  other side, from the moment the program takes the channel to the close. A handler of channels runs with that span as
  the current one.
- A subscription is a channel named by the conventions for messaging, and `Topic.publish` has a span of the kind
  PRODUCER.

The server's span is a child of the client's. The log records of muxkit about a channel have the fields `trace_id` and
`span_id`, and a trace file of `muxkit.trace` names both for each channel.

Only OpenTelemetry's API is needed. Without an SDK in the program, the spans are no-ops and no context is sent. In a
program that doesn't call `instrument`, each channel and each call pays for one test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final, TypeVar

import trio

from muxkit import _spans
from muxkit._errors import Refused
from muxkit._spans import ChannelSpan, SpannedCall, SpannedChannel, SpannedSession
from muxkit.codecs import InvalidMessage
from muxkit.core import Headers, printable
from muxkit.rpc import Code, Error
from muxkit.rpc.services import PREFIX
from muxkit.runtime import ON_LAG_HEADER, ExtraNeeded

try:
    from opentelemetry import context, propagate
    from opentelemetry.trace import (
        Span,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        format_span_id,
        format_trace_id,
        get_current_span,
        get_tracer,
        use_span,
    )
except ImportError as _missing:
    raise ExtraNeeded("opentelemetry-api", "otel") from _missing

T = TypeVar("T")

SERVER_FAULTS: Final = frozenset(
    {Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS}
)
"""The codes for which the span of a server counts as failed. The other codes say that the caller was wrong."""
FIRST_FAULT: Final = 500
"""The smallest code of an aborted channel that counts as a failure of the server, as in HTTP."""
MAX_NAME: Final = 64  # characters of the name of a channel in the name of its span

_FAULTS_OF_PEER: Final = (Refused, InvalidMessage, trio.BrokenResourceError, trio.EndOfChannel, trio.Cancelled)
"""Errors with which the handler of a channel ends although the server did nothing wrong."""


def instrument(tracer: Tracer | None = None, *, channels: bool = True) -> None:
    """Make spans in this process, on both sides of its sessions. Calling it again replaces the tracer.

    Args:
        tracer: The tracer that makes the spans; by default the one called "muxkit" of the global provider.
        channels: Make spans of all channels and of topics. Their context travels in the headers of each channel that
            this side opens. A peer that doesn't know headers sees them in front of the payload of the opening, so pass
            False if this process opens channels to programs that don't use muxkit. Calls have spans in any case.
    """
    _spans.maker = _Maker(tracer or get_tracer("muxkit"), channels=channels)


def uninstrument() -> None:
    """Make no more spans. Spans that have begun still end. Harmless if there are none."""
    _spans.maker = None


class _Maker:
    """Makes the spans of one tracer; `muxkit._spans.SpanMaker` describes the methods."""

    def __init__(self, tracer: Tracer, *, channels: bool) -> None:
        self._tracer = tracer
        self._channels = channels

    def opening(
        self, session: SpannedSession, name: str, headers: Headers | None
    ) -> tuple[_ChannelSpan | None, Headers | None]:
        if not self._channels or name.startswith(PREFIX):
            return None, headers
        span = self._start(session, name, headers or {}, SpanKind.CLIENT, None)
        carried = dict(headers or {})
        with use_span(span):
            propagate.inject(carried)
        return _ChannelSpan(span, is_client=True), carried or None

    def taken(self, channel: SpannedChannel) -> _ChannelSpan | None:
        name = channel.name
        if not self._channels or name.startswith(PREFIX):
            return None
        headers = channel.headers
        span = self._start(channel.session, name, headers, SpanKind.SERVER, propagate.extract(headers))
        return _ChannelSpan(span, is_client=False)

    def _start(
        self, session: SpannedSession, name: str, headers: Headers, kind: SpanKind, parent: context.Context | None
    ) -> Span:
        """Begin the span of a channel. The headers tell whether it is a subscription."""
        shown = printable(name, MAX_NAME)
        if ON_LAG_HEADER in headers:
            title = f"subscribe {shown}"
            attributes = {**_messaging("subscribe", "receive", shown)}
        else:
            title = f"channel {shown}" if shown else "channel"
            attributes = {"muxkit.channel.name": shown}
        attributes |= _network(session)
        return self._tracer.start_span(title, context=parent, kind=kind, attributes=attributes)

    @asynccontextmanager
    async def around_call(self, call: SpannedCall, /) -> AsyncIterator[None]:
        is_client = call.side == "client"
        service, _, method = call.method.rpartition(".")
        span = self._tracer.start_span(
            f"{service}/{method}",
            context=None if is_client else propagate.extract(call.headers),
            kind=SpanKind.CLIENT if is_client else SpanKind.SERVER,
            attributes={"rpc.system": "muxkit", "rpc.service": service, "rpc.method": method, **_network(call.session)},
        )
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            if is_client:
                propagate.inject(call.headers)
            try:
                yield
            except Error as error:
                _fail(span, error.code.value, is_fault=is_client or error.code in SERVER_FAULTS)
                raise
            except BaseException as error:
                _fail(span, type(error).__name__, is_fault=True)
                raise

    def publishing(self, topic: str) -> AbstractContextManager[object]:
        shown = printable(topic, MAX_NAME)
        return self._tracer.start_as_current_span(
            f"publish {shown}" if shown else "publish",
            kind=SpanKind.PRODUCER,
            attributes=_messaging("publish", "send", shown),
            record_exception=False,
        )

    def ids(self) -> dict[str, str]:
        return _ids_of(get_current_span())

    def in_this_context(self, function: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        captured = context.get_current()

        async def run() -> T:
            token = context.attach(captured)
            try:
                return await function()
            finally:
                context.detach(token)

        return run


class _ChannelSpan:
    """The span of a channel; `muxkit._spans.ChannelSpan` describes the methods."""

    __slots__ = ("_has_ended", "_has_failed", "_is_client", "_open_spans", "_span")

    def __init__(self, span: Span, *, is_client: bool) -> None:
        self._span = span
        self._is_client = is_client
        self._has_failed = False
        self._has_ended = False
        self._open_spans: set[ChannelSpan] | None = None

    def join(self, open_spans: set[ChannelSpan]) -> None:
        self._open_spans = open_spans
        open_spans.add(self)

    def ids(self) -> dict[str, str]:
        return _ids_of(self._span)

    def failed(self, error: BaseException) -> None:
        if self._has_failed or self._has_ended:
            return
        self._has_failed = True
        code: int = getattr(error, "code", 0)  # of a channel that the peer or a handler has aborted
        is_fault = self._is_client or not isinstance(error, _FAULTS_OF_PEER)
        _fail(self._span, str(code) if code else type(error).__name__, is_fault=is_fault)

    def end(self, code: int | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._open_spans is not None:
            self._open_spans.discard(self)
        if code is not None and not self._has_failed:
            is_fault = self._is_client or code >= FIRST_FAULT
            _fail(self._span, str(code) if code else "aborted", is_fault=is_fault)
        self._span.end()

    def as_current(self) -> AbstractContextManager[object]:
        return use_span(self._span, record_exception=False, set_status_on_exception=False)


def _network(session: SpannedSession) -> dict[str, str]:
    return {"network.protocol.name": session.info.protocol, "network.peer.address": session.info.peer}


def _messaging(operation: str, kind: str, topic: str) -> dict[str, str]:
    return {
        "messaging.system": "muxkit",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _ids_of(span: Span) -> dict[str, str]:
    found = span.get_span_context()
    if not found.is_valid:  # there is no SDK
        return {}
    return {"trace_id": format_trace_id(found.trace_id), "span_id": format_span_id(found.span_id)}


def _fail(span: Span, kind: str, *, is_fault: bool) -> None:
    """Note how a call or a channel failed. The text of the error isn't recorded: it may quote what a peer sent."""
    span.set_attribute("error.type", kind)
    if is_fault:
        span.set_status(Status(StatusCode.ERROR))
