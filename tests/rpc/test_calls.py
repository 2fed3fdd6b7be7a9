"""Typed calls in every protocol: results, errors, streams, deadlines and cancellation."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, assert_type

import pytest
import trio
import trio.testing

import muxkit
from muxkit import rpc
from tests.rpc.orders import Order, Orders, OrdersService, OutOfStock, Ticker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.rpc.conftest import Shop


async def settled() -> None:
    """Wait until both sides have nothing to do but wait."""
    await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_call_returns_the_result_of_the_method(shop: Shop) -> None:
    order = await shop.orders.get(7)
    assert_type(order, Order)
    assert order == Order(7)
    assert await shop.orders.get(id=8) == Order(8)


async def test_defaults_and_keywords_work_as_they_do_for_a_function(shop: Shop) -> None:
    assert await shop.orders.add("tea") == [Order(0)]
    assert await shop.orders.add("pot", amount=2, notes=["blue"]) == [Order(0, "pot"), Order(1, "pot"), Order(2, "pot")]


async def test_wrong_arguments_are_a_type_error_before_anything_is_sent(shop: Shop) -> None:
    for wrong in ({}, {"id": 7, "name": "x"}):
        with pytest.raises(TypeError, match="argument"):
            await shop.orders.get(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument"):
        shop.orders.watch()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"invalid stream: expected rpc\.Stream"):
        await shop.orders.upload(7)  # type: ignore[arg-type]


async def test_arguments_of_the_wrong_type_come_back_as_an_invalid_argument_with_the_path(shop: Shop) -> None:
    with pytest.raises(rpc.Error) as caught:
        await shop.orders.add("tea", notes=["a", 7])  # type: ignore[list-item]
    assert caught.value.code is rpc.Code.INVALID_ARGUMENT
    assert caught.value.message == "invalid arguments at $.notes[1]: Expected `str`, got `int`"


async def test_an_error_of_the_handler_comes_back_with_its_code_and_details(shop: Shop) -> None:
    with pytest.raises(rpc.Error) as caught:
        await shop.orders.get(404)
    assert caught.value.code is rpc.Code.NOT_FOUND
    assert caught.value.message == "no such order"
    assert caught.value.details == {"id": 404}
    assert str(caught.value) == "not_found: no such order"


async def test_a_declared_exception_comes_back_as_itself(shop: Shop) -> None:
    with pytest.raises(OutOfStock) as caught:
        await shop.orders.get(410)
    assert caught.value == OutOfStock("tea", 3)
    with pytest.raises(KeyError, match="tea"):
        await shop.orders.get(411)


async def test_an_undeclared_exception_comes_back_as_internal_with_an_id_that_the_log_has(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(rpc.Error) as caught:
        await shop.orders.get(500)
    assert caught.value.code is rpc.Code.INTERNAL
    assert "secret" not in str(caught.value)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors[0] == f"call of Orders.get failed as error {caught.value.details['id']}"
    assert errors[1].startswith("the handler of a call failed: ZeroDivisionError")
    assert await shop.orders.get(7) == Order(7)


async def test_a_stream_of_the_server_gives_its_items_and_ends(shop: Shop) -> None:
    async with shop.orders.watch(1, upto=4) as updates:
        assert_type([order async for order in updates], list[Order])
    async with shop.orders.watch(since=1, upto=4) as updates:
        assert [order.id async for order in updates] == [1, 2, 3]


async def test_leaving_a_stream_early_stops_the_producer(shop: Shop, autojump_clock: MockClock) -> None:
    async with shop.orders.watch(100) as updates:
        async for order in updates:
            if order.id == 105:
                break
    await settled()
    assert shop.service.running == 0
    assert shop.service.ended == ["watch"]


async def test_an_error_in_a_stream_comes_after_the_items_before_it(shop: Shop) -> None:
    async with shop.orders.watch(11) as updates:
        assert [(await updates.__anext__()).id for _ in range(2)] == [11, 12]
        with pytest.raises(rpc.Error, match=r"internal: the handler of Orders\.watch failed"):
            await updates.__anext__()
        with pytest.raises(StopAsyncIteration):
            await updates.__anext__()


async def test_a_stream_of_the_client_is_read_by_the_handler(shop: Shop) -> None:
    assert await shop.orders.upload(rpc.Stream([Order(1), Order(2)]), factor=10) == 30

    @rpc.stream
    async def rows() -> AsyncIterator[Order]:
        for id in range(100):
            yield Order(id)

    assert await shop.orders.upload(rows()) == 4950


async def test_a_handler_that_fails_within_a_stream_of_the_client_answers_at_once(shop: Shop) -> None:
    @rpc.stream
    async def rows() -> AsyncIterator[Order]:
        yield Order(404)
        await trio.sleep_forever()

    with pytest.raises(rpc.Error, match="not_found: no such row"):
        await shop.orders.upload(rows())


async def test_a_stream_of_the_client_that_fails_cancels_the_handler(shop: Shop, autojump_clock: MockClock) -> None:
    @rpc.stream
    async def rows() -> AsyncIterator[Order]:
        yield Order(1)
        raise ValueError("the source")

    with pytest.raises(ValueError, match="the source"):
        await shop.orders.upload(rows())
    await settled()
    assert shop.service.running == 0


async def test_both_directions_stream_at_the_same_time(shop: Shop) -> None:
    sender, receiver = trio.open_memory_channel[Order](0)
    async with shop.orders.double(receiver) as doubled:
        for id in range(20):
            await sender.send(Order(id))
            assert await doubled.__anext__() == Order(2 * id)
        await sender.aclose()
        assert [order async for order in doubled] == []


async def test_a_stream_that_is_not_entered_says_how_to_use_it(shop: Shop) -> None:
    with pytest.raises(RuntimeError, match="expected 'async with"):
        async for _ in shop.orders.watch(1):
            pass


async def test_the_deadline_of_the_caller_is_the_deadline_of_the_handler(shop: Shop, autojump_clock: MockClock) -> None:
    with trio.fail_after(20):
        assert await shop.orders.wait(5) == "15.0"
    assert await shop.orders.wait(1) == "inf"


async def test_a_handler_is_cancelled_at_the_deadline_of_its_caller(shop: Shop, autojump_clock: MockClock) -> None:
    with pytest.raises(trio.TooSlowError), trio.fail_after(3):
        await shop.orders.wait(60)
    await settled()
    assert shop.service.running == 0
    assert shop.service.ended == ["wait cancelled"]
    assert await shop.orders.get(7) == Order(7)


async def test_cancelling_a_caller_cancels_its_handler_and_no_other(shop: Shop, autojump_clock: MockClock) -> None:
    results = []

    async def other() -> None:
        results.append(await shop.orders.wait(50))

    async def cancelled(scope: trio.CancelScope) -> None:
        with scope:  # without a deadline, which would travel
            await shop.orders.wait(60)

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(other)
        nursery.start_soon(cancelled, scope)
        await trio.sleep(3)
        assert shop.service.running == 2
        scope.cancel()
        await settled()
        assert shop.service.running == 1
    assert results == ["inf"]


async def test_a_call_of_an_unknown_method_is_unimplemented_and_names_a_close_one(shop: Shop) -> None:
    class Misspelled(rpc.Service):
        __rpc_name__: ClassVar[str] = "Orders"

        async def gett(self, id: int) -> int: ...

    with pytest.raises(rpc.Error) as caught:
        await rpc.client(Misspelled, shop.session).gett(7)
    assert caught.value.code is rpc.Code.UNIMPLEMENTED
    assert caught.value.message == "no method is named 'Orders.gett' here; did you mean 'Orders.get'?"


@pytest.mark.parametrize("codec", ["json", "msgpack", "msgpack+zstd"])
async def test_the_client_chooses_the_codec(codec: str) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://codec") as server:
        async with muxkit.connect(server.url) as session:
            orders = rpc.client(Orders, session, codec=codec)
            assert await orders.get(7) == Order(7)
            assert await orders.upload(rpc.Stream([Order(1), Order(2)])) == 3
            with pytest.raises(OutOfStock):
                await orders.get(410)


async def test_a_service_can_be_used_without_a_connection() -> None:
    orders: Orders = OrdersService()
    assert await orders.get(7) == Order(7)
    assert await orders.upload(rpc.Stream([Order(1), Order(2)])) == 3
    async with orders.watch(1, upto=3) as updates:
        assert [order.id async for order in updates] == [1, 2]


async def test_three_hops_share_one_deadline_that_shrinks(autojump_clock: MockClock) -> None:
    left: list[float] = []

    class Hop(rpc.Service):
        async def go(self, hops: int) -> None: ...

    class HopService(Hop):
        def __init__(self, following: Hop | None) -> None:
            self.following = following

        async def go(self, hops: int) -> None:
            left.append(trio.current_effective_deadline() - trio.current_time())
            await trio.sleep(2)
            if self.following is not None:
                await self.following.go(hops + 1)
            await trio.sleep(100)

    following: Hop | None = None
    async with (
        trio.open_nursery() as nursery,
        muxkit.open_server(rpc.serve(HopService(None)), "bpmux+mem://three") as third,
        muxkit.connect(third.url) as to_third,
        muxkit.open_server(rpc.serve(HopService(rpc.client(Hop, to_third))), "relink+mem://two") as second,
        muxkit.connect(second.url) as to_second,
        muxkit.open_server(rpc.serve(HopService(rpc.client(Hop, to_second))), "e3x+mem://one") as first,
        muxkit.connect(first.url) as session,
    ):
        assert following is None
        with pytest.raises(trio.TooSlowError), trio.fail_after(10):
            await rpc.client(Hop, session).go(0)
        nursery.cancel_scope.cancel()
    assert [round(each) for each in left] == [10, 8, 6]


async def test_interceptors_run_around_calls_on_both_sides(autojump_clock: MockClock) -> None:
    from contextlib import asynccontextmanager

    seen: list[str] = []

    @asynccontextmanager
    async def note(call: rpc.Call) -> AsyncIterator[None]:
        if call.side == "client":
            call.headers["token"] = "tea"
        elif call.headers.get("token") != "tea":
            raise rpc.Error("unauthenticated", "no token")
        seen.append(f"{call.side} {call.method} begins")
        try:
            yield
        finally:
            seen.append(f"{call.side} {call.method} ends")

    async with muxkit.open_server(rpc.serve(OrdersService(), interceptors=[note]), "bpmux+mem://around") as server:
        async with muxkit.connect(server.url) as session:
            assert await rpc.client(Orders, session, interceptors=[note]).get(7) == Order(7)
            with pytest.raises(rpc.Error, match="unauthenticated: no token"):
                await rpc.client(Orders, session).get(7)
            async with rpc.client(Orders, session, interceptors=[note]).watch(1, upto=2) as updates:
                assert [order.id async for order in updates] == [1]
    assert seen[:4] == [
        "client Orders.get begins",
        "server Orders.get begins",
        "server Orders.get ends",
        "client Orders.get ends",
    ]
    assert seen[4:].count("client Orders.watch ends") == 1


async def test_a_handler_can_read_the_headers_and_the_user_of_its_call() -> None:
    class Who(rpc.Service):
        async def am_i(self) -> dict[str, str]: ...

    class WhoService(Who):
        async def am_i(self) -> dict[str, str]:
            return dict(rpc.current_call().headers)

    async with muxkit.open_server(rpc.serve(WhoService()), "bpmux+mem://who") as server:
        async with muxkit.connect(server.url) as session:
            with trio.fail_after(60):
                headers = await rpc.client(Who, session).am_i()
    assert headers["codec"] == "json"
    assert 50 < float(headers["timeout"]) <= 60


async def test_a_method_with_a_bound_lets_further_calls_wait(autojump_clock: MockClock) -> None:
    class Slow(rpc.Service):
        @rpc.method(max_concurrent=2)
        async def work(self) -> None: ...

        @rpc.method(timeout=5)
        async def too_long(self) -> None: ...

    class SlowService(Slow):
        def __init__(self) -> None:
            self.running: list[int] = [0]

        async def work(self) -> None:
            self.running.append(self.running[-1] + 1)
            await trio.sleep(1)
            self.running.append(self.running[-1] - 1)

        async def too_long(self) -> None:
            await trio.sleep(60)

    service = SlowService()
    async with muxkit.open_server(rpc.serve(service), "bpmux+mem://slow") as server:
        async with muxkit.connect(server.url) as session:
            slow = rpc.client(Slow, session)
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(slow.work)
            assert max(service.running) == 2
            with pytest.raises(rpc.Error, match="deadline_exceeded: the handler took longer than 5 s"):
                await slow.too_long()


async def test_channels_that_are_no_calls_go_to_the_other_handler() -> None:
    async def chat(channel: muxkit.Channel) -> None:
        await channel.send(channel.name.encode())

    handler = rpc.serve(OrdersService(), channels=chat)
    async with muxkit.open_server(handler, "bpmux+mem://other") as server, muxkit.connect(server.url) as session:
        async with session.open("chat") as channel:
            assert await channel.receive() == b"chat"
        assert await rpc.client(Orders, session).get(7) == Order(7)
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://only") as server:
        async with muxkit.connect(server.url) as session, session.open("chat") as channel:
            with pytest.raises(muxkit.ChannelCancelled, match="this server takes calls only"):
                await channel.receive()


async def test_a_server_may_call_its_client_on_the_same_session() -> None:
    answers: list[Order] = []

    async def call_back(session: muxkit.Session) -> None:
        answers.append(await rpc.client(Orders, session).get(7))
        async for channel in session:
            await channel.aclose()

    async with muxkit.open_server(call_back, "bpmux+mem://back") as server, muxkit.connect(server.url) as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_channel(rpc.serve(OrdersService())), session)
            await settled()
            nursery.cancel_scope.cancel()
    assert answers == [Order(7)]


async def test_a_client_of_a_url_repeats_idempotent_calls_after_a_loss(autojump_clock: MockClock) -> None:
    cuts: list[str] = []

    class Flaky(OrdersService):
        async def get(self, id: int) -> Order:
            await self.cut_once("get")
            return Order(id)

        async def add(self, item: str, *, amount: int = 1, notes: list[str] | None = None) -> list[Order]:
            await self.cut_once("add")
            return []

        async def cut_once(self, name: str) -> None:
            if name not in cuts:
                cuts.append(name)
                nursery.start_soon(partial(server.sessions()[0].shutdown, grace=0))
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        async with muxkit.open_server(rpc.serve(Flaky()), "bpmux+mem://again") as server:
            async with rpc.connect(Orders, server.url) as orders:
                assert await orders.get(7) == Order(7)
                with pytest.raises(rpc.Error, match="unavailable"):
                    await orders.add("tea")
                assert await orders.add("tea") == []
    assert cuts == ["get", "add"]


async def test_a_client_of_a_url_ends_if_the_server_refuses_it(autojump_clock: MockClock) -> None:
    async with muxkit.open_server(
        rpc.serve(OrdersService()), "bpmux+mem://token", authorize=muxkit.tokens({"right": "alice"})
    ) as server:
        with pytest.raises(muxkit.Refused):
            async with rpc.connect(Orders, server.url, token="wrong") as orders:
                await orders.get(7)


async def test_a_call_of_another_task_ends_with_the_block_of_the_client(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        async with rpc.connect(Orders, "bpmux+mem://nobody") as orders:

            async def call() -> None:
                with pytest.raises(trio.ClosedResourceError, match="the block of this client was left"):
                    await orders.get(7)

            nursery.start_soon(call)
            await trio.sleep(1)
        nursery.cancel_scope.deadline = trio.current_time() + 60
    assert not nursery.cancel_scope.cancelled_caught


async def test_a_generator_of_a_shared_class_is_described_as_the_stream_that_clients_get() -> None:
    async with muxkit.open_server(rpc.serve(Ticker()), "bpmux+mem://ticker") as server:
        async with muxkit.connect(server.url) as session:
            description = await rpc.client(rpc.Reflection, session).describe()
    assert "Ticker.watch(since: int) -> Stream[Order]" in [method.signature for method in description.methods]


async def test_a_method_without_a_result_is_described_as_it_is_written() -> None:
    class Lamp(rpc.Service):
        async def switch(self, on: bool) -> None: ...

    class LampService(Lamp):
        async def switch(self, on: bool) -> None:
            pass

    async with muxkit.open_server(rpc.serve(LampService()), "bpmux+mem://lamp") as server:
        async with muxkit.connect(server.url) as session:
            description = await rpc.client(rpc.Reflection, session).describe()
    assert description.methods[0].signature == "Lamp.switch(on: bool) -> None"


class Reads(muxkit.BaseObserver):
    """The bytes that one side has read, one item for each read."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def transport(self, direction: Literal["in", "out"], data: bytes | memoryview) -> None:
        if direction == "in":
            self.all.append(bytes(data))


async def test_the_result_of_a_call_and_the_end_of_its_channel_come_together(autojump_clock: MockClock) -> None:
    reads = Reads()
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://one") as server:
        async with muxkit.connect(server.url, observer=reads) as session:
            orders = rpc.client(Orders, session)
            await orders.get(7)
            await trio.sleep(1)
            reads.all.clear()
            await orders.get(8)
            await trio.sleep(1)
            assert b'"id":8' in reads.all[-1]  # the last read in this call


async def test_reflection_describes_every_method(shop: Shop) -> None:
    description = await rpc.client(rpc.Reflection, shop.session).describe()
    by_name = {method.name: method for method in description.methods}
    get = by_name["Orders.get"]
    assert get.signature == "Orders.get(id: int) -> Order"
    assert get.doc == "Return one order."
    assert get.arguments["properties"] == {"id": {"type": "integer"}}
    assert get.result == {"$ref": "#/$defs/Order"}
    assert description.types["Order"]["properties"]["item"] == {"type": "string", "default": "tea"}
    assert by_name["Orders.double"].signature == "Orders.double(rows: AsyncIterable[Order]) -> Stream[Order]"
    add = "Orders.add(item: str, *, amount: int = 1, notes: list[str] | None = None) -> list[Order]"
    assert by_name["Orders.add"].signature == add
    assert by_name["Orders.double"].takes_stream
    assert by_name["Orders.double"].returns_stream
    assert "muxkit.Reflection.describe" in by_name


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rpc.serve(OrdersService), "expected an object, got the class 'OrdersService'"),
        (lambda: rpc.serve(OrdersService(), OrdersService()), "'Orders' was given twice"),
        (lambda: rpc.serve(object()), "expected at least one public async method"),
        (lambda: rpc.client(OrdersService(), None), "expected a class, got 'OrdersService'"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_a_type_error_where_it_is_made(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(TypeError, match=text):
        make()
