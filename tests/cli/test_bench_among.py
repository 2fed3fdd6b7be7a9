"""One channel is measured among open ones, which are counted with all that keeps them open."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit_bench.bench_work import Conversation, Server
from muxkit_bench.bench_work.idling import idle
from muxkit_bench.bench_work.meter import Meter
from muxkit_bench.bench_work.orders import MAGIC, Wrong
from muxkit_bench.bench_work.streaming import among
from muxkit_bench.contestants.contestant import raw
from muxkit_bench.run.cells import EXPLAINED, cells
from tests.cli.test_bench_work import Inside, a_task, session

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = 30


class Watched(Inside):
    """Counts what is sent on each channel, in the order of opening, and hears of each that is closed."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery, Server(), lambda data: data)
        self.opened: list[Conversation] = []
        self.sent: list[int] = []
        self.events: list[tuple[int, int]] = []
        """How many channels there were, and on which of them something was sent."""
        self.closed: list[Conversation] = []

    async def open(self) -> Conversation:
        conversation = await super().open()
        number, send_it = len(self.opened), conversation.send
        self.opened.append(conversation)
        self.sent.append(0)

        async def send(data: bytes) -> None:
            self.sent[number] += 1
            self.events.append((len(self.opened), number))
            await send_it(data)

        conversation.send = send
        return conversation

    async def close(self, conversation: Conversation) -> None:
        self.closed.append(conversation)
        await super().close(conversation)


@pytest.mark.parametrize(("size", "unit"), [(64, 1.0), (65_536, 1 / 16)])
async def test_one_channel_works_while_the_others_stay_open_after_an_echo_on_each(size: int, unit: float) -> None:
    async with trio.open_nursery() as nursery:
        connection = Watched(nursery)
        meter = Meter(await connection.open())
        measured = await among(connection, meter, a_task("among", channels=OTHERS, size=size))
        nursery.cancel_scope.cancel()
    assert measured["units"] == measured["count"] * unit
    others, busy = connection.sent[1:-1], connection.sent[-1]
    assert others == [1] * OTHERS
    assert busy > measured["count"]  # the warm-up and its orders as well
    first = connection.events.index((OTHERS + 2, OTHERS + 1))
    echoed = {number for _, number in connection.events[:first]} - {0}
    assert echoed == {*range(1, OTHERS + 1)}  # before the busy one is opened
    assert connection.closed == connection.opened[:0:-1]  # none before the end


async def test_an_echo_that_is_another_is_noticed_although_its_channel_is_only_to_stay_open() -> None:
    spoiled: list[bytes] = []

    def the_first(data: bytes) -> bytes:
        if data.startswith(MAGIC) or spoiled:
            return data
        spoiled.append(data)
        return bytes(len(data))

    async with trio.open_nursery() as nursery:
        connection = Inside(nursery, Server(), the_first)
        meter = Meter(await connection.open())
        with pytest.raises(Wrong, match="the echo on channel 0 of 30 is not what was sent"):
            await among(connection, meter, a_task("among", channels=OTHERS))
        nursery.cancel_scope.cancel()


def test_among_has_a_cell_for_each_size_and_number_of_others_and_few_in_a_quick_run() -> None:
    keys = {cell.key for cell in cells(("among",))}
    assert keys == {f"among {size}/{number}" for size in ("64 B", "64 KiB") for number in (100, 1000, 10_000)}
    assert max(cell.channels for cell in cells(("among",), is_quick=True)) <= 100


def test_raw_connections_stop_at_a_thousand_others_and_the_job_says_so(tmp_path: Path) -> None:
    plain, coalesced = raw("tcp", tmp_path)
    taking_part = {cell.channels for cell in cells(("among",)) if plain.takes_part(cell)}
    assert taking_part == {100, 1000}
    assert not any(coalesced.takes_part(cell) for cell in cells(("among",)))
    assert "up to 1,000" in EXPLAINED["among"]


# ---------------------------------------------------------------------------- idle channels


class Silent(Inside):
    """The server does not hear of a channel before something is sent, and nothing is."""

    async def open_to_keep(self) -> object:
        await trio.lowlevel.checkpoint()
        return object()


async def test_channels_that_the_server_never_hears_of_are_told_of_and_not_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        connection = Silent(nursery, Server(holding=True), lambda data: data)
        meter = Meter(await connection.open())
        with pytest.raises(Wrong, match="after 50 s 64 of 64 channels are open, and the server knows 0"):
            await idle(connection, meter, a_task("idle", channels=100))
        nursery.cancel_scope.cancel()


async def test_the_block_that_opened_an_idle_channel_is_counted_with_it() -> None:
    async with session() as (connection, _):
        kept = await connection.open_to_keep()
        assert isinstance(kept, AbstractAsyncContextManager)
        assert not isinstance(kept, muxkit.Channel)
        await kept.__aexit__(None, None, None)
