"""The service that the tests of calls share."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterable, AsyncIterator

import msgspec
import trio

from muxkit import rpc


class Order(msgspec.Struct):
    id: int
    item: str = "tea"


@dataclasses.dataclass
class OutOfStock(Exception):
    item: str
    left: int


class Orders(rpc.Service):
    """Orders of a shop."""

    @rpc.method(raises=(OutOfStock, KeyError), idempotent=True)
    async def get(self, id: int) -> Order:
        """Return one order."""
        ...

    async def add(self, item: str, *, amount: int = 1, notes: list[str] | None = None) -> list[Order]: ...

    async def wait(self, seconds: float) -> str: ...

    def watch(self, since: int, upto: int = 1_000_000) -> rpc.Stream[Order]: ...

    async def upload(self, rows: rpc.Stream[Order], factor: int = 1) -> int: ...

    def double(self, rows: AsyncIterable[Order]) -> rpc.Stream[Order]: ...


class OrdersService(Orders):
    """Counts the handlers that run, and notes how they ended."""

    def __init__(self) -> None:
        self.running = 0
        self.ended: list[str] = []

    async def get(self, id: int) -> Order:
        if id == 404:
            raise rpc.Error("not_found", "no such order", details={"id": id})
        if id == 410:
            raise OutOfStock("tea", 3)
        if id == 411:
            raise KeyError("tea")
        if id == 500:
            raise ZeroDivisionError("the secret")
        return Order(id)

    async def add(self, item: str, *, amount: int = 1, notes: list[str] | None = None) -> list[Order]:
        return [Order(number, item) for number in range(amount + len(notes or []))]

    async def wait(self, seconds: float) -> str:
        self.running += 1
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.ended.append("wait cancelled")
            raise
        finally:
            self.running -= 1
        return f"{trio.current_effective_deadline() - trio.current_time():.1f}"

    @rpc.stream
    async def watch(self, since: int, upto: int = 1_000_000) -> AsyncIterator[Order]:
        self.running += 1
        try:
            for id in range(since, upto):
                if id == 13:
                    raise OutOfStock("tea", 13)
                yield Order(id)
        finally:
            self.running -= 1
            self.ended.append("watch")

    async def upload(self, rows: rpc.Stream[Order], factor: int = 1) -> int:
        self.running += 1
        try:
            total = 0
            async for row in rows:
                if row.id == 404:
                    raise rpc.Error("not_found", "no such row")
                total += row.id
        finally:
            self.running -= 1
            self.ended.append("upload")
        return factor * total

    @rpc.stream
    async def double(self, rows: AsyncIterable[Order]) -> AsyncIterator[Order]:
        self.running += 1
        try:
            async for row in rows:
                yield Order(2 * row.id, row.item)
        finally:
            self.running -= 1
            self.ended.append("double")


class Ticker:
    """A service that both sides share without an interface."""

    @rpc.stream
    async def watch(self, since: int) -> AsyncIterator[Order]:
        yield Order(since)
