"""A program that takes a URL, tried on a simulated bad network: minutes of it pass in a moment.

`python examples/simulated_network.py` runs `follow`, which knows nothing of the simulation, against a server that is
half a second away, over connections that are cut again and again.
"""

from contextlib import suppress

import trio
import trio.testing

import muxkit
from muxkit.testing import ChaosPlan, Way, chaos_url

LAST = 99


async def follow(url: str) -> list[int]:
    """The program: collect numbers, and go on behind the last one whenever the connection is lost."""
    numbers: list[int] = []
    async with muxkit.reconnecting(url) as sessions:
        async for session in sessions:
            with suppress(muxkit.LinkLost):
                async with session.open(str(len(numbers))) as channel:
                    async for message in channel:
                        number = int(message)
                        numbers.append(number)
                break
    return numbers


async def count(channel: muxkit.Channel) -> None:
    """The server: one number a second, from the one that the channel is named after."""
    for number in range(int(channel.name), LAST + 1):
        await channel.send(str(number).encode())
        await trio.sleep(1)


async def main() -> None:
    weather = ChaosPlan(delay=0.5, jitter=0.2, cut_after=(0, 300), cut_ways=(Way.BACK,))
    async with muxkit.open_server(count, "bpmux+mem://numbers") as server:
        async with chaos_url(server.url, weather, seed=17) as network:
            numbers = await follow(network.url)
    print(f"all numbers, in order: {numbers == [*range(LAST + 1)]}")
    print(f"{network.cuts} connections were cut in {trio.current_time():.0f} s")


if __name__ == "__main__":
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
