"""Who writes next: turns of a quantum, rotation only after bytes went out, debts that are paid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.core import Buffer, Scheduler

QUANTUM = 100


class Queue:
    """Frames of one letter. Messages are cut at the largest piece unless they are `whole`."""

    def __init__(self, name: str, *sizes: int, whole: bool = False) -> None:
        self.name = name
        self.sizes = list(sizes)
        self.whole = whole
        self.deficit = 0
        self.scheduled = False

    def is_ready(self) -> bool:
        return bool(self.sizes)

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        written = 0
        while self.sizes and written < budget:
            size = self.sizes[0] if self.whole else min(self.sizes[0], piece)
            out.append(self.name.encode() * size)
            written += size
            self.sizes[0] -= size
            if not self.sizes[0]:
                self.sizes.pop(0)
        return written


def line_of(*queues: Queue) -> Scheduler:
    scheduler = Scheduler(QUANTUM)
    for queue in queues:
        scheduler.add(queue)
    return scheduler


def pull(scheduler: Scheduler, limit: int = 1000) -> str:
    """The order of the writers, with how much: `a100 b5`."""
    out: list[Buffer] = []
    size = scheduler.pull(limit, out)
    data = b"".join(out).decode()
    assert size == len(data)
    runs: list[list[str]] = []
    for letter in data:
        if runs and runs[-1][0] == letter:
            runs[-1].append(letter)
        else:
            runs.append([letter])
    return " ".join(f"{run[0]}{len(run)}" for run in runs)


def test_nobody_in_line_writes_nothing() -> None:
    scheduler = line_of()
    assert pull(scheduler) == ""
    assert len(scheduler) == 0


def test_who_is_alone_writes_as_much_as_is_taken_in_large_pieces() -> None:
    queue = Queue("a", 2500)
    scheduler = line_of(queue)
    assert pull(scheduler) == "a1000"
    assert pull(scheduler) == "a1000"
    assert pull(scheduler) == "a500"
    assert len(scheduler) == 0
    assert not queue.scheduled


def test_who_is_in_line_is_not_added_again() -> None:
    queue = Queue("a", 10)
    scheduler = line_of(queue, queue)
    assert len(scheduler) == 1


@pytest.mark.requirement("R-28")
def test_several_take_turns_of_one_quantum() -> None:
    scheduler = line_of(Queue("a", 300), Queue("b", 300))
    assert [pull(scheduler) for _ in range(6)] == ["a100", "b100", "a100", "b100", "a100", "b100"]
    assert len(scheduler) == 0


@pytest.mark.requirement("R-28")
def test_a_small_one_behind_a_large_one_waits_for_one_quantum() -> None:
    large = Queue("a", 100_000)
    scheduler = line_of(large)
    pull(scheduler)
    small = Queue("b", 3)
    scheduler.add(small)
    assert pull(scheduler) == "a100"
    assert pull(scheduler).startswith("b3")


@pytest.mark.requirement("R-28")
def test_a_turn_that_was_cut_short_by_the_caller_goes_on() -> None:
    scheduler = line_of(Queue("a", 500), Queue("b", 500))
    assert [pull(scheduler, 30) for _ in range(5)] == ["a30", "a30", "a30", "a30", "b30"]


@pytest.mark.requirement("R-28")
def test_who_writes_nothing_does_not_pass_the_turn_of_others() -> None:
    empty, other = Queue("a", 10), Queue("b", 10)
    scheduler = line_of(empty, other)
    empty.sizes.clear()
    assert pull(scheduler) == "b10"
    assert not empty.scheduled


@pytest.mark.requirement("R-28")
def test_a_frame_that_cannot_be_cut_is_paid_for_in_later_turns() -> None:
    scheduler = line_of(Queue("a", 350, 10, whole=True), Queue("b", 100, 100, 100, 100, 100, whole=True))
    assert [pull(scheduler) for _ in range(5)] == ["a350", "b100", "b100", "b100", "a10 b100"]


@pytest.mark.requirement("R-28")
def test_a_debt_is_not_forgotten_by_leaving_the_line() -> None:
    debtor = Queue("a", 350, whole=True)
    scheduler = line_of(debtor, Queue("b", 1000))
    assert pull(scheduler) == "a350"
    debtor.sizes.append(10)
    scheduler.add(debtor)
    assert [pull(scheduler) for _ in range(4)] == ["b100", "b100", "b100", "a10 b100"]


def test_who_is_alone_owes_nobody() -> None:
    alone = Queue("a", 350, 350, whole=True)
    scheduler = line_of(alone)
    assert pull(scheduler, 100) == "a350"
    scheduler.add(Queue("b", 500))
    assert pull(scheduler) == "a350"


class Waker(Queue):
    """One that writes a frame at a time, and makes another ready by it."""

    def __init__(self, name: str, *sizes: int, scheduler: Scheduler, other: Queue) -> None:
        super().__init__(name, *sizes)
        self._scheduler = scheduler
        self._other = other

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        self._scheduler.add(self._other)
        return super().write(1, piece, out)


def test_who_becomes_ready_while_another_writes_is_next() -> None:
    scheduler = Scheduler(QUANTUM)
    scheduler.add(Waker("a", 300, 300, scheduler=scheduler, other=Queue("b", 10)))
    assert [pull(scheduler), pull(scheduler)] == ["a300", "b10 a100"]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.booleans()), min_size=1, max_size=5),
    st.lists(st.integers(1, 500), min_size=1, max_size=10),
)
def test_everything_is_written_once_and_in_order(sources: list[tuple[list[int], bool]], limits: list[int]) -> None:
    queues = [Queue(chr(97 + n), *sizes, whole=whole) for n, (sizes, whole) in enumerate(sources)]
    total = sum(sum(queue.sizes) for queue in queues)
    scheduler = line_of(*queues)
    written = 0
    for turn in range(2 * total + 1):
        out: list[Buffer] = []
        size = scheduler.pull(limits[turn % len(limits)], out)
        assert size > 0 or len(scheduler) == 0
        written += size
        if not len(scheduler):
            break
    assert written == total
    assert not any(queue.sizes or queue.scheduled for queue in queues)


@pytest.mark.requirement("R-28")
@given(st.lists(st.integers(1, 90), min_size=2, max_size=6))
def test_those_who_are_always_ready_get_equal_shares(sizes: list[int]) -> None:
    queues = [Queue(chr(97 + n), *[size] * (20 * QUANTUM // size)) for n, size in enumerate(sizes)]
    before = [sum(queue.sizes) for queue in queues]
    scheduler = line_of(*queues)
    for _ in range(10 * len(queues)):
        scheduler.pull(QUANTUM, [])
    shares = [start - sum(queue.sizes) for start, queue in zip(before, queues, strict=True)]
    assert max(shares) - min(shares) <= 2 * QUANTUM
