"""A mailbox returns what was put into it, in little memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.runtime import Mailbox

FEW = st.lists(st.one_of(st.just(b""), st.binary(max_size=3), st.binary(min_size=90, max_size=100)), max_size=50)


def behind_many(count: int = 5000) -> Mailbox:
    """A mailbox that has begun to pack."""
    mailbox = Mailbox()
    for _ in range(count):
        mailbox.put(b"ab")
    return mailbox


@given(messages=FEW)
def test_messages_come_out_as_they_went_in(messages: list[bytes]) -> None:
    mailbox = Mailbox()
    for message in messages:
        mailbox.put(message)
    assert mailbox.count == len(messages)
    assert mailbox.take_all() == messages
    assert mailbox.count == 0


@given(messages=FEW)
def test_packed_messages_come_out_as_they_went_in(messages: list[bytes]) -> None:
    mailbox = behind_many()
    for message in messages:
        mailbox.put(message)
    mailbox.take_all(5000)
    assert mailbox.take_all() == messages


@pytest.mark.seeds(20, soak=2000)
def test_putting_and_taking_may_take_turns(seed: int) -> None:
    dice = random.Random(seed)
    mailbox, model = behind_many(4090), [b"ab"] * 4090
    for _ in range(200):
        if dice.random() < 0.6:
            size = dice.choice((0, 0, 0, 1, 2, 95, 96, 200))
            new = [dice.randbytes(size)] * dice.choice((1, 3, 170, 400))
            model += new
            if dice.random() < 0.5:
                mailbox.put_all(new)
            else:
                for message in new:
                    mailbox.put(message)
        elif dice.random() < 0.3:
            for _ in range(dice.choice((1, 2, 100))):
                if model:
                    assert mailbox.take() == model.pop(0)
        else:
            count = dice.choice((1, 2, 100, 1500))
            taken, model = model[:count], model[count:]
            assert mailbox.take_all(count) == taken
        assert mailbox.count == len(model)
    assert mailbox.take_all() == model


@given(batches=st.lists(FEW, max_size=5), taken=st.integers(0, 60))
def test_messages_that_are_put_together_come_out_as_they_went_in(batches: list[list[bytes]], taken: int) -> None:
    mailbox, model = Mailbox(), [message for batch in batches for message in batch]
    for batch in batches:
        mailbox.put_all([*batch])
    assert mailbox.count == len(model)
    assert [mailbox.take() for _ in range(min(taken, len(model)))] == model[:taken]
    left = model[taken:]
    assert mailbox.count == len(left)
    assert mailbox.clear() == sum(map(len, left))


@pytest.mark.requirement("R-04")
def test_short_messages_that_are_put_together_are_packed_as_others_are() -> None:
    tracemalloc.start()
    mailbox = Mailbox()
    for _ in range(1000):
        mailbox.put_all([bytes([number]) for number in range(200)])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 4 * 200_000


@given(messages=FEW, taken=st.integers(0, 20))
def test_throwing_away_counts_the_bytes(messages: list[bytes], taken: int) -> None:
    for mailbox in (Mailbox(), behind_many()):
        for message in messages:
            mailbox.put(message)
        before = mailbox.count
        size = (before - len(messages)) * 2 + sum(map(len, messages)) - sum(map(len, mailbox.take_all(taken)))
        assert mailbox.clear() == size
        assert mailbox.count == 0
        mailbox.put(b"again")
        assert mailbox.take() == b"again"


@pytest.mark.requirement("R-05")
def test_a_run_of_empty_messages_is_one_counter() -> None:
    for mailbox in (Mailbox(), behind_many()):
        before = mailbox.count
        mailbox.put(b"")
        tracemalloc.start()
        for _ in range(100_000):
            mailbox.put(b"")
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert size < 1000
        assert mailbox.count == before + 100_001
        assert mailbox.clear() == before * 2


@pytest.mark.requirement("R-04")
def test_small_messages_with_empty_ones_between_cost_at_most_four_bytes_each() -> None:
    tracemalloc.start()
    mailbox = Mailbox()
    for _ in range(200_000):
        mailbox.put(b"x")
        mailbox.put(b"")
        mailbox.put(b"")
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 4 * 200_000 + 600_000  # the first few thousand are kept as they are
    assert mailbox.take_all(9) == [b"x", b"", b""] * 3
