"""A pair of halves is a byte stream by Trio's definition."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.runtime import ByteStream

from ._halves import MemorySender, Outbox, PlainReceive, WindowedSend, at_rest, lost, stopped


class Joined:
    """Two byte streams over halves that are joined back to back, with a window that consumption renews."""

    def __init__(self, window: int = 10_000) -> None:
        self.streams = self._stream(window)

    def _stream(self, window: int) -> tuple[ByteStream, ByteStream]:
        outbox = Outbox(limit=1_000_000_000)
        ends: list[tuple[WindowedSend, PlainReceive]] = []
        for _ in range(2):
            source = PlainReceive()
            sink = _Eager(outbox, window, source)
            source.engine.on_consumed = sink.grant
            ends.append((sink, source))
        (there, arrived_there), (back, arrived_back) = ends
        return ByteStream(there, arrived_back), ByteStream(back, arrived_there)


class _EagerSender(MemorySender):
    source: PlainReceive

    def has_room(self, size: int) -> bool:
        return self.window.credit > 0

    def send(self, message: bytes) -> None:
        self.window.credit -= len(message)
        self.outbox.used += len(message)
        self.sent.append(message)
        self.source.deliver(message)

    def finish(self, payload: bytes = b"") -> None:
        super().finish(payload)
        self.source.ended(trio.EndOfChannel)


class _Eager(WindowedSend):
    """The peer hears of everything at once."""

    new_sender = _EagerSender

    def __init__(self, outbox: Outbox, credit: int, source: PlainReceive) -> None:
        super().__init__(outbox, credit, source.deliver)
        source.engine.on_stop = lambda: self.stopped(stopped)
        assert isinstance(self.engine, _EagerSender)
        self.engine.source = source


async def make() -> tuple[ByteStream, ByteStream]:
    return Joined().streams


async def make_clogged() -> tuple[ByteStream, ByteStream]:
    one, other = Joined(window=1000).streams
    await one.send_all(bytes(1000))
    await other.send_all(bytes(1000))
    return one, other


@pytest.mark.requirement("R-41")
async def test_it_passes_trios_own_checks() -> None:
    await trio.testing.check_half_closeable_stream(make, make_clogged)


async def test_message_boundaries_and_empty_messages_mean_nothing() -> None:
    source = PlainReceive()
    stream = ByteStream(WindowedSend(Outbox()), source)
    for message in (b"ab", b"", b"c"):
        source.deliver(message)
    assert await stream.receive_some(1) == b"a"
    assert await stream.receive_some() == b"b"
    assert await stream.receive_some(100) == b"c"


async def test_what_is_sent_goes_in_pieces() -> None:
    sink = WindowedSend(Outbox(limit=1_000_000), credit=1_000_000)
    await ByteStream(sink, PlainReceive()).send_all(bytes(200_000))
    assert sum(map(len, sink.sent)) == 200_000
    assert max(map(len, sink.sent)) <= 65_536


@pytest.mark.requirement("R-34")
async def test_every_call_yields() -> None:
    one, other = Joined().streams
    with trio.testing.assert_checkpoints():
        await one.send_all(b"x")
    with trio.testing.assert_checkpoints():
        await one.send_all(b"")
    with trio.testing.assert_checkpoints():
        await other.receive_some()
    with trio.testing.assert_checkpoints():
        await one.wait_send_all_might_not_block()
    with trio.testing.assert_checkpoints():
        await one.send_eof()
    with trio.testing.assert_checkpoints():
        assert await other.receive_some() == b""
    with trio.testing.assert_checkpoints():
        assert await other.receive_some() == b""
    for stream in (one, one):
        with trio.testing.assert_checkpoints():
            await stream.aclose()


@pytest.mark.requirement("R-39")
async def test_a_loss_is_a_broken_stream() -> None:
    sink, source = WindowedSend(Outbox()), PlainReceive()
    stream = ByteStream(sink, source)
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(LinkLost):
                await stream.receive_some()

        nursery.start_soon(receive)
        await at_rest()
        sink.lost(lost)
        source.ended(lost)
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"x")
