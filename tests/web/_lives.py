"""Random lives of channels and requests between JavaScript and Python, opened by both sides at the same time.

`Lives` is the side in Python, and `lives.mjs` the side in JavaScript, for Node and for web pages. A seed decides what
both sides send to each other, how each channel ends, and where its reader pauses.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

import muxkit
from muxkit.protocols import bpmux

SCRIPT = Path(__file__).with_name("lives.mjs")
PATTERN = bytes(index % 251 for index in range(251 + 1_000_000))
SIZES = (0, 1, 17, 200, 247, 248, 300, 5000, 65_536, 70_000, 300_000)
WEIGHTS = (2, 4, 4, 4, 2, 2, 4, 3, 1, 1, 1)
Plan = dict[str, Any]


def message_of(seed: int, index: int, size: int) -> bytes:
    start = (seed + index) % 251
    return PATTERN[start : start + size]


def plans_of(rng: random.Random, first_seed: int) -> list[Plan]:
    def sizes(least: int) -> list[int]:
        return rng.choices(SIZES, WEIGHTS, k=rng.randint(least, 12))

    return [
        {
            "seed": first_seed + number,
            "up": sizes(1),
            "down": sizes(0),
            "ends": rng.choice(["finish", "finish", "abort", "stop", "request"]),
            "pauses": rng.sample(range(12), 2),
        }
        for number in range(rng.randint(1, 12))
    ]


class Lives:
    """One session full of lives, as its server. The client's half is `live` of `lives.mjs`."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.theirs: list[Plan] = plans_of(rng, 1000 * (seed + 1))
        """The plans of the client."""
        self.ours: list[Plan] = plans_of(rng, 1000 * (seed + 1) + 500)
        self.failures: list[str] = []
        self._over = trio.Event()  # the client has opened all of its channels, and seen most of them end

    async def serve(self, session: bpmux.Session) -> None:
        """Live the lives of both sides, then end the session."""
        handle = muxkit.each_channel(self.accept_life, requests=self.answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle, session)
            async with trio.open_nursery() as opening:
                for plan in self.ours:
                    opening.start_soon(self.open_life, session, plan)
                await self._over.wait()
            await session.shutdown(grace=60)

    def check_client(self, said: dict[str, Any]) -> None:
        """Check the report of the client."""
        assert self.failures == []
        assert (said["failures"], said["ended"]) == ([], None)
        channels = [plan for plan in self.ours if plan["ends"] != "request"]
        aborted = [plan for plan in channels if plan["ends"] == "abort"]
        # A channel that was aborted before its handler could start is dropped.
        assert len(channels) - len(aborted) <= said["accepted"] <= len(channels)

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.failures.append(what)

    async def receive_all(
        self, channel: muxkit.Channel, seed: int, sizes: list[int], pauses: list[int]
    ) -> tuple[int, muxkit.ChannelCancelled | None]:
        index = 0
        try:
            async for message in channel:
                expected = message_of(seed, index, sizes[index]) if index < len(sizes) else None
                self.check(message == expected, f"life {seed}: message {index}")
                index += 1
                if index in pauses:
                    await trio.sleep(0.001)
        except muxkit.ChannelCancelled as error:
            return index, error
        return index, None

    async def send_all(self, channel: muxkit.Channel, seed: int, sizes: list[int]) -> None:
        for index, size in enumerate(sizes):
            await channel.send(message_of(seed, index, size))

    async def open_life(self, session: muxkit.Session, plan: Plan) -> None:
        seed, ends = plan["seed"], plan["ends"]
        if ends == "request":
            question = message_of(seed, 0, plan["up"][0])
            self.check(await session.request(question) == question[::-1], f"request {seed}: the response is wrong")
            return
        async with trio.open_nursery() as nursery:
            channel = await session.open("life", payload=json.dumps(plan).encode())
            if ends == "abort":
                await self.send_all(channel, seed, plan["up"][:-1])
                channel.abort(f"broken off {seed}", code=seed)
                return
            if ends == "stop":
                nursery.start_soon(self.receive_one, channel)
            else:
                nursery.start_soon(self.receive_rest, channel, plan)
            await self.send_all(channel, seed, plan["up"])
            await channel.finish()
        await channel.aclose()

    async def receive_one(self, channel: muxkit.Channel) -> None:
        with suppress(trio.EndOfChannel):
            await channel.receive()

    async def receive_rest(self, channel: muxkit.Channel, plan: Plan) -> None:
        outcome = await self.receive_all(channel, plan["seed"] + 1, plan["down"], plan["pauses"])
        self.check(outcome == (len(plan["down"]), None), f"life {plan['seed']}: ended after {outcome}")

    async def accept_life(self, channel: muxkit.Channel) -> None:
        plan = json.loads(channel.opening)
        seed, up, ends = plan["seed"], plan["up"], plan["ends"]
        self.check(channel.name == "life", f"life {seed}: its name is {channel.name}")
        count, error = await self.receive_all(channel, seed, up, plan["pauses"])
        if ends == "abort":
            reason = None if error is None else (error.reason, error.code)
            self.check(reason == (f"broken off {seed}", seed), f"life {seed}: aborted with {reason}")
            self.check(count < len(up), f"life {seed}: all messages came")
            return
        self.check((count, error) == (len(up), None), f"life {seed}: ended after {count} with {error!r}")
        try:
            await self.send_all(channel, seed + 1, plan["down"])
            await channel.finish()
        except muxkit.ChannelStopped:
            self.check(ends == "stop", f"life {seed}: stopped")

    async def answer(self, request: muxkit.IncomingRequest) -> None:
        if request.payload == b"over":
            self._over.set()
        await request.respond(request.payload[::-1])
