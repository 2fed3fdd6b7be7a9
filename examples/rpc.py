"""Calls over one connection: a thousand at once, some declined, and two thousand that the caller gives up.

`python examples/rpc.py` shows that calls that time out together are stopped at the server and harm no other call.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import muxkit

working = 0


async def add(numbers: list[int]) -> int:
    return sum(numbers)


async def work(seconds: float) -> None:
    global working
    working += 1
    try:
        await trio.sleep(seconds)
    finally:
        working -= 1


METHODS: dict[str, Callable[[Any], Awaitable[object]]] = {"add": add, "work": work}


async def answer(request: muxkit.IncomingRequest) -> None:
    method, argument = json.loads(request.payload)
    if method in METHODS:
        await request.respond(json.dumps(await METHODS[method](argument)).encode())
    else:
        await request.decline(f"there is no method {method!r}".encode())


async def call(session: muxkit.Session, method: str, argument: object) -> object:
    answer: object = json.loads(await session.request(json.dumps([method, argument]).encode()))
    return answer


async def main() -> None:
    async with muxkit.open_server(muxkit.each_request(answer), "bpmux+tcp://127.0.0.1:0") as server:
        async with muxkit.connect(server.url) as session:
            right: list[bool] = []

            async def add_up(number: int) -> None:
                right.append(await call(session, "add", [number, number]) == 2 * number)

            async with trio.open_nursery() as nursery:
                for number in range(1000):
                    nursery.start_soon(add_up, number)
            print(f"{sum(right)} calls were answered")
            try:
                await call(session, "fly", None)
            except muxkit.ChannelStopped as refusal:
                print("a call was declined:", refusal.reason)
            with trio.move_on_after(1):
                async with trio.open_nursery() as nursery:
                    for _ in range(2000):
                        nursery.start_soon(call, session, "work", 3600)
            print("2000 calls took too long; the next one says", await call(session, "add", [2, 3]))
            print("still at work:", working)


if __name__ == "__main__":
    trio.run(main)
