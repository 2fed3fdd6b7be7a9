"""The ends of the benchmark understand each other, and notice wrong payloads."""

from __future__ import annotations

import itertools
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from muxkit_bench.bench_work import Connection, Conversation, Server, StreamConversation
from muxkit_bench.bench_work.echoing import neighbour, open_and_close, percentile, round_trip, storm
from muxkit_bench.bench_work.idling import idle
from muxkit_bench.bench_work.meter import Cost, Meter, fit
from muxkit_bench.bench_work.orders import (
    MAGIC,
    MESSAGE,
    Order,
    Receipt,
    Usage,
    Way,
    Wrong,
    pack_answer,
    pack_order,
    unpack_order,
    unpack_receipt,
    unpack_usage,
)
from muxkit_bench.bench_work.payloads import MANY, payloads
from muxkit_bench.bench_work.streaming import among, check, flat, stream
from muxkit_bench.bench_work.tasks import Task
from muxkit_bench.contestants.muxkit_program import Mux

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def a_task(job: str, **changes: object) -> Task:
    task = Task(job=job, channels=2, size=64, batch=1, each=False, seconds=0.01, count=0, least=1)
    task.update(changes)  # type: ignore[typeddict-item]
    return task


class Inside(Connection):
    """Channels to a server in this process, each a pair of streams."""

    def __init__(self, nursery: trio.Nursery, server: Server, spoil: Callable[[bytes], bytes]) -> None:
        self._nursery = nursery
        self._server = server
        self._spoil = spoil

    async def open(self) -> Conversation:
        near, far = trio.testing.memory_stream_pair()

        async def send(data: bytes) -> None:
            await near.send_all(self._spoil(data))

        if not self._server.keeps(far):
            self._nursery.start_soon(self._server.serve, StreamConversation(far.send_all, far.receive_some))
        return StreamConversation(send, near.receive_some)

    async def close(self, conversation: Conversation) -> None:
        await trio.lowlevel.checkpoint()

    async def echo_once(self, message: bytes) -> bytes:
        conversation = await self.open()
        await conversation.send(message)
        return await conversation.receive()


@asynccontextmanager
async def inside(
    *, holding: bool = False, spoil: Callable[[bytes], bytes] = lambda data: data
) -> AsyncIterator[tuple[Connection, Meter]]:
    async with trio.open_nursery() as nursery:
        connection = Inside(nursery, Server(holding=holding), spoil)
        yield connection, Meter(await connection.open())
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------------- orders and answers


@given(
    order=st.builds(
        Order,
        way=st.sampled_from(Way),
        messages=st.integers(0, 2**64 - 1),
        size=st.integers(0, 2**32 - 1),
        verify=st.booleans(),
    )
)
def test_an_order_comes_as_it_was_given(order: Order) -> None:
    packed = pack_order(order)
    assert len(packed) == MESSAGE
    assert packed.startswith(MAGIC)
    assert unpack_order(packed) == order


def test_answers_come_as_they_were_given() -> None:
    assert unpack_receipt(pack_answer(Receipt(3, 192, 0xFFFFFFFF))) == Receipt(3, 192, 0xFFFFFFFF)
    assert unpack_usage(pack_answer(Usage(5, 6, 7))) == Usage(5, 6, 7)


def test_no_payload_is_taken_for_an_order() -> None:
    assert not any(message.startswith(MAGIC) for size in (64, 65_536) for message in payloads(size))


def test_payloads_differ_from_each_other_so_that_exchanged_ones_are_noticed() -> None:
    assert len(set(payloads(64))) == MANY


# ---------------------------------------------------------------------------- byte streams


class Pieces:
    """What was sent, as a link may cut it."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        self._pieces = [data[start:end] for start, end in itertools.pairwise(places)]

    async def receive_some(self, most: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


async def no_send(data: bytes) -> None:
    raise AssertionError("nothing is sent here")


def run(conversation: StreamConversation, *orders: Order) -> list[object]:
    """What is taken, one order after another, and the message of 64 bytes behind it all."""

    async def take_all() -> list[object]:
        taken: list[object] = [await conversation.take(order) for order in orders]
        return [*taken, await conversation.receive()]

    return trio.run(take_all)


@pytest.mark.parametrize("way", [Way.BULK, Way.MANY])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=30), number=st.integers(1, 20))
def test_messages_are_found_wherever_the_stream_is_cut(way: Way, cuts: list[int], number: int) -> None:
    conversation = StreamConversation(no_send, Pieces(b"", []).receive_some)
    messages = (payloads(64) * 2)[:number]
    sent = b"".join(conversation.prepare(message, way) for message in messages)
    last = payloads(64)[5]
    conversation = StreamConversation(no_send, Pieces(sent + sent + last, cuts).receive_some)
    crc = zlib.crc32(b"".join(messages))
    assert run(conversation, Order(way, number, 64, True), Order(way, number, 64, False)) == [
        Receipt(number, number * 64, crc),
        Receipt(number, number * 64, 0),
        last,
    ]


def test_a_message_of_another_length_is_wrong() -> None:
    conversation = StreamConversation(no_send, Pieces(b"\0\0\0\x03abc" * 30, []).receive_some)
    with pytest.raises(Wrong, match="message 0 has 3 bytes, not 64"):
        run(conversation, Order(Way.MANY, 30, 64))


def test_the_end_of_the_stream_is_told() -> None:
    conversation = StreamConversation(no_send, Pieces(b"too short", []).receive_some)
    with pytest.raises(trio.EndOfChannel):
        run(conversation)


# ---------------------------------------------------------------------------- receipts


def test_a_receipt_of_what_was_sent_is_right() -> None:
    crc = zlib.crc32(b"".join(payloads(64)[:5]))
    check(pack_answer(Receipt(5, 320, crc)), Order(Way.MANY, 5, 64, True))


@pytest.mark.parametrize(
    ("receipt", "said"),
    [
        (Receipt(4, 256, 0), "5 messages of 320 bytes were sent, 4 of 256 bytes came"),
        (Receipt(5, 319, 0), "5 messages of 320 bytes were sent, 5 of 319 bytes came"),
        (Receipt(5, 320, zlib.crc32(b"".join(payloads(64)[1:6]))), "the CRC-32 is"),
        (Receipt(5, 320, zlib.crc32(b"".join(sorted(payloads(64)[:5])))), "the CRC-32 is"),
    ],
    ids=["lost", "short", "others", "exchanged"],
)
def test_a_receipt_of_anything_else_is_noticed(receipt: Receipt, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        check(pack_answer(receipt), Order(Way.MANY, 5, 64, True))


# ---------------------------------------------------------------------------- jobs


@pytest.mark.parametrize("changes", [{"size": 4096}, {"batch": 64}, {"each": True}, {"channels": 1}])
async def test_a_job_in_one_direction_counts_what_it_sent(changes: dict[str, object]) -> None:
    async with inside() as (connection, meter):
        task = a_task("bulk" if "size" in changes else "small", **changes)
        measured = await stream(connection, meter, task)
    messages = measured["count"] * task["channels"]
    assert measured["units"] == (messages * 4096 / 2**20 if task["job"] == "bulk" else messages)
    assert measured["seconds"] > 0


async def test_each_channel_gets_the_least_that_was_asked_for() -> None:
    async with inside() as (connection, meter):
        measured = await stream(connection, meter, a_task("small", least=5000, seconds=0.001))
    assert measured["count"] >= 5000


async def test_a_count_that_is_known_is_not_looked_for_again() -> None:
    async with inside() as (connection, meter):
        measured = await stream(connection, meter, a_task("small", count=77))
    assert measured["count"] == 77


async def test_few_tasks_send_on_many_channels() -> None:
    async with inside() as (connection, meter):
        measured = await flat(connection, meter, a_task("flat", channels=250))
    assert measured["units"] == measured["count"] * 100 * 64


@pytest.mark.parametrize("job", [round_trip, storm, open_and_close])
async def test_a_job_of_echoes_counts_them(job: Callable[..., object]) -> None:
    async with inside() as (connection, meter):
        measured = await job(connection, meter, a_task("echoes"))  # type: ignore[misc]
    assert measured["units"] in (measured["count"], measured["count"] * 2)
    assert measured["units"] > 0


async def test_the_neighbour_is_measured_beside_bulk_that_moves() -> None:
    async with inside() as (connection, meter):
        measured = await neighbour(connection, meter, a_task("neighbour", seconds=0.05))
    also = measured["also"]
    assert 0 < also["p50"] <= also["p99"]
    assert also["idle_p50"] > 0
    assert also["bulk"] > 0


async def test_idle_channels_are_counted_at_the_server_and_have_no_task() -> None:
    tasks = []

    class Watching(Server):
        async def serve(self, conversation: Conversation) -> None:
            tasks.append(conversation)
            await super().serve(conversation)

    async with trio.open_nursery() as nursery:
        connection = Inside(nursery, Watching(holding=True), lambda data: data)
        meter = Meter(await connection.open())
        measured = await idle(connection, meter, a_task("idle", channels=100))
        usage = await meter.usage()
        nursery.cancel_scope.cancel()
    assert measured["units"] == 100
    assert usage.held == 164  # with those before the first look
    assert len(tasks) == 1  # the one that carries the orders


def a_bit(data: bytes) -> bytes:
    return data if data.startswith(MAGIC) else data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("job", [stream, flat, among, round_trip, storm, open_and_close, neighbour])
async def test_each_job_notices_a_bit_that_was_changed(job: Callable[..., object]) -> None:
    with pytest.RaisesGroup(Wrong, flatten_subgroups=True, allow_unwrapped=True):
        async with inside(spoil=a_bit) as (connection, meter):
            await job(connection, meter, a_task("small", channels=1))  # type: ignore[misc]


# ---------------------------------------------------------------------------- sessions


@asynccontextmanager
async def session(*, spoil: Callable[[bytes], bytes] | None = None) -> AsyncIterator[tuple[Connection, Meter]]:
    """A bpmux session over memory, as it is measured; its own channels are spoiled, the meter's is not."""
    addresses: list[str] = []
    server, listening = Server(), trio.Event()

    def started(address: str) -> None:
        addresses.append(address)
        listening.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Mux().serve, server, "bpmux+mem://bench", started)
        nursery.start_soon(server.until_wrong)
        await listening.wait()
        async with Mux().connect(addresses[0]) as connection:
            meter = Meter(await connection.open())
            if spoil is not None:
                spoiled(connection, spoil)
            yield connection, meter
        nursery.cancel_scope.cancel()


def spoiled(connection: Connection, spoil: Callable[[bytes], bytes]) -> None:
    """Whatever is sent on channels that are opened from now on is changed."""
    open_well = connection.open

    async def open_badly() -> Conversation:
        conversation = await open_well()
        send_well = conversation.send

        async def send(message: bytes) -> None:
            await send_well(spoil(message))

        conversation.send = send
        return conversation

    connection.open = open_badly  # type: ignore[method-assign]


@pytest.mark.parametrize("changes", [{"size": 4096}, {"batch": 64}, {"each": True}, {"channels": 1}])
async def test_a_session_is_measured_like_any_other_connection(changes: dict[str, object]) -> None:
    async with session() as (connection, meter):
        task = a_task("bulk" if "size" in changes else "small", **changes)
        measured = await stream(connection, meter, task)
    assert measured["count"] > 0


async def test_a_session_opens_and_closes_channels() -> None:
    async with session() as (connection, meter):
        measured = await open_and_close(connection, meter, a_task("openclose"))
    assert measured["units"] == 2 * measured["count"]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(a_bit, "CRC-32"), (lambda message: message if message.startswith(MAGIC) else message[1:], "63 bytes, not 64")],
    ids=["bit", "length"],
)
async def test_a_session_that_changes_messages_is_noticed(
    each: bool, spoil: Callable[[bytes], bytes], said: str
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(Wrong, match=said), flatten_subgroups=True):
        async with session(spoil=spoil) as (connection, meter):
            await stream(connection, meter, a_task("small", channels=1, each=each))


# ---------------------------------------------------------------------------- how much work


async def test_a_pass_is_as_much_work_as_its_time_holds() -> None:
    tried: list[tuple[int, bool]] = []

    async def run(count: int, verify: bool) -> Cost:
        tried.append((count, verify))
        return Cost(count * 0.001, 0.0, 0.0)

    assert await fit(a_task("small", seconds=1.0), 2, run) == 1000
    assert tried[0] == (2, True)
    assert [verify for _, verify in tried[1:]] == [False] * (len(tried) - 1)


async def test_what_is_known_is_only_warmed_up() -> None:
    tried: list[tuple[int, bool]] = []

    async def run(count: int, verify: bool) -> Cost:
        tried.append((count, verify))
        return Cost(1.0, 0.0, 0.0)

    assert await fit(a_task("small", count=400), 2, run) == 400
    assert tried == [(100, True)]


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value
