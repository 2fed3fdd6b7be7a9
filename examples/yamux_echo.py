"""Streams of bytes over yamux: an echo server, and a client that any implementation of yamux could be.

Run it without arguments for both ends in one process. With `serve PORT` or `call PORT` it is one of them, and the other
one may be a program in Go or JavaScript.
"""

from __future__ import annotations

import sys

import trio

import muxkit
from muxkit.protocols import yamux


async def echo(session: muxkit.Session) -> None:
    """Serve each stream that the client opens in a task of its own."""
    assert isinstance(session, yamux.Session)

    async def serve(stream: yamux.YamuxStream) -> None:
        async with stream:
            async for piece in stream:
                await stream.send_all(piece)

    async with trio.open_nursery() as nursery:
        async for stream in session.streams():
            nursery.start_soon(serve, stream)


async def call(url: str) -> None:
    """Send a line on each of three streams, and print what comes back."""

    async def say(number: int) -> None:
        async with session.open_stream() as stream:
            await stream.send_all(b"hello %d\n" % number)
            await stream.send_eof()
            answer = b"".join([piece async for piece in stream])
            print(f"stream {stream.id}: {answer.decode().strip()}")

    async with yamux.connect(url) as session:
        for number in range(3):
            await say(number)
        print(f"a round trip takes {await session.ping() * 1000:.1f} ms")


async def main(arguments: list[str]) -> None:
    role, port = (arguments[0], arguments[1]) if arguments else ("both", "0")
    url = f"yamux+tcp://127.0.0.1:{port}"
    if role == "call":
        await call(url)
        return
    async with muxkit.open_server(echo, url) as server:
        if role == "serve":
            print(f"listening at {server.url}")
            await trio.sleep_forever()
        await call(server.url)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
