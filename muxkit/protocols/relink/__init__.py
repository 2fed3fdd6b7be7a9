"""Relink: messages, transactions and multicast over a link that outlives its connections.

Its public specification is the document "Relink" in `docs/reference/relink.md`, which links the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.core.events import Failed as Failed
from muxkit.core.events import GoingAway as GoingAway
from muxkit.core.events import HungUp as HungUp
from muxkit.core.events import Pong as Pong
from muxkit.core.events import Silent as Silent
from muxkit.core.events import Writable as Writable
from muxkit.protocols.relink.config import Config as Config
from muxkit.protocols.relink.engine import Engine as Engine
from muxkit.protocols.relink.events import Acknowledged as Acknowledged
from muxkit.protocols.relink.events import Agreed as Agreed
from muxkit.protocols.relink.events import Arrived as Arrived
from muxkit.protocols.relink.events import ChannelClosed as ChannelClosed
from muxkit.protocols.relink.events import ChannelOpened as ChannelOpened
from muxkit.protocols.relink.events import Committed as Committed
from muxkit.protocols.relink.events import Consumed as Consumed
from muxkit.protocols.relink.events import Ended as Ended
from muxkit.protocols.relink.events import EpochChanged as EpochChanged
from muxkit.protocols.relink.events import Event as Event
from muxkit.protocols.relink.events import HandshakeEvent as HandshakeEvent
from muxkit.protocols.relink.events import LinkFinished as LinkFinished
from muxkit.protocols.relink.events import LinkReplaced as LinkReplaced
from muxkit.protocols.relink.events import Received as Received
from muxkit.protocols.relink.events import Refused as Refused
from muxkit.protocols.relink.events import Requested as Requested
from muxkit.protocols.relink.events import Resumed as Resumed
from muxkit.protocols.relink.events import RolledBack as RolledBack
from muxkit.protocols.relink.events import Stalled as Stalled
from muxkit.protocols.relink.events import Uncommitted as Uncommitted
from muxkit.protocols.relink.frames import Ack as Ack
from muxkit.protocols.relink.frames import AckPacket as AckPacket
from muxkit.protocols.relink.frames import Bounds as Bounds
from muxkit.protocols.relink.frames import Format as Format
from muxkit.protocols.relink.frames import General as General
from muxkit.protocols.relink.frames import MessagePacket as MessagePacket
from muxkit.protocols.relink.frames import Operation as Operation
from muxkit.protocols.relink.frames import OperationPacket as OperationPacket
from muxkit.protocols.relink.frames import Packet as Packet
from muxkit.protocols.relink.frames import Parts as Parts
from muxkit.protocols.relink.frames import bounds_of as bounds_of
from muxkit.protocols.relink.frames import encode_packet as encode_packet
from muxkit.protocols.relink.frames import parse_packet as parse_packet
from muxkit.protocols.relink.handshake import ConnectorHandshake as ConnectorHandshake
from muxkit.protocols.relink.handshake import ListenerHandshake as ListenerHandshake
from muxkit.protocols.relink.handshake import encode_answer as encode_answer
from muxkit.protocols.relink.handshake import encode_request as encode_request
from muxkit.protocols.relink.handshake import encode_version as encode_version
from muxkit.protocols.relink.handshake import epoch_of as epoch_of
from muxkit.protocols.relink.handshake import mismatch as mismatch

if TYPE_CHECKING:
    from muxkit.protocols.relink._channels import Channel as Channel
    from muxkit.protocols.relink._channels import LinkChanged as LinkChanged
    from muxkit.protocols.relink._channels import LinkRefused as LinkRefused
    from muxkit.protocols.relink._channels import Message as Message
    from muxkit.protocols.relink._channels import NotCommitted as NotCommitted
    from muxkit.protocols.relink._channels import Outcome as Outcome
    from muxkit.protocols.relink._channels import Receipt as Receipt
    from muxkit.protocols.relink._channels import Receiver as Receiver
    from muxkit.protocols.relink._channels import RolledBackError as RolledBackError
    from muxkit.protocols.relink._channels import Sender as Sender
    from muxkit.protocols.relink._session import Link as Link
    from muxkit.protocols.relink.dial.connect import connect as connect
    from muxkit.protocols.relink.dial.connect import link as link
    from muxkit.protocols.relink.dial.connect import open_server as open_server
    from muxkit.protocols.relink.dial.connect import protocol as protocol
    from muxkit.protocols.relink.dial.connect import reconnecting as reconnecting
    from muxkit.protocols.relink.dial.connect import session as session
    from muxkit.protocols.relink.dial.listen import Endpoint as Endpoint
    from muxkit.protocols.relink.dial.listen import Identified as Identified
    from muxkit.protocols.relink.dial.listen import Keep as Keep
    from muxkit.protocols.relink.dial.listen import Listener as Listener
    from muxkit.protocols.relink.dial.listen import Listening as Listening
    from muxkit.protocols.relink.dial.listen import identity_of as identity_of
    from muxkit.protocols.relink.dial.listen import listen as listen
    from muxkit.protocols.relink.dial.listen import listener as listener

__all__ = [
    "Ack",
    "AckPacket",
    "Acknowledged",
    "Agreed",
    "Arrived",
    "Bounds",
    "Channel",
    "ChannelClosed",
    "ChannelOpened",
    "Committed",
    "Config",
    "ConnectorHandshake",
    "Consumed",
    "Ended",
    "Endpoint",
    "Engine",
    "EpochChanged",
    "Event",
    "Failed",
    "Format",
    "General",
    "GoingAway",
    "HandshakeEvent",
    "HungUp",
    "Identified",
    "Keep",
    "Link",
    "LinkChanged",
    "LinkFinished",
    "LinkRefused",
    "LinkReplaced",
    "Listener",
    "ListenerHandshake",
    "Listening",
    "Message",
    "MessagePacket",
    "NotCommitted",
    "Operation",
    "OperationPacket",
    "Outcome",
    "Packet",
    "Parts",
    "Pong",
    "Receipt",
    "Received",
    "Receiver",
    "Refused",
    "Requested",
    "Resumed",
    "RolledBack",
    "RolledBackError",
    "Sender",
    "Silent",
    "Stalled",
    "Uncommitted",
    "Writable",
    "bounds_of",
    "connect",
    "encode_answer",
    "encode_packet",
    "encode_request",
    "encode_version",
    "epoch_of",
    "identity_of",
    "link",
    "listen",
    "listener",
    "mismatch",
    "open_server",
    "parse_packet",
    "protocol",
    "reconnecting",
    "session",
]

# The engine works without Trio; what needs it is fetched when it is first asked for.
_LAZY = {
    "Channel LinkChanged LinkRefused NotCommitted RolledBackError": "_channels",
    "Message Outcome Receipt Receiver Sender": "_channels",
    "Link": "_session",
    "connect link open_server protocol reconnecting session": "dial.connect",
    "Endpoint Identified Keep Listener Listening identity_of listen listener": "dial.listen",
}

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
