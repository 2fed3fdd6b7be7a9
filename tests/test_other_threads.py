"""A call from another thread, or from a Trio run there, is refused before it changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import trio

import muxkit
import muxkit.asyncio
from muxkit import forward
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream

PROTOCOLS = ("bpmux", "relink", "aqueduct", "e3x", "yamux")
REFUSED = r"this session belongs to another thread: .*docs/how-to/threads\.md"

Call = Callable[[], object]


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def stay(session: muxkit.Session) -> None:
    await trio.sleep_forever()


async def refused(call: Call) -> None:
    """Make the call in another thread: a coroutine in a Trio run of that thread, anything else as it is."""

    def make() -> None:
        async def main() -> None:
            with trio.fail_after(5):
                made = call()
                if isinstance(made, Awaitable):
                    await made

        with pytest.raises(RuntimeError, match=REFUSED):
            trio.run(main)

    await trio.to_thread.run_sync(make)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "session.open": lambda session, _: session.open().__aenter__(),
    "session.incoming": lambda session, _: session.incoming().__anext__(),
    "session.ping": lambda session, _: session.ping(),
    "session.shutdown": lambda session, _: session.shutdown(grace=0),
    "channel.send": lambda _, channel: channel.send(b"tea"),
    "channel.send_many": lambda _, channel: channel.send_many([b"tea"]),
    "channel.receive": lambda _, channel: channel.receive(),
    "channel.receive_many": lambda _, channel: channel.receive_many(),
    "channel.finish": lambda _, channel: channel.finish(),
    "channel.aclose": lambda _, channel: channel.aclose(),
    "channel.abort": lambda _, channel: channel.abort("no", code=1),
    "stream.send_all": lambda _, channel: channel.as_stream().send_all(b"tea"),
    "stream.receive_some": lambda _, channel: channel.as_stream().receive_some(),
    "stream.send_eof": lambda _, channel: channel.as_stream().send_eof(),
    "stream.wait_send_all_might_not_block": lambda _, channel: channel.as_stream().wait_send_all_might_not_block(),
    "stream.aclose": lambda _, channel: channel.as_stream().aclose(),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_from_a_trio_run_of_another_thread_is_refused_and_the_channel_goes_on(
    protocol: str, name: str
) -> None:
    url = f"{protocol}+mem://threads"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open() as channel:
        await channel.send(b"before")
        assert await channel.receive() == b"before"
        await refused(lambda: CALLS[name](session, channel))
        await channel.send(b"behind")
        assert await channel.receive() == b"behind"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_message_that_has_come_is_not_taken_by_another_thread(protocol: str) -> None:
    url = f"{protocol}+mem://threads"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open() as channel:
        await channel.send_many([b"one", b"two"])
        assert await channel.receive() == b"one"
        while not channel.stats().unread:
            await trio.lowlevel.checkpoint()
        await refused(channel.receive)
        assert await channel.receive() == b"two"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_channel_may_be_looked_at_from_another_thread(protocol: str) -> None:
    url = f"{protocol}+mem://threads"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open("tea") as channel:

        def look() -> tuple[str, str]:
            return channel.name, session.info.protocol

        assert await trio.to_thread.run_sync(look) == ("tea", protocol)


async def test_the_blocks_of_a_server_and_of_a_forward_are_ended_by_their_own_thread() -> None:
    url = "bpmux+mem://threads"
    async with muxkit.open_server(forward.handler(allow=["127.0.0.1:*"]), url) as server:
        await refused(lambda: server.shutdown(grace=0))
        await refused(server.wait_closed)
        async with muxkit.connect(url) as session:
            async with forward.open_local(session, "127.0.0.1:0", "127.0.0.1:9") as forwarded:
                await refused(lambda: forwarded.shutdown(grace=0))


async def test_what_bpmux_has_beside_channels_is_refused() -> None:
    async def answer(session: muxkit.Session) -> None:
        assert isinstance(session, bpmux.Session)
        async for request in session.requests():
            await request.respond(b"tea")

    url = "bpmux+mem://threads"
    async with muxkit.open_server(answer, url), muxkit.connect(url) as session:
        assert isinstance(session, bpmux.Session)
        await refused(lambda: session.request(b"?"))
        await refused(lambda: session.send(b"?"))
        await refused(session.receive)
        async with session.open_request(b"?") as request:
            await refused(request.response)
            await refused(request.abort)
            await refused(request.ping)
            assert await request.response() == b"tea"


async def test_what_relink_has_beside_channels_is_refused() -> None:
    url = "relink+mem://threads"
    taken = trio.Event()

    async def one(session: muxkit.Session) -> None:
        assert isinstance(session, relink.Link)
        await refused(lambda: session.receiver(0))
        receiver = session.receiver(0)
        message = await receiver.receive()
        await refused(message.consume)
        message.consume()
        taken.set()

    async with muxkit.open_server(one, url), muxkit.connect(url) as session:
        assert isinstance(session, relink.Link)
        await refused(lambda: session.sender(0))
        async with session.sender(0) as sender:
            await refused(lambda: sender.send(b"tea"))
            await refused(session.connected)
            receipt = await sender.send(b"tea")
            await refused(receipt.consumed)
            await taken.wait()


async def test_what_aqueduct_has_beside_channels_is_refused() -> None:
    url = "aqueduct+mem://threads"
    async with muxkit.open_server(stay, url, linger=0.0), muxkit.connect(url, linger=0.0) as session:
        assert isinstance(session, aqueduct.Client)
        await refused(session.channel)
        await refused(lambda: session.entrypoint.send(b"tea"))
        await refused(session.entrypoint.cancel)


async def test_what_e3x_has_beside_the_common_channel_is_refused() -> None:
    url = "e3x+mem://threads"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open() as channel:
        assert isinstance(channel, e3x.Channel)
        await refused(lambda: channel.post(b"tea"))
        await refused(channel.delivered)
        await refused(channel.done)


async def test_a_reader_of_restream_is_refused() -> None:
    url = "restream+mem://threads"
    async with trio.open_nursery() as nursery, restream.open_store("memory:") as store:
        served: restream.Served = await nursery.start(restream.serve, url, store)
        async with restream.numbers(url, count=3) as reader:
            await refused(reader.receive)
            await refused(reader.aclose)
            await refused(lambda: served.shutdown(grace=0))
            assert len([number async for number in reader]) == 3
        nursery.cancel_scope.cancel()


def test_an_asyncio_loop_of_another_thread_is_refused() -> None:
    async def main() -> None:
        url = "bpmux+mem://threads"

        async def echo(channel: muxkit.asyncio.Channel) -> None:
            async for message in channel:
                await channel.send(message)

        async with (
            muxkit.asyncio.open_server(echo, url) as server,
            muxkit.asyncio.connect(url) as session,
            session.open() as channel,
        ):
            calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
                lambda: channel.send(b"tea"),
                channel.receive,
                channel.finish,
                session.ping,
                lambda: session.open().__aenter__(),
                lambda: session.shutdown(grace=0),
                lambda: server.shutdown(grace=0),
            ]
            for call in calls:

                def make(call: Callable[[], Coroutine[Any, Any, object]] = call) -> None:
                    with pytest.raises(RuntimeError, match=REFUSED):
                        asyncio.run(call())

                await asyncio.to_thread(make)
            with pytest.raises(RuntimeError, match=REFUSED):
                await asyncio.to_thread(channel.abort)
            await channel.send(b"tea")
            assert await channel.receive() == b"tea"

    asyncio.run(main())
