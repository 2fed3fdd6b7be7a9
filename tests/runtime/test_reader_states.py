"""Only the steps in the reader's table are legal, and no task reads unless the state allows it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import attrs
import pytest
import trio

from muxkit.core import draw
from muxkit.runtime.pumps.reading import READER, ReaderState, ReaderStep, Reading, ReadingOwner
from muxkit.runtime.pumps.turns import Turns, turns
from muxkit_adapters import memory

from ._halves import at_rest

# The table, written out once more by hand.
DRAWING = """\
stateDiagram-v2
    [*] --> READING
    READING --> OFFERED: offer
    READING --> BEHIND: fall behind
    READING --> CLOSED: close
    OFFERED --> LENT: borrow
    OFFERED --> READING: resume
    OFFERED --> CLOSED: close
    LENT --> OFFERED: offer
    LENT --> READING: resume
    LENT --> BEHIND: fall behind
    LENT --> CLOSED: close
    BEHIND --> READING: catch up
    BEHIND --> CLOSED: close
    CLOSED --> [*]
"""


def legal_steps() -> dict[tuple[str, str], str]:
    arrows = (line.split(maxsplit=3) for line in DRAWING.splitlines()[2:-1])
    return {(before.lower(), step): after.rstrip(":").lower() for before, _, after, step in arrows}


def test_the_table_is_drawn_as_it_was_designed() -> None:
    assert draw(READER) == DRAWING


@pytest.mark.parametrize(("state", "step"), list(product(ReaderState, ReaderStep)))
def test_a_step_leads_where_the_drawing_says_or_is_refused(state: ReaderState, step: ReaderStep) -> None:
    after = legal_steps().get((state.value, step.value))
    if after is not None:
        assert READER[state, step] is ReaderState(after)
    else:
        with pytest.raises(RuntimeError, match=rf"^illegal step .* '{state.value}': expected .*, got '{step.value}'$"):
            READER[state, step]


def test_the_error_of_an_illegal_step_names_the_legal_ones() -> None:
    with pytest.raises(RuntimeError, match="in state 'behind': expected 'catch up' or 'close', got 'borrow'"):
        READER[ReaderState.BEHIND, ReaderStep.BORROW]
    with pytest.raises(RuntimeError, match="in state 'closed': expected no further step, got 'offer'"):
        READER[ReaderState.CLOSED, ReaderStep.OFFER]


@attrs.define
class Borrower:
    """A task that waits for a message."""

    is_called: bool = False


class Owner(ReadingOwner):
    """A pump and its parser: each byte is a frame, and one call parses five of them.

    The frame `h` takes long, and the frame `x` ends the connection. Each frame is a message for `borrower`.
    """

    def __init__(self, stream: memory.MemoryStream, shared: Turns | None = None) -> None:
        self.got: list[bytes] = []
        self.borrower = Borrower()
        self.errors: list[Exception] = []
        self.unparsed = 0
        self.frames_at_once = 5
        self._rest = b""
        self.reading: Reading = Reading(stream, self, shared or turns(), self)

    def handle_bytes(self, data: bytes) -> bool:
        data = self._rest + data
        frames, self._rest = data[: self.frames_at_once], data[self.frames_at_once :]
        self.unparsed = len(self._rest)
        self.got.append(frames)
        self.reading.is_heavy = b"h" in frames
        self.borrower.is_called = True
        if b"x" in frames:
            self.reading.stop()
        return True

    def handle_end(self) -> None:
        self.reading.stop()

    def handle_broken(self, error: Exception) -> None:
        self.errors.append(error)

    def rearm(self) -> None: ...


async def test_a_job_that_is_not_offered_cannot_be_borrowed() -> None:
    reading = Owner(memory.pair()[0]).reading
    with pytest.raises(RuntimeError, match=r"in state 'reading': expected .*, got 'borrow'"):
        await reading.read_for(Borrower())
    assert reading.state is ReaderState.READING


async def test_only_one_task_borrows_the_job() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        await _lend(owner, there, nursery)
        assert owner.reading.state is ReaderState.LENT
        with pytest.raises(RuntimeError, match=r"in state 'lent': expected .*, got 'borrow'"):
            await owner.reading.read_for(Borrower())
        assert owner.reading.state is ReaderState.LENT
        nursery.cancel_scope.cancel()


async def test_a_closed_reader_stays_closed_when_it_is_stopped_again() -> None:
    reading = Owner(memory.pair()[0]).reading
    reading.stop()
    reading.stop()
    assert reading.state is ReaderState.CLOSED


async def test_nothing_can_be_borrowed_once_the_reader_task_has_ended() -> None:
    """Nobody would raise what goes wrong for the borrower."""
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner.reading.run)
        await _offered(owner, there)
        nursery.cancel_scope.cancel()
    assert owner.reading.state is ReaderState.CLOSED


async def test_a_borrower_that_is_stopped_takes_no_more_bytes() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        await _lend(owner, there, nursery)
        got = [*owner.got]
        there.send_nowait([b"late"])  # the borrower is awake, and hasn't run yet
        owner.reading.stop()
        await at_rest()
        assert owner.got == got
        assert owner.reading.state is ReaderState.CLOSED


async def test_a_stream_that_breaks_is_reported_once_and_closes_the_reader() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        await _lend(owner, there, nursery)
        await here.aclose()
        await at_rest()
        assert [*map(type, owner.errors)] == [trio.ClosedResourceError]
        assert owner.reading.state is ReaderState.CLOSED


async def test_a_borrower_whose_read_took_long_returns_the_job_without_an_offer() -> None:
    """The next read has to wait for a turn, which is for the reader task to do."""
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        await _lend(owner, there, nursery)
        there.send_nowait([b"h"])
        while b"h" not in owner.got:
            assert owner.reading.state is ReaderState.LENT
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            assert owner.reading.state is ReaderState.READING
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_the_reader_task_sleeps_while_one_task_borrows_its_job_again_and_again() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    steps: Counter[trio.lowlevel.Task] = Counter()

    class CountSteps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            steps[task] += 1

    is_lent = trio.Event()

    async def borrow() -> None:
        await _offered(owner, there)
        is_lent.set()
        for _ in range(50):
            borrower = Borrower()
            owner.borrower = borrower
            await owner.reading.read_for(borrower)

    async def read(task_status: trio.TaskStatus[trio.lowlevel.Task]) -> None:
        task_status.started(trio.lowlevel.current_task())
        await owner.reading.run()

    async with trio.open_nursery() as nursery:
        reader = await nursery.start(read)
        nursery.start_soon(borrow)
        await is_lent.wait()
        await at_rest()
        assert owner.reading.borrower_sleeps
        counter = CountSteps()
        trio.lowlevel.add_instrument(counter)
        for _ in range(40):
            there.send_nowait([b"a"])
            await at_rest()
        trio.lowlevel.remove_instrument(counter)
        assert steps[reader] == 0
        nursery.cancel_scope.cancel()


async def test_the_reader_task_takes_the_job_back_if_nobody_borrows_it_in_the_next_pass() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner.reading.run)
        await _offered(owner, there)
        await at_rest()
        assert owner.reading.state is ReaderState.READING
        there.send_nowait([b"b"])
        await at_rest()
        assert owner.got[-1] == b"b"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_lent", [False, True], ids=["reader task", "borrower"])
async def test_a_backlog_is_parsed_in_steps_by_the_reader_task(is_lent: bool) -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        if is_lent:
            await _lend(owner, there, nursery)
        else:
            nursery.start_soon(owner.reading.run)
        there.send_nowait([b"0123456789ab"])
        while b"01234" not in owner.got:
            await trio.lowlevel.checkpoint()
        states = [owner.reading.state]
        await at_rest()
        states.append(owner.reading.state)
        assert owner.got[-3:] == [b"01234", b"56789", b"ab"]
        assert states == [ReaderState.BEHIND, ReaderState.READING]
        nursery.cancel_scope.cancel()


async def test_a_connection_that_ends_in_the_middle_of_a_backlog_has_nothing_more_parsed() -> None:
    here, there = memory.pair()
    owner = Owner(here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner.reading.run)
        there.send_nowait([b"012x456789"])
    assert owner.got == [b"012x4"]
    assert owner.reading.state is ReaderState.CLOSED


async def test_a_connection_that_ends_while_a_backlog_waits_for_its_turn_has_nothing_more_parsed() -> None:
    class LastTurn(Turns):
        async def wait(self) -> None:
            await super().wait()
            owner.reading.stop()

    here, there = memory.pair()
    owner = Owner(here, LastTurn())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner.reading.run)
        there.send_nowait([b"0123456789"])
    assert owner.got == [b"01234"]


async def _offered(owner: Owner, there: memory.MemoryStream) -> None:
    """Return while the reader task, which has been started, offers its job."""
    for _ in range(100):  # Trio shuffles whether this task runs before the reader takes the job back
        await at_rest()
        owner.reading.is_wanted = True
        there.send_nowait([b"a"])
        while owner.reading.is_wanted:
            await trio.lowlevel.checkpoint()
        if owner.reading.state is ReaderState.OFFERED:
            return
    raise AssertionError("the reader never offered its job")


async def _lend(owner: Owner, there: memory.MemoryStream, nursery: trio.Nursery) -> None:
    """Start the reader task, and return when a borrower sleeps in its place."""

    async def borrow() -> None:
        await _offered(owner, there)
        is_lent.set()
        await owner.reading.read_for(Borrower())

    is_lent = trio.Event()
    nursery.start_soon(owner.reading.run)
    nursery.start_soon(borrow)
    await is_lent.wait()
    await at_rest()
    assert owner.reading.borrower_sleeps
