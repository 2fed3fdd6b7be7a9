"""A chat on a topic: everybody gets each message, and sees who comes and goes.

`python examples/topic_chat.py` runs the server and three people in one process.
"""

import msgspec
import trio

import muxkit
from muxkit import rpc
from muxkit.topics import Presence


class Line(msgspec.Struct):
    by: str
    text: str


class Chat(rpc.Service):
    async def say(self, text: str) -> int: ...


class ChatService(Chat):
    def __init__(self, lines: muxkit.Topic[Line]) -> None:
        self.lines = lines

    async def say(self, text: str) -> int:
        return await self.lines.publish(Line(rpc.current_call().user or "somebody", text))


async def person(url: str, name: str, words: list[str], seen: list[str]) -> None:
    async with (
        muxkit.connect(url, token=f"token of {name}") as session,
        session.subscribe("lines", codec=muxkit.Json(Line), member=name, since=0) as lines,
    ):
        chat = rpc.client(Chat, session)
        for text in words:
            await chat.say(text)
        async for line in lines:
            seen.append(f"{name} reads: {line.by}: {line.text}")
            if line.text == "bye":
                return


async def watch(url: str, changes: list[str], *, task_status: trio.TaskStatus[None]) -> None:
    async with (
        muxkit.connect(url, token="token of admin") as session,
        session.subscribe("lines/presence", codec=muxkit.Json(Presence)) as presence,
    ):
        task_status.started()
        while len(changes) < 4:
            change = await presence.__anext__()
            changes.append(f"{change.member.user} {'joins' if change.is_here else 'leaves'}")


async def main() -> None:
    lines = muxkit.Topic(Line)
    handler = rpc.serve(ChatService(lines), channels={"lines": lines, "lines/presence": lines.presence})
    users = muxkit.tokens({name: f"token of {name}" for name in ("ada", "bob", "admin")})
    seen: list[str] = []
    changes: list[str] = []
    async with muxkit.open_server(handler, "bpmux+tcp://127.0.0.1:0", authorize=users) as server:
        async with trio.open_nursery() as watching:
            await watching.start(watch, server.url, changes)
            async with trio.open_nursery() as people:
                people.start_soon(person, server.url, "ada", ["hello"], seen)
                people.start_soon(person, server.url, "bob", ["hi", "bye"], seen)
    print("\n".join(sorted(seen)))
    print(", ".join(sorted(changes)))


if __name__ == "__main__":
    trio.run(main)
