"""A client of a restream server, by hand: bytes in, bytes out. And a service for it to talk to, without sockets."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muxkit.protocols.restream.store import SessionStore

    Store = SessionStore[object, object]

U1 = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
U2 = "c0000000-0000-4000-8000-000000000002"


class Client:
    """One connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._rest = b""

    async def say(self, *messages: object) -> None:
        """Each as a line, with spaces as another implementation might write it; bytes as they are."""
        for message in messages:
            await self.stream.send_all(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    async def line(self) -> bytes:
        """The next line, b"" at the end of the stream."""
        while b"\n" not in self._rest:
            data = await self.stream.receive_some(65_536)
            if not data:
                assert self._rest == b"", "the stream ended inside a line"
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def hear(self) -> dict[str, Any]:
        """The next message."""
        line = await self.line()
        assert line, "the server hung up"
        message: dict[str, Any] = json.loads(line)
        return message

    async def hear_ids(self, count: int) -> list[int]:
        return [(await self.hear())["id"] for _ in range(count)]

    async def rest(self) -> list[dict[str, Any]]:
        """Everything up to the server's end, then ours."""
        messages = []
        while line := await self.line():
            messages.append(json.loads(line))
        await self.stream.aclose()
        return messages

    async def error(self) -> str:
        """An error line has to be all that still comes."""
        (message,) = await self.rest()
        assert list(message) == ["error"]
        text = message["error"]
        assert isinstance(text, str)
        assert text
        return text

    async def hang_up(self) -> None:
        await self.stream.aclose()


class Place:
    """A service, and connections to it."""

    def __init__(self, service: restream.Service, store: Any, nursery: trio.Nursery) -> None:  # noqa: ANN401
        self.service = service
        self.store = store
        self.nursery = nursery

    def connect(self, *, capacity: int = memory.CAPACITY) -> Client:
        """A new connection, which is open until its block or the test ends."""
        ours, theirs = memory.pair(capacity=capacity)
        self.nursery.start_soon(self.service.handle, theirs)
        return Client(ours)

    async def ask(self, *messages: object, capacity: int = memory.CAPACITY) -> Client:
        """A connection that begins so."""
        client = self.connect(capacity=capacity)
        await client.say(*messages)
        return client

    async def all_left(self) -> None:
        """Until no connection is there any more."""
        with trio.fail_after(60):
            while self.service.connections:  # noqa: ASYNC110 - on a virtual clock
                await trio.sleep(0.01)


@asynccontextmanager
async def place(store: Any = None, *, keep: float = 30.0, **options: Any) -> AsyncIterator[Place]:  # noqa: ANN401
    """A service over this store, or over one in memory whose clock is Trio's."""
    if store is not None:
        async with _running(store, options) as there:
            yield there
        return
    async with open_store("memory:", keep=keep, now=trio.current_time) as opened, _running(opened, options) as there:
        yield there


@asynccontextmanager
async def _running(store: Any, options: dict[str, Any]) -> AsyncIterator[Place]:  # noqa: ANN401
    async with trio.open_nursery() as nursery:
        service = restream.Service(store, **options)
        nursery.start_soon(service.sweep)
        yield Place(service, store, nursery)
        nursery.cancel_scope.cancel()


def begin(count: int = 5, uuid: str = U1) -> dict[str, object]:
    return {"uuid": uuid, "params": {"count": count}}


def resume(state: int, uuid: str = U1) -> dict[str, object]:
    return {"uuid": uuid, "state": state}


def ack(id: int, uuid: str = U1) -> dict[str, object]:
    return {"uuid": uuid, "ack": id}


async def stored_ids(store: Store, uuid: str = U1) -> list[int]:
    """What the store still holds of a session."""
    status = await store.status(uuid)
    return [message.id for message in await store.replay(uuid, status.acknowledged, 100_000)]
