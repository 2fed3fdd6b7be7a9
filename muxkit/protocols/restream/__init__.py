"""restream: reliable data streaming; a client that drops and comes back loses, repeats and invents no message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.restream._applications import Application as Application
from muxkit.protocols.restream._applications import Doubling as Doubling
from muxkit.protocols.restream._applications import Fed as Fed
from muxkit.protocols.restream._applications import Numbers as Numbers
from muxkit.protocols.restream._applications import Permutation as Permutation
from muxkit.protocols.restream._applications import StatelessApplication as StatelessApplication
from muxkit.protocols.restream._client_engine import ClientEngine as ClientEngine
from muxkit.protocols.restream._config import ClientConfig as ClientConfig
from muxkit.protocols.restream._config import ServerConfig as ServerConfig
from muxkit.protocols.restream._events import Acknowledged as Acknowledged
from muxkit.protocols.restream._events import ClientEvent as ClientEvent
from muxkit.protocols.restream._events import Failed as Failed
from muxkit.protocols.restream._events import Finished as Finished
from muxkit.protocols.restream._events import HungUp as HungUp
from muxkit.protocols.restream._events import Received as Received
from muxkit.protocols.restream._events import ReceivedValue as ReceivedValue
from muxkit.protocols.restream._events import Refused as Refused
from muxkit.protocols.restream._events import Registered as Registered
from muxkit.protocols.restream._events import Resumed as Resumed
from muxkit.protocols.restream._events import ServerEvent as ServerEvent
from muxkit.protocols.restream._events import Silent as Silent
from muxkit.protocols.restream._events import StatelessRequested as StatelessRequested
from muxkit.protocols.restream._events import StatusReceived as StatusReceived
from muxkit.protocols.restream._events import StatusRequested as StatusRequested
from muxkit.protocols.restream._integers import INLINE_DIGITS as INLINE_DIGITS
from muxkit.protocols.restream._integers import format_integer as format_integer
from muxkit.protocols.restream._integers import parse_integer as parse_integer
from muxkit.protocols.restream._json import Json as Json
from muxkit.protocols.restream._json import JsonObject as JsonObject
from muxkit.protocols.restream._messages import Status as Status
from muxkit.protocols.restream._messages import encode_message as encode_message
from muxkit.protocols.restream._messages import new_uuid as new_uuid
from muxkit.protocols.restream._saved import Standing as Standing
from muxkit.protocols.restream._server_engine import Phase as Phase
from muxkit.protocols.restream._server_engine import ServerEngine as ServerEngine
from muxkit.protocols.restream._stores._errors import IdsExhausted as IdsExhausted
from muxkit.protocols.restream._stores._errors import NotJson as NotJson
from muxkit.protocols.restream._stores._errors import SessionExists as SessionExists
from muxkit.protocols.restream._stores._errors import SessionExpired as SessionExpired
from muxkit.protocols.restream._stores._errors import SessionFinished as SessionFinished
from muxkit.protocols.restream._stores._errors import StoreCorrupt as StoreCorrupt
from muxkit.protocols.restream._stores._errors import StoreError as StoreError
from muxkit.protocols.restream._stores._errors import StoreFailed as StoreFailed
from muxkit.protocols.restream._stores._errors import StoreFull as StoreFull
from muxkit.protocols.restream._stores._errors import StoreLocked as StoreLocked
from muxkit.protocols.restream._stores._errors import UnknownSession as UnknownSession
from muxkit.protocols.restream._stores._protocol import Message as Message
from muxkit.protocols.restream._stores._protocol import StoreLimits as StoreLimits
from muxkit.protocols.restream._verifiers import NumbersVerifier as NumbersVerifier
from muxkit.protocols.restream._verifiers import Unverified as Unverified
from muxkit.protocols.restream._verifiers import Verifier as Verifier

if TYPE_CHECKING:
    from muxkit.protocols.restream._session_client import integers as integers
    from muxkit.protocols.restream._session_client import numbers as numbers
    from muxkit.protocols.restream._session_client import status as status
    from muxkit.protocols.restream._session_client import stream as stream
    from muxkit.protocols.restream._session_client_policy import ClientPolicy as ClientPolicy
    from muxkit.protocols.restream._session_client_policy import StreamRefused as StreamRefused
    from muxkit.protocols.restream._session_client_reader import Reader as Reader
    from muxkit.protocols.restream._session_plugin import protocol as protocol
    from muxkit.protocols.restream._session_server import Served as Served
    from muxkit.protocols.restream._session_server import Service as Service
    from muxkit.protocols.restream._session_server import serve as serve
    from muxkit.protocols.restream._session_server_sessions import Sessions as Sessions
    from muxkit.protocols.restream._stores._open import open_store as open_store

# The engines work without Trio; what needs it is fetched when it is first asked for: name -> module.
_LAZY: dict[str, str] = {
    "ClientPolicy": "_session_client_policy",
    "Reader": "_session_client_reader",
    "Served": "_session_server",
    "Service": "_session_server",
    "Sessions": "_session_server_sessions",
    "StreamRefused": "_session_client_policy",
    "integers": "_session_client",
    "numbers": "_session_client",
    "protocol": "_session_plugin",
    "open_store": "_stores._open",
    "serve": "_session_server",
    "status": "_session_client",
    "stream": "_session_client",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
