"""The switch for spans of OpenTelemetry, which `muxkit.spans.instrument` turns on for the whole process.

Sessions, handlers, calls and topics ask `maker` for a span. While spans are off, `maker` is None, so each of these
places costs a single test. Nothing here knows OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Literal, Protocol, TypeVar

from muxkit._info import SessionInfo

T = TypeVar("T")


class SpannedSession(Protocol):
    """The part of a session that a span needs."""

    @property
    def info(self) -> SessionInfo: ...


class SpannedChannel(Protocol):
    """The part of a channel that a span needs."""

    @property
    def session(self) -> SpannedSession: ...
    @property
    def name(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class SpannedCall(Protocol):
    """The part of a call that a span needs."""

    @property
    def session(self) -> SpannedSession: ...
    @property
    def method(self) -> str: ...
    @property
    def side(self) -> Literal["client", "server"]: ...
    @property
    def headers(self) -> MutableMapping[str, str]: ...


class ChannelSpan(Protocol):
    """The span of one channel on this side. It ends with the channel."""

    def ids(self) -> dict[str, str]:
        """Return `trace_id` and `span_id` as hexadecimal texts."""
        ...

    def join(self, open_spans: set[ChannelSpan]) -> None:
        """Add this span to the open spans of its connection. It leaves them when it ends."""
        ...

    def failed(self, error: BaseException) -> None:
        """Note the error that ends the channel, unless an error was noted before."""
        ...

    def end(self, code: int | None = None) -> None:
        """End the span. `code` is given if this side aborts the channel. Later calls do nothing."""
        ...

    def as_current(self) -> AbstractContextManager[object]:
        """Make this the current span in a block, so that spans and log records in it belong to it."""
        ...


class SpanMaker(Protocol):
    """Makes the spans of this process."""

    def opening(
        self, session: SpannedSession, name: str, headers: Mapping[str, str] | None
    ) -> tuple[ChannelSpan | None, Mapping[str, str] | None]:
        """Begin the span of a channel that this side opens. Return it, and the headers with its context.

        There is no span for the channel of a call, because the call has one.
        """
        ...

    def taken(self, channel: SpannedChannel) -> ChannelSpan | None:
        """Begin the span of a channel that the peer has opened."""
        ...

    def around_call(self, call: SpannedCall, /) -> AbstractAsyncContextManager[None]:
        """Run a call in a span, as an interceptor does."""
        ...

    def publishing(self, topic: str) -> AbstractContextManager[object]:
        """Publish an update of a topic in a span."""
        ...

    def ids(self) -> dict[str, str]:
        """Return `trace_id` and `span_id` of the current span; an empty mapping if there is none."""
        ...

    def in_this_context(self, function: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return a function that does the same with the current span of now, in whatever task it is called."""
        ...


maker: SpanMaker | None = None


def current_ids() -> dict[str, str]:
    """Return the ids of the current span, for a log record; an empty mapping if there is none."""
    return {} if maker is None else maker.ids()
