"""bpmux/rel: sinks, streams, duplexes and requests over one ordered byte stream, with byte credit for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.bpmux.config import Config as Config
from muxkit.protocols.bpmux.engine.engine import Engine as Engine
from muxkit.protocols.bpmux.engine.entities import Entity as Entity
from muxkit.protocols.bpmux.engine.entities import Kind as Kind
from muxkit.protocols.bpmux.engine.events import Confirmed as Confirmed
from muxkit.protocols.bpmux.engine.events import Declined as Declined
from muxkit.protocols.bpmux.engine.events import Ended as Ended
from muxkit.protocols.bpmux.engine.events import Event as Event
from muxkit.protocols.bpmux.engine.events import Failed as Failed
from muxkit.protocols.bpmux.engine.events import HalfClosed as HalfClosed
from muxkit.protocols.bpmux.engine.events import HungUp as HungUp
from muxkit.protocols.bpmux.engine.events import Message as Message
from muxkit.protocols.bpmux.engine.events import Messages as Messages
from muxkit.protocols.bpmux.engine.events import Opened as Opened
from muxkit.protocols.bpmux.engine.events import Pinged as Pinged
from muxkit.protocols.bpmux.engine.events import Ponged as Ponged
from muxkit.protocols.bpmux.engine.events import Probed as Probed
from muxkit.protocols.bpmux.engine.events import Responded as Responded
from muxkit.protocols.bpmux.engine.events import Silent as Silent
from muxkit.protocols.bpmux.engine.events import Writable as Writable
from muxkit.protocols.bpmux.frames import Chunk as Chunk
from muxkit.protocols.bpmux.frames import Partial as Partial
from muxkit.protocols.bpmux.frames import Type as Type
from muxkit.protocols.bpmux.frames import encode_chunk as encode_chunk
from muxkit.protocols.bpmux.frames import encode_partial as encode_partial
from muxkit.protocols.bpmux.frames import parse_chunk as parse_chunk

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._session.channels import Duplex as Duplex
    from muxkit.protocols.bpmux._session.channels import IncomingRequest as IncomingRequest
    from muxkit.protocols.bpmux._session.channels import Request as Request
    from muxkit.protocols.bpmux._session.channels import Sink as Sink
    from muxkit.protocols.bpmux._session.channels import Source as Source
    from muxkit.protocols.bpmux._session.session import Session as Session
    from muxkit.protocols.bpmux._session.session import connect as connect
    from muxkit.protocols.bpmux._session.session import open_server as open_server
    from muxkit.protocols.bpmux._session.session import protocol as protocol
    from muxkit.protocols.bpmux._session.session import reconnecting as reconnecting
    from muxkit.protocols.bpmux._session.session import session as session

__all__ = [
    "Chunk",
    "Config",
    "Confirmed",
    "Declined",
    "Duplex",
    "Ended",
    "Engine",
    "Entity",
    "Event",
    "Failed",
    "HalfClosed",
    "HungUp",
    "IncomingRequest",
    "Kind",
    "Message",
    "Messages",
    "Opened",
    "Partial",
    "Pinged",
    "Ponged",
    "Probed",
    "Request",
    "Responded",
    "Session",
    "Silent",
    "Sink",
    "Source",
    "Type",
    "Writable",
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
    "Duplex": "_session.channels",
    "IncomingRequest": "_session.channels",
    "Request": "_session.channels",
    "Session": "_session.session",
    "Sink": "_session.channels",
    "Source": "_session.channels",
    "protocol": "_session.session",
    "session": "_session.session",
    "connect open_server reconnecting": "_session.session",
}

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
