"""Sessions and servers of `muxkit.asyncio` over real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
import muxkit.asyncio
from tests.on_asyncio.loops import LOOPS, cancel_after, echo, run

if TYPE_CHECKING:
    from muxkit.protocols.bpmux import Session as BpmuxSession

pytestmark = pytest.mark.parametrize("loop", LOOPS)

Loop = Callable[[], asyncio.AbstractEventLoop]

URL = "bpmux+tcp://127.0.0.1:0"


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct"])
def test_messages_come_back_and_each_side_may_end_first(loop: Loop, protocol: str) -> None:
    async def main() -> None:
        names: list[str] = []

        async def answer(channel: muxkit.asyncio.Channel) -> None:
            names.append(channel.name)
            async for message in channel:
                await channel.send(message)
            await channel.send(b"the last word")  # after the other side's end

        async with muxkit.asyncio.open_server(answer, f"{protocol}+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                assert session.info.protocol == protocol
                async with session.open("chat", payload=b"with the opening") as channel:
                    assert (channel.name, channel.opening) == ("chat", b"with the opening")
                    await channel.send_many([b"%d" % number for number in range(100)])
                    await channel.finish()
                    got = [message async for message in channel]
                    assert got == [*(b"%d" % number for number in range(100)), b"the last word"]
                    with pytest.raises(trio.EndOfChannel):
                        await channel.receive()
                    with pytest.raises(trio.ClosedResourceError):
                        await channel.send(b"too late")
        assert names == ["chat"]

    run(loop, main)


def test_datagrams_of_e3x_have_the_same_face(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, "e3x+udp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open("chat") as channel:
                for number in range(20):
                    await channel.send(b"%d" % number)
                assert [await channel.receive() for _ in range(20)] == [b"%d" % number for number in range(20)]

    run(loop, main)


def test_hundreds_of_channels_at_once(loop: Loop) -> None:
    async def main() -> None:
        async def talk(session: muxkit.asyncio.Session, number: int) -> None:
            async with session.open(str(number)) as channel:
                await channel.send(b"%d" % number)
                together.append(number)
                if len(together) == 300:
                    all_open.set()
                await all_open.wait()
                assert await channel.receive() == b"%d" % number

        together: list[int] = []
        all_open = asyncio.Event()
        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session, asyncio.TaskGroup() as group:
                for number in range(300):
                    group.create_task(talk(session, number))
                await all_open.wait()
                assert session.stats().channels == len(session.channels()) == 300

    run(loop, main)


def test_a_fast_sender_waits_for_a_slow_reader(loop: Loop) -> None:
    async def main() -> None:
        may_read, read = asyncio.Event(), asyncio.Event()

        async def read_late(channel: muxkit.asyncio.Channel) -> None:
            await may_read.wait()
            async for _ in channel:
                pass
            read.set()

        async def push(channel: muxkit.asyncio.Channel) -> None:
            for _ in range(100):
                await channel.send(bytes(64 * 1024))

        async with muxkit.asyncio.open_server(read_late, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                task = asyncio.create_task(push(channel))
                while channel.stats().waiting_since is None:
                    await session.ping()
                assert not task.done()
                may_read.set()
                await task
            await read.wait()

    run(loop, main)


def test_a_loop_around_sends_that_need_no_wait_lets_other_tasks_run(loop: Loop) -> None:
    async def main() -> None:
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                passes += 1
                await asyncio.sleep(0)

        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                counting = asyncio.create_task(count())
                for _ in range(640):
                    await channel.send(b"")
                assert passes >= 640 // 64 - 1
                counting.cancel()

    run(loop, main)


def test_requests_are_answered_and_declined(loop: Loop) -> None:
    async def main() -> None:
        async def serve(session: muxkit.asyncio.Session) -> None:
            async for request in session.requests():
                async with request:
                    if request.payload != b"decline":
                        await request.respond(request.payload.upper())

        async with muxkit.asyncio.open_server(serve, URL) as server, muxkit.asyncio.connect(server.url) as session:
            assert await session.request(b"question") == b"QUESTION"
            with pytest.raises(muxkit.ChannelStopped):
                await session.request(b"decline")
        async with muxkit.asyncio.open_server(echo, "relink+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                with pytest.raises(muxkit.Unsupported, match="relink has no requests"):
                    await session.request(b"question")

    run(loop, main)


def test_a_handler_that_raises_ends_its_own_channel(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def handle(channel: muxkit.asyncio.Channel) -> None:
            if channel.name == "refused":
                raise muxkit.Refused("not today", code=403)
            if channel.name == "broken":
                raise KeyError("planted")
            await echo(channel)

        async with muxkit.asyncio.open_server(handle, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                for name, code in (("refused", 403), ("broken", 500)):
                    async with session.open(name) as channel:
                        with pytest.raises(muxkit.ChannelCancelled) as caught:
                            await channel.receive()
                        assert caught.value.code == code
                async with session.open("good") as channel:
                    await channel.send(b"x")
                    assert await channel.receive() == b"x"

    with caplog.at_level(logging.ERROR, "muxkit"):
        run(loop, main)
    [said] = [record.getMessage() for record in caplog.records if record.name == "muxkit"]
    assert "KeyError" in said


def test_a_handler_that_is_no_coroutine_function_is_refused_by_the_server(loop: Loop) -> None:
    async def main() -> None:
        def handle(channel: muxkit.asyncio.Channel) -> None:
            pass

        wrong: muxkit.asyncio.ChannelHandler = handle  # type: ignore[assignment]  # which the type checker sees
        with pytest.raises(TypeError, match="expected an async function, got one that isn't async"):
            async with muxkit.asyncio.open_server(wrong, URL):
                pass

    run(loop, main)


def test_handlers_have_names_and_the_server_a_gate(loop: Loop) -> None:
    async def main() -> None:
        async def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
            await asyncio.sleep(0)
            if token != "correct":
                raise muxkit.Refused("not this token")
            return "the user"

        async def tell_user(channel: muxkit.asyncio.Channel) -> None:
            identity = channel.session.info.identity
            await channel.send(b"" if identity is None else str(identity.user).encode())

        handlers = muxkit.asyncio.by_name({"user": tell_user, "echo": echo})
        # The callback is a coroutine function of asyncio; the type asks only for something to await.
        async with muxkit.asyncio.open_server(handlers, URL, authorize=authorize) as server:
            async with muxkit.asyncio.connect(server.url, token="correct") as session:
                async with session.open("user") as channel:
                    assert await channel.receive() == b"the user"
                async with session.open("ecco") as channel:
                    with pytest.raises(muxkit.ChannelCancelled, match="did you mean 'echo'"):
                        await channel.receive()
            with pytest.raises(muxkit.Refused, match="not this token"):
                async with muxkit.asyncio.connect(server.url, token="wrong"):
                    pass

    run(loop, main)


def test_errors_come_out_bare(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            url = server.url
            error = ValueError("of the program")
            with pytest.raises(ValueError, match="of the program") as caught:
                async with muxkit.asyncio.connect(url) as session, session.open():
                    raise error
            assert caught.value is error
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), muxkit.asyncio.connect(url) as session, session.open() as channel:
                    await channel.receive()
        with pytest.raises(OSError, match=r"refused|connect"):
            async with muxkit.asyncio.connect(url):
                pass
        with pytest.raises(ValueError, match="invalid URL"):
            async with muxkit.asyncio.connect("nonsense"):
                pass

    run(loop, main)


def test_a_lost_connection_is_an_error_at_each_call(loop: Loop) -> None:
    async def main() -> None:
        async def hang_up(session: muxkit.asyncio.Session) -> None:
            async for channel in session:
                await channel.receive()
                raise muxkit.Refused("enough")

        async def converse(url: str) -> None:
            async with muxkit.asyncio.connect(url) as session:
                channel = await session.open()
                await channel.send(b"x")
                await channel.receive()

        async with muxkit.asyncio.open_server(hang_up, URL) as server:
            with pytest.raises(muxkit.LinkLost, match="enough"):
                await converse(server.url)

    run(loop, main)


def test_a_task_group_is_left_by_the_error_of_one_call(loop: Loop) -> None:
    async def main() -> None:
        async def wait_for_ever(session: muxkit.asyncio.Session) -> None:
            async with session.open() as channel:
                await channel.receive()

        async def fail() -> None:
            raise LookupError("one of them")

        async def together(session: muxkit.asyncio.Session) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(wait_for_ever(session))
                await session.ping()
                group.create_task(fail())

        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                with pytest.raises(ExceptionGroup) as caught:
                    await together(session)
                assert [type(error) for error in caught.value.exceptions] == [LookupError]
                assert await session.ping() >= 0

    run(loop, main)


def test_what_a_protocol_has_beyond_the_face_is_called_in_trio(loop: Loop) -> None:
    async def main() -> None:
        got: list[bytes] = []
        came = asyncio.Event()

        async def serve(session: muxkit.asyncio.Session) -> None:
            native: BpmuxSession = session.native  # type: ignore[assignment]  # the URL says which one it is
            got.append(await muxkit.asyncio.in_trio(native.receive))
            came.set()

        async with muxkit.asyncio.open_server(serve, URL) as server, muxkit.asyncio.connect(server.url) as session:
            native: BpmuxSession = session.native  # type: ignore[assignment]  # as above
            await muxkit.asyncio.in_trio(native.send, b"top level")
            await came.wait()
        assert got == [b"top level"]
        with pytest.raises(RuntimeError, match="no session or server"):
            await muxkit.asyncio.in_trio(trio.sleep, 0)

    run(loop, main)


def test_sessions_follow_each_other(loop: Loop) -> None:
    async def main() -> None:
        calls = 0

        async def drop_the_first(session: muxkit.asyncio.Session) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise muxkit.Refused("come again", code=503)
            async for channel in session.incoming():
                async with channel:
                    await echo(channel)

        backoff = muxkit.Backoff(first=0.01)
        async with muxkit.asyncio.open_server(drop_the_first, URL) as server:
            async with muxkit.asyncio.reconnecting(server.url, backoff=backoff) as sessions:
                async for session in sessions:
                    try:
                        async with session.open() as channel:
                            await channel.send(b"x")
                            assert await channel.receive() == b"x"
                            break
                    except (muxkit.LinkLost, muxkit.ChannelCancelled, muxkit.ChannelStopped):
                        continue
        assert calls == 2

    run(loop, main)


def test_a_loop_over_sessions_may_be_left_early(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.reconnecting(server.url) as sessions:
                async for session in sessions:
                    assert await session.ping() >= 0
                    break

    run(loop, main)  # which looks for what is left


def test_a_channel_is_closed_once_its_block_was_left(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                channel = await session.open()
        for call in (channel.receive(), channel.send(b"x"), session.ping(), channel.aclose()):
            with pytest.raises(trio.ClosedResourceError, match="was left"):
                await call

    run(loop, main)


def test_calls_that_ended_leave_no_circle_of_references(loop: Loop) -> None:
    async def main() -> None:
        async def talk(session: muxkit.asyncio.Session) -> None:
            async with session.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
                await channel.finish()
                with suppress(trio.EndOfChannel):
                    await channel.receive()
            task = asyncio.create_task(session.ping())
            await cancel_after(task, 1)

        async with muxkit.asyncio.open_server(echo, URL) as server, muxkit.asyncio.connect(server.url) as session:
            await talk(session)
            gc.collect()
            gc.disable()
            try:
                for _ in range(20):
                    await talk(session)
                assert gc.collect() < 20  # less than one object for each
            finally:
                gc.enable()

    run(loop, main)


def test_a_server_is_shut_down_in_order(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, [URL, URL]) as server:
            assert len(server.urls) == 2
            async with muxkit.asyncio.connect(server.url) as session, session.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
                assert [other.info.protocol for other in server.sessions()] == ["bpmux"]
                async with asyncio.TaskGroup() as group:
                    group.create_task(server.shutdown(grace=300))
                    await channel.finish()
                    assert [message async for message in channel] == []
                await server.wait_closed()

    run(loop, main)


def test_a_list_of_urls_is_raced(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(echo, URL) as server:
            async with muxkit.asyncio.connect(["bpmux+tcp://127.0.0.1:1", server.url]) as session:
                await session.ping()
            async with muxkit.asyncio.reconnecting(["bpmux+tcp://127.0.0.1:1", server.url]) as sessions:
                async for session in sessions:
                    await session.ping()
                    break

    run(loop, main)
