"""A session as a listener: servers that were written for Trio's streams serve on it, also on the client's side."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

import muxkit

PROTOCOLS = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x"])


async def shout(stream: trio.abc.HalfCloseableStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(bytes(data).upper())


@PROTOCOLS
async def test_a_server_of_streams_serves_on_a_reverse_session(protocol: str) -> None:
    answers: list[bytes] = []
    done = trio.Event()

    async def ask(session: muxkit.Session) -> None:
        async with session.open("shout") as channel:
            await channel.send(b"tea")
            answers.append(await channel.receive())
        other = await session.open("else", payload=b"x")
        try:
            await other.receive()
        except (muxkit.ChannelCancelled, muxkit.ChannelStopped) as error:
            answers.append(error.reason.encode())
        done.set()

    async with muxkit.open_server(ask, f"{protocol}+mem://reverse") as server:
        async with muxkit.connect(server.url) as session, trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.serve_listeners, shout, [session.listener("shout")]))
            await done.wait()
            nursery.cancel_scope.cancel()
    assert answers == [b"TEA", b"only channels named 'shout' are accepted here"]


async def test_a_closed_listener_wakes_whoever_accepts_and_accepts_nothing_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def idle(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    async with muxkit.open_server(idle, "bpmux+mem://closed") as server, muxkit.connect(server.url) as session:
        listener = session.listener("http")
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await listener.accept()

            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            await listener.aclose()
        with pytest.raises(trio.ClosedResourceError, match="was closed"):
            await listener.accept()
