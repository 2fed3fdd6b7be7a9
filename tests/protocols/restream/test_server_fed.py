"""A server with sessions whose messages are appended to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit.protocols import restream
from muxkit.protocols.restream.store import StoreLimits, open_store
from muxkit.protocols.restream.store.rules import Codec
from tests.protocols.restream._server_clients import U1, ack, begin, place, resume

if TYPE_CHECKING:
    from trio.testing import MockClock

pytest_plugins = ["tests.protocols.restream._postgres"]


def fed() -> dict[str, object]:
    return {"uuid": U1, "params": {"topic": "a"}}


def _one(state: object) -> tuple[object, object]:
    return 1, state


async def test_an_idle_stream_waits_and_an_append_wakes_it(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        client = await there.ask(fed())
        with trio.move_on_after(1000.0) as waited:
            await client.line()
        assert waited.cancelled_caught
        await there.store.append(U1, {"t": 1.5}, time=1_700_000_000.25)
        assert await client.hear() == {"id": 1, "data": {"t": 1.5}, "time": 1_700_000_000.25}
        await there.store.append_many(U1, ["a", None, [1, 2]])
        assert [(await client.hear())["data"] for _ in range(3)] == ["a", None, [1, 2]]


async def test_what_was_appended_before_the_client_came_is_streamed_first(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        await there.store.register(U1, None, attached=False)
        await there.store.append_many(U1, list(range(1000)))
        client = await there.ask(resume(0))
        assert await client.hear_ids(1000) == list(range(1, 1001))
        await there.store.append(U1, "more")
        assert (await client.hear())["data"] == "more"


async def test_an_appended_message_has_the_time_of_its_arrival(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        client = await there.ask(fed())
        await trio.sleep(1000.5)
        [appended] = await there.store.append_many(U1, ["a"])
        assert appended.time == trio.current_time()
        assert await client.hear() == {"id": 1, "data": "a", "time": appended.time}


async def test_messages_that_are_put_have_a_time_if_that_is_asked_for(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        await there.store.register(U1, None, attached=False)
        await trio.sleep(10)
        now = trio.current_time()
        made = [*await there.store.put_many(U1, _one, 1), *await there.store.put_many(U1, _one, 1, timed=True)]
        assert [message.time for message in made] == [None, now]
        assert [message.time for message in await there.store.replay(U1, 0)] == [None, now]


async def test_stored_data_is_sent_as_it_is_without_being_decoded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(Codec, "data", lambda codec, encoded: decoded.append(encoded))
    async with place(application=restream.Fed()) as there:
        await there.store.register(U1, None, attached=False)
        await there.store.append_many(U1, [{"é": [1, None]}, "\n"], time=1_700_000_000.25)
        await there.store.put(U1, lambda state: (2**70, state))
        client = await there.ask(resume(0))
        assert [await client.line() for _ in range(3)] == [
            '{"id":1,"data":{"é":[1,null]},"time":1700000000.25}'.encode(),
            b'{"id":2,"data":"\\n","time":1700000000.25}',
            b'{"id":3,"data":1180591620717411303424}',
        ]
    assert decoded == []


async def test_a_stream_ends_when_the_session_is_finished(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        client = await there.ask(fed())
        await wait_all_tasks_blocked()
        await there.store.append(U1, 1)
        assert await client.hear_ids(1) == [1]
        await there.store.finish(U1)
        assert await client.rest() == []
        assert await (await there.ask(resume(1))).rest() == []


async def test_a_stream_ends_behind_data_that_is_final(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed(final_key="last")) as there:
        client = await there.ask(fed())
        await wait_all_tasks_blocked()
        await there.store.append_many(U1, [{"n": 1}, {"n": 2, "last": True}])
        assert [message["id"] for message in await client.rest()] == [1, 2]


async def test_a_live_stream_acknowledges_resumes_and_goes_on(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        client = await there.ask(fed())
        await wait_all_tasks_blocked()
        await there.store.append_many(U1, list("abcd"))
        await client.hear_ids(4)
        await client.say(ack(3))
        await client.hang_up()
        await there.all_left()
        await there.store.append(U1, "e")
        again = await there.ask(resume(3))
        assert [(await again.hear())["data"] for _ in range(2)] == ["d", "e"]


@pytest.mark.clause("restream-G06")
async def test_what_somebody_appends_to_a_session_that_is_generated_makes_no_gap(autojump_clock: MockClock) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(5))
        await client.hear_ids(2)
        await there.store.append(U1, {"value": 0})
        assert [message["id"] for message in await client.rest()] == [3, 4, 5, 6]


async def test_another_process_s_append_reaches_the_stream(schema: str) -> None:
    async with open_store(schema) as store, open_store(schema) as elsewhere:
        async with place(store, application=restream.Fed()) as there:
            client = await there.ask(fed())
            while not await elsewhere.sessions():  # noqa: ASYNC110 - another connection to the database
                await trio.sleep(0.01)
            with trio.fail_after(60):
                for n in range(5):
                    await elsewhere.append(U1, n)
                    assert (await client.hear())["data"] == n


@pytest.mark.requirement("R-08")
async def test_a_feeder_can_wait_for_room(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time, limits=StoreLimits(messages=10)) as store:
        async with place(store, application=restream.Fed()) as there, trio.open_nursery() as nursery:
            client = await there.ask(fed())
            await wait_all_tasks_blocked()

            async def feed() -> None:
                for n in range(100):
                    await store.wait_room(U1)
                    await store.append(U1, n)

            nursery.start_soon(feed)
            for id in range(1, 101):
                assert (await client.hear())["id"] == id
                await client.say(ack(id))
