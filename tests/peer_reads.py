"""Make what can go wrong between two peers happen, and write what the other side reads about it.

Writes docs/reference/what-the-peer-reads.md; with --check only says whether it is stale. Each situation is real: a
server and a client with sockets between them, or a program of another kind at one end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio
import trio.testing
import trustme

import muxkit
from muxkit.protocols import bpmux, e3x, relink, restream

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "reference" / "what-the-peer-reads.md"
PATIENCE: Final = 60.0  # s; reached only when something hangs
PROTOCOLS: Final = ("bpmux", "relink", "aqueduct", "e3x")

Make = Callable[[str], Awaitable[BaseException]]


@attrs.frozen
class Situation:
    """Something that goes wrong over a protocol or a transport; `make` returns what the other side reads."""

    what: str
    over: str
    make: Make

    def read(self) -> str:
        """Make it happen in a run of its own, and return the error as the page shows it."""

        async def run() -> BaseException:
            with trio.fail_after(PATIENCE):
                return await self.make(self.over)

        return shown(trio.run(run))


SITUATIONS: Final[list[Situation]] = []


def situation(what: str, *over: str) -> Callable[[Make], Make]:
    """Note that a function makes this happen, once for each of `over`."""

    def note(make: Make) -> Make:
        SITUATIONS.extend(Situation(what, each, make) for each in over)
        return make

    return note


def shown(error: BaseException) -> str:
    """Return type, text and fields of an error, without what differs between two runs."""
    text = f"{type(error).__name__}: {error}"
    fields = [
        f"{name}={value.value if isinstance(value, Enum) else value!r}"
        for name in ("peer_reason", "reason", "code")
        if (value := getattr(error, name, None))
    ]
    if isinstance(error, muxkit.LinkLost):
        fields = [each for each in fields if not each.startswith("reason=")]
    text += f" [{', '.join(fields)}]" if fields else ""
    text = re.sub(r"/tmp/\S+?/(\w+)", r"/tmp/…/\1", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    text = re.sub(r"\b\d+(\.\d+)? s\b", "N s", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x…", text)
    text = re.sub(r"epoch \d+", "epoch N", text)
    text = re.sub(r"stream \d+", "stream N", text)
    text = re.sub(r"; [\d,]+ bytes were not sent", "", text)
    text = text.replace(", N s after it began", "")  # only a connection that lived for a second says so
    # A system may say that a peer hung up in either way, according to what was on its way.
    ended = r"the peer hung up( while [\d]+ \w+ (was|were) open)?|the connection broke while (reading|writing)"
    text = re.sub(ended, "the peer hung up", text)
    return re.sub(r"byte \d+", "byte N", text)


# --- what the situations share


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def exchange(session: muxkit.Session) -> None:
    async with session.open() as channel:
        await channel.send(b"x")
        await channel.receive()


async def use(session: muxkit.Session) -> None:
    """Send and receive until something is wrong."""
    async with session.open("call") as channel:
        while True:
            await channel.send(b"x")
            await channel.receive()


async def read_by(call: Callable[[], Awaitable[object]]) -> BaseException:
    """Return the one error that a call raises."""
    try:
        await call()
    except BaseExceptionGroup as group:
        return group.exceptions[0]
    except Exception as error:
        return error
    raise AssertionError("nothing was wrong")


async def client_reads(handler: object, url: str, *, client: str | None = None, **options: object) -> BaseException:
    """Return what a client reads that uses a server with this handler; options with `c_` are the client's."""
    ours = {name[2:]: value for name, value in options.items() if name.startswith("c_")}
    theirs = {name: value for name, value in options.items() if not name.startswith("c_")}

    async def call(url: str) -> None:
        async with muxkit.connect(url, **ours) as session:  # type: ignore[arg-type]  # of whatever option
            await use(session)

    async with muxkit.open_server(handler, url, linger=0.2, **theirs) as server:  # type: ignore[arg-type]  # as above
        address = server.url if client is None else f"{client}://{server.url.partition('://')[2]}"
        return await read_by(partial(call, address))


@asynccontextmanager
async def program_that_says(answer: bytes) -> AsyncGenerator[str, None]:
    """Listen, and answer each connection with these bytes; gives the address."""

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(answer)
            while await stream.receive_some():
                pass

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def tcp(*protocols: str) -> list[str]:
    return [f"{protocol}+tcp://127.0.0.1:0" for protocol in protocols or PROTOCOLS]


class Certificates:
    """An authority and files of what it signed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        self.other = trustme.CA()
        self.other.cert_pem.write_to_path(str(self.folder / "other.pem"))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def server(self, name: str = "127.0.0.1", *, expired: bool = False, client_ca: bool = False) -> muxkit.TLS:
        past = datetime.now(UTC) - timedelta(days=1)
        issued = self.authority.issue_cert(name, not_after=past if expired else None)
        path = self.folder / f"{name}{'-expired' if expired else ''}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        return muxkit.TLS(cert=path, key=path, client_ca=self.ca if client_ca else None)


CERTIFICATES: Final = Certificates()


# --- the situations


@situation("a message is larger than the receiver's limit", *tcp())
async def too_large(url: str) -> BaseException:
    async def send(url: str) -> None:
        async with muxkit.connect(url) as session, session.open() as channel:
            await channel.send(bytes(300_000))
            await channel.receive()

    limits = muxkit.Limits(message=200_000)
    async with muxkit.open_server(echo, url, limits=limits, linger=0.2) as server:
        return await read_by(partial(send, server.url))


@situation("the handler of a channel fails", *tcp())
async def channel_handler(url: str) -> BaseException:
    async def fail(channel: muxkit.Channel) -> None:
        await channel.receive()
        raise RuntimeError("what must not be told")

    return await client_reads(fail, url)


@situation("the server aborts a channel, `abort('disk full', code=7)`", *tcp())
async def server_aborts(url: str) -> BaseException:
    async def abort(channel: muxkit.Channel) -> None:
        await channel.receive()
        channel.abort("disk full", code=7)

    return await client_reads(abort, url)


@situation("the handler of a channel refuses, `Refused('not today', code=7)`", *tcp())
async def channel_refused(url: str) -> BaseException:
    async def refuse(channel: muxkit.Channel) -> None:
        await channel.receive()
        raise muxkit.Refused("not today", code=7)

    return await client_reads(refuse, url)


@situation("the server aborts a channel with text that is made to harm a terminal", *tcp())
async def hostile_text(url: str) -> BaseException:
    async def abort(channel: muxkit.Channel) -> None:
        await channel.receive()
        channel.abort("\x1b[2J\r\nroot# " + "x" * 1_000_000)

    error = await client_reads(abort, url)
    assert isinstance(error, (muxkit.ChannelCancelled, muxkit.ChannelStopped))
    assert error.reason.isprintable()
    assert len(error.reason) <= 512
    error.reason = f"{error.reason[:32]}… ({'at most 512 characters'})"
    return error


# The other end of a link waits for its client to come back.
@situation("the client is cancelled", *tcp("bpmux", "aqueduct", "e3x"))
async def client_cancelled(url: str) -> BaseException:
    heard: list[BaseException] = []
    taken, over = trio.Event(), trio.Event()

    async def listen(session: muxkit.Session) -> None:
        async for channel in session.incoming():

            async def take(channel: muxkit.Channel = channel) -> None:
                while True:
                    await channel.receive()
                    taken.set()

            heard.append(await read_by(take))
            over.set()

    async with muxkit.open_server(listen, url, linger=0.2) as server:
        with trio.CancelScope() as scope:
            async with muxkit.connect(server.url) as session:
                channel = await session.open()
                await channel.send(b"x")
                await taken.wait()
                scope.cancel()
                await trio.sleep_forever()
        await over.wait()
    return heard[0]


@situation("the handler of a channel returns while the client waits for an answer", *tcp())
async def handler_returns(url: str) -> BaseException:
    async def leave(channel: muxkit.Channel) -> None:
        await channel.receive()

    return await client_reads(leave, url)


@situation("the client aborts a channel, `abort('disk full', code=7)`", *tcp())
async def client_aborts(url: str) -> BaseException:
    heard: list[BaseException] = []
    taken, over = trio.Event(), trio.Event()

    async def listen(channel: muxkit.Channel) -> None:
        async def take() -> None:
            while True:
                await channel.receive()
                taken.set()

        heard.append(await read_by(take))
        over.set()

    async with muxkit.open_server(listen, url, linger=0.2) as server, muxkit.connect(server.url) as session:
        channel = await session.open()
        await channel.send(b"x")
        await taken.wait()
        channel.abort("disk full", code=7)
        await over.wait()
    return heard[0]


@situation("no handler has the channel's name", *tcp())
async def unknown_name(url: str) -> BaseException:
    return await client_reads(muxkit.by_name({"calls": echo, "files": echo}), url)


@situation("the server has a handler of channels only, and the client sends a request", "bpmux+tcp://127.0.0.1:0")
async def request_to_channels(url: str) -> BaseException:
    async with muxkit.open_server(echo, url, linger=0.2) as server, muxkit.connect(server.url) as session:
        return await read_by(partial(session.request, b"x"))


@situation("the server has a handler of requests only, and the client opens a channel", "bpmux+tcp://127.0.0.1:0")
async def channel_to_requests(url: str) -> BaseException:
    async def answer(request: muxkit.IncomingRequest) -> None:
        await request.respond(b"")

    handler = muxkit.each_request(answer)
    async with muxkit.open_server(handler, url, linger=0.2) as server, muxkit.connect(server.url) as session:
        return await read_by((await session.open()).receive)


@situation("a server is given a handler that is not async", "bpmux+tcp://127.0.0.1:0")
async def sync_handler(url: str) -> BaseException:
    def handler(channel: muxkit.Channel) -> None:
        pass

    return await read_by(partial(client_reads, handler, url))


@situation("the handler of a session fails", *tcp())
async def session_handler(url: str) -> BaseException:
    async def fail(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            await channel.receive()
            raise RuntimeError("what must not be told")

    return await client_reads(fail, url)


@situation("the handler of a session refuses, `Refused('not today', code=7)`", *tcp())
async def session_refused(url: str) -> BaseException:
    async def refuse(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            await channel.receive()
            raise muxkit.Refused("not today", code=7)

    return await client_reads(refuse, url)


@situation("the client leaves by an error", *tcp())
async def client_leaves(url: str) -> BaseException:
    heard: list[BaseException] = []
    taken, over = trio.Event(), trio.Event()

    async def listen(session: muxkit.Session) -> None:
        async for channel in session.incoming():

            async def take(channel: muxkit.Channel = channel) -> None:
                while True:
                    await channel.receive()
                    taken.set()

            heard.append(await read_by(take))
            over.set()

    async with muxkit.open_server(listen, url, linger=0.2) as server:
        with suppress(ValueError):
            async with muxkit.connect(server.url) as session:
                channel = await session.open()
                await channel.send(b"x")
                await taken.wait()
                raise ValueError("what must not be told")
        await over.wait()
    return heard[0]


@situation("the token is wrong", *tcp())
async def wrong_token(url: str) -> BaseException:
    return await client_reads(echo, url, authorize=muxkit.tokens({"alice": "correct horse"}), c_token="battery staple")


@situation("the token is missing", *tcp())
async def no_token(url: str) -> BaseException:
    return await client_reads(echo, url, authorize=muxkit.tokens({"alice": "correct horse"}))


@situation("the token is wrong", "bpmux+ws://127.0.0.1:0/mux")
async def wrong_token_ws(url: str) -> BaseException:
    return await wrong_token(url)


def _other_protocol(server: str) -> Make:
    async def make(url: str) -> BaseException:
        options = {"c_patience": 1.0} if url.startswith("relink") else {}
        client = url.partition("://")[0]
        return await client_reads(echo, f"{server}+tcp://127.0.0.1:0", client=client, **options)

    return make


# Left out: where both sides wait for the other to begin, silence ends it (a ping after 20 s, the end after 20 s more);
# where both begin, it depends on what comes first whether the server's bytes are seen before its end.
LEFT_OUT: Final = {
    ("bpmux", "relink"),
    ("bpmux", "e3x"),
    ("aqueduct", "e3x"),
    ("relink", "e3x"),
    ("aqueduct", "bpmux"),
    ("e3x", "bpmux"),
    ("relink", "bpmux"),
}
for _server in PROTOCOLS:
    _others = [each for each in PROTOCOLS if each != _server and (each, _server) not in LEFT_OUT]
    if _others:
        situation(f"a server of {_server}", *tcp(*_others))(_other_protocol(_server))


def _other_program(answer: bytes) -> Make:
    async def make(url: str) -> BaseException:
        scheme = url.partition("://")[0]
        options = {"patience": 1.0} if scheme.startswith("relink") else {}

        async def call(address: str) -> None:
            async with muxkit.connect(f"{scheme}://{address}", **options) as session:  # type: ignore[arg-type]
                await use(session)

        async with program_that_says(answer) as address:
            return await read_by(partial(call, address))

    return make


situation("a web server", *tcp("bpmux", "relink", "aqueduct"))(
    _other_program(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
)
situation("an SSH server", *tcp("bpmux", "relink", "aqueduct"))(_other_program(b"SSH-2.0-OpenSSH_9.6\r\n"))
situation("a web server without WebSockets", "bpmux+ws://127.0.0.1:0/mux")(
    _other_program(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
)


@situation("a server of TLS, and the client's URL says tcp", *tcp())
async def plaintext_to_tls(url: str) -> BaseException:
    protocol = url.partition("+")[0]
    options: dict[str, object] = {"c_patience": 1.0} if protocol == "relink" else {}
    tls = CERTIFICATES.server()
    return await client_reads(echo, f"{protocol}+tls://127.0.0.1:0", client=f"{protocol}+tcp", tls=tls, **options)


@situation(
    "a server of plain TCP, and the client's URL says tls",
    *(f"{each}+tls://127.0.0.1:0" for each in ("bpmux", "relink", "aqueduct")),
)
async def tls_to_plaintext(url: str) -> BaseException:
    protocol = url.partition("+")[0]
    options: dict[str, object] = {"c_patience": 1.0} if protocol == "relink" else {}
    trusted = muxkit.TLS(ca=CERTIFICATES.ca)
    return await client_reads(echo, tcp(protocol)[0], client=f"{protocol}+tls", c_tls=trusted, **options)


ENCRYPTED: Final = (
    "bpmux+tls://127.0.0.1:0",
    "bpmux+wss://127.0.0.1:0/mux",
    "aqueduct+quic://127.0.0.1:0",
    "e3x+dtls://127.0.0.1:0",
)


@situation("the client shows no certificate, and the server wants one", *ENCRYPTED[:3])
async def no_certificate(url: str) -> BaseException:
    return await client_reads(echo, url, tls=CERTIFICATES.server(client_ca=True), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


@situation("the server's certificate is of an authority that is not trusted", *ENCRYPTED)
async def not_trusted(url: str) -> BaseException:
    return await client_reads(
        echo, url, tls=CERTIFICATES.server(), c_tls=muxkit.TLS(ca=CERTIFICATES.folder / "other.pem")
    )


@situation("the server's certificate is for another name", *ENCRYPTED)
async def other_name(url: str) -> BaseException:
    return await client_reads(echo, url, tls=CERTIFICATES.server("example.org"), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


@situation("the server's certificate has expired", *ENCRYPTED)
async def expired(url: str) -> BaseException:
    return await client_reads(echo, url, tls=CERTIFICATES.server(expired=True), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


async def _connects(url: str, **options: object) -> BaseException:
    async def call() -> None:
        async with muxkit.connect(url, **options) as session:  # type: ignore[arg-type]  # of whatever option
            await use(session)

    return await read_by(call)


@situation(
    "nothing listens there",
    *(
        f"{each}://127.0.0.1:PORT"
        for each in ("bpmux+tcp", "bpmux+tls", "aqueduct+tcp", "e3x+tcp", "bpmux+ws", "relink+tcp")
    ),
)
async def refused(url: str) -> BaseException:
    with trio.socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        address = url.replace("PORT", str(taken.getsockname()[1]))
        return await _connects(address, **({"patience": 1.0} if url.startswith("relink") else {}))


@situation("the host has no address", "bpmux+tcp://nowhere.invalid:7000", "bpmux+ws://nowhere.invalid:7000/mux")
async def no_address(url: str) -> BaseException:
    return await _connects(url, **({"insecure": True}))


@situation("the Unix socket is not there", "bpmux+unix:///nowhere/muxkit/socket")
async def no_socket(url: str) -> BaseException:
    return await _connects(url)


@situation("the WebSocket server has another path", "bpmux+ws://127.0.0.1:0/mux")
async def other_path(url: str) -> BaseException:
    async with muxkit.open_server(echo, url) as server:
        return await _connects(server.url.replace("/mux", "/other"))


@situation("the server is shut down", *tcp())
async def shut_down(url: str) -> BaseException:
    async with muxkit.open_server(echo, url, linger=0.2) as server, muxkit.connect(server.url) as session:

        async def call() -> None:
            async with trio.open_nursery() as nursery, session.open() as first:
                await first.send(b"x")
                await first.receive()
                nursery.start_soon(partial(server.shutdown, grace=5))
                with suppress(muxkit.ChannelCancelled):  # a channel that crosses the shutdown
                    while True:
                        await exchange(session)
                await exchange(session)

        return await read_by(call)


PROGRAM: Final = """
import sys, trio, muxkit
async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)
async def main() -> None:
    async with muxkit.open_server(echo, sys.argv[1]) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@situation("the server's process is killed", *(url for url in tcp() if not url.startswith("relink")))
async def killed(url: str) -> BaseException:
    process = await trio.to_thread.run_sync(
        partial(
            subprocess.Popen,
            [sys.executable, "-c", PROGRAM, url],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"},
        )
    )
    assert process.stdout is not None
    address = (await trio.to_thread.run_sync(process.stdout.readline)).strip()

    async def call() -> None:
        async with muxkit.connect(address) as session, session.open() as channel:
            await channel.send(b"x")
            await channel.receive()
            process.send_signal(signal.SIGKILL)
            await channel.receive()

    try:
        return await read_by(call)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@situation("the server declines a request", "bpmux+tcp://127.0.0.1:0")
async def request_declined(url: str) -> BaseException:
    async def decline(request: muxkit.IncomingRequest) -> None:
        request.abort("out of stock", code=7)

    async def call(url: str) -> None:
        async with bpmux.connect(url) as session:
            await session.request(b"x")

    async with bpmux.open_server(muxkit.each_request(decline), url) as server:
        return await read_by(partial(call, server.url))


@situation("the URL names restream, which has no channels", "restream+tcp://127.0.0.1:7000")
async def no_channels(url: str) -> BaseException:
    return await _connects(url)


@situation("the handler of a request fails", "bpmux+tcp://127.0.0.1:0")
async def request_fails(url: str) -> BaseException:
    async def fail(request: muxkit.IncomingRequest) -> bytes:
        raise RuntimeError("what must not be told")

    async def call(url: str) -> None:
        async with bpmux.connect(url) as session:
            await session.request(b"x")

    async with bpmux.open_server(muxkit.each_request(fail), url) as server:
        return await read_by(partial(call, server.url))


# --- what breaks on the way, and what never comes


@situation("a handler of a session refuses at once, before there is a channel", *tcp())
async def refused_at_once(url: str) -> BaseException:
    async def refuse(session: muxkit.Session) -> None:
        raise muxkit.Refused("not today", code=7)

    async with muxkit.open_server(refuse, url, linger=0.2) as server:

        async def call() -> None:
            async with muxkit.connect(server.url) as session:
                with suppress(muxkit.LinkLost):  # the refusal arrives during this call
                    await use(session)
                await trio.testing.wait_all_tasks_blocked(0.05)  # until this side has noticed the whole end
                await use(session)

        return await read_by(call)


@situation("the server stops reading a channel, `aclose()`, while the client sends", *tcp())
async def reading_stopped(url: str) -> BaseException:
    async def stop_reading(channel: muxkit.Channel) -> None:
        await channel.aclose()

    return await _sends_until_wrong(stop_reading, url)


@situation("the server aborts a channel, `abort('disk full', code=7)`, while the client sends", *tcp())
async def aborted_while_sending(url: str) -> BaseException:
    async def abort(channel: muxkit.Channel) -> None:
        channel.abort("disk full", code=7)

    return await _sends_until_wrong(abort, url)


async def _sends_until_wrong(end: Callable[[muxkit.Channel], Awaitable[None]], url: str) -> BaseException:
    async def stop(channel: muxkit.Channel) -> None:
        await channel.receive()
        await end(channel)

    async def send(url: str) -> None:
        async with muxkit.connect(url, linger=0.2) as session, session.open("call") as channel:
            while True:
                await channel.send(bytes(1000))

    async with muxkit.open_server(stop, url, linger=0.2) as server:
        return await read_by(partial(send, server.url))


@situation("the server's backlog of channels is full, `Limits(backlog=1)`", *tcp("bpmux", "aqueduct", "e3x"))
async def backlog_full(url: str) -> BaseException:
    taken = trio.Event()

    async def take_none(session: muxkit.Session) -> None:
        await taken.wait()

    async def call(url: str) -> None:
        async with muxkit.connect(url, linger=0.2) as session:
            channels = [await session.open("call", payload=b"x") for _ in range(20)]
            for channel in reversed(channels):
                await channel.receive()

    async with muxkit.open_server(take_none, url, limits=muxkit.Limits(backlog=1), linger=0.2) as server:
        try:
            with trio.fail_after(3):
                return await read_by(partial(call, server.url))
        finally:
            taken.set()


@asynccontextmanager
async def server_process(url: str) -> AsyncGenerator[tuple[str, subprocess.Popen[str]], None]:
    """Run an echo server as a process of its own; gives what to connect to."""
    process = await trio.to_thread.run_sync(
        partial(
            subprocess.Popen,
            [sys.executable, "-c", PROGRAM, url],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"},
        )
    )
    assert process.stdout is not None
    try:
        yield (await trio.to_thread.run_sync(process.stdout.readline)).strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@situation("the server falls silent: its process is stopped", *tcp("bpmux", "e3x", "relink"))
async def silent(url: str) -> BaseException:
    protocol = url.partition("+")[0]
    options: dict[str, object] = {"patience": 1.0} if protocol == "relink" else {}

    async with server_process(url) as (address, process):

        async def call() -> None:
            config = SHORT_KEEPALIVE[protocol]
            async with muxkit.connect(address, config=config, linger=0.2, **options) as session:  # type: ignore[arg-type]
                async with session.open("call") as channel:
                    await channel.send(b"x")
                    await channel.receive()
                    process.send_signal(signal.SIGSTOP)
                    await channel.receive()

        return await read_by(call)


SHORT_KEEPALIVE: Final = {
    "bpmux": bpmux.Config(keepalive=1, keepalive_timeout=1),
    "relink": relink.Config(keepalive=1, keepalive_timeout=1),
    "e3x": e3x.Config(keepalive=1, timeout=1),
}


@asynccontextmanager
async def relay(address: str, *, back: int, once: bool = False) -> AsyncGenerator[str, None]:
    """Forward connections to `address`, and cut each behind `back` bytes from there; gives the relay's own address."""
    host, _, port = address.rpartition(":")

    async def serve(client: trio.SocketStream) -> None:
        async with client, await trio.open_tcp_stream(host, int(port)) as server, trio.open_nursery() as nursery:

            async def forward() -> None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    async for data in client:
                        await server.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward)
            left = back
            with suppress(trio.BrokenResourceError):
                while left and (data := await server.receive_some(left)):
                    await client.send_all(data)
                    left -= len(data)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@situation("the line is cut in the middle of a message", *tcp("bpmux", "aqueduct", "e3x"))
async def cut_in_a_message(url: str) -> BaseException:
    async def answer(channel: muxkit.Channel) -> None:
        await channel.receive()
        await channel.send(bytes(500_000))

    async with muxkit.open_server(answer, url, linger=0.2) as server:
        scheme, _, address = server.url.partition("://")
        async with relay(address, back=50_000) as between:
            return await _connects(f"{scheme}://{between}", linger=0.2)


@situation("each connection of a link is cut behind its handshake", *tcp("relink"))
async def link_refused(url: str) -> BaseException:
    async with muxkit.open_server(echo, url, linger=0.2) as server:
        scheme, _, address = server.url.partition("://")
        async with relay(address, back=24) as between:
            return await _connects(f"{scheme}://{between}", patience=1.0, linger=0.2)


@situation("the listener of a link was started again", *tcp("relink"))
async def link_changed(url: str) -> BaseException:
    async with server_process(url) as (address, process):

        async def call() -> None:
            backoff = muxkit.Backoff(first=0.01, most=0.01)
            async with relink.connect(address, linger=0.2, backoff=backoff) as session:
                async with session.open("call") as channel:
                    await channel.send(b"x")
                    await channel.receive()
                    process.kill()
                    await trio.to_thread.run_sync(process.wait)
                    async with muxkit.open_server(echo, address, linger=0.2):
                        await channel.receive()

        return await read_by(call)


@situation("the link has an endpoint that the listener does not know", "relink+tcp://127.0.0.1:0/jobs")
async def unknown_endpoint(url: str) -> BaseException:
    async with muxkit.open_server(echo, url, linger=0.2) as server:
        return await _connects(server.url.replace("/jobs", "/chat"), patience=1.0, linger=0.2)


@situation("the peer breaks a rule of the frames", *tcp("bpmux", "relink", "aqueduct"))
async def broken_rule(url: str) -> BaseException:
    scheme = url.partition("://")[0]
    answers = {
        "bpmux+tcp": b"\xff" * 16,
        "relink+tcp": bytes(8) + (1).to_bytes(8, "little") * 2 + bytes.fromhex("A0 00 00 00 00 00 00 00"),
        "aqueduct+tcp": b"AQUEDUX1" + b"\xff" * 16,
    }
    async with program_that_says(answers[scheme]) as address:
        return await _connects(f"{scheme}://{address}", linger=0.2)


@situation(
    "the server accepts the connection and says nothing",
    *(f"{each}://" for each in ("relink+tcp", "bpmux+tls", "bpmux+ws", "bpmux+wss")),
)
async def no_handshake(url: str) -> BaseException:
    if url.startswith("relink"):
        options: dict[str, object] = {"patience": 1.0, "limits": muxkit.Limits(handshake=0.5)}
    else:
        options = {"handshake_timeout": 0.5}
    async with program_that_says(b"") as address:
        return await _connects(f"{url}{address}", linger=0.2, **options)


@situation("nothing listens there", "bpmux+wss://127.0.0.1:PORT", "bpmux+mem://nowhere")
async def refused_elsewhere(url: str) -> BaseException:
    return await refused(url)


@situation("nothing listens there", "aqueduct+quic://127.0.0.1:PORT")
async def refused_quic(url: str) -> BaseException:
    return await _datagrams_unheard(url, handshake_timeout=1.0)


@situation("nothing listens there", "e3x+udp://127.0.0.1:PORT")
async def refused_udp(url: str) -> BaseException:
    return await _datagrams_unheard(url, config=e3x.Config(timeout=1))


@situation("nothing listens there", "e3x+dtls://127.0.0.1:PORT")
async def refused_dtls(url: str) -> BaseException:
    return await _datagrams_unheard(url, handshake_timeout=1.0, tls=muxkit.TLS(ca=CERTIFICATES.ca))


async def _datagrams_unheard(url: str, **options: object) -> BaseException:
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as taken:
        await taken.bind(("127.0.0.1", 0))
        address = url.replace("PORT", str(taken.getsockname()[1]))
    return await _connects(address, linger=0.2, **options)


@situation("the Unix socket is left from a server that has gone", "bpmux+unix:///socket")
async def stale_socket(url: str) -> BaseException:
    path = Path(tempfile.mkdtemp()) / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    return await _connects(f"bpmux+unix://{path}")


@situation("the path of the Unix socket is a file", "bpmux+unix:///file")
async def no_socket_but_a_file(url: str) -> BaseException:
    path = Path(tempfile.mkdtemp()) / "file"
    path.write_bytes(b"")
    return await _connects(f"bpmux+unix://{path}")


@situation("the WebSocket server wants another login", "bpmux+ws://127.0.0.1:0/mux")
async def unauthorized(url: str) -> BaseException:
    answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 9\r\n\r\nno cookie"
    async with program_that_says(answer) as address:
        return await _connects(f"bpmux+ws://{address}/mux")


@situation("the WebSocket server agrees to none of the subprotocols", "bpmux+ws://127.0.0.1:0/mux")
async def no_subprotocol(url: str) -> BaseException:
    return await client_reads(echo, url, subprotocols=["chat-2"], c_subprotocols=["chat-1"])


@situation("the QUIC server speaks another application's protocol (ALPN)", "aqueduct+quic://127.0.0.1:0")
async def other_alpn(url: str) -> BaseException:
    return await client_reads(echo, url, tls=CERTIFICATES.server(), alpn=("h3",), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


@situation("a token is shown to a server without `authorize=`", *tcp("bpmux", "relink", "aqueduct"))
async def token_not_asked_for(url: str) -> BaseException:
    options: dict[str, object] = {"c_patience": 1.0} if url.startswith("relink") else {}
    return await client_reads(echo, url, client=None, c_token="correct horse", **options)


@situation("the server has no WebSocket, and the client's URL says ws", "bpmux+ws://127.0.0.1:0")
async def websocket_to_plain(url: str) -> BaseException:
    return await client_reads(echo, "bpmux+tcp://127.0.0.1:0", client="bpmux+ws")


class Answered(Exception):
    """What a program of another kind reads from a server."""


def _of_another_program(said: bytes) -> Make:
    async def make(url: str) -> BaseException:
        tls = CERTIFICATES.server() if "tls" in url or "wss" in url else None
        async with muxkit.open_server(echo, url, tls=tls, limits=muxkit.Limits(handshake=0.5), linger=0.2) as server:
            host, port = re.findall(r"//(.+):(\d+)", server.url)[0]
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(said)
                read = bytearray()
                with suppress(trio.BrokenResourceError):
                    while data := await stream.receive_some():
                        read += data
        head, _, body = read.partition(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0] if head.startswith(b"HTTP/") else read
        return Answered(repr(line.decode("latin-1")) + (f" and {body.decode()!r}" if body else ""))

    return make


FOREIGN_PORTS: Final = (
    *tcp("relink"),
    "bpmux+tls://127.0.0.1:0",
    "bpmux+ws://127.0.0.1:0/mux",
    "bpmux+wss://127.0.0.1:0/mux",
)
situation("a browser at a port of ours", *FOREIGN_PORTS)(
    _of_another_program(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
)


# --- over other transports


@situation("a message is larger than the receiver's limit", "bpmux+ws://127.0.0.1:0/mux")
async def too_large_ws(url: str) -> BaseException:
    return await too_large(url)


@situation("the handler of a session fails", "bpmux+ws://127.0.0.1:0/mux", "bpmux+mem://fails")
async def session_handler_elsewhere(url: str) -> BaseException:
    return await session_handler(url)


@situation("the handler of a session fails", "aqueduct+quic://127.0.0.1:0", "e3x+dtls://127.0.0.1:0")
async def session_handler_encrypted(url: str) -> BaseException:
    async def fail(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            await channel.receive()
            raise RuntimeError("what must not be told")

    return await client_reads(fail, url, tls=CERTIFICATES.server(), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


@situation("the handler of a channel refuses, `Refused('not today', code=7)`", "aqueduct+quic://127.0.0.1:0")
async def channel_refused_quic(url: str) -> BaseException:
    async def refuse(channel: muxkit.Channel) -> None:
        await channel.receive()
        raise muxkit.Refused("not today", code=7)

    return await client_reads(refuse, url, tls=CERTIFICATES.server(), c_tls=muxkit.TLS(ca=CERTIFICATES.ca))


# --- restream


@asynccontextmanager
async def restream_server(**options: Any) -> AsyncGenerator[str, None]:
    limits = options.pop("store_limits", restream.StoreLimits())
    async with restream.open_store("memory:", limits=limits) as store, trio.open_nursery() as nursery:
        serve = partial(restream.serve, "restream+tcp://127.0.0.1:0", store, **options)
        served: restream.Served = await nursery.start(serve)
        yield served.url
        nursery.cancel_scope.cancel()


async def _reads_numbers(url: str, **options: Any) -> BaseException:
    async def call() -> None:
        async with restream.numbers(url, **{"count": 3, **options}) as stream:
            with stream.fail_after(2):
                while True:
                    await stream.receive()

    return await read_by(call)


RESTREAM: Final = "restream+tcp://127.0.0.1:0"


@situation("the session of a stream is not known, or has expired", RESTREAM)
async def unknown_session(url: str) -> BaseException:
    async with restream_server() as address:
        async with restream.numbers(address, count=3, uuid=UUID) as stream:
            await stream.receive()
            saved = stream.snapshot()
    async with restream_server() as address:
        return await _reads_numbers(address, count=None, resume=saved)


UUID: Final = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"


@situation("the server stores no more sessions, `StoreLimits(sessions=1)`", RESTREAM)
async def store_full(url: str) -> BaseException:
    async with restream_server(store_limits=restream.StoreLimits(sessions=1)) as address:
        async with restream.numbers(address, count=3) as stream:
            await stream.receive()
            return await _reads_numbers(address)


@situation("the application of the server fails", RESTREAM)
async def application_fails(url: str) -> BaseException:
    class Failing(restream.Numbers):
        def step(self, *arguments: Any) -> Any:  # noqa: ANN401 - of whatever state
            raise RuntimeError("what must not be told")

    async with restream_server(application=Failing()) as address:
        return await _reads_numbers(address)


@situation("the server sends an error that is made to harm a terminal", RESTREAM)
async def hostile_line(url: str) -> BaseException:
    line = json.dumps({"error": "\x1b[2J\r\nroot# " + "x" * 60_000}).encode() + b"\n"
    async with program_that_says(line) as address:
        error = await _reads_numbers(f"restream+tcp://{address}")
    assert isinstance(error, restream.StreamRefused)
    assert error.reason.isprintable()
    assert len(error.reason) <= 512
    error.reason = error.reason[:32] + "… (at most 512 characters)"
    return error


situation("a web server", RESTREAM)(
    lambda url: _restream_reads(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
)
situation("an SSH server", RESTREAM)(lambda url: _restream_reads(b"SSH-2.0-OpenSSH_9.6\r\n"))
situation("the peer breaks a rule of the frames", RESTREAM)(lambda url: _restream_reads(b'{"id": 7}\n'))


async def _restream_reads(answer: bytes) -> BaseException:
    async with program_that_says(answer) as address:
        return await _reads_numbers(f"restream+tcp://{address}")


def _restream_at(server: str, tls: muxkit.TLS | None = None) -> Make:
    async def make(url: str) -> BaseException:
        async with muxkit.open_server(echo, server, tls=tls, linger=0.2) as other:
            return await _reads_numbers(f"restream+tcp://{other.url.partition('://')[2]}")

    return make


for _server in PROTOCOLS:
    situation(f"a server of {_server}", RESTREAM)(_restream_at(tcp(_server)[0]))
situation("a server of TLS, and the client's URL says tcp", RESTREAM)(
    _restream_at("bpmux+tls://127.0.0.1:0", CERTIFICATES.server())
)


@situation("a server of restream", *tcp("relink", "aqueduct"))
async def server_of_restream(url: str) -> BaseException:
    scheme = url.partition("://")[0]
    async with restream_server() as address:
        options = {"patience": 1.0} if scheme.startswith("relink") else {}
        return await _connects(f"{scheme}://{address.partition('://')[2]}", linger=0.2, **options)


@situation("nothing listens there", RESTREAM)
async def refused_restream(url: str) -> BaseException:
    with trio.socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        return await _reads_numbers(f"restream+tcp://127.0.0.1:{taken.getsockname()[1]}")


# --- the page


def page() -> str:
    lines = [
        "# What the other side reads",
        "",
        "What a client or a server reads when something goes wrong at the other end, or when the other end speaks",
        "something else. This page is made by `python tests/peer_reads.py`, which lets each of these happen over real",
        "sockets; the suite keeps it true. Fields of the error stand in brackets. [Errors](errors.md) says which call",
        "raises what.",
        "",
    ]
    for what in dict.fromkeys(each.what for each in SITUATIONS):
        lines += [f"## {what[0].upper()}{what[1:]}", "", "| over | is read |", "|---|---|"]
        lines += [f"| `{scheme(each.over)}` | {cell(each.read())} |" for each in SITUATIONS if each.what == what]
        lines.append("")
    return "\n".join(lines)


def scheme(url: str) -> str:
    return url.partition("://")[0]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is stale: run python tests/peer_reads.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
