"""A failure of the store, the application or a client ends one connection; the others continue."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.server.service import shown
from muxkit.protocols.restream.store import StoreLimits, open_store
from muxkit.storage import StoreCorrupt, StoreFailed, StoreFull
from muxkit_adapters import memory
from tests.protocols.restream._server_clients import U1, U2, Client, ack, begin, place, resume

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from trio.testing import MockClock

SECRET = "canary-7f3a"


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


@pytest.mark.requirement("R-57", "R-66")
@pytest.mark.parametrize("method", ["register", "attach", "put_many", "replay", "ack"])
async def test_a_client_waits_while_the_store_is_in_trouble_and_sees_nothing_of_it(
    method: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store("memory:", now=trio.current_time) as store:
        real, tries = getattr(store, method), 0

        async def fail(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            nonlocal tries
            tries += 1
            if trio.current_time() < 20.0:
                raise StoreFailed(f"the disk /srv/{SECRET} is gone")
            return await real(*arguments, **options)

        async with place(store, pace=10.0, linger=60.0) as there:
            first = await there.ask(begin(5, U2))
            assert await first.hear_ids(2) == [1, 2]
            await first.hang_up()
            await there.all_left()
            setattr(store, method, fail)
            client = await there.ask(begin(5) if method in ("register", "put_many") else resume(1, U2))
            got = await client.hear_ids(2)
            await client.say(ack(got[-1], U1 if method in ("register", "put_many") else U2))
            assert got + await client.hear_ids(5 - got[-1]) == list(range(got[0], 6))
            await trio.sleep(20.0)  # the store is well again, and the acknowledgement is stored
            await client.hang_up()
            await there.all_left()
            assert [status.acknowledged for status in await store.sessions() if status.head == 5] == [got[-1]]
    assert 10 < tries < 30  # the pauses double up to two seconds
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) < 6
    assert f"the disk /srv/{SECRET} is gone" in told[0].getMessage()


async def test_a_client_is_hung_up_on_without_an_error_line_when_the_trouble_lasts(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time) as store:

        async def fail(*arguments: object, **options: object) -> object:
            raise StoreFailed("no disk")

        store.register = fail  # type: ignore[assignment, method-assign]
        async with place(store) as there:
            assert await (await there.ask(begin())).rest() == []
            assert trio.current_time() == pytest.approx(30.0, abs=3.0)


async def test_a_store_that_is_damaged_is_an_error_line_that_is_final(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time) as store:

        async def fail(*arguments: object, **options: object) -> object:
            raise StoreCorrupt(f"the rows in /srv/{SECRET} are not what was written")

        store.register = fail  # type: ignore[assignment, method-assign]
        async with place(store) as there:
            line = {"error": "the server cannot use its session store", "code": "failed"}
            assert await (await there.ask(begin())).rest() == [line]
            assert trio.current_time() < 1.0


@pytest.mark.requirement("R-57")
async def test_a_session_that_is_full_waits_for_an_ack_and_then_gives_up(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time, limits=StoreLimits(messages=10)) as store:
        async with place(store) as there:
            client = await there.ask(begin(50))
            assert await client.hear_ids(10) == list(range(1, 11))
            await trio.sleep(20.0)
            await client.say(ack(4))
            assert await client.hear_ids(4) == [11, 12, 13, 14]
            began = trio.current_time()
            assert "no room for more messages" in await client.error()
            assert trio.current_time() - began == pytest.approx(30.0, abs=0.1)


@pytest.mark.requirement("R-57")
async def test_a_message_that_never_fits_is_an_error_line_at_once(autojump_clock: MockClock) -> None:
    class Long(restream.Numbers):
        def step(self, state: Any) -> Any:  # noqa: ANN401
            return {"value": "x" * 2000}, state

    async with open_store("memory:", limits=StoreLimits(message_bytes=1000)) as store:
        async with place(store, application=Long()) as there:
            line = {"error": "the server's store has no room for a value of this size", "code": "failed"}
            assert await (await there.ask(begin(5))).rest() == [line]


@pytest.mark.requirement("R-57")
async def test_a_stream_waits_for_room_in_a_full_store_and_goes_on_with_an_ack(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time, limits=StoreLimits(bytes=10_000)) as store:
        async with place(store) as there:
            client = await there.ask(begin(500))
            got: list[int] = []
            while len(got) < 500:
                with trio.move_on_after(10.0):
                    got += await client.hear_ids(1)
                    continue
                await client.say(ack(got[-1]))
            assert got == list(range(1, 501))


@pytest.mark.requirement("R-36", "R-66")
@pytest.mark.clause("restream-A05")
async def test_an_application_that_fails_ends_its_stream_and_its_words_stay_inside(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(restream.Numbers):
        broken = True

        def step(self, state: Any) -> Any:  # noqa: ANN401
            if self.broken and state["count"] == 3:
                raise ValueError(SECRET)
            return super().step(state)

    broken = Broken()
    async with place(application=broken, pace=10.0) as there:
        client = await there.ask(begin(5))
        assert await client.hear_ids(2) == [1, 2]
        assert await client.error() == "the server failed"
        assert list(await (await there.ask({})).hear()) == ["data"]
        broken.broken = False
        assert await (await there.ask(resume(2))).hear_ids(3) == [3, 4, 5]
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.requirement("R-66")
async def test_data_that_json_cannot_hold_ends_the_stream_and_is_not_quoted(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(restream.Numbers):
        def step(self, state: Any) -> Any:  # noqa: ANN401
            return {SECRET: object()}, state

    async with place(application=Odd()) as there:
        assert await (await there.ask(begin(5))).error() == "the server failed"
    assert SECRET not in caplog.text


@pytest.mark.requirement("R-68")
async def test_nothing_that_a_terminal_would_obey_gets_into_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        ours, theirs = memory.pair()
        theirs.peer = "tcp \x1b[31mred\u202e"
        there.nursery.start_soon(there.service.handle, theirs)
        client = Client(ours)
        await client.say(b'{"\x1b[2J\xc2\x9b": \x07\n')
        await client.error()
    assert "broke a rule" in caplog.text
    assert all(sign.isprintable() or sign == "\n" for sign in caplog.text)


@pytest.mark.requirement("R-66")
def test_of_a_session_s_uuid_the_log_keeps_the_beginning() -> None:
    assert shown(f"session {U1} has expired") == "session bf575c35-… has expired"
    assert shown("a\nb\x1b") == "a\\nb\\x1b"


async def test_failures_that_come_fast_are_logged_once_a_second(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store("memory:", now=trio.current_time) as store:

        async def fail(*arguments: object, **options: object) -> object:
            raise StoreCorrupt("no disk")

        store.register = fail  # type: ignore[assignment, method-assign]
        async with place(store) as there:
            for _ in range(50):
                await (await there.ask(begin())).error()
            assert caplog.text.count("no disk") == 1
            await trio.sleep(1.5)
            await (await there.ask(begin())).error()
            assert caplog.text.count("no disk") == 2


async def test_sweeping_goes_on_after_the_store_has_failed(autojump_clock: MockClock) -> None:
    async with open_store("memory:", now=trio.current_time) as store:
        real, calls = store.expire, 0

        async def expire(now: float | None = None) -> int:
            nonlocal calls
            calls += 1
            if calls < 10:
                raise StoreFull("no disk")
            return await real(now)

        store.expire = expire  # type: ignore[method-assign]
        async with place(store) as there:
            await (await there.ask(begin(3))).rest()
            await trio.sleep(100.0)
            assert await store.sessions() == []
            assert calls >= 10


@pytest.mark.requirement("R-40")
@pytest.mark.parametrize("call", range(1, 8))
async def test_a_transport_that_fails_at_any_call_leaves_nothing_behind(
    call: int, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    class Failing(memory.MemoryStream):
        def send_nowait(self, buffers: Any) -> int:  # noqa: ANN401
            self._count()
            return super().send_nowait(buffers)

        async def send_buffers(self, buffers: Any) -> None:  # noqa: ANN401
            self._count()
            await super().send_buffers(buffers)

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            self._count()
            return await super().receive_some(max_bytes)

        def _count(self) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise trio.BrokenResourceError("cut by the test")

    async with place(pace=100.0) as there:
        ours, theirs = memory.pair()
        theirs.__class__ = Failing
        there.nursery.start_soon(there.service.handle, theirs)
        client = Client(ours)
        with trio.move_on_after(5.0):
            await client.say(begin(5))
            await client.rest()
        await there.all_left()
        sessions = await there.store.sessions()
        assert not any(status.attached for status in sessions)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.requirement("R-57")
async def test_a_full_sqlite_file_is_read_to_its_end_and_the_producer_goes_on(tmp_path: Path) -> None:
    count = 3000
    async with open_store(f"sqlite:{tmp_path}/sessions.db", limits=StoreLimits(bytes=100_000)) as store:
        async with place(store) as there:

            @asynccontextmanager
            async def dial() -> AsyncIterator[trio.abc.Stream]:
                async with there.connect().stream as stream:
                    yield stream

            config = restream.ClientConfig(ack_every=None)
            async with restream.stream(dial, {"count": count}, final_key="crc", config=config) as reading:
                got: list[int] = []
                fillings = 0
                while len(got) < count:
                    with trio.move_on_after(0.5):
                        got.append((await reading.receive()).id)
                        continue
                    fillings += 1
                    assert list(await (await there.ask({})).hear()) == ["data"]
                    reading.acknowledge()
                assert got == list(range(1, count + 1))
                assert fillings
                assert reading.connections == 1
