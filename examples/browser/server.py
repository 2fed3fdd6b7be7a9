"""A chat in the browser, with presence and a slow reader: the pages and their WebSocket are on one port.

Run `python examples/browser/server.py`, and open the address that it prints in several tabs. Each tab has one
connection, with a channel for the chat and one for a stream of numbers. A tab that stops reading the numbers makes the
server wait with that stream, and the chat goes on.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import trio

import muxkit
from muxkit_web import Pages

URL = "bpmux+ws://127.0.0.1:8000"
WAITING = 100  # events that the server keeps for a tab that doesn't read its chat
NUMBER_SIZE = 1024  # bytes; each number is padded to this size, so that the window fills soon
NAME_MAX = 40  # characters

Event = dict[str, object]


class Room:
    """Everyone who is in the chat, and the events that wait for each of them."""

    def __init__(self) -> None:
        self._people: dict[trio.MemorySendChannel[Event], str] = {}

    @contextmanager
    def joined(self, name: str) -> Iterator[trio.MemoryReceiveChannel[Event]]:
        send, receive = trio.open_memory_channel[Event](WAITING)
        self._people[send] = name
        self._tell_who_is_here()
        try:
            yield receive
        finally:
            del self._people[send]
            self._tell_who_is_here()

    def say(self, event: Event) -> None:
        for events in self._people:
            with suppress(trio.WouldBlock):  # this tab doesn't read; the others must not wait for it
                events.send_nowait(event)

    def _tell_who_is_here(self) -> None:
        self.say({"event": "presence", "people": sorted(self._people.values())})


room = Room()
sent: dict[str, int] = {}  # how many numbers the server has sent, by the name of the reader


async def chat(channel: muxkit.Channel) -> None:
    """Handle one person's chat. The opening of the channel holds the name."""
    name = channel.opening.decode(errors="replace")[:NAME_MAX] or "somebody"
    with room.joined(name) as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_on, events, channel)
            async for text in channel:
                room.say({"event": "said", "name": name, "text": text.decode(errors="replace")})
            nursery.cancel_scope.cancel()


async def pass_on(events: trio.MemoryReceiveChannel[Event], channel: muxkit.Channel) -> None:
    async for event in events:
        await channel.send(json.dumps(event).encode())


async def numbers(channel: muxkit.Channel) -> None:
    """Send numbers as fast as the tab reads them: `send` waits while the tab's window is full."""
    name = channel.opening.decode(errors="replace")[:NAME_MAX]
    try:
        for number in count(1):
            await channel.send(str(number).ljust(NUMBER_SIZE).encode())
            sent[name] = number
    finally:
        sent.pop(name, None)


async def how_many(request: muxkit.IncomingRequest) -> None:
    """Answer how many numbers the server has sent to this reader."""
    await request.respond(str(sent.get(request.payload.decode(errors="replace"), 0)).encode())


async def main(url: str) -> None:
    handler = muxkit.by_name({"chat": chat, "numbers": numbers}, requests=how_many)
    pages = Pages(Path(__file__).parent / "www")
    async with muxkit.open_server(handler, url, pages=pages) as server:
        print(server.url.replace("bpmux+ws", "http"), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(main, sys.argv[1] if len(sys.argv) > 1 else URL)
