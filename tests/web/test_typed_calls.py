"""Typed calls from JavaScript, in Node, against services of `muxkit.rpc`, and the types that are generated for them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
import trio

import muxkit
from muxkit import rpc
from muxkit.cli.typescript import declarations
from muxkit.rpc import Description, MethodDescription
from tests.cli._command import muxkit as muxkit_command

if TYPE_CHECKING:
    from tests.web._node import Node

ROOT = Path(__file__).parents[2]
URL = "bpmux+ws://127.0.0.1:0"


class Order(msgspec.Struct):
    """One order of a customer."""

    id: int
    lines: list[str]
    note: str | None = None
    state: Literal["new", "sent"] = "new"


class SoldOut(Exception):
    def __init__(self, item: str) -> None:
        super().__init__(item)
        self.item = item


class Orders:
    """Handlers that a test can look into."""

    def __init__(self) -> None:
        self.cancelled = trio.Event()
        self.deadline = 0.0

    async def get(self, id: int, *, note: str | None = None) -> Order:
        """Return an order."""
        if id == 404:
            raise rpc.Error("not_found", "no order has this number", details={"id": id})
        return Order(id, ["grüner Tee"], note)

    async def watch(self, count: int) -> AsyncIterator[Order]:
        """Return order after order."""
        for number in range(count):
            yield Order(number, [])

    async def total(self, amounts: AsyncIterator[int]) -> int:
        """Add what the caller sends."""
        return sum([amount async for amount in amounts])

    async def double(self, amounts: AsyncIterator[int]) -> AsyncIterator[int]:
        """Answer each number with twice the number."""
        async for amount in amounts:
            yield 2 * amount

    async def stay(self) -> None:
        """Take for ever."""
        self.deadline = trio.current_effective_deadline() - trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()

    async def gone(self) -> bool:
        """Wait until another call was cancelled."""
        await self.cancelled.wait()
        return True

    async def drip(self) -> AsyncIterator[int]:
        """Yield one number, then take for ever."""
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


@asynccontextmanager
async def orders() -> AsyncIterator[tuple[Orders, str]]:
    service = Orders()
    async with muxkit.open_server(rpc.serve(service), URL) as server:
        yield service, server.url.removeprefix("bpmux+")


PREPARED = """
const session = await connect(args[0]);
const orders = muxkit.client(session, "Orders");
const facts = ({ name, code, reason, details }) => ({ name, code, reason, details });
const failed = (promise) => promise.then(() => null, facts);
"""


async def test_a_call_brings_its_result(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            say(await orders.get({ id: 7, note: "süß" }));
            say(await Promise.all([1, 2, 3].map((id) => orders.get({ id }).then((order) => order.id))));
            await session.close();
            """,
            url,
        )
    assert said == [{"id": 7, "lines": ["grüner Tee"], "note": "süß", "state": "new"}, [1, 2, 3]]


async def test_a_stream_of_the_server_is_iterated_over(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            const ids = [];
            for await (const order of orders.watch({ count: 1000 })) ids.push(order.id);
            say(ids);
            await session.close();
            """,
            url,
        )
    assert said == [[*range(1000)]]


async def test_a_stream_of_the_caller_is_sent(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            async function* numbers() { for (let number = 0; number < 1000; number += 1) yield number; }
            say(await orders.total({}, { items: numbers() }));
            const doubled = [];
            for await (const number of orders.double({}, { items: [1, 2, 3] })) doubled.push(number);
            say(doubled);
            await session.close();
            """,
            url,
        )
    assert said == [499_500, [2, 4, 6]]


async def test_errors_have_the_code_the_words_and_the_details_of_the_server(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            say(await failed(orders.get({ id: 404 })));
            say(await failed(orders.get({ id: "seven" })).then(({ code }) => code));
            say(await failed(orders.fly()).then(({ code }) => code));
            say(await session.ping() >= 0);
            await session.close();
            """,
            url,
        )
    assert said[0] == {
        "name": "RpcError",
        "code": "not_found",
        "reason": "no order has this number",
        "details": {"id": 404},
    }
    assert said[1:3] == ["invalid_argument", "unimplemented"]
    assert said[-1] is True


async def test_aborting_a_signal_cancels_the_handler(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            const controller = new AbortController();
            const call = orders.stay({}, { signal: controller.signal });
            setTimeout(() => controller.abort(), 100);
            say(await failed(call).then(({ name }) => name));
            say(await orders.gone());
            await session.close();
            """,
            url,
        )
    assert said == ["AbortError", True]


async def test_a_timeout_reaches_the_server_and_ends_the_call(node: Node) -> None:
    async with orders() as (service, url):
        said = await node.run(
            PREPARED
            + """
            say(await failed(orders.stay({}, { timeout: 200 })).then(({ code }) => code));
            say(await orders.gone());
            await session.close();
            """,
            url,
        )
    assert said == ["deadline_exceeded", True]
    assert service.deadline <= 0.2


async def test_leaving_a_loop_early_cancels_the_handler(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            for await (const number of orders.drip()) { say(number); break; }
            say(await orders.gone());
            await session.close();
            """,
            url,
        )
    assert said == [1, True]


async def test_a_lost_session_ends_its_calls(node: Node) -> None:
    async with orders() as (_, url):
        said = await node.run(
            PREPARED
            + """
            const call = orders.stay();
            setTimeout(() => session.abort("enough"), 100);
            say(await failed(call).then(({ name }) => name));
            """,
            url,
        )
    assert said == ["LinkLost"]


async def test_headers_travel_both_ways(node: Node) -> None:
    seen: list[dict[str, str]] = []

    async def handle(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            seen.append({**channel.headers})
            async with session.open("back", headers={"größe": "x" * 300, "b": ""}, payload=b"payload") as back:
                await back.finish()
            await channel.aclose()

    async with muxkit.open_server(handle, URL) as server:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open("there", { headers: { "größe": "y".repeat(300), "b": "" } });
            const { value } = await session.incoming.getReader().read();
            say([value.name, value.headers, text(value.opening)]);
            await value.close();
            await channel.close();
            await session.close();
            """,
            server.url.removeprefix("bpmux+"),
        )
    assert seen == [{"größe": "y" * 300, "b": ""}]
    assert said == [["back", {"größe": "x" * 300, "b": ""}, "payload"]]


async def test_the_program_of_the_page_runs(node: Node) -> None:
    found = re.search(r"```typescript\n(import.*?)```", page(), re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if not line.startswith("import ")]
    program = "\n".join(lines).replace("<Orders>", "").replace('"wss://example.org/mux"', "args[0]")
    program = program.replace("console.log", "say").replace("client(", "muxkit.client(")
    async with orders() as (_, url):
        said = await node.run(f"{program}\nsay([order.id, total]);\nawait session.close();", url)
    assert said == [*range(10), [7, 6]]


# ---------------------------------------------------------------------------- types

EXPECTED = """\
/** One order of a customer. */
export interface Order {
  id: number;
  lines: Array<string>;
  note?: string | null;
  state?: "new" | "sent";
}

/** The service "Orders". */
export interface Orders {
  /** Answer each number with twice the number. */
  double(args: Record<string, never>, options: StreamOptions<number>): AsyncIterable<number>;
  /** Yield one number, then take for ever. */
  drip(args?: Record<string, never>, options?: CallOptions): AsyncIterable<number>;
  /** Return an order. */
  get(args: { id: number; note?: string | null }, options?: CallOptions): Promise<Order>;
  /** Wait until another call was cancelled. */
  gone(args?: Record<string, never>, options?: CallOptions): Promise<boolean>;
  /** Take for ever. */
  stay(args?: Record<string, never>, options?: CallOptions): Promise<null>;
  /** Add what the caller sends. */
  total(args: Record<string, never>, options: StreamOptions<number>): Promise<number>;
  /** Return order after order. */
  watch(args: { count: number }, options?: CallOptions): AsyncIterable<Order>;
}
"""


def page() -> str:
    return (ROOT / "docs/how-to/browser.md").read_text(encoding="utf-8")


async def test_the_command_of_the_page_prints_an_interface_for_each_type_and_service() -> None:
    found = re.search(r"\$ muxkit (describe) (\S+) (--typescript) > orders.ts", page())
    assert found is not None
    async with muxkit.open_server(rpc.serve(Orders()), URL) as server:
        done = await trio.to_thread.run_sync(muxkit_command, found[1], server.url, found[3])
    assert done.returncode == 0, done.stderr
    head, _, rest = done.stdout.partition("\n\n")
    assert head.endswith('import type { CallOptions, StreamOptions } from "./muxkit.js";')
    assert rest == EXPECTED


def test_nothing_of_a_description_becomes_code() -> None:
    method = MethodDescription(
        name="Evil-1.x(): void; y",
        signature="",
        doc="ends */ alert(1) /*",
        arguments={"properties": {'"; alert(1); "': {"type": "string"}}},
        result={"$ref": "#/$defs/A; alert(2)"},
    )
    types = {"A; alert(2)": {"enum": ['"; alert(3)', {"a": 1}], "description": "*/ alert(4)"}}
    said = declarations(Description([method], types))
    assert "*/ alert" not in said
    assert "export interface Evil_1 {" in said
    assert 'export type A__alert_2_ = "\\"; alert(3)" | unknown;' in said
    assert '"x(): void; y"(args?: { "\\"; alert(1); \\""?: string }' in said


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, "[number, string]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "Record<string, number>"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "number"),
        ({"const": 5}, "5"),
        ({}, "unknown"),
        ({"type": "object", "properties": {"a b": {"type": "boolean"}}}, '{ "a b"?: boolean }'),
    ],
)
def test_a_schema_has_its_type(schema: dict[str, object], expected: str) -> None:
    method = MethodDescription(name="A.b", signature="", doc="", arguments={}, result=schema)
    assert f"Promise<{expected}>" in declarations(Description([method], {}))
