"""Each row is there once after the server is killed between any two steps, or between a step and its answer."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import Encoding, StagingClient
from muxkit.runtime import Backoff
from tests.pipeline._staging_process import staging_process
from tests.pipeline._staging_world import KEY, Given, everything, place_of, rows, write

if TYPE_CHECKING:
    from tests.pipeline._staging_world import Place

pytest_plugins = ["tests.pipeline._staging_fixtures", "tests.protocols.restream._postgres"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it kills with a signal")

QUICK = Backoff(first=0.02, most=0.1)
ENOUGH = 4000  # rows that do not fit into the window by far


@pytest.mark.requirement("R-54")
async def test_a_server_that_is_killed_in_each_phase_has_each_row_once(lasting_place: Place) -> None:
    with staging_process(lasting_place.where) as server:
        server.start()

        def restart() -> None:
            server.kill()
            server.start()

        def in_the_middle(taken: int) -> None:
            if taken == ENOUGH // 2:
                restart()

        client = StagingClient(server.url, window=4096, backoff=QUICK)
        given = Given(rows(0, ENOUGH), each=in_the_middle)
        written = await client.write("a", KEY, 0, given, encoding=Encoding.BINARY)
        assert (written.rows, written.wanted) == (ENOUGH, True)
        restart()  # between the phases
        assert not (await client.commit(KEY, 0, {"a": ENOUGH})).duplicate
        restart()  # behind them
        assert (await client.commit(KEY, 0, {"a": ENOUGH})).duplicate
        await client.commit(KEY, 1, await write(client, "b", 1, rows(ENOUGH, 10)))
    async with lasting_place.open() as store:
        assert await everything(store) == rows(0, ENOUGH + 10)


@pytest.mark.requirement("R-54")
@pytest.mark.parametrize(
    ("kind", "moment", "when"),
    [
        ("sqlite", "put 2", "after"),
        ("sqlite", "prepare 1", "after"),
        ("sqlite", "commit 1", "before"),
        ("sqlite", "commit 1", "after"),
        ("postgres", "commit 1", "after"),
        pytest.param("sqlite", "begin 1", "before", marks=pytest.mark.soak),
        pytest.param("sqlite", "begin 1", "after", marks=pytest.mark.soak),
        pytest.param("sqlite", "put 2", "before", marks=pytest.mark.soak),
        pytest.param("sqlite", "prepare 1", "before", marks=pytest.mark.soak),
        pytest.param("postgres", "begin 1", "after", marks=pytest.mark.soak),
        pytest.param("postgres", "put 2", "after", marks=pytest.mark.soak),
        pytest.param("postgres", "prepare 1", "after", marks=pytest.mark.soak),
        pytest.param("postgres", "commit 1", "before", marks=pytest.mark.soak),
    ],
)
async def test_a_server_that_dies_before_it_answers_is_asked_again(
    request: pytest.FixtureRequest, kind: str, moment: str, when: str
) -> None:
    lasting_place = place_of(request, kind)
    with staging_process(lasting_place.where) as server:
        server.start(*moment.split(), when)

        async def revive() -> None:
            assert await trio.to_thread.run_sync(server.ended, abandon_on_cancel=True) == -signal.SIGKILL
            await trio.to_thread.run_sync(server.start)

        client = StagingClient(server.url, window=4096, backoff=QUICK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revive)
            parts = await write(client, "a", 0, rows(0, ENOUGH))
            done = await client.commit(KEY, 0, parts)
        assert done.duplicate == (moment == "commit 1" and when == "after")
    async with lasting_place.open() as store:
        assert await everything(store) == rows(0, ENOUGH)
        assert (await store.progress(KEY)).transactions == 0
