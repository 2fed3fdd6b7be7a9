"""The lines of restream: strict JSON, integers of any size, and the messages of both sides; no state."""

from muxkit.protocols.restream.wire.blocks import Block as Block
from muxkit.protocols.restream.wire.integers import INLINE_DIGITS as INLINE_DIGITS
from muxkit.protocols.restream.wire.integers import format_integer as format_integer
from muxkit.protocols.restream.wire.integers import parse_integer as parse_integer
from muxkit.protocols.restream.wire.json import Json as Json
from muxkit.protocols.restream.wire.json import JsonObject as JsonObject
from muxkit.protocols.restream.wire.json import check_depth as check_depth
from muxkit.protocols.restream.wire.messages import ErrorCode as ErrorCode
from muxkit.protocols.restream.wire.messages import ListedSession as ListedSession
from muxkit.protocols.restream.wire.messages import Listing as Listing
from muxkit.protocols.restream.wire.messages import Message as Message
from muxkit.protocols.restream.wire.messages import RequestRefused as RequestRefused
from muxkit.protocols.restream.wire.messages import Status as Status
from muxkit.protocols.restream.wire.messages import Statuses as Statuses
from muxkit.protocols.restream.wire.messages import StoredMessage as StoredMessage
from muxkit.protocols.restream.wire.messages import beyond as beyond
from muxkit.protocols.restream.wire.messages import encode_message as encode_message
from muxkit.protocols.restream.wire.messages import gone as gone
from muxkit.protocols.restream.wire.messages import new_uuid as new_uuid

__all__ = [
    "INLINE_DIGITS",
    "ErrorCode",
    "Json",
    "JsonObject",
    "Message",
    "RequestRefused",
    "Status",
    "Statuses",
    "StoredMessage",
    "beyond",
    "check_depth",
    "encode_message",
    "format_integer",
    "gone",
    "new_uuid",
    "parse_integer",
]
from muxkit.protocols.restream.wire.records import Record as Record
