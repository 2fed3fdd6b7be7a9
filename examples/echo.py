"""A server and a client in one process: many messages over one channel of one TCP connection."""

import trio

import muxkit


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def main() -> None:
    async with (
        muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server,
        muxkit.connect(server.url) as session,
        session.open() as channel,
    ):
        await channel.send(b"hello")
        print(await channel.receive())


if __name__ == "__main__":
    trio.run(main)
