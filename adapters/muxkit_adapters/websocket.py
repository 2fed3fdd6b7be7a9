"""Byte streams in binary WebSocket messages, `ws` and `wss`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from muxkit import Limits
from muxkit.runtime import background, close_at_once, protect_package, protected_manager, turns

from . import tcp, tls
from ._addresses import Transport, exposed, join_host_port, parse_host_port
from ._errors import HandshakeFailed, PlaintextWarning
from ._listen import serve_handshakes
from ._sockets import OneAtATime

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from wsproto.events import Event

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
CLOSE_TIMEOUT = 5.0  # s, for the peer to answer our close frame
MESSAGE_MOST = 262_144  # bytes, the largest message that is accepted
PIECE_SIZE = 65_536  # bytes, the largest message that is sent
RECEIVE_SIZE = 65_536
CLEAN = {1000, 1001, 1005}  # done, going away, and a close frame that gives no code (RFC 6455, 7.4.1)
FORM = "expected host:port and an optional path, such as 127.0.0.1:7000/chat?room=1"

HEAD_MOST = 16_384  # bytes of the HTTP head of the upgrade
FRAGMENTS_MOST = 1024  # frames per message
NO_UPGRADE = "the peer hung up during the upgrade, or does not speak WebSocket"
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, LocalProtocolError)


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
    """Open a byte stream over the WebSocket at `url`, `ws://host:port/path` or `wss://…`.

    Raises OSError when no host answers and `HandshakeFailed` when the upgrade is refused; ValueError for `ws` off
    loopback without `insecure=True`.
    """
    place = _parse_url(url)
    wire: SocketStream | AbstractAsyncContextManager[tls.TLSStream]
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
        hosts = [(place.host, place.port)]
        wire, _ = await tcp.dial("ws", hosts, connect_timeout=connect_timeout, unsent=tcp.UNSENT)
    peer = f"{place}{' (plaintext, insecure)' if unprotected else ''}"

    start = partial(_ask_for_upgrade, host=place.host_header, resource=place.resource)
    async with (
        wire as stream,
        websocket_over(stream, start, peer, handshake_timeout, close_timeout, message_most) as websocket,
    ):
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

    With `path`, any other path is answered with 404. A request of a web page (it has an Origin) is answered with 403
    unless that origin is in `origins`, since pages of any site can reach 127.0.0.1.
    """
    limits = limits or Limits()
    kind = "ws" if ssl_context is None else "wss"
    unprotected = False
    if ssl_context is None:
        unprotected = await exposed("ws", host, port, insecure=insecure, secure="wss")
    secure = None if ssl_context is None else tls.acceptor(ssl_context, limits=limits, close_timeout=close_timeout)

    @protected_manager
    async def accept(wire: SocketStream) -> AsyncIterator[WebSocketStream]:
        encrypted = None if secure is None else secure(wire)
        start = partial(_answer_upgrade, path=path, origins=origins)
        async with (
            encrypted or wire as stream,
            websocket_over(stream, start, wire.peer, limits.handshake, close_timeout, message_most) as websocket,
        ):
            yield websocket

    listeners, addresses = await tcp.listen(kind, host, port, exposed=unprotected)
    public = [address + (path or "") for address in addresses]
    await serve_handshakes(listeners, accept, handler, limits=limits, started=lambda: task_status.started(public))


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


def _client_url(scheme: str, address: str) -> dict[str, object]:
    url = f"{scheme}://{address}"
    _parse_url(url)
    return {"url": url}


def _server_place(scheme: str, address: str) -> dict[str, object]:
    place = _parse_url(f"{scheme}://{address}")
    return {"host": place.host, "port": place.port, "path": None if place.resource == "/" else place.resource}


async def _serve_plain(
    handler: Callable[[WebSocketStream], Awaitable[None]],
    port: int,
    *,
    host: str,
    ssl_context: object = None,
    **options: Any,
) -> None:
    if ssl_context is not None:
        raise ValueError(f"ws://{join_host_port(host, port)}: ssl_context is for wss")
    await serve(handler, port, host=host, **options)


transport = Transport("ws", connect, _serve_plain, partial(_client_url, "ws"), partial(_server_place, "ws"))
secure_transport = Transport(
    "wss",
    connect,
    serve,
    partial(_client_url, "wss"),
    partial(_server_place, "wss"),
    needed=tls.transport.needed,
)


# The upgrade


@protected_manager
async def websocket_over(
    wire: trio.abc.Stream,
    shake_hands: Callable[[trio.abc.Stream], Awaitable[WSConnection]],
    peer: str,
    handshake_timeout: float,
    close_timeout: float,
    message_most: int,
) -> AsyncIterator[WebSocketStream]:
    """Upgrade when entered; exchange close frames when left normally, and close at once when left by an error."""
    try:
        try:
            with trio.fail_after(handshake_timeout):
                protocol = await shake_hands(wire)
        except trio.TooSlowError:
            raise HandshakeFailed(f"{peer}: the upgrade was not over within {handshake_timeout:g} s") from None
        except (Violation, trio.BrokenResourceError) as error:
            raise HandshakeFailed(f"{peer}: {error}") from error
        stream = WebSocketStream(wire, protocol, peer, close_timeout=close_timeout, message_most=message_most)
        async with background() as nursery:
            nursery.start_soon(stream.run)
            yield stream
            await stream.aclose()
    finally:
        await close_at_once(wire)


async def _ask_for_upgrade(wire: trio.abc.Stream, *, host: str, resource: str) -> WSConnection:
    protocol = WSConnection(ConnectionType.CLIENT)
    await wire.send_all(protocol.send(Request(host=host, target=resource)))
    answer = await _first_event(wire, protocol)
    if isinstance(answer, RejectConnection):
        raise Violation(f"the upgrade was answered with HTTP {answer.status_code}")
    return protocol


async def _answer_upgrade(wire: trio.abc.Stream, *, path: str | None, origins: Collection[str]) -> WSConnection:
    protocol = WSConnection(ConnectionType.SERVER)
    request = await _first_event(wire, protocol)
    assert isinstance(request, Request)
    status = None
    origin = dict(request.extra_headers).get(b"origin")
    if path is not None and urlsplit(request.target).path != urlsplit(path).path:
        status = 404
    elif origin is not None and origin.decode("latin-1") not in origins:
        status = 403
    if status is not None:
        await wire.send_all(protocol.send(RejectConnection(status_code=status)))
        raise Violation(f"the upgrade was answered with {status}")
    await wire.send_all(protocol.send(AcceptConnection()))
    return protocol


async def _first_event(wire: trio.abc.Stream, protocol: WSConnection) -> Event:
    """Read the peer's part of the upgrade, and of what follows it no more than the limit of a head."""
    left = HEAD_MOST
    while (event := next(protocol.events(), None)) is None:
        if not left:
            raise Violation(f"an HTTP head of more than {HEAD_MOST} bytes")
        data = await wire.receive_some(left)
        if not data:
            raise Violation(NO_UPGRADE)
        left -= len(data)
        try:
            protocol.receive_data(bytes(data))
        except RemoteProtocolError as error:
            if not protocol.client and error.event_hint is not None:
                await wire.send_all(protocol.send(error.event_hint))
            raise Violation(NO_UPGRADE) from error
        except ValueError as error:  # a host or another part of the head that cannot be decoded
            raise Violation(NO_UPGRADE) from error
    return event


# The stream


class Violation(Exception):
    """The peer broke a rule or a limit of this transport."""


class WebSocketStream(trio.abc.Stream):
    """A byte stream in binary messages; its end is only clean after a close frame."""

    def __init__(
        self, wire: trio.abc.Stream, protocol: WSConnection, peer: str, *, close_timeout: float, message_most: int
    ) -> None:
        self._wire = wire
        self._protocol = protocol
        self._peer = peer
        self._identity: bytes | None = getattr(wire, "identity", None)
        self._close_timeout = close_timeout
        self._message_most = message_most
        self._message_size = self._fragments = 0  # of the message that is coming in
        self._arrived = bytearray()  # by `run`, for `receive_some`
        self._changed = trio.lowlevel.ParkingLot()  # `run` while much has arrived, `receive_some` while nothing has
        self._writing = trio.Lock()
        self._is_torn = False  # a write was cut short, after which the peer cannot understand anything more
        self._closed = False
        self._over = trio.Event()  # nothing more will be read
        self._goodbye: CloseConnection | None = None
        self._failure: Exception | None = None
        self._sending = OneAtATime("sending on this WebSocket")
        self._receiving = OneAtATime("receiving from this WebSocket")
        self._turns = turns()

    @property
    def peer(self) -> str:
        """The other end, for people: `ws 127.0.0.1:7000/chat`."""
        return self._peer

    @property
    def identity(self) -> bytes | None:
        """The identity that the stream below gives: over TLS the certificate that was verified, in DER."""
        return self._identity

    def __repr__(self) -> str:
        return f"<WebSocketStream {self._peer}{', closed' if self._closed else ''}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else max_bytes
        if not isinstance(size, int):
            raise TypeError(f"max_bytes={max_bytes!r}: must be a whole number")
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        with self._receiving:
            if self._closed or self._arrived or self._over.is_set():
                await trio.lowlevel.checkpoint()
            while not (self._closed or self._arrived or self._over.is_set()):
                await self._changed.park()
            if self._closed:
                raise self._closed_here()
            if self._arrived:
                taken = bytes(self._arrived[:size])
                del self._arrived[:size]
                if len(self._arrived) < RECEIVE_SIZE:
                    self._changed.unpark_all()
                return taken
            if self._failure is None and self._goodbye is not None and self._goodbye.code in CLEAN:
                return b""
            raise trio.BrokenResourceError(f"{self._peer}: {self._why()}") from self._failure

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending:
            view = memoryview(data).cast("B")
            if not view.nbytes or self._closed or self._is_torn:
                await trio.lowlevel.checkpoint()
            for start in range(0, view.nbytes or 1, PIECE_SIZE):
                if self._closed:
                    raise self._closed_here()
                if self._is_torn:
                    raise trio.BrokenResourceError(f"{self._peer}: an earlier send was cut short inside a message")
                piece = bytes(view[start : start + PIECE_SIZE])
                if piece:
                    await self._send(piece)

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self._closed:
                await trio.lowlevel.checkpoint()
                raise self._closed_here()
            async with self._writing:
                await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Exchange close frames and close, within the close timeout; unread data is discarded."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        self._arrived.clear()
        self._changed.unpark_all()
        try:
            with trio.move_on_after(self._close_timeout), suppress(*GONE):
                if not (self._is_torn or self._over.is_set()):
                    await self._write(CloseConnection(code=1000))
                    await self._over.wait()
                await self._wire.aclose()
        finally:
            await close_at_once(self._wire)

    async def run(self) -> None:
        """Read until the WebSocket is over: keep data for `receive_some`, and answer the peer's control frames."""
        try:
            while True:
                began = self._turns.now()
                for event in self._protocol.events():
                    await self._handle(event)
                    if self._turns.now() - began > self._turns.allowance:
                        await self._turns.wait()
                        began = self._turns.now()
                if self._goodbye is not None:
                    break
                while len(self._arrived) >= RECEIVE_SIZE and not self._closed:
                    await self._changed.park()
                self._protocol.receive_data(bytes(await self._wire.receive_some(RECEIVE_SIZE)) or None)
        except (Violation, *GONE) as error:
            self._failure = error
            await close_at_once(self._wire)
        finally:
            self._end()

    def _end(self) -> None:
        self._over.set()
        self._changed.unpark_all()

    async def _handle(self, event: Event) -> None:
        match event:
            case BytesMessage(data=data):
                self._count(event)
                if data and not self._closed:
                    self._arrived += data
                    self._changed.unpark_all()
            case TextMessage():
                raise Violation("a text frame came; only binary messages carry this byte stream")
            case Ping() if self._protocol.state is ConnectionState.OPEN:
                await self._write(event.response())
            case CloseConnection():
                self._goodbye = event
                with suppress(*GONE):
                    if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                        await self._write(event.response())
                    self._end()
                    if not self._protocol.client:  # a client waits for the server to close the connection below
                        await self._wire.aclose()

    def _count(self, frame: BytesMessage) -> None:
        self._message_size += len(frame.data)
        self._fragments += frame.frame_finished
        if self._message_size > self._message_most:
            raise Violation(
                f"a message of {self._message_size} bytes or more, against message_most={self._message_most}"
            )
        if self._fragments > FRAGMENTS_MOST:
            raise Violation(f"a message in more than {FRAGMENTS_MOST} fragments")
        if frame.message_finished:
            self._message_size = self._fragments = 0

    async def _send(self, piece: bytes) -> None:
        try:
            await self._write(BytesMessage(data=piece))
        except GONE as error:
            if self._closed:
                raise self._closed_here() from None
            raise trio.BrokenResourceError(f"{self._peer}: {self._why(error)}") from error

    async def _write(self, event: Event) -> None:
        data = self._protocol.send(event)  # before the peer's goodbye, which may be next, makes it an error
        async with self._writing:
            try:
                await self._wire.send_all(data)
            except BaseException:
                self._is_torn = True
                raise

    def _why(self, error: Exception | None = None) -> str:
        if self._goodbye is None:
            return str(self._failure or error or "") or "the WebSocket is over"
        code = self._goodbye.code
        if code == 1006:
            return "the connection ended without a close frame"
        name = f" {code.name}" if isinstance(code, CloseReason) else ""
        return f"closed with {int(code)}{name}{f': {self._goodbye.reason!r}' if self._goodbye.reason else ''}"

    def _closed_here(self) -> trio.ClosedResourceError:
        return trio.ClosedResourceError("this WebSocket was closed on our side")


protect_package("muxkit_adapters")
