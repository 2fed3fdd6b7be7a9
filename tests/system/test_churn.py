"""The short form of tests/soak/churn.py, and hours of virtual time: channels that come and go leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import sys
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from tests.soak import churn

if TYPE_CHECKING:
    from trio.testing import MockClock

HOUR = 3600.0
LEFT = 512 * 1024  # bytes; bounded records of what ended (Relink: of `Limits.channels` ids), and tables that grew
CHANNELS = 5


@pytest.mark.requirement("R-69")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory and files of a process from /proc")
async def test_channels_that_come_and_go_over_tls_leave_no_file_no_warning_and_no_wrong_byte() -> None:
    samples = await churn.run("bpmux", 5.0, 50, seed=1, span=0.5)
    assert churn.complaints(samples, 0.5) == []


@pytest.mark.requirement("R-69")
@pytest.mark.parametrize("hours", [0.06, pytest.param(8.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_hours_of_channels_that_come_and_go_keep_no_memory(
    protocol: str, hours: float, autojump_clock: MockClock
) -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def busy(session: muxkit.Session, seed: int) -> None:
        dice = random.Random(seed)
        while True:
            async with session.open() as channel:
                for _ in range(dice.randrange(4)):
                    message = dice.randbytes(dice.choice((0, 1, 64, 1000, 20_000)))
                    await channel.send(message)
                    assert await channel.receive() == message
                    await trio.sleep(5 * dice.random())
                if dice.random() < 0.2:
                    channel.abort()
            await trio.sleep(5 * dice.random())

    def traced() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    url = f"{protocol}+mem://churn-{os.getpid()}"
    async with trio.open_nursery() as nursery:
        await nursery.start(muxkit.serve, muxkit.each_channel(echo), url)
        async with muxkit.connect(url) as session:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as tasks:
                    for seed in range(CHANNELS):
                        tasks.start_soon(busy, session, seed)
                    await trio.sleep(0.1 * hours * HOUR)
                    tracemalloc.start()
                    await trio.sleep(0.1 * hours * HOUR)  # what lives for long is traced as well from now on
                    before = traced()
                    await trio.sleep(0.8 * hours * HOUR)
                    after = traced()
                    tracemalloc.stop()
                    scope.cancel()
        nursery.cancel_scope.cancel()
    assert after - before < LEFT
