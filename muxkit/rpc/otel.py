"""Spans of OpenTelemetry around calls, joined across the wire by W3C trace context in the headers.

    from muxkit.rpc import otel

    otel.instrument()

Each call gets a span of the kind CLIENT at its caller and one of the kind SERVER around its handler, which is its
child. Names and attributes are those of OpenTelemetry's conventions for RPC. Only the API is needed; without an SDK in
the program, the spans are no-ops. A program that doesn't call `instrument` pays for the test of an empty list.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from muxkit.rpc._call import Call
from muxkit.rpc._errors import Code, Error
from muxkit.rpc._spans import add_everywhere, remove_everywhere
from muxkit.runtime import ExtraNeeded

try:
    from opentelemetry import propagate
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_tracer, use_span
except ImportError as _missing:
    raise ExtraNeeded("opentelemetry-api", "otel") from _missing

SERVER_FAULTS = frozenset(
    {Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS}
)
"""The codes for which the span of a server counts as failed; the other codes say that the caller was wrong."""


def instrument(tracer: Tracer | None = None) -> None:
    """Make spans around all calls of this process, on both sides.

    Calling it again replaces the tracer.

    Args:
        tracer: The tracer that makes the spans; by default the one called "muxkit" of the global provider.
    """
    uninstrument()
    spans = _Spans(tracer or get_tracer("muxkit"))
    _installed.append(spans)
    add_everywhere(spans.around)


def uninstrument() -> None:
    """Make no more spans. Harmless if there are none."""
    while _installed:
        remove_everywhere(_installed.pop().around)


class _Spans:
    """Makes the spans of one tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.around = asynccontextmanager(self._around)  # one object, so that it can be taken back

    async def _around(self, call: Call) -> AsyncIterator[None]:
        is_client = call.side == "client"
        service, _, method = call.method.rpartition(".")
        span = self._tracer.start_span(
            f"{service}/{method}",
            context=None if is_client else propagate.extract(call.headers),
            kind=SpanKind.CLIENT if is_client else SpanKind.SERVER,
            attributes={
                "rpc.system": "muxkit",
                "rpc.service": service,
                "rpc.method": method,
                "network.protocol.name": call.session.info.protocol,
                "network.peer.address": call.session.info.peer,
            },
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


_installed: list[_Spans] = []


def _fail(span: Span, kind: str, *, is_fault: bool) -> None:
    """Note how a call failed. The text of the error isn't recorded, because it may quote what a peer sent."""
    span.set_attribute("error.type", kind)
    if is_fault:
        span.set_status(Status(StatusCode.ERROR))
