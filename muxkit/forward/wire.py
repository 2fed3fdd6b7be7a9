"""The messages of forwards: a client's request in the opening of a channel, and the server's answer.

docs/reference/forward-protocol.md describes them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec
import trio

from muxkit._errors import MuxError
from muxkit.core import printable
from muxkit.runtime import Channel, LinkLost, Session

NAME = "muxkit.forward"
"""The name of every channel of a forward."""
REQUEST_MOST = 2048  # bytes
NUMBER_SIZE = 4  # bytes of a number before a datagram on an unreliable channel
END = b""
"""The message behind the last one of a direction. A direction that ends without it was reset."""


class Code(IntEnum):
    """Why something was refused or reset. The numbers are those of HTTP where it has one."""

    MALFORMED = 400
    """The request or its address is invalid."""
    NOT_ALLOWED = 403
    NOT_FOUND = 404
    """The host name is unknown."""
    IN_USE = 409
    """The address to listen on is in use."""
    GONE = 410
    """The listener, the connection or the forward has ended."""
    TOO_MANY = 429
    """The client has reached a limit."""
    RESET = 499
    """The forwarded connection was reset."""
    REFUSED = 502
    """The target refused the connection."""
    UNREACHABLE = 503
    TIMED_OUT = 504
    """The target didn't answer in time."""


PERMANENT = frozenset({Code.MALFORMED, Code.NOT_ALLOWED})
"""Refusals that asking again does not change."""


class ForwardRefused(MuxError):
    """The server refused a target or a listener. `reason` says why, and `code` is one of `Code`, or 0."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Connect(msgspec.Struct, frozen=True, tag_field="do", tag="connect"):
    """Connect to `target`, and forward the connection over this channel."""

    target: str


class Listen(msgspec.Struct, frozen=True, tag_field="do", tag="listen"):
    """Listen at `bind` until this channel ends."""

    bind: str


class Take(msgspec.Struct, frozen=True, tag_field="do", tag="take"):
    """Forward a connection that a listener has accepted over this channel."""

    listener: int
    connection: int


class Datagrams(msgspec.Struct, frozen=True, tag_field="do", tag="datagrams"):
    """Forward datagrams to `target` and back over this channel, until it ends."""

    target: str


class Done(msgspec.Struct, frozen=True, tag_field="answer", tag="done"):
    """The request succeeded. `address` was connected to or listened on; `listener` is its number."""

    address: str = ""
    listener: int = 0


class Refusal(msgspec.Struct, frozen=True, tag_field="answer", tag="refused"):
    """The request was refused."""

    reason: str
    code: int


class Accepted(msgspec.Struct, frozen=True):
    """The listener has accepted a connection, which the client may take."""

    connection: int
    peer: str = ""


class Dropped(msgspec.Struct, frozen=True):
    """The client does not take a connection."""

    connection: int
    reason: str = ""


Request = Connect | Listen | Take | Datagrams
Answer = Done | Refusal

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_MessageT = TypeVar("_MessageT", Accepted, Dropped)


def encode(message: msgspec.Struct) -> bytes:
    """Encode any of the messages."""
    return msgspec.json.encode(message)


def _quoting(error: Exception) -> str:
    """Return the text of a decoder error for a log. It quotes values of the peer."""
    return printable(str(error))


def decode_request(opening: bytes) -> Request:
    """Decode a client's request. Raises `ForwardRefused`."""
    try:
        if len(opening) > REQUEST_MOST:
            raise ForwardRefused(f"a request of {len(opening)} bytes: expected at most {REQUEST_MOST}", Code.MALFORMED)
        request: Request = _requests.decode(opening)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ForwardRefused(f"invalid request: {_quoting(error)}", Code.MALFORMED) from None
    return request


def decode_notice(message: bytes, kind: type[_MessageT]) -> _MessageT:
    """Decode a message about a connection of a listener. Raises `ForwardRefused`."""
    try:
        return msgspec.json.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ForwardRefused(f"invalid message: {_quoting(error)}", Code.MALFORMED) from None


async def ask(session: Session, request: Request) -> tuple[Channel, Done]:
    """Open a channel with a request, and wait for the answer. Raises `ForwardRefused` if the server refuses."""
    channel = await session.open(NAME, payload=encode(request))
    try:
        answer = _answers.decode(await channel.receive())
    except trio.EndOfChannel:
        channel.abort()
        raise ForwardRefused("the server ended the channel without an answer", 0) from None
    except LinkLost:
        channel.abort()
        raise
    except trio.BrokenResourceError as error:
        channel.abort()
        told = getattr(error, "reason", "") or "the server does not forward"
        raise ForwardRefused(told, getattr(error, "code", 0)) from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        channel.abort("invalid answer", code=Code.MALFORMED)
        raise ForwardRefused(f"invalid answer: {_quoting(error)}", Code.MALFORMED) from None
    except BaseException:
        channel.abort("given up", code=Code.GONE)
        raise
    if isinstance(answer, Refusal):
        await channel.aclose()
        raise ForwardRefused(printable(answer.reason), answer.code)
    return channel, msgspec.structs.replace(answer, address=printable(answer.address))
