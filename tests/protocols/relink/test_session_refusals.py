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
from muxkit.protocols.relink._connection import MOST_REFUSALS
from muxkit.protocols.relink.dial import listen as listening
from muxkit.runtime import Backoff, background
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, SOON, TRANSACTIONS, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit.protocols.relink import Config

pytestmark = [pytest.mark.requirement("R-51"), pytest.mark.clause("relink-R01", "relink-H30")]

RESUME = b"\x60" + bytes(7)
MESSAGE = bytes.fromhex("11 01 01 00 01 00 00 00 61 00 00 00 00 00 00 00")


@attrs.define(eq=False)
class Refuser:
    """A listener that agrees to every link, writes some packets, and closes the connection."""

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
    assert "connection lost after 0.00 s: mem pair" in str(failures[0])
    assert len([record for record in caplog.records if "brought nothing forward" in record.message]) == 1


async def test_patience_runs_on_while_connections_are_accepted_and_bring_nothing(autojump_clock: MockClock) -> None:
    async with background() as nursery:
        refuser = Refuser(nursery)
        with pytest.raises(LinkLost, match="no connection for 5 s: connection lost after"):
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
                request = relink.handshake.encode_request(QUIET, epoch=known[0], link_id=known[1])
                await here.send_all(request)
                answer = await _exactly(here, 16)
            known = int.from_bytes(answer[:8], "little"), int.from_bytes(answer[8:], "little")
            count += 1
            await trio.testing.wait_all_tasks_blocked()
        assert count == MOST_REFUSALS
        assert trio.current_time() - began > 5
        assert isinstance(ends[0], LinkRefused)
        assert made.listener.links == 0


async def test_a_connection_that_was_made_to_wait_does_not_end_the_one_that_came_after_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as made:

        async def ask(known: tuple[int, int]) -> trio.abc.Stream:
            here, there = memory.pair()
            made.nursery.start_soon(made.listener.handle, there)
            await here.send_all(bytes(8))
            await _exactly(here, 8)
            await here.send_all(relink.handshake.encode_request(QUIET, epoch=known[0], link_id=known[1]))
            return here

        known, answer = (0, 0), b""
        for _ in range(3):
            async with await ask(known) as stream:
                answer = await _exactly(stream, 16)
                known = int.from_bytes(answer[:8], "little"), int.from_bytes(answer[8:], "little")
            await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(listening, "RETURNS", Backoff(least=3.0, first=3.0, most=3.0))
        async with await ask(known) as first:
            await trio.testing.wait_all_tasks_blocked()
            monkeypatch.setattr(listening, "RETURNS", Backoff(most=0.0))
            async with await ask(known) as second:
                assert await _exactly(second, 16 + 8) == answer + RESUME
                with trio.move_on_after(10) as scope:
                    await second.receive_some()
                assert scope.cancelled_caught
                assert await first.receive_some() == b""


async def test_the_end_of_a_channel_is_progress(autojump_clock: MockClock) -> None:
    """A peer that closes a channel on each connection, and gets nothing else done, does not refuse."""
    channels = MOST_REFUSALS + 5
    async with background() as nursery:
        refuser = Refuser(nursery)
        opened = b"".join(MESSAGE[:2] + bytes((number, 0)) + MESSAGE[4:] for number in range(channels))
        async with relink.link(refuser.dial, config=QUIET, backoff=SOON) as link:
            refuser.serves, refuser.holds = opened, 2.0
            while len(connection_of(link).link.state.theirs.live) < channels:
                await connection_of(link).moved.park()
            refuser.holds = 0.0
            for number in range(channels):
                refuser.serves = b"\x41" + bytes((0, number, 0)) + bytes(4)
                while not connection_of(link).link.state.theirs.live[number].ended:
                    await connection_of(link).moved.park()
            assert connection_of(link).error is None
            connection_of(link).end_because("the test is over", by="local")


@pytest.mark.parametrize("config", [QUIET, TRANSACTIONS], ids=["unread", "not decided"])
async def test_a_message_that_the_application_is_not_told_of_is_progress(
    autojump_clock: MockClock, config: Config
) -> None:
    """It waits behind others that no task has taken, or for the peer's decision."""
    async with background() as nursery:
        refuser = Refuser(nursery, serves=MESSAGE)
        async with relink.link(refuser.dial, config=config, backoff=SOON) as link:
            while len(refuser.at) < 2 * MOST_REFUSALS:
                await link.connected()
                connection_of(link).raise_if_over()
                await trio.sleep(0.05)
            connection_of(link).end_because("the test is over", by="local")


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
                        await connection_of(one).moved.park()
            assert one.connections > 2 * MOST_REFUSALS
            made.let_go()
