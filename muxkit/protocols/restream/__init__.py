"""restream: reliable data streaming; a client that reconnects loses no message and gets none twice."""

from __future__ import annotations

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
    from muxkit.protocols.restream.applications import Application as Application
    from muxkit.protocols.restream.applications import Doubling as Doubling
    from muxkit.protocols.restream.applications import Fed as Fed
    from muxkit.protocols.restream.applications import Numbers as Numbers
    from muxkit.protocols.restream.applications import NumbersVerifier as NumbersVerifier
    from muxkit.protocols.restream.applications import Permutation as Permutation
    from muxkit.protocols.restream.applications import StatelessApplication as StatelessApplication
    from muxkit.protocols.restream.applications import Unverified as Unverified
    from muxkit.protocols.restream.applications import Verifier as Verifier
    from muxkit.protocols.restream.client import ClientPolicy as ClientPolicy
    from muxkit.protocols.restream.client import Reader as Reader
    from muxkit.protocols.restream.client import StreamRefused as StreamRefused
    from muxkit.protocols.restream.client import integers as integers
    from muxkit.protocols.restream.client import numbers as numbers
    from muxkit.protocols.restream.client import status as status
    from muxkit.protocols.restream.client import stream as stream
    from muxkit.protocols.restream.engine import Acknowledged as Acknowledged
    from muxkit.protocols.restream.engine import ClientConfig as ClientConfig
    from muxkit.protocols.restream.engine import ClientEngine as ClientEngine
    from muxkit.protocols.restream.engine import ClientEvent as ClientEvent
    from muxkit.protocols.restream.engine import Failed as Failed
    from muxkit.protocols.restream.engine import Finished as Finished
    from muxkit.protocols.restream.engine import HungUp as HungUp
    from muxkit.protocols.restream.engine import ListingReceived as ListingReceived
    from muxkit.protocols.restream.engine import ListingRequested as ListingRequested
    from muxkit.protocols.restream.engine import Phase as Phase
    from muxkit.protocols.restream.engine import Received as Received
    from muxkit.protocols.restream.engine import ReceivedValue as ReceivedValue
    from muxkit.protocols.restream.engine import Refused as Refused
    from muxkit.protocols.restream.engine import Registered as Registered
    from muxkit.protocols.restream.engine import Resumed as Resumed
    from muxkit.protocols.restream.engine import ServerConfig as ServerConfig
    from muxkit.protocols.restream.engine import ServerEngine as ServerEngine
    from muxkit.protocols.restream.engine import ServerEvent as ServerEvent
    from muxkit.protocols.restream.engine import Silent as Silent
    from muxkit.protocols.restream.engine import StatelessRequested as StatelessRequested
    from muxkit.protocols.restream.engine import StatusReceived as StatusReceived
    from muxkit.protocols.restream.engine import StatusRequested as StatusRequested
    from muxkit.protocols.restream.engine import StreamState as StreamState
    from muxkit.protocols.restream.plugin import protocol as protocol
    from muxkit.protocols.restream.server import Served as Served
    from muxkit.protocols.restream.server import Service as Service
    from muxkit.protocols.restream.server import Sessions as Sessions
    from muxkit.protocols.restream.server import serve as serve
    from muxkit.protocols.restream.store import IdsExhausted as IdsExhausted
    from muxkit.protocols.restream.store import Message as Message
    from muxkit.protocols.restream.store import NotJson as NotJson
    from muxkit.protocols.restream.store import Retention as Retention
    from muxkit.protocols.restream.store import SessionExists as SessionExists
    from muxkit.protocols.restream.store import SessionExpired as SessionExpired
    from muxkit.protocols.restream.store import SessionFinished as SessionFinished
    from muxkit.protocols.restream.store import StoreLimits as StoreLimits
    from muxkit.protocols.restream.store import UnknownSession as UnknownSession
    from muxkit.protocols.restream.store import open_store as open_store
    from muxkit.protocols.restream.wire import INLINE_DIGITS as INLINE_DIGITS
    from muxkit.protocols.restream.wire import ErrorCode as ErrorCode
    from muxkit.protocols.restream.wire import Json as Json
    from muxkit.protocols.restream.wire import JsonObject as JsonObject
    from muxkit.protocols.restream.wire import ListedSession as ListedSession
    from muxkit.protocols.restream.wire import Listing as Listing
    from muxkit.protocols.restream.wire import Record as Record
    from muxkit.protocols.restream.wire import Status as Status
    from muxkit.protocols.restream.wire import encode_message as encode_message
    from muxkit.protocols.restream.wire import format_integer as format_integer
    from muxkit.protocols.restream.wire import new_uuid as new_uuid
    from muxkit.protocols.restream.wire import parse_integer as parse_integer
    from muxkit.storage import StoreCorrupt as StoreCorrupt
    from muxkit.storage import StoreError as StoreError
    from muxkit.storage import StoreFailed as StoreFailed
    from muxkit.storage import StoreFull as StoreFull
    from muxkit.storage import StoreLocked as StoreLocked
