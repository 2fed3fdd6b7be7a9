"""Aqueduct sessions, and the plugin for `muxkit.connect` and `muxkit.serve`.

A session is used in one of two ways, and the first call decides it: with Aqueduct's own channels, which begin at the
entrypoint, or with the two-way channels of every protocol, which need the entrypoint for themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Unpack, overload

import trio

from muxkit import _options, _server
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.protocols.aqueduct._channels import AqueductSendHalf, Channel, OpeningHalf, Receiver, Sender
from muxkit.protocols.aqueduct._connection import Connection
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.frames import Headers, Pairs, Role
from muxkit.protocols.aqueduct.send import Ticket
from muxkit.runtime import LinkKind, MultistreamLink, called, protect_package
from muxkit.runtime.mux_session import LINGER, MuxSession, running
from muxkit.trace import traced

Side = Literal["client", "server"]


@overload
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Literal["client"] = ...,
    headers: Pairs = ...,
    config: Config | None = ...,
    limits: Limits | None = ...,
    observer: Observer | None = ...,
    linger: float = ...,
) -> AbstractAsyncContextManager[Client]: ...
@overload
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Literal["server"],
    headers: Pairs = ...,
    config: Config | None = ...,
    limits: Limits | None = ...,
    observer: Observer | None = ...,
    linger: float = ...,
) -> AbstractAsyncContextManager[Server]: ...
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Side = "client",
    headers: Pairs = (),
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AbstractAsyncContextManager[Client | Server]:
    """Run an Aqueduct session over QUIC or on a connected byte stream, which the session owns from now on.

    `headers` are for the peer's `peer_headers`. Leaving the block normally finishes all senders, closes all receivers,
    waits until the peer has heard it and hangs up, all within `linger` seconds. It raises `LinkLost` if the peer may
    not have received everything. Leaving by an error or a cancellation hangs up immediately.
    """
    if isinstance(link, MultistreamLink) and link.role != role:
        raise ValueError(f"role={role!r} doesn't fit the link: expected {link.role!r}, its end of the QUIC connection")
    kind, side = (Client, Role.CLIENT) if role == "client" else (Server, Role.SERVER)
    observer = traced(observer, f"{role} aqueduct")

    def make() -> Client | Server:
        return kind(Connection(link, side, headers=headers, config=config, limits=limits, observer=observer))

    return called("connection", running(make, linger))


class Session(MuxSession[Connection, Channel]):
    """An Aqueduct session; made by `connection`, which gives a `Client` or a `Server`."""

    @overload
    def channel(
        self, keep: Literal["receiver"] = ..., *, oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[Receiver, Ticket]: ...
    @overload
    def channel(
        self, keep: Literal["sender"], *, oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[Sender, Ticket]: ...
    def channel(
        self, keep: Literal["receiver", "sender"] = "receiver", *, oneshot: bool = False, headers: Pairs = ()
    ) -> tuple[Receiver | Sender, Ticket]:
        """Make a channel: the half to keep, and a ticket for the other one, to be sent with one message.

        The channel exists once that message is sent. `headers` go with it. A `oneshot` channel carries one message.
        """
        self._connection.budget.thread.check()
        self._connection.raise_if_lost()
        if keep == "sender":
            return self._connection.new_sender(oneshot=oneshot, headers=headers)
        return self._connection.new_receiver(oneshot=oneshot, headers=headers)

    async def peer_headers(self) -> Headers:
        """Wait for the headers that the peer gave to `connection`."""
        connection = self._connection
        connection.budget.thread.check()
        await trio.lowlevel.checkpoint()
        await connection.connected.wait()
        if connection.peer_headers is None:
            raise connection.pump.loss()
        return connection.peer_headers

    def __repr__(self) -> str:
        return f"<aqueduct.{type(self).__name__} {self.info.peer or 'on a stream'}: {self._connection.state_text()}>"


class Client(Session):
    """The side whose entrypoint is a sender."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        half = connection.entrypoint
        assert isinstance(half, AqueductSendHalf)  # as this is a client
        self._entrypoint = Sender(connection, half)

    @property
    def entrypoint(self) -> Sender:
        """The sender for the first messages, and with them the first channels."""
        self._connection.check_unused()
        return self._entrypoint


class Server(Session):
    """The side whose entrypoint is a receiver."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        half = connection.entrypoint
        assert isinstance(half, OpeningHalf)  # as this is a server
        self._entrypoint = Receiver(connection, half)

    @property
    def entrypoint(self) -> Receiver:
        """The receiver of the first messages, and with them the first channels."""
        self._connection.check_unused()
        return self._entrypoint


class _Protocol:
    """The plugin that `muxkit.connect` and `muxkit.serve` find under the name `aqueduct`."""

    options: frozenset[str] = frozenset({"config", "headers"})
    links: frozenset[LinkKind] = frozenset({"stream", "multistream"})

    def session(
        self, link: trio.abc.Stream | MultistreamLink, /, *, role: Side, address: str, **options: Any
    ) -> AbstractAsyncContextManager[Session]:
        return connection(link, role=role, **options)


protocol: _Protocol = _Protocol()


class ConnectOptions(_options.ConnectOptions, total=False):
    """Options of a client, for `aqueduct.connect`."""

    config: Config | None
    """The settings of Aqueduct."""
    headers: Pairs
    """Pairs of bytes that describe this side to the peer."""


class ReconnectOptions(_options.ReconnectOptions, total=False):
    """Options of a client that connects again and again, for `aqueduct.reconnecting`."""

    config: Config | None
    """The settings of Aqueduct."""
    headers: Pairs
    """Pairs of bytes that describe this side to the peer."""


class ServeOptions(_options.ServeOptions, total=False):
    """Options of a server, for `aqueduct.open_server`."""

    config: Config | None
    """The settings of Aqueduct."""
    headers: Pairs
    """Pairs of bytes that describe this side to the peer."""


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Session]:
    """Open a session of Aqueduct with the server at `url`, as `muxkit.connect` does.

    Args:
        url: A URL such as `aqueduct+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ConnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return connect_typed("aqueduct", Session, url, options)


def open_server(
    handler: Handler[Session, Channel], url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[_server.Server]:
    """Serve Aqueduct at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Args:
        handler: An async function that takes the sessions or the channels of Aqueduct.
        url: A URL such as `aqueduct+tcp://127.0.0.1:0` or `tcp://127.0.0.1:0`, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return open_server_typed("aqueduct", handler, url, options)


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session of Aqueduct after another with the server at `url`, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `aqueduct+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("aqueduct", Session, url, options)


protect_package("muxkit.protocols.aqueduct")
