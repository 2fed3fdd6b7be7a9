"""e3x: reliable and unreliable channels over packets that may be lost, duplicated or reordered.

The specification is "Reliable Channels" and "Unreliable Channels" of the E3X wire protocol of telehash v3, in the
repository telehash/telehash.github.io, under v3/e3x. A session has many channels to one peer. It runs over packets, or
over a byte stream with the chunked encoding from the same repository. muxkit adds messages larger than a packet, pings,
goodbyes and congestion control. Comments in the code say where it goes beyond the specification.

    application    _session, _channels          sessions and channels for Trio programs
                   _connection                  runs the engine, and passes its events to the channels
    halves         send, receive                windows, acks, resends and delivery for one channel
    engine         engine, state                the public methods of the engine, and its state
                   openings, liveness           how channels begin; pings, goodbyes and keepalive
                   silence                      the keepalive timers
                   congestion, assembly         the sending rate; reassembly of messages
                   chunked                      the engine for a byte stream
    grammar        packets, config, events      encoding and parsing; settings; events
"""

from __future__ import annotations

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
    from muxkit.core.events import Finished as Finished
    from muxkit.core.events import Opened as Opened
    from muxkit.core.events import Received as Received
    from muxkit.core.events import Writable as Writable
    from muxkit.protocols.e3x._channels import Channel as Channel
    from muxkit.protocols.e3x._channels import Receipt as Receipt
    from muxkit.protocols.e3x._connection import SessionStats as SessionStats
    from muxkit.protocols.e3x._session import ConnectOptions as ConnectOptions
    from muxkit.protocols.e3x._session import ReconnectOptions as ReconnectOptions
    from muxkit.protocols.e3x._session import ServeOptions as ServeOptions
    from muxkit.protocols.e3x._session import Session as Session
    from muxkit.protocols.e3x._session import connect as connect
    from muxkit.protocols.e3x._session import open_server as open_server
    from muxkit.protocols.e3x._session import protocol as protocol
    from muxkit.protocols.e3x._session import reconnecting as reconnecting
    from muxkit.protocols.e3x._session import session as session
    from muxkit.protocols.e3x.chunked import ChunkedEngine as ChunkedEngine
    from muxkit.protocols.e3x.chunked import Dechunker as Dechunker
    from muxkit.protocols.e3x.chunked import encode_chunks as encode_chunks
    from muxkit.protocols.e3x.config import Config as Config
    from muxkit.protocols.e3x.engine import Engine as Engine
    from muxkit.protocols.e3x.engine import Stats as Stats
    from muxkit.protocols.e3x.events import Broken as Broken
    from muxkit.protocols.e3x.events import Cause as Cause
    from muxkit.protocols.e3x.events import Closed as Closed
    from muxkit.protocols.e3x.events import Delivered as Delivered
    from muxkit.protocols.e3x.events import Event as Event
    from muxkit.protocols.e3x.events import Fault as Fault
    from muxkit.protocols.e3x.events import Faulted as Faulted
    from muxkit.protocols.e3x.packets import Miss as Miss
    from muxkit.protocols.e3x.packets import Packet as Packet
    from muxkit.protocols.e3x.packets import decode_miss as decode_miss
    from muxkit.protocols.e3x.packets import encode_head as encode_head
    from muxkit.protocols.e3x.packets import encode_miss as encode_miss
    from muxkit.protocols.e3x.packets import encode_packet as encode_packet
    from muxkit.protocols.e3x.packets import join_packet as join_packet
    from muxkit.protocols.e3x.packets import parse_head as parse_head
    from muxkit.protocols.e3x.packets import parse_packet as parse_packet
    from muxkit.protocols.e3x.packets import split_packet as split_packet
    from muxkit.protocols.e3x.state import EngineChannel as EngineChannel
