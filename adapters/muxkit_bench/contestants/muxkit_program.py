"""The program of muxkit's contestants: any protocol over any transport, through the common interface only.

`python -m muxkit_bench.contestants.muxkit_program server bpmux+tcp://127.0.0.1:0`; see `bench_work.play`.
"""

from __future__ import annotations

import os
import ssl
import sys
import zlib
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

import muxkit
from muxkit_bench.bench_work import Connection, Conversation, Peer, Server, play
from muxkit_bench.bench_work.orders import Order, Receipt, Way, Wrong
from muxkit_bench.contestants.certified import options
from muxkit_bench.contestants.contestant import FOLDER, WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

CHANNELS = 32_768
MEMORY = 1024 * 1024 * 1024  # so that `CHANNELS` is what counts
LATE = frozenset({"relink"})  # protocols that announce a channel with its first message


class MuxConversation(Conversation):
    """A channel of a session."""

    __slots__ = ("_channel", "block")

    def __init__(
        self, channel: muxkit.Channel, block: AbstractAsyncContextManager[muxkit.Channel] | None = None
    ) -> None:
        self._channel = channel
        self.block = block
        # Nothing stands between the job and the channel.
        self.send = channel.send
        self.receive = channel.receive

    def prepare(self, message: bytes, way: Way) -> bytes:
        return message

    async def send_batch(self, batch: list[bytes]) -> None:
        await self._channel.send_many(batch)

    async def take(self, order: Order) -> Receipt:
        count, size, verify = order.messages, order.size, order.verify
        came = crc = 0
        if order.way is Way.EACH:
            receive = self._channel.receive
            while came < count:
                message = await receive()
                if len(message) != size:
                    raise Wrong(f"message {came} has {len(message)} bytes, not {size}")
                if verify:
                    crc = zlib.crc32(message, crc)
                came += 1
            return Receipt(came, came * size, crc)
        receive_many = self._channel.receive_many
        while came < count:
            messages = await receive_many(count - came)
            for message in messages:
                if len(message) != size:
                    raise Wrong(f"a message has {len(message)} bytes, not {size}")
                if verify:
                    crc = zlib.crc32(message, crc)
            came += len(messages)
        return Receipt(came, came * size, crc)


class MuxConnection(Connection):
    def __init__(self, session: muxkit.Session) -> None:
        self._session = session

    async def open(self) -> Conversation:
        block = self._session.open()
        channel = await block.__aenter__()
        return MuxConversation(channel, block)

    async def open_to_keep(self) -> object:
        block = self._session.open()
        channel = await block.__aenter__()
        if self._session.info.protocol in LATE:
            await channel.send(b"")
        return block  # with its channel; an application keeps both too

    async def close(self, conversation: Conversation) -> None:
        assert isinstance(conversation, MuxConversation)
        assert conversation.block is not None
        await conversation.block.__aexit__(None, None, None)

    async def echo_once(self, message: bytes) -> bytes:
        async with self._session.open() as channel:
            await channel.send(message)
            return await channel.receive()


class Mux(Peer):
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        async def handle_channel(channel: muxkit.Channel) -> None:
            await server.serve(MuxConversation(channel))

        async def hold(session: muxkit.Session) -> None:
            async def serve_first(channel: muxkit.Channel) -> None:
                with suppress(muxkit.LinkLost):  # thousands of channels need no orderly close
                    await handle_channel(channel)

            async with trio.open_nursery() as nursery:
                with suppress(muxkit.LinkLost):
                    async for channel in session:
                        if not server.keeps(channel):
                            nursery.start_soon(serve_first, channel)

        handler = hold if server.is_holding else muxkit.each_channel(handle_channel)
        async with trio.open_nursery() as nursery:
            served: muxkit.Server = await nursery.start(
                partial(muxkit.serve, handler, address, limits=_limits(), **_options(address, ssl.Purpose.CLIENT_AUTH))
            )
            started(served.url)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[Connection]:
        options = _options(address, ssl.Purpose.SERVER_AUTH)
        async with muxkit.connect(address, limits=_limits(), **options) as session:
            yield MuxConnection(session)


def _limits() -> muxkit.Limits:
    """Limits for every protocol. Some need two of their channels for one of the job."""
    window = os.environ.get(WINDOW)
    if window is None:
        return muxkit.Limits(channels=CHANNELS, channel_memory=MEMORY)
    return muxkit.Limits(channels=CHANNELS, channel_memory=MEMORY, channel_first=int(window), channel_bytes=int(window))


def _options(url: str, purpose: ssl.Purpose) -> dict[str, Any]:
    return options(url, purpose, os.environ.get(FOLDER, ""))


if __name__ == "__main__":
    sys.exit(play(Mux()))
