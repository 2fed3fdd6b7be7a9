"""A peer for the tests of yamux: py-libp2p's implementation, with the verbs of `yamux_go`.

python yamux_libp2p.py client|server HOST:PORT
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from typing import TypeAlias

import trio
from libp2p.peer.id import ID  # type: ignore[import-not-found]
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError  # type: ignore[import-not-found]
from libp2p.stream_muxer.yamux.yamux import Yamux  # type: ignore[import-not-found]

PIECE = 65_536
Untyped: TypeAlias = "Yamux"  # a type checker doesn't know the package, so it takes this for anything


class Connection:
    """A TCP stream as py-libp2p wants it."""

    def __init__(self, stream: trio.SocketStream, *, is_initiator: bool) -> None:
        self.stream = stream
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            return bytes(await self.stream.receive_some(n))
        return b""

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1


def pattern(size: int, seed: int) -> bytes:
    return bytes((index * 7 + (index >> 8) + seed) & 0xFF for index in range(size))


async def read_all(stream: Untyped, rest: bytes = b"") -> bytes:
    pieces = [rest]
    with suppress(MuxedStreamError):  # the end
        while piece := await stream.read(PIECE):
            pieces.append(piece)
    return b"".join(pieces)


async def call(muxer: Untyped, size: int, seed: int) -> None:
    stream, sent = await muxer.open_stream(), pattern(size, seed)

    async def write() -> None:
        await stream.write(sent)
        await stream.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        got = await read_all(stream)
    assert got == sent, f"{size} bytes came back different"


async def serve(muxer: Untyped, stream: Untyped) -> None:
    head = b""
    while b"\n" not in head:
        head += await stream.read(PIECE)
    line, _, rest = head.partition(b"\n")
    verb, *words = line.decode(errors="replace").split() or [""]
    # A stream that is about to be reset may begin with anything.
    first, second, *_ = [*[int(word) for word in words if word.isdecimal()], 0, 0]
    if verb == "echo":
        piece = rest
        with suppress(MuxedStreamError):  # the end
            while True:
                if piece:
                    await stream.write(piece)
                if not (piece := await stream.read(PIECE)):
                    break
    elif verb == "digest":
        await trio.sleep(first / 1000)
        data = await read_all(stream, rest)
        await stream.write(b"%d %s\n" % (len(data), hashlib.sha256(data).hexdigest().encode()))
    elif verb == "source":
        await stream.write(pattern(first, second))
    elif verb == "open":
        async with trio.open_nursery() as nursery:
            for seed in range(first):
                nursery.start_soon(call, muxer, second, seed)
        await stream.write(b"ok\n")
    elif verb == "ping":
        await stream.write(b"ok\n")
    await stream.close()


async def serve_safely(muxer: Untyped, stream: Untyped) -> None:
    with suppress(MuxedStreamError, trio.BrokenResourceError, trio.ClosedResourceError):  # it was reset, or cut
        await serve(muxer, stream)


async def run(stream: trio.SocketStream, role: str) -> None:
    connection = Connection(stream, is_initiator=role == "client")
    muxer = Yamux(connection, ID(b"x" * 32), is_initiator=connection.is_initiator)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
            with suppress(MuxedConnError, MuxedStreamError, trio.EndOfChannel, trio.ClosedResourceError):
                while True:
                    nursery.start_soon(serve_safely, muxer, await muxer.accept_stream())
            nursery.cancel_scope.cancel()
    except* (trio.BrokenResourceError, MuxedConnError, MuxedStreamError):
        pass  # py-libp2p writes on a connection that was cut
    print("over", flush=True)


async def main(role: str, address: str) -> None:
    host, port = address.split(":")
    if role == "server":
        (listener,) = await trio.open_tcp_listeners(int(port), host=host)
        print(listener.socket.getsockname()[1], flush=True)
        await run(await listener.accept(), role)
    else:
        await run(await trio.open_tcp_stream(host, int(port)), role)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
