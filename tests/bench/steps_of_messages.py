"""Count the steps that a message costs: calls of Python functions, calls of C functions, and byte codes.

    python tests/bench/steps_of_messages.py
    python tests/bench/steps_of_messages.py bpmux+tcp e3x+tcp --jobs echo,trip --callers

Client and server run in one process over loopback sockets, so each figure is the cost of both ends. Processor time on
a shared machine varies by ten per cent and more. These counts hardly vary, so they show whether a change removes work.
They don't show how long a step takes, so measure a change with `two_trees.py` as well.

| job | what it does | a step is counted per |
|---|---|---|
| small | messages of 64 bytes in one direction, one call each | message |
| echo | messages of 64 bytes there and back, up to 64 under way | message and its answer |
| trip | a message of 64 bytes there and back, then the next one | round trip |
| open | a channel that is opened, answers once, and is closed | channel |
| bulk | messages of 64 KiB in one direction | message |
| request | a channel that is opened with a payload, answered with one message, and closed by both sides | channel |
| call | a call of `muxkit.rpc` without a deadline | call |

With `--callers`, the program prints the functions with the most calls for each job.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

import trio

import muxkit
from muxkit import rpc

SMALL: Final = bytes(64)
LARGE: Final = bytes(64 * 1024)
UNDER_WAY: Final = 64  # messages that the job `echo` sends before it waits for an answer
DEFAULT_URLS: Final = ("bpmux+tcp", "e3x+tcp", "e3x+udp")
WARM_UP: Final = 200  # repetitions before the counting begins


class Orders(rpc.Service):
    async def get(self, id: int) -> str: ...


class OrdersService(Orders):
    async def get(self, id: int) -> str:
        return f"order {id}"


async def answer(channel: muxkit.Channel) -> None:
    """Return each message of a channel named `echo`, or the payload of one named `request`.

    Count the messages of any other channel and return the number.
    """
    if channel.name == "echo":
        async for message in channel:
            await channel.send(message)
        return
    if channel.name == "request":
        await channel.send(channel.opening)
        return
    count = 0
    try:
        while True:
            await channel.receive()
            count += 1
    except trio.EndOfChannel:
        await channel.send(b"%d" % count)


async def one_way(client: muxkit.Session, count: int, *, message: bytes) -> None:
    async with client.open("count") as channel:
        for _ in range(count):
            await channel.send(message)
        await channel.finish()
        assert int(await channel.receive()) == count


async def echo(client: muxkit.Session, count: int, *, under_way: int) -> None:
    async with client.open("echo") as channel:
        for number in range(count + under_way):
            if number < count:
                await channel.send(SMALL)
            if number >= under_way:
                await channel.receive()


async def open_and_close(client: muxkit.Session, count: int) -> None:
    for _ in range(count):
        async with client.open("echo") as channel:
            await channel.send(SMALL)
            await channel.receive()


async def request(client: muxkit.Session, count: int) -> None:
    for _ in range(count):
        async with client.open("request", payload=SMALL) as channel:
            await channel.receive()


async def call(client: muxkit.Session, count: int) -> None:
    orders = rpc.client(Orders, client)
    for number in range(count):
        await orders.get(number)


JOBS: Final[dict[str, tuple[int, Callable[[muxkit.Session, int], Awaitable[None]]]]] = {
    "small": (4000, partial(one_way, message=SMALL)),
    "echo": (4000, partial(echo, under_way=UNDER_WAY)),
    "trip": (1000, partial(echo, under_way=1)),
    "open": (300, open_and_close),
    "bulk": (200, partial(one_way, message=LARGE)),
    "request": (300, request),
    "call": (300, call),
}


class Steps:
    """Counts the steps of everything that runs in this thread inside a `with` block."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.c_calls = 0
        self.byte_codes = 0

    @property
    def functions(self) -> int:
        return sum(self.calls.values())

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1
        elif event == "c_call":
            self.c_calls += 1

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self.byte_codes += 1
        return self.trace


async def count_steps(url: str, job: str) -> Steps:
    """Run a job twice after a warm-up, because counting byte codes would add to the calls."""
    steps = Steps()
    count, work = JOBS[job]
    handler = rpc.serve(OrdersService(), channels=answer)
    async with muxkit.open_server(handler, f"{url}://127.0.0.1:0") as server, muxkit.connect(server.url) as client:
        await work(client, min(count, WARM_UP))
        sys.setprofile(steps.profile)
        try:
            await work(client, count)
        finally:
            sys.setprofile(None)
        sys.settrace(steps.trace)
        try:
            await work(client, count // 4)
        finally:
            sys.settrace(None)
    steps.byte_codes *= 4
    return steps


def shown(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('muxkit/')[2]}:{code.co_qualname}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="*", default=DEFAULT_URLS, help="protocol and transport, such as e3x+udp")
    parser.add_argument("--jobs", default=",".join(JOBS), help="only these, separated by commas")
    parser.add_argument("--callers", type=int, nargs="?", const=40, default=0, help="print this many functions")
    asked = parser.parse_args()
    print(f"{'':20} {'Python calls':>13} {'C calls':>9} {'byte codes':>11}")
    for url in asked.urls:
        for job in asked.jobs.split(","):
            count = JOBS[job][0]
            steps = trio.run(count_steps, url, job)
            figures = steps.functions / count, steps.c_calls / count, steps.byte_codes / count
            print(f"{url + ' ' + job:20} {figures[0]:13.1f} {figures[1]:9.1f} {figures[2]:11.0f}", flush=True)
            for code, calls in steps.calls.most_common(asked.callers):
                print(f"    {calls / count:8.2f} {shown(code)}")


if __name__ == "__main__":
    main()
