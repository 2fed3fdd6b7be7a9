"""What every channel has, whatever its protocol: a name, an opening, its session, gauges, and reasons that arrive."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import trio
import trio.testing

import muxkit

PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]
PATIENCE = 60.0  # s


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def send_for_ever(channel: muxkit.Channel) -> None:
    while True:
        await channel.send(b"y")


@pytest.fixture(params=PROTOCOLS)
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.param}+mem://channels"


async def test_a_channel_has_the_name_and_the_payload_that_it_was_opened_with(url: str) -> None:
    """F27: "object Opening can't be used in 'await' expression"."""

    async def tell(channel: muxkit.Channel) -> None:
        await channel.send(f"{channel.name}|{channel.opening!r}".encode())

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(tell, url) as server, muxkit.connect(server.url) as session:
            for name, payload in (("chat", b"tea"), ("", b""), ("käse", b""), ("", b"\x00only a payload")):
                channel = await session.open(name, payload=payload)
                assert (channel.name, channel.opening) == (name, payload)
                assert channel.session is session
                if not name and not payload:
                    await channel.finish()  # some protocols announce such a channel with its first message
                assert await channel.receive() == f"{name}|{payload!r}".encode()
                await channel.aclose()


async def test_the_channels_of_a_session_are_those_that_the_application_has(url: str) -> None:
    async with muxkit.open_server(echo, url) as server, muxkit.connect(server.url) as session:
        first, second = await session.open("a"), await session.open("b")
        assert {channel.name for channel in session.channels()} == {"a", "b"}
        await first.send(b"x")
        assert await first.receive() == b"x"
        (there,) = server.sessions()
        assert {channel.name for channel in there.channels()} >= {"a"}
        for channel in (first, second):
            await channel.finish()
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()
            await channel.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert session.channels() == []


async def test_an_abort_tells_both_halves_of_the_other_side_why(url: str) -> None:
    """Was: "the peer gave up on this channel before it was done", whatever `abort` knew."""

    async def refuse(channel: muxkit.Channel) -> None:
        await channel.receive()
        channel.abort("disk full", code=7)

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(refuse, url) as server, muxkit.connect(server.url) as session:
            channel = await session.open("upload")
            await channel.send(b"x")
            with pytest.raises(muxkit.ChannelCancelled) as cancelled:
                await channel.receive()
            assert (cancelled.value.reason, cancelled.value.code) == ("disk full", 7)
            assert "disk full (code 7)" in str(cancelled.value)
            with pytest.raises(muxkit.ChannelStopped) as stopped:
                await send_for_ever(channel)
            assert (stopped.value.reason, stopped.value.code) == ("disk full", 7)


async def test_an_abort_of_the_client_tells_the_handler_why(url: str) -> None:
    heard: list[tuple[str, int]] = []
    done = trio.Event()

    async def listen(channel: muxkit.Channel) -> None:
        await channel.send(b"go on")
        try:
            async for _ in channel:
                pass
        except muxkit.ChannelCancelled as error:
            heard.append((error.reason, error.code))
        done.set()

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(listen, url) as server, muxkit.connect(server.url) as session:
            channel = await session.open("upload")
            await channel.send(b"x")
            assert await channel.receive() == b"go on"
            channel.abort("the user pressed cancel", code=3)
            await done.wait()
    assert heard == [("the user pressed cancel", 3)]


async def test_a_block_that_is_left_by_an_error_tells_the_other_side_so_and_not_which(url: str) -> None:
    heard: list[muxkit.ChannelCancelled] = []
    told = trio.Event()

    async def listen(channel: muxkit.Channel) -> None:
        try:
            async for _ in channel:
                await channel.send(b"go on")
        except muxkit.ChannelCancelled as error:
            heard.append(error)
            told.set()

    async with muxkit.open_server(listen, url) as server, muxkit.connect(server.url) as session:
        with suppress(ZeroDivisionError):
            async with session.open("work") as channel:
                await channel.send(b"x")
                await channel.receive()
                raise ZeroDivisionError("a secret")
        with trio.fail_after(PATIENCE):
            await told.wait()
    assert [(error.reason, error.code) for error in heard] == [("the other side left the channel by an error", 500)]


async def test_what_a_peer_gives_as_its_reason_is_shown_escaped_and_bounded(url: str) -> None:
    async def refuse(channel: muxkit.Channel) -> None:
        await channel.receive()
        channel.abort("\x1b[31mred\n" + "x" * 5000)

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(refuse, url) as server, muxkit.connect(server.url) as session:
            channel = await session.open("c")
            await channel.send(b"x")
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                await channel.receive()
    assert caught.value.reason.startswith(r"\x1b[31mred\nxxx")
    assert len(caught.value.reason) <= 512


async def test_a_channel_shows_who_waits_for_credit(url: str, autojump_clock: trio.testing.MockClock) -> None:
    """Was: `<bpmux.Sink out-sink 1 open>` while the sender was stuck."""

    async def only_send(channel: muxkit.Channel) -> None:
        while True:
            await channel.send(bytes(10_000))

    async with muxkit.open_server(only_send, url, linger=0.1) as server:
        with suppress(muxkit.LinkLost):  # neither side can take leave in time
            async with muxkit.connect(server.url, linger=0.1) as session, trio.open_nursery() as nursery:
                channel = await session.open("both")
                nursery.start_soon(only_send, channel)
                await trio.sleep(9)
                assert re.search(r"open, 1 sender waiting \d\.\d s for credit", repr(channel))
                nursery.cancel_scope.cancel()


async def test_a_sender_that_is_stuck_while_nothing_is_received_is_logged_once(
    url: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: nothing was logged while both sides only sent, and so waited for each other for ever."""

    async def only_send(channel: muxkit.Channel) -> None:
        while True:
            await channel.send(bytes(10_000))

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "waiting to send for" in record.getMessage()]

    async with muxkit.open_server(only_send, url, linger=0.1) as server:
        with suppress(muxkit.LinkLost):
            async with muxkit.connect(server.url, linger=0.1) as session, trio.open_nursery() as nursery:
                channel = await session.open("both")
                nursery.start_soon(only_send, channel)
                await trio.sleep(9)
                assert told() == []
                await trio.sleep(60)
                nursery.cancel_scope.cancel()
    assert len(told()) == 2  # each side, once
    for text in told():
        assert re.search(r"open, 1 sender waiting \d+\.\d s for credit.*waiting to send for 10 s", text)
        assert "to be received" in text
        assert "receive in a separate task" in text
    assert {record.levelname for record in caplog.records if record.getMessage() in told()} == {"WARNING"}


async def test_a_slow_reader_is_no_reason_to_log(
    url: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def read_slowly(channel: muxkit.Channel) -> None:
        async for _ in channel:
            await trio.sleep(5)

    async with muxkit.open_server(read_slowly, url, linger=0.1) as server:
        with suppress(muxkit.LinkLost):
            async with muxkit.connect(server.url, linger=0.1) as session, trio.open_nursery() as nursery:
                channel = await session.open("one way")

                async def send() -> None:
                    while True:
                        await channel.send(bytes(50_000))

                nursery.start_soon(send)
                await trio.sleep(200)
                assert channel.stats().waiting_since is not None
                nursery.cancel_scope.cancel()
    assert "waiting to send for" not in caplog.text


async def test_gauges_say_what_is_queued_and_who_waits(url: str) -> None:
    stop = trio.Event()

    async def ignore(channel: muxkit.Channel) -> None:
        await stop.wait()

    async with muxkit.open_server(ignore, url) as server, muxkit.connect(server.url, linger=0.1) as session:
        channel = await session.open("c")
        before = channel.stats()
        assert (before.unread, before.waiting_since) == (0, None)
        async with trio.open_nursery() as nursery:

            async def fill() -> None:
                with suppress(trio.ClosedResourceError):
                    while True:
                        await channel.send(bytes(16_000))

            nursery.start_soon(fill)
            with trio.fail_after(PATIENCE):
                while channel.stats().waiting_since is None:
                    await trio.testing.wait_all_tasks_blocked()
            stats = channel.stats()
            assert stats.waiting_since is not None
            assert stats.waiting_since <= trio.current_time()
            assert stats.queued > 0 or stats.credit_out is None or stats.credit_out < 16_000
            nursery.cancel_scope.cancel()
        channel.abort()
        stop.set()


@pytest.mark.parametrize("count", [1200])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_thousands_of_calls_that_time_out_together_harm_no_other(protocol: str, count: int) -> None:
    """Was: "RemoteProtocolError: more than 1000 resets at once", and the whole connection with every call on it."""

    async def answer(channel: muxkit.Channel) -> None:
        async for message in channel:
            if message == b"slow":
                await trio.sleep_forever()
            await channel.send(message)

    url = f"{protocol}+tcp://127.0.0.1:0"
    limits = muxkit.Limits(channels=6 * count, channel_memory=1 << 30)
    with trio.fail_after(10 * PATIENCE):
        async with (
            muxkit.open_server(answer, url, limits=limits, linger=0.1) as server,
            muxkit.connect(server.url, limits=limits) as session,
        ):
            bystander = await session.open("bystander")
            timed_out = 0
            scopes: list[trio.CancelScope] = []
            sent = 0
            all_sent = trio.Event()

            async def call() -> None:
                nonlocal timed_out, sent
                with trio.CancelScope() as give_up:
                    scopes.append(give_up)
                    async with session.open("call") as channel:
                        await channel.send(b"slow")
                        sent += 1
                        if sent == count:
                            all_sent.set()
                        await channel.receive()
                timed_out += 1

            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(call)
                await all_sent.wait()
                for scope in scopes:
                    scope.cancel()
            assert timed_out == count
            for number in range(10):
                await bystander.send(b"%d" % number)
                assert await bystander.receive() == b"%d" % number
            async with session.open("after") as channel:
                await channel.send(b"still here")
                assert await channel.receive() == b"still here"
            await bystander.aclose()


async def test_a_channel_is_a_stream_of_bytes(url: str) -> None:
    async with muxkit.open_server(echo, url) as server, muxkit.connect(server.url) as session:
        channel = await session.open("bytes")
        stream = channel.as_stream()
        await stream.send_all(b"hello")
        got = b""
        with trio.fail_after(PATIENCE):
            while len(got) < 5:
                got += await stream.receive_some()
        assert got == b"hello"
        await stream.send_eof()
        await stream.aclose()


async def test_a_session_that_a_server_refuses_says_why(url: str) -> None:
    """Was: "the peer hung up", whatever the server knew."""

    async def refuse(session: muxkit.Session) -> None:
        channel = await anext(session.incoming())
        await channel.receive()
        raise muxkit.Refused("come back on Monday", code=9)

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(refuse, url) as server:

            async def call() -> None:
                async with muxkit.connect(server.url, linger=0.1) as session:
                    channel = await session.open("c")
                    await channel.send(b"x")
                    await channel.receive()

            with pytest.raises((muxkit.LinkLost, muxkit.ChannelCancelled, muxkit.ChannelStopped)) as caught:
                await call()
    match caught.value:
        case muxkit.LinkLost() as error:
            assert (error.peer_reason, error.code) == ("come back on Monday", 9)
        case muxkit.ChannelCancelled() | muxkit.ChannelStopped() as error:
            assert (error.reason, error.code) == ("come back on Monday", 9)


async def test_a_closed_side_says_so_to_those_who_send_and_receive(url: str) -> None:
    """Was: ClosedResourceError without a text from `receive` after `aclose`."""
    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(echo, url) as server, muxkit.connect(server.url) as session:
            channel = await session.open("chat")
            await channel.send(b"tea")
            assert await channel.receive() == b"tea"
            await channel.aclose()
            for act in (channel.receive, lambda: channel.send(b"more")):
                with pytest.raises(trio.ClosedResourceError) as caught:
                    await act()
                assert "closed" in str(caught.value)
