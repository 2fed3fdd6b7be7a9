"""The position of a reader: what it acknowledges, what waits for the application, and what is saved."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LocalProtocolError
from muxkit.protocols import restream
from muxkit.protocols.restream import ClientConfig, ClientPolicy, Message
from muxkit_adapters import memory
from tests.protocols.restream._helpers import EXAMPLE, OTHER, UUID, line
from tests.protocols.restream.test_client import BY_HAND, HOLD, Script, messages, nowhere, whole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

# --- acknowledgements


@pytest.mark.clause("restream-S30", "restream-S31")
async def test_every_so_many_messages_are_acknowledged_and_the_final_one(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*whole(), HOLD]])
    async with restream.numbers(script.dial, count=5, config=ClientConfig(ack_every=2)) as numbers:
        async for _ in numbers:
            await trio.sleep(0.01)
    await trio.testing.wait_all_tasks_blocked()
    assert script.acks == [2, 4, 5]
    assert numbers.acknowledged == 5


async def test_only_what_was_taken_is_acknowledged(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*messages(1, 50), HOLD]])
    async with restream.numbers(script.dial, count=99, config=ClientConfig(ack_every=1)) as numbers:
        for _ in range(3):
            await numbers.receive()
        await trio.sleep(10)
        assert script.acks[-1] == 3


async def test_what_was_taken_is_acknowledged_soon_also_when_nothing_more_comes(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*messages(1, 3), HOLD]])
    async with restream.numbers(script.dial, count=99, policy=ClientPolicy(ack_after=2.0)) as numbers:
        for _ in range(3):
            await numbers.receive()
        await trio.sleep(1.99)
        assert script.acks == []
        await trio.sleep(0.02)
        assert script.acks == [3]
        await trio.sleep(15)
        assert script.acks == [3]


async def test_leaving_acknowledges_what_was_taken(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*messages(1, 5), HOLD]])
    async with restream.numbers(script.dial, count=99) as numbers:
        for _ in range(3):
            await numbers.receive()
    await trio.testing.wait_all_tasks_blocked()
    assert script.acks == [3]


async def test_by_hand_nothing_is_acknowledged_but_by_hand(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*whole(), HOLD]])
    async with restream.numbers(script.dial, count=5, config=BY_HAND) as numbers:
        for _ in range(4):
            await numbers.receive()
        await trio.sleep(4)
        assert script.acks == []
        numbers.acknowledge(3)
        await trio.testing.wait_all_tasks_blocked()
        assert script.acks == [3]
        with pytest.raises(LocalProtocolError, match="5 cannot be acknowledged, 4 is the last"):
            numbers.acknowledge(5)
        assert await numbers.receive() == EXAMPLE[-1]
        numbers.acknowledge()
        numbers.acknowledge()
    await trio.testing.wait_all_tasks_blocked()
    assert script.acks == [3, 5]


async def test_who_acknowledges_nothing_by_hand_leaves_at_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*whole(), HOLD]])
    async with restream.numbers(script.dial, count=5, config=BY_HAND) as numbers:
        assert [number async for number in numbers] == EXAMPLE
        left = trio.current_time()
    assert trio.current_time() == left
    assert script.acks == []


async def test_a_slow_application_keeps_the_server_waiting_for_the_last_word_no_longer_than_it_lingers(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*whole(), HOLD]])
    async with restream.numbers(script.dial, count=5) as numbers:
        await numbers.receive()
        began = trio.current_time()
        await trio.sleep(100)
        assert script.over == pytest.approx([began + 5.0])
        assert [number async for number in numbers] == EXAMPLE[1:]
    assert numbers.connections == 1


async def test_an_acknowledgement_that_was_cut_off_is_no_loss(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*messages(1, 20)], [*messages(21, 40), HOLD]])
    async with restream.numbers(script.dial, count=99) as numbers:
        got = [await numbers.receive() for _ in range(40)]
    assert got == [*range(1, 41)]
    assert script.asked[1:] == [{"uuid": numbers.uuid, "state": 20}]


# --- bounds


@pytest.mark.requirement("R-03")
async def test_what_waits_for_the_application_is_bounded(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [messages(1, 5_000)], capacity=4096)
    async with restream.numbers(script.dial, count=65_535, policy=ClientPolicy(ahead=10)) as numbers:
        await trio.sleep(1000)
        assert 10 <= len(numbers._waiting) <= 20
        assert numbers.connections == 1
        assert [await numbers.receive() for _ in range(5_000)] == [*range(1, 5_001)]


async def test_a_line_is_not_late_while_we_do_not_read(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    half = line({"id": 3, "data": {"value": 3}})
    begun = b"".join(map(line, messages(1, 2))) + half[:9]  # an unfinished line is held when reading stops
    script = Script(nursery, [[begun, 1.0, half[9:], HOLD]])
    policy = ClientPolicy(ahead=1, silence=None)
    async with restream.numbers(script.dial, count=9, policy=policy, limits=Limits(stall=5.0)) as numbers:
        await trio.sleep(100)
        assert [await numbers.receive() for _ in range(3)] == [1, 2, 3]


# --- what is saved


async def test_a_saved_stream_goes_on_behind_what_was_taken(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*whole()[:4], HOLD], whole()[3:]])
    async with restream.numbers(script.dial, count=5, uuid=OTHER, config=BY_HAND) as numbers:
        got = [await numbers.receive() for _ in range(3)]
        saved = json.loads(json.dumps(numbers.snapshot()))
        numbers.acknowledge()
    async with restream.numbers(script.dial, resume=saved, config=BY_HAND) as numbers:
        assert (numbers.uuid, numbers.last_id) == (OTHER, 3)
        got += [number async for number in numbers]
        finished = numbers.snapshot()
    assert got == EXAMPLE
    assert script.asked[1] == {"uuid": OTHER, "state": 3}
    async with restream.numbers(script.dial, resume=finished) as numbers:
        with pytest.raises(trio.EndOfChannel):
            await numbers.receive()
    assert len(script.at) == 2


async def test_saved_integers_go_on_behind_what_was_taken(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[{"data": "7"}, {"data": "8"}, HOLD], [{"data": "8"}, HOLD]])
    async with restream.integers(script.dial) as integers:
        assert await integers.receive() == 7
        saved = integers.snapshot()
    async with restream.integers(script.dial, resume=saved) as integers:
        assert await integers.receive() == 8
    assert script.asked == [{}, {"state": "7"}]


async def test_a_saved_stream_of_another_application_goes_on(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[{"id": 1, "data": "a"}, HOLD], [{"id": 2, "data": "b"}, HOLD]])
    async with restream.stream(script.dial, {"topic": 1}, config=BY_HAND) as stream:
        await stream.receive()
        saved = stream.snapshot()
    async with restream.stream(script.dial, resume=saved, config=BY_HAND) as stream:
        assert await stream.receive() == Message(2, "b")


def test_what_is_saved_of_one_kind_is_not_resumed_as_another() -> None:
    stateless = restream.ClientEngine.stateless(state="7").snapshot()
    stateful = restream.ClientEngine.stateful(UUID, {"count": 5}).snapshot()
    with pytest.raises(LocalProtocolError, match="is of a stateless stream, not of a stateful one"):
        restream.numbers(nowhere, resume=stateless)
    with pytest.raises(LocalProtocolError, match="is of a stateful stream, not of a stateless one"):
        restream.integers(nowhere, resume=stateful)
    with pytest.raises(ValueError, match="has its count and uuid already"):
        restream.numbers(nowhere, resume=stateful, count=5)
    with pytest.raises(ValueError, match="has its params and uuid already"):
        restream.stream(nowhere, resume=stateful, uuid=UUID)


@pytest.mark.clause("restream-G07")
async def test_the_client_keeps_one_id_and_no_messages(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[*messages(1, 1000), HOLD]])
    async with restream.numbers(script.dial, count=65_535) as numbers:
        for _ in range(1000):
            await numbers.receive()
        assert len(json.dumps(numbers.snapshot())) < 250


# --- connections that are broken in one direction


class Mute(trio.abc.Stream):
    """A stream whose received bytes come from another one, and which fails after a number of writes."""

    def __init__(self, inner: memory.MemoryStream, writes: int) -> None:
        self._inner = inner
        self._writes = writes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._writes == 0:
            raise trio.BrokenResourceError("this stream cannot be written to")
        self._writes -= 1
        await self._inner.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._inner.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_a_request_that_cannot_be_written_is_a_drop(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script, streams = Script(nursery, [whole()]), list[memory.MemoryStream]()

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        if streams:
            async with script.dial() as stream:
                yield stream
            return
        ours, theirs = memory.pair()
        streams.append(theirs)  # the other end is neither read nor closed
        async with Mute(ours, 0) as stream:
            yield stream

    async with restream.numbers(dial, count=5, policy=ClientPolicy(silence=None)) as numbers:
        assert [number async for number in numbers] == EXAMPLE
        assert numbers.connections == 2


async def test_when_acknowledgements_cannot_be_written_the_messages_still_come(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*whole(), HOLD]])

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        async with script.dial() as stream:
            assert isinstance(stream, memory.MemoryStream)
            yield Mute(stream, 1)

    async with restream.numbers(dial, count=5, config=ClientConfig(ack_every=1)) as numbers:
        assert [number async for number in numbers] == EXAMPLE
        left = trio.current_time()
    assert trio.current_time() == left
    assert numbers.connections == 1
    assert script.acks == []
