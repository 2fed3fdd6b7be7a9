"""The messages of forwards: what a client asks for with the opening of a channel, and what the server answers.

docs/reference/forward-protocol.md describes them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec
import trio

from muxkit import MuxError
from muxkit.core import printable
from muxkit.runtime import Channel, LinkLost, Session

NAME = "muxkit.forward"
"""The name of every channel of a forward."""
REQUEST_MOST = 2048  # bytes
NUMBER_SIZE = 4  # bytes of a number before a datagram on an unreliable channel
END = b""
"""The message behind the last one of a direction. A direction that ends without it was reset."""


class Code(IntEnum):
    """Why something was refused, or reset; the numbers are those of HTTP where it has one for it."""

    MALFORMED = 400
    """The request cannot be read, or its address is none."""
    NOT_ALLOWED = 403
    NOT_FOUND = 404
    """The name of the host is not known."""
    IN_USE = 409
    """The address to listen on is in use."""
    GONE = 410
    """The listener, the connection or the forward is over."""
    TOO_MANY = 429
    """A limit of this client is reached."""
    RESET = 499
    """The connection that was carried was reset."""
    REFUSED = 502
    """The target refused the connection."""
    UNREACHABLE = 503
    TIMED_OUT = 504
    """The target did not answer in time."""


PERMANENT = frozenset({Code.MALFORMED, Code.NOT_ALLOWED})
"""Refusals that asking again does not change."""


class ForwardRefused(MuxError):
    """The server refused a target or a listener; `reason` says why, `code` is one of `Code`, or 0."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Connect(msgspec.Struct, frozen=True, tag_field="do", tag="connect"):
    """Connect to `target`, and carry the connection on this channel."""

    target: str


class Listen(msgspec.Struct, frozen=True, tag_field="do", tag="listen"):
    """Listen at `bind` until this channel ends."""

    bind: str


class Take(msgspec.Struct, frozen=True, tag_field="do", tag="take"):
    """Carry a connection that a listener has accepted on this channel."""

    listener: int
    connection: int


class Datagrams(msgspec.Struct, frozen=True, tag_field="do", tag="datagrams"):
    """Carry datagrams to `target` and from there on this channel, until it ends."""

    target: str


class Done(msgspec.Struct, frozen=True, tag_field="answer", tag="done"):
    """It was done; `address` is what was connected to or listened on, `listener` the number of it."""

    address: str = ""
    listener: int = 0


class Refusal(msgspec.Struct, frozen=True, tag_field="answer", tag="refused"):
    """It was not done."""

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
    """Write any of the messages."""
    return msgspec.json.encode(message)


def _quoting(error: Exception) -> str:
    """Return the text of an error of the decoder for a log; it quotes values of the peer as they are."""
    return printable(str(error))


def decode_request(opening: bytes) -> Request:
    """Read what a client asks for; raises `ForwardRefused`."""
    try:
        if len(opening) > REQUEST_MOST:
            raise ForwardRefused(f"a request of {len(opening)} bytes, at most {REQUEST_MOST}", Code.MALFORMED)
        request: Request = _requests.decode(opening)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ForwardRefused(f"the request cannot be read: {_quoting(error)}", Code.MALFORMED) from None
    return request


def decode_notice(message: bytes, kind: type[_MessageT]) -> _MessageT:
    """Read a message about a connection of a listener; raises `ForwardRefused`."""
    try:
        return msgspec.json.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ForwardRefused(f"a message that cannot be read: {_quoting(error)}", Code.MALFORMED) from None


async def ask(session: Session, request: Request) -> tuple[Channel, Done]:
    """Open a channel with a request, and wait for the answer; raises `ForwardRefused` for a refusal."""
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
        channel.abort("the answer cannot be read", code=Code.MALFORMED)
        raise ForwardRefused(f"the answer cannot be read: {_quoting(error)}", Code.MALFORMED) from None
    except BaseException:
        channel.abort("given up", code=Code.GONE)
        raise
    if isinstance(answer, Refusal):
        await channel.aclose()
        raise ForwardRefused(printable(answer.reason), answer.code)
    return channel, msgspec.structs.replace(answer, address=printable(answer.address))
