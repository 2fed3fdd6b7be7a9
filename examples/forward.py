"""A TCP port forward like that of `ssh -L`; `python examples/forward.py` sends a line through it to an echo service."""

from functools import partial

import trio

import muxkit


async def copy(source: trio.abc.ReceiveStream, target: trio.abc.HalfCloseableStream) -> None:
    async for data in source:
        await target.send_all(data)
    await target.send_eof()


async def join(one: trio.abc.HalfCloseableStream, other: trio.abc.HalfCloseableStream) -> None:
    async with one, other, trio.open_nursery() as nursery:
        nursery.start_soon(copy, one, other)
        nursery.start_soon(copy, other, one)


async def leave(channel: muxkit.Channel) -> None:
    """The far end: connect to the port that the near end has named."""
    await join(channel.as_stream(), await trio.open_tcp_stream("127.0.0.1", int(channel.name)))


async def enter(session: muxkit.Session, port: int, stream: trio.SocketStream) -> None:
    """The near end: carry an accepted connection to that port."""
    await join(stream, (await session.open(str(port))).as_stream())


async def main() -> None:
    async with (
        muxkit.open_server(leave, "bpmux+tcp://127.0.0.1:0") as server,
        muxkit.connect(server.url) as session,
        trio.open_nursery() as nursery,
    ):
        [echo] = await nursery.start(partial(trio.serve_tcp, lambda it: copy(it, it), 0, host="127.0.0.1"))
        carry = partial(enter, session, echo.socket.getsockname()[1])
        [door] = await nursery.start(partial(trio.serve_tcp, carry, 0, host="127.0.0.1"))
        async with await trio.open_tcp_stream(*door.socket.getsockname()) as stream:
            await stream.send_all(b"hello through the forward")
            await stream.send_eof()
            print(b"".join([data async for data in stream]).decode())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
