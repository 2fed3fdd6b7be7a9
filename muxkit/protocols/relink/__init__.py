"""Relink: messages, transactions and multicast over a link that outlives its connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
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

if TYPE_CHECKING:
    from muxkit.protocols.relink._session import Link as Link
    from muxkit.protocols.relink._session_channels import Channel as Channel
    from muxkit.protocols.relink._session_connect import link as link
    from muxkit.protocols.relink._session_errors import LinkChanged as LinkChanged
    from muxkit.protocols.relink._session_errors import LinkRefused as LinkRefused
    from muxkit.protocols.relink._session_errors import NotCommitted as NotCommitted
    from muxkit.protocols.relink._session_errors import RolledBackError as RolledBackError
    from muxkit.protocols.relink._session_ids import Identified as Identified
    from muxkit.protocols.relink._session_ids import identity_of as identity_of
    from muxkit.protocols.relink._session_listen import Endpoint as Endpoint
    from muxkit.protocols.relink._session_listen import Keep as Keep
    from muxkit.protocols.relink._session_listen import Listener as Listener
    from muxkit.protocols.relink._session_listen import Listening as Listening
    from muxkit.protocols.relink._session_listen import listen as listen
    from muxkit.protocols.relink._session_listen import listener as listener
    from muxkit.protocols.relink._session_plugin import protocol as protocol
    from muxkit.protocols.relink._session_plugin import session as session
    from muxkit.protocols.relink._session_receiving import Message as Message
    from muxkit.protocols.relink._session_receiving import Receiver as Receiver
    from muxkit.protocols.relink._session_sending import Outcome as Outcome
    from muxkit.protocols.relink._session_sending import Receipt as Receipt
    from muxkit.protocols.relink._session_sending import Sender as Sender

# The engine works without Trio; what needs it is fetched when it is first asked for.
_LAZY = {
    "Channel": "_session_channels",
    "Endpoint": "_session_listen",
    "Identified": "_session_ids",
    "Keep": "_session_listen",
    "Link": "_session",
    "LinkChanged": "_session_errors",
    "LinkRefused": "_session_errors",
    "Listener": "_session_listen",
    "Listening": "_session_listen",
    "Message": "_session_receiving",
    "NotCommitted": "_session_errors",
    "Outcome": "_session_sending",
    "Receipt": "_session_sending",
    "Receiver": "_session_receiving",
    "RolledBackError": "_session_errors",
    "Sender": "_session_sending",
    "identity_of": "_session_ids",
    "link": "_session_connect",
    "listen": "_session_listen",
    "listener": "_session_listen",
    "protocol": "_session_plugin",
    "session": "_session_plugin",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
