"""A client of a restream server that writes and reads bytes, and a service without sockets."""

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
        """Send each value as a line with spaces, bytes as they are."""
        for message in messages:
            await self.stream.send_all(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    async def line(self) -> bytes:
        """Return the next line, b"" at the end of the stream."""
        while b"\n" not in self._rest:
            data = await self.stream.receive_some(65_536)
            if not data:
                assert self._rest == b"", "the stream ended inside a line"
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def hear(self) -> dict[str, Any]:
        """Return the next message."""
        line = await self.line()
        assert line, "the server hung up"
        message: dict[str, Any] = json.loads(line)
        return message

    async def hear_ids(self, count: int) -> list[int]:
        return [(await self.hear())["id"] for _ in range(count)]

    async def rest(self) -> list[dict[str, Any]]:
        """Return all lines up to the server's end, then close."""
        messages = []
        while line := await self.line():
            messages.append(json.loads(line))
        await self.stream.aclose()
        return messages

    async def rest_of_bytes(self) -> bytes:
        """Return all bytes that the server has sent after the last line, without waiting for more."""
        with trio.move_on_after(1):
            while data := await self.stream.receive_some(65_536):
                self._rest += data
        return self._rest

    async def error(self) -> str:
        """Check that an error line is all that still comes."""
        (message,) = await self.rest()
        assert message.keys() <= {"error", "code", "acknowledged"}
        assert "error" in message
        text = message["error"]
        assert isinstance(text, str)
        assert text
        return text

    async def hang_up(self) -> None:
        await self.stream.aclose()


class Place:
    """A service and connections to it."""

    def __init__(self, service: restream.Service, store: Any, nursery: trio.Nursery) -> None:  # noqa: ANN401
        self.service = service
        self.store = store
        self.nursery = nursery

    def connect(self, *, capacity: int = memory.CAPACITY) -> Client:
        """Connect; the connection is open until its block or the test ends."""
        ours, theirs = memory.pair(capacity=capacity)
        self.nursery.start_soon(self.service.handle, theirs)
        return Client(ours)

    async def ask(self, *messages: object, capacity: int = memory.CAPACITY) -> Client:
        """Connect and send a request."""
        client = self.connect(capacity=capacity)
        await client.say(*messages)
        return client

    async def all_left(self) -> None:
        """Wait until there is no connection."""
        with trio.fail_after(60):
            while self.service.connections:  # noqa: ASYNC110 - on a virtual clock
                await trio.sleep(0.01)


@asynccontextmanager
async def place(store: Any = None, *, keep: float = 30.0, **options: Any) -> AsyncIterator[Place]:  # noqa: ANN401
    """Run a service over this store, or over one in memory with Trio's clock."""
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
    """Return the ids that the store holds of a session."""
    status = await store.status(uuid)
    return [message.id for message in await store.replay(uuid, status.acknowledged, 100_000)]
