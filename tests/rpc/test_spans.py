"""Spans of calls: they join across the wire, and a handler's own spans are children of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
from opentelemetry.trace import SpanKind, StatusCode

import muxkit
from muxkit import rpc
from tests._spans import Spans, is_child, recorded_spans
from tests.rpc.conftest import Shop
from tests.rpc.orders import Order, Orders, OrdersService


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded_spans() as recorded:
        yield recorded


async def test_a_call_has_a_span_on_each_side_and_they_are_one_trace(shop: Shop, spans: Spans) -> None:
    assert await shop.orders.get(7) == Order(7)
    [client], [server] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert client.name == server.name == "Orders/get"
    assert is_child(server, client)
    assert client.attributes is not None
    assert client.attributes["rpc.service"] == "Orders"
    assert client.attributes["network.protocol.name"] == shop.session.info.protocol


async def test_a_call_of_a_handler_belongs_to_the_trace_of_its_caller(spans: Spans) -> None:
    class Front(OrdersService):
        def __init__(self, back: Orders) -> None:
            super().__init__()
            self.back = back

        async def get(self, id: int) -> Order:
            return await self.back.get(id)

    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://back") as back:
        async with muxkit.connect(back.url) as to_back:
            front = rpc.serve(Front(rpc.client(Orders, to_back)))
            async with muxkit.open_server(front, "relink+mem://front") as server:
                async with muxkit.connect(server.url) as session:
                    await rpc.client(Orders, session).get(7)
    finished = spans.all()
    assert len(finished) == 4
    assert len({span.context.trace_id for span in finished if span.context is not None}) == 1


@pytest.mark.parametrize(("id", "kind", "is_server_fault"), [(404, "not_found", False), (500, "internal", True)])
async def test_a_failed_call_notes_its_kind_and_not_its_text(
    id: int, kind: str, is_server_fault: bool, spans: Spans
) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://failed") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(rpc.Error):
                await rpc.client(Orders, session).get(id)
    [client], [answering] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert client.attributes is not None
    assert client.attributes["error.type"] == kind
    assert client.status.status_code is StatusCode.ERROR
    assert (answering.status.status_code is StatusCode.ERROR) is is_server_fault
    assert "secret" not in answering.to_json()


async def test_the_span_of_a_stream_lasts_as_long_as_its_block(shop: Shop, spans: Spans) -> None:
    async with shop.orders.watch(1, upto=3) as updates:
        assert spans.of(SpanKind.CLIENT) == []
        assert len([order async for order in updates]) == 2
    assert [span.name for span in spans.of(SpanKind.CLIENT)] == ["Orders/watch"]


async def test_without_instrumentation_no_context_travels() -> None:
    class Who(rpc.Service):
        async def am_i(self) -> dict[str, str]: ...

    class WhoService(Who):
        async def am_i(self) -> dict[str, str]:
            await trio.lowlevel.checkpoint()
            return dict(rpc.current_call().headers)

    async with muxkit.open_server(rpc.serve(WhoService()), "bpmux+mem://plain") as server:
        async with muxkit.connect(server.url) as session:
            assert await rpc.client(Who, session).am_i() == {"codec": "json"}
