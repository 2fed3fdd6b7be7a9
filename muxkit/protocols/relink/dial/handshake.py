"""The handshake over a Trio stream, for connector and listener, with the identities and keys that it needs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import time
from typing import Final, Protocol, runtime_checkable

import trio

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.relink._session.core import Core
from muxkit.protocols.relink.engine.events import Agreed, Failed, Refused, Requested
from muxkit.protocols.relink.handshake import (
    LARGEST_LINK_ID,
    MOST_BYTES,
    ConnectorHandshake,
    ListenerHandshake,
    epoch_of,
)
from muxkit.runtime import prefixed

READ: Final = 64 * 1024  # bytes to ask for; packets may follow the answer at once


async def ask(stream: trio.abc.Stream, core: Core) -> tuple[Agreed | Refused, trio.abc.Stream]:
    """Ask a listener for the link that `core` has, or for a new one.

    Raises `RemoteProtocolError` for an answer that breaks the rules, ConnectionError when the listener hangs up, as it
    does about an endpoint that it does not know, TooSlowError, and Trio's errors of a stream that breaks.
    """
    handshake = ConnectorHandshake(
        core.config,
        now=trio.current_time(),
        epoch=core.engine.epoch,
        link_id=core.engine.link_id,
        limits=core.limits,
    )
    with trio.move_on_after(core.limits.handshake):
        while True:
            for buffer in handshake.buffers_to_send():
                await stream.send_all(buffer)
            data = await stream.receive_some(READ)
            if not data:
                raise ConnectionResetError(
                    f"the listener hung up during the handshake; it may not know the endpoint "
                    f"{core.config.endpoint!r}, or not in this form"
                )
            handshake.receive_bytes(bytes(data), trio.current_time())
            for event in handshake.events():
                if isinstance(event, (Agreed, Refused)):
                    return event, prefixed(stream, handshake.rest())
                if isinstance(event, Failed):
                    raise event.error
    raise trio.TooSlowError(f"the handshake was not done within {core.limits.handshake:g} s")


class RequestReader:
    """Reads a connector's request, for `HandshakeQueue.read_handshake`; the answer is a call on `handshake`."""

    MOST: Final = MOST_BYTES

    def __init__(self, limits: Limits, versions: tuple[int, ...] = (0,)) -> None:
        self.handshake = ListenerHandshake(now=trio.current_time(), versions=versions, limits=limits)

    def receive_bytes(self, data: bytes) -> Requested | None:
        self.handshake.receive_bytes(data, trio.current_time())
        for event in self.handshake.events():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Requested):
                return event
        return None

    def bytes_to_send(self) -> bytes:
        return b"".join(self.handshake.buffers_to_send())

    def leftover(self) -> bytes:
        return self.handshake.rest()


async def answer(stream: trio.abc.Stream, reader: RequestReader, limits: Limits) -> bool:
    """Write the listener's answer; return False if the stream is broken or too slow."""
    try:
        with trio.move_on_after(limits.handshake):
            await stream.send_all(reader.bytes_to_send())
            return True
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    return False


def unknown(request: Requested) -> RemoteProtocolError:
    return RemoteProtocolError(f"there is no endpoint {request.endpoint!r} here", rule="relink-H22")


UNIDENTIFIED = b""


@runtime_checkable
class Identified(Protocol):
    """A stream with an authenticated peer: for TLS, the certificate whose private key the peer proved to own."""

    @property
    def identity(self) -> bytes | None: ...


def identity_of(stream: trio.abc.Stream) -> bytes | None:
    """`identity` of the stream, if it has that; of a `trio.SSLStream` the peer's certificate, if it was verified."""
    if isinstance(stream, Identified):
        return stream.identity
    certificate = getattr(stream, "getpeercert", None)  # these two are passed on by it
    context = getattr(stream, "context", None)
    if certificate is None or context is None or context.verify_mode is ssl.CERT_NONE:
        return None
    proved: bytes | None = certificate(binary_form=True)
    return proved


def fingerprint(identity: bytes | None) -> bytes:
    """Hash an identity to a fixed size, since one is kept with each link."""
    return UNIDENTIFIED if identity is None else hashlib.sha256(identity).digest()


def new_epoch() -> int:
    return epoch_of(time.time())


def new_link_id() -> int:
    return 1 + secrets.randbelow(LARGEST_LINK_ID)


class HiddenKeys:
    """Maps link ids to secret table keys, so that lookup time reveals nothing about the ids in the table."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def key(self, link_id: int) -> bytes:
        return hashlib.blake2b(link_id.to_bytes(8, "little"), key=self._secret).digest()


def is_same(link_id: int, asked: int, owner: bytes, who: bytes) -> bool:
    """Compare id and identity in a time that does not depend on where they differ."""
    same_id = hmac.compare_digest(link_id.to_bytes(8, "little"), asked.to_bytes(8, "little"))
    return hmac.compare_digest(owner, who) and same_id
