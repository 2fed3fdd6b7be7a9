"""yamux sessions: `session` runs a session on a stream, and `Session` opens and accepts streams and channels.

The module also has the protocol plugin for `muxkit.connect` and `muxkit.serve`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Unpack

import trio

from muxkit import _options
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._server import Server
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.protocols.yamux._channels import Channel, YamuxStream
from muxkit.protocols.yamux._connection import Connection, Role
from muxkit.protocols.yamux.config import Config
from muxkit.runtime import Opening, protect_package, protected_manager
from muxkit.runtime.mux_session import LINGER, MuxSession, running
from muxkit.trace import traced


@protected_manager
async def session(
    stream: trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """Run a yamux session on a connected byte stream. From now on the session owns the stream.

    One side has to be the client and the other side the server, because the role decides which stream ids a side uses.

    Leaving the block normally finishes all streams, waits until the peer has processed the ends, sends a go-away and
    closes the connection, all within `linger` seconds.

    Raises:
        LinkLost: The block was left, and the peer may not have received all data.
    """

    def make() -> Session:
        observed = traced(observer, "yamux session")
        return Session(Connection(stream, role, config or Config(), limits or Limits(), observed))

    async with running(make, linger) as mux:
        yield mux


class Session(MuxSession[Connection, Channel]):
    """A yamux session. Created by `session`."""

    def open_stream(self) -> Opening[YamuxStream]:
        """Open a stream of bytes: `async with session.open_stream() as stream`, or `await session.open_stream()`.

        Programs with other yamux implementations expect such streams. Leaving the block normally closes the stream.
        Leaving the block with an exception resets the stream.
        """
        return Opening(self._connection.open_stream)

    def streams(self) -> AsyncIterator[YamuxStream]:
        """Iterate over the streams of bytes that the peer opens, until the peer ends the session in an orderly way.

        A stream that begins with the opening record of a muxkit channel is a channel. `incoming` returns it instead.
        """
        claimed = self._connection.streams.claim()
        self._connection.engine.take_streams()
        self._connection.dispatch_events()
        return claimed


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `yamux`."""

    options: frozenset[str] = frozenset({"config"})

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Role,
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        return session(stream, role=role, config=config, limits=limits, observer=observer, linger=linger)


protocol: _Protocol = _Protocol()


class ConnectOptions(_options.ConnectOptions, total=False):
    """Options of a client, for `yamux.connect`."""

    config: Config | None
    """The settings of yamux."""


class ReconnectOptions(_options.ReconnectOptions, total=False):
    """Options of a client that connects again and again, for `yamux.reconnecting`."""

    config: Config | None
    """The settings of yamux."""


class ServeOptions(_options.ServeOptions, total=False):
    """Options of a server, for `yamux.open_server`."""

    config: Config | None
    """The settings of yamux."""


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Session]:
    """Open a session of yamux with the server at `url`, as `muxkit.connect` does.

    Args:
        url: A URL such as `yamux+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ConnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return connect_typed("yamux", Session, url, options)


def open_server(
    handler: Handler[Session, Channel], url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[Server]:
    """Serve yamux at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Args:
        handler: An async function that takes the sessions or the channels of yamux.
        url: A URL such as `yamux+tcp://127.0.0.1:0` or `tcp://127.0.0.1:0`, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return open_server_typed("yamux", handler, url, options)


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session of yamux after another with the server at `url`, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `yamux+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("yamux", Session, url, options)


protect_package("muxkit.protocols.yamux")
