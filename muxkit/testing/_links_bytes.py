"""What is sent over a link that is tried, and what must come out? Helpers of the checks."""

from __future__ import annotations

import random
from contextlib import suppress

import trio

from muxkit.testing._demands import require


def noise(size: int, *, seed: int = 0) -> bytes:
    return random.Random(size + seed).randbytes(size)


async def receive(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        piece = await stream.receive_some(size - len(got))
        require(bool(piece), f"the stream ended after {len(got)} of {size} bytes")
        got += piece
    require(len(got) == size, f"{len(got)} bytes came where at most {size} were asked for")
    return bytes(got)


async def expect(stream: trio.abc.ReceiveStream, data: bytes) -> None:
    require(await receive(stream, len(data)) == data, f"{len(data)} bytes came out different")


async def drain(stream: trio.abc.ReceiveStream) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def send_in_pieces(stream: trio.abc.SendStream, data: bytes) -> None:
    for start in range(0, len(data), 50_000):
        await stream.send_all(data[start : start + 50_000])


async def send_and_close(stream: trio.abc.Stream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.aclose()
