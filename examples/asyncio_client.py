"""A chat of asyncio programs: tasks, time limits and groups of asyncio over one muxkit session.

`python examples/asyncio_client.py` serves and talks in one process. Nothing here is Trio.
"""

import asyncio

import muxkit
import muxkit.asyncio

ROOMS = ("tea", "coffee", "water")


async def answer(channel: muxkit.asyncio.Channel) -> None:
    """Serve one channel in an asyncio task of its own."""
    async for message in channel:
        if message == b"slow":
            await asyncio.sleep(3600)
        await channel.send(channel.name.encode() + b": " + message)


async def talk(session: muxkit.asyncio.Session, room: str) -> int:
    async with session.open(room) as channel:
        for number in range(100):
            await channel.send(b"%d" % number)
        await channel.finish()
        return len([message async for message in channel])


async def main() -> None:
    async with muxkit.asyncio.open_server(answer, "bpmux+tcp://127.0.0.1:0") as server:
        async with muxkit.asyncio.connect(server.url) as session:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(talk(session, room)) for room in ROOMS]
            print(f"{sum(task.result() for task in tasks)} answers in {len(ROOMS)} rooms")

            async with session.open("late") as channel:
                await channel.send(b"slow")
                try:
                    async with asyncio.timeout(0.1):
                        await channel.receive()
                except TimeoutError:
                    print("no answer in time; the session goes on")
                channel.abort("too slow")
            print(f"a ping answered: {await session.ping() < 60}")


if __name__ == "__main__":
    asyncio.run(main())
