"""Two tasks of one process get a link in memory that is bounded like a real one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.testing._links import MakePair, check_link
from muxkit_adapters import memory
from muxkit_adapters.memory import MemoryStream

from ._links import echo, flood, paired, park, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

Pair = tuple[MemoryStream, MemoryStream]


@asynccontextmanager
async def plain_pair() -> AsyncIterator[Pair]:
    yield memory.pair()


@asynccontextmanager
async def tiny_pair() -> AsyncIterator[Pair]:
    yield memory.pair(capacity=1000)


@asynccontextmanager
async def named_pair() -> AsyncIterator[Pair]:
    async with paired(memory.serve, memory.transport.connect, "orders") as streams:
        yield streams


async def made_pair() -> Pair:
    return memory.pair(capacity=1000)


async def clogged_pair() -> Pair:
    one, other = memory.pair(capacity=1000)
    one.send_nowait([bytes(1000)])
    other.send_nowait([bytes(1000)])
    return one, other


@pytest.mark.parametrize("make_pair", [plain_pair, tiny_pair, named_pair])
async def test_a_memory_pair_is_a_link(make_pair: MakePair) -> None:
    await check_link(make_pair, half_close=True)


async def test_a_memory_stream_passes_trios_own_checks() -> None:
    await trio.testing.check_half_closeable_stream(made_pair, clogged_pair)


async def test_no_more_than_the_capacity_is_under_way() -> None:
    one, other = memory.pair(capacity=100)
    assert one.send_nowait([bytes(60), bytes(60)]) == 100
    assert one.send_nowait([b"x"]) == 0
    assert len(await other.receive_some()) == 100


async def test_a_name_that_nobody_serves_refuses_like_a_closed_port() -> None:
    with pytest.raises(ConnectionRefusedError, match=r"mem nowhere: connection refused \(no listener of this process"):
        async with memory.connect("nowhere"):
            pass


async def test_a_name_can_be_served_once_at_a_time_and_again_afterwards() -> None:
    async with serving(memory.serve, echo, "orders") as addresses:
        assert addresses == ["orders"]
        with pytest.raises(OSError, match="served already"):
            await memory.serve(echo, "orders")
    async with serving(memory.serve, echo, "orders"), memory.connect("orders") as stream:
        await stream.send_all(b"again")
        assert await stream.receive_some() == b"again"


async def test_the_stream_ends_when_the_server_stops() -> None:
    async with trio.open_nursery() as nursery:
        async with serving(memory.serve, park, "busy", limits=Limits(connections=1)):
            served = await nursery.start(_hold, "busy")
            queued = await nursery.start(_hold, "busy")
        assert await served.receive_some() == b""
        assert await queued.receive_some() == b""
        nursery.cancel_scope.cancel()


async def test_an_empty_name_is_refused_with_the_form_that_is_expected() -> None:
    with pytest.raises(ValueError, match="expected a name"):
        memory.transport.connect("")


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("behaviour", ["stalls", "floods", "hangs up"])
async def test_close_is_quick_whatever_the_peer_does(behaviour: str, autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with trio.open_nursery() as nursery:
        if behaviour == "stalls":
            here.send_nowait([bytes(1_000_000)])
        elif behaviour == "floods":
            nursery.start_soon(flood, there)
        else:
            await there.aclose()
        with trio.fail_after(0.5):
            await here.aclose()
            await here.aclose()


async def _hold(name: str, task_status: trio.TaskStatus[MemoryStream]) -> None:
    async with memory.connect(name) as stream:
        task_status.started(stream)
        await trio.sleep_forever()
