"""What a Trio task emits comes out of a plain generator: in order, not too far ahead, and with its errors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline.concurrency import AHEAD, bridged, run_bare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Emit = Callable[[int], Awaitable[None]]


def readers() -> list[threading.Thread]:
    """Those of bridges: the others of a test run come and go as they like."""
    return [thread for thread in threading.enumerate() if thread.name == "muxkit reader"]


def test_everything_comes_in_order() -> None:
    async def work(emit: Emit) -> None:
        for number in range(1000):
            await emit(number)

    assert list(bridged(work)) == list(range(1000))


def test_nothing_is_an_answer_too() -> None:
    async def work(emit: Emit) -> None:
        await trio.lowlevel.checkpoint()

    assert list(bridged(work)) == []


def test_the_task_waits_for_whoever_takes() -> None:
    made = 0
    waits = threading.Event()

    async def work(emit: Emit) -> None:
        nonlocal made
        for number in range(100):
            if number > AHEAD:
                waits.set()
            await emit(number)
            made += 1

    items = bridged(work)
    assert next(items) == 0
    assert waits.wait(60)
    assert made <= AHEAD + 1
    assert list(items) == list(range(1, 100))


def test_an_error_comes_behind_what_was_made_before_it() -> None:
    async def work(emit: Emit) -> None:
        await emit(1)
        raise ValueError("no more")

    items = bridged(work)
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)


def test_a_group_of_errors_comes_out_as_one_of_them() -> None:
    async def fail() -> None:
        raise ValueError("the reason")

    async def work(emit: Emit) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)

    with pytest.raises(ValueError, match="the reason"):
        list(bridged(work))


def test_closing_it_cancels_the_task_and_ends_the_thread() -> None:
    cancelled = threading.Event()

    async def work(emit: Emit) -> None:
        try:
            await emit(1)
            await trio.sleep_forever()
        finally:
            cancelled.set()

    items = bridged(work)
    assert next(items) == 1
    (thread,) = readers()
    items.close()  # type: ignore[attr-defined] # it is a generator
    assert cancelled.is_set()
    assert not thread.is_alive()


def test_closing_it_while_the_task_waits_for_room_cancels_it() -> None:
    ended = threading.Event()

    async def work(emit: Emit) -> None:
        try:
            for number in range(1000):
                await emit(number)
        finally:
            ended.set()

    items = bridged(work)
    next(items)
    items.close()  # type: ignore[attr-defined] # it is a generator
    assert ended.is_set()


def test_a_bridge_that_nobody_crosses_starts_nothing() -> None:
    async def work(emit: Emit) -> None:
        raise AssertionError("no caller asked")

    items = bridged(work)
    assert readers() == []
    items.close()  # type: ignore[attr-defined] # it is a generator
    assert readers() == []


def test_what_is_told_plainly_has_no_tree_around_it() -> None:
    async def act() -> None:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("inside")])])

    with pytest.raises(KeyError, match="inside") as caught:
        run_bare(act)
    assert caught.value.__cause__ is None
