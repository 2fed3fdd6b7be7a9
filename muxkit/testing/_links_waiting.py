"""Can a task wait for bytes on this link before it takes them, and be called off? Checks for `WaitableLink`."""

from __future__ import annotations

import trio
import trio.testing

from muxkit.runtime import WaitableLink
from muxkit.testing._demands import require
from muxkit.testing._links_bytes import expect, noise, send_and_close

PIECE = 65_536  # bytes in one send
QUIET = 0.02  # s without any task running, after which a task counts as waiting


async def a_wait_ends_when_something_came(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(there, WaitableLink):
        return
    require(there.receive_nowait(10) is None, "receive_nowait gave something although nothing was sent")
    await here.send_all(b"first")
    await there.wait_readable()
    require(await _is_checkpoint(there), "wait_readable is no checkpoint while there is something to receive")
    data = noise(300_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_and_close, here, data)
        got = await _receive_waiting(there)
    require(got == b"first" + data, "what was received without waiting is not what was sent")
    require(there.receive_nowait(10) == b"", "receive_nowait: the end of file came once and did not stay")
    await there.aclose()
    await there.wait_readable()
    try:
        there.receive_nowait(10)
    except trio.ClosedResourceError:
        return
    raise AssertionError("receive_nowait after aclose does not raise ClosedResourceError")


async def a_wait_can_be_stopped(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(there, WaitableLink):
        return
    there.stop_waiting()  # nobody waits: no harm
    came = bytearray()
    async with trio.open_nursery() as nursery:

        async def fill() -> None:  # somebody waits in the other direction, and must not be disturbed
            await there.send_all(bytes(PIECE) * 64)

        nursery.start_soon(fill)
        for _ in range(3):
            async with trio.open_nursery() as waiting:
                waiting.start_soon(there.wait_readable)
                await trio.testing.wait_all_tasks_blocked(QUIET)
                there.stop_waiting()
        require(there.receive_nowait(1) is None, "receive_nowait gave something although nothing was sent")
        require(await _is_checkpoint(there), "wait_readable is no checkpoint")
        await expect(here, bytes(PIECE) * 64)
        nursery.start_soon(send_and_close, here, b"after it")
        came += await _receive_waiting(there)
    require(came == b"after it", "a wait that was stopped lost bytes")


async def a_close_wakes_who_waits_to_receive(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(here, WaitableLink):
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.wait_readable)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(here)


async def _is_checkpoint(link: WaitableLink) -> bool:
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.wait_readable()
    return scope.cancelled_caught


async def _receive_waiting(link: WaitableLink) -> bytes:
    """Everything up to the end."""
    got = bytearray()
    while (piece := link.receive_nowait(PIECE)) != b"":
        if piece is None:
            await link.wait_readable()
        else:
            got += piece
    return bytes(got)
