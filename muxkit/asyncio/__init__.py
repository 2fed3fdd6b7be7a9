"""muxkit for asyncio programs. The functions and classes have the same names as in `muxkit`.

    async with muxkit.asyncio.connect("bpmux+tcp://127.0.0.1:7000") as session:
        async with session.open("chat") as channel:
            await channel.send(b"hello")
            async for message in channel: ...

While at least one block of `connect`, `open_server` or `reconnecting` is open, Trio runs inside the asyncio loop, in
the same thread.
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
