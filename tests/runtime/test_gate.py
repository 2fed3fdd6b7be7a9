"""No sender sleeps while there is room for its message, and none overtakes another on the same half."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
import trio.testing

from muxkit.runtime import OutboxBudget
from muxkit.testing import replay

from ._halves import Outbox, Window, WindowedSend, at_rest, lost, stopped

pytestmark = pytest.mark.requirement("R-08")


async def test_a_sender_waits_for_the_window_and_goes_on_with_a_grant() -> None:
    half = WindowedSend(Outbox(), credit=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, bytes(11))
        await at_rest()
        assert not half.sent
        half.grant(1)
    assert half.sent == [bytes(11)]


async def test_a_sender_waits_for_the_outbox_and_goes_on_when_bytes_leave() -> None:
    outbox = Outbox(limit=100)
    half = WindowedSend(outbox)
    await half.send(bytes(90))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, bytes(20))
        await at_rest()
        outbox.drain(5)
        await at_rest()
        assert len(half.sent) == 1
        outbox.drain(5)
    assert len(half.sent) == 2


async def test_a_message_larger_than_the_outbox_goes_when_it_is_empty() -> None:
    outbox = Outbox(limit=100)
    half = WindowedSend(outbox)
    await half.send(b"x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, bytes(500))
        await at_rest()
        assert len(half.sent) == 1
        outbox.drain()
    assert outbox.used == 500


async def test_senders_of_one_half_go_in_the_order_in_which_they_came() -> None:
    half = WindowedSend(Outbox(limit=10_000), credit=0)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(half.send, bytes([number]) * (1 + number % 3))
            await at_rest()
        for _ in range(60):
            half.grant(1)
            await at_rest()
    assert [message[0] for message in half.sent] == list(range(20))


async def test_a_newcomer_goes_behind_one_that_was_woken_and_has_not_run() -> None:
    half = WindowedSend(Outbox(), credit=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, b"first")
        await at_rest()
        half.grant(5)  # enough for one of the two
        nursery.start_soon(half.send, b"later")
        await at_rest()
        assert half.sent == [b"first"]
        half.grant(5)


async def test_room_kept_for_a_woken_sender_is_not_given_away() -> None:
    outbox = Outbox(limit=100)
    one, other = WindowedSend(outbox), WindowedSend(outbox)
    outbox.used = 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send, bytes(60))
        await at_rest()
        outbox.drain(60)  # wakes `one`, which has not run yet
        await other.send(b"")
        with trio.move_on_after(0) as scope:
            await other.send(bytes(50))
        assert scope.cancelled_caught
    assert outbox.used == 100


async def test_a_stopped_sender_gives_back_the_room_that_was_kept_for_it() -> None:
    outbox = Outbox(limit=100)
    one, other = WindowedSend(outbox), WindowedSend(outbox)
    outbox.used = 100
    async with trio.open_nursery() as nursery:

        async def send_in_vain() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await one.send(bytes(80))

        nursery.start_soon(send_in_vain)
        await at_rest()
        nursery.start_soon(other.send, bytes(80))
        await at_rest()
        outbox.drain()  # `one` is woken, `other` would not fit beside it
        one.stopped(stopped)
        await at_rest()  # nothing is written any more, so nothing else would wake `other`
        assert other.sent == [bytes(80)]
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-71")
async def test_a_sender_that_finds_its_window_taken_gives_back_the_room_that_was_kept_for_it() -> None:
    """Was: A woken sender whose shared window was taken before it ran gave back its place in the outbox without waking
    others, which slept on.
    """
    outbox = Outbox(limit=100)
    shared = Window(0)
    one, other = WindowedSend(outbox, shared), WindowedSend(outbox)
    outbox.used = 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send, bytes(60))
        await at_rest()
        shared.grant(60)
        nursery.start_soon(other.send, bytes(80))
        await at_rest()
        outbox.drain()  # `one` is woken, `other` would not fit beside it
        shared.credit = 0  # as if a half that need not wait had used the window in between
        await at_rest()  # nothing is written any more, so nothing else would wake `other`
        assert (one.sent, other.sent) == ([], [bytes(80)])
        outbox.drain()
        shared.grant(60)
    assert one.sent == [bytes(60)]


async def test_those_behind_a_cancelled_sender_get_his_turn() -> None:
    outbox = Outbox(limit=100)
    one, other = WindowedSend(outbox), WindowedSend(outbox)
    outbox.used = 50
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(one.send, bytes(100))
                await at_rest()
                nursery.start_soon(one.send, bytes(10))
                for _ in range(100):
                    outbox.drain(0)  # too little room, again and again: now newcomers have to wait as well
                nursery.start_soon(other.send, bytes(20))
                await at_rest()
                assert not one.sent
                assert not other.sent
                scope.cancel()
        await at_rest()
        assert one.sent == [bytes(10)]
        assert other.sent == [bytes(20)]


async def test_an_aborted_half_makes_room_for_the_others() -> None:
    outbox = Outbox(limit=100)
    one, other = WindowedSend(outbox), WindowedSend(outbox)
    await one.send(bytes(100))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.send, bytes(50))
        await at_rest()
        one.abort()
    assert other.sent == [bytes(50)]


@pytest.mark.requirement("R-71")
async def test_who_waits_for_his_window_does_not_hold_up_the_line_for_room() -> None:
    """Was: A sender whose window had closed kept his place in the line for room, and those behind him waited although
    they fitted.
    """
    outbox = Outbox(limit=100)
    one, other = WindowedSend(outbox, credit=20), WindowedSend(outbox)
    outbox.used = 95
    scope = trio.CancelScope()

    async def give_up() -> None:
        with scope:
            await one.send(bytes(10))

    async with trio.open_nursery() as nursery:
        for send in (give_up, partial(one.send, bytes(50)), partial(other.send, bytes(30))):
            nursery.start_soon(send)
            await at_rest()
        scope.cancel()  # behind it is a message that the window has no room for
        await at_rest()
        outbox.drain(40)
        await at_rest()
        assert other.sent == [bytes(30)]
        nursery.cancel_scope.cancel()


async def test_a_large_message_is_not_overtaken_for_ever() -> None:
    outbox = Outbox(limit=100)
    large = WindowedSend(outbox, credit=1000)
    small = WindowedSend(outbox, credit=1_000_000)
    outbox.used = 50

    async def push() -> None:
        while True:
            await small.send(bytes(20))
            outbox.drain(20)  # never empty, and never room for the large one

    async with trio.open_nursery() as nursery:
        nursery.start_soon(large.send, bytes(500))
        await at_rest()
        nursery.start_soon(push)
        await at_rest()
        assert 0 < len(small.sent) < 1000
        outbox.drain()
        await at_rest()
        assert large.sent
        nursery.cancel_scope.cancel()


async def test_a_short_message_may_slip_past_a_large_one() -> None:
    outbox = Outbox(limit=100)
    large, small = WindowedSend(outbox, credit=1000), WindowedSend(outbox)
    outbox.used = 50
    async with trio.open_nursery() as nursery:
        nursery.start_soon(large.send, bytes(500))
        await at_rest()
        await small.send(b"quick")
        nursery.cancel_scope.cancel()


async def test_who_is_woken_finds_room_for_his_next_message_as_well() -> None:
    outbox = Outbox(limit=800)
    one, other = WindowedSend(outbox), WindowedSend(outbox)
    outbox.used = 800

    async def send_two(half: WindowedSend) -> None:
        await half.send(bytes(50))
        await half.send(bytes(50))

    async with trio.open_nursery() as nursery:
        for half in (one, other):
            nursery.start_soon(send_two, half)
            await at_rest()
        outbox.drain(50)
        await at_rest()
        assert not one.sent
        outbox.drain(50)
        await at_rest()
        assert (len(one.sent), len(other.sent)) == (2, 0)
        outbox.drain(100)
    assert (len(one.sent), len(other.sent)) == (2, 2)


async def test_what_is_kept_for_the_next_message_is_a_small_part_of_the_outbox() -> None:
    outbox = Outbox(limit=800)
    half = WindowedSend(outbox)
    outbox.used = 800
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, bytes(90))
        await at_rest()
        outbox.drain(99)
        await at_rest()
        assert not half.sent
        outbox.drain(1)
        await at_rest()
        assert half.sent
        nursery.start_soon(half.send, bytes(300))
        await at_rest()
        outbox.drain(290)
        await at_rest()
        assert len(half.sent) == 2


async def test_who_waited_for_his_window_goes_like_a_newcomer_when_it_opens() -> None:
    outbox = Outbox(limit=800)
    half = WindowedSend(outbox, credit=0)
    outbox.used = 720
    async with trio.open_nursery() as nursery:
        nursery.start_soon(half.send, bytes(60))
        await at_rest()
        half.grant(60)
        await at_rest()
        assert half.sent


async def test_however_many_senders_wait_they_are_looked_through_once_a_second(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Was: a look for each of them, and each look at all of them."""
    outbox = Outbox(limit=100)
    outbox.used = 100
    halves = [WindowedSend(outbox) for _ in range(100)]
    reminder, looks = outbox.room.watchdog, 0
    async with trio.open_nursery() as nursery:
        for half in halves:
            nursery.start_soon(half.send, bytes(10))
            await trio.sleep(0.05)
        began = reminder.due
        while reminder.due < began + 20:
            reminder.ring_if_due(reminder.due)
            looks += 1
        nursery.cancel_scope.cancel()
    assert 2 <= looks <= 20


class Model:
    """Halves with random windows over one outbox, and what must hold whenever all tasks are at rest."""

    def __init__(self, dice: random.Random, nursery: trio.Nursery) -> None:
        self.dice = dice
        self.nursery = nursery
        self.outbox = Outbox(limit=dice.choice((50, 200)))
        self.shared = Window(dice.randint(0, 40)) if dice.random() < 0.5 else None
        self.halves = [
            WindowedSend(self.outbox, dice.choice((self.shared, dice.randint(0, 40))) or 0)
            for _ in range(dice.choice((1, 2, 5, 64)))
        ]
        self.waiting: dict[WindowedSend, dict[int, trio.CancelScope]] = {half: {} for half in self.halves}
        self.size: dict[int, int] = {}
        self.returned: set[int] = set()
        self.count = 0
        self.over: set[WindowedSend] = set()

    async def send(self, half: WindowedSend, size: int) -> None:
        number, self.count = self.count, self.count + 1  # here, since Trio decides in which order tasks begin
        self.size[number] = size
        scope = self.waiting[half][number] = trio.CancelScope()
        try:
            with scope:
                await half.send(number.to_bytes(4, "big") + bytes(size))
                self.returned.add(number)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            assert half in self.over
        del self.waiting[half][number]

    def step(self) -> None:
        dice = self.dice
        half = dice.choice(self.halves)
        what = dice.random()
        if what < 0.35:
            self.nursery.start_soon(self.send, half, dice.choice((0, 1, 8, 30, 30, 120)))
        elif what < 0.55:
            self.outbox.drain(dice.randint(0, 60))
        elif what < 0.85:
            half.grant(dice.randint(0, 60))
        elif what < 0.95 and self.waiting[half]:
            dice.choice(list(self.waiting[half].values())).cancel()
        elif what > 0.99:
            self.over.add(half)
            dice.choice((lambda: half.lost(lost), lambda: half.stopped(stopped), half.close, half.abort))()

    async def check(self) -> None:
        """No sender sleeps while its reservation fits, unless an earlier message is too large for what is free."""
        await at_rest()
        if self.shared is not None and self.outbox.used:
            # A sender that need not wait may have closed the window of others that wait for room: those behind them
            # learn of that when something is written, which it will be.
            self.outbox.drain(0)
            await at_rest()
        heads = [(half, self.size[next(iter(line))] + 4) for half, line in self.waiting.items() if line]
        used = self.outbox.used
        open_ = [(half, size) for half, size in heads if half.has_room(size)]
        share = self.outbox.room.reservation_for
        fitting = [half for half, size in open_ if used == 0 or used + share(size) <= self.outbox.limit]
        assert not fitting or len(fitting) < len(open_), f"{len(fitting)} senders sleep although they fit"

    def check_the_end(self) -> None:
        pushed = [[int.from_bytes(message[:4], "big") for message in half.sent] for half in self.halves]
        for numbers in pushed:
            assert numbers == sorted(numbers), "a sender overtook within a half"
        assert {number for numbers in pushed for number in numbers} == self.returned


@pytest.mark.requirement("R-32")
@pytest.mark.seeds(13, soak=4000)
async def test_random_windows_grants_drains_cancellations_and_losses(seed: int) -> None:
    with replay(seed):
        dice = random.Random(seed)
        async with trio.open_nursery() as nursery:
            model = Model(dice, nursery)
            for _ in range(300):
                for _ in range(dice.choice((1, 1, 4))):
                    model.step()
                await model.check()
            for _ in range(10_000):
                if not any(model.waiting.values()):
                    break
                for half in model.halves:
                    half.grant(10)
                model.outbox.drain()
                await model.check()
            assert not any(model.waiting.values()), "a sender sleeps for ever"
        model.check_the_end()


async def test_a_budget_without_a_limit_admits_everything() -> None:
    budget = OutboxBudget()
    assert budget.admits(0)
    assert budget.admits(1 << 40)
