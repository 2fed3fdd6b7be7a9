"""Fixtures of the tests of calls: a server of orders for each protocol, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

import muxkit
from muxkit import rpc
from tests.rpc.orders import Orders, OrdersService


class Shop(NamedTuple):
    """A server of orders, and a client with its session."""

    service: OrdersService
    orders: Orders
    session: muxkit.Session
    url: str


@pytest.fixture(params=["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    service = OrdersService()
    async with muxkit.open_server(rpc.serve(service), f"{request.param}+mem://orders") as server:
        async with muxkit.connect(server.url) as session:
            yield Shop(service, rpc.client(Orders, session), session, server.url)
