"""Forwarded connections arrive whole, over every protocol: listeners here, listeners at the server, ends and resets."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme

import muxkit
from muxkit import forward
from muxkit.forward.relay import Tally
from muxkit.forward.sockets import Listeners
from muxkit.forward.streams import CarriedStream
from tests.forward._targets import PATIENCE, PROTOCOLS, dial, pair, read_all, reset, target, until_refused


@pytest.fixture(params=PROTOCOLS)
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.param}+tcp://127.0.0.1:0"


STREAMS = ["tcp://127.0.0.1:0", "ws://127.0.0.1:0/mux", "mem://carried", "tls://127.0.0.1:0"]
OTHERS = ["aqueduct+quic://127.0.0.1:0", "e3x+udp://127.0.0.1:0", "e3x+dtls://127.0.0.1:0"]


@pytest.mark.parametrize("url", [*(f"{each}+{stream}" for each in PROTOCOLS for stream in STREAMS), *OTHERS])
async def test_a_connection_is_carried_to_a_target_of_the_server(url: str, tmp_path: Path) -> None:
    server_tls = client_tls = None
    if url.partition(":")[0].endswith(("tls", "quic")):
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
        server_tls = muxkit.TLS(cert=tmp_path / "server.pem")
        client_tls = muxkit.TLS(ca=authority.cert_pem.bytes())
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(url, [str(port)], tls=(server_tls, client_tls)) as there:
            async with (
                forward.open_local(there.session, "0", str(port)) as local,
                await dial(local.address) as stream,
                trio.open_nursery() as nursery,
            ):
                sent = os.urandom(1_000_000)

                async def send() -> None:
                    await stream.send_all(sent)
                    await stream.send_eof()

                nursery.start_soon(send)
                assert await read_all(stream) == sent
                assert local.stats().total == 1
                assert (local.stats().bytes_in, local.stats().bytes_out) == (len(sent), len(sent))


async def test_a_connection_to_a_listener_of_the_server_is_carried_here(url: str) -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(url, listen=["*"]) as there:
            async with forward.open_remote(there.session, "0", str(port)) as remote:
                assert there.handler.listeners == [remote.address]
                async with await dial(remote.address) as stream:
                    await stream.send_all(b"tea")
                    await stream.send_eof()
                    assert await read_all(stream) == b"tea"
                was = remote.address
            await until_refused(was)


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
async def test_a_listener_is_freed_when_its_client_is_gone_without_a_word(protocol: str) -> None:
    handler = forward.handler(listen=["*"])

    async def client(url: str, task_status: trio.TaskStatus[str]) -> None:
        async with muxkit.connect(url) as session, forward.open_remote(session, "0", "9") as remote:
            task_status.started(remote.address)
            await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        async with (
            muxkit.open_server(handler, f"{protocol}+tcp://127.0.0.1:0") as server,
            trio.open_nursery() as nursery,
        ):
            address = await nursery.start(client, server.url)
            assert handler.listeners == [address]
            nursery.cancel_scope.cancel()
        with pytest.raises(OSError, match="all attempts to connect"):
            await dial(address)


async def test_a_remote_forward_raises_that_its_session_is_lost(url: str) -> None:
    with trio.fail_after(PATIENCE):
        async with pair(url, listen=["*"]) as there:

            async def forward_until_lost() -> None:
                async with forward.open_remote(there.session, "0", "9"):
                    (at_server,) = there.server.sessions()
                    await at_server.shutdown(grace=0)
                    await trio.sleep_forever()

            with pytest.raises((muxkit.LinkLost, forward.ForwardRefused, trio.BrokenResourceError)):
                await forward_until_lost()


async def test_unix_sockets_stand_at_either_end(url: str, tmp_path: Path) -> None:
    at, to = str(tmp_path / "here.sock"), str(tmp_path / "there.sock")
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(url, [str(port), f"{tmp_path}/*.sock"], listen=[to]) as there:
            async with (
                forward.open_remote(there.session, to, str(port)) as remote,
                forward.open_local(there.session, at, to) as local,
                await dial(local.address) as stream,
            ):
                assert (local.address, remote.address) == (at, to)
                assert [Path(path).stat().st_mode & 0o777 for path in (at, to)] == [0o600, 0o600]  # noqa: ASYNC240
                await stream.send_all(b"tea")
                await stream.send_eof()
                assert await read_all(stream) == b"tea"
            assert not Path(at).exists()  # noqa: ASYNC240


async def test_a_half_close_goes_through_and_the_other_half_goes_on(url: str) -> None:
    """As `ssh host tar < archive`: the target answers only when it has read the end."""

    async def digest(stream: trio.SocketStream) -> None:
        said = hashlib.sha256(await read_all(stream)).hexdigest()
        await stream.send_all(said.encode())

    async def greet(stream: trio.SocketStream) -> None:
        await stream.send_all(b"bye")
        await stream.send_eof()
        heard.append(await read_all(stream))
        done.set()

    heard: list[bytes] = []
    done = trio.Event()
    with trio.fail_after(PATIENCE):
        async with target(digest) as first, target(greet) as second, pair(url, [f"{first}", f"{second}"]) as there:
            async with forward.open_local(there.session, "0", str(first)) as local, await dial(local.address) as stream:
                await stream.send_all(b"x" * 200_000)
                await stream.send_eof()
                assert await read_all(stream) == hashlib.sha256(b"x" * 200_000).hexdigest().encode()
            async with (
                forward.open_local(there.session, "0", str(second)) as local,
                await dial(local.address) as stream,
            ):
                assert await read_all(stream) == b"bye"
                await stream.send_all(b"and still here")
                await stream.send_eof()
                await done.wait()
    assert heard == [b"and still here"]


async def test_a_reset_of_the_target_is_a_reset_here(url: str) -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        await stream.send_all(b"half a mess")
        await reset(stream)

    with trio.fail_after(PATIENCE):
        async with target(hang_up) as port, pair(url, [str(port)]) as there:
            async with forward.open_local(there.session, "0", str(port)) as local, await dial(local.address) as stream:
                await stream.send_all(b"x")
                with pytest.raises(trio.BrokenResourceError):  # an end would say that it was all
                    await read_all(stream)


async def test_a_reset_here_is_a_reset_at_the_target(url: str) -> None:
    ended: list[str] = []
    begun, done = trio.Event(), trio.Event()

    async def listen(stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        begun.set()
        try:
            await read_all(stream)
            ended.append("in order")
        except trio.BrokenResourceError:
            ended.append("reset")
        done.set()

    with trio.fail_after(PATIENCE):
        async with target(listen) as port, pair(url, [str(port)]) as there:
            async with forward.open_local(there.session, "0", str(port)) as local:
                stream = await dial(local.address)
                await stream.send_all(b"x")
                await begun.wait()
                await reset(stream)
                await done.wait()
    assert ended == ["reset"]


async def test_a_stalled_reader_delays_no_other_connection(url: str) -> None:
    async def flood(stream: trio.SocketStream) -> None:
        if await stream.receive_some(1) == b"f":
            while True:
                await stream.send_all(bytes(65_536))
        await stream.send_all(b"tea")

    with trio.fail_after(PATIENCE):
        async with target(flood) as port, pair(url, [str(port)]) as there:
            async with forward.open_local(there.session, "0", str(port)) as local, await dial(local.address) as slow:
                await slow.send_all(b"f")
                await trio.testing.wait_all_tasks_blocked(0.05)
                held = local.stats().bytes_out
                for _ in range(50):
                    async with await dial(local.address) as stream:
                        await stream.send_all(b"x")
                        assert await read_all(stream) == b"tea"
                assert local.stats().bytes_out - held == 50 * 3


async def test_a_forward_drains_before_it_ends(url: str) -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(url, [str(port)]) as there:
            async with (
                forward.open_local(there.session, "0", str(port)) as local,
                trio.open_nursery() as nursery,
                await dial(local.address) as stream,
            ):
                await stream.send_all(b"a")
                assert await stream.receive_some(1) == b"a"
                nursery.start_soon(partial(local.shutdown, grace=PATIENCE))
                await until_refused(local.address)
                await stream.send_all(b"b")
                assert await stream.receive_some(1) == b"b"
                await stream.send_eof()
                assert await read_all(stream) == b""


async def test_a_forward_whose_block_is_left_resets_what_it_carries(url: str) -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(url, [str(port)]) as there:
            async with forward.open_local(there.session, "0", str(port)) as local:
                stream = await dial(local.address)
                await stream.send_all(b"a")
                assert await stream.receive_some(1) == b"a"
            async with stream:
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)


async def test_a_target_that_refuses_is_a_reset_and_says_why_in_the_log(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with target() as port:
        pass
    caplog.set_level("INFO", logger="muxkit.forward")
    with trio.fail_after(PATIENCE):
        async with pair(url, [str(port)]) as there, forward.open_local(there.session, "0", str(port)) as local:
            async with await dial(local.address) as stream:
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)
            assert local.stats().refused == 1
    assert f"127.0.0.1:{port}: connection refused" in caplog.text


async def test_hundreds_of_connections_go_through_one_session(url: str) -> None:
    """Not at once: as many descriptors as this process may have."""
    with trio.fail_after(10 * PATIENCE):
        async with target() as port, pair(url, [str(port)]) as there:
            async with forward.open_local(there.session, "0", str(port)) as local:
                whole = 0

                async def call(number: int) -> None:
                    nonlocal whole
                    async with slots, await dial(local.address) as stream:
                        said = b"%d" % number * 100
                        await stream.send_all(said)
                        await stream.send_eof()
                        assert await read_all(stream) == said
                        whole += 1

                slots = trio.CapacityLimiter(100)
                async with trio.open_nursery() as nursery:
                    for number in range(300):
                        nursery.start_soon(call, number)
                assert whole == local.stats().total == 300


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT])
async def test_a_connection_that_is_gone_before_it_is_accepted_ends_no_listener(number: int) -> None:
    class Listener(socket.socket):
        has_failed = False

        def accept(self) -> tuple[socket.socket, object]:
            if not self.has_failed:
                self.has_failed = True
                raise OSError(number, os.strerror(number))
            return super().accept()

    served = trio.Event()

    async def handle(stream: CarriedStream) -> None:
        stream.close()
        served.set()

    with trio.fail_after(PATIENCE), Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Listeners([listener]).accept_for_ever, Tally(most=9), handle, nursery)
            async with await dial(f"127.0.0.1:{listener.getsockname()[1]}"):
                await served.wait()
            nursery.cancel_scope.cancel()
