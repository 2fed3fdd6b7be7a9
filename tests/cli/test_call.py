"""`muxkit call` and `muxkit describe`, as programs, against a server of calls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio

import muxkit
from muxkit import rpc
from tests.cli._command import completed, environment
from tests.rpc.orders import OrdersService

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+tcp://127.0.0.1:0") as server:
        yield server.url


async def muxkit_command(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return await trio.to_thread.run_sync(partial(completed, *arguments, input=stdin, env=environment()))


async def test_a_call_prints_its_result_as_json(url: str) -> None:
    done = await muxkit_command("call", url, "Orders.get", '{"id": 7}')
    assert (done.returncode, json.loads(done.stdout)) == (0, {"id": 7, "item": "tea"})


async def test_a_stream_prints_one_item_per_line(url: str) -> None:
    done = await muxkit_command("call", url, "Orders.watch", '{"since": 1, "upto": 4}')
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1, 2, 3]


async def test_lines_of_the_input_are_the_items_of_a_stream(url: str) -> None:
    done = await muxkit_command("call", url, "Orders.upload", "--stream", stdin=b'{"id": 1}\n\n{"id": 2}\n')
    assert (done.returncode, done.stdout) == (0, b"3\n")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["Orders.upload"], 2, "Orders.upload takes a stream: pass --stream, and one item per line of standard input"),
        (["Orders.get", '{"id": 404}'], 1, 'not_found: no such order {"id":404}'),
        (["Orders.get", '{"id": 410}'], 1, 'OutOfStock: ("tea", 3)'),
        (["Orders.get", '{"id": "x"}'], 1, "invalid_argument: invalid arguments at $.id"),
        (["Orders.got", '{"id": 7}'], 1, "no method is named 'Orders.got' here; did you mean 'Orders.get'?"),
        (["Orders.get", "7"], 2, "invalid arguments: expected a JSON object"),
        (["Orders.wait", '{"seconds": 3600}', "--deadline", "0.2"], 5, "Orders.wait: no result within 0.2 s"),
    ],
    ids=["no stream", "error", "declared", "type", "unknown", "usage", "deadline"],
)
async def test_a_call_that_fails_says_why(url: str, arguments: list[str], code: int, text: str) -> None:
    done = await muxkit_command("call", url, *arguments)
    assert done.returncode == code
    assert text.partition("(")[0] in done.stderr.decode()


async def test_describe_lists_the_methods_and_their_schemas(url: str) -> None:
    lines = (await muxkit_command("describe", url)).stdout.decode().splitlines()
    assert "Orders.get(id: int) -> Order" in lines
    assert "    Return one order." in lines
    description = json.loads((await muxkit_command("describe", url, "--schemas")).stdout)
    assert description["types"]["Order"]["required"] == ["id"]
