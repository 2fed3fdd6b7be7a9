"""Clients that read slowly or request a lot: bounded memory, bounded turns, fair shares."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream.server.service import BATCH, HIGH_WATER
from muxkit.protocols.restream.server.sessions import MAX_MADE_IN_LOOP, MakeQuota
from muxkit.protocols.restream.store import Message, open_store
from tests.protocols.restream._server_clients import U1, begin, place

if TYPE_CHECKING:
    from trio.testing import MockClock

KIB = 1024
LINE = 60  # bytes, at most, of a message of numbers


class Blobs:
    """An application with messages of one size, without end."""

    generates = True

    def __init__(self, size: int) -> None:
        self.data = "x" * size

    def initial(self, params: object, random32: int) -> int:
        return 0

    def step(self, state: int) -> tuple[str, int]:
        return self.data, state + 1

    def is_over(self, state: int) -> bool:
        return False

    def is_final(self, data: object) -> bool:
        return False


@pytest.mark.clause("restream-A04")
@pytest.mark.requirement("R-08")
async def test_no_more_is_made_than_the_link_and_the_outbox_hold(autojump_clock: MockClock) -> None:
    async with place() as there:
        client = await there.ask(begin(65_535), capacity=1000)
        await client.hear_ids(3)
        await trio.sleep(3600.0)
        made = (await there.store.status(U1)).head
        assert made * 40 <= 1000 + 2 * HIGH_WATER + BATCH * LINE
        assert await client.hear_ids(2 * made) == list(range(4, 2 * made + 4))


@pytest.mark.requirement("R-08")
async def test_the_outbox_limit_of_a_connection_is_kept(autojump_clock: MockClock) -> None:
    async with place(limits=Limits(outbox=1000)) as there:
        client = await there.ask(begin(65_535), capacity=100)
        await client.hear_ids(3)
        await trio.sleep(1.0)
        assert (await there.store.status(U1)).head < 120


@pytest.mark.requirement("R-03")
@pytest.mark.parametrize("kind", ["stateless", "small", "large", "replay"])
async def test_a_client_that_does_not_read_costs_a_bounded_amount(kind: str, autojump_clock: MockClock) -> None:
    application = Blobs(20 if kind == "small" else 20 * KIB)
    clients = 5  # each with an outbox, and as many bytes that the transport has not taken
    forgetful = Silent() if kind in ("small", "large") else None
    async with place(forgetful, application=application) as there:
        if kind == "replay":
            await there.store.register(U1, 0, params={"count": 5}, attached=False)
            await there.store.append_many(U1, ["x" * 20 * KIB] * 500)
            clients = 1
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        waiting = []
        for number in range(clients):
            uuid = U1 if kind == "replay" else f"bf575c35-c25b-4386-8430-{number:012d}"
            waiting.append(await there.ask({} if kind == "stateless" else begin(5, uuid), capacity=1000))
        await trio.sleep(10.0)
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / clients
        tracemalloc.stop()
        assert there.service.connections == clients
        assert each < 300 * KIB, f"{each / KIB:.0f} KiB"
        assert waiting


class Silent:
    """Sessions that store nothing, so that only the server's memory is counted."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.last: dict[str, int] = {}

    async def register(self, uuid: str, state: Any) -> None:  # noqa: ANN401
        self.states[uuid] = state

    async def disconnect(self, uuid: str) -> None: ...
    async def ack(self, uuid: str, id: int) -> None: ...

    async def after(self, uuid: str, id: int) -> None:
        self.last[uuid] = id

    async def put(self, uuid: str, transform: Any) -> Any:  # noqa: ANN401
        await trio.lowlevel.checkpoint()
        return Message(self.last[uuid] + 1, transform(self.states[uuid])[0])


@pytest.mark.requirement("R-27")
async def test_a_stream_at_full_speed_leaves_the_others_their_turns(autojump_clock: MockClock) -> None:
    async with place() as there:
        busy = [await there.ask({}), await there.ask(begin(65_535))]
        turns = 0

        async def read_all(number: int) -> None:
            while True:
                await busy[number].line()

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            await busy[1].hear()
            nursery.start_soon(read_all, 0)
            nursery.start_soon(read_all, 1)
            nursery.start_soon(count)
            while (await there.store.sessions())[0].head < 2000:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert turns > 2000 / MAX_MADE_IN_LOOP


@pytest.mark.requirement("R-60")
async def test_a_store_in_the_loop_makes_few_messages_a_turn_however_many_ask(autojump_clock: MockClock) -> None:
    made_in_turn: list[int] = []
    made = 0

    class Counted(restream.Numbers):
        def step(self, state: Any) -> Any:  # noqa: ANN401
            nonlocal made
            made += 1
            return super().step(state)

    class Turn(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            nonlocal made
            made_in_turn.append(made)
            made = 0

    async with place(application=Counted()) as there:
        await (await there.ask(begin(1))).rest()
        trio.lowlevel.add_instrument(Turn())
        for number in range(20):
            await there.ask(begin(500, f"bf575c35-c25b-4386-8430-{number:012d}"))
        await wait_all_tasks_blocked()
    assert sum(made_in_turn) == 10_001
    assert max(made_in_turn) <= 2 * MAX_MADE_IN_LOOP


async def test_turns_are_given_in_the_order_in_which_they_are_asked_for(autojump_clock: MockClock) -> None:
    turns, order = MakeQuota(100), []

    async def ask(name: str, most: int) -> None:
        count = await turns.borrow(most)
        order.append((name, count, trio.current_time()))
        await trio.sleep(1.0)
        turns.give_back(count)

    async with trio.open_nursery() as nursery:
        for name, most in (("a", 60), ("b", 60), ("c", 10), ("d", 500)):
            nursery.start_soon(ask, name, most)
            await wait_all_tasks_blocked()
    assert order == [("a", 60, 0.0), ("b", 60, 1.0), ("c", 10, 1.0), ("d", 100, 2.0)]


@pytest.mark.requirement("R-31")
async def test_whoever_gives_up_waiting_for_a_turn_holds_nobody_up(autojump_clock: MockClock) -> None:
    turns = MakeQuota(10)
    lent = await turns.borrow(10)
    with trio.move_on_after(1.0):
        await turns.borrow(1)
        raise AssertionError("there was no room")
    turns.give_back(lent)
    with trio.fail_after(1.0):
        assert await turns.borrow(10) == 10


@pytest.mark.requirement("R-60")
async def test_many_messages_are_made_durable_at_once(tmp_path: object) -> None:
    async with open_store(f"sqlite:{tmp_path}/sessions.db") as store:
        calls, real = [], store.put_many

        async def put_many(uuid: str, transform: Any, most: int, **options: Any) -> Any:  # noqa: ANN401
            made = await real(uuid, transform, most, **options)
            calls.append(len(made))
            return made

        store.put_many = put_many  # type: ignore[assignment, method-assign]
        async with place(store) as there:
            assert len(await (await there.ask(begin(2000))).rest()) == 2000
        assert len(calls) < 2000 / BATCH + 5
