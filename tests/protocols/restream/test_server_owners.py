"""Two servers on one PostgreSQL: the owner of a session, and how the other server learns of a takeover."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.server import service
from muxkit.protocols.restream.server.sessions import StoredSession
from muxkit.protocols.restream.store import open_store
from tests.protocols.restream._server_clients import U1, Place, ack, begin, place, resume

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytest_plugins = ["tests.protocols.restream._postgres"]

TAKEN = {"error": f"session {U1} was taken over by a newer connection", "code": "busy"}


@asynccontextmanager
async def two_servers(schema: str, **options: Any) -> AsyncIterator[tuple[Place, Place]]:
    async with open_store(schema) as store, open_store(schema) as another:
        async with place(store, **options) as here, place(another, **options) as there:
            yield here, there


@pytest.mark.clause("restream-T02", "restream-S20")
async def test_a_client_that_comes_to_the_other_server_takes_its_session_along(schema: str) -> None:
    # The stream takes the first server 40 s, and the client of the second may hang up late.
    async with open_store(schema) as store, open_store(schema) as another:
        async with place(store, pace=10.0) as here, place(another, linger=60.0) as there:
            old = await here.ask(begin(400))
            lines = [await old.line() for _ in range(3)]
            new = await there.ask(resume(1))
            assert [await new.line() for _ in range(2)] == lines[1:]
            assert (await old.rest())[-1] == TAKEN
            await new.say(ack(3))
            assert [message["id"] for message in await new.rest()] == list(range(4, 401))


async def test_a_stale_owner_that_waits_for_appends_is_told_at_once(schema: str) -> None:
    async with two_servers(schema, application=restream.Fed()) as (here, there):
        old = await here.ask(begin())
        await _is_registered(here)
        await here.store.append(U1, 1)
        assert await old.hear_ids(1) == [1]
        new = await there.ask(resume(1))
        with trio.fail_after(60):
            assert await old.rest() == [TAKEN]
            await here.store.append(U1, 2)
            assert await new.hear_ids(1) == [2]


@pytest.mark.requirement("R-42")
async def test_a_stale_owner_whose_client_does_not_read_is_found_out_too(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BLOCKED_TIMEOUT", 0.05)
    async with two_servers(schema, linger=0.2) as (here, there):
        old = await here.ask(begin(60_000), capacity=100)
        await old.hear_ids(1)
        await _is_blocked(here)
        new = await there.ask(resume(1))
        assert await new.hear_ids(1) == [2]
        with trio.fail_after(60):
            while here.service.connections:  # noqa: ASYNC110 - the other server's process is not ours to hook into
                await trio.sleep(0.01)
        assert await new.hear_ids(1) == [3]


async def test_a_stale_owner_that_replays_what_the_newer_one_s_client_has_acknowledged_says_why_it_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_store("memory:", now=trio.current_time) as store:
        async with place(store, pace=10.0) as here, place(store) as there:
            await (await there.ask(begin(50))).rest()
            await there.all_left()
            old = await here.ask(resume(0))
            await old.hear_ids(3)
            new = await there.ask(resume(3))
            await new.hear_ids(47)
            await new.say(ack(50))
            assert (await old.rest())[-1] == TAKEN


@pytest.mark.parametrize("application", [None, restream.Fed()])
async def test_a_takeover_by_somebody_who_leaves_at_once_is_undone(
    application: Any,  # noqa: ANN401
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_left, reclaim = trio.Event(), StoredSession.reclaim

    async def reclaim_then(session: StoredSession) -> None:
        await has_left.wait()  # "at once" is before the next look, however slow the database is
        await reclaim(session)

    monkeypatch.setattr(StoredSession, "reclaim", reclaim_then)
    async with two_servers(schema, application=application, pace=20.0) as (here, there):
        client = await here.ask(begin(2000))  # for 100 s
        await _is_registered(here)
        if application is not None:
            await here.store.append_many(U1, [1, 2])
        assert await client.hear_ids(2) == [1, 2]
        usurper = await there.store.attach(U1)
        await there.store.disconnect(U1, epoch=usurper.epoch)
        head = (await there.store.status(U1)).head
        has_left.set()
        if application is not None:
            await here.store.append_many(U1, [3, 4, 5, 6, 7, 8])
        assert await client.hear_ids(head + 4) == list(range(3, head + 7))
        assert (await here.store.status(U1)).epoch == 3


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S31")
async def test_an_ack_that_came_during_such_a_takeover_is_not_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    """The client does not repeat it on this connection, and a full session would wait for it."""
    async with open_store("memory:", now=trio.current_time) as store, place(store, pace=10.0) as here:
        client = await here.ask(begin(50))
        await client.hear_ids(3)
        usurper = await store.attach(U1)
        await client.say(ack(3))
        await trio.testing.wait_all_tasks_blocked()
        assert (await store.status(U1)).acknowledged == 0
        await store.disconnect(U1, epoch=usurper.epoch)
        await client.hear_ids(10)
        assert (await store.status(U1)).acknowledged == 3


async def test_an_absence_begins_only_when_the_newest_owner_s_client_is_gone(schema: str) -> None:
    async with two_servers(schema, pace=100.0) as (here, there):
        old = await here.ask(begin(60_000))  # for 600 s
        await old.hear_ids(1)
        new = await there.ask(resume(1))
        await new.hear_ids(1)
        await old.rest()
        await here.all_left()
        assert (await here.store.status(U1)).attached
        await new.hang_up()
        await there.all_left()
        assert not (await here.store.status(U1)).attached


async def _is_blocked(here: Place) -> None:
    """Wait until no message is made."""
    before, made = -1, 0
    with trio.fail_after(60):
        while before != made:
            before = made
            await trio.sleep(0.3)
            made = (await here.store.status(U1)).head


async def _is_registered(here: Place) -> None:
    with trio.fail_after(60):
        while not await here.store.sessions():  # noqa: ASYNC110 - in a database
            await trio.sleep(0.01)
