"""A program that makes one call after the other: what is written for each call, and when its handler starts."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING

import trio
import trio.testing

import muxkit
from muxkit.runtime.pumps import stream
from muxkit_adapters.memory import MemoryStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

URL = "bpmux+mem://calls-in-a-row"
WARM_UP = 2  # calls, because the first ones are written with the handshake
CALLS = 12  # fewer than the 16 closed channels after which `aclose` lets other tasks run

greeting: ContextVar[str] = ContextVar("greeting", default="none")


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def call(session: muxkit.Session) -> bytes:
    async with session.open("echo") as channel:
        await channel.send(b"question")
        return await channel.receive()


async def test_each_side_writes_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: Counter[MemoryStream] = Counter()
    send_nowait = MemoryStream.send_nowait

    def counted(link: MemoryStream, buffers: Sequence[bytes | memoryview]) -> int:
        writes[link] += 1
        return send_nowait(link, buffers)

    monkeypatch.setattr(MemoryStream, "send_nowait", counted)
    monkeypatch.setattr(stream, "LATE_SECONDS", 3600)  # a busy machine must not make a write early
    async with muxkit.open_server(echo, URL) as server, muxkit.connect(server.url) as session:
        for _ in range(WARM_UP):
            await call(session)
        writes.clear()
        for _ in range(CALLS):
            await call(session)
        assert [*writes.values()] == [CALLS, CALLS]


async def test_closing_channels_lets_other_tasks_run_now_and_then() -> None:
    async with muxkit.open_server(echo, URL) as server, muxkit.connect(server.url) as session:
        steps = 0

        async def count_steps() -> None:
            nonlocal steps
            while True:
                await trio.lowlevel.checkpoint()
                steps += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_steps)
            await trio.lowlevel.checkpoint()
            before = steps
            for _ in range(64):
                await (await session.open()).aclose()
            assert steps - before >= 3
            nursery.cancel_scope.cancel()


async def test_closing_a_channel_is_cancelled_like_any_call_and_closes_it_nevertheless() -> None:
    async with muxkit.open_server(echo, URL) as server, muxkit.connect(server.url) as session:
        channel = await session.open()
        with trio.CancelScope() as scope:
            scope.cancel()
            await channel.aclose()
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert session.stats().channels == 0


async def test_each_handler_runs_with_the_context_variables_of_the_session_handler() -> None:
    async def greet(channel: muxkit.Channel) -> None:
        await channel.receive()
        await channel.send(greeting.get().encode())

    async def handle_session(session: muxkit.Session) -> None:
        greeting.set("hello")
        await muxkit.each_channel(greet)(session)

    async with muxkit.open_server(handle_session, URL) as server, muxkit.connect(server.url) as session:
        assert [await call(session) for _ in range(3)] == [b"hello"] * 3


async def test_a_handler_that_cannot_start_yet_starts_when_another_one_ends() -> None:
    started: list[bytes] = []
    may_end = trio.Event()

    async def wait_then_end(channel: muxkit.Channel) -> None:
        started.append(channel.opening)
        await may_end.wait()

    handler = muxkit.each_channel(wait_then_end, max_concurrent=2)
    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        channels = [await session.open(payload=b"%d" % number) for number in range(5)]
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(started) == [b"0", b"1"]  # Trio runs new tasks in any order
        may_end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(started) == [b"0", b"1", b"2", b"3", b"4"]
        for channel in channels:
            await channel.aclose()
