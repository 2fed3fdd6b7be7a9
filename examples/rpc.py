"""Calls over one connection: many at a time, with answers, refusals, and calls that the caller gives up."""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio

from muxkit import ChannelStopped
from muxkit.protocols import bpmux
from muxkit_adapters import tcp


async def add(numbers: list[int]) -> int:
    return sum(numbers)


async def sleep(seconds: float) -> str:
    try:
        await trio.sleep(seconds)
    except trio.Cancelled:
        print(f"server: sleep({seconds}) was cancelled, since its caller gave up")
        raise
    return "well rested"


METHODS: dict[str, Callable[[Any], Awaitable[object]]] = {"add": add, "sleep": sleep}


async def answer(request: bpmux.IncomingRequest) -> None:
    """Run a call; stop when the caller gives up, decline unknown methods."""
    method, argument = json.loads(request.payload)
    async with request, trio.open_nursery() as nursery:

        async def stop_when_cancelled() -> None:
            await request.cancelled()
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_when_cancelled)
        with suppress(trio.BrokenResourceError):  # the caller gave up at the last moment
            if method in METHODS:
                await request.respond(json.dumps(await METHODS[method](argument)).encode())
            else:
                await request.decline(f"there is no method {method!r}".encode())
        nursery.cancel_scope.cancel()


async def serve(stream: trio.abc.Stream) -> None:
    async with bpmux.session(stream) as session, trio.open_nursery() as nursery:
        async for request in session.requests():
            nursery.start_soon(answer, request)


async def call(session: bpmux.Session, method: str, argument: object) -> object:
    result: object = json.loads(await session.request(json.dumps([method, argument]).encode()))
    return result


async def main() -> None:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, serve)
        host, _, port = address.rpartition(":")
        async with tcp.connect(host, int(port)) as stream, bpmux.session(stream) as session:
            print("client: 2 + 3 + 4 =", await call(session, "add", [2, 3, 4]))
            print("client: a short sleep,", await call(session, "sleep", 0.01))
            with trio.move_on_after(1):
                await call(session, "sleep", 3600)
            print("client: the long sleep was too long")
            try:
                await call(session, "fly", None)
            except ChannelStopped as refusal:
                print("client: declined,", refusal.payload.decode())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
