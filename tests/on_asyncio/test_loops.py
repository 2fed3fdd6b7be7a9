"""The run of Trio behind `muxkit.asyncio` begins and ends with what needs it, whatever becomes of the loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import trio

import muxkit
import muxkit.asyncio
from tests.on_asyncio.loops import LOOPS, PATIENCE, echo, run, run_of_this_thread

pytestmark = pytest.mark.parametrize("loop", LOOPS)

Loop = Callable[[], asyncio.AbstractEventLoop]

URL = "bpmux+tcp://127.0.0.1:0"


async def say_hello(url: str) -> None:
    async with muxkit.asyncio.connect(url) as session, session.open() as channel:
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


async def serve_and_say_hello() -> None:
    async with muxkit.asyncio.open_server(echo, URL) as server:
        await say_hello(server.url)


def test_loops_follow_each_other_and_trio_itself(loop: Loop) -> None:
    for _ in range(3):
        run(loop, serve_and_say_hello)
    trio.run(trio.sleep, 0)


def test_sessions_of_one_loop_share_a_run_and_those_of_two_threads_do_not(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            shared = run_of_this_thread()
            await asyncio.gather(*(say_hello(server.url) for _ in range(20)))
            assert run_of_this_thread() is shared

            await asyncio.to_thread(run, loop, lambda: say_hello(server.url))
            assert run_of_this_thread() is shared

    run(loop, main)


def test_a_block_that_begins_while_the_last_one_ends_waits_for_a_new_run(loop: Loop) -> None:
    async def main() -> None:
        for pause in range(20):

            async def late(passes: int = pause) -> None:
                for _ in range(passes):
                    await asyncio.sleep(0)
                await serve_and_say_hello()

            await asyncio.gather(serve_and_say_hello(), late())

    run(loop, main)


def test_what_was_left_open_is_closed_with_the_tasks_of_the_loop(loop: Loop) -> None:
    left: list[str] = []

    async def stay(url: str, inside: asyncio.Event) -> None:
        try:
            async with muxkit.asyncio.connect(url) as session, session.open() as channel:
                inside.set()
                await channel.receive()
        finally:
            left.append("by cancellation")

    async def serve_for_ever(bound: asyncio.Future[str]) -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            bound.set_result(server.url)
            await server.wait_closed()

    async def main() -> None:
        bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tasks.append(asyncio.create_task(serve_for_ever(bound)))
        inside = asyncio.Event()
        tasks.append(asyncio.create_task(stay(await bound, inside)))
        await inside.wait()

    tasks: list[asyncio.Task[None]] = []
    run(loop, main)
    assert left == ["by cancellation"]
    assert all(task.cancelled() for task in tasks)


def test_a_loop_that_was_closed_too_early_is_cleared_up_by_the_next_one(loop: Loop) -> None:
    async def begin() -> None:
        block = muxkit.asyncio.open_server(echo, URL)
        await block.__aenter__()
        blocks.append(block)

    blocks: list[object] = []
    first = loop()
    first.run_until_complete(begin())
    first.close()
    assert run_of_this_thread() is not None
    run(loop, serve_and_say_hello)
    trio.run(trio.sleep, 0)


def test_a_second_loop_of_the_thread_is_told_about_the_first(loop: Loop) -> None:
    async def stay() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            first.stop()
            await server.wait_closed()

    async def refused() -> None:
        with pytest.raises(RuntimeError, match="another asyncio loop of this thread has sessions"):
            await serve_and_say_hello()

    first = loop()
    task = first.create_task(stay())
    first.run_forever()
    second = loop()
    second.run_until_complete(refused())
    second.close()
    task.cancel()
    with suppress(asyncio.CancelledError):
        first.run_until_complete(task)
    first.close()
    assert run_of_this_thread() is None


def test_muxkit_itself_names_this_module_to_a_task_of_asyncio(loop: Loop) -> None:
    async def main() -> None:
        async def fails(url: str) -> None:
            with pytest.raises(RuntimeError, match=r"muxkit runs on Trio.*muxkit\.asyncio\.connect"):
                async with muxkit.connect(url):
                    pass

        await fails("bpmux+tcp://127.0.0.1:1")
        async with muxkit.asyncio.open_server(echo, URL) as server:  # while Trio runs as a guest, too
            await fails(server.url)

    run(loop, main)


def test_trio_has_no_place_for_a_loop_inside(loop: Loop) -> None:
    async def inside() -> None:
        with pytest.raises(RuntimeError, match="Trio runs in this thread already"):
            run(loop, serve_and_say_hello)

    trio.run(inside)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio has eager tasks since Python 3.12")
def test_handlers_may_be_eager_tasks(loop: Loop) -> None:
    async def main() -> None:
        if loop.__module__ == "uvloop":
            pytest.skip("uvloop calls the factory as Pythons later than this one have it")
        factory = getattr(asyncio, "eager_task_factory")  # noqa: B009 - unknown to the oldest Python
        asyncio.get_running_loop().set_task_factory(factory)
        await serve_and_say_hello()

    run(loop, main)


PROGRAM = """
import asyncio, sys
import muxkit.asyncio

async def handle(channel: muxkit.asyncio.Channel) -> None:
    await channel.receive()

async def main() -> None:
    try:
        async with muxkit.asyncio.open_server(handle, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                await session.ping()
                print("ready", flush=True)
                await channel.receive()
    finally:
        print("left", flush=True)

if sys.argv[1] == "uvloop":
    import uvloop
    make = uvloop.new_event_loop
else:
    make = asyncio.new_event_loop
if sys.argv[2] == "runner":
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(main())
else:
    loop = make()
    loop.run_until_complete(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C cannot be sent to one process")
@pytest.mark.parametrize("start", ["runner", "run_until_complete"])
def test_ctrl_c_ends_the_program(loop: Loop, start: str) -> None:
    """A runner cancels the main task, so that blocks are left; a bare loop is stopped by the interrupt."""
    name = loop.__module__.partition(".")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT, err
    assert "KeyboardInterrupt" in err
    if start == "runner":
        assert out == "left\n"
        assert "Error" not in err.replace("CancelledError", ""), err
