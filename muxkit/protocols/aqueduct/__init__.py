"""Aqueduct: channels that carry channels, in ordered, unordered and unreliable messages, over QUIC or a byte stream.

Its public specification is `PROTOCOL.md` in the repository `gretchenfrage/aqueduct`.

A message may have halves of new channels attached to it, so an application passes a channel on by sending it. Channels
have one direction. `connection` runs a session on a link, and the peer's first message comes from its `entrypoint`.
Every session also has the two-way channels of all protocols, with `open` and `incoming`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.aqueduct.carrier import Carrier as Carrier
from muxkit.protocols.aqueduct.config import Config as Config
from muxkit.protocols.aqueduct.engine import Engine as Engine
from muxkit.protocols.aqueduct.frames import Role as Role
from muxkit.protocols.aqueduct.send import Mode as Mode
from muxkit.protocols.aqueduct.send import Ticket as Ticket

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._channels import Cancelled as Cancelled
    from muxkit.protocols.aqueduct._channels import Channel as Channel
    from muxkit.protocols.aqueduct._channels import Finished as Finished
    from muxkit.protocols.aqueduct._channels import LostInTransit as LostInTransit
    from muxkit.protocols.aqueduct._channels import Message as Message
    from muxkit.protocols.aqueduct._channels import NoReceiver as NoReceiver
    from muxkit.protocols.aqueduct._channels import Receipt as Receipt
    from muxkit.protocols.aqueduct._channels import Receiver as Receiver
    from muxkit.protocols.aqueduct._channels import Sender as Sender
    from muxkit.protocols.aqueduct._session import Client as Client
    from muxkit.protocols.aqueduct._session import ConnectOptions as ConnectOptions
    from muxkit.protocols.aqueduct._session import ReconnectOptions as ReconnectOptions
    from muxkit.protocols.aqueduct._session import ServeOptions as ServeOptions
    from muxkit.protocols.aqueduct._session import Server as Server
    from muxkit.protocols.aqueduct._session import Session as Session
    from muxkit.protocols.aqueduct._session import connect as connect
    from muxkit.protocols.aqueduct._session import connection as connection
    from muxkit.protocols.aqueduct._session import open_server as open_server
    from muxkit.protocols.aqueduct._session import protocol as protocol
    from muxkit.protocols.aqueduct._session import reconnecting as reconnecting

__all__ = [
    "Cancelled",
    "Carrier",
    "Channel",
    "Client",
    "Config",
    "ConnectOptions",
    "Engine",
    "Finished",
    "LostInTransit",
    "Message",
    "Mode",
    "NoReceiver",
    "Receipt",
    "Receiver",
    "ReconnectOptions",
    "Role",
    "Sender",
    "ServeOptions",
    "Server",
    "Session",
    "Ticket",
    "connect",
    "connection",
    "open_server",
    "protocol",
    "reconnecting",
]

# The engine works without Trio; what needs it is imported when it is first used.
_LAZY = {
    "ConnectOptions ReconnectOptions ServeOptions": "_session",
    "Cancelled Channel Finished LostInTransit Message NoReceiver Receipt Receiver Sender": "_channels",
    "Client Server Session connect connection open_server protocol reconnecting": "_session",
}

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
