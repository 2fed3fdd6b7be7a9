"""Calls cancelled at every step, on both sides: nothing is left, the other side learns it, neighbours get their own."""

from __future__ import annotations

import gc
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import rpc
from muxkit.testing import cancel_sweep
from tests.rpc.orders import Order, Orders, OrdersService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from trio.testing import MockClock

ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
OPEN = muxkit.Limits(resets_per_second=1_000_000, resets_burst=1_000_000)


async def unary(orders: Orders) -> None:
    assert await orders.get(7) == Order(7)


async def failing(orders: Orders) -> None:
    with pytest.raises(rpc.Error, match="not_found"):
        await orders.get(404)


async def server_stream(orders: Orders) -> None:
    async with orders.watch(1, upto=6) as updates:
        assert [order.id async for order in updates] == [1, 2, 3, 4, 5]


async def left_early(orders: Orders) -> None:
    async with orders.watch(1) as updates:
        assert (await updates.__anext__()).id == 1


async def client_stream(orders: Orders) -> None:
    assert await orders.upload(rpc.Stream([Order(1), Order(2), Order(3)])) == 6


async def both_streams(orders: Orders) -> None:
    async with orders.double(rpc.Stream([Order(1), Order(2)])) as doubled:
        assert [order.id async for order in doubled] == [2, 4]


KINDS = [unary, failing, server_stream, left_early, client_stream, both_streams]


@ALL
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_a_call_may_be_cancelled_at_any_step(protocol: str, kind: Callable[[Orders], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Callable[[], Awaitable[None]]]:
        service = OrdersService()
        async with muxkit.open_server(rpc.serve(service), f"{protocol}+mem://sweep", limits=OPEN) as server:
            async with muxkit.connect(server.url, limits=OPEN) as session:
                orders = rpc.client(Orders, session)
                await unary(orders)
                yield partial(kind, orders)
                await kind(orders)
                assert await orders.add("tea", amount=2) == [Order(0), Order(1)]
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert service.running == 0
                assert [*session.channels()] == []
                assert [channel for each in server.sessions() for channel in each.channels()] == []

    assert await cancel_sweep(scenario) > 1


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x"])  # a link of Relink waits for its server
@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5])
async def test_a_server_that_is_cancelled_ends_the_calls_of_its_clients(
    protocol: str, seconds: float, autojump_clock: MockClock
) -> None:
    failed: list[Exception] = []

    async def client(url: str) -> None:
        try:
            async with muxkit.connect(url) as session:
                orders = rpc.client(Orders, session)
                async with orders.watch(1, upto=3) as updates:
                    async for _ in updates:
                        await trio.sleep(1)
                await orders.wait(60)
        except (rpc.Error, muxkit.LinkLost) as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(seconds):
            async with muxkit.open_server(rpc.serve(OrdersService()), f"{protocol}+mem://ended") as server:
                nursery.start_soon(client, server.url)
                await trio.sleep_forever()
        with trio.fail_after(600):
            while not failed:  # noqa: ASYNC110 - of virtual time
                await trio.sleep(1)
    assert len(failed) == 1


@pytest.mark.requirement("R-71")
async def test_a_list_that_is_passed_as_a_stream_is_left_in_order_when_the_call_is_cancelled() -> None:
    """The generator that iterates over the list was never closed, so Python warned about it."""
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://list") as server:
        async with muxkit.connect(server.url) as session:
            with trio.CancelScope() as scope:

                def rows() -> Iterator[Order]:
                    yield Order(1)
                    scope.cancel()
                    yield Order(2)

                await rpc.client(Orders, session).upload(rpc.Stream(rows()))
            assert scope.cancelled_caught
            gc.collect()


@ALL
async def test_results_reach_their_callers_while_others_give_up(protocol: str, autojump_clock: MockClock) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), f"{protocol}+mem://mixed", limits=OPEN) as server:
        async with muxkit.connect(server.url, limits=OPEN) as session:
            orders = rpc.client(Orders, session)
            got: list[int] = []

            async def call(id: int) -> None:
                if id % 3 == 0:
                    with trio.move_on_after(0.001 * id):
                        await orders.wait(60)
                else:
                    order = await orders.get(id)
                    assert order.id == id
                    got.append(id)

            async with trio.open_nursery() as nursery:
                for id in range(300):
                    nursery.start_soon(call, 1000 + id)
            assert len(got) == 200


async def test_calls_that_are_opened_and_given_up_leave_nothing_and_the_neighbours_are_served(
    autojump_clock: MockClock,
) -> None:
    service = OrdersService()
    async with muxkit.open_server(rpc.serve(service), "bpmux+mem://abandoned") as server:
        async with muxkit.connect(server.url) as hostile, muxkit.connect(server.url) as session:
            orders, abandoned = rpc.client(Orders, session), rpc.client(Orders, hostile)
            for _ in range(20):
                async with trio.open_nursery() as nursery:
                    for _ in range(100):
                        nursery.start_soon(abandoned.wait, 3600)
                    await trio.sleep(0.1)
                    with trio.fail_after(10):
                        await unary(orders)
                    nursery.cancel_scope.cancel()
            await trio.sleep(60)
            assert service.running == 0
            assert sum(len(each.channels()) for each in server.sessions()) == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"", "invalid_argument: the stream of the caller has a message that is neither"),
        (b"\7tea", "invalid_argument: the stream of the caller has a message that is neither"),
        (b"\0{", "invalid_argument: invalid item of the stream: invalid message"),
    ],
    ids=repr,
)
async def test_a_caller_that_sends_nonsense_gets_an_error_and_its_neighbours_their_results(
    message: bytes, text: str
) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://nonsense") as server:
        async with muxkit.connect(server.url) as session:
            async with session.open("rpc:Orders.upload", payload=b"{}") as channel:
                await channel.send(message)
                answer = await channel.receive()
                assert answer[:1] == b"\1"
                assert text.partition(": ")[2] in answer.decode()
            await unary(rpc.client(Orders, session))


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", "1e999", ""])
async def test_an_invalid_timeout_is_refused(seconds: str) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://timeout") as server:
        async with muxkit.connect(server.url) as session:
            headers = {"timeout": seconds}
            async with session.open("rpc:Orders.get", payload=b'{"id":7}', headers=headers) as channel:
                assert b"invalid header 'timeout'" in await channel.receive()


@pytest.mark.parametrize("answer", [b"", b"\7", b"\0{", b"\1{", b"\2", None], ids=repr)
async def test_a_server_that_answers_nonsense_is_an_internal_error(answer: bytes | None) -> None:
    async def nonsense(channel: muxkit.Channel) -> None:
        if answer is not None:
            await channel.send(answer)

    async with muxkit.open_server(nonsense, "bpmux+mem://liar") as server, muxkit.connect(server.url) as session:
        with pytest.raises(rpc.Error, match="internal"):
            await rpc.client(Orders, session).get(7)
