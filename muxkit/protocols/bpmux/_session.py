"""bpmux sessions, and the plugin through which `muxkit.connect` and `muxkit.serve` find the protocol.

A session has four kinds of conversations, which all share one connection:

- duplexes: two-way channels, which every protocol of muxkit has
- sinks and sources: channels in one direction
- requests, each of which has one response
- messages of the session itself, which belong to no channel

The part of the session that sends and receives these messages is called the top level.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal, Unpack

import attrs
import trio

from muxkit import _options
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._server import Server
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.protocols.bpmux._channels import Duplex, IncomingRequest, Request, Sink, Source
from muxkit.protocols.bpmux._connection import Connection
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine import Engine
from muxkit.runtime import ChannelOpening, Opening, protect_package
from muxkit.runtime.mux_session import LINGER, MuxSession, connection_of, running
from muxkit.trace import traced

# If both sides agree on this name in the TLS handshake (ALPN), each announces a first credit of at least this many
# bytes. The client can then use the credit immediately, before it has received the announcement.
ALPN_CREDIT: Final = 4096
ALPN: Final = f"muxkit-bpmux/{ALPN_CREDIT}"


def session(
    stream: trio.abc.Stream,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AbstractAsyncContextManager[Session]:
    """Run a bpmux session on a connected byte stream.

        async with session(stream) as session:
            response = await session.request(b"hello")

    When the block ends normally, the session finishes all channels, waits until the peer has confirmed that, and closes
    the stream. If the block raises an exception or is cancelled, the session closes the stream without waiting.

    Args:
        stream: The byte stream. The session closes it.
        config: The settings of the protocol.
        limits: Limits for memory, time and numbers of channels.
        observer: Receives notifications about the connection.
        linger: How many seconds the end of the block may take.

    Raises:
        LinkLost: At the end of the block, if the peer may not have received everything.
    """

    def make() -> Session:
        return Session(Connection(stream, config or Config(), limits or Limits(), traced(observer, "bpmux session")))

    return running(make, linger)


class Session(MuxSession[Connection, Duplex]):
    """A bpmux session. Create one with `session`, `connect` or `open_server`.

    All methods raise `LinkLost` if the connection is lost, unless they say otherwise.
    """

    # --- the top level

    async def send(self, message: bytes) -> None:
        """Send a message that belongs to no channel. Waits until the peer has granted credit for it."""
        await self._connection.top.send(message)

    async def receive(self) -> bytes:
        """Receive the peer's next message that belongs to no channel.

        Raises:
            trio.EndOfChannel: If the peer has announced that it sends no more.
        """
        return await self._connection.messages.receive()

    async def request(self, payload: bytes) -> bytes:
        """Send a request, wait for the response and return it. If this is cancelled, the request is cancelled too.

        Raises:
            ChannelStopped: If the peer declined to answer.
        """
        async with self.open_request(payload) as request:
            return await request.response()

    # --- opening

    def open_duplex(self, payload: bytes = b"", *, credit: int | None = None) -> ChannelOpening[Duplex]:
        """Open a two-way channel. Await the result, or enter it with `async with`.

        Waits while the limit for channels is reached, or while there is no credit for the payload.

        Args:
            payload: Sent with the opening. The peer gets it together with the channel.
            credit: How many bytes the peer may send before the application calls `Source.give_credit`. By default, the
                session grants credit automatically.
        """
        return ChannelOpening(partial(self._connection.open_duplex, payload, credit))

    def open_sink(self, payload: bytes = b"") -> ChannelOpening[Sink]:
        """Open a channel on which this side sends. The arguments are those of `open_duplex`."""
        return ChannelOpening(partial(self._connection.open_sink, payload))

    def open_source(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Source]:
        """Open a channel on which the peer sends. The arguments are those of `open_duplex`."""
        return Opening(partial(self._connection.open_source, payload, credit))

    def open_request(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Request]:
        """Send a request. The response can be awaited with `Request.response`.

        Args:
            payload: The request.
            credit: The size of the largest possible response in bytes. By default, the session grants credit
                automatically.
        """
        return Opening(partial(self._connection.open_request, payload, credit))

    # --- channels and requests that the peer opens

    def sources(self) -> AsyncIterator[tuple[Source, bytes]]:
        """Iterate over the channels that the peer opens to send on. Each item is a source and the opening's payload."""
        return self._connection.sources.claim()

    def sinks(self) -> AsyncIterator[tuple[Sink, bytes]]:
        """Iterate over the channels that the peer opens to receive. Each item is a sink and the opening's payload."""
        return self._connection.sinks.claim()

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """Iterate over the requests that the peer sends."""
        return self._connection.requests.claim()


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `bpmux`."""

    options: frozenset[str] = frozenset({"config"})
    has_requests: bool = True

    def tls_offers(self, *, limits: Limits, config: Config | None = None, **_: object) -> Sequence[str]:
        """Return the ALPN names that a TLS transport offers. They let both sides agree on a first credit early."""
        return (ALPN,) if (config or Config()).first_credit(limits) >= ALPN_CREDIT else ()

    def options_of_next(self, session: MuxSession[Any, Any]) -> dict[str, object]:
        """Return the options for the next session with the same server, which will announce the same first credit."""
        engine: Engine = connection_of(session).engine
        return {"config": attrs.evolve(engine.config, peer_credit=engine.peer_credit)}

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        if role == "client" and getattr(stream, "alpn", None) == ALPN:
            config = config or Config()
            config = attrs.evolve(config, peer_credit=max(config.peer_credit, ALPN_CREDIT))
        return session(stream, config=config, limits=limits, observer=observer, linger=linger)


protocol: _Protocol = _Protocol()


class ConnectOptions(_options.ConnectOptions, total=False):
    """Options of a client, for `bpmux.connect`."""

    config: Config | None
    """The settings of bpmux."""


class ReconnectOptions(_options.ReconnectOptions, total=False):
    """Options of a client that connects again and again, for `bpmux.reconnecting`."""

    config: Config | None
    """The settings of bpmux."""


class ServeOptions(_options.ServeOptions, total=False):
    """Options of a server, for `bpmux.open_server`."""

    config: Config | None
    """The settings of bpmux."""


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Session]:
    """Open a session of bpmux with the server at `url`, as `muxkit.connect` does.

    Args:
        url: A URL such as `bpmux+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ConnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return connect_typed("bpmux", Session, url, options)


def open_server(
    handler: Handler[Session, Duplex], url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[Server]:
    """Serve bpmux at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Args:
        handler: An async function that takes the sessions or the channels of bpmux.
        url: A URL such as `bpmux+tcp://127.0.0.1:0` or `tcp://127.0.0.1:0`, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return open_server_typed("bpmux", handler, url, options)


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session of bpmux after another with the server at `url`, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `bpmux+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("bpmux", Session, url, options)


protect_package("muxkit.protocols.bpmux")
