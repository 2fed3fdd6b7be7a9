"""What every store does beyond the specification: owners, absence, fed sessions, waiting tasks, pages."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit.protocols.restream.store import (
    Message,
    SessionBusy,
    SessionExpired,
    SessionFinished,
    Status,
    StoreLimits,
    Superseded,
    UnknownSession,
)
from muxkit.storage import StoreFull
from tests.protocols.restream.stores import U1, U2, U3, Clock, Number, Numbers, NumberStore, Place, next_number, numbers

pytest_plugins = ["tests.protocols.restream._postgres", "tests.protocols.restream.stores_fixtures"]

# ---------------------------------------------------------------------------- owners


@pytest.mark.clause("restream-T02")
async def test_a_newer_owner_supersedes_the_last_one(store: NumberStore) -> None:
    first = await store.register(U1, Numbers(9))
    await store.put(U1, next_number, epoch=first.epoch)
    second = await store.attach(U1)
    assert (first.epoch, second.epoch) == (1, 2)
    for attempt in (store.put(U1, next_number, epoch=first.epoch), store.ack(U1, 1, epoch=first.epoch)):
        with pytest.raises(Superseded, match="taken over by a newer connection") as refused:
            await attempt
        assert "epoch" not in refused.value.for_client
    status = await store.status(U1)
    assert (status.head, status.acknowledged) == (1, 0)
    assert await store.put(U1, next_number, epoch=second.epoch) == numbers(2)[0]


async def test_without_takeover_an_attached_session_is_busy(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    with pytest.raises(SessionBusy, match="has an open connection"):
        await store.attach(U1, takeover=False)
    await store.disconnect(U1)
    assert (await store.attach(U1, takeover=False)).epoch == 2


async def test_the_disconnection_of_a_superseded_owner_means_nothing(store: NumberStore) -> None:
    first = await store.register(U1, Numbers(9))
    await store.attach(U1)
    await store.disconnect(U1, epoch=first.epoch)
    assert (await store.status(U1)).attached


# ---------------------------------------------------------------------------- absence


@pytest.mark.clause("restream-I11", "restream-I10", "restream-S25")
@pytest.mark.requirement("R-59")
async def test_a_session_outlives_its_connection_by_thirty_seconds(store: NumberStore, clock: Clock) -> None:
    start = clock.now
    await store.register(U1, Numbers(9))
    await store.disconnect(U1)
    clock.now = start + 20
    await store.attach(U1)
    clock.now = start + 40
    await store.disconnect(U1)
    clock.now = start + 69
    assert (await store.status(U1)).expires == start + 70
    assert await store.expire() == 0
    clock.now = start + 70
    with pytest.raises(SessionExpired, match="has expired"):
        await store.attach(U1)
    assert await store.expire() == 1
    with pytest.raises(UnknownSession):
        await store.status(U1)


async def test_an_attached_session_never_expires(store: NumberStore, clock: Clock) -> None:
    await store.register(U1, Numbers(9))
    clock.now += 1e6
    assert await store.expire() == 0
    assert (await store.status(U1)).expires is None


async def test_a_session_may_have_its_own_time(place_of_store: Place) -> None:
    clock = place_of_store.clock
    async with place_of_store.open(keep=3600) as store:
        await store.register(U1, Numbers(9), attached=False)
        await store.register(U2, Numbers(9), attached=False, keep=5)
        await store.register(U3, Numbers(9), attached=False, keep=math.inf)
        clock.now += 5
        assert await store.expire() == 1
        clock.now += 3595
        assert await store.expire() == 1
        assert await store.expire(now=1e300) == 0
        assert [each.uuid for each in await store.sessions()] == [U3]


async def test_an_expired_uuid_may_be_registered_again_and_begins_anew(store: NumberStore, clock: Clock) -> None:
    await store.register(U1, Numbers(9), params="old")
    await store.put_many(U1, next_number, 5)
    await store.disconnect(U1)
    clock.now += 31
    fresh = await store.register(U1, Numbers(9), params="new")
    assert (fresh.head, fresh.epoch, fresh.params) == (0, 1, "new")
    assert await store.replay(U1, 0) == []
    assert await store.put(U1, next_number) == numbers(1)[0]
    assert await store.replay(U1, 0) == numbers(1)


@pytest.mark.requirement("R-59")
async def test_a_sweep_takes_all_that_is_over_and_nothing_else(store: NumberStore, clock: Clock) -> None:
    for n in range(250):
        await store.register(f"absent-{n}", Numbers(9), attached=False)
    await store.register(U1, Numbers(9))
    await store.put(U1, next_number)
    clock.now += 30
    assert await store.expire() == 250
    assert [each.uuid for each in await store.sessions()] == [U1]
    assert await store.replay(U1, 0) == numbers(1)


async def test_sessions_come_in_pages(store: NumberStore, clock: Clock) -> None:
    names = ["B", "a", "b", "c", "é".encode().hex(), "z z"]
    for name in names:
        await store.register(name, Numbers(9), params=name)
    await store.register("b-gone", Numbers(9), attached=False, keep=1)
    clock.now += 1
    seen: list[str] = []
    while page := await store.sessions(seen[-1] if seen else "", most=2):
        assert len(page) <= 2
        seen += [status.uuid for status in page]
    assert seen == sorted(names)


# ---------------------------------------------------------------------------- fed sessions


async def test_appended_messages_carry_their_time(store: NumberStore) -> None:
    await store.register(U1, Numbers(0), attached=False)
    assert await store.append(U1, Number(5), time=3) == Message(1, Number(5), 3.0)
    assert await store.append_many(U1, [Number(6), Number(7)], time=-0.0) == [
        Message(2, Number(6), 0.0),
        Message(3, Number(7), 0.0),
    ]
    assert await store.append_many(U1, []) == []
    assert await store.replay(U1, 0) == [
        Message(1, Number(5), 3.0),
        Message(2, Number(6), 0.0),
        Message(3, Number(7), 0.0),
    ]
    with pytest.raises(ValueError, match="nan is no time"):
        await store.append(U1, Number(8), time=math.nan)


async def test_all_of_a_batch_is_appended_or_nothing(place_of_store: Place) -> None:
    async with place_of_store.open(limits=StoreLimits(messages=3)) as store:
        await store.register(U1, Numbers(0))
        await store.append(U1, Number(1))
        with pytest.raises(StoreFull):
            await store.append_many(U1, [Number(2)] * 3)
        assert (await store.status(U1)).head == 1


async def test_a_reader_sleeps_until_something_is_appended(store: NumberStore) -> None:
    await store.register(U1, Numbers(0))
    awake, heard = trio.open_memory_channel[int](0)

    async def read() -> None:
        async with awake:
            head = 0
            while not (status := await store.wait(U1, head)).final:
                head = status.head
                await awake.send(head)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for n in range(1, 4):
                await wait_all_tasks_blocked(0.001)
                await store.append(U1, Number(n))
                assert await heard.receive() == n
            await store.finish(U1)


async def test_no_append_slips_past_a_reader_who_is_about_to_sleep(store: NumberStore) -> None:
    await store.register(U1, Numbers(0))
    with trio.fail_after(60):
        for head in range(40):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.wait, U1, head)
                nursery.start_soon(store.append, U1, Number(head))


async def test_nothing_follows_the_end_of_a_fed_session(store: NumberStore) -> None:
    await store.register(U1, Numbers(0))
    await store.append(U1, Number(1))
    assert (await store.finish(U1)).final
    assert (await store.finish(U1)).head == 1
    with pytest.raises(SessionFinished):
        await store.append(U1, Number(2))
    with pytest.raises(SessionFinished):
        await store.wait_room(U1)
    assert [message.data for message in await store.replay(U1, 0)] == [Number(1)]


async def test_a_sleeping_reader_hears_that_he_was_superseded(store: NumberStore) -> None:
    await store.register(U1, Numbers(0))
    refused: list[Superseded] = []

    async def read() -> None:
        try:
            await store.wait(U1, 0, epoch=1)
        except Superseded as error:
            refused.append(error)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked(0.01)
            await store.attach(U1)
    assert [(error.held, error.current) for error in refused] == [(1, 2)]


async def test_a_sleeping_reader_hears_that_his_session_is_gone(store: NumberStore, clock: Clock) -> None:
    await store.register(U1, Numbers(0), attached=False)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                with pytest.raises(UnknownSession):
                    await store.wait(U1, 0)

            await wait_all_tasks_blocked(0.01)
            clock.now += 31
            await store.expire()


async def test_a_feeder_sleeps_until_an_ack_makes_room(place_of_store: Place) -> None:
    async with place_of_store.open(limits=StoreLimits(messages=2)) as store:
        await store.register(U1, Numbers(0))
        await store.append_many(U1, [Number(1), Number(2)])
        room: list[Status] = []
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def feed() -> None:
                    room.append(await store.wait_room(U1))

                await wait_all_tasks_blocked(0.01)
                assert not room
                await store.ack(U1, 1)
        assert [status.waiting for status in room] == [1]
        with pytest.raises(StoreFull, match="3 messages never fit"):
            await store.wait_room(U1, 3)


async def test_sleepers_of_other_sessions_are_left_alone(store: NumberStore) -> None:
    await store.register(U1, Numbers(0))
    await store.register(U2, Numbers(0))
    woken: list[str] = []
    first = trio.Event()

    async def read(uuid: str) -> None:
        await store.wait(uuid, 0)
        woken.append(uuid)
        first.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, U1)
        nursery.start_soon(read, U2)
        await wait_all_tasks_blocked(0.01)
        await store.append(U1, Number(1))
        with trio.fail_after(60):
            await first.wait()
        await wait_all_tasks_blocked(0.01)
        assert woken == [U1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.register("a\nb", Numbers(1)), "printable ASCII"),
        (lambda store: store.register(U1, Numbers(1), head=-1), "head -1"),
        (lambda store: store.register(U1, Numbers(1), keep=math.nan), "keep nan"),
        (lambda store: store.put_many(U1, next_number, 0), "most is 0"),
        (lambda store: store.replay(U1, 0, 0), "most is 0"),
    ],
)
async def test_arguments_that_mean_nothing_are_refused(store: NumberStore, call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await call(store)  # type: ignore[operator]
