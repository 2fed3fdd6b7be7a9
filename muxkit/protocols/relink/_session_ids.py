"""Who may take a link over? Whoever knows its 63 random bits, and is who he was when it was made."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from muxkit.protocols.relink._handshake import LARGEST_LINK_ID, epoch_of

if TYPE_CHECKING:
    import trio

NOBODY = b""


@runtime_checkable
class Identified(Protocol):
    """A stream that knows who its peer is, beyond doubt: for TLS the certificate that the peer proved to own."""

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
    """Of a fixed size, since it is kept with each link."""
    return NOBODY if identity is None else hashlib.sha256(identity).digest()


def new_epoch() -> int:
    return epoch_of(time.time())


def new_link_id() -> int:
    return 1 + secrets.randbelow(LARGEST_LINK_ID)


class Keys:
    """Places in a table by link id, so that the time of looking one up says nothing about the ids in it."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def key(self, link_id: int) -> bytes:
        return hashlib.blake2b(link_id.to_bytes(8, "little"), key=self._secret).digest()


def is_same(link_id: int, asked: int, owner: bytes, who: bytes) -> bool:
    """In a time that does not depend on where they differ."""
    same_id = hmac.compare_digest(link_id.to_bytes(8, "little"), asked.to_bytes(8, "little"))
    return hmac.compare_digest(owner, who) and same_id
