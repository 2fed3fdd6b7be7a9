"""Relink: messages, transactions and multicast over a link that outlives its connections.

The specification is the document "Relink Protocol", version 0 (draft). `docs/conformance.md` lists its clauses with the
tests for each. The document knows channels in one direction, which begin with a message. The two-way channels of muxkit
are built from these, with a few messages of muxkit's own.

    application    _session, _channels          links, channels, senders and receivers: the Trio side
                   _connection, dial            the machinery below a link, and where its connections come from
    channels       common                       two-way channels, as an engine on top of the link's
    halves         send, receive                what one channel may send, and what the peer learns of what came
    engine         engine, state                the face without I/O, the tables of channels and how they live
                   reader                       packets from bytes, checked and applied
                   probes, numbers              what pongs prove, and which message a number means
    grammar        frames, handshake, events, config
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.relink import events as events
from muxkit.protocols.relink import frames as frames
from muxkit.protocols.relink import handshake as handshake
from muxkit.protocols.relink.config import Config as Config
from muxkit.protocols.relink.engine import Engine as Engine
from muxkit.protocols.relink.events import EpochChanged as EpochChanged
from muxkit.protocols.relink.events import LinkReplaced as LinkReplaced

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
    "Channel",
    "Config",
    "Endpoint",
    "Engine",
    "EpochChanged",
    "Identified",
    "Keep",
    "Link",
    "LinkChanged",
    "LinkRefused",
    "LinkReplaced",
    "Listener",
    "Listening",
    "Message",
    "NotCommitted",
    "Outcome",
    "Receipt",
    "Receiver",
    "RolledBackError",
    "Sender",
    "connect",
    "events",
    "frames",
    "handshake",
    "identity_of",
    "link",
    "listen",
    "listener",
    "open_server",
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
