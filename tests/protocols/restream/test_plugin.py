"""`muxkit.connect` refuses a protocol without channels with a hint."""

import pytest
import trio

import muxkit
from muxkit.protocols import restream
from muxkit.runtime import Unsupported


async def test_whoever_asks_for_channels_is_told_whom_to_ask_instead() -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(restream.serve, "restream+mem://no-channels", store)
        with pytest.raises(Unsupported, match=r"restream has no channels: use restream\.serve"):
            async with muxkit.connect(served.url):
                pytest.fail("it gave a session")
        nursery.cancel_scope.cancel()
