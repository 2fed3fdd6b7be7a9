"""Handshakes are read within their bounds, and the stream goes on where they end."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit import Limits, RemoteProtocolError
from muxkit.runtime import HandshakeQueue, LinkLost, NowaitLink, prefixed
from muxkit.testing import check_link
from muxkit_adapters import memory, tcp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

pytestmark = pytest.mark.requirement("R-13")


@attrs.define
class Line:
    """A handshake that is a line; `!` in it is wrong, and each `?` is answered."""

    data: bytes = b""
    owed: bytes = b""

    def receive_bytes(self, data: bytes) -> bytes | None:
        self.data += data
        self.owed += b"yes" * data.count(b"?")
        if b"!" in self.data:
            raise RemoteProtocolError("no shouting")
        line, newline, rest = self.data.partition(b"\n")
        self.data = rest if newline else line
        return line if newline else None

    def bytes_to_send(self) -> bytes:
        owed, self.owed = self.owed, b""
        return owed

    def leftover(self) -> bytes:
        return self.data


async def test_a_handshake_is_read_and_what_is_left_over_comes_first() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(b"hello\nand")
    learnt, stream = await HandshakeQueue().read_handshake(ours, Line())
    assert learnt == b"hello"
    await theirs.send_all(b" so on")
    assert (await stream.receive_some(2), await stream.receive_some(), await stream.receive_some()) == (
        b"an",
        b"d",
        b" so on",
    )


async def test_a_handshake_may_come_byte_by_byte(autojump_clock: MockClock) -> None:
    ours, theirs = memory.pair()

    async def dribble() -> None:
        for byte in b"hello\nrest":
            await theirs.send_all(bytes([byte]))
            await trio.sleep(0.5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dribble)
        learnt, stream = await HandshakeQueue().read_handshake(ours, Line())
        assert learnt == b"hello"
        assert stream is ours  # nothing was read too far


async def test_a_handshake_may_need_answers() -> None:
    ours, theirs = memory.pair()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            await theirs.send_all(b"are you there?")
            assert await theirs.receive_some() == b"yes"
            await theirs.send_all(b"\n")

        nursery.start_soon(ask)
        await HandshakeQueue().read_handshake(ours, Line(owed=b""))


async def test_what_the_engine_refuses_can_be_answered() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(b"HELLO!")
    with pytest.raises(RemoteProtocolError, match="no shouting"):
        await HandshakeQueue().read_handshake(ours, Line())
    await ours.send_all(b"not so loud")
    assert await theirs.receive_some() == b"not so loud"


async def test_a_handshake_has_so_many_bytes_and_no_more() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(bytes(2000))
    with pytest.raises(RemoteProtocolError, match="1024 bytes came and the handshake is not complete"):
        await HandshakeQueue(most=1024).read_handshake(ours, Line())
    assert len(await ours.receive_some()) == 2000 - 1024


async def test_a_handshake_of_just_so_many_bytes_is_complete() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(bytes(1023) + b"\n" + b"rest")
    learnt, stream = await HandshakeQueue(most=1024).read_handshake(ours, Line())
    assert learnt == bytes(1023)
    assert await stream.receive_some() == b"rest"


async def test_a_handshake_has_so_much_time_and_no_more(autojump_clock: MockClock) -> None:
    ours, theirs = memory.pair()

    async def dribble() -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                await theirs.send_all(b"x")
                await trio.sleep(1)

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dribble)
        with pytest.raises(RemoteProtocolError, match=r"within 10 s: 1[01] bytes came; raise Limits\(handshake"):
            await HandshakeQueue().read_handshake(ours, Line())
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start == pytest.approx(10.0)


async def test_a_peer_that_reads_no_answer_has_no_more_time_either(autojump_clock: MockClock) -> None:
    ours, theirs = memory.pair(capacity=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.send_all, b"?\n")
        with pytest.raises(RemoteProtocolError, match="within 10 s"):
            await HandshakeQueue().read_handshake(ours, Line())
        nursery.cancel_scope.cancel()


async def test_a_peer_that_hangs_up_is_lost() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(b"hel")
    await theirs.aclose()
    with pytest.raises(LinkLost, match="hung up after 3 bytes") as caught:
        await HandshakeQueue().read_handshake(ours, Line())
    assert caught.value.by == "peer"


async def test_a_connection_that_breaks_is_lost() -> None:
    ours, theirs = memory.pair()
    await theirs.send_all(b"?")
    await trio.lowlevel.checkpoint()
    await trio.aclose_forcefully(theirs)
    with pytest.raises(LinkLost) as caught:
        await HandshakeQueue().read_handshake(ours, Line())
    assert caught.value.by == "network"


async def test_the_oldest_goes_after_a_while_when_there_are_too_many(autojump_clock: MockClock) -> None:
    queue, lost, errors = HandshakeQueue(Limits(half_open=3)), list[int](), list[LinkLost]()

    async def greet(number: int, stream: trio.abc.Stream) -> None:
        try:
            await queue.read_handshake(stream, Line())
        except LinkLost as error:
            errors.append(error)
            lost.append(number)

    peers = []
    async with trio.open_nursery() as nursery:
        for number in range(5):
            ours, theirs = memory.pair()
            peers.append(theirs)
            nursery.start_soon(greet, number, ours)
            await trio.testing.wait_all_tasks_blocked()
        assert (lost, len(queue)) == ([], 3), "the newer ones wait"
        await trio.sleep(1.5)
        assert (sorted(lost), len(queue)) == ([0, 1], 3)
        for theirs in peers[2:]:
            await theirs.send_all(b"\n")
    assert (sorted(lost), len(queue)) == ([0, 1], 0)
    assert all(error.by == "local" and "half_open" in str(error) for error in errors)


async def test_a_cancelled_handshake_leaves_the_queue(autojump_clock: MockClock) -> None:
    queue = HandshakeQueue()
    with trio.move_on_after(1) as scope:
        await queue.read_handshake(memory.pair()[0], Line())
    assert scope.cancelled_caught
    assert len(queue) == 0


# ---------------------------------------------------------------------------- over real sockets

SLOW = 1000
GOOD = 20


async def test_a_good_client_is_quickly_served_while_a_thousand_dribble() -> None:
    queue = HandshakeQueue(Limits(handshake=1000.0))  # so none is dropped by time

    async def handle(stream: trio.abc.Stream) -> None:
        learnt, link = await queue.read_handshake(stream, Line())
        await link.send_all(b"welcome " + learnt)

    async def dribble(number: int, address: tuple[str, int], connected: trio.Semaphore) -> None:
        """A byte, and then one a second; a dropped peer comes again after a while, at a time of its own."""
        while True:
            async with tcp.connect(*address) as stream:
                connected.release()
                with suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all(b"x")
                        with trio.move_on_after(1.0):
                            if await stream.receive_some() == b"":
                                break
            await trio.sleep(1.0 + 10.0 * number / SLOW)

    waits = []
    async with trio.open_nursery() as nursery:
        [name] = await nursery.start(tcp.serve, handle)
        host, _, port = name.rpartition(":")
        connected = trio.Semaphore(0)
        for number in range(SLOW):
            nursery.start_soon(dribble, number, (host, int(port)), connected)
        for _ in range(SLOW):
            await connected.acquire()
        for _ in range(GOOD):
            start = time.process_time()  # a busy machine may take longer, but not more work
            with trio.fail_after(60):
                async with tcp.connect(host, int(port)) as stream:
                    await stream.send_all(b"friend\n")
                    assert await stream.receive_some() == b"welcome friend"
            waits.append(time.process_time() - start)
        assert len(queue) == SLOW, "while there is room, nobody gives way"
        nursery.cancel_scope.cancel()
    assert sorted(waits)[GOOD // 2] < 0.1  # the slowest may have waited for the other half of this process


async def test_a_connection_in_its_handshake_costs_less_than_eight_kibibytes(autojump_clock: MockClock) -> None:
    queue, count = HandshakeQueue(Limits(half_open=1000)), 500
    pairs = [memory.pair() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        tracemalloc.start()
        try:
            for ours, theirs in pairs:
                await theirs.send_all(b"hel")
                nursery.start_soon(queue.read_handshake, ours, Line())
            await trio.testing.wait_all_tasks_blocked()
            assert len(queue) == count
            assert tracemalloc.get_traced_memory()[0] / count < 8 * 1024
        finally:
            tracemalloc.stop()
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------------- the stream with a prefix


@asynccontextmanager
async def prefixed_pair() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
    async with trio.open_nursery() as nursery:
        arrivals: list[trio.abc.Stream] = []
        arrived, over = trio.Event(), trio.Event()

        async def handle(stream: trio.abc.Stream) -> None:
            arrivals.append(stream)
            arrived.set()
            await over.wait()

        [name] = await nursery.start(tcp.serve, handle)
        host, _, port = name.rpartition(":")
        async with tcp.connect(host, int(port)) as stream:
            await arrived.wait()
            ends = []
            for one in (stream, arrivals[0]):
                end = prefixed(one, b"before")
                assert await end.receive_some(6) == b"before"
                ends.append(end)
            try:
                yield ends[0], ends[1]
            finally:
                for end in ends:
                    await trio.aclose_forcefully(end)
        over.set()
        nursery.cancel_scope.cancel()


async def test_a_stream_with_a_prefix_is_a_link_as_it_was() -> None:
    await check_link(prefixed_pair, half_close=True)


async def test_the_ways_to_write_stay_those_of_the_stream() -> None:
    ours, theirs = memory.pair()
    stream = prefixed(ours, b"x")
    assert isinstance(stream, NowaitLink)
    assert stream.send_nowait([b"a", b"b"]) == 2
    await stream.send_buffers([b"c"])
    assert await theirs.receive_some() == b"abc"
    plain = prefixed(trio.testing.memory_stream_pair()[0], b"x")
    assert not isinstance(plain, NowaitLink)
    assert isinstance(plain, trio.abc.HalfCloseableStream)


async def test_a_stream_with_a_prefix_says_who_its_peer_is() -> None:
    assert vars(prefixed(memory.pair(name="orders")[0], b"x"))["peer"] == "mem orders"
    assert vars(prefixed(trio.testing.memory_stream_pair()[0], b"x"))["peer"] == ""


async def test_closing_drops_the_prefix() -> None:
    stream = prefixed(memory.pair()[0], b"never read")
    await stream.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive_some()


async def test_a_prefix_is_read_with_a_checkpoint_and_survives_a_cancellation() -> None:
    stream = prefixed(memory.pair()[0], b"all of it")
    with pytest.raises(ValueError, match="at least 1"):
        await stream.receive_some(0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive_some()
    assert scope.cancelled_caught
    with trio.testing.assert_checkpoints():
        assert await stream.receive_some() == b"all of it"
