"""The demo's client notices a server that sends wrong payloads, breaks the rules, or is silent."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

import muxkit
from muxkit.cli.terminal import Exit
from muxkit_bench.demo.processes import PROBLEMS_MOST, End, Failed, Payloads, Plan, Server, measure, understand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

PLAN = Plan(seconds=0.05, idle_seconds=0.01, channels=3, patience=60.0)
NAMES = (f"demo-client-{number}" for number in itertools.count())


class LyingChannel(muxkit.Channel):
    """A channel that changes what the server echoes; its receipts are honest."""

    def __init__(self, inner: muxkit.Channel, lie: Callable[[list[bytes]], list[bytes]]) -> None:
        self._inner = inner
        self._lie = lie
        self._sent: list[bytes] = []

    @property
    def headers(self) -> Mapping[str, str]:
        return self._inner.headers

    async def send(self, message: bytes) -> None:
        if message.startswith(b"{"):
            await self._inner.send(message)
            return
        self._sent.append(message)
        for each in self._lie(self._sent):
            await self._inner.send(each)

    async def send_many(self, messages: Iterable[bytes]) -> None:
        raise NotImplementedError

    async def receive(self) -> bytes:
        return await self._inner.receive()

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        return await self._inner.receive_many(limit)

    async def finish(self) -> None:
        await self._inner.finish()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def close(self) -> None:
        self._inner.close()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self._inner.abort(reason, code=code)

    @property
    def session(self) -> muxkit.Session:
        return self._inner.session

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def opening(self) -> bytes:
        return self._inner.opening

    def as_stream(self) -> trio.abc.HalfCloseableStream:
        return self._inner.as_stream()

    def stats(self) -> muxkit.ChannelStats:
        return self._inner.stats()


async def problems_with(handler: Callable[[muxkit.Channel], Awaitable[object]], plan: Plan = PLAN) -> list[str]:
    """What a client finds wrong with a server whose channels are handled so."""
    async with trio.open_nursery() as nursery:
        url = f"bpmux+mem://{next(NAMES)}"
        served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(handler), url)
        totals = await measure(served.url, plan)
        nursery.cancel_scope.cancel()
    return totals.problems


async def problems_with_lies(lie: Callable[[list[bytes]], list[bytes]], plan: Plan = PLAN) -> list[str]:
    server = Server()

    async def handler(channel: muxkit.Channel) -> None:
        await server.serve_channel(LyingChannel(channel, lie))

    return await problems_with(handler, plan)


async def test_it_finds_nothing_wrong_with_an_honest_server() -> None:
    assert await problems_with(Server().serve_channel) == []


async def test_it_notices_a_changed_byte() -> None:
    problems = await problems_with_lies(lambda sent: [sent[-1][:8] + b"?" * len(sent[-1][8:])])
    assert any("message 0: it differs from byte 8" in problem for problem in problems)


async def test_it_notices_an_answer_that_belongs_to_another_message() -> None:
    long_enough = msgspec.structs.replace(PLAN, seconds=1.5)  # for a second message on some channel, on any machine
    problems = await problems_with_lies(lambda sent: [sent[0] if len(sent) == 2 else sent[-1]], long_enough)
    assert any("message 1: number 0 came in its place" in problem for problem in problems)


async def test_it_notices_a_shortened_answer() -> None:
    problems = await problems_with_lies(lambda sent: [sent[-1][:-1] if len(sent) == 1 else sent[-1]])
    assert any("message 0: 15 bytes came, not 16" in problem for problem in problems)


async def test_it_notices_a_server_that_lost_messages() -> None:
    async def forgetful(channel: muxkit.Channel) -> None:
        await channel.receive()
        async for message in channel:
            if len(message) < 65_536:
                await channel.send(message)
        await channel.send(b'{"messages": 0, "bytes": 0}')

    problems = await problems_with(forgetful)
    assert any("0 of 0 bytes were received" in problem for problem in problems)


async def test_the_server_notices_what_did_not_come_as_it_should() -> None:
    server = Server()
    async with trio.open_nursery() as nursery:
        url = f"bpmux+mem://{next(NAMES)}"
        served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(server.serve_channel), url)
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await channel.send(b'{"job": "bulk", "channel": 0, "seed": 1}')
            await channel.send(b"something else altogether")
            await channel.finish()
            await channel.receive()
        nursery.cancel_scope.cancel()
    assert server.totals().messages_verified == 0
    assert len(server.totals().problems) == 1


def test_the_same_seed_gives_the_same_messages_and_another_gives_others() -> None:
    messages = [Payloads(seed, (64,)).message(number) for seed in (1, 1, 2) for number in (0, 1)]
    assert messages[:2] == messages[2:4]
    assert len(set(messages)) == 4


def test_only_a_few_problems_are_kept() -> None:
    end = End()
    for number in range(1000):
        end.check("here", number, b"", bytes(8))
    assert len(end.problems) == PROBLEMS_MOST


# ---------------------------------------------------------------------------- exit codes


async def how_it_ends(url: str, plan: Plan = PLAN) -> tuple[int, Failed]:
    """Run the client process, as the demo does; gives its exit code and its last line."""
    text = msgspec.json.encode(plan).decode()
    command = [sys.executable, "-P", "-m", "muxkit_bench.demo.processes", "client", url, text]
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        )
        assert process.stdout is not None
        written = b"".join([part async for part in process.stdout])
        code = await process.wait()
    last = understand(written.splitlines()[-1])
    assert isinstance(last, Failed)
    return code, last


async def how_it_ends_with(handler: Callable[[trio.SocketStream], Awaitable[object]], plan: Plan = PLAN) -> int:
    """The exit code of a client whose server does as `handler` does."""
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, handler, 0, host="127.0.0.1")
        )
        code, failed = await how_it_ends(f"bpmux+tcp://127.0.0.1:{listeners[0].socket.getsockname()[1]}", plan)
        nursery.cancel_scope.cancel()
    assert failed.exit == code
    return code


async def test_a_server_that_is_not_there_has_its_exit_code() -> None:
    with trio.socket.socket() as bound:
        await bound.bind(("127.0.0.1", 0))  # and never listens
        code, failed = await how_it_ends(f"bpmux+tcp://127.0.0.1:{bound.getsockname()[1]}")
    assert code == Exit.NOT_CONNECTED
    assert failed.sentence.startswith("could not connect to bpmux+tcp://127.0.0.1:")


async def test_a_server_that_breaks_the_protocol_has_its_exit_code() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        await trio.sleep_forever()

    assert await how_it_ends_with(babble) == Exit.VIOLATION


async def test_a_server_that_says_nothing_has_its_exit_code() -> None:
    async def say_nothing(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    assert await how_it_ends_with(say_nothing, msgspec.structs.replace(PLAN, patience=0.1)) == Exit.TIMED_OUT
