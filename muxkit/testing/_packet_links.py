"""The conformance suite for packet transports, which tries each promise of a packet link.

    await check_packet_link(my_pair, goodbye=False)

`my_pair()` is an async context manager that yields two connected links, over a network that doesn't lose packets on its
own, such as loopback. Each check opens its own pair.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress

import trio
import trio.testing

from muxkit.runtime import NowaitPackets
from muxkit.testing._checks import must_raise, run_both_ways
from muxkit.testing._links import noise
from muxkit.testing._pair import require

Link = trio.abc.Channel[bytes]
MakePair = Callable[[], AbstractAsyncContextManager[tuple[Link, Link]]]
Check = Callable[[Link, Link], Awaitable[None]]

SIZES = (1, 2, 3, 100, 576, 1000)  # bytes; the link's own limit is tried as well
FLOOD, FLOOD_SIZE = 20_000, 1000  # packets that no task receives, and their size: together more than a link may keep
KEPT_MOST = 16 * 1024 * 1024  # bytes of the flood that may be kept, including the kernel's buffers
QUIET = 0.05  # s without an arrival, after which the sender marks the end of the flood with a last packet


async def check_packet_link(make_pair: MakePair, *, goodbye: bool) -> None:
    """Check every promise of a packet link, in both directions.

    Args:
        make_pair: returns an async context manager that yields two connected links.
        goodbye: True if the link promises to notify its peer of `aclose`, which then raises `trio.EndOfChannel`.

    Raises:
        AssertionError: if a promise is broken. The text names the check.
    """
    for check in (*_CHECKS, *([_a_close_is_the_end_for_the_peer] if goodbye else [])):
        await run_both_ways(check, make_pair)


# The checks


async def _packets_arrive_whole_and_apart(here: Link, there: Link) -> None:
    limit = here.packet_limit if isinstance(here, NowaitPackets) else SIZES[-1]
    for size in {*SIZES, limit - 1, limit}:
        if size <= limit:
            await _pass_on(here, there, noise(size))
    packets = [noise(size, seed=size) for size in SIZES]
    for packet in packets:
        await here.send(packet)
    got = [await there.receive() for _ in packets]
    require(sorted(got) == sorted(packets), "packets sent one after the other were joined, cut or changed")


async def _an_empty_packet_arrives_or_is_refused(here: Link, there: Link) -> None:
    try:
        await here.send(b"")
    except ValueError:
        pass
    else:
        require(await there.receive() == b"", "an empty packet came as something else")
    await _pass_on(here, there, b"after the empty one")


async def _both_sides_may_talk_at_once(here: Link, there: Link) -> None:
    async with trio.open_nursery() as nursery:
        for one, other in ((here, there), (there, here)):
            nursery.start_soon(_pass_many_on, one, other, 100)


async def _a_sender_never_waits_for_a_reader(here: Link, there: Link) -> None:
    size = _flood_size(here)
    for number in range(FLOOD):
        await here.send(b"%d" % number + bytes(size - 8))
    kept = await _drain(here, there)
    require(kept <= KEPT_MOST, f"{kept} bytes were kept for a reader who did not come")


async def _a_packet_above_the_limit_is_refused(here: Link, there: Link) -> None:
    if not isinstance(here, NowaitPackets):
        return
    limit = here.packet_limit
    require(limit > 0, f"packet_limit is {limit}")
    await must_raise(ValueError, "send of a packet above packet_limit", here.send, bytes(limit + 1))
    for batch in ([bytes(limit + 1)], [b"first", bytes(limit + 1)]):
        await must_raise(ValueError, "send_nowait of a packet above packet_limit", here.send_nowait, batch)
    await _pass_on(here, there, b"the next one")


async def _a_cancelled_send_sends_nothing(here: Link, there: Link) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await here.send(b"never")
    require(scope.cancelled_caught, "send in a cancelled scope was not cancelled")
    await _pass_on(here, there, b"after it")


async def _a_cancelled_receive_loses_nothing(here: Link, there: Link) -> None:
    for turn in range(300):
        packet = b"%d" % turn
        got: list[bytes] = []

        async def take(into: list[bytes] = got) -> None:
            into.append(await there.receive())

        with trio.CancelScope() as scope:
            # In turn, cancel before the wait, during it, and when the packet has arrived. No packet may be lost.
            if turn % 3 == 0:
                scope.cancel()
                await take()
        if turn % 3 == 1:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                await trio.testing.wait_all_tasks_blocked()
                await here.send(packet)
                nursery.cancel_scope.cancel()
        else:
            await here.send(packet)
        if turn % 3 == 2:
            with trio.CancelScope() as scope:
                scope.deadline = trio.current_time()
                await take()
        if not got:
            await take()
        require(got == [packet], "a cancelled receive lost, repeated or changed a packet")


async def _send_and_receive_are_checkpoints(here: Link, there: Link) -> None:
    for _ in range(3):
        with trio.testing.assert_checkpoints():
            await here.send(b"packet")
    for _ in range(3):
        with trio.testing.assert_checkpoints():
            await there.receive()


async def _nothing_works_after_a_local_close(here: Link, there: Link) -> None:
    with trio.testing.assert_checkpoints():
        await here.aclose()
    await must_raise(trio.ClosedResourceError, "send after aclose", here.send, b"x")
    await must_raise(trio.ClosedResourceError, "receive after aclose", here.receive)
    if isinstance(here, NowaitPackets):
        await must_raise(trio.ClosedResourceError, "send_nowait after aclose", here.send_nowait, [b"x"])
        await must_raise(trio.ClosedResourceError, "receive_nowait after aclose", here.receive_nowait, 1)


async def _closing_twice_is_fine(here: Link, there: Link) -> None:
    for _ in range(3):
        await here.aclose()


async def _a_cancelled_close_still_closes(here: Link, there: Link) -> None:
    await trio.aclose_forcefully(here)
    await must_raise(trio.ClosedResourceError, "send after a cancelled aclose", here.send, b"x")


async def _a_close_wakes_who_waits_in_receive(here: Link, there: Link) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(must_raise, trio.ClosedResourceError, "receive while aclose came", here.receive)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(here)


async def _sending_to_who_left_is_no_surprise(here: Link, there: Link) -> None:
    await there.aclose()
    # The network may or may not report that the peer is gone. Any other error than these is a defect.
    with suppress(trio.BrokenResourceError):
        for _ in range(50):
            await here.send(b"hello?")


async def _bursts_arrive_whole_and_apart(here: Link, there: Link) -> None:
    if not (isinstance(here, NowaitPackets) and isinstance(there, NowaitPackets)):
        return
    require(here.send_nowait([]) == 0, "send_nowait of nothing is not 0")
    require(there.receive_nowait(10) == [], "receive_nowait gave packets that were not sent")
    chance = random.Random(7)
    for burst in range(10):
        # Mix runs of one size with packets of other sizes, since a link may send equal sizes in one system call.
        sizes = [chance.choice((400, chance.randrange(1, min(1000, here.packet_limit)))) for _ in range(20)]
        packets = [b"%d." % index + noise(size, seed=burst) for index, size in enumerate(sizes)]
        await _send_burst(here, packets)
        got = [await there.receive()]
        while len(got) < len(packets):
            some = there.receive_nowait(7)
            require(len(some) <= 7, f"receive_nowait(7) gave {len(some)} packets")
            got += some or [await there.receive()]
        require(sorted(got) == sorted(packets), "a burst came out different")


async def _sending_at_once_never_waits(here: Link, there: Link) -> None:
    if not isinstance(here, NowaitPackets):
        return
    packets = [bytes(_flood_size(here))] * 20
    for _ in range(FLOOD // 20):
        taken = here.send_nowait(packets)
        require(0 <= taken <= 20, f"send_nowait took {taken} of 20 packets")
    await _drain(here, there)
    await _pass_on(here, there, b"later")


async def _a_close_is_the_end_for_the_peer(here: Link, there: Link) -> None:
    await here.send(b"last words")
    await here.aclose()
    require(await there.receive() == b"last words", "a packet sent before aclose was lost")
    for _ in range(2):
        await must_raise(trio.EndOfChannel, "receive after the peer's aclose", there.receive)
    await there.aclose()


_CHECKS: tuple[Check, ...] = (
    _packets_arrive_whole_and_apart,
    _an_empty_packet_arrives_or_is_refused,
    _both_sides_may_talk_at_once,
    _a_sender_never_waits_for_a_reader,
    _a_packet_above_the_limit_is_refused,
    _a_cancelled_send_sends_nothing,
    _a_cancelled_receive_loses_nothing,
    _send_and_receive_are_checkpoints,
    _nothing_works_after_a_local_close,
    _closing_twice_is_fine,
    _a_cancelled_close_still_closes,
    _a_close_wakes_who_waits_in_receive,
    _sending_to_who_left_is_no_surprise,
    _bursts_arrive_whole_and_apart,
    _sending_at_once_never_waits,
)


# Helpers


async def _pass_on(here: Link, there: Link, packet: bytes) -> None:
    await here.send(packet)
    got = await there.receive()
    require(got == packet, f"a packet of {len(packet)} bytes came as another, of {len(got)} bytes")


async def _pass_many_on(here: Link, there: Link, count: int) -> None:
    for number in range(count):
        await _pass_on(here, there, b"%d" % number)


async def _send_burst(link: NowaitPackets, packets: list[bytes]) -> None:
    while packets:
        packets = packets[link.send_nowait(packets) :]
        await trio.lowlevel.checkpoint()


def _flood_size(link: Link) -> int:
    return min(FLOOD_SIZE, link.packet_limit) if isinstance(link, NowaitPackets) else FLOOD_SIZE


async def _drain(here: Link, there: Link) -> int:
    """Receive the packets of a flood that the link kept, and return how many bytes they have.

    A pause doesn't prove that the flood is over, because a busy machine may not have run this task in time. What proves
    it is a last packet, since all others arrive before it. A link that is still full drops the last packet, so the next
    one follows after a pause that is twice as long.
    """
    kept, pause, lasts = 0, QUIET, 0
    packet = b""
    while not lasts or packet != b"after the flood, %d" % lasts:
        with trio.move_on_after(pause) as scope:
            packet = await there.receive()
            kept += len(packet)
        if scope.cancelled_caught:
            lasts, pause = lasts + 1, 2 * pause
            await here.send(b"after the flood, %d" % lasts)
    return kept
