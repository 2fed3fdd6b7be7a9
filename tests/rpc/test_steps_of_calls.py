"""A call does little more work than the channel that carries it: function calls of both ends, counted by a profiler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import muxkit
from muxkit import rpc
from tests.bench.steps_of_messages import OrdersService, Steps, answer, call, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

WARM_UP, COUNT = 5, 30


async def functions_of(job: Callable[[muxkit.Session, int], Awaitable[None]]) -> int:
    """Return the number of Python functions that `COUNT` repetitions of a job of the benchmark call."""
    handler, steps = rpc.serve(OrdersService(), channels=answer), Steps()
    async with muxkit.open_server(handler, "bpmux+mem://steps") as server, muxkit.connect(server.url) as session:
        await job(session, WARM_UP)
        before = sys.getprofile()
        sys.setprofile(steps.profile)
        try:
            await job(session, COUNT)
        finally:
            sys.setprofile(before)
    return steps.functions


@pytest.mark.requirement("R-71")
async def test_a_call_takes_hardly_more_function_calls_than_a_channel_with_one_answer(
    autojump_clock: MockClock,
) -> None:
    """Was: A call took 115 calls of functions more, a tenth of the whole: two trips through Trio's scheduler after the
    answer, a cancellation of the scope of a handler that was done, and an opening that was parsed three times.
    """
    assert await functions_of(call) <= 1.05 * await functions_of(request)
