"""Relink: messages, transactions and multicast over a link that outlives its connections.

The specification is the document "Relink Protocol", version 0 (draft). `docs/conformance.md` lists its clauses with the
tests for each clause. The document defines channels with one direction, which begin with a message. `common` builds
muxkit's two-way channels from them.

The modules form layers, from the top:

    application    _session, _channels          links, channels, senders and receivers, for Trio programs
                   _connection, dial            the implementation below a link, dialling and listening
    channels       common                       two-way channels, as a second engine on top of the link's engine
    halves         send, receive                the rules for one channel that we send on or receive from
    engine         engine, state                the engine without I/O, and the state of a link
                   reader                       parsing, checking and applying received packets
                   probes, numbers              pings that prove something, and sequence numbers
    grammar        frames, handshake, events, config
"""

from __future__ import annotations

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
    from muxkit.protocols.relink import events as events
    from muxkit.protocols.relink import frames as frames
    from muxkit.protocols.relink import handshake as handshake
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
    from muxkit.protocols.relink.config import Config as Config
    from muxkit.protocols.relink.dial.connect import ConnectOptions as ConnectOptions
    from muxkit.protocols.relink.dial.connect import ReconnectOptions as ReconnectOptions
    from muxkit.protocols.relink.dial.connect import ServeOptions as ServeOptions
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
    from muxkit.protocols.relink.engine import Engine as Engine
    from muxkit.protocols.relink.events import EpochChanged as EpochChanged
    from muxkit.protocols.relink.events import LinkReplaced as LinkReplaced
