"""Handlers of typed channels that run as asyncio tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import muxkit._handlers
from muxkit._signatures import check_handler
from muxkit.asyncio.door import ChannelHandler
from muxkit.asyncio.faces import Channel, TypedChannel
from muxkit.codecs import CODEC_HEADER, Codec

ValueT = TypeVar("ValueT")


def handler(
    values: type[ValueT] | Codec[ValueT],
) -> Callable[[Callable[[TypedChannel[ValueT]], Awaitable[object]]], ChannelHandler]:
    """Make a handler of channels from a coroutine function that takes a `TypedChannel`, as `muxkit.handler` does.

        @muxkit.asyncio.handler(Price)
        async def prices(channel: muxkit.asyncio.TypedChannel[Price]) -> None: ...

    Raises:
        TypeError: If the function isn't async or doesn't take one argument.
    """
    codecs = muxkit._handlers.codecs_of(values)

    def decorate(function: Callable[[TypedChannel[ValueT]], Awaitable[object]]) -> ChannelHandler:
        check_handler(function)

        async def handle_channel(channel: Channel) -> None:
            await function(TypedChannel(channel, codecs.named(channel.headers.get(CODEC_HEADER))))

        return handle_channel

    return decorate
