"""A server is a block, a task, or a whole program."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
import trustme

import muxkit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

ROOT = Path(__file__).resolve().parent.parent
TCP = "bpmux+tcp://127.0.0.1:0"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def greet(session: muxkit.Session) -> None:
    async with session.open() as channel:
        await channel.send(b"welcome")


async def talk(url: str) -> None:
    async with muxkit.connect(url) as session, session.open() as channel:
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


async def test_a_function_for_a_channel_and_one_for_a_session_are_both_handlers() -> None:
    async with muxkit.open_server(echo, TCP) as server:
        await talk(server.url)
    async with muxkit.open_server(greet, TCP) as server, muxkit.connect(server.url) as session:
        async for channel in session:
            assert await channel.receive() == b"welcome"
            break


async def test_several_urls_are_one_server(tmp_path: Path) -> None:
    urls = [TCP, f"bpmux+unix://{tmp_path}/s", "e3x+udp://127.0.0.1:0"]
    async with muxkit.open_server(echo, urls) as server:
        assert [url.partition("://")[0] for url in server.urls] == ["bpmux+tcp", "bpmux+unix", "e3x+udp"]
        assert server.url == server.urls[0]
        for url in server.urls:
            await talk(url)


@pytest.mark.filterwarnings("ignore::muxkit.PlaintextWarning")
async def test_a_server_on_all_addresses_says_so_and_not_which_of_them_a_client_takes() -> None:
    """F26: bpmux+tls://0.0.0.0:39387, documented as "what a client connects to"."""
    async with muxkit.open_server(echo, "bpmux+tcp://0.0.0.0:0", insecure=True) as server:
        assert server.url.startswith("bpmux+tcp://0.0.0.0:")
        await talk(server.url.replace("0.0.0.0", "127.0.0.1"))


async def test_a_server_knows_its_sessions() -> None:
    async with muxkit.open_server(echo, TCP) as server:
        assert server.sessions() == []
        async with muxkit.connect(server.url) as session:
            await session.ping()
            (there,) = server.sessions()
            assert isinstance(there, muxkit.Session)
            assert there.info.protocol == "bpmux"
            assert repr(server).endswith(": 1 session>")  # was: "1 sessions"


async def test_leaving_the_block_lets_the_live_sessions_end() -> None:
    async with trio.open_nursery() as nursery:
        answers: list[bytes] = []

        async def client(url: str, task_status: trio.TaskStatus[None]) -> None:
            async with muxkit.connect(url) as session, session.open() as channel:
                await channel.send(b"last")
                task_status.started()
                answers.append(await channel.receive())

        async with muxkit.open_server(echo, TCP) as server:
            await nursery.start(client, server.url)
    assert answers == [b"last"]


async def test_leaving_by_an_error_ends_the_sessions_at_once_and_raises_it_bare() -> None:
    lost = trio.Event()

    async def client(url: str, task_status: trio.TaskStatus[None]) -> None:
        with suppress(muxkit.LinkLost):  # it cannot take leave
            async with muxkit.connect(url) as session, session.open() as channel:
                await channel.send(b"x")
                await channel.receive()
                task_status.started()
                with pytest.raises(trio.BrokenResourceError):
                    await channel.receive()
                lost.set()

    async with trio.open_nursery() as nursery:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - where in the block it is raised is not fixed
            async with muxkit.open_server(echo, TCP, linger=1000) as server:
                await nursery.start(client, server.url)
                raise ZeroDivisionError
        await lost.wait()
        nursery.cancel_scope.cancel()


async def test_wait_closed_returns_when_another_task_shuts_the_server_down() -> None:
    async with trio.open_nursery() as nursery, muxkit.open_server(echo, TCP) as server:
        nursery.start_soon(lambda: server.shutdown(grace=1))
        await server.wait_closed()


# ---------------------------------------------------------------------------- errors are bare


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        yield port


async def test_errors_come_bare_where_they_came_in_a_group(taken: int) -> None:
    """Was: ExceptionGroup('Exceptions from Trio nursery') for tls without a certificate, and for a port in use."""
    for start in (muxkit.serve, enter):
        with pytest.raises(ValueError, match="a server needs its certificate"):
            await start(echo, "bpmux+tls://127.0.0.1:0")
        with pytest.raises(OSError, match="in use"):
            await start(echo, f"bpmux+tcp://127.0.0.1:{taken}")


async def enter(handler: muxkit.ChannelHandler, url: str) -> None:
    async with muxkit.open_server(handler, url):
        pass


async def test_of_several_urls_tls_is_for_those_that_encrypt(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = muxkit.TLS(cert=tmp_path / "server.pem", key=tmp_path / "server.pem")
    urls = ["bpmux+tcp://127.0.0.1:0", "bpmux+tls://127.0.0.1:0"]
    async with muxkit.open_server(echo, urls, tls=tls) as server:
        plain, encrypted = server.urls
        for url, trusted in ((plain, None), (encrypted, muxkit.TLS(ca=tmp_path / "ca.pem"))):
            async with muxkit.connect(url, tls=trusted) as session, session.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
    with pytest.raises(ValueError, match="none of these URLs has a transport that encrypts"):
        async with muxkit.open_server(echo, ["bpmux+tcp://127.0.0.1:0", "bpmux+mem://plain"], tls=tls):
            pass


async def test_of_several_urls_none_is_served_if_one_cannot_be(taken: int) -> None:
    free = "bpmux+mem://one-of-two"
    with pytest.raises(OSError, match="in use"):
        await muxkit.serve(echo, [free, f"bpmux+tcp://127.0.0.1:{taken}"])
    async with muxkit.open_server(echo, free):
        await talk(free)


# ---------------------------------------------------------------------------- a whole program

PROGRAM = """
import sys, trio, muxkit

async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)

async def hold(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)
    await trio.sleep_forever()

handler = hold if sys.argv[1:] == ["hold"] else echo
url = "bpmux+tcp://127.0.0.1:0"
sys.exit(muxkit.run_server(handler, url, grace=60, on_started=lambda server: print(server.url, flush=True)))
"""


def program(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_the_sessions_end_and_the_program_returns_0(number: signal.Signals) -> None:
    process, url = program()
    async with muxkit.connect(url) as session:
        channel = await session.open()
        await channel.send(b"a")
        assert await channel.receive() == b"a"
        process.send_signal(number)
        with pytest.raises(muxkit.ChannelStopped):  # noqa: PT012 - where in the block it is raised is not fixed
            while True:  # until it has heard
                await session.ping()
                await (await session.open()).aclose()
        await channel.send(b"b")
        assert await channel.receive() == b"b"
        await channel.aclose()
    _, errors = await trio.to_thread.run_sync(process.communicate)
    assert (process.returncode, errors) == (0, "")


async def test_a_second_signal_ends_the_sessions_at_once_and_the_program_returns_1() -> None:
    process, url = program("hold")
    with pytest.raises(trio.BrokenResourceError):  # noqa: PT012 - where in the block it is raised is not fixed
        async with muxkit.connect(url) as session:
            channel = await session.open()
            await channel.send(b"a")
            assert await channel.receive() == b"a"
            process.send_signal(signal.SIGINT)
            with pytest.raises(muxkit.ChannelStopped):  # noqa: PT012 - where in the block it is raised is not fixed
                while True:
                    await session.ping()
                    await (await session.open()).aclose()
            process.send_signal(signal.SIGINT)
            await channel.receive()
    _, errors = await trio.to_thread.run_sync(process.communicate)
    assert (process.returncode, errors) == (1, "")


# ---------------------------------------------------------------------------- confusions


async def test_a_session_that_is_used_as_a_channel_says_what_was_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Was: "a message is bytes, not Duplex" in the server's log, and nothing for the client."""

    async def confused(session: muxkit.Session) -> None:
        await session.receive()  # type: ignore[attr-defined]  # that is the mistake

    async with muxkit.open_server(confused, "relink+mem://confused") as server, muxkit.connect(server.url) as session:
        with pytest.raises(
            AttributeError, match=r"a Link has no 'receive'; .*annotate the handler's parameter as muxkit\.Channel"
        ):
            await confused(session)


async def test_the_log_of_a_server_says_what_was_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Was: "AttributeError (its text is left out, it may hold payload; …)", so the advice was seen at DEBUG only."""

    async def confused(session: muxkit.Session) -> None:
        await session.send(b"x")  # type: ignore[attr-defined]  # that is the mistake

    async with muxkit.open_server(confused, "e3x+mem://confused") as server:
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012 - whichever ping it is
            async with muxkit.connect(server.url) as session:
                while True:
                    await session.ping()
    # A server is left when its handlers are over, and only then has the last of them been logged.
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "AttributeError (a Session has no 'send'; channels have it. To handle channels, annotate" in said


async def test_what_is_no_attribute_at_all_is_said_plainly() -> None:
    async with muxkit.open_server(echo, TCP) as server, muxkit.connect(server.url) as session:
        with pytest.raises(AttributeError, match=r"a Session has no 'colour'$"):
            session.colour  # type: ignore[attr-defined]  # noqa: B018


async def test_a_drain_is_bounded(autojump_clock: MockClock) -> None:
    async def forever(channel: muxkit.Channel) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:

        async def client(url: str, task_status: trio.TaskStatus[None]) -> None:
            with pytest.raises(muxkit.LinkLost):  # noqa: PT012 - where in the block it is raised is not fixed
                async with muxkit.connect(url) as session, session.open() as channel:
                    await channel.send(b"x")
                    task_status.started()
                    await trio.sleep_forever()

        began = trio.current_time()
        with trio.CancelScope() as scope:
            async with muxkit.open_server(forever, "bpmux+mem://bounded", linger=3) as server:
                await nursery.start(client, server.url)
            assert trio.current_time() - began < 8
        assert not scope.cancelled_caught
        nursery.cancel_scope.cancel()


def bound() -> socket.socket:
    """A socket as a service manager makes it."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


async def test_sockets_that_were_made_elsewhere_are_listened_on() -> None:
    made = bound(), bound()
    ports = [each.getsockname()[1] for each in made]
    urls = ["bpmux+tcp://127.0.0.1:1", "relink+tcp://127.0.0.1:2"]
    async with muxkit.open_server(echo, urls, listeners=made, linger=0.1) as server:
        assert server.urls == (f"bpmux+tcp://127.0.0.1:{ports[0]}", f"relink+tcp://127.0.0.1:{ports[1]}")
        for url in server.urls:
            async with muxkit.connect(url) as session, session.open("echo") as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"


async def test_each_url_needs_a_socket_if_any_has_one() -> None:
    with (
        bound() as made,
        pytest.raises(ValueError, match="listeners=…: expected one socket for each of the 2 URLs, got 1"),
    ):
        async with muxkit.open_server(echo, ["bpmux+tcp://127.0.0.1:1", "bpmux+tcp://127.0.0.1:2"], listeners=[made]):
            pass


async def test_listeners_of_another_kind_are_refused_with_the_kind_that_is_needed() -> None:
    """Was: "AttributeError: 'SocketListener' object has no attribute 'type'"."""
    listeners: list[Any] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with pytest.raises(TypeError, match=r"listeners=…: expected sockets of the module `socket`, got <trio\.Sock"):
        async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0", listeners=listeners):
            pass
    for listener in listeners:
        await listener.aclose()


COLLECTING = """
import gc, os, signal, sys, muxkit

async def echo(channel: muxkit.Channel) -> None: ...

def started(server: muxkit.Server) -> None:
    print(*gc.get_threshold(), gc.get_freeze_count() > 1000)
    os.kill(os.getpid(), signal.SIGTERM)

gc.set_threshold(int(sys.argv[1]), 5, 6)
muxkit.run_server(echo, "bpmux+mem://collecting", on_started=started)
print(*gc.get_threshold(), gc.get_freeze_count() > 1000)
"""


@pytest.mark.parametrize(("before", "during"), [("700", "50000"), ("2000", "50000"), ("1234", "1234"), ("0", "0")])
def test_a_server_program_collects_garbage_seldom_unless_it_has_chosen_itself(before: str, during: str) -> None:
    command = [sys.executable, "-c", COLLECTING, before]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [f"{during} 5 6 {during != before}", f"{before} 5 6 False"]
