"""`connect`, `open_server` and `reconnecting` of one protocol, which return the protocol's own sessions and channels.

A protocol defines these functions with its own options and types, and each of them calls one of the helpers here. The
helpers add the protocol to URLs that leave it out, such as `tcp://127.0.0.1:7000`, and call muxkit's own function. Its
result is a session of the protocol, because the protocol's plugin made it, so the helpers return it with that type.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias, TypeVar, cast

from muxkit._door import connect
from muxkit._handlers import SessionHandler
from muxkit._options import ConnectOptions, ReconnectOptions, ServeOptions
from muxkit._reconnecting import reconnecting
from muxkit._server import Server, open_server
from muxkit.runtime import Channel, Session

SessionT = TypeVar("SessionT", bound=Session)
ChannelT = TypeVar("ChannelT", bound=Channel)
Handler: TypeAlias = "Callable[[SessionT], Awaitable[object]] | Callable[[ChannelT], Awaitable[object]]"


def connect_typed(
    protocol: str, session: type[SessionT], url: str | Sequence[str], options: ConnectOptions
) -> AbstractAsyncContextManager[SessionT]:
    """Call `muxkit.connect` for one protocol, whose sessions have this type."""
    return cast("AbstractAsyncContextManager[SessionT]", connect(urls_of(protocol, url), **options))


def open_server_typed(
    protocol: str, handler: Handler[SessionT, ChannelT], url: str | Sequence[str], options: ServeOptions
) -> AbstractAsyncContextManager[Server]:
    """Call `muxkit.open_server` for one protocol. The handler takes its sessions or its channels."""
    return open_server(cast("SessionHandler", handler), urls_of(protocol, url), **options)


def reconnecting_typed(
    protocol: str, session: type[SessionT], url: str | Sequence[str], options: ReconnectOptions
) -> AbstractAsyncContextManager[AsyncIterator[SessionT]]:
    """Call `muxkit.reconnecting` for one protocol, whose sessions have this type."""
    made = reconnecting(urls_of(protocol, url), **options)
    return cast("AbstractAsyncContextManager[AsyncIterator[SessionT]]", made)


def urls_of(protocol: str, url: str | Sequence[str]) -> str | Sequence[str]:
    """Return the URL or the URLs with their protocol; raises ValueError if one names another protocol."""
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
