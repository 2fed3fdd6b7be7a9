"""A client reads a stream as it was sent, over several connections, and acknowledges it."""

from __future__ import annotations

import errno
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import attrs
import pytest
import trio
import trio.testing

from muxkit.protocols import restream
from muxkit.protocols.restream import ClientConfig, ClientPolicy, Message, Status
from muxkit_adapters import memory
from tests.protocols.restream._helpers import EXAMPLE, UUID, example, line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    from muxkit.protocols.restream import Json

HOLD: Final = "hold"
"""Say nothing more until the client hangs up."""
REFUSED: Final = ConnectionRefusedError(errno.ECONNREFUSED, "no server answers")

Play = Exception | list[object]
"""An attempt that fails; or what to say when the client has asked: objects, bytes, seconds of silence, `HOLD`."""


@attrs.define
class Script:
    """A server that plays one script for each connection; the last one is repeated."""

    nursery: trio.Nursery
    plays: Sequence[Play]
    at: list[float] = attrs.field(factory=list)
    """When each attempt was made."""
    heard: list[list[Json]] = attrs.field(factory=list)
    """What the client said on each connection."""
    over: list[float] = attrs.field(factory=list)
    """When the client hung up on connections that were held."""
    capacity: int = 65_536

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        play = self.plays[min(len(self.at), len(self.plays) - 1)]
        self.at.append(trio.current_time())
        if isinstance(play, Exception):
            raise play
        ours, theirs = memory.pair(capacity=self.capacity)
        self.nursery.start_soon(self._perform, theirs, play)
        async with ours:
            yield ours

    async def _perform(self, stream: memory.MemoryStream, play: list[object]) -> None:
        heard: list[Json] = []
        self.heard.append(heard)
        asked, gone = trio.Event(), trio.Event()

        async def listen() -> None:
            text = b""
            while data := await stream.receive_some():
                text += data
                *whole, text = text.split(b"\n")
                heard.extend(map(json.loads, whole))
                asked.set()
            asked.set()
            gone.set()

        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await asked.wait()
            try:
                for each in play:
                    if each is HOLD:
                        await gone.wait()
                        self.over.append(trio.current_time())
                    elif isinstance(each, float):
                        await trio.sleep(each)
                    else:
                        await stream.send_all(each if isinstance(each, bytes) else line(each))
            except trio.BrokenResourceError:
                pass
            nursery.cancel_scope.cancel()

    @property
    def asked(self) -> list[Json]:
        """The first line of each connection."""
        return [heard[0] for heard in self.heard]

    @property
    def acks(self) -> list[Json]:
        return [said["ack"] for heard in self.heard for said in heard[1:] if isinstance(said, dict)]

    @property
    def pauses(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


def messages(first: int, last: int) -> list[object]:
    """Play numbers without an end."""
    return [{"id": id, "data": {"value": id}} for id in range(first, last + 1)]


def whole() -> list[object]:
    return [*example()]


BY_HAND: Final = ClientConfig(ack_every=None)


def nowhere() -> AbstractAsyncContextManager[trio.abc.Stream]:
    raise AssertionError("this was not to be dialled")


# --- one connection


@pytest.mark.clause("restream-S01", "restream-S11", "restream-S15")
async def test_numbers_come_in_order_and_then_the_end(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [whole()])
    async with restream.numbers(script.dial, count=5) as numbers:
        assert [number async for number in numbers] == EXAMPLE
        with pytest.raises(trio.EndOfChannel):
            await numbers.receive()
    assert script.asked == [{"uuid": numbers.uuid, "params": {"count": 5}}]
    assert numbers.last_id == 5


@pytest.mark.clause("restream-S02")
async def test_each_stream_has_a_uuid_of_its_own(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [whole()])
    async with restream.numbers(script.dial, count=5) as one, restream.numbers(script.dial, count=5) as other:
        assert one.uuid != other.uuid
        assert len(one.uuid) == 36


@pytest.mark.clause("restream-L01", "restream-L04", "restream-L07")
async def test_integers_of_any_size_come_until_the_reader_has_enough(nursery: trio.Nursery) -> None:
    large = "9" * 50_000
    script = Script(nursery, [[{"data": "42"}, {"data": "-1"}, {"data": large}, HOLD]])
    async with restream.integers(script.dial) as integers:
        assert await integers.receive() == 42
        assert await integers.receive() == -1
        assert await integers.receive() == 10**50_000 - 1
    await trio.testing.wait_all_tasks_blocked()
    assert script.heard == [[{}]]
    assert len(script.over) == 1


@pytest.mark.clause("restream-A06", "restream-M02")
async def test_messages_of_another_application_are_opaque(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    told = [
        {"id": 1, "data": {"t": "x", "value": None}, "time": 5.5, "more": 1},
        {"id": 2, "data": ["any", 1.5]},
        {"id": 3, "data": {"last": True}},
    ]
    script = Script(nursery, [[*told]])
    async with restream.stream(script.dial, {"topic": "x"}, final_key="last") as stream:
        got = [message async for message in stream]
    assert got == [Message(1, {"t": "x", "value": None}, 5.5), Message(2, ["any", 1.5]), Message(3, {"last": True})]
    assert script.asked == [{"uuid": stream.uuid, "params": {"topic": "x"}}]


async def test_a_session_that_somebody_else_made_is_read_from_its_beginning(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[{"id": 1, "data": "first"}, HOLD]])
    async with restream.stream(script.dial, uuid=UUID) as stream:
        assert (await stream.receive()).data == "first"
    assert script.asked == [{"uuid": UUID, "state": 0}]


async def test_a_session_tells_how_it_stands(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    standing = {"head": 7, "acknowledged": 3, "final": False, "epoch": 2}
    script = Script(nursery, [REFUSED, [{"status": standing}]])
    assert await restream.status(script.dial, UUID) == Status(7, 3, False, 2)
    assert script.asked == [{"uuid": UUID, "status": True}]


async def test_entering_waits_for_nobody_and_leaving_early_is_no_error(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    async with restream.numbers(Script(nursery, [REFUSED]).dial, count=5) as numbers:
        assert not numbers.is_connected
    assert trio.current_time() == began
    with pytest.raises(trio.ClosedResourceError):
        await numbers.receive()


async def test_who_waits_learns_that_it_was_closed(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[HOLD]])
    async with restream.numbers(script.dial, count=5) as numbers, trio.open_nursery() as waiting:

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await numbers.receive()

        waiting.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await numbers.aclose()
        await numbers.aclose()
    assert script.heard == [[{"uuid": numbers.uuid, "params": {"count": 5}}]]


async def test_several_tasks_share_a_stream(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[0.1, *whole()]])
    got: list[int] = []

    async def read() -> None:
        got.extend([number async for number in numbers])

    async with restream.numbers(script.dial, count=5) as numbers, trio.open_nursery() as readers:
        for _ in range(3):
            readers.start_soon(read)
    assert sorted(got) == sorted(EXAMPLE)


# --- another connection


@pytest.mark.clause("restream-C03", "restream-C08", "restream-S16", "restream-S17", "restream-S21")
async def test_after_a_drop_it_goes_on_at_once_behind_the_highest_id(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[10.0, *whole()[:3]], whole()[3:]])
    async with restream.numbers(script.dial, count=5, uuid=UUID) as numbers:
        assert [number async for number in numbers] == EXAMPLE
        assert numbers.connections == 2
    assert script.asked == [{"uuid": UUID, "params": {"count": 5}}, {"uuid": UUID, "state": 3}]
    assert script.pauses == [10.0]


@pytest.mark.clause("restream-S18")
async def test_who_has_received_nothing_asks_again_as_at_first(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[b'{"id":1,"da'], whole()])
    async with restream.numbers(script.dial, count=5, uuid=UUID) as numbers:
        assert [number async for number in numbers] == EXAMPLE
    assert script.asked == [{"uuid": UUID, "params": {"count": 5}}] * 2


@pytest.mark.clause("restream-L08", "restream-L10")
async def test_integers_go_on_behind_the_last_one(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[{"data": "41"}, {"data": "42"}], [{"data": "43"}, HOLD]])
    async with restream.integers(script.dial) as integers:
        assert [await integers.receive() for _ in range(3)] == [41, 42, 43]
    assert script.asked == [{}, {"state": "42"}]


@pytest.mark.clause("restream-L09")
async def test_integers_begin_anew_when_none_came(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[], [{"data": "1"}, HOLD]])
    async with restream.integers(script.dial) as integers:
        assert await integers.receive() == 1
    assert script.asked == [{}, {}]


async def test_a_connection_that_brings_nothing_is_given_up_and_dialled_again(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*whole()[:2], 19.9, *whole()[2:3], HOLD], whole()[3:]])
    async with restream.numbers(script.dial, count=5) as numbers:
        assert [number async for number in numbers] == EXAMPLE
    assert script.pauses == pytest.approx([39.9])


async def test_a_live_stream_may_be_silent_for_longer(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [[299.0, {"id": 1, "data": 1}, 299.0, {"id": 2, "data": 2}, HOLD]])
    async with restream.stream(script.dial, {}) as stream:
        assert [(await stream.receive()).id for _ in range(2)] == [1, 2]
        assert stream.connections == 1


# --- arguments


@pytest.mark.clause("restream-S03")
@pytest.mark.parametrize("count", [0, -1, 65_536])
def test_a_count_that_no_server_takes_is_refused_here(count: int) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 65535"):
        restream.numbers(nowhere, count=count)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("tcp://127.0.0.1:1", "invalid URL"),
        ("bpmux+tcp://127.0.0.1:1", "invalid URL"),
        ("restream+tcp", "invalid URL"),
        ("restream+pigeon://x", "there is no transport 'pigeon'"),
    ],
)
def test_a_url_that_cannot_be_meant_is_said_at_once(url: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        restream.integers(url)


def test_a_dial_function_has_its_options_already() -> None:
    with pytest.raises(TypeError, match="no options of a transport: insecure"):
        restream.integers(nowhere, insecure=True)


def test_a_stream_needs_something_to_ask_for() -> None:
    with pytest.raises(ValueError, match="needs a count"):
        restream.numbers(nowhere)
    with pytest.raises(ValueError, match="needs params"):
        restream.stream(nowhere)
    with pytest.raises(ValueError, match="no final_key beside it"):
        restream.stream(nowhere, {}, final_key="x", verifier=restream.Unverified())


@pytest.mark.parametrize("wrong", [{"ahead": 0}, {"silence": 0.0}, {"linger": float("inf")}, {"ack_after": -1.0}])
def test_a_policy_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"ClientPolicy\("):
        ClientPolicy(**wrong)  # type: ignore[arg-type]  # all of these are numbers
