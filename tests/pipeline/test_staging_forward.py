"""Each committed row becomes one message of a restream session, whichever side is stopped, at any moment."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from muxkit.pipeline import Encoding, Staging, forward, make_block, open_staging
from muxkit.pipeline.staging.forward import NotForwarding
from muxkit.protocols import restream
from muxkit.protocols.restream.store import StoreLimits
from muxkit.storage import StoreFailed
from muxkit.testing import cancel_sweep
from tests.pipeline._staging_world import DAY, KEY, backend_of, on_backend, rows, stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from muxkit.protocols.restream.store import SessionStore

    AnyStore = SessionStore[Any, Any]

pytest_plugins = ["tests.pipeline._staging_fixtures"]

UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"


async def committed(store: Staging, batch: int, content: list[bytes], encoding: Encoding) -> None:
    await store.begin(f"t{batch}", KEY, batch, encoding, DAY)
    await store.put(f"t{batch}", KEY, batch, [make_block(0, content)])
    await store.prepare(f"t{batch}", KEY, batch, len(content))
    await store.commit(KEY, batch, {f"t{batch}": len(content)})


async def messages(sessions: AnyStore, count: int) -> list[object]:
    """So many messages of the session, from the first, as they become."""
    found: list[object] = []
    while len(found) < count:
        await sessions.wait(UUID, len(found))
        found += [message.data for message in await sessions.replay(UUID, len(found), most_bytes=1 << 24)]
    assert (await sessions.status(UUID)).head == count
    return found


@asynccontextmanager
async def forwarding(store: Staging, sessions: AnyStore) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(forward, store, KEY.stream, sessions, UUID)
        await registered(sessions)
        yield
        nursery.cancel_scope.cancel()


async def registered(sessions: AnyStore) -> None:
    while UUID not in {status.uuid for status in await sessions.sessions()}:
        await trio.lowlevel.checkpoint()


async def test_rows_are_values_strings_or_bytes_as_their_writer_said() -> None:
    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        await committed(store, 0, [b'{"a":1}', b"[1.5,null]", b'"x"'], Encoding.JSON)
        await committed(store, 1, ["ü".encode(), b""], Encoding.TEXT)
        await committed(store, 2, [b"\x00\xff"], Encoding.BINARY)
        await committed(store, 3, [b"{"], Encoding.JSON)
        await committed(store, 4, [b"\xff"], Encoding.TEXT)
        await committed(store, 5, [restream.Record(None, b"k").encode(), b"no record"], Encoding.RECORD)
        async with forwarding(store, sessions):
            assert await messages(sessions, 10) == [
                {"a": 1},
                [1.5, None],
                "x",
                "ü",
                "",
                restream.Record(b"\x00\xff"),
                restream.Record(b"{"),
                restream.Record(b"\xff"),
                restream.Record(None, b"k"),
                restream.Record(b"no record"),
            ]
            assert all(message.time is not None for message in await sessions.replay(UUID, 0))


async def test_a_client_of_restream_reads_what_spark_has_committed() -> None:
    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        async with forwarding(store, sessions), trio.open_nursery() as nursery:
            serve = partial(restream.serve, "restream+tcp://127.0.0.1:0", sessions, application=restream.Fed())
            served = await nursery.start(serve)
            async with restream.stream(served.url, uuid=UUID) as stream:
                for batch in range(3):
                    await committed(store, batch, [b"%d" % number for number in range(batch, batch + 2)], Encoding.JSON)
                    for number in range(batch, batch + 2):
                        assert (await stream.receive()).data == number
            nursery.cancel_scope.cancel()


async def test_what_is_forwarded_is_trimmed_from_the_stream() -> None:
    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        async with forwarding(store, sessions):
            await committed(store, 0, rows(0, 10), Encoding.TEXT)
            await messages(sessions, 10)
            await trio.testing.wait_all_tasks_blocked()
            assert (await store.progress(KEY)).trimmed == 10


async def test_a_session_that_is_full_is_waited_for() -> None:
    limits = StoreLimits(messages=4)
    async with open_staging("memory:") as store, restream.open_store("memory:", limits=limits) as sessions:
        await committed(store, 0, rows(0, 10), Encoding.TEXT)
        async with forwarding(store, sessions):
            for acknowledged in (4, 8):
                await trio.testing.wait_all_tasks_blocked()
                assert (await sessions.status(UUID)).head == acknowledged
                await sessions.ack(UUID, acknowledged)
            await trio.testing.wait_all_tasks_blocked()
            assert [each.data for each in await sessions.replay(UUID, 8)] == ["00000008", "00000009"]


@pytest.mark.requirement("R-31", "R-54")
async def test_stopped_at_any_moment_it_forwards_each_row_once() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Callable[[], Awaitable[object]]]:
        async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
            await committed(store, 0, rows(0, 5), Encoding.TEXT)
            await committed(store, 1, rows(5, 5), Encoding.TEXT)

            async def forward_ten() -> None:
                async with forwarding(store, sessions):
                    await messages(sessions, 10)

            yield forward_ten
            async with forwarding(store, sessions):
                await committed(store, 2, rows(10, 5), Encoding.TEXT)
                assert await messages(sessions, 15) == [row.decode() for row in rows(0, 15)]

    assert await cancel_sweep(scenario) > 10


async def test_two_that_forward_the_same_disturb_each_other_and_repeat_nothing() -> None:
    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        async with forwarding(store, sessions), forwarding(store, sessions):
            for batch in range(20):
                await committed(store, batch, rows(5 * batch, 5), Encoding.TEXT)
            assert await messages(sessions, 100) == [row.decode() for row in rows(0, 100)]


async def test_a_session_with_messages_of_its_own_is_left_alone() -> None:
    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        await committed(store, 0, rows(0, 5), Encoding.TEXT)
        await sessions.register(UUID, {"of": "another"}, attached=False)
        with pytest.raises(NotForwarding, match=f"session {UUID} has messages of its own"):
            await forward(store, KEY.stream, sessions, UUID)
        assert (await sessions.status(UUID)).head == 0


async def test_trouble_with_a_store_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    class Troubled(Staging):
        failures = 3

        async def head(self, stream: str) -> int:
            if self.failures:
                self.failures -= 1
                raise StoreFailed("the disk failed")
            return await super().head(stream)

    async with open_staging("memory:") as store, restream.open_store("memory:") as sessions:
        await committed(store, 0, rows(0, 5), Encoding.TEXT)
        troubled = on_backend(Troubled, store, backend_of(store))
        async with forwarding(troubled, sessions):
            assert len(await messages(sessions, 5)) == 5
        assert trio.current_time() >= 3 * 5.0 - 1e-6


async def test_both_stores_may_be_files(staging_path: Path) -> None:
    where = f"sqlite:{staging_path}"
    for batch in range(3):
        async with open_staging(where) as store, restream.open_store(f"{where}.sessions") as sessions:
            await store.commit(KEY, batch, await stage(store, f"t{batch}", batch, rows(5 * batch, 5)))
            async with forwarding(store, sessions):
                assert len(await messages(sessions, 5 * batch + 5)) == 5 * batch + 5
