"""The transport `asgi`, which serves muxkit sessions over the WebSockets of an ASGI web application.

With it, a web application and muxkit can share one port. The ASGI server (such as Hypercorn, Uvicorn or Daphne) owns
the sockets and performs the WebSocket handshakes. The web application passes the WebSockets of one path to muxkit:

    async def lifespan(application):
        async with muxkit.open_server(echo, "bpmux+asgi://mux"):
            yield

    application = Starlette(routes=[WebSocketRoute("/mux", asgi.app("mux"))], lifespan=lifespan)

The muxkit server and the ASGI application find each other by a name, which is "mux" here. Clients connect with an
ordinary URL such as `bpmux+wss://example.com/mux`, and can't see the name.

If the ASGI server uses Trio, the muxkit sessions run in the server's tasks. If it uses asyncio, open the muxkit server
with `muxkit.asyncio.open_server` instead. Trio then runs in the same thread as the asyncio event loop, in Trio's guest
mode. Sessions run in Trio, and every call of an ASGI function is made in an asyncio task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from functools import partial
from typing import Any, Final, TypeAlias

import attrs
import trio

from muxkit import Limits, Request
from muxkit.asyncio.guest import Guest, guest_of_loop
from muxkit.runtime import OneAtATime, Reason, Unsupported, protect_package, protected_manager

from ._addresses import Transport, join_host_port
from ._frames import CLOSE_TEXT_MOST, PIECE_SIZE
from ._listen import serve_connections
from ._named import NamedListener, Names
from .websocket import CLEAN, close_code_for, other_headers, reason_of_close, refuse_origin

__all__ = ["App", "AsgiStream", "app", "serve", "transport"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class AsgiStream(trio.abc.Stream):
    """A byte stream over a WebSocket of an ASGI server. It sends and receives its bytes in binary messages.

    Args:
        scope: The ASGI scope of the WebSocket, which has the address of the client and its request.
        receive: The ASGI function that returns the next event of the WebSocket.
        send: The ASGI function that sends a message on the WebSocket.
        name: The name of the muxkit server, which stands for the peer if its address is unknown.
        guest: The Trio run inside an asyncio loop to which `receive` and `send` belong, or None if they belong to Trio.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send, name: str, guest: Guest | None) -> None:
        host, port = scope.get("client") or ("", 0)
        self.peer: str = f"asgi {join_host_port(host, port)}" if host else f"asgi {name}"
        """The address of the client, as the ASGI server reports it."""
        here = scope.get("server") or ("", None)
        self.local: str = f"asgi {join_host_port(here[0], here[1])}" if here[1] else f"asgi {name}"
        self.request: Request = Request(
            path=scope["path"],
            query=scope.get("query_string", b"").decode("latin-1"),
            headers=other_headers(scope["headers"]),
        )
        self.peer_reason: Reason | None = None
        """Why the peer closed the WebSocket, or None if it gave no reason."""
        self.closed: trio.Event = trio.Event()
        """Set once nothing more will be sent or received."""
        self._receive = receive
        self._send = send
        self._guest = guest
        self._rest = b""
        self._has_ended = False
        self._sending = OneAtATime("sending on this WebSocket")
        self._receiving = OneAtATime("receiving from this WebSocket")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive bytes, as `trio.abc.ReceiveStream` specifies. A text message from the client breaks the stream."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 1")
        with self._receiving:
            await trio.lowlevel.checkpoint()
            self._check_open()
            while not self._rest and not self._has_ended:
                message = await self._called(self._receive)
                if message["type"] == "websocket.disconnect":
                    self._disconnected(message)
                elif (data := message.get("bytes")) is not None:
                    self._rest = data
                else:
                    raise trio.BrokenResourceError(f"{self.peer}: got a text message, expected binary ones")
            data = self._rest if max_bytes is None else self._rest[:max_bytes]
            self._rest = self._rest[len(data) :]
            return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, as `trio.abc.SendStream` specifies. Large data becomes several messages."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_open()
            if self._has_ended:
                raise trio.BrokenResourceError(f"{self.peer}: the WebSocket was closed by the peer")
            for begin in range(0, len(data), PIECE_SIZE):
                await self._sent({"type": "websocket.send", "bytes": bytes(data[begin : begin + PIECE_SIZE])})

    async def wait_send_all_might_not_block(self) -> None:
        """Execute a checkpoint. ASGI can't tell whether a message could be sent now."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_open()

    async def close_with(self, reason: Reason) -> None:
        """Close the WebSocket, and send the reason to the client in the close frame."""
        await self._close(close_code_for(reason), reason.encode(CLOSE_TEXT_MOST).decode())

    async def aclose(self) -> None:
        """Close the WebSocket with the code 1000, which means a normal end."""
        await self._close(1000, "")

    async def _close(self, code: int, text: str) -> None:
        if self.closed.is_set():
            await trio.lowlevel.checkpoint()
            return
        self.closed.set()
        try:
            if not self._has_ended:
                await self._sent({"type": "websocket.close", "code": code, "reason": text})
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.lowlevel.checkpoint()

    def _disconnected(self, message: Message) -> None:
        """Store the client's reason for closing the WebSocket. Raise an error unless the code means a normal end."""
        self._has_ended = True
        code, text = message.get("code", 1005), message.get("reason") or ""
        self.peer_reason = reason_of_close(code, text, f"closed with {code}")
        if code not in CLEAN:
            raise trio.BrokenResourceError(f"{self.peer}: closed with {code}{f': {text!r}' if text else ''}")

    async def _sent(self, message: Message) -> None:
        """Send an ASGI message. Servers raise various exceptions when the connection is lost."""
        try:
            await self._called(partial(self._send, message))
        except Exception as error:
            raise trio.BrokenResourceError(f"{self.peer}: the ASGI server could not send: {error!r}") from error

    async def _called(self, function: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what ASGI gives
        """Call an ASGI function in the event loop to which it belongs, and return its result."""
        if self._guest is None:
            return await function()

        async def in_asyncio() -> object:
            return await function()

        return await self._guest.run_in_asyncio(in_asyncio)

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise trio.ClosedResourceError("this WebSocket was closed on our side")

    def __repr__(self) -> str:
        return f"<AsgiStream {self.peer}{', closed' if self.closed.is_set() else ''}>"


class _Listener(NamedListener[AsgiStream]):
    """The muxkit server's end of a name. It receives the WebSockets that the application with this name gets."""

    def __init__(self, origins: Collection[str]) -> None:
        super().__init__()
        self.origins: Collection[str] = origins


_names: Final[Names[_Listener]] = Names("asgi")


@attrs.frozen
class App:
    """An ASGI application that passes its WebSockets to the muxkit server with the same name. Created by `app`."""

    name: str

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(b"upgrade", b"websocket"), (b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 426, "headers": headers})
            await send({"type": "http.response.body", "body": b"this address takes WebSockets only\n"})
        elif scope["type"] == "websocket":
            await _serve_websocket(self.name, scope, receive, send)


def app(name: str) -> App:
    """Return an ASGI application that passes its WebSockets to the muxkit server at `asgi://name`.

    The server must run in the same process. Start it with `muxkit.open_server(handler, "bpmux+asgi://name")`, or with
    `muxkit.asyncio.open_server` if the ASGI server uses asyncio. While no server with this name runs, the application
    refuses WebSockets. It answers an HTTP request that doesn't open a WebSocket with the status 426.
    """
    return App(name)


async def _serve_websocket(name: str, scope: Message, receive: Receive, send: Send) -> None:
    """Pass a WebSocket to its muxkit server, and return when it is closed."""
    await receive()  # websocket.connect
    guest: Guest | None = None
    if not trio.lowlevel.in_trio_task():
        try:
            guest = guest_of_loop()
        except RuntimeError:
            await _refuse(send, 1013, "no server of muxkit runs here")
            return
    listener = _names.find(name) if guest is None else await guest.call(partial(_lookup, name))
    if listener is None:
        await _refuse(send, 1013, f"no server of muxkit runs at asgi://{name}")
        return
    given = dict(scope["headers"]).get(b"origin")
    if given is not None and (origin := given.decode("latin-1")) not in listener.origins:
        await _refuse(send, 1008, refuse_origin(origin))
        return
    await send({"type": "websocket.accept"})
    hand_over = partial(_hand_over, listener, partial(AsgiStream, scope, receive, send, name, guest))
    await (hand_over() if guest is None else guest.call(hand_over))


async def _lookup(name: str) -> _Listener | None:
    return _names.find(name)


async def _refuse(send: Send, code: int, text: str) -> None:
    """Close a WebSocket that wasn't accepted. ASGI servers answer the upgrade request with 403."""
    await send({"type": "websocket.close", "code": code, "reason": text[:CLOSE_TEXT_MOST]})


async def _hand_over(listener: _Listener, make: Callable[[], AsgiStream]) -> None:
    """Create the stream of a WebSocket, pass it to the muxkit server, and return when the stream is closed.

    This runs in Trio, where the stream must be created. ASGI servers close a WebSocket when the application returns, so
    this has to wait.
    """
    stream = make()
    try:
        await listener.arrivals.send(stream)
        await stream.closed.wait()
    except trio.BrokenResourceError:  # the muxkit server has ended in the meantime
        await stream.aclose()
    finally:
        stream.closed.set()  # even if the ASGI server cancels this task


async def serve(
    handler: Callable[[AsgiStream], Awaitable[None]],
    name: str,
    *,
    origins: Collection[str] = (),
    limits: Limits | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each WebSocket of `app(name)`, until this is cancelled.

    Args:
        handler: Called with each stream. The stream is closed afterwards.
        name: The name that was passed to `app`.
        origins: The origins of the web pages that may connect. A request with another Origin header is refused. A
            request without this header doesn't come from a web page and is accepted.
        limits: Limits the number of connections.
        task_status: Receives a list with the name once the server accepts connections.

    Raises:
        OSError: If another server uses the name.
    """
    listener = _Listener(origins)
    with _names.taken(name, listener):
        await serve_connections([listener], handler, limits=limits, started=lambda: task_status.started([name]))


@protected_manager
async def connect(name: str) -> AsyncIterator[AsgiStream]:
    """Raise `Unsupported`, because clients connect to the address of the ASGI server with ws or wss."""
    await trio.lowlevel.checkpoint()
    raise Unsupported(f"asgi://{name} is the inside of a web application; connect with ws:// or wss:// instead")
    yield


transport: Final = Transport("asgi", connect, serve, _names.read, _names.read)

protect_package("muxkit_adapters")
