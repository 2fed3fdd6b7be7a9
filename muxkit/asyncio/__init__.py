"""muxkit for programs that run on asyncio: sessions and servers whose awaits belong to asyncio tasks.

    async with muxkit.asyncio.connect("bpmux+tcp://127.0.0.1:7000") as session:
        async with session.open("chat") as channel:
            await channel.send(b"hello")
            async for message in channel: ...

Trio runs beside the loop, in the same thread, while such a block is open.
"""

from __future__ import annotations

from muxkit.asyncio.door import (
    ChannelHandler,
    Handlers,
    RequestHandler,
    SessionHandler,
    by_name,
    connect,
    each_channel,
    each_request,
    in_trio,
    open_server,
    reconnecting,
)
from muxkit.asyncio.faces import Channel, Opening, Request, Server, Session, Subscription, TypedChannel
from muxkit.asyncio.topics import Topic
from muxkit.asyncio.typed import handler

__all__ = [
    "Channel",
    "ChannelHandler",
    "Handlers",
    "Opening",
    "Request",
    "RequestHandler",
    "Server",
    "Session",
    "SessionHandler",
    "Subscription",
    "Topic",
    "TypedChannel",
    "by_name",
    "connect",
    "each_channel",
    "each_request",
    "handler",
    "in_trio",
    "open_server",
    "reconnecting",
]
