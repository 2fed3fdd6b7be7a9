"""The protocol bpmux/rel: channels in one or both directions, and requests, over one ordered byte stream.

Applications use `connect`, `open_server` and `session`. `Engine` implements the protocol without I/O, for tests and
other programs that have the bytes themselves. The module `state` explains how it works.
"""

from __future__ import annotations

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
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
