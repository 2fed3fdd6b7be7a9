"""A sending half sends atomically, in order, fairly, and ends in one way."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import ChannelStopped, LinkLost, LocalProtocolError
from muxkit.core import NO_QUEUE, Sending
from muxkit.runtime import YIELD_BYTES
from muxkit.testing import cancel_sweep

from ._halves import LARGEST, Outbox, WindowedSend, at_rest, lost, stopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


def half(credit: int = 1_000_000) -> WindowedSend:
    return WindowedSend(Outbox(limit=10_000_000), credit)


async def test_anything_like_bytes_can_be_sent() -> None:
    sink = half()
    for message in (b"a", bytearray(b"b"), memoryview(b"c")):
        await sink.send(message)  # type: ignore[arg-type]  # Trio's channels name one type only
    assert sink.sent == [b"a", b"b", b"c"]
    assert all(type(message) is bytes for message in sink.sent)


async def test_a_sender_does_not_wait_for_room_that_ringing_has_made() -> None:
    class Written(Outbox):
        def ring(self) -> None:
            self.drain()  # the link takes everything at once

    sink = WindowedSend(Written(limit=50), credit=1000)
    await sink.send_many([bytes(20)] * 10)
    assert len(sink.sent) == 10


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["sent", "cancelled"])
async def test_no_queue_of_senders_is_kept_when_none_waits_any_more(is_cancelled: bool) -> None:
    sink = half(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.send, b"message")
        await at_rest()
        assert len(sink._line) == 1
        if is_cancelled:
            nursery.cancel_scope.cancel()
        else:
            sink.grant(100)
    assert sink.sent == ([] if is_cancelled else [b"message"])
    assert sink._line is NO_QUEUE  # an empty deque takes 760 bytes


async def test_a_text_is_refused() -> None:
    with pytest.raises(TypeError, match="a message is bytes, not str"):
        await half().send("text")  # type: ignore[arg-type]


async def test_a_message_that_can_never_be_sent_is_refused_at_once() -> None:
    with pytest.raises(LocalProtocolError, match="against 1000000"):
        await half(0).send(bytes(LARGEST + 1))


async def test_what_came_before_a_refused_message_is_announced() -> None:
    sink = half(100)
    with pytest.raises(TypeError):
        await sink.send_many([b"fine", None])  # type: ignore[list-item]
    assert sink.sent == [b"fine"]
    assert sink.outbox.rung == 1


@pytest.mark.requirement("R-33")
@pytest.mark.requirement("R-32")
@pytest.mark.seeds(20, soak=1000)
async def test_a_cancelled_send_was_not_sent(seed: int) -> None:
    dice, sink = random.Random(seed), half(0)
    done: list[bytes] = []

    async def send(number: int) -> None:
        scope = trio.CancelScope()
        nursery.start_soon(cancel_some_day, scope)
        with scope:
            await sink.send(b"%d" % number)
            done.append(b"%d" % number)

    async def cancel_some_day(scope: trio.CancelScope) -> None:
        for _ in range(dice.randrange(6)):
            await trio.lowlevel.checkpoint()
        if dice.random() < 0.5:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(send, number)
            if dice.random() < 0.5:
                await trio.lowlevel.checkpoint()
            if dice.random() < 0.5:
                sink.grant(dice.randrange(5))
        await at_rest()
        sink.grant(1_000_000)
    assert sorted(done) == sorted(sink.sent)


@pytest.mark.requirement("R-31")
@pytest.mark.requirement("R-32")
@pytest.mark.parametrize("credit", [0, 100])
async def test_a_send_cancelled_at_any_step_was_sent_or_not_and_the_half_goes_on(credit: int) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Callable[[], Awaitable[object]]]:
        sink = half(credit)
        returned = False

        async def send() -> None:
            nonlocal returned
            await sink.send(b"1")
            returned = True

        async with trio.open_nursery() as nursery:

            async def grant() -> None:
                await at_rest()
                sink.grant(10)

            nursery.start_soon(grant)
            yield send
        await sink.send(b"2")
        assert sink.sent == [b"1", b"2"][not returned :]

    assert await cancel_sweep(scenario) >= 1


async def test_send_many_cancelled_sent_a_prefix() -> None:
    sink = half(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.send_many, [b"1", b"2", b"3", b"4"])
        await at_rest()
        nursery.cancel_scope.cancel()
    sink.grant(100)
    await sink.send(b"5")
    assert sink.sent == [b"1", b"2", b"5"]


@pytest.mark.requirement("R-34")
async def test_a_half_yields_at_the_latest_in_every_64th_call() -> None:
    sink = half(10 * YIELD_BYTES)
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for _ in range(640):
            await sink.send(b"")
        assert others >= 9
        others = 0
        for _ in range(10):
            await sink.send(bytes(YIELD_BYTES))
        assert others >= 9
        others = 0
        await sink.send_many([b""] * 10_240)
        assert others >= 9
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-34")
async def test_a_cancellation_is_noticed_in_every_call() -> None:
    sink = half()
    with trio.CancelScope() as scope:
        scope.cancel()
        await sink.send(b"x")
    assert scope.cancelled_caught
    assert not sink.sent


@pytest.mark.requirement("R-34")
async def test_every_call_on_a_half_that_is_over_is_a_checkpoint() -> None:
    sink = half()
    sink.close()
    for call in (partial(sink.send, b"x"), partial(sink.send_many, [b"x"]), sink.wait_for_room):
        with trio.testing.assert_checkpoints(), pytest.raises(trio.ClosedResourceError):
            await call()
    with trio.testing.assert_checkpoints():
        await sink.aclose()
    sink.confirmed()
    with trio.testing.assert_checkpoints():
        await sink.finish()
    with trio.testing.assert_checkpoints():
        await half().send_many([])


async def test_finish_waits_until_the_peer_has_heard_it() -> None:
    sink = half()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.finish)
        await at_rest()
        assert sink.state.value == Sending.FINISHING.value
        assert sink.is_unheard
        sink.confirmed()
    assert sink.state.value == Sending.CLOSED.value
    assert not sink.is_unheard
    await sink.finish()


async def test_an_end_payload_waits_for_its_turn() -> None:
    sink = half(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.send, b"1")
        await at_rest()
        nursery.start_soon(sink.finish, b"22")
        await at_rest()
        assert not sink.log
        sink.grant(1)
        await at_rest()
        assert not sink.log
        sink.grant(2)
        await at_rest()
        assert sink.log == ["finish b'22'"]
        sink.confirmed()


async def test_the_end_wakes_those_who_wait_to_send() -> None:
    for over in (WindowedSend.close, WindowedSend.abort):
        sink = half(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fails, trio.ClosedResourceError, partial(sink.send, b"x"))
            nursery.start_soon(_fails, trio.ClosedResourceError, partial(sink.wait_for_room, 5))
            await at_rest()
            over(sink)


@pytest.mark.requirement("R-39")
async def test_the_loss_of_the_link_wakes_everybody_with_an_error_of_his_own() -> None:
    sink = half(0)
    errors: list[LinkLost] = []

    async def wait(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(LinkLost) as caught:
            await call()
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        for call in (partial(sink.send, b"x"), partial(sink.send_many, [b"x"]), sink.wait_for_room, sink.wait_over):
            nursery.start_soon(wait, call)
        await at_rest()
        sink.lost(lost)
    assert len({id(error) for error in errors}) == 4
    with pytest.raises(LinkLost):
        await sink.send(b"x")
    with pytest.raises(LinkLost):
        await sink.finish()


async def test_a_stopped_half_says_so_also_behind_its_end() -> None:
    sink = half()
    sink.close()
    sink.stopped(stopped)
    with pytest.raises(ChannelStopped):
        await sink.finish()
    with pytest.raises(ChannelStopped):
        await sink.send(b"x")


async def test_finish_after_abort_does_not_pretend() -> None:
    sink = half()
    sink.abort()
    with pytest.raises(trio.ClosedResourceError):
        await sink.finish()
    sink.confirmed()
    with pytest.raises(trio.ClosedResourceError):
        await sink.finish()


async def test_abort_breaks_off_an_end_that_is_not_out() -> None:
    sink = half()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fails, trio.ClosedResourceError, sink.finish)
        await at_rest()
        sink.abort()
        sink.confirmed()
    assert sink.log == ["finish b''", "abort"]


async def test_closing_and_giving_up_twice_is_fine() -> None:
    sink = half()
    sink.close()
    sink.close()
    await sink.aclose()
    sink.confirmed()
    sink.abort()
    sink.lost(lost)
    assert sink.log == ["finish b''"]


async def test_an_end_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = half()

    def refuse(payload: bytes) -> None:
        raise LocalProtocolError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sink.engine, "finish", refuse)
        with pytest.raises(LocalProtocolError):
            await sink.finish()
    await sink.send(b"still open")


async def _fails(kind: type[Exception], call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(kind):
        await call()
