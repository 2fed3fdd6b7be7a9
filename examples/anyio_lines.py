"""A service of lines, written against AnyIO's byte streams and nothing else, that runs over TCP and over muxkit.

`python examples/anyio_lines.py` serves it over a plain TCP port, over the channels of a session on Trio, and over those
of a session on asyncio.
"""

import anyio
from anyio.abc import ByteStream, Listener
from anyio.streams.buffered import BufferedByteReceiveStream

import muxkit
import muxkit.anyio
import muxkit.asyncio

LONGEST = 1000  # bytes of a line


async def shout(stream: ByteStream) -> None:
    """Answer each line in upper case. This is the service, and it knows nothing of muxkit."""
    lines = BufferedByteReceiveStream(stream)
    async with stream:
        try:
            while True:
                await stream.send((await lines.receive_until(b"\n", LONGEST)).upper() + b"\n")
        except (anyio.EndOfStream, anyio.IncompleteRead):
            pass


async def ask(stream: ByteStream, line: bytes) -> bytes:
    """Send one line, and return the answer. This is the client, and it knows nothing of muxkit either."""
    async with stream:
        await stream.send(line + b"\n")
        return await BufferedByteReceiveStream(stream).receive_until(b"\n", LONGEST)


async def over_tcp() -> None:
    listener: Listener[ByteStream] = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, shout)
        print("tcp:", await ask(await anyio.connect_tcp("127.0.0.1", port), b"hello"))
        tasks.cancel_scope.cancel()


async def serve_on_trio(session: muxkit.Session) -> None:
    await muxkit.anyio.listener(session, "lines").serve(shout)


async def over_muxkit_on_trio() -> None:
    async with muxkit.open_server(serve_on_trio, "bpmux+tcp://127.0.0.1:0") as server:
        async with muxkit.connect(server.url) as session:
            channel = await session.open("lines")
            print("a channel on Trio:", await ask(muxkit.anyio.byte_stream(channel), b"hello"))


async def serve_on_asyncio(session: muxkit.asyncio.Session) -> None:
    await muxkit.anyio.listener(session, "lines").serve(shout)


async def over_muxkit_on_asyncio() -> None:
    async with muxkit.asyncio.open_server(serve_on_asyncio, "bpmux+tcp://127.0.0.1:0") as server:
        async with muxkit.asyncio.connect(server.url) as session:
            channel = await session.open("lines")
            print("a channel on asyncio:", await ask(muxkit.anyio.byte_stream(channel), b"hello"))


if __name__ == "__main__":
    anyio.run(over_tcp, backend="trio")
    anyio.run(over_muxkit_on_trio, backend="trio")
    anyio.run(over_muxkit_on_asyncio, backend="asyncio")
