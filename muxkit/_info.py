"""What is known of a connection: what carries it, and who is at its other end."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Identity:
    """Who the peer is, as far as it was proved."""

    certificate: bytes | None = attrs.field(
        default=None, repr=lambda der: "None" if der is None else f"<{len(der)} bytes>"
    )
    """The verified certificate, in DER."""
    subject: str | None = None
    """The subject of the certificate, as `CN=alice,O=users`."""
    names: tuple[str, ...] = ()
    """The names, addresses and e-mail addresses that the certificate is for."""
    pid: int | None = None
    """The process at the other end of a Unix socket, when it connected."""
    uid: int | None = None
    """The user that it ran as."""
    gid: int | None = None
    user: str | None = None
    """What `authorize=` returned."""


@attrs.frozen(kw_only=True)
class Request:
    """The HTTP request that opened a WebSocket."""

    path: str
    query: str = attrs.field(repr=False)
    headers: tuple[tuple[str, str], ...] = attrs.field(repr=False)
    """Names in lower case, in the order in which they came, without those of the WebSocket handshake.

    These and the query may hold what must not get into a log.
    """
    subprotocol: str | None = None


@attrs.frozen(kw_only=True)
class SessionInfo:
    """What carries a session, and who is at its other end."""

    protocol: str
    transport: str = ""
    """Its name in URLs: `tcp`; empty when the transport does not say."""
    peer: str
    """The other end, as text: `tcp 127.0.0.1:7000`; empty when the transport does not say."""
    local: str = ""
    """This end, in the same form."""
    identity: Identity | None = None
    """None if nothing about the peer was proved."""
    request: Request | None = None
    """Of a server's WebSockets only."""

    @property
    def user(self) -> str | None:
        """What `authorize=` returned for the peer; None on a server without it, and on clients."""
        return None if self.identity is None else self.identity.user
