"""Ten thousand calls that time out at once harm no other call.

For each protocol a server process and a client process. The client opens so many channels (and, over bpmux, requests)
whose handlers never answer, waits until the server has them all, and cancels all in the same moment. Beside them one
channel of the same session and one of another session go on echoing; none of their echoes may fail. Afterwards the
connection is alive, new calls work, and both sides hold no more channels than before.

    python -m tests.soak.storm [--calls 10000] [--only bpmux] [--patience 500]

Ends with 1 if an echo failed or anything was left, or if the server wrote a warning.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio
import trustme

import muxkit
from muxkit.protocols import bpmux
from tests.soak.churn import resident

MIB: Final = 1024 * 1024
SLOW: Final = b"slow"
PACE: Final = 0.01  # s between two echoes
ROUNDS: Final = 7  # of the storm: one that fills what is kept for the next, and two halves to compare
NOISE: Final = 8 * MIB
LEFT: Final = 600  # bytes a call that may stay from one half of the rounds to the other
URLS: Final = {
    "bpmux requests": "bpmux+tcp://127.0.0.1:0",
    "bpmux": "bpmux+tcp://127.0.0.1:0",
    "relink": "relink+tcp://127.0.0.1:0",
    "aqueduct": "aqueduct+tcp://127.0.0.1:0",
    "aqueduct+quic": "aqueduct+quic://127.0.0.1:0",
    "e3x": "e3x+tcp://127.0.0.1:0",
    "e3x+udp": "e3x+udp://127.0.0.1:0",
}


def limits_for(calls: int) -> muxkit.Limits:
    """Room for all calls, with the defaults for what is broken off."""
    return muxkit.Limits(channels=6 * calls, backlog=6 * calls, channel_memory=1 << 30)


# ---------------------------------------------------------------------------- the server


async def answer(channel: muxkit.Channel) -> None:
    with suppress(muxkit.ChannelCancelled, muxkit.ChannelStopped):
        async for message in channel:
            if message != SLOW:
                await channel.send(message)


async def answer_requests(session: muxkit.Session) -> None:
    assert isinstance(session, bpmux.Session)

    async def respond(request: muxkit.IncomingRequest) -> None:
        async with request:
            if request.payload == SLOW:
                await request.cancelled()
            else:
                await request.respond(request.payload)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxkit.each_channel(answer), session)
        async for request in session.requests():
            nursery.start_soon(respond, request)


async def serve(name: str, calls: int, folder: str) -> None:
    options: dict[str, Any] = {"certificate": f"{folder}/server.pem"} if name.endswith("quic") else {}
    handler = answer_requests if name == "bpmux requests" else muxkit.each_channel(answer)
    async with muxkit.open_server(handler, URLS[name], limits=limits_for(calls), linger=1.0, **options) as server:
        print(server.url, flush=True)
        async with trio.lowlevel.FdStream(0) as orders:
            async for _ in orders:
                print(resident(), sum(len(session.channels()) for session in server.sessions()), flush=True)


# ---------------------------------------------------------------------------- the client


@attrs.define
class Result:
    """What one storm was like."""

    seconds: float = 0.0
    echoes: list[float] = attrs.field(factory=list)
    memory: list[int] = attrs.field(factory=list)  # of the server, after each round
    left: int = 0
    complaints: list[str] = attrs.field(factory=list)

    def worst(self) -> float:
        return max(self.echoes, default=0.0)


async def bystand(session: muxkit.Session, result: Result) -> None:
    """Echo on one channel without an end."""
    async with session.open("bystander") as channel:
        while True:
            for number in range(10):
                began = trio.current_time()
                await channel.send(b"%d" % number)
                if await channel.receive() != b"%d" % number:
                    result.complaints.append("a wrong echo")
                result.echoes.append(trio.current_time() - began)
                await trio.sleep(PACE)


async def one_channel(session: muxkit.Session, sent: Callable[[], None]) -> None:
    async with session.open("call") as channel:
        await channel.send(SLOW)
        sent()
        await channel.receive()


async def one_request(session: muxkit.Session, sent: Callable[[], None]) -> None:
    assert isinstance(session, bpmux.Session)
    sent()
    await session.request(SLOW)


async def storm(
    session: muxkit.Session, calls: int, one: Callable[[muxkit.Session, Callable[[], None]], Awaitable[None]]
) -> int:
    """Start so many calls, let them all time out at once; returns how many did."""
    started = timed_out = 0
    all_started = trio.Event()
    scopes = []

    def count() -> None:
        nonlocal started
        started += 1
        if started == calls:
            all_started.set()

    async def call() -> None:
        nonlocal timed_out
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await one(session, count)
        timed_out += scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        for _ in range(calls):
            nursery.start_soon(call)
        await all_started.wait()
        for scope in scopes:
            scope.cancel()
    return timed_out


async def run(name: str, calls: int, patience: float) -> Result:
    result = Result()
    began = trio.current_time()
    with tempfile.TemporaryDirectory() as folder:
        ca = trustme.CA()
        ca.cert_pem.write_to_path(f"{folder}/ca.pem")
        ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(f"{folder}/server.pem")
        log = Path(folder, "log")
        with log.open("wb") as errors:  # noqa: ASYNC230  # nothing else runs yet
            command = [sys.executable, "-m", "tests.soak.storm", "--serve", name, folder, "--calls", str(calls)]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)  # noqa: ASYNC220  # nothing else runs yet
        try:
            with trio.fail_after(patience):
                await _against(server, name, calls, folder, result)
        except (muxkit.LinkLost, trio.TooSlowError, ExceptionGroup) as error:
            result.complaints.append(repr(error))
        finally:
            server.communicate()
        result.complaints += log.read_text().splitlines()[-20:]  # noqa: ASYNC240  # nothing else runs any more
        if server.returncode:
            result.complaints.append(f"the server ended with {server.returncode}")
    result.seconds = trio.current_time() - began
    return result


async def _against(server: subprocess.Popen[str], name: str, calls: int, folder: str, result: Result) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    url = (await trio.to_thread.run_sync(server.stdout.readline)).strip()
    options: dict[str, Any] = {"ca": f"{folder}/ca.pem"} if name.endswith("quic") else {}
    connect = partial(muxkit.connect, url, limits=limits_for(calls), linger=1.0, **options)
    one = one_request if name == "bpmux requests" else one_channel

    async def look() -> list[int]:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("?")
        server.stdin.flush()
        return [int(word) for word in (await trio.to_thread.run_sync(server.stdout.readline)).split()]

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(connect())
        other = await stack.enter_async_context(connect())
        async with trio.open_nursery() as nursery:
            for bystander in (session, other):
                nursery.start_soon(bystand, bystander, result)
            for _ in range(ROUNDS):
                timed_out = await storm(session, calls, one)
                if timed_out != calls:
                    result.complaints.append(f"{timed_out} of {calls} calls timed out")
                async with session.open("after") as channel:
                    await channel.send(b"still here")
                    if await channel.receive() != b"still here":
                        result.complaints.append("a wrong answer after the storm")
                while (await look())[1] > 2:  # the bystanders  # noqa: ASYNC110  # another process
                    await trio.sleep(0.05)
                result.memory.append((await look())[0])
            nursery.cancel_scope.cancel()
        with trio.move_on_after(10):
            while session.channels():  # noqa: ASYNC110  # no event says it
                await trio.sleep(0.05)
        result.left = len(session.channels())
    if result.left:
        result.complaints.append(f"{result.left} channels are left")
    # The least of each half: what a round leaves for the allocator to find again comes and goes by 20 MiB.
    half = 1 + ROUNDS // 2
    if len(result.memory) == ROUNDS and min(result.memory[half:]) - min(result.memory[1:half]) > NOISE + LEFT * calls:
        result.complaints.append(f"memory after each storm: {[size // MIB for size in result.memory]} MiB")


def row(name: str, result: Result) -> str:
    memory = " ".join(f"{size / MIB:.0f}" for size in result.memory)
    return (
        f"{name:<16}{result.seconds:>8.1f}{len(result.echoes):>9}{result.worst() * 1000:>10.0f}"
        f"{result.left:>6}   {memory:<14}  {'; '.join(result.complaints) or 'unharmed'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Let thousands of calls time out at once.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--only", default="", help="one of: " + ", ".join(URLS))
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for each protocol")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        trio.run(serve, asked.serve[0], asked.calls, asked.serve[1])
        return 0
    print(f"{'protocol':<16}{'seconds':>8}{'echoes':>9}{'worst ms':>10}{'left':>6}   MiB after each")
    harmed = False
    for name in URLS:
        if asked.only in ("", name):
            result = trio.run(run, name, asked.calls, asked.patience)
            print(row(name, result), flush=True)
            harmed |= bool(result.complaints)
    return int(harmed)


if __name__ == "__main__":
    sys.exit(main())
