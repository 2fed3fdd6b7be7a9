"""What a WebSocket's request carries, and what its close frame says."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio_websocket

import muxkit
from muxkit import LinkLost, Request, Session
from muxkit.core import Reason
from muxkit_adapters import websocket
from muxkit_adapters.websocket import HandshakeFailed, WebSocketStream, encode_headers

from ._links import paired, park, port_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

QUICK = 0.2  # s, the close timeout of these tests


@asynccontextmanager
async def pair(
    path: str = "", *, server: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[WebSocketStream, WebSocketStream]]:
    def connect(address: str) -> AbstractAsyncContextManager[WebSocketStream]:
        return websocket.connect(f"ws://{address}{path}", close_timeout=QUICK, **options)

    async with paired(websocket.serve, connect, close_timeout=QUICK, **(server or {})) as streams:
        yield streams


async def test_a_server_reads_path_query_and_headers() -> None:
    headers = {"Authorization": "Bearer tea", "X-Room": "caf\u00e9"}
    async with pair("/chat?room=1&key=x", headers=headers) as (here, there):
        assert here.request is None
        assert there.request is not None
        assert (there.request.path, there.request.query, there.request.subprotocol) == ("/chat", "room=1&key=x", None)
        assert {("authorization", "Bearer tea"), ("x-room", "caf\u00e9")} <= set(there.request.headers)
        assert not [name for name, _ in there.request.headers if name.startswith("sec-websocket")]
        assert "tea" not in repr(there.request)
        assert "key" not in repr(there.request)


async def test_a_session_tells_the_request() -> None:
    """F12 and F13: a handler could not learn it, and a client could not send headers."""
    requests: list[Request | None] = []

    async def handler(session: Session) -> None:
        requests.append(session.info.request)

    async with muxkit.open_server(handler, "bpmux+ws://127.0.0.1:0", subprotocols=["v2"]) as server:
        options: dict[str, Any] = {"headers": [("X-User", "alice")], "subprotocols": ["v2"]}
        async with muxkit.connect(f"{server.url}/room?x", **options) as session:
            assert session.info.request is None
            async for _ in session:
                pass
    (request,) = requests
    assert request is not None
    assert (request.path, request.query, request.subprotocol) == ("/room", "x", "v2")
    assert ("x-user", "alice") in request.headers


async def test_the_first_subprotocol_of_the_server_that_the_client_knows_is_spoken() -> None:
    async with pair(server={"subprotocols": ["c", "b"]}, subprotocols=["a", "b", "c"]) as (here, there):
        assert here.subprotocol == there.subprotocol == "c"
        assert there.request is not None
        assert there.request.subprotocol == "c"
    async with pair(server={"subprotocols": ["c"]}) as (here, there):
        assert here.subprotocol is there.subprotocol is None


async def test_a_server_that_takes_none_of_the_subprotocols_is_refused() -> None:
    async with serving(websocket.serve, park, subprotocols=["x"]) as (address,):
        with pytest.raises(HandshakeFailed, match=f"ws {address}/: the server takes none of the subprotocols a, b"):
            async with websocket.connect(f"ws://{address}", subprotocols=["a", "b"]):
                pass


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"X-A": "secret\r\nX-B: c"}, "the value of X-A has characters that a header cannot have"),
        ({"X-A": "\u20ac"}, "the value of X-A"),
        ({"X-A\r\n": "a"}, r"'X-A\\r\\n' is no name of a header"),
        ({"": "a"}, "'' is no name of a header"),
        ({"Host": "elsewhere"}, "Host is set by the WebSocket itself"),
        ([("Sec-WebSocket-Key", "a")], "Sec-WebSocket-Key is set by the WebSocket itself"),
    ],
)
async def test_headers_that_cannot_be_sent_are_refused_without_their_values(
    headers: websocket.Headers, text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        async with websocket.connect("ws://127.0.0.1:1", headers=headers):
            pass
    assert "secret" not in str(caught.value)


def test_headers_are_a_mapping_or_pairs() -> None:
    assert encode_headers({"A": "b"}) == encode_headers([("A", "b")]) == [(b"A", b"b")]


@pytest.mark.parametrize("names", ["chat", ["a b"], [""]])
async def test_subprotocols_are_names(names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected names without spaces"):
        async with websocket.connect("ws://127.0.0.1:1", subprotocols=names):
            pass
    with pytest.raises(ValueError, match="expected names without spaces"):
        await websocket.serve(park, subprotocols=names)


async def test_a_refused_client_reads_why() -> None:
    async with serving(websocket.serve, park, path="/chat") as (address,):
        with pytest.raises(HandshakeFailed, match="answered with HTTP 404: 'this server has another path'"):
            async with websocket.connect(f"ws://{address.partition('/')[0]}/other"):
                pass


# --- close frames


async def test_the_reason_in_a_close_frame_is_readable_at_the_other_side() -> None:
    for reason, code in ((Reason("message too large", 413), 1008), (Reason("the handler failed", 500), 1011)):
        async with pair() as (here, there):
            assert here.peer_reason is None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(there.close_with, reason)
                with pytest.raises(trio.BrokenResourceError, match=f"closed with {code}"):
                    await here.receive_some()
            assert here.peer_reason == reason
            assert there.peer_reason is None, "the answer repeats what we said"
            await here.aclose()
            assert here.peer_reason == reason


async def test_a_reason_is_cut_to_what_a_close_frame_holds() -> None:
    async with pair() as (here, there):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.close_with, Reason("\u20ac" * 100, 400))
            with pytest.raises(trio.BrokenResourceError):
                await here.receive_some()
        assert here.peer_reason == Reason("\u20ac" * 39, 400)


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (1000, None, None),
        (1001, "going away", Reason("going away")),
        (1012, None, Reason("service restart", 1012)),
        (1008, "no \x1b[31m", Reason("no \\x1b[31m", 1008)),
        (4001, "7 disk full", Reason("disk full", 7)),
    ],
)
async def test_the_close_frames_of_others_are_read_as_well(code: int, text: str | None, told: Reason | None) -> None:
    async def handler(stream: WebSocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some()
        reasons.append(stream.peer_reason)

    reasons: list[Reason | None] = []
    async with serving(websocket.serve, handler, close_timeout=QUICK) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire, trio.open_nursery() as nursery:
            other = await trio_websocket.wrap_client_stream(nursery, wire, "127.0.0.1", "/")
            await other.aclose(code, text)
            nursery.cancel_scope.cancel()
    assert reasons == [told]


async def test_a_connection_that_is_cut_has_no_reason() -> None:
    async with pair() as (here, there):
        await trio.aclose_forcefully(there)
        with pytest.raises(trio.BrokenResourceError):
            await here.receive_some()
        assert here.peer_reason is None


async def test_a_session_that_is_left_by_an_error_tells_that_in_the_close_frame() -> None:
    """F2: the peer never learned why; here by another implementation, which reads nothing but close frames."""

    async def handler(session: Session) -> None:
        raise RuntimeError("secret")

    async with muxkit.open_server(handler, "bpmux+ws://127.0.0.1:0") as server:
        port = port_of(server.url.partition("://")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as wire, trio.open_nursery() as nursery:
            other = await trio_websocket.wrap_client_stream(nursery, wire, "127.0.0.1", "/")
            with pytest.raises(trio_websocket.ConnectionClosed) as caught:
                await drained(other)
            assert caught.value.reason is not None
            assert caught.value.reason.code == 1011
            assert caught.value.reason.reason is not None
            assert caught.value.reason.reason.startswith("500 ")
            assert "secret" not in caught.value.reason.reason
            nursery.cancel_scope.cancel()


async def drained(connection: trio_websocket.WebSocketConnection) -> None:
    while True:
        await connection.get_message()


async def test_a_link_lost_has_the_reason_of_the_close_frame() -> None:
    async def handler(stream: WebSocketStream) -> None:
        await stream.close_with(Reason("come back later", 503))

    async with serving(websocket.serve, handler) as (address,):
        async with muxkit.connect(f"bpmux+ws://{address}") as session:
            with pytest.raises(
                LinkLost, match=r"the peer closed the connection: come back later \(code 503\)"
            ) as caught:
                await session.ping()
    lost = caught.value
    assert (lost.peer_reason, lost.code, lost.by) == ("come back later", 503, "peer")
