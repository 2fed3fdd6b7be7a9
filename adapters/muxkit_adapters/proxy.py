"""Outgoing connections through a proxy: HTTP CONNECT and SOCKS5.

The `proxy=` option of the transports `tcp`, `tls`, `ws` and `wss` is the URL of a proxy, or "environment" for the proxy
that the environment variables name. The transport connects to the proxy and opens a tunnel before it does anything
else. From then on, the connection carries the bytes of the peer. TLS is therefore end-to-end, and the proxy can't read
it.

A server may send first, so its bytes may follow the answer of the proxy in the same packet. We therefore look at the
answer with MSG_PEEK, and take exactly the answer out of the socket. (python-socks reads all available bytes and drops
those after the answer.)
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import attrs
import h11
import trio

from ._addresses import join_host_port, parse_host_port
from ._errors import HandshakeFailed

__all__ = ["ENVIRONMENT", "Proxy", "proxy_for"]

ENVIRONMENT: Final = "environment"
"""The value of `proxy=` that selects the proxy of the environment: HTTPS_PROXY or ALL_PROXY, and NO_PROXY."""
FORM: Final = "expected http://host:port, socks5://host:port or socks5h://host:port, with user:password@ if needed"
PORTS: Final = {"http": 8080, "socks5": 1080, "socks5h": 1080}
ANSWER_MAX: Final = 16_384  # bytes of the head of a proxy's answer

# RFC 1928, and RFC 1929 for the user name and password.
VERSION: Final = 5
USER_VERSION: Final = 1
NO_USER, WITH_USER, NO_METHOD = 0, 2, 0xFF
CONNECT: Final = 1
IPV4, NAME, IPV6 = 1, 3, 4
SIZES: Final = {IPV4: 4, IPV6: 16}
REPLIES: Final = {
    1: (OSError, "it failed"),
    2: (None, "its rules don't allow this"),
    3: (OSError, "the network is unreachable from there"),
    4: (OSError, "the host is unreachable from there, or has no address"),
    5: (ConnectionRefusedError, "nothing listens there"),
    6: (TimeoutError, "there is no route that is short enough"),
    7: (None, "it doesn't offer CONNECT"),
    8: (None, "it doesn't know this kind of address"),
}


@attrs.frozen
class Proxy:
    """The address, kind and credentials of a proxy. Made by `proxy_for`."""

    kind: str
    """`http`, `socks5` or `socks5h`. With `socks5h`, the proxy resolves the names of hosts."""
    host: str
    port: int
    user: str = ""
    password: str = attrs.field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.kind}://{join_host_port(self.host, self.port)}"

    @property
    def is_local(self) -> bool:
        """True if the address of the proxy is known to be on this machine."""
        return is_local(self.host)

    async def open_tunnel(self, wire: trio.SocketStream, where: str, host: str, port: int) -> None:
        """Request a tunnel on a connection to the proxy.

        Args:
            wire: a new connection to the proxy.
            where: the name of the target in error texts.
            host: the target's host.
            port: the target's port.

        Raises:
            HandshakeFailed: if the proxy refuses, or if the peer isn't a proxy of this kind.
            OSError: if the proxy can't reach the target, or closes the connection.
        """
        through = f"{where} through {self}"
        try:
            if self.kind == "http":
                await self._connect(wire.socket, through, host, port)
            else:
                await _Socks5(wire.socket, self, through).connect(host, port)
        except (BrokenPipeError, ConnectionResetError, EOFError) as error:
            raise ConnectionResetError(f"{through}: the proxy hung up") from error

    async def _connect(self, sock: trio.socket.SocketType, through: str, host: str, port: int) -> None:
        target = join_host_port(host, port)
        headers = [("Host", target)]
        if self.user or self.password:
            credentials = base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")
            headers.append(("Proxy-Authorization", f"Basic {credentials}"))
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=ANSWER_MAX)
        asked = parser.send(h11.Request(method="CONNECT", target=target, headers=headers))
        await send_all(sock, asked or b"")
        try:
            parser.receive_data(await _take_head(sock))
            answer = parser.next_event()
        except h11.RemoteProtocolError as error:
            raise HandshakeFailed(f"{through}: this isn't an HTTP proxy: {error}", found="another protocol") from error
        if not isinstance(answer, h11.Response):
            raise HandshakeFailed(f"{through}: the proxy answered with {type(answer).__name__}, not with a response")
        if not 200 <= answer.status_code < 300:
            reason = answer.reason.decode("ascii", "replace") or HTTPStatus(answer.status_code).phrase
            text = f"{through}: the proxy answered {answer.status_code} {reason}"
            if answer.status_code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
                text += ". Give it a user and a password: proxy=http://user:password@host:port"
            raise HandshakeFailed(text, status=answer.status_code)


class _Socks5:
    """The client side of a SOCKS5 handshake."""

    def __init__(self, sock: trio.socket.SocketType, proxy: Proxy, through: str) -> None:
        self._sock = sock
        self._proxy = proxy
        self._through = through

    async def connect(self, host: str, port: int) -> None:
        await self._agree_on_user()
        address = await self._address(host, port)
        await send_all(self._sock, bytes((VERSION, CONNECT, 0)) + address + port.to_bytes(2))
        version, reply, _, kind = await take_exactly(self._sock, 4)
        if version != VERSION:
            raise self._stranger(version)
        if reply:
            failure, text = REPLIES.get(reply, (OSError, f"it answered with {reply}"))
            text = f"{self._through}: the proxy can't connect: {text}"
            raise HandshakeFailed(text, status=HTTPStatus.FORBIDDEN) if failure is None else failure(text)
        size = SIZES[kind] if kind in SIZES else (await take_exactly(self._sock, 1))[0]
        await take_exactly(self._sock, size + 2)  # the address that the proxy bound, which we don't need

    async def _agree_on_user(self) -> None:
        proxy = self._proxy
        has_user = bool(proxy.user or proxy.password)
        methods = (NO_USER, WITH_USER) if has_user else (NO_USER,)
        await send_all(self._sock, bytes((VERSION, len(methods), *methods)))
        version, method = await take_exactly(self._sock, 2)
        if version != VERSION:
            raise self._stranger(version)
        if method == NO_METHOD and not has_user:
            text = (
                f"{self._through}: the proxy wants a user and a password: proxy={proxy.kind}://user:password@host:port"
            )
            raise HandshakeFailed(text, status=HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
        if method not in methods:
            raise HandshakeFailed(
                f"{self._through}: the proxy accepts no user and password", status=HTTPStatus.FORBIDDEN
            )
        if method == WITH_USER:
            user, password = proxy.user.encode(), proxy.password.encode()
            parts = (bytes((USER_VERSION, len(user))), user, bytes((len(password),)), password)
            await send_all(self._sock, b"".join(parts))
            _, refused = await take_exactly(self._sock, 2)
            if refused:
                text = f"{self._through}: the proxy doesn't accept this user and password"
                raise HandshakeFailed(text, status=HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)

    def _stranger(self, version: int) -> HandshakeFailed:
        text = f"{self._through}: this isn't a SOCKS5 proxy: its answer begins with {version}"
        return HandshakeFailed(text, found="another protocol")

    async def _address(self, host: str, port: int) -> bytes:
        if self._proxy.kind == "socks5" and _numeric(host) is None:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
            host = str(found[0][4][0])
        numeric = _numeric(host)
        if numeric is not None:
            return bytes((IPV4 if numeric.version == 4 else IPV6,)) + numeric.packed
        name = host.encode("idna") if not host.isascii() else host.encode()
        if len(name) > 255:
            raise OSError(f"{self._through}: SOCKS5 carries names of up to 255 bytes, this one has {len(name)}")
        return bytes((NAME, len(name))) + name


def proxy_for(proxy: str | None, host: str, port: int) -> Proxy | None:
    """Return the proxy through which to connect to a host, or None to connect directly.

    Args:
        proxy: the value of the `proxy=` option.
        host: the target's host.
        port: the target's port.

    Raises:
        ValueError: if the URL isn't that of a supported proxy. The text doesn't contain the password.
    """
    if proxy is None:
        return None
    if proxy != ENVIRONMENT:
        return _parse(proxy, "proxy=…: ")
    known = getproxies()  # the environment, and on Windows and macOS also the system settings
    url = known.get("https") or known.get("all")
    if not url or is_local(host) or proxy_bypass(join_host_port(host, port)) or proxy_bypass(host):
        return None
    return _parse(url if "://" in url else f"http://{url}", "the environment's HTTPS_PROXY or ALL_PROXY: ")


def is_local(host: str) -> bool:
    """Return True for a loopback address and for `localhost`. Other names aren't resolved."""
    numeric = _numeric(host)
    return host == "localhost" if numeric is None else numeric.is_loopback


def _parse(url: str, whence: str) -> Proxy:
    kind, _, rest = url.partition("://")
    shown = f"{kind}://…{rest.rpartition('@')[2]}" if "@" in rest else url
    if kind == "socks":
        kind = "socks5h"  # browsers and desktop settings write `socks`
    try:
        parts = urlsplit(url)
        authority = parts.netloc.rpartition("@")[2]
        host, port = parse_host_port(authority, default_port=PORTS.get(kind, 0), form=FORM)
    except ValueError as error:
        raise ValueError(f"{whence}invalid URL {shown!r}: {FORM}") from error
    if kind == "https":
        raise ValueError(f"{whence}{shown}: proxies that want TLS themselves aren't supported; {FORM}")
    if kind not in PORTS or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{whence}invalid URL {shown!r}: {FORM}")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if max(len(user.encode()), len(password.encode())) > 255 or ":" in user:
        raise ValueError(f"{whence}the user or the password of {shown} is too long, or the user has a colon")
    return Proxy(kind, host, port, user, password)


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def send_all(sock: trio.socket.SocketType, data: bytes) -> None:
    """Send all of these bytes."""
    while data:
        data = data[await sock.send(data) :]


async def take_exactly(sock: trio.socket.SocketType, size: int) -> bytes:
    """Receive exactly this many bytes. Raises EOFError if the peer sends fewer."""
    taken = b""
    while len(taken) < size:
        came = await sock.recv(size - len(taken))
        if not came:
            raise EOFError
        taken += came
    return taken


async def _take_head(sock: trio.socket.SocketType) -> bytes:
    """Take the head of an HTTP response out of a socket, and leave the bytes after it."""
    taken = b""
    while not taken.endswith(b"\r\n\r\n"):
        seen = taken + await sock.recv(ANSWER_MAX, socket.MSG_PEEK)
        if len(seen) == len(taken):
            raise EOFError
        end = seen.find(b"\r\n\r\n")
        size = (len(seen) if end < 0 else end + 4) - len(taken)
        taken += await take_exactly(sock, size)
        if len(taken) > ANSWER_MAX:
            raise h11.RemoteProtocolError(f"its answer has a head of more than {ANSWER_MAX} bytes")
    return taken
