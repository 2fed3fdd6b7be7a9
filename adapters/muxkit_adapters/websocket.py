"""How does a byte stream pass where only the web may? In binary WebSocket messages, `ws` and `wss`."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs
import trio
from trio_websocket import WebSocketConnection, wrap_client_stream, wrap_server_stream

from muxkit import Limits
from muxkit.runtime import protect_package, protected_manager

from . import tcp, tls
from ._addresses import exposed, join_host_port, parse_host_port
from ._errors import HandshakeFailed, PlaintextWarning
from ._listen import serve_handshakes
from ._websocket_stream import CLOSE_TIMEOUT, RECEIVE_SIZE, Opening, WebSocketStream, websocket_over

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection
    from contextlib import AbstractAsyncContextManager

    from ._sockets import SocketStream

__all__ = [
    "HandshakeFailed",
    "PlaintextWarning",
    "WebSocketStream",
    "connect",
    "secure_transport",
    "serve",
    "transport",
]

HANDSHAKE_TIMEOUT = 10.0  # s, for the upgrade on the connecting side; a listener has Limits.handshake
MESSAGE_MOST = 262_144  # bytes, the largest message that is accepted; ours are smaller
FORM = "expected host:port and an optional path, such as 127.0.0.1:7000/chat?room=1"


@protected_manager
async def connect(
    url: str,
    *,
    ssl_context: ssl.SSLContext | None = None,
    connect_timeout: float = tcp.CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    insecure: bool = False,
) -> AsyncIterator[WebSocketStream]:
    """A byte stream over the WebSocket at `url`, `ws://host:port/path` or `wss://…`.

    Raises OSError when nobody answers and `HandshakeFailed` when the answer is no; ValueError for `ws` off
    loopback without `insecure=True`.
    """
    place = _parse_url(url)
    wire: AbstractAsyncContextManager[trio.abc.Stream]
    unprotected = False
    if place.secure:
        wire = tls.connect(
            place.host,
            place.port,
            ssl_context=ssl_context,
            connect_timeout=connect_timeout,
            close_timeout=close_timeout,
            insecure=insecure,
        )
    elif ssl_context is not None:
        raise ValueError(f"{url}: ssl_context is for wss")
    else:
        unprotected = await exposed("ws", place.host, place.port, insecure=insecure, secure="wss")
        wire = _plain(place, connect_timeout)
    peer = f"{place}{' (plaintext, insecure)' if unprotected else ''}"

    async def open_client(nursery: trio.Nursery, guarded: trio.abc.Stream) -> WebSocketConnection:
        return await wrap_client_stream(
            nursery,
            guarded,  # type: ignore[arg-type]  # annotated as a socket, used as any stream
            place.host_header,
            place.resource,
            message_queue_size=1,
            max_message_size=message_most,
            receive_buffer_size=RECEIVE_SIZE,
        )

    opening = Opening(open_client, peer, handshake_timeout, close_timeout, message_most)
    async with wire as stream, websocket_over(stream, opening) as websocket:
        yield websocket


async def serve(
    handler: Callable[[WebSocketStream], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    path: str | None = None,
    origins: Collection[str] = (),
    ssl_context: ssl.SSLContext | None = None,
    limits: Limits | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    insecure: bool = False,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each WebSocket, until cancelled; with `ssl_context` it is `wss`.

    With `path`, any other is answered with 404. A request that a web page made (it has an Origin) is answered
    with 403 unless the page's origin is in `origins`: a page from anywhere can reach 127.0.0.1.
    """
    limits = limits or Limits()
    kind = "ws" if ssl_context is None else "wss"
    unprotected = False
    if ssl_context is None:
        unprotected = await exposed("ws", host, port, insecure=insecure, secure="wss")
    secure = None if ssl_context is None else tls.acceptor(ssl_context, limits=limits, close_timeout=close_timeout)

    async def open_server(nursery: trio.Nursery, guarded: trio.abc.Stream) -> WebSocketConnection:
        request = await wrap_server_stream(
            nursery,
            guarded,
            message_queue_size=1,
            max_message_size=message_most,
            receive_buffer_size=RECEIVE_SIZE,
        )
        status = _refusal(request.path, request.headers, path, origins)
        if status is not None:
            await request.reject(status)
            raise HandshakeFailed(f"{kind}: the upgrade was answered with {status}")
        return await request.accept()

    @protected_manager
    async def accept(wire: SocketStream) -> AsyncIterator[WebSocketStream]:
        opening = Opening(open_server, wire.peer, limits.handshake, close_timeout, message_most)
        if secure is None:
            async with websocket_over(wire, opening) as websocket:
                yield websocket
        else:
            async with secure(wire) as encrypted, websocket_over(encrypted, opening) as websocket:
                yield websocket

    listeners, addresses = await tcp.listen(kind, host, port, exposed=unprotected)
    public = [address + (path or "") for address in addresses]
    await serve_handshakes(listeners, accept, handler, limits=limits, started=lambda: task_status.started(public))


def _refusal(
    requested: str, headers: list[tuple[bytes, bytes]], path: str | None, origins: Collection[str]
) -> int | None:
    if path is not None and urlsplit(requested).path != urlsplit(path).path:
        return 404
    origin = dict(headers).get(b"origin")
    if origin is not None and origin.decode("latin-1") not in origins:
        return 403
    return None


@protected_manager
async def _plain(place: _Place, connect_timeout: float) -> AsyncIterator[SocketStream]:
    hosts = [(place.host, place.port)]
    stream, _ = await tcp.dial("ws", hosts, connect_timeout=connect_timeout, unsent=tcp.UNSENT)
    async with stream:
        yield stream


# Addresses


@attrs.frozen
class _Place:
    secure: bool
    host: str
    port: int
    resource: str

    @property
    def host_header(self) -> str:
        return join_host_port(self.host, self.port)

    def __str__(self) -> str:
        # Without the query, which may hold a token.
        return f"{'wss' if self.secure else 'ws'} {self.host_header}{self.resource.partition('?')[0]}"


def _parse_url(url: str) -> _Place:
    scheme, sign, address = url.partition("://")
    if scheme not in ("ws", "wss") or not sign:
        raise ValueError(f"{url!r}: expected ws://host:port/path or wss://host:port/path")
    authority, resource = _split(address)
    host, port = parse_host_port(authority, default_port=443 if scheme == "wss" else 80, form=FORM)
    return _Place(scheme == "wss", host, port, resource or "/")


def _split(address: str) -> tuple[str, str]:
    cut = min((address.index(sign) for sign in "/?#" if sign in address), default=len(address))
    authority, resource = address[:cut], address[cut:]
    if "#" in resource or not resource.isascii() or any(sign <= " " for sign in resource):
        raise ValueError(f"address {address!r}: the path is plain ASCII without spaces or '#'; {FORM}")
    return authority, resource if resource.startswith("/") or not resource else f"/{resource}"


@attrs.frozen
class _Transport:
    """`ws://host:port/path?query`, and the same over TLS."""

    scheme: str

    def connect(
        self, address: str, *, ssl_context: ssl.SSLContext | None = None, insecure: bool = False
    ) -> AbstractAsyncContextManager[trio.abc.Stream]:
        url = f"{self.scheme}://{address}"
        _parse_url(url)
        return connect(url, ssl_context=ssl_context, insecure=insecure)

    async def serve(
        self,
        handler: Callable[[trio.abc.Stream], Awaitable[None]],
        address: str,
        *,
        limits: Limits,
        task_status: trio.TaskStatus[list[str]],
        ssl_context: ssl.SSLContext | None = None,
        origins: Collection[str] = (),
        insecure: bool = False,
    ) -> None:
        place = _parse_url(f"{self.scheme}://{address}")
        if place.secure:
            ssl_context = tls.server_context(f"wss://{address}", ssl_context)
        elif ssl_context is not None:
            raise ValueError(f"ws://{address}: ssl_context is for wss")
        await serve(
            handler,
            place.port,
            host=place.host,
            path=None if place.resource == "/" else place.resource,
            origins=origins,
            ssl_context=ssl_context,
            limits=limits,
            insecure=insecure,
            task_status=task_status,
        )


transport = _Transport("ws")
secure_transport = _Transport("wss")


protect_package("muxkit_adapters")
