"""What if the engine has something to say about a write, or waits for one? All goes out, and nobody spins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.runtime.pumps import stream as stream_pump
from muxkit_adapters import memory

from ._halves import at_rest
from ._pumps import Lines, running

if TYPE_CHECKING:
    from muxkit.core import Buffer

ROOM = [65_536, 16]  # bytes that the link takes at once: everything, or a part


class Telling(Lines):
    """Says once that something has left it."""

    has_told = False

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        buffers = super().buffers_to_send(limit)
        if buffers and not self.has_told:
            self.has_told = True
            self.pending.append(b"left")
        return buffers


async def _received(link: memory.MemoryStream, size: int) -> bytes:
    got = b""
    with trio.move_on_after(60):
        while len(got) < size:
            got += await link.receive_some(8)
    return got


@pytest.mark.parametrize("room", ROOM)
async def test_an_answer_to_what_the_engine_says_of_a_write_goes_behind_it(
    room: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(stream_pump, "INLINE_PAUSE", -1.0)  # however soon somebody rings, it is for now
    here, there = memory.pair(capacity=room)
    async with running(here, Telling()) as run:
        run.on_event = lambda event: run.send(b"B" * 10)
        await at_rest()
        run.send(b"A" * 30)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10


@pytest.mark.parametrize("room", ROOM)
async def test_what_fails_behind_a_write_leaves_the_rest_of_it_to_the_writer(
    room: int, autojump_clock: trio.testing.MockClock
) -> None:
    here, there = memory.pair(capacity=room)
    async with running(here, Telling()) as run:

        def fail(event: bytes) -> None:
            raise ZeroDivisionError

        run.on_event = fail
        await at_rest()
        with pytest.raises(ZeroDivisionError):
            run.send(b"A" * 30)
        run.send(b"B" * 10)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10


class Eager(Lines):
    """Wants to be called while it has something to send, and 7 s after that has left; and at a time of its own."""

    timer: float | None = None

    def next_timer(self) -> float | None:
        return self.timer

    def next_deadline(self) -> float | None:
        return trio.current_time() if self.out else self.timer

    def handle_deadline(self, now: float) -> None:
        self.called_at.append(now)
        if self.timer is not None and self.timer <= now:
            self.timer = None

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        self.timer = trio.current_time() + 7
        return super().buffers_to_send(limit)


async def test_an_engine_that_waits_to_send_is_left_alone_while_the_link_takes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    here, there = memory.pair(capacity=16)
    engine = Eager()
    begun = trio.current_time()
    async with running(here, engine) as run:
        await at_rest()
        run.send(b"A" * 30)  # takes a part
        run.send(b"B" * 10)
        run.pump.rearm()
        await trio.sleep(5)
        await there.send_all(b"a sign of life")
        await trio.sleep(15)
        assert engine.called_at == [begun + 7]  # its own timer still counts
        await trio.sleep(10)
        assert await _received(there, 40) == b"A" * 30 + b"B" * 10
        await trio.sleep(100)
        assert engine.called_at[-1] == begun + 37
        assert len(engine.called_at) <= 3  # once more perhaps, when the link takes something again


async def test_nor_is_it_called_without_end_once_we_have_hung_up(autojump_clock: trio.testing.MockClock) -> None:
    here, there = memory.pair()
    engine = Eager()
    async with running(here, engine) as run, trio.open_nursery() as nursery:
        await at_rest()
        nursery.start_soon(run.pump.hang_up)
        await at_rest()
        run.send(b"too late")
        run.pump.rearm()
        await trio.sleep(10)
        assert engine.called_at == []
        await there.send_eof()


@pytest.mark.parametrize("room", ROOM)
async def test_the_timers_that_begin_with_a_write_are_kept(room: int, autojump_clock: trio.testing.MockClock) -> None:
    here, there = memory.pair(capacity=room)
    engine = Eager()
    begun = trio.current_time()
    async with running(here, engine) as run:
        await at_rest()
        run.send(b"A" * 30)
        assert await _received(there, 30) == b"A" * 30
        await trio.sleep(100)
        assert engine.called_at == [begun + 7]


class Empty(Telling):
    """Thinks that it has something to write, and finds when it is asked for it that it has not."""

    is_ready = False

    def has_output(self) -> bool:
        return self.is_ready or super().has_output()

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        if self.is_ready:
            self.is_ready = False
            self.pending.append(b"nothing")
            return []
        return super().buffers_to_send(limit)


@pytest.mark.parametrize("late", [-1.0, 1e9], ids=["rung late", "rung in time"])
async def test_what_follows_from_a_write_of_nothing_is_written(
    late: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(stream_pump, "LATE_SECONDS", late)
    monkeypatch.setattr(stream_pump, "INLINE_PAUSE", 1e9)  # it is the writer who is asked
    here, there = memory.pair(capacity=16)
    engine = Empty()
    engine.has_told = True
    async with running(here, engine) as run:
        run.on_event = lambda event: run.send(b"A" * 40)
        await at_rest()
        engine.is_ready = True
        run.pump.request_write()
        assert await _received(there, 40) == b"A" * 40
