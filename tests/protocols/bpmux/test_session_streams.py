"""A duplex as a byte stream, tested with Trio's own checks."""

from __future__ import annotations

import ssl
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import trustme

from muxkit import LinkLost

from ._pairs import TINY, Pair, cut, next_duplex, rough_sessions, sessions

if TYPE_CHECKING:
    from muxkit.runtime import ByteStream

pytestmark = pytest.mark.requirement("R-41")


async def streams(pair: Pair, stack: AsyncExitStack) -> tuple[ByteStream, ByteStream]:
    here = await stack.enter_async_context(pair.one.open())
    there = await next_duplex(pair.other)
    return here.as_stream(), there.as_stream()


async def test_a_duplex_passes_trios_checks_for_byte_streams(autojump_clock: trio.testing.MockClock) -> None:
    async with rough_sessions(limits=TINY) as pair, AsyncExitStack() as stack:

        async def make() -> tuple[ByteStream, ByteStream]:
            return await streams(pair, stack)

        async def make_clogged() -> tuple[ByteStream, ByteStream]:
            ends = await make()
            for end in ends:
                with trio.move_on_after(0.01):
                    await end.send_all(bytes(10_000))
            return ends

        await trio.testing.check_half_closeable_stream(make, make_clogged)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_tls_runs_on_a_duplex(authority: trustme.CA) -> None:
    client, server = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(client)
    authority.issue_cert("muxkit.test").configure_cert(server)
    async with sessions(limits=TINY) as pair, AsyncExitStack() as stack:
        here, there = await streams(pair, stack)
        one = trio.SSLStream(here, client, server_hostname="muxkit.test")
        other = trio.SSLStream(there, server, server_side=True)
        data = bytes(range(256)) * 2000

        async def serve() -> None:
            got = bytearray()
            while len(got) < len(data):
                got += await other.receive_some()
            await other.send_all(got)
            assert await other.receive_some() == b""
            await other.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(one.send_all, data)
            got = bytearray()
            while len(got) < len(data):
                got += await one.receive_some()
            assert got == data
            await one.aclose()


async def test_the_loss_of_the_link_breaks_the_stream() -> None:
    async with rough_sessions() as pair, AsyncExitStack() as stack:
        here, there = await streams(pair, stack)
        await here.send_all(b"before")
        assert await there.receive_some() == b"before"
        cut(pair)
        with pytest.raises(trio.BrokenResourceError):
            await here.send_all(b"after")
        with pytest.raises(LinkLost):
            await there.receive_some()


async def test_the_abort_of_a_channel_is_no_end_of_file() -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = (await next_duplex(pair.other)).as_stream()
        await here.send(b"x")
        assert await there.receive_some() == b"x"
        here.abort()
        with pytest.raises(trio.BrokenResourceError):
            await there.receive_some()
