"""e3x sessions, which have reliable and unreliable channels over packets or over a byte stream.

`muxkit.connect` and `muxkit.serve` find the protocol here under the name `e3x`. Programs that have a link of their own
call `session`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, Unpack, overload

import trio

from muxkit import _options, _spans
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._server import Server
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.codecs import Codec, announced
from muxkit.core import Headers, encode_headers, encode_name, with_name
from muxkit.protocols.e3x._channels import Channel
from muxkit.protocols.e3x._connection import Connection, Role, SessionStats
from muxkit.protocols.e3x.config import DEFAULT_TYPE, Config
from muxkit.runtime import ChannelOpening, LinkKind, PacketLink, TypedChannel, ValueT, called, protect_package, typed
from muxkit.runtime.mux_session import LINGER, MuxSession, running
from muxkit.trace import traced


def session(
    link: PacketLink | trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AbstractAsyncContextManager[Session]:
    """Run an e3x session on a link to one peer.

    Leaving the block normally ends all channels, waits until the peer's application has processed every message, and
    hangs up. All of that takes at most `linger` seconds. Leaving the block because of an exception or a cancellation
    hangs up immediately.

    Args:
        link: A packet link or a byte stream, which the session owns from now on.
        role: `"connector"` on one side and `"listener"` on the other. The connector's channels have odd ids.
        config: The settings of the protocol.
        limits: The limits on memory and channels.
        observer: Receives callbacks about the session.
        linger: Maximum number of seconds for closing the session.

    Raises:
        LinkLost: The session has ended, and the peer may not have processed every message.
    """

    def make() -> Session:
        return Session(Connection(link, role, config or Config(), limits or Limits(), traced(observer, f"e3x {role}")))

    return called("session", running(make, linger))


class Session(MuxSession[Connection, Channel]):
    """An e3x session. `session` creates it.

    `incoming` returns the channels that the peer opens. The peer chooses the `type` of a channel when it opens the
    channel.
    """

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None, reliable: bool = True
    ) -> ChannelOpening[Channel]: ...
    @overload
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT],
        payload: bytes = b"",
        headers: Headers | None = None,
        reliable: bool = True,
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
        reliable: bool = True,
    ) -> ChannelOpening[Channel] | ChannelOpening[TypedChannel[ValueT]]:
        """Open a channel and announce it to the peer immediately. The call waits only for a slot under the limits.

        The peer reads `name` as `channel.name`, which the specification calls the channel's type. It reads `payload`
        as `channel.opening`. The opening of an unreliable channel may be lost, so there the payload is the first
        message, and the headers may be missing.
        """
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec), reliable=reliable), codec)
        if name:
            encode_name(name)  # raises an error if the name can't be sent
        body = self._opening_bytes(name, payload, headers)
        if _spans.maker is None:
            return ChannelOpening(partial(self._connection.open_typed, name or DEFAULT_TYPE, reliable, body))
        options = {"reliable": reliable}
        return ChannelOpening(partial(self._open_with_span, _spans.maker, name, payload, headers, options))

    def _opening_bytes(self, name: str, payload: bytes, headers: Headers | None) -> bytes:
        return with_name("", payload, encode_headers(headers, self.limits.headers))  # the name is the channel's type

    def _open_channel(self, name: str, opening: bytes, options: Mapping[str, Any]) -> Awaitable[Channel]:
        return self._connection.open_typed(name or DEFAULT_TYPE, options["reliable"], opening)

    @property
    def packet_limit(self) -> int:
        """Current maximum size of a packet to send, in bytes. It is below `Config.packet` if the link requires that."""
        return self._connection.engine.packet_size

    def stats(self) -> SessionStats:
        return self._connection.stats()


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `e3x`."""

    options: frozenset[str] = frozenset({"config"})
    links: frozenset[LinkKind] = frozenset({"stream", "packets"})

    def session(
        self, link: PacketLink | trio.abc.Stream, /, *, role: Literal["client", "server"], address: str, **options: Any
    ) -> AbstractAsyncContextManager[Session]:
        return session(link, role="connector" if role == "client" else "listener", **options)


protocol: _Protocol = _Protocol()


class ConnectOptions(_options.ConnectOptions, total=False):
    """Options of a client, for `e3x.connect`."""

    config: Config | None
    """The settings of e3x."""


class ReconnectOptions(_options.ReconnectOptions, total=False):
    """Options of a client that connects again and again, for `e3x.reconnecting`."""

    config: Config | None
    """The settings of e3x."""


class ServeOptions(_options.ServeOptions, total=False):
    """Options of a server, for `e3x.open_server`."""

    config: Config | None
    """The settings of e3x."""


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Session]:
    """Open a session of e3x with the server at `url`, as `muxkit.connect` does.

    Args:
        url: A URL such as `e3x+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ConnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return connect_typed("e3x", Session, url, options)


def open_server(
    handler: Handler[Session, Channel], url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[Server]:
    """Serve e3x at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Args:
        handler: An async function that takes the sessions or the channels of e3x.
        url: A URL such as `e3x+tcp://127.0.0.1:0` or `tcp://127.0.0.1:0`, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return open_server_typed("e3x", handler, url, options)


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session of e3x after another with the server at `url`, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `e3x+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("e3x", Session, url, options)


protect_package("muxkit.protocols.e3x")
