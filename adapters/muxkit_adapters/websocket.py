"""Byte streams in binary WebSocket messages: the transports `ws` and `wss`.

trio-websocket does the HTTP upgrade, and `WebSocketStream` reads and writes the frames afterwards. A server can also
deliver static pages on the same port, for browsers that connect to it.
"""

from __future__ import annotations

import operator
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial, wraps
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import trio
from trio_websocket import (
    CloseReason,
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    wrap_client_stream,
    wrap_server_stream,
)

from muxkit import TLS, Identity, Limits, Refused, Request
from muxkit.runtime import (
    HEAD,
    Reason,
    Refusing,
    background,
    close_at_once,
    current_place,
    looks_like,
    may_log,
    protect_package,
    protected_manager,
    turns,
)
from muxkit_web import Pages
from muxkit_web.pages import PageRequest, read_request

from . import tcp
from ._addresses import Transport, exposed, is_numeric, join_host_port, parse_host_port
from ._errors import HandshakeFailed, PlaintextWarning
from ._frames import (
    CLOSE,
    CLOSE_TEXT_MOST,
    PIECE_SIZE,
    PING,
    PONG,
    FrameReader,
    Violation,
    close_payload,
    control_frame,
    data_frames,
    read_close,
)
from ._listen import log, serve_handshakes
from ._sockets import RECEIVE_SIZE, Buffers, OneAtATime, SocketStream, in_batches, rest_of
from .balancers import Balancers
from .tls import TLSStream, acceptor, handshaken

__all__ = [
    "HandshakeFailed",
    "PlaintextWarning",
    "WebSocketStream",
    "connect",
    "secure_transport",
    "serve",
    "transport",
]

HANDSHAKE_TIMEOUT = 30.0  # s for a client's upgrade; a server has Limits.handshake
CLOSE_TIMEOUT = 5.0  # s for the peer to answer our close frame
VISIT_TIMEOUT = 60.0  # s for a browser to receive a file
MESSAGE_MOST = 262_144  # bytes of the largest message that is accepted
DONE, POLICY, INTERNAL_ERROR = 1000, 1008, 1011  # codes of close frames
CLEAN = {1000, 1001, 1005}  # normal closure, going away, and a close frame without a code (RFC 6455, 7.4.1)
FORM = "expected host:port and an optional path, such as 127.0.0.1:7000/chat?room=1"

HEAD_MOST = 16_384  # bytes of the upgrade's HTTP head, and of the body of a refusal
DISCARDED_MOST = 4 * 1024 * 1024  # bytes to discard while waiting for the peer's close frame
SLICE = 128  # bytes; parsing fewer takes less time than reading the clock
PLAIN_TEXT = [(b"Content-Type", b"text/plain; charset=utf-8")]
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
OUR_HEADERS = {"connection", "upgrade"}
NOT_YOURS = {"host", "content-length", "transfer-encoding"}

Headers = Mapping[str, str] | Sequence[tuple[str, str]]

HEAD_END = b"\r\n\r\n"
_FOR_WSS = "tls= and ssl_context= are for wss"

Wire = SocketStream | TLSStream


@protected_manager
async def connect(
    url: str,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    headers: Headers = (),
    subprotocols: Sequence[str] = (),
    connect_timeout: float = tcp.CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    proxy: str | None = None,
    insecure: bool = False,
) -> AsyncIterator[WebSocketStream]:
    """Open a byte stream over the WebSocket at `url`.

    Leaving the block normally exchanges close frames. Leaving it with an error closes the connection abruptly.

    Args:
        url: `ws://host:port/path` or `wss://host:port/path`.
        tls: the certificates to trust and to present, for `wss`.
        ssl_context: a context to use instead of `tls`.
        server_hostname: the name that the certificate must have, and that the request sends. By default the host in the
            URL.
        headers: additional headers of the request, such as `{"Authorization": "Bearer …"}`.
        subprotocols: subprotocols to offer. A server that accepts none of them is refused.
        connect_timeout: seconds to connect.
        handshake_timeout: seconds for the TLS handshake, and for the upgrade.
        close_timeout: seconds for the peer to answer our close frame.
        message_most: bytes of the largest message to accept.
        proxy: the URL of a proxy to connect through, or "environment".
        insecure: allow `ws` beyond loopback, and `wss` with a context that doesn't verify.

    Raises:
        HandshakeFailed: if the TLS handshake or the upgrade fails. The error has the reason, and the HTTP status.
        OSError: if the host doesn't answer.
        ValueError: if an argument is invalid, or for `ws` beyond loopback without `insecure=True`.
    """
    place = _parse_url(url)
    extra_headers = encode_headers(headers)
    check_subprotocols(subprotocols)
    wire: AbstractAsyncContextManager[Wire]
    verifies = True
    if place.secure:
        verifies = tls.verify if tls is not None else not insecure
        wire = handshaken(
            place.host,
            place.port,
            tls=tls,
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            connect_timeout=connect_timeout,
            handshake_timeout=handshake_timeout,
            close_timeout=close_timeout,
            proxy=proxy,
            insecure=insecure,
        )
    elif tls is not None or ssl_context is not None:
        raise ValueError(f"{place}: {_FOR_WSS}")
    else:
        wire = _plain(place, connect_timeout, proxy, insecure=insecure)
    peer = f"{place}{'' if verifies else ' (not verified, insecure)'}"

    async def start(nursery: trio.Nursery, guarded: trio.abc.Stream, **sizes: Any) -> _Upgraded:
        stream: Any = guarded  # annotated as a socket, used as any stream
        asked: dict[str, Any] = {"subprotocols": subprotocols or None, "extra_headers": extra_headers or None}
        named = server_hostname or place.host_header
        websocket = await wrap_client_stream(nursery, stream, named, place.resource, **asked, **sizes)
        if subprotocols and websocket.subprotocol is None:
            text = f"{peer}: the server takes none of the subprotocols {', '.join(subprotocols)}"
            raise HandshakeFailed(text, status=101)
        return websocket, None

    async with wire as stream:
        if isinstance(stream, SocketStream) and stream.is_exposed:
            peer = f"{place} (plaintext, insecure)"
        upgrade = _Upgrade(start, peer, handshake_timeout, close_timeout, message_most)
        async with websocket_over(stream, upgrade) as websocket:
            yield websocket


async def serve(
    handler: Callable[[WebSocketStream], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    path: str | None = None,
    origins: Collection[str] = (),
    pages: Pages | None = None,
    subprotocols: Sequence[str] = (),
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: Limits | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    message_most: int = MESSAGE_MOST,
    insecure: bool = False,
    balancers: Collection[str] = (),
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each WebSocket, until cancelled. With `tls` or `ssl_context`, this is `wss`.

    A request from a web page has an Origin header. It is refused with status 403 unless its origin is in `origins`,
    because the pages of any site can connect to 127.0.0.1. With `pages`, the server's own pages may also connect, if
    the browser requested them by the server's IP address or as localhost. Pages requested by any other name need an
    entry in `origins`, because the owner of a domain can point it at any address.

    Args:
        handler: gets each stream, which is closed afterwards.
        port: the port. 0 chooses a free one.
        host: the address to bind, or a host with several addresses. An empty host binds all addresses.
        path: the path of the WebSocket. Requests for another path are refused with status 404. None accepts any path.
        origins: the origins of web pages that may connect, such as `https://example.org`.
        pages: static files to deliver to browsers on the same port.
        subprotocols: subprotocols to accept, in order of preference. If the client offers none of them, none is used.
        tls: the server's certificate and key. After a reload, new connections use the new ones.
        ssl_context: a context to use instead of `tls`.
        limits: how many connections and handshakes are allowed, and the time for a handshake.
        close_timeout: seconds for the peer to answer our close frame.
        message_most: bytes of the largest message to accept.
        insecure: allow `ws` beyond loopback.
        balancers: addresses or networks of load balancers. A connection from one of them must begin with a header of
            the PROXY protocol, which names the real peer.
        listeners: sockets that were bound elsewhere, used instead of `host` and `port`.
        task_status: gets a list of the addresses, with the path.

    Raises:
        ValueError: if an argument is invalid, or for `ws` beyond loopback without `insecure=True`.
        OSError: if an address can't be bound.
    """
    limits = limits or Limits()
    trusted = Balancers(balancers)
    check_subprotocols(subprotocols)
    kind = "ws" if tls is None and ssl_context is None else "wss"
    unprotected = False
    secure: Callable[[SocketStream], AbstractAsyncContextManager[Wire]] = nullcontext
    if kind == "ws":
        unprotected = await exposed("ws", host, port, insecure=insecure, secure="wss")
    else:
        secure = acceptor(tls, ssl_context, limits=limits, close_timeout=close_timeout)

    async def start(nursery: trio.Nursery, guarded: trio.abc.Stream, *, host: str = "", **sizes: Any) -> _Upgraded:
        asked = await wrap_server_stream(nursery, guarded, **sizes)
        refusal = _refusal(kind, asked.path, asked.headers, path, origins, host)
        if refusal is not None:
            status, why = refusal
            await asked.reject(status, extra_headers=[*PLAIN_TEXT], body=why.encode())
            raise HandshakeFailed(f"{kind}: the upgrade was answered with {status}")
        chosen = next((each for each in subprotocols if each in asked.proposed_subprotocols), None)
        requested, _, query = asked.path.partition("?")
        request = Request(path=requested, query=query, headers=other_headers(asked.headers), subprotocol=chosen)
        return await asked.accept(subprotocol=chosen), request

    @protected_manager
    async def accept(wire: SocketStream) -> AsyncIterator[WebSocketStream | _Visit]:
        begin: Callable[..., Awaitable[_Upgraded]] = start
        async with secure(wire) as stream:
            if (place := current_place()) is not None:
                place.progressed()
            began = b""
            if pages is not None:
                request = await read_request(stream)
                if request is None:
                    raise HandshakeFailed(f"{wire.peer}: the peer hung up before its request, or sent no HTTP")
                if not request.is_upgrade:
                    yield _Visit(stream, request, pages)
                    return
                began = request.head
                begin = partial(start, host=request.header("host"))
            upgrade = _Upgrade(begin, wire.peer, limits.handshake, close_timeout, message_most)
            async with websocket_over(stream, upgrade, began) as websocket:
                yield websocket

    open_to, addresses = await tcp.listen(kind, host, port, exposed=unprotected, balancers=trusted, listeners=listeners)
    public = [address + (path or "") for address in addresses]
    entrance = _entrance_beside_pages(handler)
    introduced = trusted.before(accept)
    await serve_handshakes(open_to, introduced, entrance, limits=limits, started=lambda: task_status.started(public))


@attrs.frozen
class _Visit:
    """A connection whose first request is for a page."""

    stream: Wire
    request: PageRequest
    pages: Pages

    async def answer(self) -> None:
        with trio.move_on_after(VISIT_TIMEOUT):
            await self.pages.answer(self.stream, self.request)
            await self.stream.aclose()


@attrs.frozen
class _EntranceBesidePages:
    """Answers requests for pages, and calls a handler with each WebSocket."""

    handler: Callable[[WebSocketStream], Awaitable[None]]

    async def __call__(self, link: WebSocketStream | _Visit) -> None:
        await (link.answer() if isinstance(link, _Visit) else self.handler(link))


@attrs.frozen
class _RefusingEntranceBesidePages(_EntranceBesidePages):
    """The same for a handler that can also refuse connections when the server is full."""

    refusing: Refusing

    async def refuse(self, link: WebSocketStream | _Visit, refused: Refused, /) -> None:
        if isinstance(link, _Visit):
            await link.request.respond(link.stream, HTTPStatus.SERVICE_UNAVAILABLE, body=str(refused))
        else:
            await self.refusing.refuse(link, refused)


def _entrance_beside_pages(handler: Callable[[WebSocketStream], Awaitable[None]]) -> _EntranceBesidePages:
    """Return a handler for both kinds of connections. A server without pages only has WebSockets."""
    given: object = handler
    if isinstance(given, Refusing):
        return _RefusingEntranceBesidePages(handler, given)
    return _EntranceBesidePages(handler)


def _refusal(
    kind: str,
    requested: str,
    headers: list[tuple[bytes, bytes]],
    path: str | None,
    origins: Collection[str],
    pages_host: str,
) -> tuple[int, str] | None:
    """Return the status and the text with which to refuse a request, or None to accept it.

    `pages_host` is the Host header of the request if this server has pages. Otherwise it is empty.
    """
    if path is not None and urlsplit(requested).path != urlsplit(path).path:
        return 404, "this server has another path"
    given = dict(headers).get(b"origin")
    origin = "" if given is None else given.decode("latin-1")
    if given is None or origin in origins or _is_own_page(kind, origin, pages_host):
        return None
    return 403, refuse_origin(origin)


def refuse_origin(origin: str) -> str:
    """Log that a page of a foreign origin tried to connect, and return the text of the refusal."""
    if may_log("pages of foreign origins"):
        # log: A web page of another origin tried to connect. If it is one of yours, list it in `origins=`, or with
        # `--origin`.
        log.warning("refused a WebSocket from a page of %.200r: origins= lists the pages that may connect", origin)
    return f"pages of {origin[:200]!r} may not connect here: the server lists those that may in origins="


def _is_own_page(kind: str, origin: str, pages_host: str) -> bool:
    """Return True for a page that this server delivered under an IP address or as localhost.

    A domain name proves nothing, because its owner could point it at this server a moment later (DNS rebinding).
    """
    if origin != f"{'http' if kind == 'ws' else 'https'}://{pages_host}":
        return False
    with suppress(ValueError):
        host, _ = parse_host_port(pages_host, default_port=0)
        return host == "localhost" or is_numeric(host)
    return False


def encode_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Check and encode the headers of a request. Raises ValueError, whose text contains no header values."""
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


def other_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Return the headers of a request for `Request`, without those of the WebSocket handshake."""
    told = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    return tuple(header for header in told if not is_ours(header[0]))


def close_code_for(reason: Reason) -> int:
    """Return the code of the close frame for a reason: 1008 for codes from 400 to 499, and 1011 for others."""
    return POLICY if 400 <= reason.code < 500 else INTERNAL_ERROR


def reason_of_close(code: int, text: str, name: str) -> Reason | None:
    """Return the reason in the peer's close frame, or None for an orderly end without a reason.

    `name` is the text for a code that came without one.
    """
    told = Reason.decode(text.encode())
    return told or None if code in CLEAN else Reason(told.text or name, told.code or code)


def is_ours(name: str) -> bool:
    """Return True if a header belongs to the handshake of a WebSocket. The name must be in lower case."""
    return name in OUR_HEADERS or name.startswith("sec-websocket-")


def check_subprotocols(names: Sequence[str]) -> None:
    """Raise ValueError if a name of a subprotocol is invalid."""
    if isinstance(names, str) or not all(TOKEN.fullmatch(name) for name in names):
        raise ValueError(f"subprotocols={names!r}: expected names without spaces, such as ['chat.v2', 'chat.v1']")


@protected_manager
async def _plain(
    place: _Place, connect_timeout: float, proxy: str | None, *, insecure: bool
) -> AsyncIterator[SocketStream]:
    hosts, plaintext = [(place.host, place.port)], tcp.Plaintext(insecure=insecure, secure="wss")
    stream, _ = await tcp.dial(
        "ws", hosts, connect_timeout=connect_timeout, unsent=tcp.UNSENT, plaintext=plaintext, proxy=proxy
    )
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
        # The query is left out, because it may contain a token.
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


def _places(address: str) -> list[tuple[str, int]]:
    place = _parse_url(f"ws://{address}")
    return [(place.host, place.port)]


transport: Final = Transport(
    "ws", connect, _serve_plain, partial(_client_url, "ws"), partial(_server_place, "ws"), places=_places, secure="wss"
)
secure_transport: Final = Transport(
    "wss", connect, serve, partial(_client_url, "wss"), partial(_server_place, "wss"), needed=("tls", "ssl_context")
)


# The stream


class WebSocketStream(trio.abc.Stream):
    """A byte stream in binary messages. Its end is clean only after a close frame.

    trio-websocket does the upgrade. This class reads and writes the frames. It has no background task, and copies
    payload only if it has to be masked.

    Cancelling `receive_some` loses no data. Cancelling `send_all` while it waits for the socket leaves a frame
    incomplete, and all later sends raise `trio.BrokenResourceError`.
    """

    def __init__(self, wire: Wire, upgrade: _Upgrade, upgraded: _Upgraded, rest: bytes) -> None:
        websocket, self._request = upgraded
        self._wire = wire
        self._is_client = self._request is None
        self._subprotocol = websocket.subprotocol
        self.peer: str = upgrade.peer
        """The name of the other end, such as `ws 127.0.0.1:7000/chat`."""
        place = wire.local.partition(" ")[2]
        self._local = f"{self.peer.partition(' ')[0]} {place}" if place else ""
        self._close_timeout = upgrade.close_timeout
        self._frames = FrameReader(is_masked=not self._is_client, message_most=upgrade.message_most)
        self._frames.feed(rest)
        self._may_hold_more = bool(rest)
        self._turns = turns()
        self._began = 0.0  # when parsing of the last read began
        self._closed = False
        self._failure: Exception | None = None  # the reason why nothing more can be received
        self._ended: CloseReason | None = None  # of the peer's close frame
        self._told: Reason | None = None
        self._unsent: list[bytes | memoryview] = []  # frames, of which the first may have been sent in part
        self._owed = 0  # bytes at the start of the next write that are already in frames
        self._pong = b""  # the latest pong, while the socket accepts nothing
        self._is_torn = False  # a send was cancelled inside a frame
        self._sent: trio.Event | None = None  # set for a close that waits for a running send
        self._sending = OneAtATime("sending on this WebSocket")
        self._receiving = OneAtATime("receiving from this WebSocket")

    @property
    def local(self) -> str:
        """The name of this end, in the form of `peer` and without a path."""
        return self._local

    @property
    def identity(self) -> Identity | None:
        """The identity of the peer. Over TLS, it comes from the verified certificate."""
        return self._wire.identity

    @property
    def request(self) -> Request | None:
        """The request that opened the WebSocket. None on the client's side."""
        return self._request

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that both sides agreed on, or None."""
        return self._subprotocol

    @property
    def peer_reason(self) -> Reason | None:
        """The reason in the peer's close frame. None before it arrived, and after an orderly end without a reason.

        The code is the one at the beginning of the text, if there is one. Otherwise it is the code of the close frame,
        or 0 after an orderly end.
        """
        ended = self._ended
        if self._closed or ended is None:
            return self._told
        return reason_of_close(ended.code, ended.reason or "", ended.name.lower().replace("_", " "))

    def __repr__(self) -> str:
        return f"<WebSocketStream {self.peer}{', closed' if self._closed else ''}>"

    # Receiving

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        self._receiving.begin()
        try:
            await self.wait_readable()
            while (data := self.receive_nowait(size)) is None:
                await self.wait_readable()
        finally:
            self._receiving.is_busy = False
        return data

    async def wait_readable(self) -> None:
        """Sleep until there may be something to receive, or an error. May return early."""
        if self._closed or self._failure is not None or self._ended is not None:
            await trio.lowlevel.checkpoint()
        elif not self._may_hold_more:
            await self._wire.wait_readable()
        elif self._turns.now() - self._began > self._turns.allowance:
            await self._turns.wait()
            self._began = self._turns.now()
        else:
            await trio.lowlevel.checkpoint()

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return data that has arrived, b"" at the end of the stream, or None if there is no payload yet."""
        if self._closed:
            raise self._closed_here()
        frames = self._frames
        if not self._may_hold_more:
            if self._failure is not None or self._ended is not None:
                return self._end()
            try:
                came = self._wire.receive_nowait(max(max_bytes, RECEIVE_SIZE))
            except trio.BrokenResourceError as error:
                self._failure = error
                return self._end()
            if came is None:
                return None
            if not came:
                self._failure = trio.BrokenResourceError("the connection ended without a close frame")
                return self._end()
            frames.feed(came)
            if len(came) > SLICE:
                self._began = self._turns.now()
        data = b""
        try:
            data = frames.take(max_bytes)
            if frames.controls:
                self._answer(frames)
        except Violation as violation:
            self._violated(violation)
        self._may_hold_more = frames.may_hold_more
        if data:
            return data
        return self._end() if self._failure is not None or self._ended is not None else None

    def stop_waiting(self) -> None:
        """Make `wait_readable` return now."""
        self._wire.stop_waiting()

    def _answer(self, frames: FrameReader) -> None:
        """Answer pings and the close frame."""
        controls, frames.controls = frames.controls, []
        for opcode, payload in controls:
            if opcode == PING:  # only the latest pong is kept, so a peer can't make pongs pile up
                self._pong = control_frame(PONG, payload, is_masked=self._is_client)
            else:
                code, text = read_close(payload)
                self._ended = CloseReason(code, text or None)
                self._pong = b""
                if not self._closed:
                    self._put_close(code, text)
        self._push_beside()

    def _violated(self, violation: Violation) -> None:
        self._failure = violation
        self._frames.may_hold_more = False
        if not self._closed:
            self._put_close(violation.code, "")
            self._push_beside()

    def _end(self) -> bytes:
        if self._failure is None and self._ended is not None and self._ended.code in CLEAN:
            return b""
        raise trio.BrokenResourceError(f"{self.peer}: {self._why()}") from self._failure

    def _why(self) -> str:
        ended = self._ended
        if self._failure is not None or ended is None:
            return str(self._failure)
        return f"closed with {ended.code} {ended.name}{f': {ended.reason!r}' if ended.reason else ''}"

    # Sending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending, memoryview(data).cast("B") as view:
            await self._send([view] if len(view) else [])

    async def send_buffers(self, buffers: Buffers) -> None:
        """Send several buffers, as `send_all` does. They share messages."""
        with self._sending:
            await self._send([buffer for buffer in buffers if len(buffer)])

    def send_nowait(self, buffers: Buffers) -> int:
        """Send as much as the kernel accepts now, in order. Return the number of bytes, which may be 0.

        The result counts complete messages only. The remaining data is already in frames, so the next write must begin
        with it.
        """
        self._sending.check()
        self._check_sendable()
        if self._owed and not self._push():
            return 0
        total = sum(map(len, buffers))
        self._put(buffers)
        if self._push():
            return total
        owed = min(total, sum(map(len, self._unsent)) + PIECE_SIZE)
        self._owed += owed
        return total - owed

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self._closed:
                await trio.lowlevel.checkpoint()
                raise self._closed_here()
            await self._wire.wait_send_all_might_not_block()

    async def _send(self, buffers: Buffers) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        try:
            self._check_sendable()
            for batch in in_batches(buffers):
                if self._ended is not None or self._failure is not None:
                    self._check_sendable()  # the answer to a close frame was sent in the meantime
                self._put(batch)
                while not self._push():
                    waited = True
                    await self._wire.wait_send_all_might_not_block()
        except (trio.Cancelled, KeyboardInterrupt):
            self._is_torn = self._is_torn or waited
            raise
        finally:
            if self._sent is not None:
                self._sent.set()
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    def _put(self, buffers: Buffers) -> None:
        if self._owed:
            owed, total = self._owed, sum(map(len, buffers))
            buffers = rest_of(list(buffers), min(owed, total))
            self._owed -= min(owed, total)
        if buffers:
            self._unsent += data_frames(buffers, is_masked=self._is_client)

    def _put_close(self, code: int, text: str) -> None:
        payload = close_payload(code, text)
        self._unsent.append(control_frame(CLOSE, payload, is_masked=self._is_client))

    def _push(self) -> bool:
        """Pass the frames to the underlying stream. Return True if it accepted everything."""
        while True:
            frames = self._unsent
            if not frames:
                if not self._pong:
                    return True
                frames, self._pong = [self._pong], b""
            self._unsent = []
            taken = self._wire.send_nowait(frames)
            if taken < sum(map(len, frames)):
                rest = rest_of(frames, taken)
                # Masked frames are our own. All others refer to the caller's buffers, which it may reuse.
                self._unsent = rest if self._is_client else [b"".join(rest)]
                return False

    def _push_beside(self) -> None:
        """Send the output that reading has produced, unless a running send will send it."""
        if not self._sending.is_busy and not self._is_torn:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the next send reports the error
                self._push()

    def _check_sendable(self) -> None:
        if self._closed:
            raise self._closed_here()
        if self._is_torn:
            raise trio.BrokenResourceError(f"{self.peer}: an earlier send was cut short inside a message")
        if self._ended is not None or self._failure is not None:
            raise trio.BrokenResourceError(f"{self.peer}: {self._why()}") from self._failure

    # The end

    async def aclose(self) -> None:
        """Exchange close frames and close, within the close timeout. Unread data is discarded."""
        await self._close(DONE, "")

    async def close_with(self, reason: Reason) -> None:
        """Close as `aclose` does, and send the reason in the close frame.

        The code of the frame is 1008 for codes from 400 to 499, and 1011 for others.
        """
        await self._close(close_code_for(reason), reason.encode(CLOSE_TEXT_MOST).decode())

    async def _close(self, code: int, text: str) -> None:
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._told = self.peer_reason  # stored now, because the answer to our close frame repeats our own reason
        self._closed = True
        try:
            with trio.move_on_after(self._close_timeout):
                self._wire.stop_waiting()
                await trio.lowlevel.checkpoint_if_cancelled()
                if self._sending.is_busy:
                    self._sent = trio.Event()
                    await self._sent.wait()
                if not self._is_torn and self._failure is None:
                    await self._say_goodbye(code, text)
                await self._wire.aclose()
        finally:
            await close_at_once(self._wire)

    async def _say_goodbye(self, code: int, text: str) -> None:
        """Send a close frame and read until the peer's arrives. If it has arrived already, finish answering it."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, Violation):
            if self._ended is None:
                self._put_close(code, text)
            while not self._push():
                await self._wire.wait_send_all_might_not_block()
            discarded = 0
            while self._ended is None:
                discarded += len(self._frames.take(RECEIVE_SIZE))
                self._answer(self._frames)
                if discarded > DISCARDED_MOST:
                    await trio.sleep_forever()  # until the timeout; closing now could lose the end of our own data
                if self._frames.may_hold_more:
                    await trio.lowlevel.checkpoint()
                elif self._ended is None:
                    await self._wire.wait_readable()
                    if (came := self._wire.receive_nowait(RECEIVE_SIZE)) == b"":
                        return
                    self._frames.feed(came or b"")

    def _closed_here(self) -> trio.ClosedResourceError:
        return trio.ClosedResourceError("this WebSocket was closed on our side")


_Upgraded = tuple[WebSocketConnection, Request | None]


@attrs.frozen
class _Upgrade:
    """How one side starts the WebSocket, and the limits of the stream."""

    start: Callable[..., Awaitable[_Upgraded]]
    """Does the upgrade. Its arguments are a nursery, the stream, and the buffer size for trio-websocket."""
    peer: str
    handshake_timeout: float
    close_timeout: float
    message_most: int


class _Tasks:
    """Replaces a nursery for trio-websocket. If a task fails, its error is kept for the task that waits."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self.waiting = trio.CancelScope()
        self.failure: Exception | None = None

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, task)

    def cancel(self) -> None:
        """End the task of trio-websocket, which would otherwise keep reading."""
        self._scope.cancel()

    async def _run(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await task()
        except Exception as error:
            self.failure = error
        finally:
            self.waiting.cancel()


@protected_manager
async def websocket_over(wire: Wire, upgrade: _Upgrade, began: bytes = b"") -> AsyncIterator[WebSocketStream]:
    """Do the upgrade on entry. On a normal exit exchange close frames, and on an error close abruptly.

    `began` holds the bytes that were already read from the wire.
    """
    try:
        async with background() as nursery:
            below = UpgradeStream(wire, began)
            upgraded = await _upgrade(nursery, below, upgrade)
        stream = WebSocketStream(wire, upgrade, upgraded, below.rest)
        yield stream
        await stream.aclose()
    finally:
        await close_at_once(wire)


async def _upgrade(nursery: trio.Nursery, wire: UpgradeStream, upgrade: _Upgrade) -> _Upgraded:
    tasks = _Tasks(nursery)
    tasks.waiting.deadline = trio.current_time() + upgrade.handshake_timeout
    with tasks.waiting, suppress(ConnectionClosed):  # raised if the peer closes before the upgrade is done
        # trio-websocket uses only `start_soon` of the nursery.
        upgraded = await upgrade.start(tasks, wire, receive_buffer_size=RECEIVE_SIZE)
        tasks.cancel()
        return upgraded
    status: int | None = None
    found = looks_like(wire.head)
    if isinstance(tasks.failure, ConnectionRejected):
        status = tasks.failure.status_code
        told = Reason.decode(tasks.failure.body or b"").text
        if told.lstrip().startswith("<"):
            told = ""  # an HTML page, which doesn't help in an error text
        why = f"the upgrade was answered with HTTP {status}{f': {told!r}' if told else ''}"
    elif wire.failure is not None:
        why = f"{wire.failure}{f'; its bytes look like {found}' if found else ''}"
    elif trio.current_time() >= tasks.waiting.deadline:
        why = f"the upgrade was not over within {upgrade.handshake_timeout:g} s (handshake_timeout=)"
    else:
        why = "the peer hung up during the upgrade, or does not speak WebSocket"
        if found:
            why += f"; its bytes look like {found}"
        elif hint := wire.hint_if_silent:
            why += f". {hint}"
    if found == "an HTTP response":
        found = None  # the answer to an upgrade is an HTTP response, and `status` tells what is wrong with it
    raise HandshakeFailed(f"{upgrade.peer}: {why}", status=status, found=found) from tasks.failure or wire.failure


class UpgradeStream(trio.abc.Stream):
    """The stream that trio-websocket uses until the upgrade is done. It limits what the peer may send.

    After the HTTP head of a successful upgrade, it returns nothing more. The bytes after it are frames and stay in
    `rest`.
    """

    def __init__(self, wire: trio.abc.Stream, began: bytes = b"") -> None:
        self._wire = wire
        self._began = began
        self._http = bytearray()
        self._is_over = False  # the head is complete
        self._is_closed = False
        self.failure: Exception | None = None
        """The error that ended reading, or None. The end of the stream isn't an error."""
        self.head: bytes = b""
        """The first bytes that arrived."""
        self.rest: bytes = b""
        """The bytes after the head."""

    @property
    def hint_if_silent(self) -> str | None:
        """The advice for error texts if the peer sent nothing."""
        return None if self.head else getattr(self._wire, "hint_if_silent", None)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._is_over and not self._is_closed:
            await trio.sleep_forever()
        try:
            if self._began:
                data, self._began = self._began, b""
            else:
                data = bytes(await self._wire.receive_some(max_bytes))
            self.head = self.head or bytes(data[:HEAD])
            return self._bounded(bytes(data))
        except Violation as violation:
            self.failure = violation
            raise trio.BrokenResourceError(str(violation)) from violation
        except trio.BrokenResourceError as error:
            self.failure = error
            raise

    def _bounded(self, data: bytes) -> bytes:
        before = len(self._http)
        self._http += data
        end = self._http.find(HEAD_END)
        if (len(self._http) if end < 0 else end) > HEAD_MOST:
            raise Violation(f"an HTTP head of more than {HEAD_MOST} bytes")
        if end < 0:
            return data
        end += len(HEAD_END)
        is_refusal = self._http.startswith(b"HTTP/") and self._http[8:12] != b" 101"
        if is_refusal:
            if len(self._http) > end + HEAD_MOST:
                raise Violation(f"an HTTP refusal of more than {HEAD_MOST} bytes")
            return data
        self._is_over = True
        self.rest = bytes(self._http[end:])
        return data[: end - before]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._wire.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self._is_closed = True
        await self._wire.aclose()


protect_package("muxkit_adapters")
