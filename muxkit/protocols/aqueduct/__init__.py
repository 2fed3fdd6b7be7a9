"""Aqueduct: channels that carry channels, in ordered, unordered and unreliable messages, over QUIC or a byte stream.

Its public specification is `PROTOCOL.md` in the repository `gretchenfrage/aqueduct`.

A message may have halves of new channels attached to it, so an application passes a channel on by sending it. Channels
have one direction. `connection` runs a session on a link, and the peer's first message comes from its `entrypoint`.
Every session also has the two-way channels of all protocols, with `open` and `incoming`.
"""

from __future__ import annotations

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
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
    from muxkit.protocols.aqueduct.carrier import Carrier as Carrier
    from muxkit.protocols.aqueduct.config import Config as Config
    from muxkit.protocols.aqueduct.engine import Engine as Engine
    from muxkit.protocols.aqueduct.frames import Role as Role
    from muxkit.protocols.aqueduct.send import Mode as Mode
    from muxkit.protocols.aqueduct.send import Ticket as Ticket
