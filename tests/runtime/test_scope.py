"""A block with background tasks raises its own error, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.runtime import background, close_at_once
from muxkit_adapters import tcp

if TYPE_CHECKING:
    from trio.testing import MockClock

pytestmark = pytest.mark.requirement("R-36")


async def fail(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def fail_when_cancelled(error: BaseException) -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise error


async def test_the_tasks_end_with_the_block() -> None:
    was_cancelled = False

    async def sleep() -> None:
        nonlocal was_cancelled
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            was_cancelled = True
            raise

    async with background() as nursery:
        nursery.start_soon(sleep)
        await trio.testing.wait_all_tasks_blocked()
    assert was_cancelled


async def test_the_blocks_own_error_comes_out_as_itself() -> None:
    error = ValueError("mine")

    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        await block()
    assert caught.value is error
    assert error.__context__ is None


async def test_a_group_that_the_block_made_stays_a_group() -> None:
    group = ExceptionGroup("mine", [ValueError("inner")])

    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise group

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert caught.value is group


async def test_the_error_of_one_background_task_comes_out_bare() -> None:
    error = KeyError("task")

    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(fail, error)
            await trio.sleep_forever()

    with pytest.raises(KeyError) as caught:
        await block()
    assert caught.value is error


async def test_an_error_inside_a_background_tasks_own_nursery_comes_out_bare() -> None:
    async def nested() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, KeyError("deep"))

    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(nested)
            await trio.sleep_forever()

    with pytest.raises(KeyError, match="deep"):
        await block()


async def test_several_errors_come_out_as_a_group() -> None:
    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(fail_when_cancelled, KeyError("task"))
            await trio.testing.wait_all_tasks_blocked()
            raise ValueError("block")

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_a_time_limit_around_the_block_works_as_usual(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1) as scope:
        async with background() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_interrupt_in_a_background_task_comes_out_bare() -> None:
    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(fail, KeyboardInterrupt())
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        await block()


async def test_an_interrupt_in_the_block_comes_out_bare() -> None:
    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await block()


async def test_an_interrupt_that_the_block_falls_over_comes_out_bare() -> None:
    async def block() -> None:
        async with background() as nursery:
            nursery.start_soon(fail_when_cancelled, KeyboardInterrupt())
            await trio.testing.wait_all_tasks_blocked()
            raise ValueError("consequence")

    with pytest.raises(KeyboardInterrupt):
        await block()


async def test_a_tcp_stream_is_closed_without_a_pass_of_the_loop() -> None:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, lambda stream: stream.receive_some())
        host, _, port = address.rpartition(":")
        async with tcp.connect(host, int(port)) as stream:
            with trio.testing.assert_no_checkpoints():
                await close_at_once(stream)
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(b"late")
        nursery.cancel_scope.cancel()
