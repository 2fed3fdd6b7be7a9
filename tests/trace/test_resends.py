"""A trace tells what was sent once more, after cuts and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit.testing import SimNetwork, SimWeather
from muxkit.trace import Summary, Trace, read, summary

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

MESSAGES = [b"%d" % number for number in range(20)]


def summary_of_client(folder: Path) -> Summary:
    [file] = [path for path in folder.iterdir() if "-client-" in path.name]
    return summary(read(file))


@pytest.mark.parametrize("cuts", [1, 2])
async def test_relink_sends_again_what_a_cut_took_away(cuts: int, tmp_path: Path, autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    async def collect(channel: muxkit.Channel) -> None:
        got.extend([message async for message in channel])

    with SimNetwork(seed=1) as network:
        network.delay(0.1)
        async with muxkit.open_server(collect, "relink+sim://jobs/e") as server:
            async with muxkit.connect(server.url, observer=Trace(tmp_path)) as session, session.open() as channel:
                await session.ping()
                for message in MESSAGES:
                    await channel.send(message)
                for _ in range(cuts):
                    await trio.sleep(0.01)  # all of them are under way: the network is slower
                    assert network.cut() == 1
                    await session.ping()
    assert got == MESSAGES
    assert summary_of_client(tmp_path).channels["out 0"].resends == len(MESSAGES)  # the second cut loses nothing


async def test_e3x_sends_again_what_was_lost(tmp_path: Path, autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    async def collect(channel: muxkit.Channel) -> None:
        got.extend([message async for message in channel])

    with SimNetwork(seed=1, weather=SimWeather(loss=0.3)):
        async with muxkit.open_server(collect, "e3x+sim://jobs") as server:
            async with muxkit.connect(server.url, observer=Trace(tmp_path)) as session, session.open("a") as channel:
                for message in MESSAGES:
                    await channel.send(message)
    assert got == MESSAGES
    found = summary_of_client(tmp_path)
    assert sum(one.resends for one in found.channels.values()) > 0
    assert "sent data again" in found.frames
