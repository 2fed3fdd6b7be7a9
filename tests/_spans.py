"""Spans of OpenTelemetry in tests: what the spans of a block were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, Tracer

import muxkit.spans


class Spans:
    """The spans that have ended, and a tracer for spans of the program."""

    def __init__(self, exporter: InMemorySpanExporter, tracer: Tracer) -> None:
        self._exporter = exporter
        self.tracer = tracer

    def all(self) -> list[ReadableSpan]:
        return [*self._exporter.get_finished_spans()]

    def of(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.all() if span.kind is kind]


@contextmanager
def recorded_spans(*, channels: bool = True) -> Iterator[Spans]:
    """Record the spans of muxkit in a block."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    muxkit.spans.instrument(tracer, channels=channels)
    try:
        yield Spans(exporter, tracer)
    finally:
        muxkit.spans.uninstrument()
        provider.shutdown()


def context_of(span: ReadableSpan) -> SpanContext:
    found: object = span.context
    assert isinstance(found, SpanContext)
    return found


def attributes_of(span: ReadableSpan) -> Mapping[str, object]:
    return span.attributes or {}


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Return True if a span is a child of another one, in the same trace."""
    ours, theirs = context_of(span), context_of(parent)
    return span.parent is not None and (span.parent.span_id, ours.trace_id) == (theirs.span_id, theirs.trace_id)
