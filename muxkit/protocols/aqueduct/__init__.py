"""Aqueduct: channels that carry channels, in ordered, unordered and unreliable messages, over QUIC or a byte stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.aqueduct.carrier import Carrier as Carrier
from muxkit.protocols.aqueduct.config import Config as Config
from muxkit.protocols.aqueduct.engine.engine import Engine as Engine
from muxkit.protocols.aqueduct.engine.engine import Statistics as Statistics
from muxkit.protocols.aqueduct.engine.events import Acked as Acked
from muxkit.protocols.aqueduct.engine.events import Arrived as Arrived
from muxkit.protocols.aqueduct.engine.events import Attachment as Attachment
from muxkit.protocols.aqueduct.engine.events import Connected as Connected
from muxkit.protocols.aqueduct.engine.events import Ended as Ended
from muxkit.protocols.aqueduct.engine.events import Event as Event
from muxkit.protocols.aqueduct.engine.events import Failed as Failed
from muxkit.protocols.aqueduct.engine.events import HungUp as HungUp
from muxkit.protocols.aqueduct.engine.events import Nacked as Nacked
from muxkit.protocols.aqueduct.engine.events import Parted as Parted
from muxkit.protocols.aqueduct.engine.events import Silent as Silent
from muxkit.protocols.aqueduct.engine.events import Unclaimed as Unclaimed
from muxkit.protocols.aqueduct.engine.events import Writable as Writable
from muxkit.protocols.aqueduct.engine.halves import Mode as Mode
from muxkit.protocols.aqueduct.engine.halves import Outcome as Outcome
from muxkit.protocols.aqueduct.engine.halves import Promise as Promise
from muxkit.protocols.aqueduct.engine.halves import ReceiverMachine as ReceiverMachine
from muxkit.protocols.aqueduct.engine.halves import SenderMachine as SenderMachine
from muxkit.protocols.aqueduct.engine.halves import Ticket as Ticket
from muxkit.protocols.aqueduct.frames import AckNackUnreliable as AckNackUnreliable
from muxkit.protocols.aqueduct.frames import AckReliable as AckReliable
from muxkit.protocols.aqueduct.frames import AckVersion as AckVersion
from muxkit.protocols.aqueduct.frames import Bounds as Bounds
from muxkit.protocols.aqueduct.frames import CancelSender as CancelSender
from muxkit.protocols.aqueduct.frames import CloseReceiver as CloseReceiver
from muxkit.protocols.aqueduct.frames import ConnectionHeaders as ConnectionHeaders
from muxkit.protocols.aqueduct.frames import FinishSender as FinishSender
from muxkit.protocols.aqueduct.frames import ForgetChannel as ForgetChannel
from muxkit.protocols.aqueduct.frames import Frame as Frame
from muxkit.protocols.aqueduct.frames import Headers as Headers
from muxkit.protocols.aqueduct.frames import MessageFrame as MessageFrame
from muxkit.protocols.aqueduct.frames import Role as Role
from muxkit.protocols.aqueduct.frames import RouteTo as RouteTo
from muxkit.protocols.aqueduct.frames import SentUnreliable as SentUnreliable
from muxkit.protocols.aqueduct.frames import Version as Version
from muxkit.protocols.aqueduct.frames import channel_id as channel_id
from muxkit.protocols.aqueduct.frames import encode_frame as encode_frame
from muxkit.protocols.aqueduct.frames import parse_frame as parse_frame

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._session.connection import Client as Client
    from muxkit.protocols.aqueduct._session.connection import Connection as Connection
    from muxkit.protocols.aqueduct._session.connection import Server as Server
    from muxkit.protocols.aqueduct._session.connection import connect as connect
    from muxkit.protocols.aqueduct._session.connection import connection as connection
    from muxkit.protocols.aqueduct._session.connection import open_server as open_server
    from muxkit.protocols.aqueduct._session.connection import protocol as protocol
    from muxkit.protocols.aqueduct._session.connection import reconnecting as reconnecting
    from muxkit.protocols.aqueduct._session.core import Cancelled as Cancelled
    from muxkit.protocols.aqueduct._session.core import Channel as Channel
    from muxkit.protocols.aqueduct._session.core import Finished as Finished
    from muxkit.protocols.aqueduct._session.core import LostInTransit as LostInTransit
    from muxkit.protocols.aqueduct._session.core import Message as Message
    from muxkit.protocols.aqueduct._session.core import NoReceiver as NoReceiver
    from muxkit.protocols.aqueduct._session.core import Receipt as Receipt
    from muxkit.protocols.aqueduct._session.core import Receiver as Receiver
    from muxkit.protocols.aqueduct._session.core import Sender as Sender

__all__ = [
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "Acked",
    "Arrived",
    "Attachment",
    "Bounds",
    "CancelSender",
    "Cancelled",
    "Carrier",
    "Channel",
    "Client",
    "CloseReceiver",
    "Config",
    "Connected",
    "Connection",
    "ConnectionHeaders",
    "Ended",
    "Engine",
    "Event",
    "Failed",
    "FinishSender",
    "Finished",
    "ForgetChannel",
    "Frame",
    "Headers",
    "HungUp",
    "LostInTransit",
    "Message",
    "MessageFrame",
    "Mode",
    "Nacked",
    "NoReceiver",
    "Outcome",
    "Parted",
    "Promise",
    "Receipt",
    "Receiver",
    "ReceiverMachine",
    "Role",
    "RouteTo",
    "Sender",
    "SenderMachine",
    "SentUnreliable",
    "Server",
    "Silent",
    "Statistics",
    "Ticket",
    "Unclaimed",
    "Version",
    "Writable",
    "channel_id",
    "connect",
    "connection",
    "encode_frame",
    "open_server",
    "parse_frame",
    "protocol",
    "reconnecting",
]

# The engine works without Trio; what needs Trio is imported when it is first asked for.
_LAZY = dict.fromkeys(("Client", "Connection", "Server", "connection", "protocol"), "_session.connection")
_LAZY |= dict.fromkeys(("Cancelled", "Finished", "LostInTransit", "Message", "NoReceiver"), "_session.core")
_LAZY |= dict.fromkeys(("Channel", "Receipt", "Receiver", "Sender"), "_session.core")
_LAZY |= dict.fromkeys(("connect", "open_server", "reconnecting"), "_session.connection")

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
