"""The check of a transport notices one that does not keep what is asked of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from muxkit.testing import check_link
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Hasty(memory.MemoryStream):
    """Let no other task have a turn while there is something to receive."""

    has_some = False

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        data = super().receive_nowait(max_bytes)
        self.has_some = bool(data)
        return data

    async def wait_readable(self) -> None:
        if not self.has_some:
            await super().wait_readable()
            self.has_some = True


async def test_a_wait_that_is_no_checkpoint_is_noticed() -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[Hasty, Hasty]]:
        here, there = memory.pair()
        here.__class__ = there.__class__ = Hasty
        assert isinstance(here, Hasty)
        assert isinstance(there, Hasty)
        yield here, there

    with pytest.raises(AssertionError, match="wait_readable is no checkpoint while there is something to receive"):
        await check_link(pair, half_close=True)
