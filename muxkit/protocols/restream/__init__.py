"""restream: reliable data streaming; a client that drops and comes back loses, repeats and invents no message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.restream.applications import Application as Application
from muxkit.protocols.restream.applications import Doubling as Doubling
from muxkit.protocols.restream.applications import Fed as Fed
from muxkit.protocols.restream.applications import Numbers as Numbers
from muxkit.protocols.restream.applications import Permutation as Permutation
from muxkit.protocols.restream.applications import StatelessApplication as StatelessApplication
from muxkit.protocols.restream.engine.client import ClientEngine as ClientEngine
from muxkit.protocols.restream.engine.config import ClientConfig as ClientConfig
from muxkit.protocols.restream.engine.config import ServerConfig as ServerConfig
from muxkit.protocols.restream.engine.events import Acknowledged as Acknowledged
from muxkit.protocols.restream.engine.events import ClientEvent as ClientEvent
from muxkit.protocols.restream.engine.events import Failed as Failed
from muxkit.protocols.restream.engine.events import Finished as Finished
from muxkit.protocols.restream.engine.events import HungUp as HungUp
from muxkit.protocols.restream.engine.events import Received as Received
from muxkit.protocols.restream.engine.events import ReceivedValue as ReceivedValue
from muxkit.protocols.restream.engine.events import Refused as Refused
from muxkit.protocols.restream.engine.events import Registered as Registered
from muxkit.protocols.restream.engine.events import Resumed as Resumed
from muxkit.protocols.restream.engine.events import ServerEvent as ServerEvent
from muxkit.protocols.restream.engine.events import Silent as Silent
from muxkit.protocols.restream.engine.events import StatelessRequested as StatelessRequested
from muxkit.protocols.restream.engine.events import StatusReceived as StatusReceived
from muxkit.protocols.restream.engine.events import StatusRequested as StatusRequested
from muxkit.protocols.restream.engine.server import Phase as Phase
from muxkit.protocols.restream.engine.server import ServerEngine as ServerEngine
from muxkit.protocols.restream.engine.snapshot import Standing as Standing
from muxkit.protocols.restream.store.errors import IdsExhausted as IdsExhausted
from muxkit.protocols.restream.store.errors import NotJson as NotJson
from muxkit.protocols.restream.store.errors import SessionExists as SessionExists
from muxkit.protocols.restream.store.errors import SessionExpired as SessionExpired
from muxkit.protocols.restream.store.errors import SessionFinished as SessionFinished
from muxkit.protocols.restream.store.errors import StoreCorrupt as StoreCorrupt
from muxkit.protocols.restream.store.errors import StoreError as StoreError
from muxkit.protocols.restream.store.errors import StoreFailed as StoreFailed
from muxkit.protocols.restream.store.errors import StoreFull as StoreFull
from muxkit.protocols.restream.store.errors import StoreLocked as StoreLocked
from muxkit.protocols.restream.store.errors import UnknownSession as UnknownSession
from muxkit.protocols.restream.store.protocol import Message as Message
from muxkit.protocols.restream.store.protocol import StoreLimits as StoreLimits
from muxkit.protocols.restream.verifiers import NumbersVerifier as NumbersVerifier
from muxkit.protocols.restream.verifiers import Unverified as Unverified
from muxkit.protocols.restream.verifiers import Verifier as Verifier
from muxkit.protocols.restream.wire.integers import INLINE_DIGITS as INLINE_DIGITS
from muxkit.protocols.restream.wire.integers import format_integer as format_integer
from muxkit.protocols.restream.wire.integers import parse_integer as parse_integer
from muxkit.protocols.restream.wire.json import Json as Json
from muxkit.protocols.restream.wire.json import JsonObject as JsonObject
from muxkit.protocols.restream.wire.messages import Status as Status
from muxkit.protocols.restream.wire.messages import encode_message as encode_message
from muxkit.protocols.restream.wire.messages import new_uuid as new_uuid

if TYPE_CHECKING:
    from muxkit.protocols.restream.client.policy import ClientPolicy as ClientPolicy
    from muxkit.protocols.restream.client.policy import StreamRefused as StreamRefused
    from muxkit.protocols.restream.client.reader import Reader as Reader
    from muxkit.protocols.restream.client.streams import integers as integers
    from muxkit.protocols.restream.client.streams import numbers as numbers
    from muxkit.protocols.restream.client.streams import status as status
    from muxkit.protocols.restream.client.streams import stream as stream
    from muxkit.protocols.restream.plugin import protocol as protocol
    from muxkit.protocols.restream.server.backend import Sessions as Sessions
    from muxkit.protocols.restream.server.server import Served as Served
    from muxkit.protocols.restream.server.server import Service as Service
    from muxkit.protocols.restream.server.server import serve as serve
    from muxkit.protocols.restream.store.open import open_store as open_store

# The engines work without Trio; what needs it is fetched when it is first asked for: name -> module.
_LAZY: dict[str, str] = {
    "ClientPolicy": "client.policy",
    "Reader": "client.reader",
    "Served": "server.server",
    "Service": "server.server",
    "Sessions": "server.backend",
    "StreamRefused": "client.policy",
    "integers": "client.streams",
    "numbers": "client.streams",
    "protocol": "plugin",
    "open_store": "store.open",
    "serve": "server.server",
    "status": "client.streams",
    "stream": "client.streams",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
