"""One process of a pair, for tests that kill the other: `serve URL`, or `client URL`.

Both write one JSON object a line. The server says its URL, then `{"lost": …}` for each session that was lost. The
client says `{"rounds": n}` as its echoes come back, and at the end how each of its waiters was told.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

import muxkit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ECHOES = 10
MESSAGE = bytes(range(256)) * 8


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def serve(url: str) -> None:
    """Echo on every channel; a session that says `sink` first is only read, slowly."""

    async def handle(session: muxkit.Session) -> None:
        try:
            await muxkit.each_channel(echo)(session)
            await session.ping()
        except muxkit.LinkLost as error:
            say(lost=error.by)

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, handle, url)
        say(url=served.url)


async def client(url: str) -> None:
    """Wait in every way there is, and report how each wait ended."""
    told: dict[str, str] = {}
    rounds = 0

    async def waiter(name: str, wait: Callable[[], Awaitable[object]]) -> None:
        try:
            await wait()
            told[name] = "returned"
        except muxkit.LinkLost as error:
            told[name] = f"LinkLost by {error.by}"

    async def echo(channel: muxkit.Channel) -> None:
        nonlocal rounds
        while True:
            await channel.send(MESSAGE)
            if await channel.receive() != MESSAGE:
                told["echo"] = "wrong bytes"
                return
            rounds += 1
            say(rounds=rounds)

    async def push(channel: muxkit.Channel) -> None:
        while True:
            await channel.send(MESSAGE * 32)

    async def incoming(session: muxkit.Session) -> None:
        async for _ in session:
            pass

    async def ping(session: muxkit.Session) -> None:
        while True:
            await session.ping()

    try:
        async with muxkit.connect(url) as session, trio.open_nursery() as nursery:
            for number in range(ECHOES):
                channel = await session.open().__aenter__()
                nursery.start_soon(waiter, f"echo {number}", partial(echo, channel))
            unread = await session.open().__aenter__()
            nursery.start_soon(waiter, "send without a reader", partial(push, unread))
            idle = await session.open().__aenter__()
            nursery.start_soon(waiter, "receive", idle.receive)
            nursery.start_soon(waiter, "incoming", partial(incoming, session))
            nursery.start_soon(waiter, "ping", partial(ping, session))
    except muxkit.LinkLost as error:
        told["session"] = f"LinkLost by {error.by}"
    say(told=told)


if __name__ == "__main__":
    trio.run({"serve": serve, "client": client}[sys.argv[1]], sys.argv[2])
