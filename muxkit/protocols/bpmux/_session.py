"""bpmux sessions: two-way channels, channels in one direction, requests, and messages of the top level."""

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
from muxkit._reconnecting import Sessions
from muxkit._server import Server
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.protocols.bpmux._channels import Duplex, IncomingRequest, Request, Sink, Source
from muxkit.protocols.bpmux._connection import Connection
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine import Engine
from muxkit.runtime import ChannelOpening, Opening, protect_package
from muxkit.runtime.mux_session import LINGER, MuxSession, connection_of, running
from muxkit.trace import traced

ALPN_CREDIT: Final = 4096  # bytes of first credit that both sides announce which agree on this name in TLS (ALPN)
ALPN: Final = f"muxkit-bpmux/{ALPN_CREDIT}"


def session(
    stream: trio.abc.Stream,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AbstractAsyncContextManager[Session]:
    """Run a bpmux session on a connected byte stream, which the session owns from now on.

    Leaving the block normally finishes all channels, waits until the peer has confirmed that, and hangs up, all within
    `linger` seconds. It raises `LinkLost` if the peer may not have received everything. Leaving by an error or a
    cancellation hangs up at once.
    """

    def make() -> Session:
        return Session(Connection(stream, config or Config(), limits or Limits(), traced(observer, "bpmux session")))

    return running(make, linger)


class Session(MuxSession[Connection, Duplex]):
    """A bpmux session; made by `session`."""

    # --- the top level

    async def send(self, message: bytes) -> None:
        """Send a top-level message."""
        await self._connection.top.send(message)

    async def receive(self) -> bytes:
        """Receive the peer's next top-level message."""
        return await self._connection.messages.receive()

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for the response; a cancellation cancels the request."""
        async with self.open_request(payload) as request:
            return await request.response()

    # --- opening

    def open_duplex(self, payload: bytes = b"", *, credit: int | None = None) -> ChannelOpening[Duplex]:
        """Open a two-way channel, which is announced at once. With `credit` all further grants are made by hand."""
        return ChannelOpening(partial(self._connection.open_duplex, payload, credit))

    def open_sink(self, payload: bytes = b"") -> ChannelOpening[Sink]:
        """Open a channel to send on."""
        return ChannelOpening(partial(self._connection.open_sink, payload))

    def open_source(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Source]:
        """Open a channel to receive from. With `credit` all further grants are made by hand."""
        return Opening(partial(self._connection.open_source, payload, credit))

    def open_request(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Request]:
        """Send a request. `credit` is the largest response, in bytes; without it that is the usual window."""
        return Opening(partial(self._connection.open_request, payload, credit))

    # --- what the peer opens

    def sources(self) -> AsyncIterator[tuple[Source, bytes]]:
        """Iterate over the sinks that the peer opens: a source on this side, and the opening payload."""
        return self._connection.sources.claim()

    def sinks(self) -> AsyncIterator[tuple[Sink, bytes]]:
        """Iterate over the streams that the peer opens: a sink on this side, and the opening payload."""
        return self._connection.sinks.claim()

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """Iterate over the requests of the peer."""
        return self._connection.requests.claim()


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `bpmux`."""

    options: frozenset[str] = frozenset({"config"})
    has_requests: bool = True

    def tls_offers(self, *, limits: Limits, config: Config | None = None, **_: object) -> Sequence[str]:
        """Return the names by which both sides of TLS agree on a first credit, before a byte of bpmux was sent."""
        return (ALPN,) if (config or Config()).first_credit(limits) >= ALPN_CREDIT else ()

    def options_of_next(self, session: MuxSession[Any, Any]) -> dict[str, object]:
        """Return options for the next session with the same server: what it announced, it will announce again."""
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


def reconnecting(url: str | Sequence[str], **options: Unpack[ReconnectOptions]) -> Sessions[Session]:
    """Iterate over sessions of bpmux with the server at `url`, one after the other, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `bpmux+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("bpmux", Session, url, options)


protect_package("muxkit.protocols.bpmux")
