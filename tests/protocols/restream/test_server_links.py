"""A server on real transports, and on sockets that the program has bound."""

from __future__ import annotations

import errno
import json
import logging
import socket
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trustme

from muxkit import Limits
from muxkit._plugins import TRANSPORTS, PluginError, load
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store
from tests.protocols.restream._server_clients import Client, begin, resume

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("error")
IDS = [1, 2, 3, 4, 5]


@asynccontextmanager
async def serving(listen: Any, **options: Any) -> AsyncIterator[restream.Served]:  # noqa: ANN401
    async with open_store("memory:") as store, trio.open_nursery() as nursery:
        served: restream.Served = await nursery.start(
            lambda task_status: restream.serve(listen, store, task_status=task_status, **options)
        )
        yield served
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connecting(url: str, **options: Any) -> AsyncIterator[Client]:
    scheme, _, address = url.partition("://")
    transport: Any = load(TRANSPORTS, scheme.partition("+")[2])
    async with transport.connect(address, **options) as stream:
        yield Client(stream)


def bound(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def listener(sock: socket.socket) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


@pytest.mark.clause("restream-C01")
@pytest.mark.parametrize("transport", ["tcp", "unix", "ws", "mem"])
async def test_both_modes_work_over_each_transport(transport: str, tmp_path: Path) -> None:
    places = {"unix": str(tmp_path / "socket"), "mem": "restream"}
    async with serving(f"restream+{transport}://{places.get(transport, '127.0.0.1:0')}") as served:
        async with connecting(served.url) as client:
            await client.say({})
            assert list(await client.hear()) == ["data"]
        async with connecting(served.url) as client:
            await client.say(begin())
            assert await client.hear_ids(5) == IDS
        async with connecting(served.url) as client:
            await client.say(resume(3))
            assert [message["id"] for message in await client.rest()] == [4, 5]
        async with connecting(served.url) as client:
            await client.say(b"nope\n")
            assert "not JSON" in await client.error()


async def test_it_works_over_tls() -> None:
    authority = trustme.CA()
    here, there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(here)
    authority.configure_trust(there)
    async with serving("restream+tls://127.0.0.1:0", ssl_context=here) as served:
        async with connecting(served.url, ssl_context=there) as client:
            await client.say(begin())
            assert [message["id"] for message in await client.rest()] == IDS
        async with connecting(served.url, ssl_context=there) as client:
            await client.say(resume(9))
            assert "beyond" in await client.error()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_socket_that_listens_already_can_be_served(host: str) -> None:
    try:
        sock = bound(host)
    except OSError:
        if host == "::1":
            pytest.skip("no IPv6 here")
        raise
    port = sock.getsockname()[1]
    async with serving([listener(sock)]) as served:
        assert served.url == f"restream+tcp://{'[::1]' if ':' in host else host}:{port}"
        async with connecting(served.url) as client:
            await client.say(begin())
            assert [message["id"] for message in await client.rest()] == IDS
    assert sock.fileno() == -1


@pytest.mark.requirement("R-01")
async def test_connections_of_such_a_socket_are_limited_too() -> None:
    async with serving([listener(bound())], limits=Limits(connections=2)) as served:
        async with connecting(served.url) as one, connecting(served.url) as two, connecting(served.url) as three:
            for client in (one, two, three):
                await client.say({})
            await one.hear()
            await two.hear()
            with trio.move_on_after(0.1) as waited:
                await three.hear()
            assert waited.cancelled_caught
            assert served.connections == 2
            await one.hang_up()
            with trio.fail_after(60):
                await three.hear()


@pytest.mark.requirement("R-36")
async def test_a_listener_that_is_out_of_descriptors_tries_again_and_one_that_breaks_ends_the_server(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(trio.abc.Listener[trio.abc.Stream]):
        errors = [errno.EMFILE, errno.EMFILE, errno.EBADF]  # noqa: RUF012

        async def accept(self) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            raise OSError(self.errors.pop(0), "no")

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    async with open_store("memory:") as store:
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is looked at
            await restream.serve([Failing()], store)
    assert raised.value.errno == errno.EBADF
    assert caplog.text.count("trying again") == 2


async def test_an_address_in_use_is_told_bare() -> None:
    async with serving("restream+tcp://127.0.0.1:0") as served:
        async with open_store("memory:") as store:
            with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is looked at
                await restream.serve(served.url, store)
    assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "bpmux+tcp://127.0.0.1:0", "restream://x", "restream+tcp"])
async def test_a_url_of_something_else_is_refused(url: str) -> None:
    async with open_store("memory:") as store:
        with pytest.raises(ValueError, match=r"expected restream\+transport"):
            await restream.serve(url, store)


async def test_a_transport_that_is_not_there_and_options_that_go_nowhere_are_refused() -> None:
    async with open_store("memory:") as store:
        with pytest.raises(PluginError, match="no transport 'pigeon'"):
            await restream.serve("restream+pigeon://x", store)
        with pytest.raises(TypeError, match="take no options"):
            await restream.serve([], store, insecure=True)
        with pytest.raises(ValueError, match="pace=0"):
            restream.Service(store, pace=0)
        with pytest.raises(ValueError, match="expiry=-1"):
            restream.Service(store, expiry=-1)


@pytest.mark.requirement("R-42")
async def test_a_shutdown_ends_serve_and_frees_the_address() -> None:
    async with serving("restream+tcp://127.0.0.1:0") as served:
        async with connecting(served.url) as client:
            await client.say(begin(60_000))
            await client.hear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: served.shutdown(grace=60.0))
                *_, last = await client.rest()
            assert "id" in last
        with pytest.raises(ConnectionRefusedError):
            async with connecting(served.url):
                pass


@pytest.mark.requirement("R-41")
async def test_an_error_line_arrives_though_the_client_was_still_talking() -> None:
    async with serving("restream+tcp://127.0.0.1:0", linger=60.0) as served:
        async with connecting(served.url) as client:
            await client.say(b"nope\n" + b"x" * 1_000_000 + b"\n")
            assert "not JSON" in await client.error()


@pytest.mark.requirement("R-43")
async def test_many_connections_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async with serving("restream+tcp://127.0.0.1:0") as served:

        async def one(number: int) -> None:
            async with connecting(served.url) as client:
                await client.say(begin(20, f"bf575c35-c25b-4386-8430-{number:012d}"))
                if number % 3 == 0:
                    return
                await client.hear_ids(number % 20 + 1)

        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                async with trio.open_nursery() as nursery:
                    for number in range(50):
                        nursery.start_soon(one, number)
            with trio.fail_after(60):
                while served.connections:  # noqa: ASYNC110 - sockets decide when
                    await trio.sleep(0.01)
        assert not caplog.records


async def test_what_serve_needs_of_trio_is_not_imported_with_the_engines() -> None:
    code = "import sys, muxkit.protocols.restream as r; assert 'trio' not in sys.modules; r.serve; print(1)"
    done = await trio.run_process([__import__("sys").executable, "-c", code], capture_stdout=True)
    assert json.loads(done.stdout) == 1
