"""The block that opens a channel."""

from __future__ import annotations

import pytest
import trio

from muxkit.runtime import Opening


class Door:
    def __init__(self) -> None:
        self.log: list[str] = []

    async def open(self) -> Door:
        await trio.lowlevel.checkpoint()
        self.log.append("opened")
        return self

    async def fail(self) -> Door:
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self.log.append("closed")
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.log.append("aborted")


async def test_it_opens_when_it_is_entered_and_closes_when_it_is_left() -> None:
    door = Door()
    opening = Opening(door.open)
    assert door.log == []
    async with opening as opened:
        assert opened is door
        assert door.log == ["opened"]
    assert door.log == ["opened", "closed"]


async def test_it_aborts_when_it_is_left_by_an_error() -> None:
    door = Door()
    with pytest.raises(KeyError):
        async with Opening(door.open):
            raise KeyError
    assert door.log == ["opened", "aborted"]


async def test_it_opens_once() -> None:
    opening = Opening(Door().open)
    async with opening:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        async with opening:
            raise AssertionError


async def test_what_was_not_opened_is_not_closed() -> None:
    door = Door()
    opening = Opening(door.fail)
    with pytest.raises(trio.ClosedResourceError):
        async with opening:
            raise AssertionError
    assert door.log == []
    await opening.__aexit__(None, None, None)
    assert door.log == []
