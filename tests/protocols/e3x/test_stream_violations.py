"""Illegal packets on a session over a byte stream end nothing and are counted, also in the read that ends it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from muxkit.protocols import e3x
from muxkit.protocols.e3x import encode_chunks
from muxkit_adapters import memory


@pytest.mark.requirement("R-21")
async def test_a_malformed_packet_in_the_read_that_ends_the_stream_is_counted() -> None:
    here, there = memory.pair()
    await there.send_all(encode_chunks(b"\x00\x09no object"))
    await there.send_eof()
    async with e3x.session(here, role="connector") as session:
        await trio.testing.wait_all_tasks_blocked()
        assert session.stats().faults == {"malformed": 1}
