"""Relink: messages, transactions and multicast over a link that outlives its connections."""

from __future__ import annotations

from muxkit.protocols.relink._config import Config as Config
from muxkit.protocols.relink._engine import LinkEngine as LinkEngine
from muxkit.protocols.relink._events import Agreed as Agreed
from muxkit.protocols.relink._events import Arrived as Arrived
from muxkit.protocols.relink._events import ChannelClosed as ChannelClosed
from muxkit.protocols.relink._events import Committed as Committed
from muxkit.protocols.relink._events import Consumed as Consumed
from muxkit.protocols.relink._events import Ended as Ended
from muxkit.protocols.relink._events import EpochChanged as EpochChanged
from muxkit.protocols.relink._events import Event as Event
from muxkit.protocols.relink._events import Failed as Failed
from muxkit.protocols.relink._events import Finished as Finished
from muxkit.protocols.relink._events import HandshakeEvent as HandshakeEvent
from muxkit.protocols.relink._events import HungUp as HungUp
from muxkit.protocols.relink._events import LinkReplaced as LinkReplaced
from muxkit.protocols.relink._events import Opened as Opened
from muxkit.protocols.relink._events import PeerShutDown as PeerShutDown
from muxkit.protocols.relink._events import Ponged as Ponged
from muxkit.protocols.relink._events import Received as Received
from muxkit.protocols.relink._events import Refused as Refused
from muxkit.protocols.relink._events import Requested as Requested
from muxkit.protocols.relink._events import Resumed as Resumed
from muxkit.protocols.relink._events import RolledBack as RolledBack
from muxkit.protocols.relink._events import Silent as Silent
from muxkit.protocols.relink._events import Uncommitted as Uncommitted
from muxkit.protocols.relink._events import Writable as Writable
from muxkit.protocols.relink._frames import Bounds as Bounds
from muxkit.protocols.relink._frames import bounds_of as bounds_of
from muxkit.protocols.relink._frames import parse_packet as parse_packet
from muxkit.protocols.relink._handshake import ConnectorHandshake as ConnectorHandshake
from muxkit.protocols.relink._handshake import ListenerHandshake as ListenerHandshake
from muxkit.protocols.relink._handshake import encode_answer as encode_answer
from muxkit.protocols.relink._handshake import encode_request as encode_request
from muxkit.protocols.relink._handshake import encode_version as encode_version
from muxkit.protocols.relink._handshake import epoch_of as epoch_of
from muxkit.protocols.relink._handshake import mismatch as mismatch
from muxkit.protocols.relink._packets import Ack as Ack
from muxkit.protocols.relink._packets import AckPacket as AckPacket
from muxkit.protocols.relink._packets import Format as Format
from muxkit.protocols.relink._packets import General as General
from muxkit.protocols.relink._packets import MessagePacket as MessagePacket
from muxkit.protocols.relink._packets import Operation as Operation
from muxkit.protocols.relink._packets import OperationPacket as OperationPacket
from muxkit.protocols.relink._packets import Packet as Packet
from muxkit.protocols.relink._packets import Parts as Parts
from muxkit.protocols.relink._packets import encode_packet as encode_packet

Engine = LinkEngine
