"""The face of one protocol: `connect`, `open_server` and `reconnecting` that give its own sessions and channels.

A protocol makes them once, for example `connect: Connect[Session] = Connect("bpmux")`, and type checkers know what
`async with bpmux.connect(url) as session` has. Their URLs may leave the protocol out: `tcp://127.0.0.1:7000`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeAlias, TypeVar, cast

import attrs

from muxkit._authorize import Authorize
from muxkit._door import LINGER_SECONDS, connect
from muxkit._handlers import SessionHandler
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._reconnecting import reconnecting
from muxkit._server import Server, open_server
from muxkit._tls import TLS
from muxkit.runtime import Backoff, Channel, OnFailed, Session

SessionT = TypeVar("SessionT", bound=Session)
ChannelT = TypeVar("ChannelT", bound=Channel)
Handler: TypeAlias = "Callable[[SessionT], Awaitable[object]] | Callable[[ChannelT], Awaitable[object]]"


@attrs.frozen
class Connect(Generic[SessionT]):
    """`muxkit.connect` for the sessions of one protocol."""

    protocol: str

    def __call__(
        self,
        url: str | Sequence[str],
        *,
        tls: TLS | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
        linger: float = LINGER_SECONDS,
        **options: Any,
    ) -> AbstractAsyncContextManager[SessionT]:
        """Open a session with the server at `url`, or at the first of several that answers, as `connect` does."""
        url = client_urls(self.protocol, url)
        session = connect(url, tls=tls, token=token, limits=limits, observer=observer, linger=linger, **options)
        return cast("AbstractAsyncContextManager[SessionT]", session)  # what the protocol's plugin gives


@attrs.frozen
class OpenServer(Generic[SessionT, ChannelT]):
    """`muxkit.open_server` for handlers of the sessions or of the channels of one protocol."""

    protocol: str

    def __call__(
        self,
        handler: Handler[SessionT, ChannelT],
        url: str | Sequence[str],
        *,
        tls: TLS | None = None,
        authorize: Authorize | None = None,
        listeners: Sequence[socket.socket] = (),
        limits: Limits | None = None,
        observer: Observer | None = None,
        linger: float = LINGER_SECONDS,
        **options: Any,
    ) -> AbstractAsyncContextManager[Server]:
        """Serve at `url`, or at several, while the block runs, as `muxkit.open_server` does."""
        urls = [url] if isinstance(url, str) else url
        return open_server(
            cast("SessionHandler", handler),  # what its URLs can give is of this protocol
            [url_of(self.protocol, each) for each in urls],
            tls=tls,
            authorize=authorize,
            listeners=listeners,
            limits=limits,
            observer=observer,
            linger=linger,
            **options,
        )


@attrs.frozen
class Reconnecting(Generic[SessionT]):
    """`muxkit.reconnecting` for the sessions of one protocol."""

    protocol: str

    def __call__(
        self,
        url: str | Sequence[str],
        *,
        backoff: Backoff | None = None,
        patience: float | None = None,
        on_failed: OnFailed | None = None,
        redirects: Collection[str] = (),
        tls: TLS | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
        linger: float = LINGER_SECONDS,
        **options: Any,
    ) -> AsyncIterator[SessionT]:
        """Iterate over sessions with the server at `url`, one after the other, as `muxkit.reconnecting` does."""
        sessions = reconnecting(
            client_urls(self.protocol, url),
            backoff=backoff,
            patience=patience,
            on_failed=on_failed,
            redirects=redirects,
            tls=tls,
            token=token,
            limits=limits,
            observer=observer,
            linger=linger,
            **options,
        )
        return cast("AsyncIterator[SessionT]", sessions)


def client_urls(protocol: str, url: str | Sequence[str]) -> str | Sequence[str]:
    """`url_of` for the URL or the list of URLs of a client."""
    return url_of(protocol, url) if isinstance(url, str) else [url_of(protocol, each) for each in url]


def url_of(protocol: str, url: str) -> str:
    """Return the URL with its protocol; raises ValueError if it names another one."""
    scheme = url.partition("://")[0]
    named, plus, _ = scheme.partition("+")
    if not plus:
        return f"{protocol}+{url}"
    if named != protocol:
        raise ValueError(f"{url!r} names {named}; {protocol} has URLs such as {protocol}+tcp://127.0.0.1:7000")
    return url
