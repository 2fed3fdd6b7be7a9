"""The end of a link by both shutdowns, against a peer that answers bytes from the document and nothing else.

With channel ids of 0 bytes the original program has no `closed`: it sends its shutdown once its own channel is drained,
and hangs up when it has seen both.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit.protocols import relink
from muxkit.protocols.relink import Config
from muxkit.runtime import background
from muxkit.testing._pair import drain
from muxkit_adapters import memory
from tests.protocols.relink._helpers import connector, fed, listener, quiet, seen
from tests.protocols.relink._session_world import SOON, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit.protocols.relink import Link, LinkReplaced

ONE_CHANNEL = Config(keepalive=None, connector_id_size=0, listener_id_size=0)
HELLO = bytes.fromhex("11 01 05 00 00 00 00 00 68 65 6c 6c 6f 00 00 00")
CONSUMED = bytes.fromhex("2d 00 00 00 00 00 00 00")
CLOSE = bytes.fromhex("41 00 00 00 00 00 00 00")
SHUTDOWN = bytes.fromhex("80 00 00 00 00 00 00 00")


@attrs.define(eq=False)
class BarePeer:
    """A listener for a connector's only channel, in bytes; it counts how often it was dialled."""

    nursery: trio.Nursery
    says: bytes = b""
    """Written before anything is read; a peer that says nothing first waits for the message and returns it."""
    dialled: int = 0
    last: bytes = b""
    """What came behind the message."""

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        self.dialled += 1
        here, there = memory.pair()
        self.nursery.start_soon(self.serve, there)
        async with here:
            yield here

    async def serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            await _exactly(stream, 8)
            await stream.send_all(bytes(8))
            await _exactly(stream, 24)
            await stream.send_all((7).to_bytes(8, "little") + (5 + self.dialled).to_bytes(8, "little"))
            if self.says:
                await stream.send_all(self.says)
            else:
                assert await _exactly(stream, len(HELLO)) == HELLO
                await stream.send_all(HELLO + CONSUMED)
            while SHUTDOWN not in self.last:
                data = await stream.receive_some()
                if not data:
                    return
                self.last += data
            if not self.says:
                await stream.send_all(SHUTDOWN)


async def _exactly(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := await stream.receive_some(size - len(data))):
        data += part
    return data


@pytest.mark.clause("relink-S03")
@pytest.mark.parametrize("ack_delay", [0.01, 0.1])
async def test_a_link_that_both_sides_shut_down_is_over_though_no_closed_came(
    ack_delay: float, autojump_clock: MockClock
) -> None:
    changes: list[LinkReplaced] = []
    async with background() as nursery:
        peer = BarePeer(nursery)
        config = attrs.evolve(ONE_CHANNEL, ack_delay=ack_delay)
        async with relink.link(peer.dial, config=config, backoff=SOON, on_changed=changes.append) as link:
            sender = link.sender(0)
            await sender.send(b"hello")
            async with link.receiver(0) as receiver:
                with await receiver.receive() as message:
                    assert message.data == b"hello"
    assert peer.dialled == 1
    assert not changes
    assert CLOSE + SHUTDOWN in peer.last
    assert trio.current_time() < 1


async def test_a_sender_that_waits_for_its_end_hears_of_it_when_both_sides_have_shut_down(
    autojump_clock: MockClock,
) -> None:
    async with background() as nursery:
        peer = BarePeer(nursery)
        async with relink.link(peer.dial, config=ONE_CHANNEL, backoff=SOON) as link:
            sender = link.sender(0)
            await sender.send(b"hello")
            receiver = link.receiver(0)
            (await receiver.receive()).consume()
            async with trio.open_nursery() as both:
                both.start_soon(sender.finish)
                await trio.testing.wait_all_tasks_blocked()
                await link.shutdown(grace=1)
    assert peer.dialled == 1


@pytest.mark.clause("relink-S02", "relink-S03")
async def test_a_receiver_of_the_only_channel_ends_with_the_peers_shutdown(autojump_clock: MockClock) -> None:
    async with background() as nursery:
        peer = BarePeer(nursery, says=HELLO + SHUTDOWN)
        async with relink.link(peer.dial, config=ONE_CHANNEL, backoff=SOON) as link:
            assert [message.data async for message in link.receiver(0)] == [b"hello"]
            assert [message.data async for message in link.receiver(0)] == []
    assert peer.dialled == 1


async def test_a_receiver_of_a_channel_that_was_never_opened_ends_with_the_peers_shutdown(
    autojump_clock: MockClock,
) -> None:
    async def shut_down(link: Link) -> None:
        await link.shutdown(grace=1)

    async with world(handler=shut_down) as made, made.link() as link:
        assert [message async for message in link.receiver(4)] == []
        assert [message async for message in link.receiver(4)] == []


@pytest.mark.clause("relink-S01", "relink-S02")
def test_the_shutdown_of_a_side_with_one_channel_follows_the_close_of_that_channel() -> None:
    engine = connector(quiet(connector_id_size=0, listener_id_size=0))
    engine.send(0, (b"hello",))
    engine.shutdown()
    engine.send(0, (b"again",))
    assert SHUTDOWN not in drain(engine)
    fed(engine, "2d 00 00 00 01 00 00 00")
    engine.close(0)
    assert drain(engine).endswith(CLOSE + SHUTDOWN)


@pytest.mark.clause("relink-S03")
def test_a_peer_that_hangs_up_after_both_shutdowns_has_ended_the_link() -> None:
    """It may have read our answers, and does not say so: the pong that would is not owed any more."""
    engine = listener(quiet(connector_transactions=True))
    fed(engine, "11 01 01 00 01 00 00 00 61 00 00 00 00 00 00 00", "01 00 01 00 00 00 00 00")
    engine.committed(1, through=0, now=0.0)
    fed(engine, "41 00 01 00 00 00 00 00", SHUTDOWN.hex())
    engine.shutdown()
    drain(engine)
    assert not engine.over
    engine.receive_eof(0.0)
    assert ("LinkFinished",) in seen(engine)
