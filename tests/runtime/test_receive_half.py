"""A receiving half loses nothing when tasks are cancelled, and ends when it should."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.core import Reason, Receiving
from muxkit.runtime import ItemQueue, ReceiveHalf
from muxkit.testing import cancel_sweep

from ._halves import MemoryConnection, Outbox, PlainReceive, at_rest, lost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence


async def test_messages_come_in_order_and_are_counted_when_taken() -> None:
    source = PlainReceive()
    for message in (b"1", b"22", b""):
        source.deliver(message)
    assert source.unread == 3
    assert source.consumed == 0
    assert await source.receive() == b"1"
    assert source.consumed == 1
    assert await source.receive_many() == [b"22", b""]
    assert source.consumed == 3


async def test_receive_many_gives_at_most_so_many() -> None:
    source = PlainReceive()
    for message in (b"1", b"2", b"3"):
        source.deliver(message)
    assert await source.receive_many(limit=2) == [b"1", b"2"]
    assert await source.receive_many(limit=2) == [b"3"]
    with pytest.raises(ValueError, match="limit=0"):
        await source.receive_many(limit=0)


async def test_those_who_wait_are_served_in_the_order_in_which_they_came() -> None:
    source = PlainReceive()
    got: dict[int, bytes] = {}

    async def receive(number: int) -> None:
        got[number] = await source.receive()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(receive, number)
            await at_rest()
        for number in range(10):
            source.deliver(b"%d" % number)
    assert got == {number: b"%d" % number for number in range(10)}


async def test_items_that_came_together_go_to_those_who_wait_and_the_rest_is_stored() -> None:
    source = PlainReceive()
    got: dict[int, bytes] = {}

    async def receive(number: int) -> None:
        got[number] = await source.receive()

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(receive, number)
            await at_rest()
        source.deliver_all([b"0", b"1", b"2", b"3"])
    assert got == {0: b"0", 1: b"1"}
    assert source.unread == 2
    source.deliver_all([b"4"])
    assert await source.receive() == b"2"
    assert await source.receive_many() == [b"3", b"4"]


async def test_items_that_come_together_behind_the_close_are_dropped_and_counted() -> None:
    source = PlainReceive()
    source.close()
    source.deliver_all([b"1", b"22"])
    assert (source.unread, source.consumed) == (0, 3)


class Telling(PlainReceive):
    """A half whose engine may hear late of up to `most` bytes, and that notes what it hears."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__(lag=most)
        self.told: list[int] = []
        self.engine.on_consumed = self._note

    def _note(self, size: int) -> None:
        if size:
            self.told.append(size)


async def test_what_is_handed_out_is_told_once_it_is_all_taken() -> None:
    source = Telling()
    source.deliver_all([bytes(100)] * 25)
    for number in range(25):
        assert source.unread == 25 - number
        await source.receive()
    assert source.told == [1000, 1000, 500]


async def test_what_may_not_wait_is_told_at_once() -> None:
    source = Telling(most=0)
    source.deliver_all([bytes(100)] * 5)
    for _ in range(5):
        await source.receive()
    assert source.told == [100] * 5


async def test_larger_items_behind_a_small_one_do_not_wait_untold() -> None:
    source = Telling()
    source.deliver_all([b"1", b"2", bytes(5000), b"3", b"4", b"5", b"6", b"7"])
    assert [len(await source.receive()) for _ in range(8)] == [1, 1, 5000, 1, 1, 1, 1, 1]
    assert source.told == [1, 1, 5000, 5]


async def test_taking_all_tells_of_what_was_handed_out_before() -> None:
    source = Telling()
    source.deliver_all([b"%03d" % number for number in range(20)])
    assert [await source.receive() for _ in range(3)] == [b"000", b"001", b"002"]
    assert source.told == []
    assert await source.receive_many(limit=2) == [b"003", b"004"]
    assert source.told == [9, 6]
    source.deliver(b"020")
    assert await source.receive_many() == [b"%03d" % number for number in range(5, 21)]
    assert sum(source.told) == 63
    assert source.unread == 0


async def test_what_is_handed_out_stays_with_its_half_when_another_task_takes_the_last_item() -> None:
    source, other = Telling(), Telling()
    got: list[bytes] = []

    async def receive() -> None:
        got.append(await source.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await at_rest()
        source.deliver_all([b"%d" % number for number in range(10)])  # the task that waits has the first
        got.append(await source.receive())  # before that task runs; the others are handed out next
    assert got == [b"1", b"0"]
    assert await source.receive_many(limit=3) == [b"2", b"3", b"4"]
    assert (source.unread, other.unread) == (5, 0)
    assert [await source.receive() for _ in range(5)] == [b"5", b"6", b"7", b"8", b"9"]
    assert sum(source.told) == 10
    with trio.move_on_after(0):
        await other.receive()
        raise AssertionError("an item came to another half")


async def test_a_task_that_waited_for_all_takes_what_another_task_would_be_handed_out_next() -> None:
    """It took what had come last, and what had come before that afterwards."""
    source = Telling()
    got: list[list[bytes]] = []

    async def receive_all() -> None:
        got.append(await source.receive_many())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive_all)
        await at_rest()
        source.deliver_all([b"%d" % number for number in range(10)])  # the task that waits has the first
        assert await source.receive() == b"1"  # before that task runs; the others are handed out next
        source.deliver_all([b"10"])
    assert got == [[b"0", *(b"%d" % number for number in range(2, 11))]]
    assert sum(source.told) == 12
    assert source.unread == 0


async def test_closing_in_the_middle_counts_what_was_handed_out_and_what_is_dropped() -> None:
    source = Telling()
    source.deliver_all([bytes(10)] * 20)
    await source.receive()
    source.close()
    assert sum(source.told) == 200
    assert source.unread == 0


async def test_the_end_comes_behind_what_is_handed_out() -> None:
    source = Telling()
    source.deliver_all([bytes(10)] * 5)
    await source.receive()
    source.ended(trio.EndOfChannel)
    for _ in range(4):
        assert source.state is Receiving.DRAINING
        await source.receive()
    assert source.state is Receiving.CLOSED
    with pytest.raises(trio.EndOfChannel):
        await source.receive()


async def test_a_half_yields_on_every_64th_call_also_where_items_are_handed_out_together() -> None:
    yields: list[int] = []

    class Yielding(Telling):
        async def _yield(self) -> None:
            yields.append(number)
            await super()._yield()

    source = Yielding(most=1_000_000)
    source.deliver_all([bytes(40)] * 10)
    for number in range(1, 1001):
        if number % 7 == 0:
            source.deliver_all([bytes(40)] * 7)
        await source.receive()
    assert yields == [*range(64, 1001, 64)]


async def test_what_is_taken_outside_of_trio_comes_in_order_and_is_told() -> None:
    source = Telling()
    source.deliver_all([b"%d" % number for number in range(9)])
    assert await source.receive() == b"0"
    assert [source.try_receive() for _ in range(4)] == [b"%d" % number for number in range(1, 5)]
    assert await source.receive() == b"5"
    assert [source.try_receive() for _ in range(4)] == [b"6", b"7", b"8", None]
    assert sum(source.told) == 9
    assert source.unread == 0


async def test_a_cancelled_receive_takes_nothing_of_what_is_handed_out() -> None:
    source = Telling()
    source.deliver_all([b"%d" % number for number in range(9)])
    assert await source.receive() == b"0"
    with trio.CancelScope() as scope:
        scope.cancel()
        await source.receive()
    assert scope.cancelled_caught
    assert await source.receive() == b"1"


async def test_a_newcomer_does_not_take_what_is_on_its_way_to_another() -> None:
    source = PlainReceive()
    got: list[bytes] = []

    async def receive() -> None:
        got.append(await source.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await at_rest()
        source.deliver(b"first")
        with trio.move_on_after(0) as scope:
            await source.receive()
        assert scope.cancelled_caught
    assert got == [b"first"]


@pytest.mark.requirement("R-33")
@pytest.mark.seeds(10, soak=100)
async def test_a_cancelled_receive_took_nothing(seed: int) -> None:
    dice, source, wanted = random.Random(seed), PlainReceive(), 1000
    got: list[bytes] = []

    async def receive() -> None:
        while len(got) < wanted:
            with trio.CancelScope() as scope:
                throw = dice.random()
                if throw < 0.2:
                    scope.cancel()
                elif throw < 0.7:
                    nursery.start_soon(cancel, scope)
                if throw < 0.5:
                    got.append(await source.receive())
                else:
                    got.extend(await source.receive_many(limit=dice.choice((None, 3))))

    async def cancel(scope: trio.CancelScope) -> None:
        for _ in range(dice.randrange(3)):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for number in range(wanted):
            source.deliver(b"%d" % number)
            if dice.random() < 0.6:
                await trio.lowlevel.checkpoint()
    assert got == [b"%d" % number for number in range(wanted)]
    assert source.consumed == sum(map(len, got))


@pytest.mark.requirement("R-31")
@pytest.mark.parametrize("many", [False, True])
async def test_a_receive_cancelled_at_any_step_loses_nothing(many: bool) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Callable[[], Awaitable[object]]]:
        source = PlainReceive()
        got: list[bytes] = []

        async def receive() -> None:
            got.extend(await source.receive_many() if many else [await source.receive()])

        async with trio.open_nursery() as nursery:

            async def deliver() -> None:
                await at_rest()
                source.deliver(b"1")
                source.deliver(b"2")

            nursery.start_soon(deliver)
            yield receive
        while len(got) < 2:
            got.append(await source.receive())
        assert got == [b"1", b"2"]

    assert await cancel_sweep(scenario) >= 1


async def test_the_end_comes_behind_the_last_message() -> None:
    source = PlainReceive()
    source.deliver(b"last")
    source.ended(trio.EndOfChannel)
    assert source.state.value == Receiving.DRAINING.value
    assert await source.receive() == b"last"
    assert source.state.value == Receiving.CLOSED.value
    with pytest.raises(trio.EndOfChannel):
        await source.receive()


@pytest.mark.requirement("R-39")
async def test_a_loss_comes_behind_the_last_message_and_wakes_everybody() -> None:
    source = PlainReceive()
    source.deliver(b"last")
    source.ended(lost)
    assert await source.receive() == b"last"
    for call in (source.receive, source.receive_many):
        with pytest.raises(LinkLost):
            await call()

    source = PlainReceive()

    async def receive() -> None:
        with pytest.raises(LinkLost):
            await source.receive()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(receive)
        await at_rest()
        source.ended(lost)


async def test_the_first_end_counts() -> None:
    source = PlainReceive()
    source.ended(trio.EndOfChannel)
    source.ended(lost)
    with pytest.raises(trio.EndOfChannel):
        await source.receive()


@pytest.mark.parametrize("over", [lambda source: source.ended(lost), PlainReceive.close])
async def test_a_message_handed_over_before_the_end_still_arrives(over: Callable[[PlainReceive], None]) -> None:
    source = PlainReceive()
    got: list[bytes] = []

    async def receive() -> None:
        got.append(await source.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await at_rest()
        source.deliver(b"late")
        over(source)
    assert got == [b"late"]


async def test_closing_drops_what_came_and_tells_the_peer() -> None:
    source = PlainReceive()
    source.deliver(b"123")
    source.close()
    assert source.was_stopped
    assert source.consumed == 3
    source.deliver(b"45")
    assert source.consumed == 5
    source.close()
    await source.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await source.receive()


async def test_closing_wakes_those_who_wait() -> None:
    source = PlainReceive()

    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await source.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await at_rest()
        await source.aclose()


async def test_closing_behind_the_end_tells_nobody() -> None:
    source = PlainReceive()
    source.deliver(b"123")
    source.ended(trio.EndOfChannel)
    source.close()
    assert not source.was_stopped
    assert source.state.value == Receiving.CLOSED.value


@pytest.mark.requirement("R-34")
async def test_a_half_yields_at_the_latest_in_every_64th_call() -> None:
    source = PlainReceive()
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for _ in range(640):
            source.deliver(b"")
        for _ in range(640):
            await source.receive()
        assert others >= 9
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-34")
async def test_every_call_that_fails_or_gives_many_is_a_checkpoint() -> None:
    source = PlainReceive()
    source.deliver(b"x")
    with trio.testing.assert_checkpoints():
        await source.receive_many()
    source.ended(trio.EndOfChannel)
    for call in (source.receive, source.receive_many):
        with trio.testing.assert_checkpoints(), pytest.raises(trio.EndOfChannel):
            await call()
    with trio.testing.assert_checkpoints():
        await source.aclose()


@pytest.mark.requirement("R-34")
async def test_a_cancellation_is_noticed_in_every_call() -> None:
    source = PlainReceive()
    source.deliver(b"x")
    for call in (source.receive, source.receive_many):
        with trio.CancelScope() as scope:
            scope.cancel()
            await partial(call)()
        assert scope.cancelled_caught
    assert source.unread == 1


class Parcel:
    """An item that owns something, and that its application gets as a text."""

    def __init__(self, text: str) -> None:
        self.text = text


class ParcelReceiver:
    """The engine's half for parcels."""

    owner: object | None = None
    credit_in: int | None = None
    lag = 0
    label = "parcels"
    held = 0

    def __init__(self) -> None:
        self.told: list[tuple[list[str], int]] = []

    def consumed(self, items: Sequence[Parcel], size: int) -> bool:
        self.told.append(([parcel.text for parcel in items], size))
        return False

    def consumed_portion(self, count: int, size: int) -> bool:
        return self.consumed((), size)

    def stop(self, reason: Reason) -> None:
        pass


class Parcels(ReceiveHalf[Parcel]):
    """Receives items that are no bytes."""

    new_storage = ItemQueue
    size_of = staticmethod(lambda parcel: len(parcel.text))
    portion_most = 0

    def __init__(self) -> None:
        self.engine = ParcelReceiver()
        super().__init__(MemoryConnection(Outbox()), self.engine)


async def test_a_half_carries_items_of_any_kind() -> None:
    half = Parcels()
    for text in ("1", "22", "333", "4444"):
        half.deliver(Parcel(text))
    assert (await half.receive()).text == "1"
    assert [parcel.text for parcel in await half.receive_many(2)] == ["22", "333"]
    assert [parcel.text for parcel in await half.receive_many()] == ["4444"]
    assert half.engine.told == [(["1"], 1), (["22", "333"], 5), (["4444"], 4)]


async def test_an_item_goes_to_the_task_that_waits_for_it() -> None:
    half, got = Parcels(), list[str]()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def receive() -> None:
            got.append((await half.receive()).text)

        await at_rest()
        half.deliver(Parcel("1"))
        assert half.unread == 0
    assert got == ["1"]


def test_a_queue_of_items_can_be_cleared() -> None:
    queue = ItemQueue[str]()
    for text in "abc":
        queue.put(text)
    assert queue.take() == "a"
    assert queue.take_all(1) == ["b"]
    assert queue.clear() == 0
    assert (queue.count, queue.take_all()) == (0, [])
