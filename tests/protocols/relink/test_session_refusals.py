"""A peer that ends each connection as soon as the link goes on is met with pauses, a bound, and one clear error."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.protocols import relink
from muxkit.protocols.relink import Link, LinkRefused
from muxkit.protocols.relink._session_core import MOST_REFUSALS
from muxkit.runtime import Backoff, background
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, SOON, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

pytestmark = [pytest.mark.requirement("R-51"), pytest.mark.clause("relink-R01", "relink-H30")]

RESUME = b"\x60" + bytes(7)
MESSAGE = bytes.fromhex("11 01 01 00 01 00 00 00 61 00 00 00 00 00 00 00")


@attrs.define(eq=False)
class Refuser:
    """A plain listener that agrees to every link and hangs up when it has said its part."""

    nursery: trio.Nursery
    serves: bytes = b""
    """Sent behind the other side's resume."""
    holds: float = 0.0
    at: list[float] = attrs.field(factory=list)

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        self.at.append(trio.current_time())
        here, there = memory.pair()
        self.nursery.start_soon(self.serve, there)
        async with here:
            yield here

    async def serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            await _exactly(stream, 8)
            await stream.send_all(bytes(8))
            await _exactly(stream, 24)
            await stream.send_all((7).to_bytes(8, "little") + (5).to_bytes(8, "little"))
            if len(self.at) > 1:
                await stream.send_all(RESUME)
                if self.serves:
                    while await _exactly(stream, 8) != RESUME:
                        pass
                    await stream.send_all(self.serves)
            await trio.sleep(self.holds)


async def _exactly(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise ConnectionError("the other side hung up")
        data += bytes(more)
    return data


async def send_one(refuser: Refuser, **options: Any) -> None:
    async with relink.link(refuser.dial, config=QUIET, **options) as link, link.sender(1) as sender:
        await (await sender.send(b"x")).consumed()


async def test_a_listener_that_ends_every_connection_at_once_ends_the_link(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "muxkit")
    failures: list[Exception] = []
    async with background() as nursery:
        refuser = Refuser(nursery)
        with pytest.raises(LinkRefused, match="50 connections in a row were ended at once") as caught:
            await send_one(refuser, on_failed=lambda error, _: failures.append(error))
    assert caught.value.connections == len(refuser.at) == MOST_REFUSALS
    assert isinstance(caught.value.__cause__, LinkLost)
    assert refuser.at[-1] - refuser.at[0] > 20
    assert "the connection was lost 0.00 s after it began: mem pair" in str(failures[0])
    assert len([record for record in caplog.records if "brought nothing forward" in record.message]) == 1


async def test_patience_runs_on_while_connections_are_accepted_and_bring_nothing(autojump_clock: MockClock) -> None:
    async with background() as nursery:
        refuser = Refuser(nursery)
        with pytest.raises(LinkLost, match="no connection for 5 s: the connection was lost"):
            await send_one(refuser, backoff=Backoff(most=2.0), patience=5.0)
        assert trio.current_time() == pytest.approx(5.0, abs=2.1)


async def test_a_listener_that_serves_a_little_each_time_is_not_dialled_without_a_pause(
    autojump_clock: MockClock,
) -> None:
    async with background() as nursery:
        refuser = Refuser(nursery, serves=MESSAGE)
        with trio.move_on_after(30):
            async with relink.link(refuser.dial, config=QUIET, backoff=Backoff()) as link:
                async for receiver in link.receivers():
                    async for _ in receiver:
                        pass
    assert len(refuser.at) < 1500


async def test_a_connection_that_is_held_is_no_refusal(autojump_clock: MockClock) -> None:
    async with background() as nursery:
        refuser = Refuser(nursery, holds=2.0)
        with trio.move_on_after(200):
            async with relink.link(refuser.dial, config=QUIET, backoff=Backoff()) as link:
                await link.sender(1).send(b"x")
                await trio.sleep_forever()
    assert len(refuser.at) > MOST_REFUSALS


async def test_a_connector_that_hangs_up_at_once_is_answered_later_each_time_and_then_not_known(
    autojump_clock: MockClock,
) -> None:
    """The listener's side: thousands of resumptions in half a minute end in one error, which the handler gets."""
    ends: list[BaseException] = []

    async def handle(link: Link) -> None:
        try:
            async with link.receiver(1) as receiver:
                await receiver.receive()
        except LinkLost as error:
            ends.append(error)
            raise

    async with world(handler=handle) as made:
        known, count, began = (0, 0), 0, trio.current_time()
        while not ends:
            here, there = memory.pair()
            made.nursery.start_soon(made.listener.handle, there)
            async with here:
                await here.send_all(bytes(8))
                await _exactly(here, 8)
                request = relink.encode_request(QUIET, epoch=known[0], link_id=known[1])
                await here.send_all(request)
                answer = await _exactly(here, 16)
            known = int.from_bytes(answer[:8], "little"), int.from_bytes(answer[8:], "little")
            count += 1
            await trio.testing.wait_all_tasks_blocked()
        assert count == MOST_REFUSALS
        assert trio.current_time() - began > 5
        assert isinstance(ends[0], LinkRefused)
        assert made.listener.links == 0


async def test_what_works_again_wipes_out_the_refusals_before(autojump_clock: MockClock) -> None:
    async with world() as made:
        async with made.link(backoff=SOON) as one, one.sender(1) as sender:
            other = await made.other()
            async with other.receiver(1) as receiver:
                for number in range(120):
                    if number % 30 == 0:
                        receipt = await sender.send(b"x")
                        (await receiver.receive()).consume()
                        await receipt.consumed()
                    await made.cut()
                    while one.connections < number + 2:
                        await one.core.moved.park()
            assert one.connections > 2 * MOST_REFUSALS
            made.let_go()
