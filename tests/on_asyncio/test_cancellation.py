"""A cancelled call of `muxkit.asyncio` has done nothing, at whichever pass of the loop the cancellation comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

import muxkit
import muxkit.asyncio
from tests.on_asyncio.loops import LOOPS, cancel_after, echo, run

pytestmark = pytest.mark.parametrize("loop", LOOPS)

Loop = Callable[[], asyncio.AbstractEventLoop]

SMALL = muxkit.Limits(channel_bytes=8192, channel_first=4096, channel_floor=2048, outbox=8192)
PASSES = 60  # of the loop, after which the cancellation comes at the latest


def test_a_cancelled_send_has_sent_nothing(loop: Loop) -> None:
    async def main() -> None:
        received: list[bytes] = []
        may_read = asyncio.Event()
        over = asyncio.Event()

        async def collect(channel: muxkit.asyncio.Channel) -> None:
            await may_read.wait()
            received.extend([message async for message in channel])
            over.set()

        async def keep_sending(channel: muxkit.asyncio.Channel, sent: list[bytes]) -> None:
            while True:  # until the window is used up, then with the pace of the reader
                message = len(sent).to_bytes(4, "big") * 100
                await channel.send(message)
                sent.append(message)

        async with muxkit.asyncio.open_server(collect, "bpmux+tcp://127.0.0.1:0", limits=SMALL) as server:
            async with muxkit.asyncio.connect(server.url, limits=SMALL) as session:
                for passes in range(PASSES):
                    received.clear()
                    may_read.clear()
                    over.clear()
                    sent: list[bytes] = []
                    async with session.open() as channel:
                        task = asyncio.create_task(keep_sending(channel, sent))
                        if passes % 2:
                            may_read.set()
                        assert await cancel_after(task, passes)
                        assert task.cancelled()
                        may_read.set()
                    await over.wait()
                    assert received == sent

    run(loop, main)


def test_a_cancelled_receive_has_taken_nothing(loop: Loop) -> None:
    async def main() -> None:
        messages = [number.to_bytes(4, "big") for number in range(100)]

        async def send_all(channel: muxkit.asyncio.Channel) -> None:
            for number, message in enumerate(messages):
                await channel.send(message)
                if number % 7 == 0:
                    await asyncio.sleep(0)

        async def keep_receiving(channel: muxkit.asyncio.Channel, got: list[bytes]) -> None:
            while True:
                got.append(await channel.receive())

        async with muxkit.asyncio.open_server(send_all, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                for passes in range(PASSES):
                    got: list[bytes] = []
                    async with session.open() as channel:
                        for _ in range(3):
                            task = asyncio.create_task(keep_receiving(channel, got))
                            await cancel_after(task, passes)
                            if not task.cancelled():
                                break  # the end came first
                        got += [message async for message in channel]
                    assert got == messages

    run(loop, main)


def test_a_time_limit_strikes_a_call_or_leaves_its_result(loop: Loop) -> None:
    """A call that was quicker than its time limit returns, and the limit does not strike after its block."""

    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                answers = late = 0
                for number in range(300):
                    message = number.to_bytes(4, "big")
                    await channel.send(message)
                    got: bytes | None = None
                    with suppress(TimeoutError):
                        async with asyncio.timeout(number % 30 * 2e-5):
                            got = await channel.receive()
                    await asyncio.sleep(0)  # where a cancellation without owner would come out
                    task = asyncio.current_task()
                    assert task is not None
                    assert task.cancelling() == 0
                    answers += got is not None
                    late += got is None
                    assert message == (got or await channel.receive())
                assert answers + late == 300

    run(loop, main)


def test_a_result_that_was_quicker_than_the_cancellation_comes_before_it(loop: Loop) -> None:
    async def main() -> None:
        seen: list[object] = []

        async def ask(channel: muxkit.asyncio.Channel) -> None:
            seen.append(await channel.receive())
            seen.append("after")
            await asyncio.sleep(3600)

        async with muxkit.asyncio.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                task = asyncio.create_task(ask(channel))
                await asyncio.sleep(0)
                await channel.send(b"question")
                waits_for = task._fut_waiter  # type: ignore[attr-defined]  # the call, as only the task knows it

                def cancel_when_done() -> None:
                    if waits_for.done():  # and the task has not run since: it is woken by a later callback
                        task.cancel("too late")
                    else:
                        asyncio.get_running_loop().call_soon(cancel_when_done)

                cancel_when_done()
                with pytest.raises(asyncio.CancelledError, match="too late"):
                    await task
                assert seen == [b"question", "after"]

    run(loop, main)


def test_a_whole_conversation_is_cancelled_at_each_pass_of_the_loop(loop: Loop) -> None:
    """Connecting, opening, requests, pings, finishing and leaving: each await ends, and the server goes on."""

    async def main() -> None:
        async def handle(session: muxkit.asyncio.Session) -> None:
            async def answer() -> None:
                async for request in session.requests():
                    async with request:
                        await request.respond(request.payload)

            async with asyncio.TaskGroup() as group:
                group.create_task(answer())
                async for channel in session.incoming():
                    group.create_task(answer_channel(channel))

        async def answer_channel(channel: muxkit.asyncio.Channel) -> None:
            with suppress(muxkit.LinkLost, muxkit.ChannelCancelled, muxkit.ChannelStopped):
                async with channel:
                    await echo(channel)

        async def converse(url: str) -> None:
            async with muxkit.asyncio.connect(url) as session:
                assert await session.request(b"question") == b"question"
                assert await session.ping() >= 0
                async with session.open("chat") as channel:
                    await channel.send(b"hello")
                    assert await channel.receive() == b"hello"
                    await channel.finish()
                    assert [message async for message in channel] == []

        async with muxkit.asyncio.open_server(handle, "bpmux+tcp://127.0.0.1:0") as server:
            passes = 0
            while True:
                task = asyncio.create_task(converse(server.url))
                await cancel_after(task, passes)
                if not task.cancelled():
                    await task
                    break
                passes += 1 if passes < 40 else 7
            assert passes > 10
            await converse(server.url)

    run(loop, main)


def test_a_cancelled_open_has_opened_nothing(loop: Loop) -> None:
    async def main() -> None:
        seen: list[str] = []

        async def note(channel: muxkit.asyncio.Channel) -> None:
            seen.append(channel.name)

        async def open_and_keep(session: muxkit.asyncio.Session, kept: list[str], passes: int) -> None:
            while True:
                name = f"{passes} {len(kept)}"
                await session.open(name)
                kept.append(name)

        async with muxkit.asyncio.open_server(note, "bpmux+mem://opened") as server:
            opened: list[str] = []
            async with muxkit.asyncio.connect(server.url) as session:
                for passes in range(20):
                    kept: list[str] = []
                    task = asyncio.create_task(open_and_keep(session, kept, passes))
                    await cancel_after(task, passes)
                    opened += kept
                await session.ping()  # behind all openings
            assert sorted(seen) == sorted(opened)

    run(loop, main)


def test_leaving_is_cut_by_a_cancellation(loop: Loop) -> None:
    async def main() -> None:
        async def never_reads(channel: muxkit.asyncio.Channel) -> None:
            await asyncio.sleep(3600)

        async def leave(url: str, inside: asyncio.Event) -> None:
            async with muxkit.asyncio.connect(url, linger=3600) as session:
                channel = await session.open()
                await channel.send(b"x")
                inside.set()

        async with muxkit.asyncio.open_server(never_reads, "bpmux+tcp://127.0.0.1:0", linger=0) as server:
            inside = asyncio.Event()
            task = asyncio.create_task(leave(server.url, inside))
            await inside.wait()
            await cancel_after(task, 1)  # a few passes later, both sides would have left
            assert task.cancelled()

    run(loop, main)
