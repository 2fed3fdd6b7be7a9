"""Byte streams in binary WebSocket messages, `ws` and `wss`."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import trio
from trio_websocket import (
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    wrap_client_stream,
    wrap_server_stream,
)
from wsproto.utilities import ProtocolError

from muxkit import TLS, Identity, Limits, Request
from muxkit.runtime import (
    HEAD,
    Reason,
    background,
    close_at_once,
    looks_like,
    protect_package,
    protected_manager,
    turns,
)

from . import tcp
from ._addresses import Transport, exposed, join_host_port, parse_host_port
from ._errors import HandshakeFailed, PlaintextWarning
from ._listen import serve_handshakes
from ._sockets import OneAtATime, SocketStream
from .tls import acceptor
from .tls import connect as tls_connect

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
DONE, POLICY, INTERNAL_ERROR = 1000, 1008, 1011  # codes of close frames
CLOSE_TEXT_MOST = 123  # bytes
CLEAN = {1000, 1001, 1005}  # done, going away, and a close frame that gives no code (RFC 6455, 7.4.1)
FORM = "expected host:port and an optional path, such as 127.0.0.1:7000/chat?room=1"

HEAD_MOST = 16_384  # bytes of the upgrade's header block, and of the body that explains a refusal
FRAGMENTS_MOST = 1024  # frames per message
TOGETHER = 4096  # bytes of one frame that are handed on at once, unless it ends before
SLICE = 128  # bytes that are handed on at once, unless a frame is known to be longer: no more than 64 frames
PLAIN_TEXT = [(b"Content-Type", b"text/plain; charset=utf-8")]
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
OUR_HEADERS = {"connection", "upgrade"}
NOT_YOURS = {"host", "content-length", "transfer-encoding"}

Headers = Mapping[str, str] | Sequence[tuple[str, str]]

HEAD_END = b"\r\n\r\n"
_FOR_WSS = "tls= and ssl_context= are for wss"
TEXT, CONTROL, CLOSE = 1, 8, 8  # opcodes; from 8 on they are control frames


@protected_manager
async def connect(
    url: str,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    headers: Headers = (),
    subprotocols: Sequence[str] = (),
    connect_timeout: float = tcp.CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    insecure: bool = False,
) -> AsyncIterator[WebSocketStream]:
    """Open a byte stream over the WebSocket at `url`, `ws://host:port/path` or `wss://…`.

    `headers` go with the request, such as `{"Authorization": "Bearer …"}`. With `subprotocols`, a server that takes
    none of them is refused. Raises OSError when no host answers and `HandshakeFailed` when the upgrade is refused;
    ValueError for `ws` off loopback without `insecure=True`.
    """
    place = _parse_url(url)
    extra_headers = encode_headers(headers)
    check_subprotocols(subprotocols)
    wire: AbstractAsyncContextManager[trio.abc.Stream]
    unprotected, verifies = False, True
    if place.secure:
        verifies = tls.verify if tls is not None else not insecure
        wire = tls_connect(
            place.host,
            place.port,
            tls=tls,
            ssl_context=ssl_context,
            connect_timeout=connect_timeout,
            handshake_timeout=handshake_timeout,
            close_timeout=close_timeout,
            insecure=insecure,
        )
    elif tls is not None or ssl_context is not None:
        raise ValueError(f"{place}: {_FOR_WSS}")
    else:
        unprotected = await exposed("ws", place.host, place.port, insecure=insecure, secure="wss")
        wire = _plain(place, connect_timeout)
    peer = f"{place}{' (plaintext, insecure)' if unprotected else '' if verifies else ' (not verified, insecure)'}"

    async def start(nursery: trio.Nursery, guarded: trio.abc.Stream, **sizes: Any) -> _Upgraded:
        stream: Any = guarded  # annotated as a socket, used as any stream
        asked: dict[str, Any] = {"subprotocols": subprotocols or None, "extra_headers": extra_headers or None}
        websocket = await wrap_client_stream(nursery, stream, place.host_header, place.resource, **asked, **sizes)
        if subprotocols and websocket.subprotocol is None:
            raise HandshakeFailed(f"{peer}: the server takes none of the subprotocols {', '.join(subprotocols)}")
        return websocket, None

    upgrade = _Upgrade(start, peer, handshake_timeout, close_timeout, message_most)
    async with wire as stream, websocket_over(stream, upgrade) as websocket:
        yield websocket


async def serve(
    handler: Callable[[WebSocketStream], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    path: str | None = None,
    origins: Collection[str] = (),
    subprotocols: Sequence[str] = (),
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: Limits | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    insecure: bool = False,
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each WebSocket, until cancelled; with `tls` it is `wss`.

    With `path`, any other path is answered with 404. A request of a web page (it has an Origin) is answered with 403
    unless that origin is in `origins`, since pages of any site can reach 127.0.0.1. Of `subprotocols` the first that
    the client knows is spoken, none if it knows none of them.
    """
    limits = limits or Limits()
    check_subprotocols(subprotocols)
    kind = "ws" if tls is None and ssl_context is None else "wss"
    unprotected = False
    secure: Callable[[SocketStream], AbstractAsyncContextManager[trio.abc.Stream]] = nullcontext
    if kind == "ws":
        unprotected = await exposed("ws", host, port, insecure=insecure, secure="wss")
    else:
        secure = acceptor(tls, ssl_context, limits=limits, close_timeout=close_timeout)

    async def start(nursery: trio.Nursery, guarded: trio.abc.Stream, **sizes: Any) -> _Upgraded:
        asked = await wrap_server_stream(nursery, guarded, **sizes)
        refusal = _refusal(asked.path, asked.headers, path, origins)
        if refusal is not None:
            status, why = refusal
            await asked.reject(status, extra_headers=[*PLAIN_TEXT], body=why.encode())
            raise HandshakeFailed(f"{kind}: the upgrade was answered with {status}")
        chosen = next((each for each in subprotocols if each in asked.proposed_subprotocols), None)
        requested, _, query = asked.path.partition("?")
        told = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in asked.headers]
        others = tuple(header for header in told if not is_ours(header[0]))
        request = Request(path=requested, query=query, headers=others, subprotocol=chosen)
        return await asked.accept(subprotocol=chosen), request

    @protected_manager
    async def accept(wire: SocketStream) -> AsyncIterator[WebSocketStream]:
        upgrade = _Upgrade(start, wire.peer, limits.handshake, close_timeout, message_most)
        async with secure(wire) as stream, websocket_over(stream, upgrade) as websocket:
            yield websocket

    open_to, addresses = await tcp.listen(kind, host, port, exposed=unprotected, listeners=listeners)
    public = [address + (path or "") for address in addresses]
    await serve_handshakes(open_to, accept, handler, limits=limits, started=lambda: task_status.started(public))


def _refusal(
    requested: str, headers: list[tuple[bytes, bytes]], path: str | None, origins: Collection[str]
) -> tuple[int, str] | None:
    if path is not None and urlsplit(requested).path != urlsplit(path).path:
        return 404, "this server has another path"
    origin = dict(headers).get(b"origin")
    if origin is not None and origin.decode("latin-1") not in origins:
        return 403, "this server does not know the origin of the page: origins="
    return None


def encode_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Check the headers of a request; raises ValueError, in which no value is shown."""
    encoded = []
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        if not TOKEN.fullmatch(name):
            raise ValueError(f"headers=…: {name!r} is no name of a header")
        if is_ours(name.lower()) or name.lower() in NOT_YOURS:
            raise ValueError(f"headers=…: {name} is set by the WebSocket itself")
        if not VALUE.fullmatch(value):
            raise ValueError(f"headers=…: the value of {name} has characters that a header cannot have")
        encoded.append((name.encode(), value.encode("latin-1")))
    return encoded


def is_ours(name: str) -> bool:
    """Return True for a header, its name in lower case, that belongs to the handshake of a WebSocket."""
    return name in OUR_HEADERS or name.startswith("sec-websocket-")


def check_subprotocols(names: Sequence[str]) -> None:
    if isinstance(names, str) or not all(TOKEN.fullmatch(name) for name in names):
        raise ValueError(f"subprotocols={names!r}: expected names without spaces, such as ['chat.v2', 'chat.v1']")


@protected_manager
async def _plain(place: _Place, connect_timeout: float) -> AsyncIterator[SocketStream]:
    hosts = [(place.host, place.port)]
    stream, _ = await tcp.dial("ws", hosts, connect_timeout=connect_timeout, unsent=tcp.UNSENT)
    stream.hint_if_silent = "Is this a TLS port? Then the URL begins with wss://, or …+wss://"
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


def _client_url(scheme: str, address: str) -> dict[str, object]:
    url = f"{scheme}://{address}"
    _parse_url(url)
    return {"url": url}


def _server_place(scheme: str, address: str) -> dict[str, object]:
    place = _parse_url(f"{scheme}://{address}")
    return {"host": place.host, "port": place.port, "path": None if place.resource == "/" else place.resource}


@wraps(serve)
async def _serve_plain(
    handler: Callable[[WebSocketStream], Awaitable[None]],
    port: int,
    *,
    host: str,
    tls: object = None,
    ssl_context: object = None,
    **options: Any,
) -> None:
    if tls is not None or ssl_context is not None:
        raise ValueError(f"ws {join_host_port(host, port)}: {_FOR_WSS}")
    await serve(handler, port, host=host, **options)


transport: Final = Transport("ws", connect, _serve_plain, partial(_client_url, "ws"), partial(_server_place, "ws"))
secure_transport: Final = Transport(
    "wss", connect, serve, partial(_client_url, "wss"), partial(_server_place, "wss"), needed=("tls", "ssl_context")
)


# The stream


class WebSocketStream(trio.abc.Stream):
    """A byte stream in binary messages; its end is only clean after a close frame."""

    def __init__(
        self,
        websocket: WebSocketConnection,
        wire: GuardedStream,
        upgrade: _Upgrade,
        request: Request | None,
        identity: Identity | None,
        local: str,
    ) -> None:
        self._websocket = websocket
        self._wire = wire
        self.peer: str = upgrade.peer
        """The other end, for people: `ws 127.0.0.1:7000/chat`."""
        self._request = request
        self._identity = identity
        self._local = local
        self._close_timeout = upgrade.close_timeout
        self._rest = memoryview(b"")
        self._closed = False
        self._told: Reason | None = None
        self._sending = OneAtATime("sending on this WebSocket")
        self._receiving = OneAtATime("receiving from this WebSocket")

    @property
    def local(self) -> str:
        """This end, in the same form and without a path."""
        return self._local

    @property
    def identity(self) -> Identity | None:
        """The identity that the stream below gives: over TLS by the certificate that was verified."""
        return self._identity

    @property
    def request(self) -> Request | None:
        """The request that opened it; None on the side that connected."""
        return self._request

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that both sides agreed on, if they were given some."""
        return self._websocket.subprotocol

    @property
    def peer_reason(self) -> Reason | None:
        """Why the peer closed it, by its close frame; None before that and after an end without a reason.

        The code is that of the frame if the text has none in front, and 0 if the end was an orderly one.
        """
        closed = self._websocket.closed
        if self._closed or closed is None or not self._wire.has_close_frame:
            return self._told
        told = Reason.decode((closed.reason or "").encode())
        if closed.code in CLEAN:
            return told or None
        return Reason(told.text or closed.name.lower().replace("_", " "), told.code or closed.code)

    def __repr__(self) -> str:
        return f"<WebSocketStream {self.peer}{', closed' if self._closed else ''}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else max_bytes
        if not isinstance(size, int):
            raise TypeError(f"max_bytes={max_bytes!r}: must be a whole number")
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        with self._receiving:
            if self._closed or self._rest:
                await trio.lowlevel.checkpoint()
            while not self._rest:
                try:
                    message = await self._websocket.get_message()
                except ConnectionClosed as closed:
                    return self._end(closed)
                assert isinstance(message, bytes)  # the guard lets no text through
                self._rest = memoryview(message)
            if self._closed:
                raise self._closed_here()
            taken, self._rest = bytes(self._rest[:size]), self._rest[size:]
            return taken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending:
            view = memoryview(data).cast("B")
            if not view.nbytes or self._closed or self._wire.torn:
                await trio.lowlevel.checkpoint()
            for start in range(0, view.nbytes or 1, PIECE_SIZE):
                if self._closed:
                    raise self._closed_here()
                if self._wire.torn:
                    raise trio.BrokenResourceError(f"{self.peer}: an earlier send was cut short inside a message")
                piece = bytes(view[start : start + PIECE_SIZE])
                if piece:
                    await self._send(piece)

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self._closed:
                await trio.lowlevel.checkpoint()
                raise self._closed_here()
            await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Exchange close frames and close, within the close timeout; unread data is discarded."""
        await self._close(DONE, None)

    async def close_with(self, reason: Reason) -> None:
        """Close as `aclose` does, and say why in the close frame: 1008 for codes of 400 to 499, 1011 for others."""
        await self._close(
            POLICY if 400 <= reason.code < 500 else INTERNAL_ERROR, reason.encode(CLOSE_TEXT_MOST).decode()
        )

    async def _close(self, code: int, text: str | None) -> None:
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._told = self.peer_reason  # the answer to our own frame repeats what that says
        self._closed = True
        try:
            with trio.move_on_after(self._close_timeout):
                if not self._wire.torn:
                    await self._websocket.aclose(code, text)
                await self._wire.aclose()
        finally:
            await close_at_once(self._wire)

    async def _send(self, piece: bytes) -> None:
        try:
            await self._websocket.send_message(piece)
        except (ConnectionClosed, ProtocolError) as error:
            if self._closed:
                raise self._closed_here() from None
            raise trio.BrokenResourceError(f"{self.peer}: {self._why(error)}") from error

    def _end(self, closed: ConnectionClosed) -> bytes:
        if self._closed:
            raise self._closed_here() from None
        if self._wire.failure is None and closed.reason is not None and closed.reason.code in CLEAN:
            return b""
        raise trio.BrokenResourceError(f"{self.peer}: {self._why(closed)}") from (self._wire.failure or closed)

    def _why(self, error: Exception) -> str:
        if self._wire.failure is not None:
            return str(self._wire.failure)
        reason = self._websocket.closed
        if reason is None:
            return f"the WebSocket is over ({type(error).__name__})"
        if reason.code == 1006:
            return "the connection ended without a close frame"
        return f"closed with {reason.code} {reason.name}{f': {reason.reason!r}' if reason.reason else ''}"

    def _closed_here(self) -> trio.ClosedResourceError:
        return trio.ClosedResourceError("this WebSocket was closed on our side")


_Upgraded = tuple[WebSocketConnection, Request | None]


@attrs.frozen
class _Upgrade:
    """How one end starts the WebSocket, and its limits."""

    start: Callable[..., Awaitable[_Upgraded]]
    """Does the upgrade, given a nursery, the stream and the sizes that trio-websocket keeps to."""
    peer: str
    handshake_timeout: float
    close_timeout: float
    message_most: int


class _Tasks:
    """Stands in for a nursery: keeps a task's failure for the waiting task instead of raising it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.waiting = trio.CancelScope()
        self.failure: Exception | None = None

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, task)

    async def _run(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:
            self.failure = error
        finally:
            self.waiting.cancel()


@protected_manager
async def websocket_over(wire: trio.abc.Stream, upgrade: _Upgrade) -> AsyncIterator[WebSocketStream]:
    """Upgrade when entered; exchange close frames when left normally, and close at once when left by an error."""
    async with background() as nursery:
        guarded = GuardedStream(wire, message_most=upgrade.message_most)
        try:
            websocket, request = await _upgrade(nursery, guarded, upgrade)
            identity: Identity | None = getattr(wire, "identity", None)
            place = getattr(wire, "local", "").partition(" ")[2]
            local = f"{upgrade.peer.partition(' ')[0]} {place}" if place else ""
            stream = WebSocketStream(websocket, guarded, upgrade, request, identity, local)
            yield stream
            await stream.aclose()
        finally:
            await close_at_once(guarded)


async def _upgrade(nursery: trio.Nursery, wire: GuardedStream, upgrade: _Upgrade) -> _Upgraded:
    tasks = _Tasks(nursery)
    tasks.waiting.deadline = trio.current_time() + upgrade.handshake_timeout
    sizes = {"max_message_size": upgrade.message_most, "receive_buffer_size": RECEIVE_SIZE}
    with tasks.waiting, suppress(ConnectionClosed):  # the peer went away before the answer
        # Of the nursery only `start_soon` is used.
        return await upgrade.start(tasks, wire, message_queue_size=1, **sizes)
    if isinstance(tasks.failure, ConnectionRejected):
        told = Reason.decode(tasks.failure.body or b"").text
        why = f"the upgrade was answered with HTTP {tasks.failure.status_code}{f': {told!r}' if told else ''}"
    elif wire.failure is not None:
        why = str(wire.failure)
    elif trio.current_time() >= tasks.waiting.deadline:
        why = f"the upgrade was not over within {upgrade.handshake_timeout:g} s (handshake_timeout=)"
    else:
        why = "the peer hung up during the upgrade, or does not speak WebSocket"
        if found := looks_like(wire.head):
            why += f"; its bytes look like {found}"
        elif hint := wire.hint_if_silent:
            why += f". {hint}"
    raise HandshakeFailed(f"{upgrade.peer}: {why}") from tasks.failure


# Limits on what a peer makes the library hold


class Violation(Exception):
    """The peer broke a rule or a limit of this transport."""


class FrameCount:
    """Counts the frames of one direction, which follow an HTTP head, by their headers.

    trio-websocket bounds the payload of a message, but keeps an object for every fragment and every piece of a frame
    that came alone, and an HTTP refusal of any length: a few bytes of the peer could cost a hundred here, without end.
    """

    def __init__(self, *, message_most: int) -> None:
        self._message_most = message_most
        self._http: bytearray | None = bytearray()
        self._header = b""  # of a frame, not whole yet
        self._payload_left = 0
        self._size = 0
        self._fragments = 0
        self.has_close: bool = False
        """True once a close frame has begun."""

    @property
    def missing(self) -> int:
        """Bytes missing of the current payload."""
        return self._payload_left

    def feed(self, data: bytes | bytearray) -> bool:
        """Return True if a frame ended in `data`, so that it must be handed on now; raises `Violation`."""
        if self._http is not None:
            return self._feed_http(data)
        whole, at, ended = self._header + data, 0, False
        self._header = b""
        while at < len(whole):
            if not self._payload_left:
                start = self._begin_frame(whole, at)
                if start is None:
                    self._header = bytes(whole[at:])
                    break
                at = start
            taken = min(self._payload_left, len(whole) - at)
            self._payload_left -= taken
            at += taken
            ended = ended or not self._payload_left
        return ended

    def _feed_http(self, data: bytes | bytearray) -> bool:
        assert self._http is not None
        self._http += data
        end = self._http.find(HEAD_END)
        if (len(self._http) if end < 0 else end) > HEAD_MOST:
            raise Violation(f"an HTTP head of more than {HEAD_MOST} bytes")
        if end < 0:
            return True
        is_refusal = self._http.startswith(b"HTTP/") and self._http[8:12] != b" 101"
        if is_refusal:
            if len(self._http) > end + HEAD_MOST:
                raise Violation(f"an HTTP refusal of more than {HEAD_MOST} bytes")
            return True
        frames, self._http = bytes(self._http[end + len(HEAD_END) :]), None
        self.feed(frames)
        return True

    def _begin_frame(self, data: bytes | bytearray, at: int) -> int | None:
        """Read the header at `at`; return where the payload begins, or None when more bytes are needed."""
        if len(data) - at < 2:
            return None
        first, second = data[at], data[at + 1]
        size, start = second & 0x7F, at + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            if len(data) < start + width:
                return None
            size, start = int.from_bytes(data[start : start + width], "big"), start + width
        if second & 0x80:
            start += 4
        if len(data) < start:
            return None
        self._count(first & 0x0F, bool(first & 0x80), size)
        self._payload_left = size
        return start

    def _count(self, opcode: int, final: bool, size: int) -> None:
        if opcode == TEXT:
            raise Violation("a text frame came; only binary messages carry this byte stream")
        if opcode >= CONTROL:
            self.has_close = self.has_close or opcode == CLOSE
            if size > 125:
                raise Violation(f"a control frame of {size} bytes, where 125 are allowed")
            return
        self._size += size
        self._fragments += 1
        if self._size > self._message_most:
            raise Violation(f"a message of {self._size} bytes or more, against message_most={self._message_most}")
        if self._fragments > FRAGMENTS_MOST:
            raise Violation(f"a message in more than {FRAGMENTS_MOST} fragments")
        if final:
            self._size = self._fragments = 0


class GuardedStream(trio.abc.Stream):
    """The stream that trio-websocket reads and writes: applies the limits, and keeps errors that it drops."""

    def __init__(self, wire: trio.abc.Stream, *, message_most: int) -> None:
        self._wire = wire
        self._count = FrameCount(message_most=message_most)
        self._held = bytearray()
        self._turns = turns()
        self._rest = memoryview(b"")  # received and not handed on yet
        self._began = 0.0  # when handing it on began
        self.torn: bool = False
        """True once a write was cut short, after which the peer cannot understand anything more."""
        self.failure: Exception | None = None
        """Why reading ended, unless by the end of the stream."""
        self.head: bytes = b""
        """The first bytes that came."""

    @property
    def hint_if_silent(self) -> str | None:
        """What to try if the peer sent nothing."""
        return None if self.head else getattr(self._wire, "hint_if_silent", None)

    @property
    def has_close_frame(self) -> bool:
        """True once the peer has begun to send a close frame."""
        return self._count.has_close

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        while True:
            try:
                data = await self._next(max_bytes)
                complete = self._count.feed(data)
            except Violation as violation:
                self.failure = violation
                raise trio.BrokenResourceError(str(violation)) from violation
            except trio.BrokenResourceError as error:
                self.failure = error
                raise
            if not self._held and (complete or len(data) >= TOGETHER or not data):
                return data
            self._held += data
            if complete or len(self._held) >= TOGETHER or not data:
                together, self._held = self._held, bytearray()
                return together

    async def _next(self, max_bytes: int | None) -> bytes | bytearray:
        """Return what came in small slices, since trio-websocket parses all frames of one before it reads again."""
        if not self._rest:
            data = await self._wire.receive_some(max_bytes)
            self.head = self.head or bytes(data[:HEAD])
            if len(data) <= SLICE:
                return data
            self._rest = memoryview(data)
            self._began = self._turns.now()
        elif self._turns.now() - self._began > self._turns.allowance:
            await self._turns.wait()
            self._began = self._turns.now()
        size = max(SLICE, self._count.missing)
        taken, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return taken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._wire.send_all(data)
        except BaseException:
            self.torn = True
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._wire.aclose()


protect_package("muxkit_adapters")
