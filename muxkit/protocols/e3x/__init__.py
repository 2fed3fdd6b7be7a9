"""e3x reliable channels: order, repair and receipts over packets that may be lost, doubled or late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.e3x.config import Config as Config
from muxkit.protocols.e3x.engine.channel import EngineChannel as EngineChannel
from muxkit.protocols.e3x.engine.chunked import ChunkedEngine as ChunkedEngine
from muxkit.protocols.e3x.engine.chunked import Dechunker as Dechunker
from muxkit.protocols.e3x.engine.chunked import encode_chunks as encode_chunks
from muxkit.protocols.e3x.engine.engine import Engine as Engine
from muxkit.protocols.e3x.engine.engine import Stats as Stats
from muxkit.protocols.e3x.engine.events import Broken as Broken
from muxkit.protocols.e3x.engine.events import Cause as Cause
from muxkit.protocols.e3x.engine.events import Closed as Closed
from muxkit.protocols.e3x.engine.events import Delivered as Delivered
from muxkit.protocols.e3x.engine.events import Ended as Ended
from muxkit.protocols.e3x.engine.events import Event as Event
from muxkit.protocols.e3x.engine.events import Fault as Fault
from muxkit.protocols.e3x.engine.events import Faulted as Faulted
from muxkit.protocols.e3x.engine.events import Message as Message
from muxkit.protocols.e3x.engine.events import Opened as Opened
from muxkit.protocols.e3x.engine.events import Writable as Writable
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

if TYPE_CHECKING:
    from muxkit.protocols.e3x._session.channels import Channel as Channel
    from muxkit.protocols.e3x._session.channels import Receipt as Receipt
    from muxkit.protocols.e3x._session.session import Session as Session
    from muxkit.protocols.e3x._session.session import SessionStats as SessionStats
    from muxkit.protocols.e3x._session.session import connect as connect
    from muxkit.protocols.e3x._session.session import open_server as open_server
    from muxkit.protocols.e3x._session.session import protocol as protocol
    from muxkit.protocols.e3x._session.session import reconnecting as reconnecting
    from muxkit.protocols.e3x._session.session import session as session

__all__ = [
    "Broken",
    "Cause",
    "Channel",
    "ChunkedEngine",
    "Closed",
    "Config",
    "Dechunker",
    "Delivered",
    "Ended",
    "Engine",
    "EngineChannel",
    "Event",
    "Fault",
    "Faulted",
    "Message",
    "Miss",
    "Opened",
    "Packet",
    "Receipt",
    "Session",
    "SessionStats",
    "Stats",
    "Writable",
    "connect",
    "decode_miss",
    "encode_chunks",
    "encode_head",
    "encode_miss",
    "encode_packet",
    "join_packet",
    "open_server",
    "parse_head",
    "parse_packet",
    "protocol",
    "reconnecting",
    "session",
    "split_packet",
]

# The engine works without Trio; what needs it is fetched when it is first asked for.
_LAZY = dict.fromkeys(("Channel", "Receipt"), "_session.channels")
_LAZY |= dict.fromkeys(("Session", "SessionStats", "protocol", "session"), "_session.session")
_LAZY |= dict.fromkeys(("connect", "open_server", "reconnecting"), "_session.session")

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
