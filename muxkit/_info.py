"""Information about a session: its protocol, its transport, and the identity of the peer."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Identity:
    """The verified identity of a peer. Attributes that the transport can't verify are None or empty."""

    certificate: bytes | None = attrs.field(
        default=None, repr=lambda der: "None" if der is None else f"<{len(der)} bytes>"
    )
    """The peer's certificate in DER format."""
    subject: str | None = None
    """The subject of the certificate, such as `CN=alice,O=users`."""
    names: tuple[str, ...] = ()
    """The host names, addresses and e-mail addresses in the certificate."""
    pid: int | None = None
    """On a Unix socket, the id of the process that connected."""
    uid: int | None = None
    """The user id of that process."""
    gid: int | None = None
    """The group id of that process."""
    user: str | None = None
    """The name that `authorize=` returned."""


@attrs.frozen(kw_only=True)
class Request:
    """The HTTP request that opened a WebSocket."""

    path: str
    query: str = attrs.field(repr=False)
    headers: tuple[tuple[str, str], ...] = attrs.field(repr=False)
    """The headers in their order, without those of the WebSocket handshake. Names are in lower case.

    Headers and the query may contain secrets, so don't log them.
    """
    subprotocol: str | None = None
    """The WebSocket subprotocol that was agreed on."""


@attrs.frozen(kw_only=True)
class SessionInfo:
    """Information about a session: its protocol, its transport, and the peer."""

    protocol: str
    """The name of the protocol in URLs, such as `bpmux`."""
    transport: str = ""
    """The name of the transport in URLs, such as `tcp`, or "" if it isn't known."""
    peer: str
    """The transport and address of the peer, such as `tcp 127.0.0.1:7000`, or "" if it isn't known."""
    local: str = ""
    """The address of this side, in the same form."""
    identity: Identity | None = None
    """The verified identity of the peer, or None if nothing was verified."""
    request: Request | None = None
    """On a server, the HTTP request that opened the WebSocket. None with other transports and on clients."""

    @property
    def user(self) -> str | None:
        """The name that `authorize=` returned for the peer. None on clients, and on servers without `authorize=`."""
        return None if self.identity is None else self.identity.user
