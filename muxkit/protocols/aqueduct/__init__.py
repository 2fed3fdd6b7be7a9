"""Aqueduct: channels that carry channels, in ordered, unordered and unreliable messages, over QUIC or a byte stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.aqueduct._carrier import Carrier as Carrier
from muxkit.protocols.aqueduct._channels import Ticket as Ticket
from muxkit.protocols.aqueduct._config import Config as Config
from muxkit.protocols.aqueduct._engine import Engine as Engine
from muxkit.protocols.aqueduct._engine import Statistics as Statistics
from muxkit.protocols.aqueduct._events import Acked as Acked
from muxkit.protocols.aqueduct._events import Arrived as Arrived
from muxkit.protocols.aqueduct._events import Attachment as Attachment
from muxkit.protocols.aqueduct._events import Connected as Connected
from muxkit.protocols.aqueduct._events import Ended as Ended
from muxkit.protocols.aqueduct._events import Event as Event
from muxkit.protocols.aqueduct._events import Failed as Failed
from muxkit.protocols.aqueduct._events import HungUp as HungUp
from muxkit.protocols.aqueduct._events import Nacked as Nacked
from muxkit.protocols.aqueduct._events import Outcome as Outcome
from muxkit.protocols.aqueduct._events import Silent as Silent
from muxkit.protocols.aqueduct._events import Unclaimed as Unclaimed
from muxkit.protocols.aqueduct._events import Writable as Writable
from muxkit.protocols.aqueduct._frames import AckNackUnreliable as AckNackUnreliable
from muxkit.protocols.aqueduct._frames import AckReliable as AckReliable
from muxkit.protocols.aqueduct._frames import AckVersion as AckVersion
from muxkit.protocols.aqueduct._frames import Bounds as Bounds
from muxkit.protocols.aqueduct._frames import CancelSender as CancelSender
from muxkit.protocols.aqueduct._frames import CloseReceiver as CloseReceiver
from muxkit.protocols.aqueduct._frames import ConnectionHeaders as ConnectionHeaders
from muxkit.protocols.aqueduct._frames import FinishSender as FinishSender
from muxkit.protocols.aqueduct._frames import ForgetChannel as ForgetChannel
from muxkit.protocols.aqueduct._frames import Frame as Frame
from muxkit.protocols.aqueduct._frames import MessageFrame as MessageFrame
from muxkit.protocols.aqueduct._frames import RouteTo as RouteTo
from muxkit.protocols.aqueduct._frames import SentUnreliable as SentUnreliable
from muxkit.protocols.aqueduct._frames import Version as Version
from muxkit.protocols.aqueduct._frames import encode_frame as encode_frame
from muxkit.protocols.aqueduct._frames import parse_frame as parse_frame
from muxkit.protocols.aqueduct._ids import Role as Role
from muxkit.protocols.aqueduct._ids import channel_id as channel_id
from muxkit.protocols.aqueduct._receiving import ReceiverMachine as ReceiverMachine
from muxkit.protocols.aqueduct._sending import Mode as Mode
from muxkit.protocols.aqueduct._sending import Promise as Promise
from muxkit.protocols.aqueduct._sending import SenderMachine as SenderMachine
from muxkit.protocols.aqueduct._varint import Headers as Headers

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._session import Client as Client
    from muxkit.protocols.aqueduct._session import Connection as Connection
    from muxkit.protocols.aqueduct._session import Server as Server
    from muxkit.protocols.aqueduct._session import connection as connection
    from muxkit.protocols.aqueduct._session import protocol as protocol
    from muxkit.protocols.aqueduct._session_channels import Channel as Channel
    from muxkit.protocols.aqueduct._session_errors import Cancelled as Cancelled
    from muxkit.protocols.aqueduct._session_errors import Finished as Finished
    from muxkit.protocols.aqueduct._session_errors import LostInTransit as LostInTransit
    from muxkit.protocols.aqueduct._session_errors import NoReceiver as NoReceiver
    from muxkit.protocols.aqueduct._session_receiving import Message as Message
    from muxkit.protocols.aqueduct._session_receiving import Receiver as Receiver
    from muxkit.protocols.aqueduct._session_sending import Receipt as Receipt
    from muxkit.protocols.aqueduct._session_sending import Sender as Sender

# The engine works without Trio; what needs it is fetched when it is first asked for.
_LAZY = {
    "Cancelled": "_session_errors",
    "Channel": "_session_channels",
    "Client": "_session",
    "Connection": "_session",
    "Finished": "_session_errors",
    "LostInTransit": "_session_errors",
    "Message": "_session_receiving",
    "NoReceiver": "_session_errors",
    "Receipt": "_session_sending",
    "Receiver": "_session_receiving",
    "Sender": "_session_sending",
    "Server": "_session",
    "connection": "_session",
    "protocol": "_session",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
