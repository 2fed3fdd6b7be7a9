"""A server and a client in one process: many messages over one channel of one TCP connection."""

import trio

import muxkit


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def main() -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(echo), "bpmux+tcp://127.0.0.1:0")
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await channel.send(b"hello")
            print(await channel.receive())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
