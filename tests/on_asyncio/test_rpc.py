"""The same services from asyncio: calls, streams, errors and cancellation on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio

import muxkit
import muxkit.asyncio
from muxkit.asyncio import rpc
from tests.on_asyncio.loops import LOOPS, run
from tests.rpc.orders import Order, Orders, OutOfStock

pytestmark = pytest.mark.parametrize("loop", LOOPS)

Loop = Callable[[], asyncio.AbstractEventLoop]
URL = "bpmux+tcp://127.0.0.1:0"


class AsyncioOrders(Orders):
    """The service, in asyncio."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.something_ended = asyncio.Event()

    def _note(self, what: str) -> None:
        self.ended.append(what)
        self.something_ended.set()

    async def get(self, id: int) -> Order:
        await asyncio.sleep(0)
        if id == 410:
            raise OutOfStock("tea", 3)
        return Order(id)

    async def add(self, item: str, *, amount: int = 1, notes: list[str] | None = None) -> list[Order]:
        return [Order(number, item) for number in range(amount)]

    async def wait(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._note("wait cancelled")
            raise
        return "done"

    @rpc.stream
    async def watch(self, since: int, upto: int = 1_000_000) -> AsyncIterator[Order]:
        try:
            for id in range(since, upto):
                await asyncio.sleep(0)
                yield Order(id)
        finally:
            self._note("watch")

    async def upload(self, rows: rpc.Stream[Order], factor: int = 1) -> int:
        return factor * sum([row.id async for row in rows])

    @rpc.stream
    async def double(self, rows: AsyncIterator[Order]) -> AsyncIterator[Order]:  # type: ignore[override]
        async for row in rows:
            yield Order(2 * row.id)


def test_calls_errors_and_streams_work_from_asyncio_to_asyncio(loop: Loop) -> None:
    async def main() -> None:
        service = AsyncioOrders()
        async with muxkit.asyncio.open_server(rpc.serve(service), URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                orders = rpc.client(Orders, session)
                assert await orders.get(7) == Order(7)
                assert len(await orders.add("tea", amount=3)) == 3
                with pytest.raises(OutOfStock):
                    await orders.get(410)
                async with orders.watch(1, upto=4) as updates:
                    assert [order.id async for order in updates] == [1, 2, 3]
                assert await orders.upload(rpc.Stream([Order(1), Order(2)]), factor=2) == 6

                @rpc.stream
                async def rows() -> AsyncIterator[Order]:
                    for id in range(3):
                        await asyncio.sleep(0)
                        yield Order(id)

                async with orders.double(rows()) as doubled:
                    assert [order.id async for order in doubled] == [0, 2, 4]

    run(loop, main)


def test_a_cancelled_task_and_a_stream_that_is_left_stop_their_handlers(loop: Loop) -> None:
    async def main() -> None:
        service = AsyncioOrders()
        async with muxkit.asyncio.open_server(rpc.serve(service), URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                orders = rpc.client(Orders, session)
                call = asyncio.create_task(orders.wait(3600))
                await asyncio.sleep(0.1)
                call.cancel()
                await service.something_ended.wait()
                assert service.ended == ["wait cancelled"]
                service.something_ended.clear()
                async with orders.watch(1) as updates:
                    async for order in updates:
                        if order.id > 5:
                            break
                await service.something_ended.wait()
                assert service.ended == ["wait cancelled", "watch"]
                assert await orders.get(7) == Order(7)

    run(loop, main)


def test_a_client_of_a_url_works_from_asyncio(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(rpc.serve(AsyncioOrders()), URL) as server:
            async with rpc.connect(Orders, server.url) as orders:
                assert await orders.get(7) == Order(7)

    run(loop, main)


ONLY_ALICE = muxkit.tokens({"the-right-token": "alice"})
PATIENCE = 60.0


async def sleep(orders: Orders) -> None:
    """Wait for something that has nothing to do with the client."""
    await asyncio.sleep(3600)


async def sleep_with_a_limit(orders: Orders) -> None:
    async with asyncio.timeout(1800):
        await asyncio.sleep(3600)


async def sleep_in_a_group(orders: Orders) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(3600))


async def call(orders: Orders) -> None:
    await orders.get(7)


@pytest.mark.parametrize("body", [sleep, sleep_with_a_limit, sleep_in_a_group, call])
def test_a_block_ends_with_the_failure_of_its_client(loop: Loop, body: Callable[[Orders], Awaitable[None]]) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(rpc.serve(AsyncioOrders()), URL, authorize=ONLY_ALICE) as server:
            task = asyncio.current_task()
            assert task is not None
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(muxkit.Refused):
                    async with rpc.connect(Orders, server.url, token="wrong") as orders:
                        await body(orders)
                assert task.cancelling() == 0  # the request that ended the body is withdrawn
                await asyncio.sleep(0.01)  # which isn't cancelled any more

    run(loop, main)


def test_a_cancellation_from_outside_ends_a_block_whose_client_has_failed(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(rpc.serve(AsyncioOrders()), URL, authorize=ONLY_ALICE) as server:
            interrupted = asyncio.Event()

            async def use() -> None:
                async with rpc.connect(Orders, server.url, token="wrong"):
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        interrupted.set()
                        await asyncio.sleep(3600)

            task = asyncio.create_task(use())
            async with asyncio.timeout(PATIENCE):
                await interrupted.wait()
                task.cancel()
                with pytest.raises(muxkit.Refused):
                    await task

    run(loop, main)


def test_a_call_of_another_task_ends_with_the_block(loop: Loop) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            async with rpc.connect(Orders, "bpmux+tcp://127.0.0.1:1") as orders:
                waiting = asyncio.ensure_future(orders.get(7))
                await asyncio.sleep(0.1)
            with pytest.raises(trio.ClosedResourceError, match="was left"):
                await waiting

    run(loop, main)
