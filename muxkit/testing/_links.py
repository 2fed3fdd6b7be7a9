"""The conformance suite for byte-stream transports, which tries each promise of a link.

    await check_link(my_pair, half_close=True)

`my_pair()` is an async context manager that yields two connected streams. Each check opens its own pair.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress

import trio
import trio.testing

from muxkit.runtime import NowaitLink, WaitableLink
from muxkit.testing._checks import must_raise, run_both_ways
from muxkit.testing._pair import require

Pair = tuple[trio.abc.Stream, trio.abc.Stream]
MakePair = Callable[[], AbstractAsyncContextManager[Pair]]

SIZES = (1, 2, 1000, 65_535, 65_536, 65_537, 1_000_003, 4 * 1024 * 1024)  # bytes
PIECE = 65_536  # bytes per send in checks of the amount of data
HELD_MOST = 64 * 1024 * 1024  # bytes that a link may accept from a sender while no task receives
QUIET = 0.02  # s without any running task, after which a sender counts as blocked


async def check_link(make_pair: MakePair, *, half_close: bool) -> None:
    """Check every promise of a byte-stream link, in both directions.

    Args:
        make_pair: returns an async context manager that yields two connected streams.
        half_close: True if the link promises `send_eof`, as `trio.abc.HalfCloseableStream` does.

    Raises:
        AssertionError: if a promise is broken. The text names the check.
    """
    for check in (*_CHECKS, *([_half_close_keeps_the_way_back] if half_close else [])):
        await run_both_ways(check, make_pair)


# The checks


async def _bytes_arrive_as_they_were_sent(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    for size in SIZES:
        data = noise(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.send_all, data)
            require(await receive(there, size) == data, f"{size} bytes came out different")


async def _empty_sends_mean_nothing(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    pieces = (b"", b"a", bytearray(b""), bytearray(b"b"), memoryview(b"c"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_pieces, here, pieces)
        require(await receive(there, 3) == b"abc", "an empty send or the type of a buffer changed the stream")


async def _one_byte_at_a_time_is_enough(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    data = noise(3000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.send_all, data)
        got = bytearray()
        while len(got) < len(data):
            piece = await there.receive_some(1)
            require(len(piece) == 1, f"receive_some(1) gave {len(piece)} bytes")
            got += piece
    require(got == data, "bytes taken one by one came out different")


async def _both_sides_may_push_at_once(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    forth, back = noise(2 * 1024 * 1024, seed=1), noise(2 * 1024 * 1024, seed=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_pieces, here, cut(forth, 50_000))
        nursery.start_soon(send_pieces, there, cut(back, 50_000))
        nursery.start_soon(expect, there, forth)
        nursery.start_soon(expect, here, back)


async def _a_sender_waits_for_a_reader(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    sent, wanted = 0, HELD_MOST
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            nonlocal sent
            while sent < wanted:
                await here.send_all(bytes(PIECE))
                sent += PIECE

        nursery.start_soon(send)
        before = -1
        while before != sent:
            before = sent
            await trio.testing.wait_all_tasks_blocked(QUIET)
        require(sent < HELD_MOST, f"{sent} bytes were taken while no task read")
        wanted = sent + 16 * PIECE
        await receive(there, wanted)
    require(sent == wanted, f"a sender that had waited sent {sent} of {wanted} bytes")


async def _a_close_is_the_end_for_the_peer(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_and_close, here, b"last words")
        require(await receive(there, 10) == b"last words", "bytes sent before aclose were lost")
        require(await there.receive_some(10) == b"", "aclose of one side is no end of file for the other")
        require(await there.receive_some(10) == b"", "the end of file came once and did not stay")
        await there.aclose()


async def _nothing_works_after_a_local_close(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, there)
        await here.aclose()
        await must_raise(trio.ClosedResourceError, "send_all after aclose", here.send_all, b"x")
        await must_raise(trio.ClosedResourceError, "an empty send_all after aclose", here.send_all, b"")
        await must_raise(trio.ClosedResourceError, "receive_some after aclose", here.receive_some, 1)
        nursery.cancel_scope.cancel()


async def _a_peer_that_left_breaks_the_sender(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    await trio.aclose_forcefully(there)

    async def send_on() -> None:
        while True:
            await here.send_all(bytes(PIECE))

    await must_raise(trio.BrokenResourceError, "sending on after the peer closed", send_on)
    await must_raise(trio.BrokenResourceError, "sending again on a broken link", here.send_all, b"x")


async def _a_cancelled_receive_loses_nothing(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    data, got = noise(20_000), bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_pieces, here, cut(data, 100))
        for turn in range(1_000_000):
            if len(got) == len(data):
                break
            with trio.CancelScope() as scope:
                # In turn, cancel before the wait, during it, and just after it.
                if turn % 3 == 0:
                    scope.cancel()
                elif turn % 3 == 1:
                    scope.deadline = trio.current_time()
                got += await there.receive_some(64)
    require(got == data, "a cancelled receive_some lost or repeated bytes")


async def _closing_twice_is_fine(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, there)
        for _ in range(3):
            await here.aclose()
        nursery.cancel_scope.cancel()


async def _a_cancelled_close_still_closes(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    await trio.aclose_forcefully(here)
    await must_raise(trio.ClosedResourceError, "send_all after a cancelled aclose", here.send_all, b"x")
    # After an abrupt close, the peer sees either the end of the stream or an error. It must notice the close.
    with suppress(trio.BrokenResourceError):
        require(await there.receive_some(10) == b"", "data came out of a link on which nothing was sent")


async def _a_close_wakes_who_waits_in_receive(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(must_raise, trio.ClosedResourceError, "receive_some while aclose came", here.receive_some, 1)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(here)


async def _two_tasks_cannot_receive_at_once(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, here)
        await trio.testing.wait_all_tasks_blocked()
        await must_raise(trio.BusyResourceError, "a second receive_some", here.receive_some, 1)
        nursery.cancel_scope.cancel()


async def _writing_at_once_keeps_the_order(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(here, NowaitLink):
        return
    link: NowaitLink = here
    data = noise(3 * 1024 * 1024)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            at, turn = 0, 0
            while at < len(data):
                turn += 1
                size = (7, 1000, 70_000, 300_000)[turn % 4]
                view = memoryview(data)[at : at + size]
                cuts = [view[:1], view[1:1], view[1 : size // 2], view[size // 2 :]]
                if turn % 2:
                    taken = link.send_nowait(cuts)
                    require(0 <= taken <= len(view), f"send_nowait took {taken} of {len(view)} bytes")
                    await here.send_all(view[taken:])
                else:
                    await link.send_buffers(cuts)
                at += len(view)
            await link.send_buffers([])
            require(link.send_nowait([]) == 0, "send_nowait of nothing is not 0")

        nursery.start_soon(send)
        require(await receive(there, len(data)) == data, "send_nowait, send_buffers and send_all changed order")


async def _writing_at_once_never_waits(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(here, NowaitLink):
        return
    total = 0
    while taken := here.send_nowait([bytes(PIECE)]):
        total += taken
        require(total < HELD_MOST, f"send_nowait took {total} bytes while no task read")
    require(await receive(there, total) == bytes(total), "what send_nowait took is not what arrived")
    await here.aclose()
    await must_raise(trio.ClosedResourceError, "send_nowait after aclose", here.send_nowait, [b"x"])


async def _half_close_keeps_the_way_back(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(here, trio.abc.HalfCloseableStream):
        raise AssertionError(f"half_close=True, but {type(here).__name__} is no trio.abc.HalfCloseableStream")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.send_all, b"question")
        require(await receive(there, 8) == b"question", "bytes before send_eof were lost")
    await here.send_eof()
    await here.send_eof()
    require(await there.receive_some(10) == b"", "send_eof is no end of file for the peer")
    await must_raise(trio.ClosedResourceError, "send_all after send_eof", here.send_all, b"x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(there.send_all, b"answer")
        require(await receive(here, 6) == b"answer", "after send_eof nothing came back")


async def _a_wait_ends_when_something_came(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
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
    await must_raise(trio.ClosedResourceError, "receive_nowait after aclose", there.receive_nowait, 10)


async def _a_wait_can_be_stopped(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(there, WaitableLink):
        return
    there.stop_waiting()  # has no effect without a waiting task
    async with trio.open_nursery() as nursery:
        nursery.start_soon(there.send_all, bytes(PIECE) * 64)  # blocks in the other direction, undisturbed
        for _ in range(3):
            async with trio.open_nursery() as waiting:
                waiting.start_soon(there.wait_readable)
                await trio.testing.wait_all_tasks_blocked(QUIET)
                there.stop_waiting()
        require(there.receive_nowait(1) is None, "receive_nowait gave something although nothing was sent")
        require(await _is_checkpoint(there), "wait_readable is no checkpoint")
        await expect(here, bytes(PIECE) * 64)
        nursery.start_soon(send_and_close, here, b"after it")
        came = await _receive_waiting(there)
    require(came == b"after it", "a wait that was stopped lost bytes")


async def _a_close_wakes_who_waits_to_receive(here: trio.abc.Stream, there: trio.abc.Stream) -> None:
    if not isinstance(here, WaitableLink):
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.wait_readable)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(here)


Check = Callable[[trio.abc.Stream, trio.abc.Stream], Awaitable[None]]

_CHECKS: tuple[Check, ...] = (
    _bytes_arrive_as_they_were_sent,
    _empty_sends_mean_nothing,
    _one_byte_at_a_time_is_enough,
    _both_sides_may_push_at_once,
    _a_sender_waits_for_a_reader,
    _a_close_is_the_end_for_the_peer,
    _nothing_works_after_a_local_close,
    _a_peer_that_left_breaks_the_sender,
    _a_cancelled_receive_loses_nothing,
    _closing_twice_is_fine,
    _a_cancelled_close_still_closes,
    _a_close_wakes_who_waits_in_receive,
    _two_tasks_cannot_receive_at_once,
    _writing_at_once_keeps_the_order,
    _writing_at_once_never_waits,
    _a_wait_ends_when_something_came,
    _a_wait_can_be_stopped,
    _a_close_wakes_who_waits_to_receive,
)


async def _is_checkpoint(link: WaitableLink) -> bool:
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.wait_readable()
    return scope.cancelled_caught


async def _receive_waiting(link: WaitableLink) -> bytes:
    """Receive until the end of the stream."""
    got = bytearray()
    while (piece := link.receive_nowait(PIECE)) != b"":
        if piece is None:
            await link.wait_readable()
        else:
            got += piece
    return bytes(got)


def noise(size: int, *, seed: int = 0) -> bytes:
    """Return `size` random bytes, the same for the same size and seed."""
    return random.Random(size + seed).randbytes(size)


async def receive(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises AssertionError if the stream ends earlier."""
    got = bytearray()
    while len(got) < size:
        piece = await stream.receive_some(size - len(got))
        require(bool(piece), f"the stream ended after {len(got)} of {size} bytes")
        got += piece
    require(len(got) == size, f"{len(got)} bytes came where at most {size} were asked for")
    return bytes(got)


async def expect(stream: trio.abc.ReceiveStream, data: bytes) -> None:
    require(await receive(stream, len(data)) == data, f"{len(data)} bytes came out different")


async def drain(stream: trio.abc.ReceiveStream) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


async def send_pieces(stream: trio.abc.SendStream, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    for piece in pieces:
        await stream.send_all(piece)
        await trio.lowlevel.checkpoint()


async def send_and_close(stream: trio.abc.Stream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.aclose()
