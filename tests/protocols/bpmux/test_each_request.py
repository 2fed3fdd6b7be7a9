"""`muxkit.each_request`: a handler for each request, cancelled when the caller gives up."""

from __future__ import annotations

import logging

import pytest
import trio

import muxkit
from muxkit.protocols import bpmux

PATIENCE = 60.0  # s


async def test_a_call_is_cancelled_when_its_caller_gives_up() -> None:
    began, cancelled = trio.Event(), trio.Event()

    async def answer(request: muxkit.IncomingRequest) -> None:
        if request.payload == b"slow":
            began.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
        await request.respond(request.payload)

    with trio.fail_after(PATIENCE):
        async with bpmux.open_server(muxkit.each_request(answer), "mem://calls") as server:
            async with bpmux.connect(server.url) as session, trio.open_nursery() as nursery:
                nursery.start_soon(session.request, b"slow")
                await began.wait()
                nursery.cancel_scope.cancel()
            async with bpmux.connect(server.url) as session:
                await cancelled.wait()
                assert await session.request(b"quick") == b"quick"


async def test_what_has_no_response_is_declined_and_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(request: muxkit.IncomingRequest) -> None:
        if request.payload == b"fail":
            raise RuntimeError("a fault of this handler")

    with trio.fail_after(PATIENCE), caplog.at_level(logging.WARNING, "muxkit"):
        async with bpmux.open_server(muxkit.each_request(answer), "mem://calls") as server:
            async with bpmux.connect(server.url) as session:
                for payload in (b"nothing", b"fail"):
                    with pytest.raises(muxkit.ChannelStopped):
                        await session.request(payload)
    [line] = caplog.messages
    assert line.startswith("the handler of a request failed, the request was declined: RuntimeError")


async def test_no_more_handlers_run_than_allowed() -> None:
    running = most = 0
    three = trio.Event()
    go_on = trio.Event()

    async def answer(request: muxkit.IncomingRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            three.set()
        await go_on.wait()
        running -= 1
        await request.respond(b"")

    with trio.fail_after(PATIENCE):
        async with bpmux.open_server(muxkit.each_request(answer, max_concurrent=3), "mem://calls") as server:
            async with bpmux.connect(server.url) as session, trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(session.request, b"x")
                await three.wait()
                await session.ping()  # the others have arrived as well
                assert most == 3
                go_on.set()
    assert most == 3
