"""One connection, many channels: a structured-concurrency multiplexer for Trio.

async with muxkit.connect("bpmux+tcp://127.0.0.1:7000") as session:
    async with session.open() as channel:
        await channel.send(b"hello")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, MuxError, ProtocolError, Refused, RemoteProtocolError
from muxkit._lazy import lazily
from muxkit._limits import Limits
from muxkit._observer import BaseObserver, ConnectionObserver, Observer

if TYPE_CHECKING:
    from muxkit._authorize import Authorize, tokens
    from muxkit._door import connect
    from muxkit._handlers import (
        ChannelHandler,
        RequestHandler,
        SessionHandler,
        by_name,
        each_channel,
        each_request,
        handler,
    )
    from muxkit._options import ConnectOptions, DialOptions, ListenOptions, ReconnectOptions, ServeOptions
    from muxkit._plugins import PluginError
    from muxkit._reconnecting import reconnecting
    from muxkit._server import Server, open_server, run_server, serve
    from muxkit._tls import TLS
    from muxkit.codecs import Codec, InvalidMessage, Json, MessagePack, Protobuf, Pydantic, Zstd
    from muxkit.runtime import (
        AllAttemptsFailed,
        Backoff,
        Channel,
        ChannelCancelled,
        ChannelStats,
        ChannelStopped,
        HandshakeFailed,
        Identity,
        IncomingRequest,
        Lagged,
        LinkLost,
        PlaintextWarning,
        Request,
        Session,
        SessionInfo,
        SessionStats,
        Subscription,
        TypedChannel,
        Unsupported,
    )
    from muxkit.topics import Topic

__version__ = "0.2.0"

__all__ = [
    "TLS",
    "AllAttemptsFailed",
    "Authorize",
    "Backoff",
    "BaseObserver",
    "Channel",
    "ChannelCancelled",
    "ChannelHandler",
    "ChannelStats",
    "ChannelStopped",
    "Codec",
    "ConnectOptions",
    "ConnectionObserver",
    "DialOptions",
    "HandshakeFailed",
    "Identity",
    "IncomingRequest",
    "InvalidMessage",
    "Json",
    "Lagged",
    "Limits",
    "LinkLost",
    "ListenOptions",
    "LocalProtocolError",
    "MessagePack",
    "MuxError",
    "Observer",
    "PlaintextWarning",
    "PluginError",
    "Protobuf",
    "ProtocolError",
    "Pydantic",
    "ReconnectOptions",
    "Refused",
    "RemoteProtocolError",
    "Request",
    "RequestHandler",
    "ServeOptions",
    "Server",
    "Session",
    "SessionHandler",
    "SessionInfo",
    "SessionStats",
    "Subscription",
    "Topic",
    "TypedChannel",
    "Unsupported",
    "Zstd",
    "by_name",
    "connect",
    "each_channel",
    "each_request",
    "handler",
    "open_server",
    "reconnecting",
    "run_server",
    "serve",
    "tokens",
]

# The engines do not need Trio, and a program that uses only them should not import it: names that need it are
# imported at the first access.
_LAZY = {
    "Authorize tokens": "_authorize",
    "connect": "_door",
    "ChannelHandler RequestHandler SessionHandler by_name each_channel each_request handler": "_handlers",
    "ConnectOptions DialOptions ListenOptions ReconnectOptions ServeOptions": "_options",
    "PluginError": "_plugins",
    "reconnecting": "_reconnecting",
    "Server open_server run_server serve": "_server",
    "TLS": "_tls",
    "Codec InvalidMessage Json MessagePack Protobuf Pydantic Zstd": "codecs",
    "AllAttemptsFailed": "runtime",
    "Backoff Channel ChannelCancelled ChannelStats ChannelStopped HandshakeFailed Identity": "runtime",
    "IncomingRequest LinkLost PlaintextWarning Request Session SessionInfo SessionStats": "runtime",
    "Lagged Subscription TypedChannel Unsupported": "runtime",
    "Topic": "topics",
}

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
