"""bpmux/rel: sinks, streams, duplexes and requests over one ordered byte stream, with byte credit for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.bpmux.config import Config as Config
from muxkit.protocols.bpmux.engine import Engine as Engine
from muxkit.protocols.bpmux.entities import Entity as Entity
from muxkit.protocols.bpmux.entities import Kind as Kind
from muxkit.protocols.bpmux.entities import Life as Life
from muxkit.protocols.bpmux.events import Event as Event
from muxkit.protocols.bpmux.events import HalfClosed as HalfClosed
from muxkit.protocols.bpmux.events import Pinged as Pinged
from muxkit.protocols.bpmux.events import Requested as Requested
from muxkit.protocols.bpmux.events import Responded as Responded
from muxkit.protocols.bpmux.frames import Chunk as Chunk
from muxkit.protocols.bpmux.frames import Partial as Partial
from muxkit.protocols.bpmux.frames import Type as Type
from muxkit.protocols.bpmux.frames import encode_chunk as encode_chunk
from muxkit.protocols.bpmux.frames import encode_partial as encode_partial
from muxkit.protocols.bpmux.frames import parse_chunk as parse_chunk
from muxkit.protocols.bpmux.receive import Receiver as Receiver
from muxkit.protocols.bpmux.send import Sender as Sender

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._channels import Duplex as Duplex
    from muxkit.protocols.bpmux._channels import IncomingRequest as IncomingRequest
    from muxkit.protocols.bpmux._channels import Request as Request
    from muxkit.protocols.bpmux._channels import Sink as Sink
    from muxkit.protocols.bpmux._channels import Source as Source
    from muxkit.protocols.bpmux._session import ConnectOptions as ConnectOptions
    from muxkit.protocols.bpmux._session import ReconnectOptions as ReconnectOptions
    from muxkit.protocols.bpmux._session import ServeOptions as ServeOptions
    from muxkit.protocols.bpmux._session import Session as Session
    from muxkit.protocols.bpmux._session import connect as connect
    from muxkit.protocols.bpmux._session import open_server as open_server
    from muxkit.protocols.bpmux._session import protocol as protocol
    from muxkit.protocols.bpmux._session import reconnecting as reconnecting
    from muxkit.protocols.bpmux._session import session as session

__all__ = [
    "Chunk",
    "Config",
    "ConnectOptions",
    "Duplex",
    "Engine",
    "Entity",
    "Event",
    "HalfClosed",
    "IncomingRequest",
    "Kind",
    "Life",
    "Partial",
    "Pinged",
    "Receiver",
    "ReconnectOptions",
    "Request",
    "Requested",
    "Responded",
    "Sender",
    "ServeOptions",
    "Session",
    "Sink",
    "Source",
    "Type",
    "connect",
    "encode_chunk",
    "encode_partial",
    "open_server",
    "parse_chunk",
    "protocol",
    "reconnecting",
    "session",
]

# The engine works without Trio; what needs it is fetched when it is first asked for.
_LAZY = {
    "ConnectOptions ReconnectOptions ServeOptions": "_session",
    "Duplex": "_channels",
    "IncomingRequest": "_channels",
    "Request": "_channels",
    "Session": "_session",
    "Sink": "_channels",
    "Source": "_channels",
    "protocol": "_session",
    "session": "_session",
    "connect open_server reconnecting": "_session",
}

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
