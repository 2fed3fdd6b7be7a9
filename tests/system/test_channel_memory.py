"""What all channels that a peer may open cost a server: no more than `Limits.channel_memory`, handlers included."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio

import muxkit

PAGE = 4096
LIMITS = muxkit.Limits(channel_memory=8 * 1024 * 1024)  # a quarter of the default, for the time it takes
WARM = 100  # channels after which nothing is imported or made for the first time
WAIT = 3.0  # s without a place for another channel, after which there is none; on a slow machine fewer are opened


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def server(protocol: str) -> None:
    """Tell the URL, then the resident memory after each line that comes."""
    async with trio.open_nursery() as nursery:
        serve = partial(muxkit.serve, muxkit.each_channel(echo), f"{protocol}+tcp://127.0.0.1:0", limits=LIMITS)
        served = await nursery.start(serve)
        print(json.dumps(served.url), flush=True)

        def answer() -> None:
            for _ in sys.stdin:
                gc.collect()
                print(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE, flush=True)

        await trio.to_thread.run_sync(answer)
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-01", "R-03")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident memory from /proc")
@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_the_channels_that_a_peer_may_open_cost_no_more_than_the_limit(protocol: str) -> None:
    """Was: Within the default limits a peer could make a server hold 75 to 220 MiB by opening channels: 4.6 to 14.6 KB
    each in bpmux, Relink and Aqueduct.
    """
    command = [sys.executable, __file__, protocol]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220  # its answers come at once
        assert process.stdin is not None
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())

        def resident() -> int:
            print(file=process.stdin, flush=True)
            return int(process.stdout.readline()) if process.stdout is not None else 0

        with trio.CancelScope() as scope:
            async with muxkit.connect(url, limits=LIMITS) as session, AsyncExitStack() as channels:
                before = opened = 0
                while True:
                    if opened == WARM:
                        before = await trio.to_thread.run_sync(resident)
                    with trio.move_on_after(WAIT) as waiting:
                        channel = await channels.enter_async_context(session.open())
                    if waiting.cancelled_caught:  # this end waits too, since it has the same limits
                        break
                    await channel.send(b"x")
                    assert await channel.receive() == b"x"
                    opened += 1
                grown = await trio.to_thread.run_sync(resident) - before
                scope.cancel()
        process.kill()
    assert opened > 250
    cost = grown / (opened - WARM)
    assert cost * opened <= LIMITS.channel_memory, f"{opened} channels cost {cost:,.0f} bytes each"


if __name__ == "__main__":
    trio.run(server, sys.argv[1])
