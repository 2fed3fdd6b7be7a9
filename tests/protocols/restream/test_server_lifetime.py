"""The ends of a server's connections and sessions: takeover, absence, deadlines, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store
from muxkit.storage import StoreFailed
from tests.protocols.restream._server_clients import U1, U2, Client, begin, place, resume

if TYPE_CHECKING:
    from trio.testing import MockClock

TINY = 256  # bytes of a link that is soon full


# --- two connections of one session


@pytest.mark.clause("restream-T02")
async def test_a_newer_connection_takes_the_session_over_and_the_older_is_told(autojump_clock: MockClock) -> None:
    async with place(pace=10.0) as there:
        old = await there.ask(begin(50))
        assert await old.hear_ids(3) == [1, 2, 3]
        new = await there.ask(resume(3))
        assert await new.hear_ids(2) == [4, 5]
        *_, last = await old.rest()
        assert last == {"error": f"session {U1} was taken over by a newer connection", "code": "busy"}
        assert await new.hear_ids(45) == list(range(6, 51))


@pytest.mark.clause("restream-T02")
async def test_an_older_connection_that_reads_nothing_does_not_keep_the_newer_waiting(
    autojump_clock: MockClock,
) -> None:
    async with place(linger=2.0) as there:
        old = await there.ask(begin(60_000), capacity=TINY)
        await old.hear_ids(1)
        new = await there.ask(resume(1))
        assert await new.hear_ids(1) == [2]
        began = trio.current_time()
        with trio.fail_after(10):
            while there.service.connections > 1:  # noqa: ASYNC110 - on a virtual clock
                await trio.sleep(0.1)
        assert trio.current_time() - began <= 2.2
        assert await new.hear_ids(1) == [3]


@pytest.mark.clause("restream-T02")
async def test_by_the_letter_the_second_connection_gets_the_error(autojump_clock: MockClock) -> None:
    async with place(takeover=False, pace=10.0) as there:
        old = await there.ask(begin(5))
        assert await old.hear_ids(2) == [1, 2]
        assert "has an open connection" in await (await there.ask(resume(2))).error()
        assert "has an open connection" in await (await there.ask(begin(5))).error()
        assert await old.hear_ids(3) == [3, 4, 5]
        await old.rest()
        await there.all_left()
        assert await (await there.ask(resume(4))).hear_ids(1) == [5]


async def test_whoever_asks_for_what_cannot_be_had_takes_nothing_over(autojump_clock: MockClock) -> None:
    async with place(pace=10.0) as there:
        old = await there.ask(begin(5))
        await old.hear_ids(1)
        assert "beyond" in await (await there.ask(resume(4))).error()
        assert "other params" in await (await there.ask(begin(6))).error()
        assert await old.hear_ids(4) == [2, 3, 4, 5]


async def test_of_many_connections_at_once_the_last_one_has_the_session(autojump_clock: MockClock) -> None:
    async with place(pace=10.0) as there:
        clients = [await there.ask(begin(20)) for _ in range(10)]
        ends: list[dict[str, object]] = []

        async def read(client: Client) -> None:
            ends.append((await client.rest())[-1])

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(read, client)
        assert sum("error" in end for end in ends) == 9
        assert sum(end.get("id") == 20 for end in ends) == 1


async def test_a_request_that_its_client_has_abandoned_takes_nothing_over(autojump_clock: MockClock) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(5))
        await client.hear_ids(1)
        late = there.connect()
        await late.say(resume(0))
        await late.hang_up()
        assert await client.hear_ids(4) == [2, 3, 4, 5]
        assert (await there.store.status(U1)).epoch == 1


async def test_the_connection_that_came_later_wins_whichever_the_store_serves_first(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time) as opened:
        real, pauses = opened.attach, [3.0, 0.0]

        async def attach(uuid: str, **options: bool) -> object:
            await trio.sleep(pauses.pop(0))
            return await real(uuid, **options)

        opened.attach = attach  # type: ignore[assignment, method-assign]
        async with place(opened, pace=10.0) as there:
            await (await there.ask(begin(9))).rest()
            await there.all_left()
            slow = await there.ask(resume(0))
            await trio.sleep(1.0)
            late = await there.ask(resume(0))
            assert [message["id"] for message in await late.rest()] == list(range(1, 10))
            assert "taken over" in (await slow.rest())[-1]["error"]


async def test_a_connection_that_was_there_before_the_stream_s_own_takes_nothing_over(
    autojump_clock: MockClock,
) -> None:
    async with place(pace=10.0) as there:
        early = there.connect()
        await wait_all_tasks_blocked()
        client = await there.ask(begin(5))
        await client.hear_ids(1)
        await early.say(resume(0))
        assert "taken over" in await early.error()
        assert await client.hear_ids(4) == [2, 3, 4, 5]


# --- absence


@pytest.mark.clause("restream-C07", "restream-I11", "restream-S25")
@pytest.mark.requirement("R-59")
async def test_a_session_outlives_its_connection_by_thirty_seconds_and_a_return_calls_that_off(
    autojump_clock: MockClock,
) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(60))
        await client.hear_ids(2)
        await client.hang_up()
        await trio.sleep(29.0)
        client = await there.ask(resume(2))
        await client.hear_ids(1)
        await client.hang_up()
        await trio.sleep(29.9)
        assert (await there.store.status(U1)).head > 2
        await trio.sleep(0.2)
        assert "expired" in await (await there.ask(resume(3))).error()
        await trio.sleep(10.0)
        assert await there.store.sessions() == []
        assert "is not known" in await (await there.ask(resume(3))).error()


async def test_the_time_of_absence_may_be_hours(autojump_clock: MockClock) -> None:
    async with place(expiry=7200.0) as there:
        await (await there.ask(begin(3))).rest()
        await trio.sleep(7190.0)
        assert await (await there.ask(resume(2))).hear_ids(1) == [3]


@pytest.mark.clause("restream-I11")
async def test_a_session_with_a_connection_does_not_expire(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        client = await there.ask(begin())
        await trio.sleep(3600.0)
        await there.store.append(U1, "late")
        assert (await client.hear())["data"] == "late"


async def test_a_store_that_could_not_be_told_of_an_absence_is_told_later(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time) as opened:
        told, real = 0, opened.disconnect

        async def disconnect(uuid: str | UUID, *, epoch: int | None = None) -> None:
            nonlocal told
            told += 1
            if told < 3:
                raise StoreFailed("no disk")
            await real(uuid, epoch=epoch)

        opened.disconnect = disconnect  # type: ignore[method-assign]
        async with place(opened) as there:
            await (await there.ask(begin(3))).rest()
            await there.all_left()
            assert (await opened.status(U1)).attached
            await trio.sleep(11.0)
            assert not (await opened.status(U1)).attached
            assert told == 3


@pytest.mark.requirement("R-31")
async def test_a_client_that_is_gone_while_the_store_still_registers_leaves_no_session_attached(
    autojump_clock: MockClock,
) -> None:
    async with open_store("memory:", now=trio.current_time) as opened:
        real = opened.register

        async def register(uuid: str, state: object, **options: object) -> object:
            status = await real(uuid, state, **options)  # type: ignore[arg-type]
            await trio.sleep(3.0)
            return status

        opened.register = register  # type: ignore[assignment, method-assign]
        async with place(opened) as there:
            client = await there.ask(begin(3))
            await trio.sleep(1.0)
            await client.hang_up()
            await trio.sleep(1.0)
            assert (await opened.status(U1)).attached
            await trio.sleep(2.0)
            assert not (await opened.status(U1)).attached


async def test_a_client_whose_store_does_not_answer_is_hung_up_on_and_may_go_elsewhere(
    autojump_clock: MockClock,
) -> None:
    async with open_store("memory:", now=trio.current_time) as opened:

        async def register(uuid: str, state: object, **options: object) -> object:
            await trio.sleep_forever()

        opened.register = register  # type: ignore[assignment, method-assign]
        async with place(opened) as there:
            assert await (await there.ask(begin(3))).rest() == []
            assert 30.0 < trio.current_time() < 41.0


# --- those who say nothing, or too little


@pytest.mark.requirement("R-13")
async def test_a_client_that_says_nothing_is_told_so_and_closed(autojump_clock: MockClock) -> None:
    async with place(limits=Limits(handshake=3.0)) as there:
        client, began = there.connect(), trio.current_time()
        assert "no first line within 3.0 s" in await client.error()
        assert trio.current_time() - began == pytest.approx(3.0)


@pytest.mark.requirement("R-13", "R-29")
async def test_a_first_line_that_dribbles_ends_in_time(autojump_clock: MockClock) -> None:
    async with place(limits=Limits(handshake=3.0)) as there:
        client, began = there.connect(), trio.current_time()
        for _ in range(29):
            await client.say(b" ")
            await trio.sleep(0.1)
        assert "no first line" in await client.error()
        assert trio.current_time() - began == pytest.approx(3.0)


@pytest.mark.requirement("R-13")
async def test_the_oldest_silent_connections_give_way_and_a_good_client_is_served(autojump_clock: MockClock) -> None:
    async with place(limits=Limits(half_open=25)) as there:
        silent = [there.connect() for _ in range(50)]
        await wait_all_tasks_blocked()
        client = await there.ask(begin(3))
        assert await client.hear_ids(3) == [1, 2, 3]
        assert trio.current_time() < 3.0
        await trio.sleep(3.0)  # for those that were told why they had to go
        assert there.service.connections <= 26
        # Which of them are the oldest is a matter of the order in which Trio ran their tasks.
        reasons = [await each.error() for each in silent]
        assert sum("the server is full" in reason for reason in reasons) >= 25


@pytest.mark.requirement("R-13")
async def test_a_first_line_without_end_is_refused_when_it_is_too_long(autojump_clock: MockClock) -> None:
    async with place(config=restream.ServerConfig(digits=10, line=100)) as there:
        client = await there.ask(b"x" * 5000)
        assert "a line of more than" in await client.error()


@pytest.mark.requirement("R-29")
async def test_an_ack_that_is_begun_and_not_finished_ends_the_connection(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed(), limits=Limits(stall=4.0)) as there:
        client = await there.ask(begin())
        await trio.sleep(100.0)
        await client.say(b'{"uuid"')
        assert "while a line is unfinished" in await client.error()


# --- the end


@pytest.mark.requirement("R-42")
async def test_a_shutdown_ends_every_stream_behind_a_whole_message(autojump_clock: MockClock) -> None:
    async with place() as there:
        values, messages = await there.ask({}), await there.ask(begin(60_000))
        silent = there.connect()
        await values.hear()
        await messages.hear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_shut_down, there.service, 5.0)
            assert all(list(message) == ["data"] for message in await values.rest())
            ids = [message["id"] for message in await messages.rest()]
            assert await silent.rest() == []
        assert ids == list(range(2, len(ids) + 2))
        assert trio.current_time() < 1.0
        assert not (await there.store.status(U1)).attached


@pytest.mark.requirement("R-42")
async def test_a_shutdown_cuts_whoever_does_not_read_when_the_grace_is_over(autojump_clock: MockClock) -> None:
    async with place() as there:
        await (await there.ask({}, capacity=TINY)).hear()
        await there.service.shutdown(grace=3.0)
        assert trio.current_time() == pytest.approx(3.0, abs=0.1)
        await there.all_left()


async def test_during_a_shutdown_newcomers_are_neither_served_nor_sent_away(autojump_clock: MockClock) -> None:
    async with place() as there:
        await (await there.ask({}, capacity=TINY)).hear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_shut_down, there.service, 3.0)
            await trio.sleep(1.0)
            client = await there.ask(begin(3, U2))
            with trio.move_on_after(1.0) as waited:
                await client.line()
            assert waited.cancelled_caught
        assert await there.store.sessions() == []


async def _has_ended(client: Client) -> bool:
    with trio.move_on_after(0.01):
        return await client.line() == b""
    return False


async def _shut_down(service: restream.Service, grace: float) -> None:
    await service.shutdown(grace=grace)


@pytest.mark.requirement("R-38")
async def test_a_client_that_does_not_hang_up_after_the_last_message_is_left_in_time(autojump_clock: MockClock) -> None:
    async with place(linger=2.0) as there:
        client = await there.ask(begin(3))
        assert await client.hear_ids(3) == [1, 2, 3]
        assert await client.line() == b""
        began = trio.current_time()
        await there.all_left()
        assert trio.current_time() - began <= 2.1
        assert not (await there.store.status(U1)).attached


async def test_a_slow_reader_gets_the_end_however_long_it_takes(autojump_clock: MockClock) -> None:
    async with place(linger=2.0) as there:
        client = await there.ask(begin(200), capacity=TINY)
        for id in range(1, 201):
            assert (await client.hear())["id"] == id
            await trio.sleep(1.0)
        assert await client.rest() == []
