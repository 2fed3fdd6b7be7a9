"""Two system tasks of each Trio run: one works in the next pass, the other waits for all deadlines."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.runtime.pumps.alarms import Alarms, Sleeper
from muxkit.runtime.pumps.next_pass import NextPass
from muxkit_adapters import memory

from ._pumps import Lines, running

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.core import Buffer


class Diary(Sleeper):
    """Notes when its alarm rang."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def handle_alarm(self, now: float) -> None:
        self.times.append(trio.current_time())


async def test_steps_are_done_together_in_the_next_pass() -> None:
    next_pass, done = NextPass(), list[int]()
    for _ in range(3):  # the first time, the system task has to be started
        done.clear()
        for number in range(3):
            next_pass.call(partial(done.append, number))
        assert done == []
        await trio.testing.wait_all_tasks_blocked()
        assert done == [0, 1, 2]


async def test_a_step_that_puts_off_another_one_lets_other_tasks_run_first() -> None:
    next_pass, passes = NextPass(), 0

    def again() -> None:
        if passes < 10:
            next_pass.call(again)

    next_pass.call(again)
    for _ in range(20):
        passes += 1
        await trio.lowlevel.checkpoint()
    assert passes == 20


async def test_what_has_put_off_a_step_is_not_kept_alive() -> None:
    class Owner:
        def step(self) -> None: ...

    next_pass, owner = NextPass(), Owner()
    reference = weakref.ref(owner)
    next_pass.call(owner.step)
    await trio.testing.wait_all_tasks_blocked()
    del owner
    assert reference() is None


async def test_alarms_ring_in_the_order_of_their_times(autojump_clock: MockClock) -> None:
    alarms, diaries = Alarms(), [Diary() for _ in range(4)]
    start = trio.current_time()
    for seconds, diary in zip((30, 10, 20, 5), diaries, strict=True):
        alarms.set(start + seconds, diary)
    await trio.sleep(100)
    assert [diary.times for diary in diaries] == [[start + 30], [start + 10], [start + 20], [start + 5]]


async def test_a_cancelled_alarm_does_not_ring(autojump_clock: MockClock) -> None:
    alarms, diary = Alarms(), Diary()
    alarms.set(trio.current_time() + 1, diary).cancel()
    alarms.set(trio.current_time() + 2, diary)
    await trio.sleep(100)
    assert len(diary.times) == 1


async def test_alarms_that_are_always_due_do_not_keep_other_tasks_from_running() -> None:
    alarms = Alarms()

    class Restless(Sleeper):
        def handle_alarm(self, now: float) -> None:
            alarms.set(trio.current_time(), self)

    alarms.set(trio.current_time(), Restless())
    for _ in range(20):
        await trio.lowlevel.checkpoint()


async def test_an_error_at_a_deadline_comes_out_of_the_pump(autojump_clock: MockClock) -> None:
    class Broken(Lines):
        def handle_deadline(self, now: float) -> None:
            raise ValueError("a bug")

    here, _there = memory.pair()
    engine = Broken()
    engine.deadline = trio.current_time() + 1
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a bug"), flatten_subgroups=True):
        async with running(here, engine):
            await trio.sleep(10)


async def test_an_error_of_a_write_that_was_put_off_comes_out_of_the_pump(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Lines):
        def buffers_to_send(self, limit: int) -> list[Buffer]:
            raise ValueError("a bug")

    monkeypatch.setattr("muxkit.runtime.pumps.stream.perf_counter", lambda: 0.0)  # each write follows another one
    here, _there = memory.pair()
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a bug"), flatten_subgroups=True):
        async with running(here, Broken()) as run:
            await trio.testing.wait_all_tasks_blocked()
            run.send(b"message")  # no error here
            await trio.sleep_forever()
