"""What the specification requires of every store: one suite over all kinds."""

from __future__ import annotations

import pytest
import trio

from muxkit.protocols.restream.store import (
    LAST_ID,
    IdsExhausted,
    Message,
    MessageGone,
    NotJson,
    OutOfOrderAck,
    SessionExists,
    SessionFinished,
    StoreLimits,
    UnknownMessage,
    UnknownSession,
    open_store,
)
from muxkit.storage import StoreClosed, StoreFull
from tests.protocols.restream.stores import (
    U1,
    U2,
    U3,
    Number,
    Numbers,
    NumberStore,
    Place,
    is_last,
    next_number,
    numbers,
)

pytest_plugins = ["tests.protocols.restream._postgres", "tests.protocols.restream.stores_fixtures"]

DURABLE = pytest.mark.parametrize("place_of_store", ["sqlite", "postgres"], indirect=True)


@pytest.mark.clause("restream-I12", "restream-I13", "restream-G03")
async def test_puts_give_ascending_ids_and_chained_values(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    assert [await store.put(U1, next_number) for _ in range(3)] == numbers(1, 2, 3)
    assert await store.replay(U1, 0) == numbers(1, 2, 3)


@pytest.mark.clause("restream-I13")
async def test_puts_at_the_same_time_follow_each_other(store: NumberStore) -> None:
    await store.register(U1, Numbers(50))
    made: list[Message[Number]] = []

    async def put() -> None:
        made.append(await store.put(U1, next_number))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(put)
    assert sorted(made, key=lambda message: message.id) == numbers(*range(1, 51), last=50)
    assert await store.replay(U1, 0) == numbers(*range(1, 51), last=50)


async def test_sessions_do_not_touch_each_other(store: NumberStore) -> None:
    for uuid in (U1, U2):
        await store.register(uuid, Numbers(9))
        await store.put_many(uuid, next_number, 3)
    await store.ack(U1, 2)
    assert await store.replay(U2, 0) == numbers(1, 2, 3)
    assert await store.replay(U1, 2) == numbers(3)


@pytest.mark.clause("restream-A05", "restream-N09")
async def test_a_transformer_that_raises_changes_nothing(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put(U1, next_number)

    def failing(state: Numbers) -> tuple[Number, Numbers]:
        if state.value >= 6:
            raise ZeroDivisionError("in the application")
        return next_number(state)

    with pytest.raises(ZeroDivisionError, match="in the application"):
        await store.put_many(U1, failing, 5)
    assert (await store.status(U1)).head == 1
    assert await store.put(U1, next_number) == numbers(2)[0]


@pytest.mark.clause("restream-I14")
async def test_what_a_transformer_does_to_its_argument_is_lost(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))

    def mutating(state: Numbers) -> tuple[Number, Numbers]:
        kept = Numbers(state.count, state.value)
        state.value = 77
        return Number(5), kept

    assert [message.data.value for message in await store.put_many(U1, mutating, 2)] == [5, 5]
    assert await store.put(U1, next_number) == Message(3, Number(1))


@pytest.mark.clause("restream-I02", "restream-I03")
async def test_state_data_and_params_are_any_json(place_of_store: Place) -> None:
    odd: object = {"a": [1, None, 2**70, -0.5, True], "é\u2028\0": {"": "\U0001f600"}}
    async with open_store(place_of_store.where) as store:
        await store.register(U1, odd, params=[odd])
        await store.put(U1, lambda state: (state, state))
        assert await store.after(U1, 0) == Message(1, odd)
        assert (await store.status(U1)).params == [odd]


async def test_what_json_cannot_hold_is_refused_and_changes_nothing(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    with pytest.raises(NotJson, match="cannot be written as JSON"):
        await store.put(U1, lambda state: (Number(1), object()))  # type: ignore[arg-type, return-value]
    with pytest.raises(NotJson):
        await store.append(U1, "\ud800")  # type: ignore[arg-type]
    assert (await store.status(U1)).head == 0


async def test_data_that_is_nested_too_deeply_to_be_sent_is_refused_and_changes_nothing(place_of_store: Place) -> None:
    deep: object = "[["
    for _ in range(31):  # the line of a message has an object around its data
        deep = [deep]
    async with open_store(place_of_store.where) as store:
        await store.register(U1, [deep])
        await store.append(U1, deep)
        with pytest.raises(NotJson, match="more than 32 objects and arrays"):
            await store.append_many(U1, [1, [deep]])
        with pytest.raises(NotJson, match="more than 32 objects and arrays"):
            await store.put(U1, lambda state: ([deep], state))
        assert (await store.status(U1)).head == 1


@DURABLE
async def test_a_state_of_another_application_is_a_clear_error(place_of_store: Place) -> None:
    async with open_store(place_of_store.where, now=place_of_store.clock) as other:
        await other.register(U1, ["something else"])
    async with place_of_store.open() as store:
        with pytest.raises(NotJson, match="was the session made by another one"):
            await store.put(U1, next_number)


@pytest.mark.clause("restream-I16", "restream-I17")
async def test_after_gives_the_next_message_or_none(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    assert await store.after(U1, 0) is None
    await store.put_many(U1, next_number, 3)
    assert [await store.after(U1, 0)] == numbers(1)
    assert [await store.after(U1, 2)] == numbers(3)
    assert await store.after(U1, 3) is None


@pytest.mark.clause("restream-S27", "restream-S36")
async def test_ids_that_were_never_stored_are_refused(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put_many(U1, next_number, 3)
    for id in (4, LAST_ID, -1):
        with pytest.raises(UnknownMessage, match=f"has no message {id}; its messages are 1 to 3"):
            await store.after(U1, id)
    for id in (0, 4):
        with pytest.raises(UnknownMessage):
            await store.ack(U1, id)
    assert (await store.status(U1)).acknowledged == 0


@pytest.mark.clause("restream-I21", "restream-S31", "restream-G05", "restream-S26")
async def test_an_ack_deletes_and_later_questions_about_it_are_refused(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put_many(U1, next_number, 5)
    await store.ack(U1, 3)
    assert await store.replay(U1, 3) == numbers(4, 5)
    for id in (0, 2):
        with pytest.raises(MessageGone, match="all up to 3 are acknowledged"):
            await store.after(U1, id)


@pytest.mark.clause("restream-S37", "restream-S38", "restream-S39")
async def test_acks_may_repeat_but_never_go_back(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put_many(U1, next_number, 5)
    await store.ack(U1, 3)
    await store.ack(U1, 3)
    with pytest.raises(OutOfOrderAck, match="ack 2 after ack 3"):
        await store.ack(U1, 2)


@pytest.mark.clause("restream-G08")
async def test_ids_go_on_when_everything_was_acknowledged(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put_many(U1, next_number, 3)
    await store.ack(U1, 3)
    assert await store.replay(U1, 3) == []
    assert await store.put(U1, next_number) == numbers(4)[0]


@pytest.mark.clause("restream-G06")
@pytest.mark.requirement("R-70")
async def test_ids_end_at_the_last_one_and_never_wrap(store: NumberStore) -> None:
    await store.register(U1, Numbers(9), head=LAST_ID - 2)
    made = await store.put_many(U1, next_number, 10)
    assert [message.id for message in made] == [LAST_ID - 1, LAST_ID]
    for attempt in (store.put(U1, next_number), store.append(U1, Number(1))):
        with pytest.raises(IdsExhausted, match="go on in a new session"):
            await attempt
    assert [message.id for message in await store.replay(U1, LAST_ID - 2)] == [LAST_ID - 1, LAST_ID]
    await store.ack(U1, LAST_ID)
    assert (await store.status(U1)).waiting == 0


@pytest.mark.clause("restream-I08", "restream-S24")
async def test_every_method_but_register_refuses_an_unknown_uuid(store: NumberStore) -> None:
    for uuid in (U3, "", "no\nsuch", "\0", "\ud800", "x" * 300):
        for call in (
            store.disconnect(uuid),
            store.put(uuid, next_number),
            store.after(uuid, 0),
            store.ack(uuid, 1),
            store.attach(uuid),
            store.status(uuid),
            store.append(uuid, Number(1)),
            store.finish(uuid),
            store.wait(uuid, 0),
            store.wait_room(uuid),
        ):
            with pytest.raises(UnknownSession, match="is not known here"):
                await call


@pytest.mark.clause("restream-I09", "restream-S29")
async def test_a_uuid_is_registered_once_and_the_error_tells_what_is_known(store: NumberStore) -> None:
    await store.register(U1, Numbers(9), params={"count": 9})
    await store.put(U1, next_number)
    with pytest.raises(SessionExists, match="exists already") as refused:
        await store.register(U1, Numbers(5), params={"count": 5})
    assert refused.value.status == await store.status(U1)
    assert refused.value.status.params == {"count": 9}
    assert await store.put(U1, next_number) == numbers(2)[0]


async def test_two_who_register_at_once_are_told_apart(store: NumberStore) -> None:
    outcomes: list[str] = []

    async def register() -> None:
        try:
            await store.register(U1, Numbers(9))
        except SessionExists:
            outcomes.append("exists")
        else:
            outcomes.append("made")

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(register)
    assert sorted(outcomes) == ["exists"] * 4 + ["made"]


async def test_put_many_stops_behind_a_final_message(store: NumberStore) -> None:
    await store.register(U1, Numbers(3))
    assert await store.put_many(U1, next_number, 10, is_final=is_last) == numbers(1, 2, 3, last=3)
    assert (await store.status(U1)).final
    with pytest.raises(SessionFinished, match="nothing follows message 3"):
        await store.put(U1, next_number)


async def test_put_many_makes_as_many_as_there_is_room_for(place_of_store: Place) -> None:
    async with place_of_store.open(limits=StoreLimits(messages=4)) as store:
        await store.register(U1, Numbers(9))
        assert await store.put_many(U1, next_number, 10) == numbers(1, 2, 3, 4)
        with pytest.raises(StoreFull, match=r"4 messages are not acknowledged .* StoreLimits\(messages=4\)"):
            await store.put(U1, next_number)
        await store.ack(U1, 1)
        assert await store.put(U1, next_number) == numbers(5)[0]


async def test_messages_and_states_have_a_size_limit(place_of_store: Place) -> None:
    async with open_store(place_of_store.where, limits=StoreLimits(message_bytes=100)) as store:
        await store.register(U1, None)
        for transform in (lambda state: ("x" * 99, state), lambda state: (1, "x" * 99)):
            with pytest.raises(StoreFull, match="101 bytes are more than the 100 allowed"):
                await store.put(U1, transform)
        with pytest.raises(StoreFull):
            await store.append(U1, "x" * 99)
        assert (await store.put(U1, lambda state: ("x" * 98, state))).id == 1


async def test_a_replay_is_bounded_by_number_and_by_size(store: NumberStore) -> None:
    await store.register(U1, Numbers(500))
    await store.put_many(U1, next_number, 100)
    assert await store.replay(U1, 5, 3) == numbers(6, 7, 8)
    assert await store.replay(U1, 5, most_bytes=1) == numbers(6)
    some = await store.replay(U1, 5, most_bytes=1000)
    assert some == numbers(*range(6, 6 + len(some)))
    assert 20 < len(some) < 50  # 26 to 30 bytes each


@pytest.mark.clause("restream-G09", "restream-T01", "restream-G02")
@DURABLE
async def test_everything_is_there_after_opening_again(place_of_store: Place) -> None:
    async with place_of_store.open() as store:
        await store.register(U1, Numbers(9), params={"count": 9})
        await store.put_many(U1, next_number, 5)
        await store.append(U1, Number(7), time=12.5)
        await store.ack(U1, 2)
        before = await store.status(U1)
    async with place_of_store.open() as store:
        after = await store.attach(U1)
        assert (after.head, after.acknowledged, after.params) == (before.head, before.acknowledged, before.params)
        assert after.epoch == before.epoch + 1
        assert await store.replay(U1, 2) == [*numbers(3, 4, 5), Message(6, Number(7), 12.5)]
        assert (await store.put(U1, next_number)).data == numbers(6)[0].data


async def test_a_closed_store_says_so(place_of_store: Place) -> None:
    async with place_of_store.open() as store:
        await store.register(U1, Numbers(9))
    with pytest.raises(StoreClosed, match="open it again"):
        await store.status(U1)


async def test_a_call_that_is_cancelled_before_it_began_changes_nothing(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.put(U1, next_number)
    assert (await store.status(U1)).head == 0


async def test_a_cancelled_put_is_whole_or_not_there(store: NumberStore) -> None:
    await store.register(U1, Numbers(1000))
    for moment in range(40):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(store.put, U1, next_number)
            for _ in range(moment % 8):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    last = await store.put(U1, next_number)  # after all queued work
    assert await store.replay(U1, 0, 1000) == numbers(*range(1, last.id + 1))
