"""What the tests of stores share: a clock, an application, and addresses that can be opened repeatedly."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from muxkit.protocols.restream.store import Message, SessionStore, StoreLimits, open_store
from muxkit.protocols.restream.store.rules import KEEP, Codec, Rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

U1 = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
U2 = "c0000000-0000-4000-8000-000000000002"
U3 = "d0000000-0000-4000-8000-000000000003"


@attrs.define
class Numbers:
    """The state of the tests' application: how many numbers follow, and the last one."""

    count: int
    value: int = 0


@attrs.define
class Number:
    """The data of its messages."""

    value: int
    last: bool = False


NumberStore = SessionStore[Numbers, Number]


def next_number(state: Numbers) -> tuple[Number, Numbers]:
    """Return the next number of a chain in which each value shows its position: 1, 3, 6, 10 …"""
    value = state.value + 1 + (state.value and place(state.value))
    return Number(value, state.count == 1), Numbers(state.count - 1, value)


def place(value: int) -> int:
    """Return the id of the message with this value."""
    return int((2 * value + 0.25) ** 0.5)


def value_at(id: int) -> int:
    """Return the value of the message with this id."""
    return id * (id + 1) // 2


def is_last(data: Number) -> bool:
    return data.last


def numbers(*ids: int, last: int = 0) -> list[Message[Number]]:
    """Return the expected messages with these ids."""
    return [Message(id, Number(value_at(id), id == last)) for id in ids]


@contextmanager
def quick_directory() -> Iterator[Path]:
    """Make a directory in which a sync is free, if there is one: these tests need no real disk."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30
    with tempfile.TemporaryDirectory(prefix="muxkit-", dir=memory if has_room else None) as directory:
        yield Path(directory)


class Clock:
    """A wall clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def rules(
    clock: Callable[[], float], *, keep: float = KEEP, limits: StoreLimits | None = None
) -> Rules[Numbers, Number]:
    return Rules(Codec(Numbers, Number), limits or StoreLimits(), keep, clock)


@attrs.define
class Place:
    """An address, and the clock of its stores."""

    where: str
    clock: Clock

    @asynccontextmanager
    async def open(self, *, keep: float = KEEP, limits: StoreLimits | None = None) -> AsyncIterator[NumberStore]:
        async with open_store(
            self.where, Numbers, Number, keep=keep, limits=limits or StoreLimits(), now=self.clock
        ) as store:
            yield store
