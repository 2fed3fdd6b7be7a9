"""One connection, many channels: a structured-concurrency multiplexer for Trio.

async with muxkit.connect("bpmux+tcp://127.0.0.1:7000") as session:
    async with session.open() as channel:
        await channel.send(b"hello")
"""

from __future__ import annotations

from muxkit._lazy import lazily

__version__ = "0.2.0"

# Engines work without Trio, and a program that only uses them shouldn't import it. So each name is imported when a
# program first uses it.
with lazily(globals()):
    from muxkit._authorize import Authorize as Authorize
    from muxkit._authorize import tokens as tokens
    from muxkit._door import connect as connect
    from muxkit._errors import LocalProtocolError as LocalProtocolError
    from muxkit._errors import MuxError as MuxError
    from muxkit._errors import ProtocolError as ProtocolError
    from muxkit._errors import Refused as Refused
    from muxkit._errors import RemoteProtocolError as RemoteProtocolError
    from muxkit._handlers import ChannelHandler as ChannelHandler
    from muxkit._handlers import RequestHandler as RequestHandler
    from muxkit._handlers import SessionHandler as SessionHandler
    from muxkit._handlers import by_name as by_name
    from muxkit._handlers import each_channel as each_channel
    from muxkit._handlers import each_request as each_request
    from muxkit._handlers import handler as handler
    from muxkit._limits import Limits as Limits
    from muxkit._observer import BaseObserver as BaseObserver
    from muxkit._observer import ConnectionObserver as ConnectionObserver
    from muxkit._observer import Observer as Observer
    from muxkit._options import ConnectOptions as ConnectOptions
    from muxkit._options import DialOptions as DialOptions
    from muxkit._options import ListenOptions as ListenOptions
    from muxkit._options import ReconnectOptions as ReconnectOptions
    from muxkit._options import ServeOptions as ServeOptions
    from muxkit._plugins import PluginError as PluginError
    from muxkit._reconnecting import reconnecting as reconnecting
    from muxkit._server import Server as Server
    from muxkit._server import open_server as open_server
    from muxkit._server import run_server as run_server
    from muxkit._server import serve as serve
    from muxkit._tls import TLS as TLS
    from muxkit.codecs import Codec as Codec
    from muxkit.codecs import InvalidMessage as InvalidMessage
    from muxkit.codecs import Json as Json
    from muxkit.codecs import MessagePack as MessagePack
    from muxkit.codecs import Protobuf as Protobuf
    from muxkit.codecs import Pydantic as Pydantic
    from muxkit.codecs import Zstd as Zstd
    from muxkit.runtime import AllAttemptsFailed as AllAttemptsFailed
    from muxkit.runtime import Backoff as Backoff
    from muxkit.runtime import Channel as Channel
    from muxkit.runtime import ChannelCancelled as ChannelCancelled
    from muxkit.runtime import ChannelStats as ChannelStats
    from muxkit.runtime import ChannelStopped as ChannelStopped
    from muxkit.runtime import HandshakeFailed as HandshakeFailed
    from muxkit.runtime import Identity as Identity
    from muxkit.runtime import IncomingRequest as IncomingRequest
    from muxkit.runtime import Lagged as Lagged
    from muxkit.runtime import LinkLost as LinkLost
    from muxkit.runtime import PlaintextWarning as PlaintextWarning
    from muxkit.runtime import Request as Request
    from muxkit.runtime import Session as Session
    from muxkit.runtime import SessionInfo as SessionInfo
    from muxkit.runtime import SessionStats as SessionStats
    from muxkit.runtime import Subscription as Subscription
    from muxkit.runtime import TypedChannel as TypedChannel
    from muxkit.runtime import Unsupported as Unsupported
    from muxkit.topics import Topic as Topic
