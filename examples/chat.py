"""A chat with rooms, a channel for each room of a person; a slow reader misses lines and delays no other person."""

from collections import defaultdict
from contextlib import suppress

import trio

import muxkit

WAITING = 100  # lines that the server keeps for a slow reader
PEOPLE = {"ann": ["tea", "trains"], "bob": ["tea"], "cleo": ["tea", "trains"]}


class Chat:
    """The people in each room; the first message of a channel says `room/name`, the others are text."""

    def __init__(self) -> None:
        self.rooms: defaultdict[str, dict[str, trio.MemorySendChannel[str]]] = defaultdict(dict)

    async def visit(self, channel: muxkit.Channel) -> None:
        room, _, name = (await channel.receive()).decode().partition("/")
        lines, waiting = trio.open_memory_channel[str](WAITING)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forward, waiting, channel)
            self.tell(room, f"* here: {name}")
            self.rooms[room][name] = lines
            lines.send_nowait(f"* here: {', '.join(self.rooms[room])}")
            with suppress(trio.BrokenResourceError):  # the connection was lost
                async for text in channel:
                    self.tell(room, f"{name}: {text.decode()}")
            del self.rooms[room][name]
            lines.close()  # `forward` sends what still waits, then it ends as well
        self.tell(room, f"* gone: {name}")

    def tell(self, room: str, line: str) -> None:
        for lines in self.rooms[room].values():
            with suppress(trio.WouldBlock):  # this person does not read; the others must not wait
                lines.send_nowait(line)


async def forward(waiting: trio.MemoryReceiveChannel[str], channel: muxkit.Channel) -> None:
    async for line in waiting:
        with suppress(trio.BrokenResourceError):  # left: the lines that wait for this person are dropped
            await channel.send(line.encode())


async def take_part(session: muxkit.Session, room: str, name: str) -> None:
    """Greet when all are here, leave when all have greeted."""
    absent = {person for person, rooms in PEOPLE.items() if room in rooms}
    silent = {*absent}
    async with session.open() as channel:
        await channel.send(f"{room}/{name}".encode())
        while silent:
            line = (await channel.receive()).decode()
            print(f"{name:>4} in #{room:<6}  {line}")
            who, _, what = line.partition(": ")
            if who == "* here":
                absent -= {*what.split(", ")}
                if not absent:
                    await channel.send(b"hello")
            silent.discard(who)


async def person(url: str, name: str) -> None:
    async with muxkit.connect(url) as session, trio.open_nursery() as nursery:
        for room in PEOPLE[name]:
            nursery.start_soon(take_part, session, room, name)


async def main() -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(Chat().visit), "bpmux+tcp://127.0.0.1:0")
        async with trio.open_nursery() as people:
            for name in PEOPLE:
                people.start_soon(person, served.url, name)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
