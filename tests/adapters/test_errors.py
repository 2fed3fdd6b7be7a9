"""What goes wrong while a connection is made names the address, the option and what to do."""

from __future__ import annotations

import errno
import re
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import muxkit
from muxkit import Limits
from muxkit_adapters import dtls, memory, quic, tcp, tls, udp, unix, websocket
from muxkit_adapters._addresses import Transport
from muxkit_adapters._errors import failed
from muxkit_adapters._named import BACKLOG

from ._links import Certificates, at_most, park, serving
from ._packets import refusing_port

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

GOOD = Certificates()
TRANSPORTS: list[Transport[Any]] = [
    tcp.transport,
    tls.transport,
    unix.transport,
    websocket.transport,
    websocket.secure_transport,
    quic.transport,
    udp.transport,
    dtls.transport,
    memory.transport,
]
STREAMS = [tcp.transport, tls.transport, websocket.transport, websocket.secure_transport]
EACH = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.scheme)
EACH_STREAM = pytest.mark.parametrize("transport", STREAMS, ids=lambda transport: transport.scheme)


def start(transport: Transport[Any], address: str, **options: Any) -> Awaitable[None]:
    limits = Limits()
    return transport.serve(park, address, limits=limits, task_status=trio.TASK_STATUS_IGNORED, **options)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port: int = once.getsockname()[1]
        return port


@EACH_STREAM
async def test_a_port_where_nobody_listens(transport: Transport[Any]) -> None:
    """F23: "tcp: 127.0.0.1:9: Error connecting to ('127.0.0.1', 9): Connection refused"."""
    port = closed_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        async with transport.connect(f"127.0.0.1:{port}"):
            pass
    kind = "tls" if transport.scheme == "wss" else transport.scheme
    assert str(caught.value) == f"{kind} 127.0.0.1:{port}: connection refused (nothing listens there)"
    assert caught.value.errno == errno.ECONNREFUSED


@EACH_STREAM
async def test_a_port_that_is_taken(transport: Transport[Any]) -> None:
    """F15: "[Errno 98] Address already in use"."""
    options = {"ssl_context": GOOD.server()} if transport.needed else {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=r"listens there\)$") as caught:
            await start(transport, f"127.0.0.1:{port}", **options)
    text = f"{transport.scheme} 127.0.0.1:{port}: address already in use (something else listens there)"
    assert str(caught.value) == text
    assert caught.value.errno == errno.EADDRINUSE


async def test_an_address_that_is_not_of_this_machine() -> None:
    with pytest.raises(OSError, match=r"^tls 192\.0\.2\.1:7000: .* \(this machine has no such address\)$"):
        await start(tls.transport, "192.0.2.1:7000", ssl_context=GOOD.server())


async def test_a_name_that_does_not_exist() -> None:
    for transport in (tcp.transport, tls.transport, udp.transport, quic.transport):
        with pytest.raises(OSError, match=rf"^{transport.scheme} no-such-host\.invalid:1: [a-z]"):
            async with transport.connect("no-such-host.invalid:1"):
                pass


async def test_a_unix_socket_that_does_not_exist_or_is_left_over(tmp_path: Path) -> None:
    """F15: "[Errno 2] No such file or directory"."""
    path = tmp_path / "s"
    with pytest.raises(FileNotFoundError, match=rf"^unix {path}: no such file or directory \(no server has made it\)$"):
        async with unix.connect(path):
            pass
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with pytest.raises(ConnectionRefusedError, match=rf"^unix {path}: .* \(the server that made it is gone\)$"):
        async with unix.connect(path):
            pass


async def test_a_unix_socket_that_cannot_be_made(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "s"
    with pytest.raises(FileNotFoundError, match=rf"^unix {path}: .* \(its directory does not exist\)$"):
        await unix.serve(park, path)
    taken = tmp_path / "s"
    async with serving(unix.serve, park, taken):
        with pytest.raises(OSError, match=rf"^unix {taken}: a process listens on this socket") as caught:
            await unix.serve(park, taken)
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("transport", [quic.transport, dtls.transport], ids=["quic", "dtls"])
async def test_a_port_without_a_server_of_packets(transport: Transport[Any]) -> None:
    with refusing_port() as port:
        with pytest.raises(ConnectionRefusedError) as caught:
            async with transport.connect(f"127.0.0.1:{port}"):
                pass
    refused = f"{transport.scheme} 127.0.0.1:{port}: connection refused (nothing listens there)"
    assert str(caught.value) == refused
    assert caught.value.errno == errno.ECONNREFUSED


def test_an_error_keeps_its_type_and_its_number() -> None:
    made = failed("tcp x:1", PermissionError(errno.EACCES, "Permission denied"))
    assert (type(made), made.errno, str(made)) == (PermissionError, errno.EACCES, "tcp x:1: permission denied")
    assert str(failed("x", OSError("Some text"))) == "x: some text"


# --- time


@EACH
def test_every_transport_takes_connect_timeout(transport: Transport[Any]) -> None:
    """F13: "_Transport.connect() got an unexpected keyword argument 'connect_timeout'"."""
    assert "connect_timeout" in transport.options("client")


@pytest.mark.parametrize("transport", [quic.transport, dtls.transport], ids=["quic", "dtls"])
async def test_a_peer_of_packets_that_does_not_answer(transport: Transport[Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        text = rf"^{transport.scheme} {address}: .* 0\.1 s \(handshake_timeout=\)$"
        with pytest.raises(tls.HandshakeFailed, match=text):
            async with transport.connect(address, connect_timeout=0.1):
                pass


async def test_a_memory_listener_that_accepts_nothing(mock_clock: trio.testing.MockClock) -> None:
    async with AsyncExitStack() as stack:
        limits = Limits(connections=1)
        await stack.enter_async_context(serving(memory.serve, park, "full", limits=limits))
        connect = partial(memory.connect, "full", connect_timeout=3)

        async def connect_often() -> None:
            for _ in range(2 * BACKLOG):
                await stack.enter_async_context(connect())

        with at_most(4.0, mock_clock):
            with pytest.raises(TimeoutError, match=r"^mem full: no answer within 3 s \(connect_timeout=\)$"):
                await connect_often()


# --- options


@EACH
async def test_an_unknown_option_is_told_with_the_nearest_one(transport: Transport[Any]) -> None:
    """F13: "_Transport.connect() got an unexpected keyword argument"."""
    address = {"unix": "/nowhere/s", "mem": "nowhere"}.get(transport.scheme, "127.0.0.1:1")
    text = f"unknown option 'conect_timeout': did you mean 'connect_timeout'? Options of {transport.scheme}: "
    with pytest.raises(TypeError, match=re.escape(text)):
        transport.connect(address, conect_timeout=1)
    with pytest.raises(TypeError, match=f"^{transport.scheme} has no option 'zzz'. Options of {transport.scheme}: "):
        await start(transport, address, zzz=1)


async def stay(channel: muxkit.Channel) -> None:
    await trio.sleep_forever()


async def test_by_url_the_options_of_the_protocol_are_listed_as_well() -> None:
    text = "unknown option 'sslcontext': did you mean 'ssl_context'? Options of tls: alpn, "
    with pytest.raises(TypeError) as caught:
        async with muxkit.connect("bpmux+tls://127.0.0.1:1", sslcontext=None):  # type: ignore[call-arg]
            pass
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith(
        "; of bpmux: config; of every client: limits, linger, observer, stagger, tls, token"
    )
    with pytest.raises(TypeError, match="did you mean 'config'"):
        async with muxkit.connect("bpmux+tcp://127.0.0.1:1", confg=None):  # type: ignore[call-arg]
            pass
    text = "tcp has no option 'tls', since it does not encrypt; tls, wss, quic and dtls do. Options of tcp: "
    with pytest.raises(TypeError, match=text):
        async with muxkit.connect("bpmux+tcp://127.0.0.1:1", tls=muxkit.TLS()):
            pass
    with pytest.raises(TypeError, match="unknown option 'unsend': did you mean 'unsent'"):
        async with muxkit.open_server(stay, "bpmux+tcp://127.0.0.1:0", unsend=1):  # type: ignore[call-arg]
            pass


def test_the_options_of_each_side() -> None:
    assert udp.transport.options("client") == {
        "connect_timeout",
        "insecure",
        "largest",
        "receive_buffer",
        "refusals",
        "send_buffer",
    }
    assert udp.transport.options("server") > {"idle", "counters", "validation", "largest"}
    assert "path" not in websocket.transport.options("server")
    assert {"origins", "subprotocols"} < websocket.transport.options("server")


def test_the_errors_of_transports_have_a_place_to_be_imported_from() -> None:
    """F22: `from muxkit_adapters import …` failed for names that are documented."""
    from muxkit_adapters import HandshakeFailed, PlaintextWarning

    assert HandshakeFailed is tls.HandshakeFailed is quic.HandshakeFailed
    assert PlaintextWarning is tcp.PlaintextWarning
