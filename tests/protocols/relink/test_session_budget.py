"""When very many channels share the budget of a link, each sender waits its turn and none gets an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits
from tests.protocols.relink._session_world import QUIET, TRANSACTIONS, both

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.relink import Config

TIGHT = Limits(connection_bytes=20_000, channel_bytes=10_000, channel_floor=100, message=4000, reassembly=4000)
CHANNELS, COUNT = 40, 12


@pytest.mark.requirement("R-07", "R-08")
@pytest.mark.parametrize("config", [QUIET, TRANSACTIONS], ids=["plain", "transactions"])
async def test_common_channels_share_a_budget_that_is_too_small_for_all(
    config: Config, autojump_clock: MockClock
) -> None:
    async with both(config, limits=TIGHT) as pair, trio.open_nursery() as nursery:
        came = 0

        async def send(size: int) -> None:
            async with pair.one.open() as channel:
                for _ in range(COUNT):
                    await channel.send(bytes(size))

        async def receive() -> None:
            nonlocal came
            async with trio.open_nursery() as readers:
                incoming = aiter(pair.other.incoming())
                for _ in range(CHANNELS):
                    readers.start_soon(read, await anext(incoming))

        async def read(channel: trio.abc.ReceiveChannel[bytes]) -> None:
            nonlocal came
            async for _ in channel:
                came += 1
                await trio.sleep(0.001)

        nursery.start_soon(receive)
        for number in range(CHANNELS):
            nursery.start_soon(send, 300 + 90 * number)
    assert came == CHANNELS * COUNT


@pytest.mark.requirement("R-07", "R-08")
async def test_senders_share_a_budget_that_is_too_small_for_all(autojump_clock: MockClock) -> None:
    async with both(QUIET, limits=TIGHT) as pair, trio.open_nursery() as nursery:
        came: list[bytes] = []

        async def send(channel: int) -> None:
            async with pair.one.sender(channel) as sender:
                for number in range(COUNT):
                    await sender.send(b"%d" % number, bytes(300 + 90 * channel))

        async def read(channel: int) -> None:
            async with pair.other.receiver(channel) as receiver:
                async for message in receiver:
                    came.append(message.parts[0])
                    await trio.sleep(0.001)

        for channel in range(CHANNELS):
            nursery.start_soon(read, channel)
            nursery.start_soon(send, channel)
    assert len(came) == CHANNELS * COUNT
